"""Fingerprints of environments, which can be compared across processes.

A path such as ``.env._max_episode_steps`` leads from the environment to a part. Its token is equal for equal values, in
every process. If two paths lead to the same object, its parts are listed under the first path, and the second path is
an alias. The environment's own code is not called, except to pickle objects of classes in C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import logging
import random
import sys
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from rl_ext_core._import_path import package_folders
from rl_ext_core.factory import simulators

__all__ = ["Fingerprint", "attributes", "fingerprint", "full_name", "is_installed", "layers"]

RECORD = "_rl_ext_record"  # Attribute in which ``record`` stores the call that constructed an instance.
# The step from a holder to a part: the suffix of the path, the operation that sets the part ("attribute", "item",
# "field", or None if it cannot be set), and its name, key or index.
Part = tuple[str, "str | None", Any, Any]
_Found = TypeVar("_Found")

_TORCH_SCALARS = ("dtype", "device", "layout", "memory_format", "Size")
# First elements of the tokens of immutable values, whose identity does not matter. A "name" is that of a module, a
# class or a function, which another process imports.
SCALAR_TOKENS = {"value", "number", "tuple", "name"}
_PART_STARTS = ".[({"  # first characters of the step from a holder to a part
_LONG_CONTAINER = 256  # Longer lists and dictionaries of numbers and strings get a single token.
_MAX_TEXT = 4096
_SMALLEST_ID = 1 << 32
_MAX_PATH = 1000
_MAX_OBJECT_TOKENS = 1000
_MAX_DEPTH = 6
# Packages whose classes and globals are the same in every process.
STABLE_PACKAGES = sys.stdlib_module_names | {"builtins", "numpy", "torch", "torchrl", "tensordict"}
_OWN_PACKAGES = {"rl_ext_core", "torchrl_ext", "sb3_ext"}  # A checkout counts as installed, too.
_C_DESCRIPTORS = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_NAMED_IN_C = (*_C_DESCRIPTORS, types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType)
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(typing.List[int]))  # noqa: UP006
# Classes whose values are equal if their texts are.
_VALUES = (slice, range, type(...), type(NotImplemented))
_WRAPPERS: set[type] = {property, staticmethod, classmethod, types.MethodType, functools.partial}
_WRAPPERS |= {functools.partialmethod, functools.cached_property, functools._lru_cache_wrapper}
# Attributes of classes in which the standard library caches: subclasses of an ABC, and combined members of a Flag.
_CLASS_CACHES = {"_abc_impl", "_value2member_map_"}
_LEAVES = (int, float, complex, str, bytes, type(None), range, slice, type, types.ModuleType)
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_TRANSPARENT = {object, typing.Generic, OrderedDict, defaultdict, *_CONTAINERS}
# Bytecode operations on globals, and the number of low bits in their argument that do not belong to the name's index.
_GLOBAL_OPERATIONS = {
    number: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name, number in dis.opmap.items()
    if "GLOBAL" in name or name == "LOAD_NAME"
}


@dataclasses.dataclass
class Fingerprint:
    """Tokens of all objects that an environment refers to.

    :ivar tokens: Token of each path. Paths of module globals and class attributes begin with ``<``.
    :ivar aliases: Path -> first path of the same object.
    :ivar hidden: Path -> reason why an object can be neither inspected nor pickled. Objects that the user's modules and
        classes use count, too.
    :ivar objects: Path -> object. Not pickled.
    :ivar steps: Path -> path of the holder, operation that sets the object there, and its name, key or index.
    """

    tokens: dict[str, Any] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    hidden: dict[str, str] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: dict[str, tuple[str, str | None, Any]] = dataclasses.field(default_factory=dict)

    def canonical_path(self, path: str) -> str:
        """Return the path under which the tokens of a part are stored."""
        if path in self.tokens or not self.aliases:
            return path
        if path in self.aliases:
            return self.aliases[path]
        # Replace the longest prefix that is an alias, and repeat.
        for end in range(len(path) - 1, 0, -1):
            if path[end] in _PART_STARTS and path[:end] in self.aliases:
                return self.canonical_path(self.aliases[path[:end]] + path[end:])
        return path

    def token(self, path: str) -> Any:
        """Return the token at a path, or None if the path does not exist."""
        found = self.tokens.get(path)
        return self.tokens.get(self.canonical_path(path)) if found is None else found

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the paths at which two fingerprints differ: globals and classes last, then by depth."""
        paths = {**self.tokens, **other.tokens, **self.aliases, **other.aliases}
        different = (path for path in paths if self.differs(path, other))
        return sorted(different, key=lambda path: (path.startswith("<"), path.count(".") + path.count("["), path))

    def differs(self, path: str, other: Fingerprint) -> bool:
        """Whether two fingerprints differ at a path, in value or in object identity."""
        mine, its = self.token(path), other.token(path)
        if mine != its:
            return True
        # Two paths that lead to one object in one fingerprint must lead to one object in the other.
        return any(
            path in one.aliases and another.canonical_path(path) != another.canonical_path(one.aliases[path])
            for one, another in ((self, other), (other, self))
        )

    def __getstate__(self) -> dict[str, Any]:
        steps = {path: (holder, operation, None) for path, (holder, operation, _) in self.steps.items()}
        return {**self.__dict__, "objects": {}, "steps": steps}


def is_part(path: str, holder: str) -> bool:
    """Whether a path leads to an object or to one of its parts, as ``.s[0]`` to a part of ``.s``, but not ``.size``."""
    return path.startswith(holder) and (len(path) == len(holder) or path[len(holder)] in _PART_STARTS)


def fingerprint(value: Any, *, code: bool = True) -> Fingerprint:
    """Compute the fingerprint of an environment or another value.

    :param value: The value. It is only read.
    :param code: Whether to include class attributes, and globals that methods and functions read.
    """
    walk = _Walk()
    walk.visit_all(value)
    if code:
        walk.read_code()
    return walk.found


def _is_object(value: Any) -> bool:
    return not issubclass(type(value), _LEAVES)


def reachable(root: Any, is_entered: Callable[[Any], bool] = _is_object) -> Iterator[Any]:
    """Yield a value and its parts in attributes, containers, closures and bound methods, breadth first.

    :param root: The value.
    :param is_entered: Whether to yield a part and then its own parts. By default, only plain data, classes and modules
        are left out.
    """
    waiting, seen = deque([root]), {id(root)}
    while waiting:
        item = waiting.popleft()
        yield item
        held = attributes(item)
        parts = [*held.values()]
        if isinstance(modules := held.get("_modules"), dict):  # torch.nn.Module stores its submodules here.
            parts += modules.values()
        if issubclass(type(item), dict):
            parts += dict.values(item)
        elif type(item) in (list, tuple, deque):
            parts += item
        elif type(item) is types.FunctionType:
            cells = [cell for cell in item.__closure__ or () if cell != types.CellType()]  # Empty cells have no value.
            defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            parts += [*defaults, *(cell.cell_contents for cell in cells)]
        elif type(item) in (types.MethodType, types.BuiltinMethodType):
            parts.append(item.__self__)
        elif issubclass(type(item), functools.partial):
            parts += [item.func, *item.args, *item.keywords.values()]
        for part in parts:
            if id(part) not in seen and is_entered(part):
                seen.add(id(part))
                waiting.append(part)


def layers(environment: Any) -> Iterator[Any]:
    """Yield an environment and the environments that it wraps, the outermost first."""
    return reachable(environment, is_layer)


def is_layer(value: Any) -> bool:
    """Whether a value is an environment or wrapper: its class has ``reset`` and ``step``."""
    kind: Any = type(value)
    return hasattr(kind, "reset") and hasattr(kind, "step") and instance_dict(value) is not None


def _cached_per_class(function: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    return functools.lru_cache(maxsize=10_000)(function)


@_cached_per_class
def name_of(kind: Any) -> tuple[str, str]:
    """Return the module and the qualified name of a class."""
    return str(getattr(kind, "__module__", "builtins")), kind.__qualname__  # Classes of SWIG have no module.


@_cached_per_class
def full_name(kind: Any) -> str:
    """Return the module and the qualified name of a class, joined by a dot."""
    return ".".join(name_of(kind))


def attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes stored in an instance, without calling properties or ``__getattr__``."""
    found = {}
    for name, slot in _slots(type(instance)).items():
        with contextlib.suppress(AttributeError):  # The slot may be empty.
            found[name] = slot.__get__(instance)
    found |= instance_dict(instance) or {}
    found.pop(RECORD, None)
    return found


def instance_dict(instance: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an instance, or None if it has none.

    The instance's own ``__getattribute__`` is not called.
    """
    try:
        found = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None  # A class has a read-only view instead.


@_cached_per_class
def _slots(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if _is_python_class(base):
            members = {n: part for n, part in vars(base).items() if type(part) is types.MemberDescriptorType}
            found = {**members, **found}
    return found


@_cached_per_class
def _is_python_class(kind: Any) -> bool:
    """Whether a class is written in Python, so that instances contain only attributes."""
    # Libraries such as nanobind create their classes by a metaclass in C.
    if type(kind) is not type and not _is_python_class(type(kind)):
        return False
    for name, part in vars(kind).items():
        is_getset = type(part) is types.GetSetDescriptorType and name not in ("__dict__", "__weakref__")
        if (is_getset or type(part) in _C_DESCRIPTORS) and part.__objclass__ is kind:
            return False
    return True


@_cached_per_class
def has_c_memory(kind: Any) -> bool:
    """Whether instances have the memory of a class in C that is not a plain container."""
    return any(base not in _TRANSPARENT and not _is_python_class(base) for base in kind.__mro__)


def digest(data: Any) -> str:
    """Return a short hash of a buffer of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def scalar_token(item: Any) -> Any:
    """Return the token of an immutable value, or None if the value is not one."""
    describe = _describer(type(item))
    return None if describe is None else describe(item)


@_cached_per_class
def _describer(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that computes the token of a scalar class. None for others."""
    name, torch = kind.__name__, sys.modules.get("torch")
    if kind in (str, bytes):
        return lambda item: ("value", name, item if len(item) <= _MAX_TEXT else digest(repr(item).encode()))
    if kind in (bool, int, type(None)):
        return lambda item: ("value", name, item)
    if kind in (float, complex) or issubclass(kind, np.generic):
        return lambda item: ("number", name, repr(item))  # As a string, NaN equals itself.
    of_torch = torch is not None and any(kind is getattr(torch, name, None) for name in _TORCH_SCALARS)
    if of_torch or kind in _VALUES or issubclass(kind, (np.dtype, *_TYPING)):
        return lambda item: ("value", name, repr(item))
    if issubclass(kind, enum.Enum):
        return lambda item: ("value", full_name(kind), str(item._name_))
    if issubclass(kind, type):
        return lambda item: ("name", *name_of(item))
    if issubclass(kind, (types.ModuleType, logging.Logger)):
        return lambda item: ("name", name, item.name if issubclass(kind, logging.Logger) else item.__name__)
    if kind is types.FunctionType:
        return lambda item: ("name", item.__module__, item.__qualname__) if is_global(item) else None
    return _token_of_builtin if issubclass(kind, (*_NAMED_IN_C, types.BuiltinFunctionType)) else None


def _token_of_builtin(function: Any) -> Any:
    """Return the token of a function in C; None if it is a method of an instance."""
    is_method = not isinstance(getattr(function, "__self__", None), (type, types.ModuleType, type(None)))
    return None if is_method else ("name", str(getattr(function, "__module__", None)), function.__qualname__)


def is_number(token: Any) -> bool:
    """Whether a token describes a float, a complex number, a NumPy scalar, an array or a tensor."""
    return token is not None and (token[0] == "number" or "." in token[0])


def plain_token(item: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a single token for a scalar, an array or a plain container, else None.

    :param depth: Number of levels of containers.
    """
    token = scalar_token(item)
    kind = type(item)
    if token is None and kind is np.ndarray and not item.dtype.hasobject:
        token = _array_token(item)
    if token is not None or depth == 0:
        return token
    if kind in (list, tuple, set, frozenset, deque):
        parts = [plain_token(part, depth - 1) for part in item]
        in_order = sorted(parts, key=repr) if kind in (set, frozenset) else parts
        return None if None in parts else (kind.__name__, tuple(in_order))
    if kind in (dict, OrderedDict, defaultdict):
        pairs = [(plain_token(key, depth - 1), plain_token(part, depth - 1)) for key, part in item.items()]
        return None if any(None in pair for pair in pairs) else (kind.__name__, tuple(pairs))
    return None


def _key_label(key: Any) -> str | None:
    """Return a string for a dictionary key, or None if only its identity distinguishes it."""
    token = plain_token(key)
    if token is None or (type(key) is int and key > _SMALLEST_ID):  # A large number may be the id of an object.
        return None
    is_readable = {str, int, float}.issuperset(map(type, key if type(key) is tuple else (key,)))
    text = repr(key) if is_readable else f"<{token}>"
    return text if len(text) < _LONG_CONTAINER else digest(text.encode())


def is_global(function: Any) -> bool:
    """Whether another process finds a function or class by its module and name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return False
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


@functools.lru_cache(maxsize=10_000)
def code_digest(code: types.CodeType) -> str:
    """Return a hash of a function's code that does not depend on its file and line numbers."""
    parts: list[Any] = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount]
    parts += [
        code_digest(part) if isinstance(part, types.CodeType) else plain_token(part, 50) for part in code.co_consts
    ]
    return digest(repr(parts).encode("utf-8", "surrogatepass"))


def _array_token(array: Any) -> Any:
    data = "objects" if array.dtype.hasobject else digest(np.ascontiguousarray(array))
    return full_name(type(array)), array.shape, repr(array.dtype), array.flags.writeable, data


def _tensor_token(tensor: Any, torch: Any) -> Any:
    """Return the token of a tensor, with a hash of its data if it can be read."""
    name = (full_name(type(tensor)), str(tensor.layout), str(tensor.device), str(tensor.dtype), tensor.requires_grad)
    try:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return *name, tuple(tensor.shape), digest(flat.view(torch.uint8).numpy())
    except (RuntimeError, ValueError):  # It is sparse, or has no memory.
        return *name, "unread"


@_cached_per_class
def is_generator_class(kind: Any) -> bool:
    """Whether a class is a random generator of NumPy, Python or torch."""
    torch = sys.modules.get("torch")
    known = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
    return issubclass(kind, known) or (torch is not None and issubclass(kind, torch.Generator))


class _Walk:
    """Visits the parts of a value breadth first, so that paths are short.

    :ivar found: The fingerprint so far.
    :ivar seen: Object id -> first path, for objects that have parts.
    :ivar classes: Classes of the visited objects, in order.
    :ivar functions: Visited functions.
    """

    def __init__(self, longest: float = float("inf")) -> None:
        self.found = Fingerprint()
        self.seen: dict[int, str] = {}
        self.classes: dict[type, None] = {}
        self.functions: list[types.FunctionType] = []
        self._longest = longest
        self._owners: dict[int, str] = {}
        self._read = set[int]()  # ids of classes and of functions' code
        self._waiting: deque[tuple[str, Any]] = deque()

    def visit_all(self, value: Any) -> None:
        """Visit a value and all its parts."""
        self._visit("", value)
        while self._waiting and len(self.found.tokens) <= self._longest:
            self._visit_parts(*self._waiting.popleft())

    def _visit(self, path: str, item: Any) -> None:
        """Record the object at a path. If it has parts, queue it."""
        self.found.objects[path] = item  # The reference also prevents that Python reuses the id.
        token = scalar_token(item)
        if token is None and type(item) is tuple and None not in (parts := tuple(map(scalar_token, item))):
            token = ("tuple", parts)
        if token is not None:
            self.found.tokens[path] = token
            return
        first = self.seen.setdefault(id(item), path)
        if first != path:
            self.found.aliases[path] = first
        else:
            self._waiting.append((path, item))

    def _visit_parts(self, path: str, item: Any) -> None:
        """Record the class of an object, and visit its parts."""
        kind: Any = type(item)
        found = self.found
        self.classes[kind] = None
        found.tokens[path] = "object", full_name(kind)
        reason = simulators.why_unpicklable(kind)
        if len(path) > _MAX_PATH:  # Paths of a long chain of objects would need too much memory.
            reason = "it is the end of a long chain of objects"
        if reason is not None:
            found.hidden[path] = reason
            return
        for step, operation, key, part in self._parts(path, item):
            where = path + step
            found.steps[where] = path, operation, key
            self._visit(where, part)

    # These methods yield the parts of an object. They set its token if the class alone does not describe it.

    def _parts(self, path: str, item: Any) -> Iterable[Part]:
        kind: Any = type(item)
        torch = sys.modules.get("torch")
        if kind is types.FunctionType:
            return self._parts_of_function(path, item)
        if kind is weakref.ref:
            return [("()", None, None, item())]
        if kind is types.CellType:
            return [(".<value>", None, None, item.cell_contents)]
        if (read := simulators.field_reader(kind)) is not None:
            operation = None if read is simulators.ale_fields else "field"
            return [(f".{name}", operation, name, part) for name, part in read(item).items()]
        if issubclass(kind, np.ndarray):
            return self._parts_of_array(path, item)
        if torch is not None and issubclass(kind, torch.Tensor):
            return self._parts_of_tensor(path, item)
        if is_generator_class(kind):
            self.found.tokens[path] = "generator", full_name(kind)
            return ()
        if has_c_memory(kind):
            return self._parts_of_foreign(path, item)
        return (self._parts_of_container if issubclass(kind, _CONTAINERS) else self._parts_of_attributes)(path, item)

    def _parts_of_attributes(self, path: str, item: Any) -> Iterator[Part]:
        """Yield the attributes of an object, except caches of its library."""
        kind: Any = type(item)
        own, skipped = attributes(item), simulators.cache_attributes(kind)
        return ((f".{n}", "attribute", n, own[n]) for n in sorted(own, key=str) if n not in skipped)

    def _parts_of_tensor(self, path: str, tensor: Any) -> Iterable[Part]:
        token = self.found.tokens[path] = _tensor_token(tensor, sys.modules["torch"])
        if tensor.device.type == "cpu" and token[-1] != "unread" and tensor.is_shared():
            self.found.hidden[path] = "its memory is shared by processes, and a copy would not share it"
        return ()

    def _parts_of_array(self, path: str, array: Any) -> Iterator[Part]:
        self.found.tokens[path] = _array_token(array)
        if array.dtype.hasobject:
            yield from ((f"[{i}]", None, None, part) for i, part in enumerate(array.ravel().tolist()))
        elif array.nbytes:
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            first = self._owners.setdefault(owner.__array_interface__["data"][0], path)
            if first != path:
                self.found.tokens[f"{path}.<memory>"] = "shared with", first
        yield from self._parts_of_attributes(path, array)

    def _parts_of_function(self, path: str, function: types.FunctionType) -> Iterator[Part]:
        """Record a hash of a function's code, and yield its defaults, closure and globals."""
        self.functions.append(function)
        self.found.tokens[path] = "function", code_digest(function.__code__)
        for name in ("__defaults__", "__kwdefaults__"):
            yield f".{name}", None, None, getattr(function, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # A cell is a part, because functions may share it. An empty one has no value yet. The progress of a
            # library's own generator is ignored, because it depends on the number of resets.
            skipped = cell == types.CellType() or (
                type(cell.cell_contents) is types.GeneratorType and is_installed(str(function.__module__))
            )
            if not skipped:
                yield f".<{name}>", None, None, cell
        for name in sorted(globals_in(function.__code__)):
            part = function.__globals__.get(name)
            if part is not None and not isinstance(part, types.ModuleType):
                yield f".<global {name}>", None, None, part

    def _parts_of_foreign(self, path: str, item: Any) -> Iterator[Part]:
        yield from self._parts_of_attributes(path, item)
        kind: Any = type(item)
        if simulators.is_skipped(kind):
            return
        import cloudpickle

        try:
            reducer = cloudpickle.Pickler.dispatch_table.get(kind)
            reduced = item.__reduce_ex__(4) if reducer is None else reducer(item)
            parts = list(_reduced_parts(reduced, attributes(item))) if isinstance(reduced, tuple) else [reduced]
        except Exception:
            self.found.hidden[path] = f"{full_name(kind)} cannot be pickled"
            return
        yield from ((f".<reduced {i}>", None, None, part) for i, part in enumerate(parts))

    def _parts_of_container(self, path: str, item: Any) -> Iterator[Part]:
        """Record a container's length or keys, and yield its attributes and elements."""
        yield from self._parts_of_attributes(path, item)
        kind: Any = type(item)
        if (flat := _flat_token(item)) is not None:
            self.found.tokens[path] = flat
        elif issubclass(kind, dict):
            base = OrderedDict if issubclass(kind, OrderedDict) else dict
            labels = [_key_label(key) for key in base.keys(item)]
            keys = digest(repr(labels).encode("utf-8", "surrogatepass"))
            self.found.tokens[path] = "object", full_name(kind), keys
            for index, (text, (key, part)) in enumerate(zip(labels, base.items(item), strict=True)):
                # A key without a label is another object in each process, so the item cannot be set by its key.
                yield (f"[#{index}]", None, None, part) if text is None else (f"[{text}]", "item", key, part)
                if type(key) is int and text is None:
                    self.found.hidden[f"{path}[#{index}]"] = "its key may be the id of another object"
                elif text is None:
                    yield f"[#{index}].<key>", None, None, key
            if isinstance(item, defaultdict):
                yield ".default_factory", None, None, item.default_factory
        elif issubclass(kind, (list, tuple, deque)):
            limit = (item.maxlen,) if issubclass(kind, deque) else ()
            self.found.tokens[path] = "object", full_name(kind), len(item), *limit
            operation = None if issubclass(kind, tuple) else "item"
            yield from ((f"[{i}]", operation, i, part) for i, part in enumerate(list(item)))
        elif issubclass(kind, (set, frozenset)):
            self.found.tokens[path] = "object", full_name(kind), len(item)
            yield from ((f"{{#{index}}}", None, None, part) for index, part in enumerate(sorted(item, key=_sort_key)))

    # These methods add class attributes and globals.

    def read_code(self) -> None:
        """Add class attributes, and globals that functions read.

        They are plain data of libraries, and all values and code of the user's modules.
        """
        for function in self.functions:
            self._read_function(function)
        for kind in sorted({base for met in self.classes for base in met.__mro__}, key=full_name):
            if name_of(kind)[0].partition(".")[0] not in STABLE_PACKAGES and _is_python_class(kind):
                self._read_class(kind)

    def _read_class(self, kind: type) -> None:
        if id(kind) in self._read:
            return
        self._read.add(id(kind))
        for name, part in list(vars(kind).items()):
            functions = list(functions_in(part))
            for function in functions:
                self._read_function(function)
            special = name.startswith("__") and name.endswith("__") and not functions
            if not special and name not in _CLASS_CACHES and type(part) is not types.MemberDescriptorType:
                self._add(f"<class {full_name(kind)}>.{name}", part, name, name_of(kind)[0])

    def _read_function(self, function: types.FunctionType) -> None:
        """Add the globals that a function reads, and read the user's functions that it calls."""
        space, known = function.__globals__, STABLE_PACKAGES | _OWN_PACKAGES
        module = str(space.get("__name__"))
        if id(function.__code__) in self._read or module.partition(".")[0] in known:
            return
        self._read.add(id(function.__code__))
        for name in sorted(globals_in(function.__code__) & space.keys()):
            part: Any = space[name]
            if not issubclass(type(part), types.ModuleType):  # isinstance() would ask a proxy for its class.
                self._add(f"<global {module}.{name}>", part, name, module)
            elif part.__name__.partition(".")[0] not in known:
                for used in sorted(set(function.__code__.co_names) & vars(part).keys()):
                    self._add(f"<global {part.__name__}.{used}>", vars(part)[used], used, part.__name__)

    def _add(self, label: str, part: Any, name: str, module: str) -> None:
        """Add a value of a class or a module. Of installed libraries, only public plain data is added."""
        kind: Any = type(part)
        if label in self.found.tokens or kind in weakref.ProxyTypes or issubclass(kind, types.ModuleType):
            return
        token = plain_token(part)
        if is_installed(module):
            # The modules imported so far determine which modules, classes and functions are globals.
            if not name.startswith("_") and token is not None and token[0] != "name":
                self.found.tokens[label] = token
            return
        if (reason := simulators.why_unpicklable(kind)) is not None:
            self.found.hidden[label] = reason
            return
        # The environment may refer to the same object as the module or class.
        if (where := self.seen.get(id(part))) is not None:
            self.found.tokens[f"{where}.<is>"] = "is", label
        functions = list(functions_in(part))
        if functions:
            token = tuple(("function", code_digest(one.__code__), plain_token(one.__defaults__)) for one in functions)
        self.found.tokens[label] = token or _object_token(part)
        for function in functions:
            self._read_function(function)
        if isinstance(part, type) and not is_installed(name_of(part)[0]):
            self._read_class(part)


def _reduced_parts(reduced: tuple[Any, ...], known: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a pickle's reduction, except attributes, which are visited already."""
    function, args, state, *contents = (*reduced, None)[: max(3, len(reduced))]
    yield from (function, *args)
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        yield {n: p for n, p in part.items() if n not in known and n != RECORD} if isinstance(part, dict) else part
    yield from (None if part is None or callable(part) else list(part) for part in contents)


def _sort_key(item: Any, depth: int = 2) -> str:
    """Return a string by which elements of a set are sorted, equal in every process."""
    held = {
        name: plain_token(part) or (depth and _sort_key(part, depth - 1)) for name, part in attributes(item).items()
    }
    return f"{full_name(type(item))} {plain_token(item)} {held}"


def _flat_token(item: Any) -> Any:
    """Return a single token for a long list or dict of numbers and strings, else None."""
    if type(item) not in (list, dict, deque) or len(item) <= _LONG_CONTAINER:
        return None
    kinds = set(map(type, item)) | (set(map(type, item.values())) if type(item) is dict else set())
    if not kinds <= {int, float, bool, str, type(None)}:
        return None
    return type(item).__name__, len(item), digest(repr(item).encode("utf-8", "surrogatepass"))


def _object_token(item: Any) -> Any:
    """Return a single token for an object and its parts, equal in every process."""
    walk = _Walk(_MAX_OBJECT_TOKENS)
    walk.visit_all(item)
    return "object", full_name(type(item)), digest(repr(sorted(walk.found.tokens.items())).encode("utf-8", "replace"))


def functions_in(value: Any, depth: int = 4) -> Iterator[types.FunctionType]:
    """Yield the Python functions that a value is, or wraps."""
    if type(value) is types.FunctionType:
        yield value
    elif depth and type(value) in _WRAPPERS:
        for name in ("fget", "fset", "fdel", "__func__", "func", "__wrapped__"):
            yield from functions_in(getattr(value, name, None), depth - 1)


@functools.lru_cache(maxsize=10_000)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that code and the functions inside it read or set."""
    found, high = set[str](), 0
    # dis.get_instructions() takes 20 times as long, because it describes each operation.
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _GLOBAL_OPERATIONS:
            found.add(code.co_names[argument >> _GLOBAL_OPERATIONS[operation]])
    within = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(found.union(*map(globals_in, within)))


@functools.lru_cache(maxsize=1000)
def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package, and is not the user's own code."""
    package = module.partition(".")[0]
    if package in STABLE_PACKAGES | _OWN_PACKAGES:
        return True
    found = sys.modules.get(package)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return file is not None and str(file).startswith(package_folders())
