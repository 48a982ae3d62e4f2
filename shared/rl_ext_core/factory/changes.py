"""Changes of an instance since its construction: pickle their values, and set them on copies."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_ext_core import _pickle
from rl_ext_core.factory import walk
from rl_ext_core.factory.walk import Fingerprint

__all__ = ["Change", "Examination", "apply_changes", "pack_values", "unpack", "unpicklable"]

Step = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """A value to set on a copy.

    :ivar path: Path of the value, as in a fingerprint.
    :ivar steps: The way from the environment to the value. Each step is an operation and a name, a key or an index.
    :ivar packed: Pickle of the value.
    """

    path: str
    steps: tuple[Step, ...]
    packed: bytes


@dataclasses.dataclass(frozen=True)
class Examination:
    """Results of building and comparing a copy.

    :ivar problems: Descriptions of differences between a copy and the original, or of errors. Empty if they are equal.
    :ivar changes: Changes to set on each copy.
    :ivar opaque: Paths of objects that cannot be inspected. Differences in their state are not detected.
    :ivar own: Paths of plain values that differ in each instance, so copies do not get the original's.
    :ivar class_attributes: Paths of globals and class attributes that differ, because workers import them again.
    :ivar private_bytes: Memory in bytes that the process did not share. None if the system does not report it.
    :ivar read: Result of the caller's reader.
    """

    problems: Sequence[str] = ()
    changes: tuple[Change, ...] = ()
    opaque: Sequence[str] = ()
    own: Sequence[str] = ()
    class_attributes: Sequence[str] = ()
    private_bytes: int | None = None
    read: Any = None


# ---- In the process of the original: pack the values that a copy needs.


def pack_values(original: Fingerprint, paths: Sequence[str]) -> list[Change | str]:
    """Pickle the values of an instance at some paths.

    :return: For each path a change, or the reason why its value cannot be set on a copy.
    """
    found = ((path, part) for path, part in original.objects.items() if path not in original.aliases)
    homes = {id(part): path for path, part in found if walk.is_layer(part)}
    return [_pack_value(original, path, homes) for path in paths]


def _pack_value(original: Fingerprint, path: str, homes: Mapping[int, str]) -> Change | str:
    """Pickle the value at a path as a change; return the reason if that is impossible."""
    while path in original.steps and original.steps[path][1] is None:  # It cannot be set itself, but its holder can.
        path = original.steps[path][0]
    steps = _steps_to(original, path)
    if not steps or path not in original.objects:
        return "it cannot be set on a copy"
    for where, reason in original.unpicklable.items():
        if where.startswith(path):
            return reason
    packed = original.objects[path]

    def location_of(value: Any) -> Any:
        """Return the location of an object in a copy, or None to pickle the object."""
        home = homes.get(id(value))
        if value is packed or home is None or home.startswith(path):
            return None if value is packed else original.references.get(id(value))
        return _steps_to(original, home)

    try:
        return Change(path, steps, _pickle.dumps(packed, location_of))
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__


def _steps_to(original: Fingerprint, path: str) -> tuple[Step, ...] | None:
    """Return the steps from an environment to a path; None if a copy has no such path."""
    found: list[Step] = []
    while path:
        path, operation, key = original.steps.get(path, ("", None, None))
        if operation is None:
            return None
        found.insert(0, (operation, key))
    return tuple(found)


def unpicklable(original: Fingerprint) -> str:
    """Return the path of the innermost part of a value that cannot be pickled."""
    found, parts = "", dict[str, list[str]]()
    for path, (holder, _, _) in original.steps.items():
        parts.setdefault(holder, []).append(path)
    while True:
        for deeper in parts.get(found, ()):
            try:
                _pickle.dumps(original.objects[deeper])
            except Exception:
                found = deeper
                break
        else:
            return found


# ---- In any process: set values on a copy.


def unpack(packed: bytes, environment: Any = None) -> Any:
    """Unpickle a value of :func:`pack_values`, or an environment.

    :param packed: The pickle.
    :param environment: Copy that the value is for. Parts of it that the value refers to are taken from it.
    """

    def find_object(place: Any) -> Any:
        """Find a module's attribute or a part of the environment by its location in a pickle."""
        if len(place) == 2 and isinstance(place[0], str):
            return operator.attrgetter(place[1])(importlib.import_module(place[0]))
        return functools.reduce(_follow_step, place, environment)

    return _pickle.loads(packed, find_object)


def _follow_step(holder: Any, step: Step) -> Any:
    operation, key = step
    if operation == "attribute":
        return walk.attributes(holder)[key]
    return getattr(holder, key) if operation == "field" else holder[key]


def apply_changes(environment: Any, changes: Sequence[Change]) -> None:
    """Set the changes of the original on a copy.

    :raises LookupError: If a value cannot be set. The message names the path.
    """
    for change in changes:
        try:
            _apply_change(environment, change)
        except Exception as error:
            raise LookupError(f"{change.path} cannot be set on a copy: {error!r}") from error


def _apply_change(environment: Any, change: Change) -> None:
    """Set one changed value on a copy, in place if its type and shape allow that."""
    holder = functools.reduce(_follow_step, change.steps[:-1], environment)
    operation, key = change.steps[-1]
    value = unpack(change.packed, environment)
    held: Any = None
    with contextlib.suppress(LookupError, AttributeError):
        held = _follow_step(holder, change.steps[-1])
    if _fits_in_place(held, value):
        held[...] = value  # Other objects may refer to this array, or a C library to its memory.
    elif type(held) is type(value) and isinstance(held, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        ctypes.memmove(ctypes.byref(held), ctypes.byref(value), ctypes.sizeof(value))
    elif operation == "attribute":
        names = walk.instance_dict(holder)
        if names is not None and (key in names or key not in walk.attributes(holder)):
            names[key] = value
        else:  # It is the attribute of a slot.
            object.__setattr__(holder, key, value)
    elif operation == "field":
        setattr(holder, key, value)
    else:
        holder[key] = value


def _fits_in_place(held: Any, value: Any) -> bool:
    """Whether a value can be written into the present array or tensor."""
    is_array = hasattr(held, "dtype") and hasattr(type(held), "__setitem__")
    if type(held) is not type(value) or not is_array or not getattr(held, "shape", ()):
        return False
    is_fixed = getattr(held, "requires_grad", False) or (isinstance(held, np.ndarray) and not held.flags.writeable)
    return bool(held.shape == value.shape and held.dtype == value.dtype and not is_fixed)
