"""State of an object's attributes: copies of the plain values in them, and their restoration in place.

:func:`read_values` copies numbers, texts, arrays, tensors, generators, and lists, dicts and sets of plain values, by
path, such as ``helper.level``. It looks for them in objects, lists and dicts, too. :func:`write_values` sets those that
differ, in the present objects, so that all objects that share them see the change. Nothing else is saved.
"""

from __future__ import annotations

import contextlib
import copy
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

_MAX_BYTES = 1 << 24  # of an array or tensor that is copied
_MAX_PARTS = 20_000  # of a value that is copied, and of an object whose parts are read
_LIBRARIES = {*sys.stdlib_module_names, "rich", "tqdm"}
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis)))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_FILLED = (list, dict, set, deque, np.ndarray)  # filled in place, because other objects may share them
_HEAP_TYPE = 1 << 9  # flag of classes that Python code has defined


class Value(NamedTuple):
    """Copy of a value, or what is known of one that is not saved.

    :ivar kind: ``"plain"``, ``"generator"`` or ``"enum"``, which are saved. A ``"container"`` is an object, list or
        dict whose parts have their own paths. An ``"unsaved"`` value has a checksum, which detects changes. Those of an
        ``"unknown"`` value, such as an iterator, and of an ``"opaque"`` one cannot be detected
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
    parts = [part for base in cls.__mro__ for part in vars(base).values()]
    # type() is used, because a weak proxy of a deleted object has no other attributes.
    values = [part.fget if issubclass(type(part), property) else part for part in parts]
    codes = [value.__code__ for value in values if type(value) is types.FunctionType]
    for code in codes:  # the list grows by the functions in functions
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names if not name.startswith("__"))
    return [name for name in names if not hasattr(type(inspect.getattr_static(cls, name, None)), "__get__")]


def _instance_attributes(owner: Any) -> dict[str, Any]:
    found = dict(getattr(owner, "__dict__", None) or {})
    for base in type(owner).__mro__:
        slots = [name for name, member in vars(base).items() if type(member) is types.MemberDescriptorType]
        found |= {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return found


def read_values(attributes: dict[str, Any], links: Iterable[Any]) -> tuple[dict[str, Value], dict[str, Any]]:
    """Return copies of the values in attributes, and the objects themselves, by path.

    :param links: objects that are not read, because they have a state of their own or none
    """
    seen = {id(link) for link in links}
    values: dict[str, Value] = {}
    present: dict[str, Any] = {}

    def read(value: Any, parent: str, key: Any, path: str, limit: int, is_fixed: bool = False) -> None:
        """Read a value, which cannot be replaced if it is part of a tuple or function."""
        if id(value) in seen or isinstance(value, (types.ModuleType, gymnasium.Space)):
            return
        present[path] = value
        try:
            kind, content = _classify(value)
        except Exception:  # its code may raise anything
            kind, content = "unknown", None
        if is_fixed and kind in ("plain", "enum") and not isinstance(value, _FILLED):
            kind, content = "unsaved", _checksum_of(content)
        parts = _parts_of(value) if kind in ("container", "unsaved") else None
        if parts is not None and len(values) + len(parts) > limit:
            kind, content, parts = "unknown", None, None
        values[path] = Value(kind, content, _type_name(value), parent, key)
        if parts is not None:
            seen.add(id(value))
            is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
            is_fixed = is_frozen or isinstance(value, (tuple, functools.partial, *_FUNCTIONS))
            has_names = kind == "container" and not isinstance(value, (list, tuple, dict))
            for key, part in parts.items():
                read(part, path, key, f"{path}.{key}" if has_names else f"{path}[{key!r}]", limit, is_fixed)

    for name in sorted(attributes):  # of an object with two paths, the first one is read
        try:
            read(attributes[name], "", name, name, len(values) + _MAX_PARTS)
        except RecursionError:
            values[name] = Value("unknown", None, _type_name(attributes[name]), "", name)
    return values, present


def _classify(value: Any) -> tuple[str, Any]:
    cls, torch = type(value), sys.modules.get("torch")
    if isinstance(value, enum.Enum):
        return "enum", value.name
    if cls.__name__ == "SwigPyObject":  # an address, such as that of a body of Box2D, which differs in each process
        return "opaque", None
    if cls is np.ndarray and value.nbytes > _MAX_BYTES and not value.dtype.hasobject:
        return "unsaved", zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if not (cls in _DICTS and _parts_of(value)):
        with contextlib.suppress(RecursionError):
            plain = dict(value) if cls in _DICTS else value
            if _is_plain(plain, [_MAX_PARTS]):
                return "plain", copy.deepcopy(plain)
    if isinstance(value, _GENERATORS):
        state = state_of_generator(value)
        return ("opaque" if state is None else "generator"), state
    if torch is not None and isinstance(value, torch.Generator):
        return "generator", value.get_state().numpy()
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() > _MAX_BYTES:
            return "unknown", None
        content = value.detach().cpu().clone()
        _canonical(content)  # raises if it has no plain memory, as sparse tensors
        return "plain", content
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


def _is_plain(value: Any, budget: list[int]) -> bool:
    """Whether a value consists of at most ``budget[0]`` numbers, texts, arrays and containers."""
    kind: Any = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject and value.nbytes <= _MAX_BYTES
    if kind not in (list, tuple, set, frozenset, deque, dict):
        return kind in _LEAVES or (isinstance(value, np.generic) and not value.dtype.hasobject)
    parts = (*value, *value.values()) if kind is dict else value
    budget[0] -= len(parts)
    return budget[0] >= 0 and all(_is_plain(part, budget) for part in parts)


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
    if hasattr(value, "untyped_storage"):  # a tensor
        content = value.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return str(value.dtype), tuple(value.shape), _canonical(content)
    return value


# -- writing


def write_values(owner: Any, saved: dict[str, Value], links: Iterable[Any], *, kept: Collection[str]) -> set[str]:
    """Set the values of an object that differ from saved ones, except those at the paths ``kept``.

    :return: paths of values that still differ
    """
    names, links = {value.key for value in saved.values() if not value.parent}, list(links)

    def read() -> tuple[dict[str, Value], dict[str, Any]]:
        return read_values({name: value for name, value in _instance_attributes(owner).items() if name in names}, links)

    (values, present), expected = read(), digests_of(saved)
    present[""] = owner
    different = differing(expected, digests_of(values)).difference(kept)
    for path, value in saved.items():
        parents = [each[value.parent].type_name for each in (saved, values) if value.parent in each]
        if path in different and (not value.parent or parents[1:] == parents[:1]):
            with contextlib.suppress(Exception):  # its code may raise anything
                _write(present[value.parent], value, present.get(path))
    for path, value in values.items():
        parent = present[value.parent]
        if path in different and path not in saved and value.parent in saved and isinstance(parent, dict):
            parent.pop(value.key, None)  # the saved run has removed it
    unknown = {path for path, value in saved.items() if value.kind == "unknown"}
    return (differing(expected, digests_of(read()[0])) & saved.keys()) | unknown


def _write(parent: Any, saved: Value, present: Any) -> None:
    content = copy.deepcopy(saved.content)
    if saved.kind == "enum":
        content = type(present)[content]
    elif saved.kind == "generator":
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(present, torch.Generator):
            present.set_state(torch.from_numpy(content))
            return
        content = restore_generator(present, content)
    elif saved.kind != "plain" or (saved.type_name == _type_name(present) and _fill(present, content)):
        return
    # Parameters of torch and defaultdicts, for example, can only be filled.
    if saved.kind == "plain" and saved.type_name != _type_name(content):
        return
    if isinstance(parent, (list, dict)):
        parent[saved.key] = content
    else:
        object.__setattr__(parent, saved.key, content)


def _fill(present: Any, content: Any) -> bool:
    """Fill a container, because other objects may share it; return whether that is possible."""
    is_tensor = hasattr(present, "untyped_storage")
    if is_tensor or isinstance(present, np.ndarray):
        fits = (present.dtype, present.shape) == (content.dtype, content.shape)
        if fits := fits and (is_tensor or present.flags.writeable):
            (present.detach() if is_tensor else present)[...] = content
        return bool(fits)
    if isinstance(present, list):
        present[:] = content
    elif isinstance(present, (set, dict)) or (isinstance(present, deque) and present.maxlen == content.maxlen):
        present.clear()
        (present.extend if isinstance(present, deque) else present.update)(content)
    else:
        return False
    return True
