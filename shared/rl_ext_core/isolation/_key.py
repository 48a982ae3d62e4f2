"""By which a verdict is found again: what builds the environment, written such that equal recipes read alike."""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rl_ext_core
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory._fingerprint import fingerprint

__all__ = ["key_of"]

_DEEPEST = 60
_SCALARS = (int, float, complex, bytes, bool, type(None), type(...), np.generic, np.dtype)
# Whether equal ones are one object is chance.
_NEVER_CYCLIC = (tuple, frozenset, types.CodeType, np.ndarray)
# What a class has by itself, or what says nothing of what its instances do.
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
_OF_CLASSES |= {"__slotnames__"}  # made by pickle


class _UnknownError(Exception):
    """Something that cannot be described."""


def key_of(factories: Sequence[EnvFactory[Any]], who: Sequence[int], format_version: int) -> str | None:
    """Give a name that differs where the recipes, the interpreter or this package do.

    Whether the code is still the same is not for the name to say: that shows in the files that are loaded.

    :param factories: build the environments
    :param who: which factory is used for each
    :param format_version: of what is kept under the name
    :return: a name for a file; None: what the recipe holds cannot be described
    """
    try:
        recipe = _Describer().describe([_essence(factory) for factory in factories])
    except (_UnknownError, RecursionError):
        return None
    here = (format_version, rl_ext_core.__version__, sys.version, sys.prefix, os.getcwd(), *who)
    return hashlib.blake2b(repr((here, recipe)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _essence(factory: EnvFactory[Any]) -> tuple[Any, ...]:
    common = (factory.origin, factory._adapters, dict(factory.overrides))
    if factory.live is not None:
        return *common, repr(sorted(fingerprint(factory.live).tokens.items()))
    if factory.origin == "graft":
        raise _UnknownError
    try:
        return *common, _called(factory)
    except Exception as error:
        raise _UnknownError from error


def _called(factory: EnvFactory[Any]) -> Any:
    if not factory._recipe.takes_arguments:  # what an instance was made by
        raise _UnknownError
    return factory._recipe.unpacked()


class _Describer:
    """Turns values into nested tuples of plain ones."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0

    def describe(self, value: Any) -> Any:
        """Describe a value.

        :raises _UnknownError: it, or something that it holds, cannot be
        """
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name
        if isinstance(value, (str, os.PathLike)):
            return _text(os.fspath(value))
        if isinstance(value, _SCALARS):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        if not isinstance(value, _NEVER_CYCLIC):
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnknownError
        try:
            return self._compound(value)
        finally:
            self._depth -= 1

    def _compound(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__, _file_of(value.__name__)
        if isinstance(value, (type, types.FunctionType)):
            named = _by_name(value)
            return named or (self._class(value) if isinstance(value, type) else self._function(value))
        if isinstance(value, types.BuiltinFunctionType):
            return "builtin", value.__module__, value.__qualname__
        if isinstance(value, types.CodeType):
            return "code", value.co_code, self._all(value.co_consts), value.co_names, value.co_flags
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
        if isinstance(value, (list, tuple)):
            return type(value).__qualname__, self._all(value)
        if isinstance(value, (set, frozenset)):
            return type(value).__qualname__, sorted(map(repr, map(self.describe, value)))
        if isinstance(value, (dict, types.MappingProxyType)):
            return type(value).__qualname__, [
                (self.describe(name), self.describe(item)) for name, item in value.items()
            ]
        return self._object(value)

    def _all(self, values: Any) -> list[Any]:
        return [self.describe(value) for value in values]

    def _object(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, functools.partial):
            return "partial", self.describe(value.func), self._all(value.args), self.describe(value.keywords)
        if isinstance(value, types.MethodType):
            return "method", self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, (staticmethod, classmethod)):
            return kind.__name__, self.describe(value.__func__)
        if isinstance(value, property):
            return "property", self._all((value.fget, value.fset, value.fdel))
        # Of others the attributes have to be all there is.
        if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
            raise _UnknownError
        if not hasattr(value, "__dict__") or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
            raise _UnknownError
        return "object", self.describe(kind), self.describe(vars(value))

    def _function(self, function: types.FunctionType) -> Any:
        """Describe a function that travels by its code, as those of scripts and lambdas do."""
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.describe(cell.cell_contents))
            except ValueError:  # not filled yet
                cells.append("empty")
        used = sorted(_names_in(function.__code__) & function.__globals__.keys())
        return (
            "function",
            self.describe(function.__code__),
            self.describe(function.__defaults__),
            self.describe(function.__kwdefaults__),
            cells,
            [(name, self.describe(function.__globals__[name])) for name in used],
        )

    def _class(self, kind: type) -> Any:
        members = sorted((name, value) for name, value in vars(kind).items() if name not in _OF_CLASSES)
        described = [(name, self.describe(value)) for name, value in members]
        return "class", kind.__qualname__, self._all(kind.__bases__), described


def _text(text: str | bytes) -> Any:
    """Describe a text, and the file if it is the path of one: a model, a ROM."""
    try:
        state = os.stat(text) if text and os.path.isfile(text) else None
    except (OSError, ValueError):
        state = None
    return ("text", text) if state is None else ("file", text, state.st_mtime_ns, state.st_size)


def _by_name(value: Any) -> Any:
    """Describe what a worker imports; None: it does not, because it is not there under its name."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or value.__module__ == "__main__":
        return None
    try:
        found = operator.attrgetter(value.__qualname__)(module)
    except AttributeError:
        return None
    return ("named", value.__module__, value.__qualname__, _file_of(value.__module__)) if found is value else None


def _file_of(module: str) -> Any:
    path = getattr(sys.modules.get(module), "__file__", None)
    return None if path is None else _text(str(Path(path).absolute()))


def _names_in(code: types.CodeType) -> set[str]:
    nested = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*nested)
