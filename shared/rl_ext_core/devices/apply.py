"""Set the variables of a decision in this process, or raise an error if a library has already read other settings."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_ext_core._system import after_fork, set_variables
from rl_ext_core.devices._probe import egl_index_of
from rl_ext_core.devices.cuda import INDEX
from rl_ext_core.devices.renderers import BACKEND, PLATFORM, TABLE
from rl_ext_core.errors import DeviceConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLATFORMS = {"EGLPlatform": "egl", "OSMesaPlatform": "osmesa", "GLXPlatform": "glx"}
_READS_AT_IMPORT = {row.name: row.reads_at_import for row in TABLE}
_DISPLAYS = {row.name: row.display for row in TABLE if row.display}


@dataclass(frozen=True)
class Applied:
    """Variables of the decision that is in effect in this process, and the reason of the decision."""

    variables: Mapping[str, str | None]
    reason: str


applied: Applied | None = None
_inherited_displays: set[str] = set()


def _drop_parent_state() -> None:
    """After a fork, drop the parent's decision, and record the displays that it has created."""
    # A forked worker may apply a decision of its own.
    global applied
    applied = None
    # A forked child has none of the threads that Mesa started for the parent's display, so using that display hangs.
    _inherited_displays.update(name for name in _DISPLAYS.values() if _module_display(name))


after_fork(_drop_parent_state)


def set_device_variables(
    name: str, variables: Mapping[str, str | None], egl_index: int | None, reason: str = ""
) -> None:
    """Set and unset the variables of a decision in this process, or none if a library has already read other values.

    ``egl_index`` is None for OSMesa. ``reason`` is for later error texts.
    """
    global applied
    if not variables:
        return
    for _, conflict in (*display_conflicts(name, egl_index), *import_conflicts(name, variables[PLATFORM] or "")):
        raise DeviceConflictError(conflict)
    set_variables(variables, os.environ)
    applied = Applied(dict(variables), reason)
    clear_failed_display(name)


def import_conflicts(name: str, wanted: str, needs: str = "this decision needs") -> Iterator[tuple[str, str]]:
    """Find modules that read another backend when they were imported: the variable and an error text for each."""
    for module, attribute in _READS_AT_IMPORT.get(name, ()):
        taken = getattr(sys.modules.get(module), attribute, wanted)
        if taken != wanted:
            package = module.split(".")[0]
            place = f"`import {package}`"
            if package == "mujoco" and "torchrl" in sys.modules:
                place = "`import torchrl`, which imports mujoco, in the script that starts the workers"
            yield (
                BACKEND,
                f"{module} read {BACKEND}={taken!r} when it was imported, but {needs} {wanted!r}: "
                f"call resolve(...).apply() above {place}",
            )
            return
    platform = _PLATFORMS.get(type(getattr(sys.modules.get("OpenGL.platform"), "PLATFORM", None)).__name__)
    if platform is not None and platform != wanted:
        yield (
            PLATFORM,
            f"PyOpenGL was imported for {platform}, but {needs} {wanted}: "
            f"call resolve(...).apply() above the first import of mujoco, robosuite or OpenGL",
        )


def display_conflicts(name: str, wanted: int | None, needs: str = "this decision needs") -> Iterator[tuple[str, str]]:
    """Find a display that this process has created on another device than EGL index ``wanted``, or None for OSMesa."""
    hangs = inherited_display_error()
    if hangs and wanted is not None:
        yield INDEX, hangs
        return
    display = display_of(name)
    made = None if display is None else egl_index_of(display)
    if display is not None and (made is None or made != wanted):
        where = "another device" if made is None else f"EGL device {made}"
        target = "OSMesa" if wanted is None else f"EGL device {wanted}"
        yield (
            INDEX,
            f"{_DISPLAYS[name]} already renders on {where}, and a process keeps its first display, but "
            f"{needs} {target}: call resolve(...).apply() above the first environment, or use one process per device",
        )


def _module_display(module: str) -> Any:
    """Return a module's ``EGL_DISPLAY``; None if the module is not imported or has none."""
    return getattr(sys.modules.get(module), "EGL_DISPLAY", None)


def display_of(name: str) -> Any:
    """Return the display that a renderer has created in this process, or None."""
    return _module_display(_DISPLAYS.get(name, "")) or None


def clear_failed_display(name: str) -> None:
    """Remove the null display of a failed renderer, so that it tries again."""
    module = _DISPLAYS.get(name, "")
    if _module_display(module) is not None and display_of(name) is None:
        sys.modules[module].EGL_DISPLAY = None  # type: ignore[attr-defined]


def inherited_display_error() -> str | None:
    """Return why rendering would hang in this process, or None."""
    # Libraries share one display per device, so it does not matter which of them created it.
    if not _inherited_displays:
        return None
    return (
        f"{min(_inherited_displays)} had created its display before this process was forked, so rendering would hang "
        'here. Start workers with start_method="forkserver" or "spawn" (gymnasium: context=, TorchRL: '
        "mp_start_method=), or render in workers only"
    )
