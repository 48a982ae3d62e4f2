"""Remembers with which arguments environments were constructed, for those who ask for it at import."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rl_ext_core.errors import InvalidTypeError

__all__ = ["capture_constructors", "recorded"]

_Call = tuple[type, tuple[Any, ...], dict[str, Any]]

# Not an attribute of the instance: copies and comparisons are to see what the environment's author put there. By id:
# not every instance can be hashed, and two of them may be equal.
_calls: dict[int, tuple[weakref.ref[Any], _Call]] = {}


def capture_constructors(cls: type) -> None:
    """Remember the arguments of every instance of a class that is constructed from now on.

    For environments that hold what cannot be copied and for which there is no rule: they can be constructed again. Call
    it once, above the first instance. A copy is compared with the original all the same.

    :param cls: the class; with all that share its metaclass if that one makes instances, as that of TorchRL's
        ``EnvBase`` does
    :raises InvalidTypeError: no class
    """
    if not isinstance(cls, type):
        raise InvalidTypeError(f"cls={cls!r} is not a class; write capture_constructors(MyEnv)")
    meta = next(base for base in inspect.getmro(type(cls)) if "__call__" in vars(base))
    owner, name, capture = (cls, "__init__", _init) if meta is type else (meta, "__call__", _call)
    original = getattr(owner, name)
    if owner not in getattr(original, "_captured_for", ()):
        captured: Any = functools.wraps(original)(capture(cls, original))
        captured._captured_for = (owner,)
        setattr(owner, name, captured)


def recorded(instance: Any) -> _Call | None:
    """Give the class, the arguments and the keyword arguments that made an instance, if they are known."""
    known = _calls.get(id(instance))
    return None if known is None else known[1]


def _init(cls: type, original: Callable[..., None]) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:  # of a subclass these are not the arguments
            remember(self, cls, args, kwargs)
        original(self, *args, **kwargs)

    return init


def _call(cls: type, original: Callable[..., Any]) -> Any:
    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        instance = original(cls, *args, **kwargs)
        remember(instance, cls, args, kwargs)
        return instance

    return call


# What wraps a user's constructor travels with his class, and this name with it: by reference, without what it keeps.
def remember(instance: Any, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep the arguments of an instance for as long as it lives."""
    key = id(instance)
    try:
        reference = weakref.ref(instance, lambda _: _calls.pop(key, None))
    except TypeError:  # of a class with slots
        return
    _calls[key] = reference, (cls, args, dict(kwargs))
