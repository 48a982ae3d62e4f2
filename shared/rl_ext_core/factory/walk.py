"""What an environment consists of, path by path, so that two of them can be compared.

A path leads from the environment to a part of it, such as ``.env._max_episode_steps``; the token there is equal for
equal values, in every process. An object that is met twice has its parts under the first path, which the second one
refers to. Nothing of the environment's own code runs, but for what pickles objects of classes in C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import itertools
import logging
import os
import random
import sys
import sysconfig
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from rl_ext_core._import_path import is_found_elsewhere
from rl_ext_core.factory import simulators

__all__ = ["Fingerprint", "attributes", "description", "fingerprint", "full_name", "is_installed", "layers"]

# How a part is reached from what holds it: the text of the path, the operation by which it can be set ("attribute",
# "item", "field"; None: it cannot), and the name, the key or the index.
Part = tuple[str, "str | None", Any, Any]
_Found = TypeVar("_Found")

_OF_TORCH = ("dtype", "device", "layout", "memory_format", "Size")
_SINGLE = (type(None), type(...), type(NotImplemented))
_SCALARS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, *_SINGLE))
_AS_THEY_ARE = frozenset((int, bool, type(None)))
# The first part of tokens of values whose identity does not matter.
SCALAR_TOKENS = {kind.__name__ for kind in _SCALARS} | {"tuple", "enum", "dtype", "slice", "range", "class", "module"}
SCALAR_TOKENS |= {"number", "builtin", "typing", *_OF_TORCH}
_LONG = 256  # lists of numbers and texts that are longer get one token
_LONGEST_TEXT = 4096
_BEYOND = 1 << 32
_LONGEST_PATH = 1000
_SKETCHED = 1000
_DEEP = 6
# Classes and globals of these are in every process what they are here.
FIXED = sys.stdlib_module_names | {"builtins", "numpy", "torch", "torchrl", "tensordict"}
_OURS = {"rl_ext_core", "torchrl_ext", "sb3_ext"}  # may run from a checkout
_NAMED_IN_C = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(typing.List[int]))  # noqa: UP006
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_TRANSPARENT = {object, typing.Generic, OrderedDict, defaultdict, *_CONTAINERS}
# Operations on globals, and in how many low bits of their argument there is something else than the name.
_OF_GLOBALS = {
    number: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name, number in dis.opmap.items()
    if "GLOBAL" in name or name == "LOAD_NAME"
}


@dataclasses.dataclass
class Fingerprint:
    """Everything that can be reached from an environment.

    :ivar tokens: by path; those of modules' globals and of classes' attributes begin with ``<``
    :ivar aliases: of paths to what was met before, the path under which it is
    :ivar opaque: paths to what cannot be looked into, with the class's name
    :ivar unpicklable: by path, why a pickle of what is there would be wrong; those of the user's modules and classes,
        where their code reads them, are reasons against a pickle of the environment
    :ivar references: by their ids, objects that are a module's global or a class's attribute, by which another process
        finds its own: module and qualified name
    :ivar objects: by path, what is there
    :ivar steps: by path, the path of what holds it, the operation that sets it, and the name, the key or the index
    :ivar written: by path, names of files that are open for writing
    """

    tokens: dict[str, Any]
    aliases: dict[str, str]
    opaque: dict[str, str]
    unpicklable: dict[str, str] = dataclasses.field(default_factory=dict)
    references: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: dict[str, tuple[str, str | None, Any]] = dataclasses.field(default_factory=dict)
    written: dict[str, str] = dataclasses.field(default_factory=dict)

    def resolved(self, path: str) -> str:
        """Return the path under which the tokens of a part are."""
        if path in self.tokens or not self.aliases:
            return path
        if path in self.aliases:
            return self.aliases[path]
        # Each step makes the holder's own path a first one.
        for end in range(len(path) - 1, 0, -1):
            if path[end] in ".[({" and path[:end] in self.aliases:
                return self.resolved(self.aliases[path[:end]] + path[end:])
        return path

    def token(self, path: str) -> Any:
        """Return the token of a part; None: there is no such part."""
        found = self.tokens.get(path)
        return self.tokens.get(self.resolved(path)) if found is None else found

    def differences(self, other: Fingerprint) -> list[str]:
        """List the paths at which two differ, the shortest first."""
        paths = {**self.tokens, **other.tokens, **self.aliases, **other.aliases}
        return ordered(path for path in paths if self.differs(path, other))

    def differs(self, path: str, other: Fingerprint) -> bool:
        """Whether two differ at a path: in the value, or in what is the same object as another part."""
        mine, its = self.token(path), other.token(path)
        if mine != its:
            return True
        # Each of the two paths leads to one object in one, and has to in the other.
        return any(
            path in one.aliases and another.resolved(path) != another.resolved(one.aliases[path])
            for one, another in ((self, other), (other, self))
        )

    def __getstate__(self) -> dict[str, Any]:
        steps = {path: (holder, operation, None) for path, (holder, operation, _) in self.steps.items()}
        return {**self.__dict__, "objects": {}, "steps": steps, "references": {}}


def ordered(paths: Any) -> list[str]:
    """Sort paths: the environment's own first, then by length."""
    return sorted(paths, key=lambda path: (path.startswith("<"), path.count(".") + path.count("["), path))


def fingerprint(value: Any, *, code: bool = True) -> Fingerprint:
    """Walk through everything that a value reaches.

    :param value: an environment, or anything else; only read
    :param code: whether attributes of classes and globals that their methods read belong to it
    """
    walk = _Walk()
    walk.through(value)
    walk.name_shared()
    walk.find_ids()
    found = Fingerprint(
        walk.tokens, walk.aliases, walk.opaque, walk.unpicklable, {}, walk.objects, walk.steps, walk.written
    )
    if code:
        _Beside(walk, found).run()
    return found


def description(value: Any) -> list[tuple[str, Any]]:
    """Describe a value as plain data that is equal for equal values, in every process.

    :return: paths and tokens
    :raises ValueError: something in it cannot be described
    """
    found = fingerprint(value)
    unknown = [*found.opaque, *(path for path, token in found.tokens.items() if token[0] == "generator")]
    if unknown:
        raise ValueError(f"{unknown[0]} cannot be described")
    return sorted((found.tokens | {path: ("same as", first) for path, first in found.aliases.items()}).items())


def layers(environment: Any) -> Iterator[Any]:
    """Return an environment and those that it wraps, the outermost first."""
    waiting, seen = [environment], {id(environment)}
    while waiting:
        layer = waiting.pop(0)
        yield layer
        held = attributes(layer)
        for value in [*held.values(), *(held.get("_modules") or {}).values()]:  # torch keeps modules in a dict
            if id(value) not in seen and is_layer(value):
                seen.add(id(value))
                waiting.append(value)


def is_layer(value: Any) -> bool:
    """Whether this is an environment or a wrapper of one: its class resets and steps."""
    kind: Any = type(value)
    return _steps(kind) and _dictionary(value) is not None


def _per_class(function: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """Keep what a function of a class returns."""
    return functools.lru_cache(maxsize=10_000)(function)


@_per_class
def _steps(kind: Any) -> bool:
    names = {name for base in kind.__mro__ for name in vars(base)}
    return "reset" in names and "step" in names


def name_of(kind: type) -> tuple[str, str]:
    """Return module and qualified name of a class."""
    return str(getattr(kind, "__module__", "builtins")), kind.__qualname__  # SWIG's has no module


def full_name(kind: type) -> str:
    """Return module and name of a class in one."""
    return ".".join(name_of(kind))


def attributes(instance: Any) -> dict[str, Any]:
    """Return all attributes that are an instance's own, past properties and ``__getattr__``."""
    found = {}
    for name, slot in _slots(type(instance)).items():
        with contextlib.suppress(AttributeError):  # empty
            found[name] = slot.__get__(instance)
    return {**found, **(_dictionary(instance) or {})}


def _dictionary(instance: Any) -> dict[str, Any] | None:
    part = _dictionary_of(type(instance))
    found = None if part is None else part.__get__(instance)
    return found if isinstance(found, dict) else None


@_per_class
def _dictionary_of(kind: Any) -> Any:
    slots = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return next((vars(b)["__dict__"] for b in kind.__mro__ if isinstance(vars(b).get("__dict__"), slots)), None)


@_per_class
def _slots(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if _made_in_python(base):
            members = {n: part for n, part in vars(base).items() if type(part) is types.MemberDescriptorType}
            found = {**members, **found}
    return found


@_per_class
def _made_in_python(kind: Any) -> bool:
    """Whether a class statement made this class: then its instances hold nothing but attributes."""
    # Libraries such as nanobind make their classes by a metaclass in C.
    if type(kind) is not type and not _made_in_python(type(kind)):
        return False
    for name, part in vars(kind).items():
        is_getset = type(part) is types.GetSetDescriptorType and name not in ("__dict__", "__weakref__")
        if (is_getset or type(part) in _IN_C) and part.__objclass__ is kind:
            return False
    return True


@_per_class
def is_foreign(kind: Any) -> bool:
    """Whether instances have memory of a class in C, other than the plain containers."""
    return any(base not in _TRANSPARENT and not _made_in_python(base) for base in kind.__mro__)


def digest(data: Any) -> str:
    """Shorten bytes, or what shows its memory."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def scalar(item: Any) -> Any:
    """Return the token of an immutable value whose identity does not matter; None: it is none."""
    kind = type(item)
    if kind in _SCALARS:
        if kind in (str, bytes) and len(item) > _LONGEST_TEXT:
            return kind.__name__, len(item), digest(item.encode("utf-8", "surrogatepass") if kind is str else item)
        # NaN is equal to itself in this form.
        return kind.__name__, repr(item) if kind in (float, complex, type(...), type(NotImplemented)) else item
    if issubclass(kind, enum.Enum):
        return "enum", full_name(kind), str(item._name_)
    if issubclass(kind, np.generic):
        return "number", kind.__name__, item.tobytes() if kind is np.void else repr(item)
    if issubclass(kind, np.dtype):
        return "dtype", repr(item)
    if kind in (slice, range):
        return kind.__name__, tuple(scalar(part) for part in (item.start, item.stop, item.step))
    torch = sys.modules.get("torch")
    if torch is not None and any(kind is getattr(torch, name, None) for name in _OF_TORCH):
        return kind.__name__, repr(item)
    if issubclass(kind, type):
        return "class", *name_of(item)
    if issubclass(kind, (types.ModuleType, logging.Logger)):
        return "module", item.name if issubclass(kind, logging.Logger) else item.__name__
    if kind is types.FunctionType and is_global(item):
        return "function", item.__module__, item.__qualname__
    if issubclass(kind, _NAMED_IN_C) and (kind is not types.BuiltinFunctionType or _has_no_owner(item)):
        return "builtin", str(getattr(item, "__module__", None)), item.__qualname__
    return ("typing", repr(item)) if issubclass(kind, _TYPING) else None


def _has_no_owner(function: Any) -> bool:
    return isinstance(function.__self__, (type, types.ModuleType, type(None)))


def is_number(token: Any) -> bool:
    """Whether a token is that of a number with a fraction, of a number of NumPy's, an array or a tensor."""
    return token is not None and (token[0] in ("float", "complex", "number") or "." in token[0])


def plain(item: Any, depth: int = _DEEP) -> Any:
    """Return the token of scalars, arrays and plain containers of them; None: there is something else in it."""
    token = scalar(item)
    kind = type(item)
    if token is None and kind is np.ndarray and not item.dtype.hasobject:
        token = _array_token(item)
    if token is not None or depth == 0:
        return token
    if kind in (list, tuple, set, frozenset, deque):
        parts = [plain(part, depth - 1) for part in item]
        in_order = sorted(parts, key=repr) if kind in (set, frozenset) else parts
        return None if None in parts else (kind.__name__, tuple(in_order))
    if kind in (dict, OrderedDict, defaultdict):
        pairs = [(plain(key, depth - 1), plain(part, depth - 1)) for key, part in item.items()]
        return None if any(None in pair for pair in pairs) else (kind.__name__, tuple(pairs))
    return None


def _label(key: Any) -> str | None:
    """Return a text for a dictionary's key or a set's part; None: it is an object, and others may be like it."""
    if type(key) is str:
        return repr(key) if len(key) < _LONG else digest(key.encode("utf-8", "surrogatepass"))
    if type(key) is tuple:
        parts = [_label(part) for part in key]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if type(key) is int:
        return None if key > _BEYOND else repr(key)  # which may be somebody's id
    token = scalar(key)
    return None if token is None else f"<{token}>"


def is_global(function: Any) -> bool:
    """Whether a function or class is found under its name in a module that another process imports."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return False
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


_codes: dict[int, tuple[types.CodeType, str]] = {}


def code_of(code: types.CodeType) -> str:
    """Shorten what a function does, whatever the file and the lines are."""
    known = _codes.get(id(code))
    if known is None:
        parts: list[Any] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount]
        parts += [code_of(part) if isinstance(part, types.CodeType) else plain(part, 50) for part in code.co_consts]
        known = _codes[id(code)] = code, digest(repr(parts).encode("utf-8", "surrogatepass"))
    return known[1]


def _array_token(array: Any) -> Any:
    data = "objects" if array.dtype.hasobject else digest(np.ascontiguousarray(array))
    return full_name(type(array)), array.shape, repr(array.dtype), array.flags.writeable, data


def _tensor_token(tensor: Any, torch: Any) -> Any:
    name = (full_name(type(tensor)), str(tensor.layout), str(tensor.device), str(tensor.dtype), tensor.requires_grad)
    try:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return *name, "unread"
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return *name, tuple(tensor.shape), digest(flat.view(torch.uint8).numpy())
    except (RuntimeError, ValueError):  # uninitialized
        return *name, "uninitialized"


@_per_class
def is_generator_class(kind: Any) -> bool:
    """Whether random numbers are drawn from instances."""
    torch = sys.modules.get("torch")
    known = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
    return issubclass(kind, known) or (torch is not None and issubclass(kind, torch.Generator))


class _Walk:
    """One walk, breadth first: paths are as short as can be."""

    def __init__(self, *, nested: bool = False) -> None:
        self.tokens: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.opaque: dict[str, str] = {}
        self.unpicklable: dict[str, str] = {}
        self.written: dict[str, str] = {}
        self.objects: dict[str, Any] = {}  # also keeps the ids of what was met from being used again
        self.steps: dict[str, tuple[str, str | None, Any]] = {}
        self.seen: dict[int, str] = {}
        self.classes: dict[type, None] = {}
        self.functions: list[types.FunctionType] = []
        self._nested = nested
        self._arrays: list[tuple[str, int, int]] = []
        self._numbers: list[tuple[str, int]] = []
        self._cells: dict[int, list[tuple[str, bool]]] = {}
        self._waiting: deque[tuple[str, Any]] = deque()

    def through(self, value: Any) -> None:
        """Visit a value and all that it reaches."""
        self._take("", value)
        while self._waiting and not (self._nested and len(self.tokens) > _SKETCHED):
            self._enter(*self._waiting.popleft())

    def _take(self, path: str, item: Any) -> None:
        """Note what is at a path; what has parts waits to be entered."""
        self.objects[path] = item
        kind = type(item)
        token = (kind.__name__, item) if kind in _AS_THEY_ARE else scalar(item)
        if token is None and kind is tuple and None not in (parts := tuple(map(scalar, item))):
            token = ("tuple", parts)
        if token is not None:
            self.tokens[path] = token
            if kind is int and item > _BEYOND:
                self._numbers.append((path, item))
            return
        first = self.seen.setdefault(id(item), path)
        if first != path:
            self.aliases[path] = first
        else:
            self._waiting.append((path, item))

    def _enter(self, path: str, item: Any) -> None:
        kind: Any = type(item)
        self.classes[kind] = None
        if len(path) > _LONGEST_PATH:
            short = f"{path[:60]}...{digest(path.encode('utf-8', 'surrogatepass'))}"
            self.objects[short], self.steps[short] = item, self.steps[path]
            path = short
        self.tokens[path] = "object", full_name(kind)
        reason = simulators.why_unpicklable(kind)
        if simulators.is_elsewhere(kind):
            self.opaque[path] = full_name(kind)
        if reason is not None:
            self.unpicklable[path] = reason
            if (name := simulators.file_written(item)) is not None:
                self.written[path] = name
            return
        for step, operation, key, part in self._parts(path, item, kind):
            where = path + step
            self.steps[where] = path, operation, key
            self._take(where, part)

    def _parts(self, path: str, item: Any, kind: Any) -> Iterator[Part]:
        """Return the parts of an object, and set its token where the class alone is not enough."""
        sort = _sort_of(kind)
        if sort == "object":
            return _of_attributes(item)
        if sort == "container":
            return itertools.chain(_of_attributes(item), self._of_container(path, item, kind))
        if sort == "foreign":
            return self._of_foreign(path, item, kind)
        if sort == "array":
            return self._of_array(path, item)
        if sort == "function":
            return self._of_function(path, item)
        if sort == "tensor":
            token = self.tokens[path] = _tensor_token(item, sys.modules["torch"])
            if item.device.type == "cpu" and token[-1] not in ("unread", "uninitialized") and item.is_shared():
                self.unpicklable[path] = "it lies in memory that processes share, and a copy would not"
        elif sort == "generator":
            self.tokens[path] = "generator", full_name(kind)
        return _of_known(item, sort)

    def _of_array(self, path: str, array: Any) -> Iterator[Part]:
        self.tokens[path] = _array_token(array)
        if array.dtype.hasobject:
            yield from ((f"[{i}]", None, None, part) for i, part in enumerate(array.ravel().tolist()))
        elif array.nbytes:
            strides = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
            start = array.__array_interface__["data"][0]
            low, high = sum(s for s in strides if s < 0), sum(s for s in strides if s > 0)
            self._arrays.append((path, start + low, start + high + array.itemsize))
        yield from _of_attributes(array)

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[Part]:
        self.functions.append(function)
        self.tokens[path] = "function", code_of(function.__code__)
        for name in ("__defaults__", "__kwdefaults__"):
            yield f".{name}", None, None, getattr(function, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells.setdefault(id(cell), []).append(
                (f"{path}.<{name}>", name in _assigned_outside(function.__code__))
            )
            with contextlib.suppress(ValueError):  # nothing is in it yet
                yield f".<{name}>", None, None, cell.cell_contents
        for name in sorted(globals_in(function.__code__)):
            part = function.__globals__.get(name)
            if part is not None and not isinstance(part, types.ModuleType):
                yield f".<global {name}>", None, None, part

    def _of_foreign(self, path: str, item: Any, kind: type) -> Iterator[Part]:
        """Return the attributes of an object of a class in C, and what it is pickled as."""
        yield from _of_attributes(item)
        if simulators.is_left_alone(kind):
            return
        import cloudpickle

        known = attributes(item)
        try:
            reducer = cloudpickle.Pickler.dispatch_table.get(kind)
            reduced = item.__reduce_ex__(4) if reducer is None else reducer(item)
            parts = list(_of_reduced(item, reduced, known))
        except Exception:
            self.opaque[path] = full_name(kind)
            return
        yield from parts

    def _of_container(self, path: str, item: Any, kind: type) -> Iterator[Part]:
        if issubclass(kind, dict):
            flat = _flat(item)
            labels = None if flat else [_label(key) for key in dict.keys(item)]
            keys = digest(repr(labels).encode("utf-8", "surrogatepass"))
            self.tokens[path] = flat or ("object", full_name(kind), keys)
            for index, (key, part) in enumerate(() if flat else dict.items(item)):
                text = labels[index] if labels else None
                yield f"[{text}]" if text is not None else f"[#{index}]", "item", key, part
                if type(key) is int and text is None:
                    self._numbers.append((f"{path}[#{index}]", key))
                elif text is None:
                    yield f"[#{index}].<key>", None, None, key
            if isinstance(item, defaultdict):
                yield ".default_factory", None, None, item.default_factory
        elif issubclass(kind, (list, tuple, deque)):
            flat = _flat(item)
            limit = (item.maxlen,) if issubclass(kind, deque) else ()
            self.tokens[path] = flat or ("object", full_name(kind), len(item), *limit)
            operation = None if issubclass(kind, tuple) else "item"
            yield from ((f"[{i}]", operation, i, part) for i, part in enumerate(() if flat else list(item)))
        elif issubclass(kind, (set, frozenset)):
            self.tokens[path] = "object", full_name(kind), len(item)
            labeled = [(_label(part), part) for part in item]
            named = {text: part for text, part in labeled if text is not None}
            others = sorted((part for text, part in labeled if text is None), key=_sketch)
            yield from ((f"{{{text}}}", None, None, named[text]) for text in sorted(named))
            yield from ((f"{{#{index}}}", None, None, part) for index, part in enumerate(others))

    def find_ids(self) -> None:
        """Note numbers that are the id of something here: in a copy they lead elsewhere."""
        for path, number in self._numbers:
            if number in self.seen:
                self.unpicklable[path] = "it is the id of another object"
                if path in self.tokens and self.objects[path] == number:
                    self.tokens[path] = "id of", self.seen[number]

    def name_shared(self) -> None:
        """Note which arrays lie in one piece of memory, and which functions share a variable that one assigns to."""
        for uses in self._cells.values():
            if any(assigns for _, assigns in uses):
                self.tokens.update({f"{path}.<variable>": ("same as", uses[0][0]) for path, _ in uses[1:]})
        first, end, begin = "", 0, 0
        for path, low, high in sorted(self._arrays, key=lambda entry: (entry[1], -entry[2], entry[0])):
            if low < end:
                self.tokens[f"{path}.<memory>"] = "shared with", first, low - begin
            else:
                first, begin = path, low
            end = max(end, high)


@_per_class
def _sort_of(kind: Any) -> str:
    """Tell how parts of instances are found."""
    torch = sys.modules.get("torch")
    known = {types.MethodType: "method", types.BuiltinFunctionType: "builtin", functools.partial: "partial"}
    known |= {types.FunctionType: "function", weakref.ref: "reference"}
    if kind in known:
        return known[kind]
    if simulators.has_fields(kind):
        return "fields"
    if issubclass(kind, np.ndarray):
        return "array"
    if torch is not None and issubclass(kind, torch.Tensor):
        return "tensor"
    if is_generator_class(kind):
        return "generator"
    if is_foreign(kind):
        return "foreign"
    return "container" if issubclass(kind, _CONTAINERS) else "object"


def _of_known(item: Any, sort: str) -> Iterator[Part]:
    if sort == "fields":
        fields, are_set = simulators.fields(item)
        yield from ((f".{name}", "field" if are_set else None, name, part) for name, part in fields.items())
    elif sort == "method":
        yield from ((".__func__", None, None, item.__func__), (".__self__", None, None, item.__self__))
    elif sort == "builtin":
        yield ".__self__", None, None, item.__self__
    elif sort == "partial":
        named = (("func", item.func), ("args", item.args), ("keywords", item.keywords))
        yield from ((f".{name}", None, None, part) for name, part in named)
    elif sort == "reference":
        yield "()", None, None, item()


def _of_attributes(item: Any) -> Iterator[Part]:
    kind: Any = type(item)
    found, skipped = attributes(item), simulators.kept_by_library(kind)
    return ((f".{n}", "attribute", n, found[n]) for n in sorted(found, key=str) if n not in skipped)


def _of_reduced(item: Any, reduced: Any, known: Mapping[str, Any]) -> Iterator[Part]:
    """Return what a reduction holds, but for the attributes that are known already."""
    if isinstance(reduced, str):  # the name of something global
        yield ".<name>", None, None, reduced
        return
    function, args, state, contents, pairs = (*reduced, None, None, None)[:5]
    yield ".<maker>", None, None, function
    yield from ((f"({i})", None, None, part) for i, part in enumerate(args) if part is not type(item))
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict):
            yield from ((f".{n}", None, None, part[n]) for n in sorted(part, key=str) if n not in known)
        elif part is not None:
            yield ".<state>", None, None, part
    yield from ((f"[{i}]", None, None, part) for i, part in enumerate(contents or ()))
    yield from ((f"[{_label(key) or f'#{i}'}]", None, None, part) for i, (key, part) in enumerate(pairs or ()))


def _sketch(item: Any, depth: int = 2) -> str:
    """Describe a part of a set well enough to tell it from the others, in every process alike."""
    known = {}
    for name, part in attributes(item).items():
        token = scalar(part)
        known[name] = _sketch(part, depth - 1) if token is None and depth else token
    return f"{full_name(type(item))} {known}"


def _flat(item: Any) -> Any:
    """Return the token of a long list, or dictionary, of numbers and texts."""
    if len(item) <= _LONG or type(item) not in (list, dict, deque):
        return None
    kinds = set(map(type, item)) | (set(map(type, item.values())) if type(item) is dict else set())
    if not kinds <= {int, float, bool, str, type(None)}:
        return None
    return type(item).__name__, len(item), digest(repr(item).encode("utf-8", "surrogatepass"))


class _Beside:
    """What classes have as attributes, and what their methods read of modules: plain data, and code of the user's."""

    def __init__(self, walk: _Walk, found: Fingerprint) -> None:
        self._walk, self._found, self._done = walk, found, set[int]()

    def run(self) -> None:
        """Add it to the fingerprint."""
        for function in self._walk.functions:
            self._read(function)
        for kind in sorted({base for met in self._walk.classes for base in met.__mro__}, key=full_name):
            if name_of(kind)[0].partition(".")[0] not in FIXED and _made_in_python(kind):
                self._read_class(kind)

    def _read_class(self, kind: type) -> None:
        self._done.add(id(kind))
        is_own = not is_installed(name_of(kind)[0])
        for name, part in list(vars(kind).items()):
            functions = list(functions_in(part))
            for function in functions:
                self._read(function)
            special = name.startswith("__") and name.endswith("__") and not functions
            if special or name == "_abc_impl" or type(part) in (types.MemberDescriptorType, *weakref.ProxyTypes):
                continue
            self._add(f"<class {full_name(kind)}>.{name}", part, kind, name, is_own=is_own)

    def _read(self, function: types.FunctionType) -> None:
        """Look at the globals that a function reads, and into functions of the user's that it calls."""
        if id(function.__code__) in self._done:
            return
        self._done.add(id(function.__code__))
        space = function.__globals__
        module = str(space.get("__name__"))
        if module.partition(".")[0] in FIXED | _OURS:
            return
        is_own = not is_installed(module)
        for name in sorted(globals_in(function.__code__)):
            part, label = space.get(name), f"<global {module}.{name}>"
            if name not in space or label in self._found.tokens or type(part) in weakref.ProxyTypes:
                continue
            if isinstance(part, types.ModuleType):
                self._read_module(part, function.__code__)
            else:
                self._add(label, part, sys.modules.get(module), name, is_own=is_own)

    def _read_module(self, module: types.ModuleType, code: types.CodeType) -> None:
        if module.__name__.partition(".")[0] in FIXED | _OURS:
            return
        is_own = not is_installed(module.__name__)
        for name in sorted(set(code.co_names) & vars(module).keys()):
            part = vars(module)[name]
            if not isinstance(part, types.ModuleType):
                self._add(f"<global {module.__name__}.{name}>", part, module, name, is_own=is_own)

    def _add(self, label: str, part: Any, owner: Any, name: str, *, is_own: bool) -> None:
        """Note what a class or a module has under a name: of a library's, public plain data."""
        if is_own:
            self._note(label, part, owner, name)
        elif not name.startswith("_") and (token := _data(part)) is not None:
            self._found.tokens[label] = token

    def _note(self, label: str, part: Any, owner: Any, name: str) -> None:
        """Note what the user's own class or module has under a name."""
        found, functions = self._found, list(functions_in(part))
        kind: Any = type(part)
        if (reason := simulators.why_unpicklable(kind)) is not None:
            found.unpicklable[label] = reason
            return
        self._note_identity(label, part, owner, name)
        if functions:
            told = [("function", code_of(one.__code__), plain(one.__defaults__)) for one in functions]
            found.tokens[label] = tuple(told)
            for function in functions:
                self._read(function)
        elif isinstance(part, type):
            found.tokens[label] = scalar(part)
            if id(part) not in self._done and not is_installed(name_of(part)[0]):
                self._read_class(part)
        else:
            found.tokens[label] = plain(part) or _described(part)

    def _note_identity(self, label: str, part: Any, owner: Any, name: str) -> None:
        """Note that the environment holds the very object that a module or class has under a name."""
        where = self._walk.seen.get(id(part))
        if where is None or where not in self._walk.objects or scalar(part) is not None:
            return
        self._found.tokens[f"{where}.<is>"] = "is", label
        module = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
        by_name = isinstance(owner, types.ModuleType) or is_global(owner)
        if by_name and module not in ("__main__", "__mp_main__") and is_found_elsewhere(module):
            qualified = name if isinstance(owner, types.ModuleType) else f"{owner.__qualname__}.{name}"
            self._found.references.setdefault(id(part), (module, qualified))


def _data(item: Any) -> Any:
    """Return the token of plain data of a library's: which modules and classes it has depends on what was imported."""
    token = plain(item)
    return None if token is None or token[0] in ("module", "class", "function", "builtin", "typing") else token


def _described(item: Any) -> Any:
    """Return one token for all that an object consists of."""
    walk = _Walk(nested=True)
    walk.through(item)
    return "object", full_name(type(item)), digest(repr(sorted(walk.tokens.items())).encode("utf-8", "replace"))


def functions_in(value: Any, depth: int = 4) -> Iterator[types.FunctionType]:
    """Return the Python functions that something is, or wraps."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif depth and kind is property:
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_in(part, depth - 1)
    elif depth and kind in (staticmethod, classmethod, types.MethodType):
        yield from functions_in(value.__func__, depth - 1)
    elif depth and kind in (functools.partial, functools.partialmethod, functools.cached_property):
        yield from functions_in(value.func, depth - 1)
    elif depth and kind is functools._lru_cache_wrapper:
        yield from functions_in(value.__wrapped__, depth - 1)


@functools.lru_cache(maxsize=10_000)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that code reads or sets, that of functions within it too."""
    found, high = set[str](), 0
    # dis.get_instructions(), which describes each operation, takes 20 times as long.
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _OF_GLOBALS:
            found.add(code.co_names[argument >> _OF_GLOBALS[operation]])
    within = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(found.union(*map(globals_in, within)))


@functools.lru_cache(maxsize=1000)
def _assigned_outside(code: types.CodeType) -> frozenset[str]:
    """Return the variables of surrounding functions that code assigns to."""
    stored = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_DEREF"}
    return frozenset(stored & set(code.co_freevars))


@functools.lru_cache(maxsize=1000)
def is_installed(module: str) -> bool:
    """Whether a module's package was installed, and is not the user's own."""
    package = module.partition(".")[0]
    if package in FIXED or package in _OURS:
        return True
    found = sys.modules.get(package)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return file is not None and str(file).startswith(_PLACES)


_PLACES = tuple(
    os.path.join(place, "") for name in ("purelib", "platlib") if (place := sysconfig.get_paths().get(name))
)
