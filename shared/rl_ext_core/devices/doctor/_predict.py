"""Where each renderer renders with the variables as they are, and by which of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _renderers
from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._renderers import BACKEND, INDEX, NAMES, PLATFORM, EglWorld, RefusedError
from rl_ext_core.devices._versions import major
from rl_ext_core.devices.checks._fixes import backend_of, import_refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices.inventory import EglDevice, Inventory


@dataclass(frozen=True)
class Prediction:
    """Where a renderer renders.

    :param name: one of the renderers' names
    :param renderer: the name with its version
    :param where: ``"gpu"``, ``"cpu"``, ``"window"`` (GLFW: the display's device), ``"nothing"``, ``"fails"`` or
        ``"unknown"``
    :param why: by which variables, or how it fails
    :param egl: the EGL device; None where EGL is not used
    :param uuid: the GPU's
    :param with_compute: whether that is the device that computes; None where that cannot be told
    """

    name: str
    renderer: str
    where: Literal["gpu", "cpu", "window", "nothing", "fails", "unknown"]
    why: str
    egl: int | None = None
    uuid: str | None = None
    with_compute: bool | None = None


def installed(versions: Mapping[str, str]) -> tuple[str, ...]:
    """Name the renderers that are installed: gymnasium alone renders nothing that is decided on here."""
    return tuple(name for name in NAMES if name in versions and "mujoco" in versions)


def predict(
    name: str, inventory: Inventory, environ: Mapping[str, str], visible: Sequence[str], computes: str | None
) -> Prediction:
    """Predict where a renderer renders when a program imports it plainly, under ``environ``.

    :param name: of a renderer that is installed
    :param inventory: the machine
    :param environ: the variables
    :param visible: UUIDs by CUDA ordinal
    :param computes: what computes: ``"cpu"``, a GPU's UUID, or None if that is unknown
    :return: the prediction
    """
    renderer = _renderers.find(name, inventory.versions)
    try:
        return _predicted(renderer, inventory, environ, visible, computes)
    except RefusedError as refused:
        return Prediction(name, str(renderer), "fails", str(refused))


def _predicted(
    renderer: Renderer, inventory: Inventory, environ: Mapping[str, str], visible: Sequence[str], computes: str | None
) -> Prediction:
    name, title = renderer.name, str(renderer)
    _renderers._mujoco_backend(environ)  # all of them import mujoco, which refuses what it does not know
    backend = backend_of(renderer, environ) or renderer.backend(environ)
    how = f"{BACKEND}={environ[BACKEND]!r}" if BACKEND in environ else f"{BACKEND} is not set"
    if backend == "none":
        return Prediction(name, title, "nothing", f"{how} turns rendering off")
    if backend == "glfw":
        if not _renderers.has_display(environ):
            raise RefusedError(f"{how}: it takes GLFW, and there is no display")
        return Prediction(name, title, "window", f"{how}: it takes GLFW, and so the display's device")
    _refuse_import(renderer, backend, environ)
    if backend == "osmesa":
        if inventory.osmesa is False:
            raise RefusedError(f"{how}, and OSMesa's library is not installed")
        return Prediction(name, title, "cpu", f"{how}: OSMesa", with_compute=_same("cpu", computes))
    if inventory.egl is None:
        return Prediction(name, title, "unknown", "EGL was not asked when this was recorded")
    if not inventory.egl:
        raise RefusedError(inventory.egl_error or "EGL lists no device")
    index = renderer.selects(environ, EglWorld(inventory.egl, tuple(visible)))
    device = inventory.egl[index]
    return _on_device(renderer, device, inventory, _why(renderer, environ, inventory), computes)


def _refuse_import(renderer: Renderer, backend: str, environ: Mapping[str, str]) -> None:
    platform = environ.get(PLATFORM, "")
    # In capitals it passes mujoco's own check, and PyOpenGL knows no such platform.
    if platform not in ("", backend):
        raise RefusedError(f"{PLATFORM}={platform!r} is not {backend!r}, and the import or the first context fails")
    if renderer.name == "robosuite" and import_refused(environ):
        raise RefusedError(
            f"import robosuite asserts that {INDEX}={environ[INDEX]!r} is part of {MASK}={environ[MASK]!r}, which "
            "import_robosuite() or a decision's apply() sees to"
        )


def _on_device(
    renderer: Renderer, device: EglDevice, inventory: Inventory, why: str, computes: str | None
) -> Prediction:
    name, title = renderer.name, str(renderer)
    if device.software:
        return Prediction(name, title, "cpu", why, device.index, None, _same("cpu", computes))
    if device.uuid is None:
        why = f"{why}; which GPU that is, EGL does not tell"
        return Prediction(name, title, "gpu", why, device.index, None, False if computes == "cpu" else None)
    if inventory.gpu(device.uuid).mig:
        return Prediction(
            name, title, "fails", f"{why}; that GPU is cut into MIG slices, which do not render", device.index
        )
    return Prediction(name, title, "gpu", why, device.index, device.uuid, _same(device.uuid, computes))


def _same(where: str, computes: str | None) -> bool | None:
    return None if computes is None else where == computes


def _why(renderer: Renderer, environ: Mapping[str, str], inventory: Inventory) -> str:
    """Say which variable chose the device."""
    mask, index = environ.get(MASK), environ.get(INDEX)
    through_cuda = renderer.name in ("mujoco", "gymnasium") and major(inventory.versions["mujoco"]) >= 4
    if index is not None:
        meaning = "which it looks for among CUDA's numbers first" if through_cuda else "which is EGL's own index"
        return f"{INDEX}={index!r}, {meaning}"
    if renderer.name == "robosuite" and mask is not None:
        return f"it takes the first entry of {MASK}={mask!r} for EGL's own index"
    if through_cuda:
        return f"the first device that {'CUDA' if mask is None else f'{MASK}={mask!r}'} shows, where EGL tells it"
    return f"{INDEX} is not set: the first EGL device{'' if mask is None else ', whatever the mask'}"
