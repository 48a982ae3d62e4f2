"""What instances of a class consist of: Python attributes, a built-in container, or memory of a library in C."""

from __future__ import annotations

import functools
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Found = TypeVar("_Found")

CONTAINERS = (dict, list, set, frozenset, tuple)
# They add nothing that could not be read by name or by iterating.
_TRANSPARENT = {object, typing.Generic, *CONTAINERS}
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def per_class(function: Callable[[type], _Found]) -> Callable[[type], _Found]:
    """Keep what a function of a class returns for as long as the class lives."""
    known: weakref.WeakKeyDictionary[type, _Found] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def find(kind: type) -> _Found:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, function(kind))

    return find


def full_name(kind: type) -> str:
    """Return module and name of a class."""
    return ".".join(name_of(kind))


def name_of(kind: type) -> tuple[str, str]:
    """Return module and qualified name of a class."""
    return str(getattr(kind, "__module__", "builtins")), kind.__qualname__  # SWIG's has no module


def namespace(kind: type) -> dict[str, Any]:
    """Return what a class statement has defined, but for weak proxies: their class would be asked of what is gone."""
    return {name: part for name, part in vars(kind).items() if type(part) not in weakref.ProxyTypes}


@per_class
def made_in_python(kind: type) -> bool:
    """Whether a class statement made this class: then its instances hold nothing but attributes."""
    # Libraries such as nanobind make their classes by a metaclass in C.
    if type(kind) is not type and not made_in_python(type(kind)):
        return False
    for name, part in namespace(kind).items():
        if getattr(part, "__objclass__", None) is not kind:
            continue
        if isinstance(part, _IN_C):
            return False
        if isinstance(part, types.GetSetDescriptorType) and name not in ("__dict__", "__weakref__"):
            return False
    return True


def is_inherited(kind: type, name: str, part: Any) -> bool:
    """Whether a class says of an attribute what its base says: cloudpickle leaves that out of the classes it packs."""
    return any(vars(base).get(name, kind) is part for base in kind.__mro__[1:])


@per_class
def foreign_base(kind: type) -> type | None:
    """Return the class in C, other than the plain containers, whose memory instances have; None: there is none."""
    return next((base for base in kind.__mro__ if base not in _TRANSPARENT and not made_in_python(base)), None)


@per_class
def container(kind: type) -> type | None:
    """Return the plain container that instances are."""
    return next((base for base in kind.__mro__ if base in CONTAINERS), None)


@per_class
def _dictionary_of(kind: type) -> Any:
    for base in kind.__mro__:
        part = vars(base).get("__dict__")
        if isinstance(part, _SLOTS):
            return part
    return None


@per_class
def _slots_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if made_in_python(base):
            members = {
                name: part for name, part in namespace(base).items() if isinstance(part, types.MemberDescriptorType)
            }
            found = {**members, **found}
    return found


def dictionary(instance: Any) -> dict[str, Any] | None:
    """Return an instance's own ``__dict__``, whatever its class says of that name; None: it has none."""
    part = _dictionary_of(type(instance))
    found = None if part is None else part.__get__(instance)
    return found if isinstance(found, dict) else None


def slots(instance: Any) -> dict[str, Any]:
    """Return what is in an instance's ``__slots__``, past properties and ``__getattr__``."""
    found = {}
    for name, part in _slots_of(type(instance)).items():
        try:
            found[name] = part.__get__(instance)
        except AttributeError:  # empty
            continue
    return found


def attributes(instance: Any) -> dict[str, Any]:
    """Return all attributes that are an instance's own."""
    return {**slots(instance), **(dictionary(instance) or {})}
