"""What an object consists of, as the copy sees it: one answer for the pickler and for the comparison."""

from __future__ import annotations

import copyreg
import types
from typing import Any

import numpy as np

from rl_ext_core.factory import _kinds, _rebuilders, _streams

__all__ = ["by_pickle", "is_layer", "layer", "raw", "reduce", "set_state"]

_PLAIN = (int, float, complex, str, bytes, bytearray, bool, type(None), list, tuple, dict, set, frozenset)
_HOOKS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
# Unpickling calls these on an object that is still empty.
_ACCESSORS = ("__getattr__", "__getattribute__", "__setattr__")
_FILLERS = ("__setitem__", "append", "extend", "add", "update")
# Their ways of pickling call the constructor again, or leave out what they can do without.
_LOSING = {
    *("gym", "gymnasium", "pettingzoo", "sb3_contrib", "shimmy", "stable_baselines3", "supersuit"),
    *("tensordict", "torchrl", "torchrl_ext"),
}
_LOSING_BASES = {("torch.nn.modules.module", "Module"), ("numpy.polynomial._polybase", "ABCPolyBase")}


def reduce(value: Any) -> tuple[Any, ...] | None:
    """Reduce an object by a rule of ours, as ``__reduce__`` does.

    :param value: anything
    :return: callable, arguments and state; None: pickle's own way is right for it
    """
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, (type, types.FunctionType, types.ModuleType)):
        return None
    generator = _streams.reduce_generator(value)
    if generator is not None:
        return generator
    rebuilder = _rebuilders.find(value)
    if rebuilder is not None:
        return rebuilder.rule(value)
    if issubclass(kind, np.ndarray):
        return _subclassed(value) if kind is not np.ndarray and _kinds.dictionary(value) else None
    if _taken_raw(kind) or (issubclass(kind, dict) and _kinds.dictionary(value) is value):
        return raw(value)
    return None


def by_pickle(value: Any) -> Any:
    """Reduce an object as pickle does where there is no rule of ours."""
    import cloudpickle

    reducer = cloudpickle.Pickler.dispatch_table.get(type(value))
    return value.__reduce_ex__(4) if reducer is None else reducer(value)


def raw(value: Any) -> tuple[Any, ...]:
    """Reduce to a new object of the class with these attributes and contents, past all methods of the class."""
    held, base = _kinds.dictionary(value), _kinds.container(type(value))
    # The dictionary of some is what they hold as a dictionary: it stays one.
    own = held if held is None or held is not value else True
    state = (dict(own) if isinstance(own, dict) else own, _kinds.slots(value), None if base is None else base(value))
    return _blank, (type(value),), state, None, None, _fill


def _subclassed(array: Any) -> tuple[Any, ...] | None:
    """Reduce an array that has attributes, which NumPy forgets."""
    owner = _owner(type(array), "__reduce__")
    if owner is not None and owner.__module__.partition(".")[0] != "numpy":
        return None
    return _view, (type(array), array.view(np.ndarray)), dict(vars(array)), None, None, set_state


def _view(kind: Any, array: Any) -> Any:
    return array.view(kind)


def _blank(kind: type) -> Any:
    base: Any = _kinds.container(kind) or object
    return base.__new__(kind)


def _fill(copy: Any, state: tuple[Any, dict[str, Any], Any]) -> None:
    held, slots, content = state
    if content is not None:
        base = type(content)
        base.extend(copy, content) if base is list else base.update(copy, content)
    if held is True:
        object.__setattr__(copy, "__dict__", copy)
    elif held:
        set_state(copy, held)
    for name, part in slots.items():
        object.__setattr__(copy, name, part)


def layer(value: Any, state: dict[str, Any]) -> tuple[Any, ...]:
    """Reduce to a new object of the class with these attributes, past the class's own way of pickling.

    That of gymnasium's EzPickle calls the constructor again: whatever was changed since then is lost.
    """
    return copyreg.__newobj__, (type(value),), state, None, None, set_state  # type: ignore[attr-defined]


def set_state(copy: Any, state: dict[str, Any]) -> None:
    """Fill a new object, past ``__setattr__`` and ``__getattr__``, which may ask the layer below it."""
    held = _kinds.dictionary(copy)
    assert held is not None, f"{type(copy)} has no __dict__"
    held.update(state)


def is_layer(value: Any) -> bool:
    """Whether this is an environment or a wrapper of one: it resets and steps, or pickles as if it did."""
    held = _kinds.dictionary(value)
    return held is not None and (_steps(type(value)) or "_ezpickle_args" in held)


@_kinds.per_class
def _steps(kind: type) -> bool:
    names = {name for base in kind.__mro__ for name in vars(base)}
    return "reset" in names and "step" in names


@_kinds.per_class
def _taken_raw(kind: type) -> bool:
    """Whether instances are copied attribute by attribute: what they are made of allows it, and what pickle does not.

    A way of pickling that somebody wrote for a class of his own is respected: it may drop handles on purpose.
    """
    if _kinds.foreign_base(kind) is not None or issubclass(kind, (tuple, frozenset)):
        return False
    hooks: set[Any] = {owner for name in _HOOKS if (owner := _owner(kind, name)) is not None}
    hooks |= {copyreg.dispatch_table[kind]} if kind in copyreg.dispatch_table else set()
    if any(not _loses(owner) for owner in hooks):
        return False
    called = _ACCESSORS if _kinds.container(kind) is None else (*_ACCESSORS, *_FILLERS)
    return bool(hooks) or _steps(kind) or any(_owner(kind, name) is not None for name in called)


def _loses(owner: Any) -> bool:
    named = _kinds.name_of(owner)
    return named[0].partition(".")[0] in _LOSING or named in _LOSING_BASES


def _owner(kind: type, name: str) -> type | None:
    """Give the class, other than those built in, that defines a name."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner if owner is not None and _kinds.made_in_python(owner) else None
