"""Apply a decision in this process, or raise an error if a library has already read other settings."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.devices import _probe
from rl_ext_core.devices._renderers import BACKEND, INDEX, PLATFORM
from rl_ext_core.errors import DeviceConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from rl_ext_core.devices.decision import Decision

# By renderer: modules that store the value of MUJOCO_GL when they are imported.
_MODULES_READING_BACKEND = {
    "mujoco": ("mujoco.rendering.classic.gl_context", "mujoco.gl_context"),
    "dm_control": ("dm_control._render",),
    "robosuite": ("robosuite.utils.binding_utils",),
}
_PLATFORMS = {"EGLPlatform": "egl", "OSMesaPlatform": "osmesa", "GLXPlatform": "glx"}

# By renderer: the module whose EGL_DISPLAY is the display of the whole process.
_DISPLAY_MODULES = {
    "mujoco": "mujoco.egl",
    "gymnasium": "mujoco.egl",
    "dm_control": "dm_control._render.pyopengl.egl_renderer",
    "robosuite": "robosuite.renderers.context.egl_context",
}
_EGL_DEVICE_EXT = 0x322C
_MAX_EGL_DEVICES = 64

_inherited_displays: set[str] = set()

applied_decision: Decision | None = None


def _drop_parent_state() -> None:
    """After a fork, drop the parent's decision, and record the displays that it has created."""
    # A forked worker may apply a decision of its own.
    global applied_decision
    applied_decision = None
    # A forked child has none of the threads that Mesa started for the parent's display, so using that display hangs.
    _inherited_displays.update(name for name in set(_DISPLAY_MODULES.values()) if _module_display(name))


after_fork(_drop_parent_state)


def apply(decision: Decision, environ: MutableMapping[str, str]) -> None:
    """Set and unset the decision's variables in ``environ``.

    :raises DeviceConflictError: If a library has already read other values. No variable is changed then.
    """
    global applied_decision
    if not decision.variables:
        return
    for _, conflict in (*display_conflicts(decision), *import_conflicts(decision)):
        raise DeviceConflictError(conflict)
    set_variables(decision.variables, environ)
    applied_decision = decision
    clear_failed_display(renderer_name(decision))
    if renderer_name(decision) == "robosuite":
        from rl_ext_core.devices import _robosuite

        _robosuite.patch_robosuite(decision)


def renderer_name(decision: Decision) -> str:
    """Return the renderer's name without its version."""
    return (decision.renderer or "").split(" ")[0]


def import_conflicts(decision: Decision, needs: str = "this decision needs") -> Iterator[tuple[str, str]]:
    """Find modules that read other values when they were imported than the decision sets.

    :param needs: subject and verb of the clause that states the required value
    :return: the variable and an error text, for each conflict
    """
    renderer, wanted = renderer_name(decision), decision.variables[PLATFORM]
    for name in _MODULES_READING_BACKEND.get(renderer, ()):
        taken = getattr(sys.modules.get(name), "BACKEND" if renderer == "dm_control" else "_MUJOCO_GL", wanted)
        if taken != wanted:
            yield (
                BACKEND,
                f"{name} read {BACKEND}={taken!r} when it was imported, but {needs} {wanted!r}: "
                f"call resolve(...).apply() above {_describe_import(name.split('.')[0])}",
            )
            return
    platform = _PLATFORMS.get(type(getattr(sys.modules.get("OpenGL.platform"), "PLATFORM", None)).__name__)
    if platform is not None and platform != wanted:
        yield (
            PLATFORM,
            f"PyOpenGL was imported for {platform}, but {needs} {wanted}: "
            f"call resolve(...).apply() above the first import of mujoco, robosuite or OpenGL",
        )


def _describe_import(package: str) -> str:
    """Return the import statement that loaded a package, for an error text."""
    if package == "mujoco" and "torchrl" in sys.modules:
        return "`import torchrl`, which imports mujoco, in the script that starts the workers"
    return f"`import {package}`"


def display_conflicts(decision: Decision, needs: str = "this decision needs") -> Iterator[tuple[str, str]]:
    """Find a display that this process has already created on another device.

    :return: the variable and an error text, if there is a conflict
    """
    renderer, wanted = renderer_name(decision), decision.egl.index if decision.egl else None
    hangs = inherited_display_error()
    if hangs and wanted is not None:
        yield INDEX, hangs
        return
    display = display_of(renderer)
    made = None if display is None else egl_index_of(display)
    if display is not None and (made is None or made != wanted):
        where = "another device" if made is None else f"EGL device {made}"
        target = "OSMesa" if wanted is None else f"EGL device {wanted}"
        yield (
            INDEX,
            f"{_DISPLAY_MODULES[renderer]} already renders on {where}, and a process keeps its first display, but "
            f"{needs} {target}: call resolve(...).apply() above the first environment, or use one process per device",
        )


def _module_display(module: str) -> Any:
    """Return a module's ``EGL_DISPLAY``; None if the module is not imported or has none."""
    return getattr(sys.modules.get(module), "EGL_DISPLAY", None)


def display_of(renderer: str) -> Any:
    """Return the display that a renderer has created in this process, or None."""
    return _module_display(_DISPLAY_MODULES.get(renderer, "")) or None


def clear_failed_display(renderer: str) -> None:
    """Remove the null display of a failed renderer, so that it tries again."""
    holder = _DISPLAY_MODULES.get(renderer, "")
    if _module_display(holder) is not None and display_of(renderer) is None:
        sys.modules[holder].EGL_DISPLAY = None  # type: ignore[attr-defined]


def inherited_display_error() -> str | None:
    """Return why rendering would hang in this process, or None.

    EGL hangs in a process that was forked after its parent had created a display. The library that created it does
    not matter, because libraries share one display per device.
    """
    if not _inherited_displays:
        return None
    return (
        f"{min(_inherited_displays)} had created its display before this process was forked, so rendering would hang "
        'here. Start workers with start_method="forkserver" or "spawn" (gymnasium: context=, TorchRL: '
        "mp_start_method=), or render in workers only"
    )


def egl_index_of(display: Any) -> int | None:
    """Find the EGL index of the device that a display is on.

    :param display: pointer of PyOpenGL or ctypes
    :return: index in EGL's order, or None if EGL does not report the device
    """
    try:
        library = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    to_pointer, to_integer = ctypes.POINTER(pointer), ctypes.POINTER(integer)
    query = _probe.load_egl_function(library, "eglQueryDisplayAttribEXT", ctypes.c_uint, pointer, integer, to_pointer)
    devices_of = _probe.load_egl_function(library, "eglQueryDevicesEXT", ctypes.c_uint, integer, to_pointer, to_integer)
    if query is None or devices_of is None:
        return None
    device, devices, count = pointer(), (pointer * _MAX_EGL_DEVICES)(), integer()
    if not query(ctypes.cast(display, pointer), _EGL_DEVICE_EXT, ctypes.byref(device)):
        return None
    if not devices_of(_MAX_EGL_DEVICES, devices, ctypes.byref(count)):
        return None
    found = [devices[index] for index in range(count.value)]
    return found.index(device.value) if device.value in found else None
