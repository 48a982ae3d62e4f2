"""What an environment's code reads beside the environment: attributes of classes, globals, settings of the process.

A copy in another process has the classes and modules as they are imported there. What was changed since the import, by
the user or by the code itself, is not part of a pickle.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rl_ext_core.factory import _kinds, _parts, _rules_basics

__all__ = ["import_own", "is_fixed", "is_installed", "read_by"]

# They are as they are in every process, or as what was called there has left them (TorchRL's, tensordict's).
_FIXED = sys.stdlib_module_names | {"builtins", "numpy", "torch", "torchrl", "tensordict"}
_DEEP = 6
# What was registered is found by who asks for it.
_REGISTRIES = {"<global gymnasium.envs.registration.registry>"}


def is_fixed(module: str) -> bool:
    """Whether a module is one that nobody changes, as far as environments are concerned."""
    return module.partition(".")[0] in _FIXED


_OURS = {"rl_ext_core", "torchrl_ext", "sb3_ext"}  # may run from a checkout


@functools.lru_cache(maxsize=1000)
def is_installed(package: str) -> bool:
    """Whether a package was installed, and is not the user's own."""
    if package in _FIXED or package in _OURS:
        return True
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file is not None and str(file).startswith(_PLACES)


_PLACES = tuple(
    os.path.join(place, "") for name in ("purelib", "platlib") if (place := sysconfig.get_paths().get(name))
)


def import_own(paths: Iterable[str]) -> None:
    """Import the user's own modules whose globals have these paths: a function may do so when it is first called."""
    for path in paths:
        module = path.removeprefix("<global ").rpartition(".")[0]
        if path.startswith("<global ") and module not in sys.modules and not is_installed(module.partition(".")[0]):
            with contextlib.suppress(Exception):
                importlib.import_module(module)


def read_by(
    classes: Iterable[type], functions: Iterable[types.FunctionType], describe: Callable[[Any], Any]
) -> dict[str, Any]:
    """Give a token for each thing that the methods of classes and functions read beside their arguments.

    Functions and classes that they name are followed within a package, and into whatever is not installed.

    :param describe: gives the token of an object
    :return: by paths such as ``"<class module.Name>.attribute"`` and ``"<global module.name>"``
    """
    search = _Search(describe)
    search.run(classes, functions)
    return search.tokens


class _Search:
    def __init__(self, describe: Callable[[Any], Any]) -> None:
        self.tokens: dict[str, Any] = {}
        self._describe = describe
        self._done: set[int] = set()
        self._libraries: set[str] = set()
        self._waiting: deque[Any] = deque()

    def run(self, classes: Iterable[type], functions: Iterable[types.FunctionType]) -> None:
        for found in (*sorted(classes, key=_kinds.full_name), *functions):
            self._add(found)
        while self._waiting:
            found = self._waiting.popleft()
            self._read_class(found) if isinstance(found, type) else self._read_code(found)
        self.tokens.update(_settings(self._libraries))

    def _add(self, found: Any) -> None:
        key = id(found if isinstance(found, type) else found.__code__)
        if key not in self._done:
            self._done.add(key)
            self._waiting.append(found)

    def _read_class(self, kind: type) -> None:
        module = _kinds.name_of(kind)[0]
        if is_fixed(module) or not _kinds.made_in_python(kind):
            return
        for name, part in _kinds.namespace(kind).items():
            functions = list(_functions_in(part))
            for function in functions:
                self._add(function)
            special = name.startswith("__") and name.endswith("__")
            if (special and not functions) or name in ("_abc_impl",) or _kinds.is_inherited(kind, name, part):
                continue
            if isinstance(part, type):
                self._follow(part, part.__module__, module)
            elif functions or not (name.startswith("_") and is_installed(module.partition(".")[0])):
                self.tokens[f"<class {_kinds.full_name(kind)}>.{name}"] = self._token(part, functions, module)

    def _read_code(self, function: types.FunctionType) -> None:
        module = str(function.__globals__.get("__name__"))
        names = _parts.names_in(function.__code__)
        for name in sorted(names):
            if name in function.__globals__:
                self._global(module, name, function.__globals__[name], module, names)
            elif name in sys.modules and not is_installed(name):  # imported where it is needed
                self._global(module, name, sys.modules[name], module, names)
        for part in _parts.variables(function):
            for inner in _functions_in(part):
                self._follow(inner, inner.__module__, module)

    def _global(self, module: str, name: str, value: Any, reader: str, names: set[str]) -> None:
        if type(value) in weakref.ProxyTypes:  # of what class it is, what is gone would say
            return
        of = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        self._libraries.add(str(of).partition(".")[0])
        if isinstance(value, types.ModuleType):
            if not is_fixed(value.__name__):
                for attribute in sorted(names & vars(value).keys()):
                    inner = vars(value)[attribute]
                    if not isinstance(inner, types.ModuleType) or attribute != name:
                        self._global(value.__name__, attribute, inner, reader, names - {name})
            return
        label = f"<global {module}.{name}>"
        if label in self.tokens or label in _REGISTRIES:
            return
        if isinstance(value, type):
            # Which one stands there; what is in it where it is followed.
            self.tokens[label] = ("class", _kinds.full_name(value))
            self._follow(value, str(of), reader)
            return
        functions = list(_functions_in(value))
        if functions or not is_installed(module.partition(".")[0]):
            self.tokens[label] = self._token(value, functions, module)
        elif not name.startswith("_") and (token := _parts.plain(value, _DEEP)) is not None:
            # Of libraries only what they offer to be set: what they keep for themselves differs by process.
            self.tokens[label] = token
        for function in functions:
            self._follow(function, function.__module__, reader)

    def _follow(self, found: Any, module: str | None, reader: str) -> None:
        package = str(module).partition(".")[0]
        if package == reader.partition(".")[0] or not is_installed(package):
            self._add(found)

    def _token(self, value: Any, functions: list[types.FunctionType], module: str) -> Any:
        if is_installed(module.partition(".")[0]):
            # Which function stands there: libraries compile some anew when they are first called.
            token: list[Any] = [("function", one.__module__, one.__qualname__) for one in functions]
            return token or _parts.plain(value, _DEEP) or self._describe(value)
        token = [("function", _parts.code_of(one.__code__), _parts.plain(one.__defaults__)) for one in functions]
        if type(value) is functools._lru_cache_wrapper:
            with contextlib.suppress(pickle.PicklingError):
                return token, self._describe(_rules_basics.kept(value))
        return token or _parts.plain(value, _DEEP) or self._describe(value)


def _functions_in(value: Any, depth: int = 4) -> Iterator[types.FunctionType]:
    """Give the Python functions that something is, or wraps."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif depth == 0:
        return
    elif kind is property:
        for part in (value.fget, value.fset, value.fdel):
            yield from _functions_in(part, depth - 1)
    elif kind in (staticmethod, classmethod, types.MethodType):
        yield from _functions_in(value.__func__, depth - 1)
    elif kind in (functools.partial, functools.partialmethod, functools.cached_property):
        yield from _functions_in(value.func, depth - 1)
    elif kind is functools._lru_cache_wrapper:
        yield from _functions_in(value.__wrapped__, depth - 1)


def _settings(libraries: set[str]) -> Iterator[tuple[str, Any]]:
    """Give what is set for a whole thread or process, of those libraries that the code names."""
    if "decimal" in libraries:
        import decimal

        context = decimal.getcontext()
        names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
        traps = sorted(kind.__name__ for kind, trapped in context.traps.items() if trapped)
        yield "<setting decimal.getcontext()>", _parts.plain([*(getattr(context, name) for name in names), traps])
    if "numpy" in libraries:
        import numpy as np

        yield "<setting numpy.geterr()>", _parts.plain(sorted(np.geterr().items()))
    if "torch" in libraries and "torch" in sys.modules:
        torch = sys.modules["torch"]
        yield "<setting torch.get_default_dtype()>", repr(torch.get_default_dtype())
