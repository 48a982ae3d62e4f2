"""Variables that were set in this process after the library that reads them had read others."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from rl_ext_core.devices import _applied, _display, _renderers
from rl_ext_core.devices._machine import Machine
from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._renderers import BACKEND, INDEX, PLATFORM, EglWorld, RefusedError
from rl_ext_core.devices.checks._base import mistake
from rl_ext_core.devices.checks._fixes import backend_of, installed
from rl_ext_core.errors import DeviceConflictError, RlExtError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices._renderers import Renderer
    from rl_ext_core.devices.checks._base import Mistake, Situation

_BEFORE = "set it before the program starts, or above the import"


def without_applied(situation: Situation) -> Situation:
    """Leave the renderers out where a decision is in force in this process: apply() has seen to them."""
    decision = _applied.current
    if decision is None or not decision.variables:
        return situation
    in_force = all(situation.environ.get(name) == value for name, value in decision.variables.items())
    return dataclasses.replace(situation, settled=in_force)


def find(situation: Situation) -> Iterator[Mistake]:
    """Find what came too late in this process."""
    yield from _started(situation)
    seen: set[str] = set()
    for renderer in installed(situation):
        for found in (_read(renderer, situation), _displayed(renderer, situation)):
            if found is not None and found.finding.effect not in seen:
                seen.add(found.finding.effect)
                yield found
    yield from _platform(situation)


def _started(situation: Situation) -> Iterator[Mistake]:
    try:
        # Without an inventory, torch is looked at too.
        _ = Machine(None, situation.environ).visible
    except DeviceConflictError:
        effect = (
            f"torch started CUDA in this process under another mask and keeps that, so that it has no effect; {_BEFORE}"
        )
        yield mistake(situation, MASK, effect, {MASK: situation.environ.get(MASK)})
    except RlExtError:
        return  # the order is unknown, which is another finding


def _read(renderer: Renderer, situation: Situation) -> Mistake | None:
    """Compare MUJOCO_GL with what the renderer's module read when it was imported."""
    value = situation.environ.get(BACKEND)
    wanted = backend_of(renderer, situation.environ)
    if value is None or wanted is None:
        return None
    for name in _applied._READ_AT_IMPORT.get(renderer.name, ()):
        read = getattr(sys.modules.get(name), "BACKEND" if renderer.name == "dm_control" else "_MUJOCO_GL", None)
        if read is None:
            continue
        try:
            found = _renderers._mujoco_backend({BACKEND: read})
        except RefusedError:
            continue
        if found != wanted:
            effect = f"{name} was imported under {BACKEND}={read!r} and keeps that, so that it has no effect; {_BEFORE}"
            return mistake(situation, BACKEND, effect, {BACKEND: value})
    return None


def _displayed(renderer: Renderer, situation: Situation) -> Mistake | None:
    """Compare the device of the display that a renderer has made with the one that the variables lead to now."""
    display = _display.of(renderer.name)
    variable = MASK if renderer.name == "robosuite" and INDEX not in situation.environ else INDEX
    if display is None or variable not in situation.environ or backend_of(renderer, situation.environ) != "egl":
        return None
    visible = situation.visible.uuids if situation.visible else ()
    made = _display.index_of(display)
    try:
        wanted = renderer.selects(situation.environ, EglWorld(situation.inventory.egl or (), visible))
    except RefusedError:
        return None  # which is another finding
    if made is None or made == wanted:
        return None
    effect = (
        f"{_display.holder(renderer.name)} renders on EGL device {made} already and a process keeps its first display, "
        f"so that it no longer leads to EGL device {wanted}; {_BEFORE}"
    )
    return mistake(situation, variable, effect, {variable: situation.environ[variable]})


def _platform(situation: Situation) -> Iterator[Mistake]:
    value = situation.environ.get(PLATFORM)
    kind = type(getattr(sys.modules.get("OpenGL.platform"), "PLATFORM", None)).__name__
    loaded = _applied._PLATFORMS.get(kind)
    if value and loaded is not None and value.lower() in _applied._PLATFORMS.values() and value.lower() != loaded:
        effect = f"PyOpenGL was imported for {loaded} and keeps that, so that it has no effect; {_BEFORE}"
        yield mistake(situation, PLATFORM, effect, {PLATFORM: value})
