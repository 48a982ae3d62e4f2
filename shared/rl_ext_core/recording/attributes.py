"""State of an object's attributes: copies of the plain values in them, and their restoration in place.

:func:`read_values` copies numbers, texts, arrays, tensors, generators, and lists, dicts and sets of plain values, by
path, such as ``helper.level``. It looks for them in objects, lists and dicts, too. :func:`write_values` sets those that
differ, in the present objects, so that all objects that share them see the change. Nothing else is saved.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import hashlib
import inspect
import io
import pickle
import random
import sys
import types
import warnings
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rl_ext_core.recording.generators import restore_generator, state_of_generator

__all__ = ["Digests", "Value", "differing", "digests_of", "read_attributes", "read_values", "write_values"]

_MAX_BYTES = 1 << 24  # of an array or tensor that is copied
_MAX_PARTS = 20_000  # of a value that is copied, and of an object whose parts are read
_LIBRARIES = {*sys.stdlib_module_names, "rich", "tqdm"}
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis)))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_HEAP_TYPE = 1 << 9  # flag of classes that Python code has defined


class Value(NamedTuple):
    """Copy of a value, or what is known of one that is not saved.

    :ivar kind: ``"plain"``, ``"generator"``, ``"tensor"`` or ``"enum"``, which are saved. A ``"container"`` is an
        object, list or dict whose parts have their own paths. An ``"unsaved"`` value has a checksum, which detects
        changes. Those of an ``"unknown"`` value, such as an iterator, and of an ``"opaque"`` one cannot be detected
    :ivar content: plain value, state, or checksum
    :ivar type_name: module and name of the class
    :ivar parent: path of the object, list or dict that contains it
    :ivar key: attribute, key or index there
    """

    kind: str
    content: Any
    type_name: str
    parent: str
    key: Any


Digests = dict[str, tuple[str, bytes]]  # kinds and checksums by path


# -- reading


def read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, without slowing it down.

    CPython moves the attributes to a dict when ``vars(owner)`` is called, and a step of CartPole takes 13 % longer
    then. So they are read by the names in the code of its methods. If these do not include all, ``vars`` is used.
    """
    cls: Any = type(owner)
    found = dict[str, Any]()
    for name in _names_of(cls):
        with contextlib.suppress(AttributeError):
            found[name] = object.__getattribute__(owner, name)
    known = {id(value) for value in (*found.values(), cls)}
    return found if all(id(value) in known for value in gc.get_referents(owner)) else _instance_attributes(owner)


@functools.lru_cache(1024)
def _names_of(cls: type) -> list[str]:
    """Return the names in the code of a class's methods that can be attributes of an instance."""
    values = [getattr(value, "fget", value) for base in cls.__mro__ for value in vars(base).values()]
    codes = [value.__code__ for value in values if isinstance(value, types.FunctionType)]
    for code in codes:  # the list grows by the functions in functions
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names if not name.startswith("__"))
    return [name for name in names if not hasattr(type(inspect.getattr_static(cls, name, None)), "__get__")]


def _instance_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes in the dict and in the slots of an object."""
    found = dict(getattr(owner, "__dict__", None) or {})
    for base in type(owner).__mro__:
        slots = [name for name, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)]
        found |= {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return found


def read_values(attributes: dict[str, Any], links: Iterable[Any] = ()) -> dict[str, Value]:
    """Return copies of the values in attributes, by path.

    :param attributes: values by name
    :param links: objects that are not read, because they have a state of their own or none
    """
    return _Reader(attributes, links).values


class _NotPlainError(Exception):
    """A value is not plain, or too large."""


class _Reader:
    """Reader of values.

    :ivar values: the values by path
    :ivar present: the objects themselves by path
    """

    def __init__(self, attributes: dict[str, Any], links: Iterable[Any]) -> None:
        self._seen = {id(link) for link in links}
        self.values: dict[str, Value] = {}
        self.present: dict[str, Any] = {}
        for name in sorted(attributes):  # of an object with two paths, the first one is read
            self._limit = len(self.values) + _MAX_PARTS
            try:
                self._read(attributes[name], "", name, name)
            except RecursionError:
                self.values[name] = Value("unknown", None, _type_name(attributes[name]), "", name)

    def _read(self, value: Any, parent: str, key: Any, path: str, *, is_fixed: bool = False) -> None:
        """Read a value.

        :param is_fixed: whether it cannot be replaced, because it is part of a tuple or function
        """
        if id(value) in self._seen or isinstance(value, (types.ModuleType, gymnasium.Space)):
            return
        self.present[path] = value
        try:
            kind, content = self._read_object(value)
        except Exception:  # its code may raise anything
            kind, content = "unknown", None
        if is_fixed and kind in ("plain", "enum") and not _is_filled(value):
            kind, content = "unsaved", _checksum_of(content)
        self.values[path] = Value(kind, content, _type_name(value), parent, key)
        is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
        if (parts := _parts_of(value) if kind in ("container", "unsaved") else None) is None:
            return
        if len(self.values) + len(parts) > self._limit:
            self.values[path] = Value("unknown", None, _type_name(value), parent, key)
            return
        self._seen.add(id(value))
        is_fixed = is_frozen or isinstance(value, (tuple, functools.partial, *_FUNCTIONS))
        for key, part in parts.items():
            name = f".{key}" if kind == "container" and not isinstance(value, (list, tuple, dict)) else f"[{key!r}]"
            self._read(part, path, key, path + name, is_fixed=is_fixed)

    def _read_object(self, value: Any) -> tuple[str, Any]:
        """Return the kind and the content of a value."""
        cls, torch = type(value), sys.modules.get("torch")
        if isinstance(value, enum.Enum):
            return ("enum", value.name) if value.name in cls.__members__ else ("unsaved", _checksum_of(repr(value)))
        if cls is np.ndarray and value.nbytes > _MAX_BYTES and not value.dtype.hasobject:
            return "unsaved", zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        if not (cls in _DICTS and value and _parts_of(value)):
            with contextlib.suppress(_NotPlainError, RecursionError):
                return "plain", _copy_plain(dict(value) if cls in _DICTS else value, [_MAX_PARTS])
        if isinstance(value, _GENERATORS):
            state = state_of_generator(value)
            return ("opaque" if state is None else "generator"), state
        if torch is not None and isinstance(value, torch.Generator):
            return "generator", value.get_state().numpy()
        if torch is not None and isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > _MAX_BYTES:
                return "unknown", None
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
            return "tensor", (str(value.dtype).rpartition(".")[2], tuple(value.shape), data)
        if isinstance(value, (type, functools.partial, *_FUNCTIONS)):
            return "unsaved", _checksum_of(_type_name(value))
        if isinstance(value, io.IOBase):
            return "unsaved", value.tell() if value.readable() else 0  # other files are output, not state
        if _parts_of(value):
            return "container", (_type_name(value), len(value) if cls in (list, tuple) else None)
        if isinstance(value, np.memmap) or (_keeps_state_in_attributes(cls) and not hasattr(cls, "__array__")):
            return "opaque", None
        try:
            with warnings.catch_warnings():  # of iterators, which later versions of Python do not pickle
                warnings.simplefilter("ignore")
                return "unsaved", zlib.crc32(pickle.dumps(value, 4))
        except Exception:  # its code may raise anything
            return "unknown" if hasattr(cls, "__next__") else "opaque", None


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container, an object of a Python class, or a function; None for other values."""
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    if type(value) in _DICTS and all(type(key) is str for key in value):
        return dict(value)
    if isinstance(value, functools.partial):
        return dict(enumerate([value.func, *value.args, *value.keywords.values()]))
    if isinstance(value, types.FunctionType):
        return dict(enumerate([*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ())]))
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        return {0: value.__self__}
    is_object = _keeps_state_in_attributes(type(value)) and not isinstance(value, type)
    return _instance_attributes(value) if is_object else None


def _keeps_state_in_attributes(cls: Any) -> bool:
    """Whether the state of a class's objects is in their attributes.

    Objects with a base class in C may have another state. Those of Python's own modules and of progress bars belong to
    the process, as threads and loggers do.
    """
    if cls.__module__.partition(".")[0] in _LIBRARIES:
        return cls is types.SimpleNamespace
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _is_leaf(value: Any) -> bool:
    return type(value) in _LEAVES or (isinstance(value, np.generic) and not value.dtype.hasobject)


def _copy_plain(value: Any, budget: list[int]) -> Any:
    """Copy a plain value.

    :param budget: number of parts that may be copied
    :raises _NotPlainError: If it contains an object of another class, or too many parts.
    """
    if _is_leaf(value):
        return value
    budget[0] -= len(value) if isinstance(value, (list, tuple, set, frozenset, deque, dict)) else 0
    kind: Any = type(value)
    if budget[0] >= 0:
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes <= _MAX_BYTES:
            return value.copy(order="K")
        if kind in (list, tuple, set, frozenset):
            return kind(_copy_plain(part, budget) for part in value)
        if kind is deque:
            return deque((_copy_plain(part, budget) for part in value), value.maxlen)
        if kind is dict:
            return {_copy_plain(key, budget): _copy_plain(part, budget) for key, part in value.items()}
    raise _NotPlainError


def _type_name(value: Any) -> str:
    named = value if isinstance(value, (type, *_FUNCTIONS)) else type(value)
    return f"{getattr(named, '__module__', '')}:{getattr(named, '__qualname__', '')}"


# -- comparison


def digests_of(values: dict[str, Value]) -> Digests:
    """Return checksums of values, which are equal for equal values in all processes."""
    return {path: (value.kind, _checksum_of(value.content)) for path, value in values.items()}


def differing(one: Digests | None, other: Digests | None) -> set[str]:
    """Return the paths whose values differ; none if these are not known."""
    if one is None or other is None:
        return set()
    return {path for path in {**one, **other} if one.get(path) != other.get(path)}


def _checksum_of(value: Any) -> bytes:
    text = repr(_canonical(value))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(value: Any) -> Any:
    """Return a value whose text is equal for equal values only."""
    if isinstance(value, (np.ndarray, np.generic)):
        data = np.asarray(value).tobytes()
        return type(value).__name__, value.dtype.str, value.shape, hashlib.blake2b(data, digest_size=16).digest()
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(_canonical, value)))
    if isinstance(value, dict):
        return [(_canonical(key), _canonical(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, deque)):
        parts = value if _LEAVES.issuperset(map(type, value)) else map(_canonical, value)
        return type(value).__name__, list(parts)
    return value


# -- writing


def write_values(
    owner: Any, saved: dict[str, Value], links: Iterable[Any] = (), *, kept: Collection[str] = ()
) -> set[str]:
    """Set the values of an object that differ from saved ones.

    :param owner: the object
    :param saved: result of :func:`read_values`
    :param links: as for :func:`read_values`
    :param kept: paths of values that stay as they are
    :return: paths of values that still differ
    """
    names, links = {value.key for value in saved.values() if not value.parent}, list(links)

    def read() -> _Reader:
        return _Reader({name: value for name, value in _instance_attributes(owner).items() if name in names}, links)

    here, expected = read(), digests_of(saved)
    here.present[""] = owner
    different = differing(expected, digests_of(here.values)).difference(kept)
    for path, value in saved.items():
        parents = [values[value.parent].type_name for values in (saved, here.values) if value.parent in values]
        if path in different and (not value.parent or parents[1:] == parents[:1]):
            with contextlib.suppress(Exception):  # its code may raise anything
                _write(here.present[value.parent], value, here.present.get(path))
    for path, value in here.values.items():
        parent = here.present[value.parent]
        if path in different and path not in saved and value.parent in saved and isinstance(parent, dict):
            parent.pop(value.key, None)  # the saved run has removed it
    unknown = {path for path, value in saved.items() if value.kind == "unknown"}
    return (differing(expected, digests_of(read().values)) & saved.keys()) | unknown


def _is_filled(value: Any) -> bool:
    """Whether a value is filled in place, because other objects may share it."""
    return isinstance(value, (list, dict, set, deque, np.ndarray))


def _write(parent: Any, saved: Value, present: Any) -> None:
    """Set a value in its parent, or fill the present one."""
    content = saved.content
    if saved.kind == "plain":
        if saved.type_name == _type_name(present) and _fill(present, content):
            return
        if saved.type_name != _type_name(content):
            return
        content = _copy_plain(content, [_MAX_PARTS])
    elif saved.kind == "enum":
        content = type(present)[content]
    elif saved.kind == "tensor":
        torch = sys.modules["torch"]
        content = torch.from_numpy(content[2].copy()).view(getattr(torch, content[0])).reshape(content[1])
        if isinstance(present, torch.Tensor) and (present.dtype, present.shape) == (content.dtype, content.shape):
            present.detach().copy_(content)
            return
        if saved.type_name != _type_name(content):  # a parameter, for example
            return
    elif saved.kind == "generator" and isinstance(content, np.ndarray):
        present.set_state(sys.modules["torch"].from_numpy(content.copy()))
        return
    elif saved.kind == "generator":
        content = restore_generator(present, content)
    else:
        return
    if isinstance(parent, (list, dict)):
        parent[saved.key] = content
    else:
        object.__setattr__(parent, saved.key, content)


def _fill(present: Any, content: Any) -> bool:
    """Fill a container with copies; return whether that is possible."""
    content = _copy_plain(content, [_MAX_PARTS])
    if isinstance(present, np.ndarray):
        fits = present.flags.writeable and (present.dtype, present.shape) == (content.dtype, content.shape)
        if fits:
            present[...] = content
        return fits
    if isinstance(present, list):
        present[:] = content
    elif isinstance(present, (set, dict)):
        present.clear()
        present.update(content)
    elif isinstance(present, deque) and present.maxlen == content.maxlen:
        present.clear()
        present.extend(content)
    else:
        return False
    return True
