"""Test a renderer in a new interpreter, because a process keeps its first display.

The interpreter runs this module as a program: ``python -m rl_ext_core.devices._verify NAME DEVICE RENDER``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rl_ext_core.devices import _apply
from rl_ext_core.devices._resolve import resolve
from rl_ext_core.devices._robosuite import import_robosuite
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.inventory import NvmlUnavailableError, nvml_session
from rl_ext_core.errors import MissingDependencyError, RlExtError, install_line

TIMEOUT_S = 60.0
# Marks the results, because libraries print to the same stream.
_RESULT_PREFIX = "rl-ext saw: "
_SOFTWARE_NAMES = ("llvmpipe", "softpipe", "swrast", "software")
_MODEL = "<mujoco><worldbody><geom size='1'/></worldbody></mujoco>"
_IMAGE_SIZE = 64


@dataclass(frozen=True)
class Verification:
    """Result of testing one renderer in its own process.

    :param name: name of the renderer
    :param decided: where the decision renders: ``"gpu"``, ``"cpu"``, or empty if there was no decision
    :param uuid: UUID of the GPU in the decision, or None
    :param predicted: EGL index in the decision; None for OSMesa
    :param egl: EGL index of the created display; None if EGL was not used or did not report it
    :param gl_renderer: OpenGL's ``GL_RENDERER``; empty if no context was created
    :param gl_vendor: OpenGL's ``GL_VENDOR``
    :param nvml: UUIDs of the GPUs on which NVML lists the process; None if it lists it on none
    :param failure: how it failed; None if it rendered
    :param missing: whether it failed because a package is missing
    :param seconds: duration of the test
    """

    name: str
    decided: str = ""
    uuid: str | None = None
    predicted: int | None = None
    egl: int | None = None
    gl_renderer: str = ""
    gl_vendor: str = ""
    nvml: tuple[str, ...] | None = None
    failure: str | None = None
    missing: bool = False
    seconds: float = 0.0

    @property
    def problem(self) -> str | None:
        """The failure, or the difference from the decision, as one sentence; None if there is none."""
        if self.failure is not None:
            return self.failure
        if self.decided == "gpu" and any(word in self.gl_renderer.lower() for word in _SOFTWARE_NAMES):
            return f"expected a GPU to render, but the CPU rendered ({self.gl_renderer})"
        if self.egl is not None and self.egl != self.predicted:
            return f"expected EGL device {self.predicted} to render, but EGL device {self.egl} rendered"
        if self.uuid is not None and self.nvml is not None and self.uuid not in self.nvml:
            return f"expected {self.uuid} to render, but NVML lists the process on {', '.join(self.nvml)}"
        return None

    @property
    def line(self) -> str:
        """The line to type to fix the problem."""
        if self.missing:
            # gymnasium's own extra installs the packages that its viewers import.
            package = {"gymnasium": "gymnasium[mujoco]", "pyrender": "pyrender"}.get(self.name)
            return install_line(self.name) if package is None else f'pip install "{package}"'
        if not self.decided:
            return f"rl-ext doctor --renderer {self.name}"
        if self.decided == "gpu":
            line = f'resolve("auto", render="cpu", renderer="{self.name}").apply()'
            return f"from rl_ext_core.devices import resolve\n{line}"
        return "apt-get install libosmesa6" if self.predicted is None else "apt-get install libegl1 libegl-mesa0"

    @property
    def place(self) -> str:
        """Index of the EGL device that rendered, ``"OSMesa"`` or ``"-"``, for a table."""
        if self.egl is not None:
            return str(self.egl)
        return "OSMesa" if self.predicted is None and self.gl_renderer else "-"

    @property
    def result(self) -> str:
        """Outcome of the test, for a table."""
        if self.problem is not None:
            return f"FAILS: {self.problem}" if self.failure else f"DIFFERS: {self.problem}"
        seen = "" if self.nvml is None or self.uuid is None else ", NVML lists the process there"
        return f"as predicted{seen} ({self.seconds:.1f} s)"


def verify(name: str, device: str = "auto", render: str = "same", *, timeout_s: float = TIMEOUT_S) -> Verification:
    """Create a context of a renderer under ``resolve(device, render=render, renderer=name)``, in a new process.

    :param name: name of an installed renderer
    :param device: the device that computes
    :param render: the device that renders
    :param timeout_s: seconds after which the process is killed
    :return: the result, which also has all failures
    """
    began = time.monotonic()
    seen = _run_process([sys.executable, "-m", "rl_ext_core.devices._verify", name, device, render], timeout_s)
    return Verification(name=name, **seen, seconds=round(time.monotonic() - began, 2))


def _run_process(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run the test process; return the results it printed, with a ``"failure"`` if it failed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        answer = _parse_output(said if isinstance(said, str) else said.decode(errors="replace"))
        return {**answer, "failure": f"the process did not end within {timeout_s:.0f} s"}
    except OSError as error:
        return {"failure": f"{sys.executable} could not be started: {error}"}
    answer = _parse_output(done.stdout)
    if answer and not done.returncode:
        return answer
    last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
    return {**answer, "failure": f"the process ended {_describe_exit(done.returncode)}: {last}"}


def _parse_output(output: str) -> dict[str, Any]:
    """Read the decision and the results from the output of the process."""
    answer: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(_RESULT_PREFIX):
            answer |= json.loads(line[len(_RESULT_PREFIX) :])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()}


def _describe_exit(status: int) -> str:
    """Return how a process ended, such as ``"by SIGSEGV"`` or ``"with exit status 1"``."""
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


# Code that runs in the new interpreter


def main() -> None:
    """Test the renderer. The decision is written first, so that it is known if the driver kills the process."""
    name, device, render = sys.argv[1:]
    try:
        decision = resolve(device, render=render, renderer=name)
        _write_result(_describe_decision(decision))
        _write_result(_inspect_context(name, decision))
    except (ModuleNotFoundError, MissingDependencyError) as error:
        _write_result({"failure": _error_text(error), "missing": True})
    except Exception as error:
        _write_result({"failure": _error_text(error)})
    # Skip the exit handlers of drivers and libraries, whose failures are not part of the test.
    os._exit(0)


def _write_result(seen: dict[str, Any]) -> None:
    """Print results on a line that :func:`_parse_output` finds."""
    sys.stdout.write(f"\n{_RESULT_PREFIX}{json.dumps(seen)}\n")
    sys.stdout.flush()


def _describe_decision(decision: Decision) -> dict[str, Any]:
    """Return the decision's rendering device, its UUID and its EGL index, for the output."""
    return {
        "decided": decision.render,
        "uuid": decision.render_gpu.uuid if decision.render_gpu else None,
        "predicted": decision.egl.index if decision.egl else None,
    }


def _error_text(error: Exception) -> str:
    """Return an error's first line, after its class if it is not an error of this package."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, RlExtError) else f"{type(error).__name__}: {first}"


def _inspect_context(name: str, decision: Decision) -> dict[str, Any]:
    """Apply the decision, create a context and return its devices."""
    # A process of another container may have the same ID. NVML then lists it before the context is created, too.
    before = _gpus_of_this_process()
    if name == "robosuite":
        import_robosuite(decision)
    else:
        decision.apply()
    strings: list[str] = []
    context = _create_context(name, lambda: strings.extend(_read_gl_strings()))
    display = _apply.display_of(name)
    after = _gpus_of_this_process()
    del context
    return {
        "gl_renderer": strings[0],
        "gl_vendor": strings[1],
        "egl": None if display is None else _apply.egl_index_of(display),
        "nvml": after if after and not before else None,
    }


def _gpus_of_this_process() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs on which NVML lists this process; empty if NVML cannot be queried."""
    found = []
    with contextlib.suppress(NvmlUnavailableError), nvml_session() as nvml:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
                with contextlib.suppress(nvml.NVMLError):  # a GPU without graphics, or a driver without permission
                    if any(entry.pid == os.getpid() for entry in ask(handle)):
                        uuid = nvml.nvmlDeviceGetUUID(handle)
                        found.append(uuid if isinstance(uuid, str) else uuid.decode())
    return tuple(dict.fromkeys(found))


def _read_gl_strings() -> tuple[str, str]:
    """Return OpenGL's names of the renderer and the vendor, for the current context."""
    gl: Any = import_module("OpenGL.GL")
    return tuple((gl.glGetString(name) or b"").decode() for name in (gl.GL_RENDERER, gl.GL_VENDOR))  # type: ignore[return-value]


def _create_context(name: str, read_strings: Callable[[], None]) -> object:
    """Create a renderer's context, call ``read_strings`` while it is current, and return an object that owns it."""
    if name == "pyrender":
        renderer = import_module("pyrender").OffscreenRenderer(_IMAGE_SIZE, _IMAGE_SIZE)  # makes its context current
        read_strings()
        return renderer
    mujoco: Any = import_module("mujoco")
    model = mujoco.MjModel.from_xml_string(_MODEL)

    def draw_and_read_strings() -> None:
        """Create a MuJoCo context, which fails without OpenGL, then call ``read_strings``."""
        mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)  # fails if OpenGL is not loaded
        read_strings()

    if name == "dm_control":
        context: Any = import_module("dm_control._render").Renderer(_IMAGE_SIZE, _IMAGE_SIZE)
        with context.make_current() as thread:  # dm_control renders in its own thread
            thread.call(draw_and_read_strings)
        return context
    if name == "robosuite":
        binding: Any = import_module("robosuite.utils.binding_utils")
        simulation = binding.MjSim.from_xml_string(_MODEL)
        context = binding.MjRenderContextOffscreen(
            simulation, device_id=-1, max_width=_IMAGE_SIZE, max_height=_IMAGE_SIZE
        )
    elif name == "gymnasium":
        viewer: Any = import_module("gymnasium.envs.mujoco.mujoco_rendering").OffScreenViewer
        # Releases before 1.0 read the size from the model.
        sized = "width" in inspect.signature(viewer).parameters
        context = viewer(
            model, mujoco.MjData(model), **({"width": _IMAGE_SIZE, "height": _IMAGE_SIZE} if sized else {})
        )
    else:
        context = mujoco.GLContext(_IMAGE_SIZE, _IMAGE_SIZE)
        context.make_current()
    draw_and_read_strings()
    return context


if __name__ == "__main__":
    main()
