"""What an object holds, and by which step of a path it is found there: in the original and in a copy alike."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_ext_core.factory import _kinds, _rebuilders, _state, _streams, _tokens

__all__ = ["Parts", "named", "parts"]

Parts = Iterator[tuple[str, Any]]
_BEYOND = 1 << 32


def parts(item: Any) -> Parts:
    """Give what an object holds, but for the parts of a set: those have no order.

    Nothing of the object's own code runs but, if it is of a class in C, its way of being pickled: its state can be read
    in no other way.

    :raises Exception: it cannot be looked into
    """
    kind = type(item)
    rebuilder = _rebuilders.find(item)
    if rebuilder is not None:
        yield from _of_rule(item, rebuilder)
    elif kind is _rebuilders.Fields:
        yield from named(item)
    elif kind is types.FunctionType:
        yield from _of_function(item)
    elif kind is types.MethodType:
        yield from ((".__func__", item.__func__), (".__self__", item.__self__))
    elif kind is types.BuiltinFunctionType:
        if not isinstance(item.__self__, (type, types.ModuleType, type(None))):
            yield ".__self__", item.__self__
    elif kind is functools.partial:
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
        yield from named(vars(item))
    elif kind is types.CellType:
        yield from _of_cell(item)
    elif issubclass(kind, np.ndarray):
        yield from _of_array(item)
    elif _streams.is_generator(item):
        if issubclass(kind, np.random.Generator):
            yield ".bit_generator", item.bit_generator
        yield from named({name: part for name, part in _kinds.attributes(item).items() if name != "gauss_next"})
    elif _tokens.whole(item) is not None:
        yield from named(_kinds.attributes(item))
        if getattr(item, "is_leaf", False) and item.grad is not None:
            yield ".grad", item.grad
    else:
        yield from _of_object(item, kind)


def named(found: Mapping[str, Any]) -> Parts:
    """Give attributes in an order that does not vary."""
    yield from ((f".{name}", found[name]) for name in sorted(found, key=str))


def _of_object(item: Any, kind: type) -> Parts:
    yield from named(_kinds.attributes(item))
    if issubclass(kind, BaseException):
        yield ".__traceback__", item.__traceback__ is not None
        yield from ((f".{name}", getattr(item, name)) for name in ("__cause__", "__context__"))
    if _kinds.foreign_base(kind) is not None:
        yield from _of_reduced(item, _state.by_pickle(item), _kinds.attributes(item))
    elif issubclass(kind, dict):
        yield from _of_pairs(dict.items(item))
    elif issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        yield from ((f"[{index}]", part) for index, part in enumerate(base.__iter__(item)))


def _of_pairs(pairs: Any) -> Parts:
    for index, (key, part) in enumerate(pairs):
        text = _tokens.label(key)
        step = f"[{text}]" if text is not None else f"[#{index}]"
        yield step, part
        # A number so large may be somebody's id().
        if text is None or (type(key) is int and key > _BEYOND):
            yield f"{step}.<key>", key


def _of_array(array: Any) -> Parts:
    yield from named(_kinds.dictionary(array) or {})
    if array.dtype.names and array.dtype.hasobject:
        yield from ((f"[{name!r}]", array[name]) for name in array.dtype.names)
    elif array.dtype.hasobject:
        yield from ((f"[{index}]", part) for index, part in enumerate(array.ravel().tolist()))


def _of_function(function: types.FunctionType) -> Parts:
    if _tokens.is_global(function):
        return
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from named(vars(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f".<{name}>", cell
    for name in sorted(_tokens.names_in(function.__code__)):
        part = function.__globals__.get(name)
        if part is not None and not isinstance(part, types.ModuleType):
            yield f".<global {name}>", part


def _of_cell(cell: types.CellType) -> Parts:
    try:
        yield "", cell.cell_contents
    except ValueError:  # not filled yet
        return


def _of_rule(item: Any, rebuilder: _rebuilders.Rebuilder) -> Parts:
    if rebuilder.settings is None:
        yield from _of_reduced(item, rebuilder.rule(item), {})
        return
    settings = rebuilder.settings(item)
    if isinstance(settings, Mapping):
        yield from named(settings)
    else:
        yield ".<settings>", settings


def _of_reduced(item: Any, reduced: Any, known: Mapping[str, Any]) -> Parts:
    """Give what a reduction holds, but for the attributes that are known already."""
    if isinstance(reduced, str):  # the name of something global
        yield ".<name>", reduced
        return
    function, args, state, contents, pairs = (*reduced, None, None, None)[:5]
    yield ".<maker>", function
    yield from ((f"({index})", part) for index, part in enumerate(args) if part is not type(item))
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict):
            yield from named({name: value for name, value in part.items() if name not in known})
        elif part is not None:
            yield ".<state>", part
    yield from ((f"[{index}]", part) for index, part in enumerate(contents or ()))
    yield from _of_pairs(pairs or ())
