"""What an environment consists of, path by path: two of them are compared without asking either what matters, and what
builds one is recognized in another process.

What its code reads beside it belongs to that: attributes of classes, globals, settings of the process. A copy in
another process has the classes and modules as they are imported there; what was changed since the import, by the user
or by the code itself, is not part of a pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import sys
import sysconfig
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np

from rl_ext_core._import_path import is_found_elsewhere
from rl_ext_core.factory import _objects, _parts, _rules, _rules_basics

# Lists of numbers and texts that are longer get one token: a recording of them would take minutes.
_LONG = 256
# A path that is longer is shortened: in a chain of objects, all together would fill the memory.
_LONGEST = 1_000
_SKETCHED = 1_000
_BEYOND = 1 << 32
_FLAT = {int, float, bool, str, type(None)}
# gymnasium makes these when they are first asked for.
_MADE_LATE = ("._np_random", "._np_random_seed")
# They are as they are in every process, or as what was called there has left them (TorchRL's, tensordict's).
_FIXED = sys.stdlib_module_names | {"builtins", "numpy", "torch", "torchrl", "tensordict"}
_DEEP = 6
# Between the path to an object and the module's global or the class's attribute that is the same object.
SAME_AS = ".<same object as> "
# Handles of objects in C are of these types, next to int.
_NUMBERS = (np.integer, ctypes._SimpleCData)
_OF_CFFI = {"_cffi_backend.Lib", "_cffi_backend.CompiledLib"}
_SYSTEM = ("None", "libc.", "libm.", "libdl.", "librt.", "libpthread.", "msvcrt", "ucrtbase", "kernel32")
_CHANGED_IN_PLACE = {dict, list, set, bytearray, defaultdict, OrderedDict, deque, np.ndarray}
# What was registered is found by who asks for it.
_REGISTRIES = {"<global gymnasium.envs.registration.registry>"}


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that can be reached from an environment.

    :ivar tokens: per path, such as ``".env._max_episode_steps"``, something that is equal for equal values
    :ivar opaque: paths of what could not be looked into, with the class's name
    :ivar notes: paths of what no copy has, whatever is compared, with what that is
    :ivar handles: by the paths of objects with a number that a library in C may have given them, class and reason
    :ivar references: by the ids of held objects that code reads as a module's global or that are a class's attribute,
        the module, the qualified name and the steps by which another process finds them
    """

    tokens: dict[str, Any]
    opaque: dict[str, str]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    references: dict[int, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    handles: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def differences(self, other: Fingerprint) -> list[str]:
        """List the paths at which two differ, those of generators' states left out; the shortest first."""
        mine, its = self.tokens, other.tokens
        paths = [path for path in {**mine, **its} if not _alike(path, mine.get(path), its.get(path))]
        return sorted(paths, key=lambda path: (self.is_of_class(path), path.count(".") + path.count("["), path))

    def imported_at(self, path: str) -> str:
        """Return the module's global or class's attribute in which a path lies; empty if there is none."""
        same = [key.partition(SAME_AS)[::2] for key in self.tokens if SAME_AS in key]
        return next((label for start, label in same if path.startswith(start)), "")

    @staticmethod
    def is_of_class(path: str) -> bool:
        """Whether a path leads to what classes and modules hold: other processes import them as they were written."""
        return path.startswith("<")


def _alike(path: str, one: Any, other: Any) -> bool:
    if one == other:
        return True
    late = path.removesuffix(".bit_generator").endswith(_MADE_LATE)
    return late and any(token in (None, ("NoneType", "None")) for token in (one, other))


def fingerprint(value: Any, *, code: bool = False) -> Fingerprint:
    """Walk through everything that a value reaches.

    :param value: an environment, or anything else; only read
    :param code: whether what methods and functions read beside it belongs to it
    """
    walk = _walked(value)
    beside = _Beside(code=code)
    beside.run(walk)
    settings = dict(_settings(beside.libraries)) if code else {}
    tokens = {**walk.tokens, **beside.tokens, **settings}
    handles = dict(_handles(walk, beside.c_libraries))
    return Fingerprint(tokens, walk.opaque, walk.notes, beside.references, handles)


def description(value: Any) -> list[tuple[str, Any]]:
    """Describe a value as plain data that is equal for equal values, in every process.

    Classes and functions that are imported are described by their names, others by what they consist of.

    :return: paths and tokens
    :raises ValueError: something in it cannot be described
    """
    walk = _walked(value)
    beside = _Beside(code=True, imported=False)
    beside.run(walk)
    tokens = {**walk.tokens, **beside.tokens}
    unknown = [*walk.opaque, *(path for path, token in tokens.items() if token[0] in ("generator", "address"))]
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be described")
    return sorted(tokens.items())


def _walked(value: Any) -> _Walk:
    walk = _Walk()
    walk.through(value)
    walk.name_shared_memory()
    walk.name_addresses()
    return walk


class _Walk:
    """One walk, breadth first: paths are as short as can be, and what is reached twice is named by the first path."""

    def __init__(self, *, nested: int = 0, careful: bool = False) -> None:
        self.tokens: dict[str, Any] = {}
        self.opaque: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._own: set[str] = set()
        self._nested, self._careful = nested, careful
        self.seen: dict[int, str] = {}
        # No id may be used again while the walk lasts.
        self.alive: list[Any] = []
        self._waiting: deque[tuple[str, Any]] = deque()
        self._sets: deque[tuple[str, Any]] = deque()
        self._arrays: list[tuple[str, _objects.Extent]] = []
        self._numbers: list[tuple[str, int]] = []
        self.classes: dict[type, None] = {}  # in the order in which they are met
        self.functions: list[types.FunctionType] = []

    def through(self, value: Any) -> None:
        self._waiting.append(("", value))
        while self._waiting or self._sets:
            if self._waiting:
                self._visit(*self._waiting.popleft())
            else:
                self._enter_set(*self._sets.popleft())
            if self._nested and len(self.tokens) > _SKETCHED:
                return

    def _visit(self, path: str, item: Any) -> None:
        token = _parts.scalar(item) or _parts.by_version(item)
        if token is not None:
            self.tokens[path] = token
            if issubclass(type(item), (int, np.integer)) and item > _BEYOND:
                self._numbers.append((path, int(item)))
            return
        if type(item) is types.CellType:
            # Two functions may share it, whatever is in it.
            where = self.seen.setdefault(id(item), path)
            if where != path:
                self.tokens[f"{path}.<variable>"] = ("same as", where)
            self.alive.append(item)
            self._waiting.extendleft((path + step, part) for step, part in _parts.parts(item))
            return
        if len(path) > _LONGEST:
            path = f"{path[:60]}...{_parts.digest(path.encode('utf-8', 'surrogatepass'))}"
        if self._is_named(path, item):
            return
        self.classes[type(item)] = None
        place = _objects.extent(item)
        if place is not None:
            self._arrays.append((path, place))
        flat = _flat(item)
        if flat is not None:
            self.tokens[path] = flat
        else:
            self._open(path, item)

    def _is_named(self, path: str, item: Any) -> bool:
        """Name what was met before by where that was; what is the same in all processes by its name."""
        kind = type(item)
        if issubclass(kind, (type, types.ModuleType)) or (kind is types.FunctionType and _parts.is_global(item)):
            self.tokens[path] = _parts.whole(item)
            if issubclass(kind, type):
                self.classes[item] = None
            elif kind is types.FunctionType:
                self.functions.append(item)
            return True
        if kind is frozenset and not item:
            self.tokens[path] = ("frozenset", None)
            return True
        if kind is tuple and None not in (token := tuple(map(_parts.scalar, item))):
            self.tokens[path] = ("tuple", token)  # which one it is does not matter
            self._numbers += [
                (f"{path}[{i}]", part) for i, part in enumerate(item) if type(part) is int and part > _BEYOND
            ]
            return True
        # Of arrays, only where their values lie matters: a library in C may show its memory by a new one every time.
        if id(item) in self.seen and not (kind is np.ndarray and not item.dtype.hasobject):
            self.tokens[path] = ("same as", self.seen[id(item)])
            return True
        self.seen[id(item)] = path
        self.alive.append(item)
        held = _objects.dictionary(item)
        if held is not None:
            where = self.seen.setdefault(id(held), f"{path}.__dict__")
            if where != f"{path}.__dict__":
                self.tokens[f"{path}.__dict__"] = ("same as", where)
        return False

    def _open(self, path: str, item: Any) -> None:
        kind = type(item)
        rebuilder = _rules.find(item)
        token = _parts.whole(item) if rebuilder is None else None
        if kind is types.FunctionType:
            self.functions.append(item)
        if self._careful and rebuilder is None and _is_foreign(kind):
            self.tokens[path] = token or _objects.full_name(kind)
            return
        try:
            found = list(_parts.parts(item))
        except Exception:
            found, self.opaque[path] = list(_parts.named(_objects.attributes(item))), _objects.full_name(kind)
        untold = rebuilder is not None and rebuilder.settings is None and _rules.is_registered(kind)
        if untold or _rules_basics.runs(item):
            self.opaque[path] = _objects.full_name(kind)
        if not is_installed(_objects.name_of(kind)[0].partition(".")[0]):
            self._own.add(path)
        if issubclass(kind, (set, frozenset)):
            self._sets.append((path, item))
            if path.rpartition(".")[0] in self._own and _varies(item):
                self.notes[path] = "a set has another order in every process: where it matters, use sorted() or a list"
        order = (
            [step for step, _ in found] if issubclass(kind, dict) else len(found) if issubclass(kind, list) else None
        )
        self.tokens[path] = token or (_objects.full_name(kind), order and _parts.digest(repr(order).encode()))
        self._waiting.extend((path + step, part) for step, part in found)

    def _enter_set(self, path: str, item: Any) -> None:
        """Visit a set's parts, which have an order that varies: by what they are, and where else they were met."""
        kind = set if issubclass(type(item), set) else frozenset
        objects = []
        for part in kind.__iter__(item):
            text = _parts.label(part)
            if text is not None:
                self.tokens[f"{path}{{{text}}}"] = _parts.scalar(part)
            else:
                objects.append((self.seen.get(id(part), ""), self._sketch(part), part))
        objects.sort(key=lambda entry: entry[:2])
        self._waiting.extend((f"{path}{{#{index}}}", part) for index, (_, _, part) in enumerate(objects))

    def _sketch(self, item: Any) -> str:
        if self._nested > 1:  # by way of a cycle, it would go on for ever
            return _objects.full_name(type(item))
        walk = _Walk(nested=self._nested + 1)
        walk.through(item)
        return repr(walk.tokens)

    def name_shared_memory(self) -> None:
        """Note which arrays lie in one piece of memory, and how."""
        for group in _objects.overlapping([place for _, place in self._arrays]):
            first, where = self._arrays[group[0]]
            for path, place in (self._arrays[index] for index in group[1:]):
                self.tokens[f"{path}.<memory>"] = ("shared with", first, place[1] - where[1])

    def name_addresses(self) -> None:
        """Note numbers that are the id of something, or point to memory: in a copy they lead elsewhere."""
        mapped = _objects.mapped() if self._numbers else []
        for path, number in self._numbers:
            if number in self.seen:
                self.tokens[path] = ("id of", self.seen[number])
            elif any(low <= number < high for low, high in mapped):
                # Equal to no other: another process may have something else there.
                self.tokens[path] = ("address", os.urandom(8).hex())


def _is_foreign(kind: type) -> bool:
    """Whether it takes code of a library in C to look into instances."""
    base = _objects.foreign_base(kind)
    return base is not None and not is_fixed(_objects.name_of(base)[0])


def _described(item: Any) -> Any:
    """Return one token for all that an object of a class or a module consists of."""
    walk = _Walk(nested=1, careful=True)
    walk.through(item)
    # A space that was drawn from has a generator; each process is to draw from its own in any case.
    lasting = sorted(pair for pair in walk.tokens.items() if not any(late in pair[0] for late in _MADE_LATE))
    return _objects.full_name(type(item)), _parts.digest(repr(lasting).encode("utf-8", "replace"))


def _varies(parts: Any) -> bool:
    """Whether the order of a set is another one in another process."""
    fixed = (int, float, complex, bool, np.number)
    return len(parts) > 1 and not all(isinstance(part, fixed) for part in parts)


def _flat(item: Any) -> Any:
    """Return the token of a long list of numbers and texts."""
    kind = type(item)
    if kind not in (list, dict) or len(item) <= _LONG:
        return None
    kinds = set(map(type, item)) | (set(map(type, item.values())) if kind is dict else set())
    if not kinds <= _FLAT:
        return None
    return _objects.full_name(kind), len(item), _parts.digest(repr(item).encode("utf-8", "surrogatepass"))


class _Beside:
    """What classes have as attributes, and what methods and functions read beside their arguments.

    Functions and classes that they name are followed within a package, and into whatever is not installed.

    :param code: whether code is looked into; else only the plain data of classes is
    :param imported: whether classes and functions are looked into that other processes import by their names
    :ivar tokens: by paths such as ``"<class module.Name>.attribute"`` and ``"<global module.name>"``
    :ivar libraries: that the code names
    :ivar references: see :class:`Fingerprint`
    :ivar c_libraries: those that code of the user's calls, by its package
    """

    def __init__(self, *, code: bool, imported: bool = True) -> None:
        self._code, self._imported = code, imported
        self.tokens: dict[str, Any] = {}
        self._met: dict[type, None] = {}
        self._named: Counter[str] = Counter()
        self._done: set[int] = set()
        self.libraries: set[str] = set()
        self.references: dict[int, tuple[Any, ...]] = {}
        self.c_libraries: dict[str, str] = {}
        self._waiting: deque[Any] = deque()
        self._held: dict[int, str] = {}

    def run(self, walk: _Walk) -> None:
        """Begin with the classes and functions that a walk has met."""
        self._met = dict.fromkeys(base for kind in walk.classes for base in kind.__mro__)
        self._held = walk.seen
        for found in (*sorted(self._met, key=_objects.full_name), *(walk.functions if self._code else ())):
            self._add(found)
        while self._waiting:
            found = self._waiting.popleft()
            self._read_class(found) if isinstance(found, type) else self._read_code(found)

    def _add(self, found: Any) -> None:
        key = id(found if isinstance(found, type) else found.__code__)
        if key not in self._done and (self._imported or not _parts.is_global(found)):
            self._done.add(key)
            self._waiting.append(found)

    def _read_class(self, kind: type) -> None:
        module = _objects.name_of(kind)[0]
        if is_fixed(module) or not _objects.made_in_python(kind):
            return
        called = _objects.full_name(kind)
        self._named[called] += 1
        if (number := self._named[called]) > 1:  # a decorator may have made another one of that name
            called += f" number {number}"
        for name, part in _objects.namespace(kind).items():
            functions = list(_functions_in(part)) if self._code else []
            for function in functions:
                self._add(function)
            special = name.startswith("__") and name.endswith("__")
            if (special and not functions) or name == "_abc_impl" or _objects.is_inherited(kind, name, part):
                continue
            if isinstance(part, types.MemberDescriptorType):  # of a slot: what the class is made of, as its methods are
                continue
            label = f"<class {called}>.{name}"
            if self._code and (token := self._library(part, label, module)) is not None:
                self.tokens[label] = token
                continue
            if self._code and name != "metadata":  # vector environments hold that of their environments
                self._compare_identity(part, label, kind, name)
            # What libraries keep for themselves differs by process.
            private = name.startswith("_") and is_installed(module.partition(".")[0])
            if isinstance(part, type):
                if part.__qualname__.startswith(f"{kind.__qualname__}."):
                    self._met[part] = None
                    self._add(part)
                elif self._code:
                    self._follow(part, part.__module__, module)
            elif (kind in self._met or not private) and (token := _parts.plain(part)) is not None:
                self.tokens[label] = token
            elif functions or (self._code and not private):
                self.tokens[label] = self._token(part, functions, module)

    def _read_code(self, function: types.FunctionType) -> None:
        module = str(function.__globals__.get("__name__"))
        names, read = _parts.names_in(function.__code__), _parts.globals_in(function.__code__)
        for name in sorted(names):
            if name in read and name in function.__globals__:
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
        self.libraries.add(str(of).partition(".")[0])
        if isinstance(value, types.ModuleType):
            if not is_fixed(value.__name__):
                for attribute in sorted(names & vars(value).keys()):
                    inner = vars(value)[attribute]
                    if not isinstance(inner, types.ModuleType) or attribute != name:
                        self._global(value.__name__, attribute, inner, reader, names - {name})
            return
        label = f"<global {module}.{name}>"
        self._compare_identity(value, label, sys.modules.get(module), name)
        if label in self.tokens or label in _REGISTRIES:
            return
        if (token := self._library(value, label, reader)) is not None:
            self.tokens[label] = token
            return
        if isinstance(value, type):
            # Which one stands there; what is in it where it is followed.
            self.tokens[label] = ("class", _objects.full_name(value))
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

    def _library(self, value: Any, label: str, reader: str) -> Any:
        """Return the token of a library in C, or of a function in one; None: it is neither."""
        token = _library_token(value) if self._imported else None
        package = reader.partition(".")[0]
        if token is not None and not is_installed(package) and not _is_of_system(value):
            self.c_libraries.setdefault(package, label)
        return token

    def _compare_identity(self, value: Any, label: str, owner: Any, name: str) -> None:
        """Note that the environment holds the very object that a module or class has under a name."""
        if not self._imported or id(value) not in self._held or not _has_identity(value, label):
            return
        self.tokens[f"{self._held[id(value)]}{SAME_AS}{label}"] = ("is", label)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
        is_imported = isinstance(owner, types.ModuleType) or _parts.is_global(owner)
        # What travels by value stays one object within a pickle.
        if (
            id(value) not in self.references
            and is_imported
            and vars(owner).get(name) is value
            and _travels_by_name(module)
        ):
            qualified = name if isinstance(owner, types.ModuleType) else f"{owner.__qualname__}.{name}"
            self._refer(value, (module, qualified))

    def _refer(self, value: Any, place: tuple[Any, ...]) -> None:
        """Note where a shared object is found, with its parts: the environment may hold these by other paths too."""
        waiting = deque([(value, place)])
        while waiting:
            item, where = waiting.popleft()
            self.references[id(item)] = where
            waiting.extend((part, (*where, step)) for step, part in _steps(item) if self._is_referred(part))

    def _is_referred(self, part: Any) -> bool:
        is_new = id(part) in self._held and id(part) not in self.references
        return is_new and _rules.find(part) is None and not _rules.is_layer(part)

    def _follow(self, found: Any, module: str | None, reader: str) -> None:
        package = str(module).partition(".")[0]
        if package == reader.partition(".")[0] or not is_installed(package):
            self._add(found)

    def _token(self, value: Any, functions: list[types.FunctionType], module: str) -> Any:
        if is_installed(module.partition(".")[0]):
            # Which function stands there: libraries compile some anew when they are first called.
            token: list[Any] = [("function", one.__module__, one.__qualname__) for one in functions]
        else:
            token = [("function", _parts.code_of(one.__code__), _parts.plain(one.__defaults__)) for one in functions]
            if type(value) is functools._lru_cache_wrapper:
                return token, value.cache_info().currsize
        return token or _parts.plain(value, _DEEP) or _described(value)


def _library_token(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, ctypes.CDLL):
        return "library", os.path.basename(str(value._name))
    if issubclass(kind, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        return "library", str(getattr(value, "__name__", ""))
    if _objects.full_name(kind) in _OF_CFFI or kind.__qualname__.endswith(".FFILibrary"):
        return "library", repr(value).partition(" at 0x")[0]
    return None


def _is_of_system(value: Any) -> bool:
    """Whether a library, or the one of a function, is the C library or a part of it."""
    if isinstance(value, ctypes.CDLL):
        return os.path.basename(str(value._name)).startswith(_SYSTEM)
    return hasattr(ctypes.CDLL(None), str(getattr(value, "__name__", " "))) if os.name != "nt" else False


def _handles(walk: _Walk, c_libraries: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Find objects of packages that call a library in C, with numbers by which that may know objects of its own."""
    for item in walk.alive if c_libraries else ():
        library = c_libraries.get(_objects.name_of(type(item))[0].partition(".")[0])
        if library is None or not _objects.made_in_python(type(item)) or _rules.find(item) is not None:
            continue
        for name, part in sorted(_objects.attributes(item).items()):
            inner = part if type(part) in (list, tuple) else part.values() if type(part) is dict else [part]
            if any(type(number) is int or issubclass(type(number), _NUMBERS) for number in inner):
                reason = (
                    f"its {name}={part!r:.40} may be a handle of the C library in {library}, whose state a copy does "
                    "not get; if the library keeps none, pass verify=False"
                )
                yield walk.seen[id(item)], (":".join(_objects.name_of(type(item))), reason)
                break


def _steps(item: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Return the parts of a shared object, with the operator and the key that lead to each."""
    kind = type(item)
    if issubclass(kind, dict):
        yield from ((("getitem", key), part) for key, part in dict.items(item) if type(key) in (str, int))
    elif kind in (list, tuple):
        yield from ((("getitem", index), part) for index, part in enumerate(item))
    if _objects.foreign_base(kind) is None:
        yield from ((("getattr", name), part) for name, part in _objects.attributes(item).items())


def _travels_by_name(module: str) -> bool:
    """Whether another process imports a module, and is not sent its classes and functions by value."""
    by_value = any(f"{module}.".startswith(f"{name}.") for name in cloudpickle.list_registry_pickle_by_value())
    return module not in ("__main__", "__mp_main__") and not by_value and is_found_elsewhere(module)


def _has_identity(value: Any, label: str) -> bool:
    """Whether it matters which one of equal objects this is: it is changed, or compared by ``is``."""
    kind = type(value)
    if kind is object:
        return True
    module = label.removeprefix("<class ").removeprefix("<global ")
    if is_installed(module.partition(".")[0]) or _rules.find(value) is not None or _rules.is_layer(value):
        return False
    if kind in _CHANGED_IN_PLACE:
        return True
    is_plain = _objects.made_in_python(kind) and _objects.foreign_base(kind) is None and not issubclass(kind, tuple)
    return is_plain and not is_installed(_objects.name_of(kind)[0].partition(".")[0])


def _functions_in(value: Any, depth: int = 4) -> Iterator[types.FunctionType]:
    """Return the Python functions that something is, or wraps."""
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
    """Return what is set for a whole thread or process, of those libraries that the code names."""
    if "decimal" in libraries:
        import decimal

        context = decimal.getcontext()
        names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
        traps = sorted(kind.__name__ for kind, trapped in context.traps.items() if trapped)
        yield "<setting decimal.getcontext()>", _parts.plain([*(getattr(context, name) for name in names), traps])
    if "numpy" in libraries:
        yield "<setting numpy.geterr()>", _parts.plain(sorted(np.geterr().items()))
    if "torch" in libraries and "torch" in sys.modules:
        torch = sys.modules["torch"]
        yield "<setting torch.get_default_dtype()>", repr(torch.get_default_dtype())


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
    """Import the user's own modules whose globals have these paths: a function may do so when it is first called.

    Modules that get a global when it is first asked for (PEP 562) are asked.
    """
    for path in paths:
        if not path.startswith("<global "):
            continue
        module, _, name = path.removeprefix("<global ").removesuffix(">").rpartition(".")
        with contextlib.suppress(Exception):
            if module not in sys.modules and not is_installed(module.partition(".")[0]):
                importlib.import_module(module)
            held = vars(sys.modules[module])
            if name not in held and "__getattr__" in held:
                getattr(sys.modules[module], name)
