"""Puts a decision into force in this process, or refuses where a library has read other settings already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rl_ext_core._system import after_fork
from rl_ext_core.devices import _display, _robosuite
from rl_ext_core.devices._renderers import BACKEND
from rl_ext_core.errors import DeviceConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from rl_ext_core.devices.decision import Decision

# Modules that read MUJOCO_GL once, when they are imported, and where each keeps what it read.
_READ_AT_IMPORT = {
    "mujoco": ("mujoco.rendering.classic.gl_context", "mujoco.gl_context"),
    "dm_control": ("dm_control._render",),
    "robosuite": ("robosuite.utils.binding_utils",),
}
_PLATFORMS = {"EGLPlatform": "egl", "OSMesaPlatform": "osmesa", "GLXPlatform": "glx"}

current: Decision | None = None


def _forget() -> None:
    # What the parent's libraries have read, this process's may read anew; a worker gets a decision of its own.
    global current
    current = None


after_fork(_forget)


def apply(decision: Decision, environ: MutableMapping[str, str]) -> None:
    """Set and unset the decision's variables in ``environ``.

    :raises DeviceConflictError: too late; nothing is changed then
    """
    global current
    if not decision.variables:
        return
    for conflict in conflicts(decision):
        raise DeviceConflictError(conflict)
    for name, value in decision.variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    current = decision
    _display.forget_failed(renderer_of(decision))
    if renderer_of(decision) == "robosuite":
        _robosuite.guard(decision)


def renderer_of(decision: Decision) -> str:
    """Give the renderer's name without its version."""
    return (decision.renderer or "").split(" ")[0]


def conflicts(decision: Decision) -> Iterator[str]:
    """Say what makes it too late for a decision in this process, one sentence each."""
    renderer = renderer_of(decision)
    yield from _display_conflicts(decision, renderer)
    wanted = decision.variables[BACKEND]
    for name in _READ_AT_IMPORT.get(renderer, ()):
        taken = getattr(sys.modules.get(name), "BACKEND" if renderer == "dm_control" else "_MUJOCO_GL", wanted)
        if taken != wanted:
            yield (
                f"{name} took {BACKEND}={taken!r} when it was imported, and this decision needs {wanted!r}: "
                f"write resolve(...).apply() above {_import_of(name.split('.')[0])}"
            )
            return
    platform = _PLATFORMS.get(type(getattr(sys.modules.get("OpenGL.platform"), "PLATFORM", None)).__name__)
    if platform is not None and platform != wanted:
        yield (
            f"PyOpenGL was imported for {platform}, and this decision needs {wanted}: "
            f"write resolve(...).apply() above the first import of mujoco, robosuite or OpenGL"
        )


def _import_of(package: str) -> str:
    if package == "mujoco" and "torchrl" in sys.modules:
        return "`import torchrl`, which imports mujoco, in the script that starts the workers"
    return f"`import {package}`"


def _display_conflicts(decision: Decision, renderer: str) -> Iterator[str]:
    wanted = decision.egl.index if decision.egl else None
    hangs = _display.inherited()
    if hangs and wanted is not None:
        yield hangs
        return
    display = _display.of(renderer)
    if display is None:
        return
    made = _display.index_of(display)
    if made is None or made != wanted:
        where = "another device" if made is None else f"EGL device {made}"
        target = "OSMesa" if wanted is None else f"EGL device {wanted}"
        yield (
            f"{_display.holder(renderer)} renders on {where} already, and a process keeps its first display; this "
            f"decision needs {target}: write resolve(...).apply() above the first environment, or use one process each"
        )
