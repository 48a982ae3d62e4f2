"""Changes every setting that an environment holds, and sees whether a copy has the changes.

It finds settings by itself, and reads the copy by itself: what a fingerprint does not see, it does.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl_ext_core.factory import _graft, _objects, streams
from rl_ext_core.factory._fingerprint import fingerprint

__all__ = ["Change", "Outcome", "Place", "copied", "places", "try_changes"]

SIMULATORS = ("MjModel", "MjData")
# Structures within a simulator that hold settings.
WITHIN = ("opt", "stat", "vis", "global_", "quality", "headlight", "map", "scale", "rgba")
AT_ONCE = 4000
_WEAK = ("weakref", "_weakrefset")
_CODE = ("module", "function", "builtin_function_or_method", "method")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is.

    :ivar steps: from the environment on: whether an attribute or an item, and its name, index or key
    """

    steps: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in self.steps)

    def holder(self, environment: Any) -> Any:
        """Give what holds the value."""
        for step in self.steps[:-1]:
            environment = _held(environment, step)
        return environment

    def read(self, environment: Any) -> Any:
        """Give the value."""
        return _held(self.holder(environment), self.steps[-1])


@dataclasses.dataclass
class Change:
    """A value that is changed, and back again."""

    place: Place
    before: Any
    after: Any

    def make(self, environment: Any, value: Any) -> None:
        """Put a value in this place."""
        holder, (kind, name) = self.place.holder(environment), self.place.steps[-1]
        if isinstance(self.before, np.ndarray) or _is_tensor(self.before):
            _held(holder, (kind, name))[...] = value
        elif kind == "item":
            holder[name] = value
        elif name in (held := _objects.dictionary(holder) or {}):
            held[name] = value
        elif name in _objects.slots(holder):
            object.__setattr__(holder, name, value)
        else:
            setattr(holder, name, value)

    def lasts(self, environment: Any) -> bool:
        """Whether an environment has the changed value."""
        try:
            return _same(self.place.read(environment), self.after)
        except Exception:
            return False


@dataclasses.dataclass
class Outcome:
    """What became of changes.

    :ivar carried: how many the copy has
    :ivar elsewhere: how many are where an unchanged copy has something else, which is made anew: only compared
    :ivar passing: how many the copy does not have, and the original no longer after a reset
    :ivar refused: those that made a copy impossible, or different from the original
    :ivar silent: those that were lost, and no difference seen
    """

    carried: int = 0
    elsewhere: int = 0
    passing: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)
    silent: list[str] = dataclasses.field(default_factory=list)
    _lost: list[Change] = dataclasses.field(default_factory=list)


def copied(environment: Any) -> Any:
    """Copy an environment by a graft, with its generators as they are."""
    with streams.keeping():
        return _graft.loads(_graft.dumps(environment))


def places(environment: Any) -> Iterator[tuple[Place, Any]]:
    """Find all numbers, texts and arrays in attributes, lists and dictionaries, and in fields of simulators."""
    waiting: deque[tuple[tuple[tuple[str, Any], ...], Any]] = deque([((), environment)])
    seen: dict[int, Any] = {}
    while waiting:
        steps, item = waiting.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        for step, part in _parts(item):
            if _is_setting(part):
                if not isinstance(item, tuple) and not (id(part) in seen and not _is_scalar(part)):
                    yield Place((*steps, step)), part
                seen.setdefault(id(part), part) if not _is_scalar(part) else None
            elif part is not None and not _is_passed_by(part):
                waiting.append(((*steps, step), part))


def try_changes(environment: Any, most: int | None = None, reset: Callable[[], object] | None = None) -> Outcome:
    """Change everything in an environment that can be changed, copy it, look at the copy, and change it back.

    Many changes share a copy. Where that fails, halves of them are tried, down to the one that makes it fail.

    :param most: no more changes than this, evenly spread; None: all
    :param reset: resets the environment: what that undoes need not be in a copy. None: all has to be
    """
    outcome = Outcome()
    before = copied(environment)
    changes = []
    for place, value in places(environment):
        after = _changed(value)
        try:
            known = _same(place.read(before), value)
        except Exception:
            known = False  # a copy keeps it elsewhere, or makes it anew: it is compared by the fingerprint alone
        if after is not None:
            changes.append((Change(place, _kept(value), after), known))
    del before
    if most is not None and len(changes) > most:
        changes = [changes[index * len(changes) // most] for index in range(most)]
    for start in range(0, len(changes), AT_ONCE):
        _try(environment, changes[start : start + AT_ONCE], outcome)
    lost = outcome._lost
    if reset is not None and lost:
        for change in lost:
            change.make(environment, change.after)
        reset()
        lost = [change for change in lost if change.lasts(environment)]
        outcome.passing = len(outcome._lost) - len(lost)
    outcome.silent = [f"{change.place}: {change.before!r:.60} to {change.after!r:.60}" for change in lost]
    return outcome


def _try(environment: Any, changes: Sequence[tuple[Change, bool]], outcome: Outcome) -> None:
    made: list[tuple[Change, bool]] = []
    try:
        for change, known in changes:
            try:
                change.make(environment, change.after)
            except Exception:
                continue  # it cannot be set
            made.append((change, known))
        # Arrays may lie in one another: a later change may have undone an earlier one.
        lasting = [entry for entry in made if _same(entry[0].place.read(environment), entry[0].after)]
        try:
            copy = copied(environment)
            different = fingerprint(environment).differences(fingerprint(copy))
        except Exception as error:
            copy, different = None, [str(error)]
        if not different:
            for change, known in lasting:
                _judge(change, known, copy, outcome)
    finally:
        for change, _ in reversed(made):
            change.make(environment, change.before)
    if different and len(made) > 1:
        middle = len(made) // 2
        _try(environment, made[:middle], outcome)
        _try(environment, made[middle:], outcome)
    elif different and made:
        outcome.refused.append(f"{made[0][0].place}: {different[0]}")


def _judge(change: Change, known: bool, copy: Any, outcome: Outcome) -> None:
    if change.lasts(copy):
        outcome.carried += 1
    elif not known:
        outcome.elsewhere += 1
    else:
        outcome._lost.append(change)


def _parts(item: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if type(item).__name__ in SIMULATORS and type(item).__module__.startswith("mujoco."):
        yield from _fields(item)
    elif isinstance(item, dict):
        yield from ((("item", key), part) for key, part in item.items() if isinstance(key, (str, int, tuple)))
    elif isinstance(item, (list, tuple)):
        yield from ((("item", index), part) for index, part in enumerate(item))
    for name, part in _objects.attributes(item).items():
        yield ("attribute", name), part


def _fields(structure: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    for name in dir(structure):
        part = None if name.startswith("_") else getattr(structure, name, None)
        is_array = isinstance(part, np.ndarray) and part.dtype.kind == "f" and not name.startswith(("efc_", "i"))
        if is_array or type(part) is float:
            yield ("attribute", name), part
        elif name in WITHIN and type(part).__module__.startswith("mujoco."):
            for (_, inner), value in _fields(part):
                yield ("attribute", f"{name}.{inner}"), value


def _held(holder: Any, step: tuple[str, Any]) -> Any:
    kind, name = step
    if kind == "item":
        return holder[name]
    held = _objects.attributes(holder)
    if name in held:
        return held[name]
    for part in name.split("."):
        holder = getattr(holder, part)
    return holder


def _is_passed_by(part: Any) -> bool:
    # Members of an enumeration are one for all environments.
    kind = type(part)
    return issubclass(kind, (type, enum.Enum)) or kind.__name__ in _CODE or _objects.name_of(kind)[0] in _WEAK


def _is_scalar(part: Any) -> bool:
    return type(part) in (bool, int, float, str)


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(part) is torch.Tensor


def _is_setting(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "biuf" and part.size > 0
    return _is_scalar(part) or (_is_tensor(part) and part.numel() > 0 and not part.requires_grad)


def _kept(value: Any) -> Any:
    return value.clone() if _is_tensor(value) else value.copy() if isinstance(value, np.ndarray) else value


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}~"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + max(abs(value) / 8, 0.125) if math.isfinite(value) else 1.5
    after = _kept(value)
    flat = after.reshape(-1)
    first = flat[0]
    flat[0] = ~first if str(after.dtype).endswith("bool") else first + 1 if first < 100 else first - 1
    return flat.reshape(value.shape)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or _is_tensor(one):
        first, second = np.asarray(one), np.asarray(other)
        return first.shape == second.shape and first.tobytes() == second.tobytes()
    return type(one) is type(other) and (one == other or (one != one and other != other))
