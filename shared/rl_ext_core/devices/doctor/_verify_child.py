"""The program that tries one renderer: ``python -m rl_ext_core.devices.doctor._verify_child NAME DEVICE RENDER``."""

from __future__ import annotations

import inspect
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_ext_core.devices import _display
from rl_ext_core.devices._resolve import resolve
from rl_ext_core.devices._robosuite import import_robosuite
from rl_ext_core.devices.doctor import _processes
from rl_ext_core.devices.doctor._verify import MARK
from rl_ext_core.errors import DeviceUnavailableError, MissingDependencyError, RlExtError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_ext_core.devices.decision import Decision

    # The image, and what keeps its context alive.
    Drawn = tuple[Any, Any]

_MODEL = "<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>"
_SIDE = 64


def main() -> None:
    """Try the renderer; write what was decided, which shall be known if the driver ends this, and what was seen."""
    name, device, render = sys.argv[1:]
    try:
        decision = resolve(device, render=render, renderer=name)
        _tell(_decided(decision))
        _tell(_see(name, decision))
    except (ModuleNotFoundError, MissingDependencyError) as error:
        _tell({"failure": _said(error), "missing": True})
    except Exception as error:
        _tell({"failure": _said(error)})
    # What drivers and libraries do to an interpreter that ends is not what was asked.
    os._exit(0)


def _tell(seen: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(seen)}\n")
    sys.stdout.flush()


def _decided(decision: Decision) -> dict[str, Any]:
    return {
        "decided": decision.render,
        "uuid": decision.render_gpu.uuid if decision.render_gpu else None,
        "predicted": decision.egl.index if decision.egl else None,
    }


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, RlExtError) else f"{type(error).__name__}: {first}"


def _see(name: str, decision: Decision) -> dict[str, Any]:
    """Apply the decision, draw, and look at what has drawn."""
    # A process of another container may go by this number; it does so before, too.
    before = _processes.gpus_of(os.getpid())
    if name == "robosuite":
        import_robosuite(decision)
    else:
        decision.apply()
    strings: list[str] = []
    image, alive = _DRAW[name](lambda: strings.extend(_gl_strings()))
    if image.min() == image.max():
        raise DeviceUnavailableError("it drew an empty image")
    display = _display.of(name)
    after = _processes.gpus_of(os.getpid())
    del alive
    return {
        "gl_renderer": strings[0],
        "gl_vendor": strings[1],
        "egl": None if display is None else _display.index_of(display),
        "nvml": after if after and not before else None,
    }


def _gl_strings() -> tuple[str, str]:
    gl: Any = import_module("OpenGL.GL")
    return tuple((gl.glGetString(name) or b"").decode() for name in (gl.GL_RENDERER, gl.GL_VENDOR))  # type: ignore[return-value]


def _world() -> tuple[Any, Any]:
    mujoco: Any = import_module("mujoco")
    model = mujoco.MjModel.from_xml_string(_MODEL)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def _draw_mujoco(look: Callable[[], None]) -> Drawn:
    mujoco: Any = import_module("mujoco")
    model, data = _world()
    renderer = mujoco.Renderer(model, _SIDE, _SIDE)
    renderer.update_scene(data)
    image = renderer.render()
    look()
    return image, renderer


def _draw_gymnasium(look: Callable[[], None]) -> Drawn:
    rendering: Any = import_module("gymnasium.envs.mujoco.mujoco_rendering")
    # Releases before 1.0 take the size from the model.
    sized = "width" in inspect.signature(rendering.MujocoRenderer).parameters
    size = {"width": _SIDE, "height": _SIDE} if sized else {}
    renderer = rendering.MujocoRenderer(*_world(), None, **size)
    image = renderer.render("rgb_array")
    look()
    return image, renderer


def _draw_dm_control(look: Callable[[], None]) -> Drawn:
    """Draw in dm_control's context, in its thread. Its ``Physics`` reads many fields, which differ among mujoco's."""
    render: Any = import_module("dm_control._render")
    context = render.Renderer(_SIDE, _SIDE)
    with context.make_current() as thread:
        return thread.call(_drawn_here, look), context


def _drawn_here(look: Callable[[], None]) -> Any:
    mujoco: Any = import_module("mujoco")
    numpy: Any = import_module("numpy")
    model, data = _world()
    scene = mujoco.MjvScene(model, maxgeom=10)
    camera, options, scope = mujoco.MjvCamera(), mujoco.MjvOption(), mujoco.mjtCatBit.mjCAT_ALL
    mujoco.mjv_defaultFreeCamera(model, camera)
    mujoco.mjv_updateScene(model, data, options, mujoco.MjvPerturb(), camera, scope, scene)
    context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
    rectangle = mujoco.MjrRect(0, 0, _SIDE, _SIDE)
    mujoco.mjr_render(rectangle, scene, context)
    image = numpy.empty((_SIDE, _SIDE, 3), numpy.uint8)
    mujoco.mjr_readPixels(image, None, rectangle, context)
    look()
    return image


def _draw_robosuite(look: Callable[[], None]) -> Drawn:
    binding: Any = import_module("robosuite.utils.binding_utils")
    simulation = binding.MjSim.from_xml_string(_MODEL)
    context = binding.MjRenderContextOffscreen(simulation, device_id=-1, max_width=_SIDE, max_height=_SIDE)
    context.render(_SIDE, _SIDE, camera_id=-1)
    image = context.read_pixels(_SIDE, _SIDE)
    look()
    return image, context


_DRAW: dict[str, Callable[[Callable[[], None]], Drawn]] = {
    "mujoco": _draw_mujoco,
    "gymnasium": _draw_gymnasium,
    "dm_control": _draw_dm_control,
    "robosuite": _draw_robosuite,
}

if __name__ == "__main__":
    main()
