"""Changes every setting that can be reached from an environment, one at a time, past all its methods.

The walk is one of its own: it shares no code with the fingerprint, whose blind spots it would share.
"""

from __future__ import annotations

import collections
import enum
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["Change", "changes"]

# How to set a value, and back, and by which step of a path it should be found.
Change = tuple[str, Callable[[], object], Callable[[], object]]

# Other integers of MuJoCo's are indices, and it does not check them all.
_FREE = ("contype", "conaffinity", "condim", "group", "limited", "priority", "active0", "sameframe")
# Of the parts of a list and of a dictionary: they are copied alike.
_FEW = 8
_SKIPPED = (enum.Enum, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.random.Generator)


def other(value: Any) -> Any:
    """Give another value of the same type; None: it is no setting."""
    if isinstance(value, (bool, np.bool_)):
        return type(value)(not value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, type):
        return type(value)(value ^ 1) if type(value) is int or isinstance(value, np.integer) else None
    if type(value) is float or isinstance(value, np.floating):
        return type(value)(-value) if np.isfinite(value) and value else type(value)(7.0)
    return f"{value}~" if type(value) is str else None


def changes(environment: Any) -> Iterator[Change]:
    """Yield a change of each scalar and each array that an environment holds, in any layer and nested object."""
    waiting, seen = collections.deque([environment]), {id(environment)}
    alive = []
    while waiting:
        owner = waiting.popleft()
        alive.append(owner)
        for step, part, put in _held(owner):
            changed = other(part)
            if changed is not None:
                yield step, lambda put=put, changed=changed: put(changed), lambda put=put, part=part: put(part)
            elif isinstance(part, np.ndarray):
                yield from _of_array(step, part)
            elif id(part) not in seen and not isinstance(part, _SKIPPED):
                seen.add(id(part))
                waiting.append(part)


def _of_array(step: str, array: Any) -> Iterator[Change]:
    if array.size and array.flags.writeable and array.dtype.kind in "biuf":
        before = array.reshape(-1)[0].copy()
        after = other(before)
        index = (0,) * array.ndim
        yield step, lambda: array.__setitem__(index, after), lambda: array.__setitem__(index, before)


def _held(owner: Any) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    module = getattr(type(owner), "__module__", "")
    if module.startswith(("mujoco._", "ale_py._", "Box2D.", "pygame.")):
        yield from _of_library(owner, module)
        return
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        yield f".{name}", value, lambda new, name=name: owner.__dict__.__setitem__(name, new)
    if type(owner) is dict:
        for key, value in list(owner.items())[:_FEW]:
            yield "]", value, lambda new, key=key: owner.__setitem__(key, new)
    elif type(owner) in (list, collections.deque):
        for index, value in enumerate(itertools.islice(owner, _FEW)):
            yield "]", value, lambda new, index=index: owner.__setitem__(index, new)


def _of_library(owner: Any, module: str) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    """Yield the settings of simulators that have no attributes of Python's."""
    kind = type(owner).__name__
    if kind in ("MjModel", "MjOption", "MjStatistic", "MjVisual") or "MjVisual" in type(owner).__qualname__:
        for name, part in vars(type(owner)).items():
            if isinstance(part, property) and not name.startswith("_") and name not in ("signature", "names", "paths"):
                value = getattr(owner, name)
                if isinstance(value, (int, float)) and part.fset is None:
                    continue
                if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and not name.endswith(_FREE):
                    continue
                yield f".{name}", value, lambda new, name=name: setattr(owner, name, new)
    elif kind == "MjData":
        for name in ("ctrl", "qpos", "qvel", "qfrc_applied", "xfrc_applied", "time"):
            yield f".{name}", getattr(owner, name), lambda new, name=name: setattr(owner, name, new)
    elif kind == "ALEInterface":
        yield from _of_emulator(owner)
    elif kind == "b2World":
        for name in ("warmStarting", "continuousPhysics", "subStepping", "autoClearForces"):
            yield f"[{name!r}]", getattr(owner, name), lambda new, name=name: setattr(owner, name, new)
        yield "['gravity']", owner.gravity[1], lambda new: setattr(owner, "gravity", (owner.gravity[0], new))
        body = owner.bodies[-1]
        for name in ("linearDamping", "angularDamping", "gravityScale"):
            yield f"[{name!r}]", getattr(body, name), lambda new, name=name: setattr(body, name, new)


def _of_emulator(emulator: Any) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    from rl_ext_core.factory._rules_ale import _SETTINGS

    for kind, names in _SETTINGS.items():
        for name in names:
            # Two open a device, one is of later versions, and four take certain values only.
            if name in ("sound", "display_screen", "max_turn_time", "cpu", "palette", "volume", "record_screen_dir"):
                continue
            value = getattr(emulator, f"get{kind}")(name)
            setter = getattr(emulator, f"set{kind}")
            yield f".{name}", value, lambda new, name=name, setter=setter: setter(name, new)
    mode = emulator.cloneState().getCurrentMode()
    others = [known for known in emulator.getAvailableModes() if known != mode]
    if others:
        yield ".mode", mode, lambda new: emulator.setMode(mode if new == mode else others[0])
