"""State of an object's attributes: copies of what they contain, and their restoration in place.

:func:`read_state` copies attributes to plain values and :class:`SavedValue` objects, which contain no class of the
user. :func:`summarize` returns checksums of them by path, such as ``helper.level``. :func:`write_state` fills the
present objects with copies, so that all objects that share them see the change.
"""

from __future__ import annotations

import array
import enum
import functools
import gc
import hashlib
import inspect
import io
import itertools
import pickle
import random
import sys
import types
import warnings
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from rl_ext_core.recording.generators import restore_generator, state_of_generator

__all__ = [
    "SavedValue",
    "Summary",
    "copy_with_strides",
    "differing",
    "find_unsaved",
    "read_attributes",
    "read_state",
    "summarize",
    "write_state",
]

# Larger arrays are copied only if they have changed since construction. The largest ones are never copied.
_STATIC_BYTES, _MAX_BYTES, _SAMPLED_BYTES = 1 << 20, 1 << 26, 1 << 20
_MAX_PARTS = 20_000  # of an attribute
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis)))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
# Objects of these modules belong to the process or to a library, as handles, threads and loggers do.
_PROCESS_MODULES = frozenset(
    (
        *("asyncio", "concurrent", "contextlib", "ctypes", "http", "importlib", "io", "logging", "multiprocessing"),
        *("os", "rich", "select", "selectors", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile"),
        *("threading", "tqdm", "weakref"),
    )
)
# Kinds of parts that have no state: environments that another object refers to, modules, spaces.
_LINK, _HANDLE = "link", "handle"
_UNKNOWN = "unknown"  # a state that cannot be read
_HEAP_TYPE = 1 << 9  # flag of classes that Python code has defined
_MISSING: Any = object()


class SavedValue:
    """Copy of an object that is not a plain value. Objects that share one also do so in copies.

    :ivar kind: how it is copied, such as ``"list"``
    :ivar type_name: module and qualified name of its class
    :ivar content: plain values, and parts
    """

    __slots__ = ("content", "kind", "type_name")

    def __init__(self, kind: str, type_name: tuple[str, str] = ("", ""), content: Any = None) -> None:
        self.kind, self.type_name, self.content = kind, type_name, content


class Mark(NamedTuple):
    """Checksum of the value at a path.

    :ivar checksum: checksum of the whole value
    :ivar unsaved: checksum of what cannot be saved in it; None if all of it can
    :ivar description: class of what cannot be saved
    :ivar is_unknown: whether it cannot be read either
    :ivar is_generator: whether the value is a random generator, whose state never belongs to the process
    """

    checksum: bytes
    unsaved: bytes | None = None
    description: str = ""
    is_unknown: bool = False
    is_generator: bool = False


Summary = dict[str, Mark]


class _TooLargeError(Exception):
    """An attribute has too many parts."""


class _CannotRestoreError(Exception):
    """A saved value cannot be built in this process."""


# -- reading


def read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object and the class attributes that its methods use, without slowing it down.

    CPython moves the attributes to a dict when ``vars(owner)`` is called, and each later access takes longer. So they
    are read by the names in the code of its methods. If these do not include all, ``vars`` is used.
    """
    cls: Any = type(owner)
    found = dict[str, Any]()
    for name in _names_of(cls):
        try:
            found[name] = object.__getattribute__(owner, name)
        except Exception:  # the attribute does not exist yet
            continue
    referents = gc.get_referents(owner)
    known = {id(value) for value in (*found.values(), type(owner))}
    if not all(id(value) in known for value in referents):
        found |= _instance_attributes(owner)
    return found


@functools.lru_cache(1024)
def _names_of(cls: type) -> tuple[str, ...]:
    """Return the names in the code of a class's methods that can be attributes of an instance."""
    names = dict[str, None]()
    for base in reversed(cls.__mro__):
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                names.update(dict.fromkeys(_names_in(inspect.unwrap(function).__code__)))
    return tuple(
        name for name in names if name[:2] != "__" and not _is_descriptor(inspect.getattr_static(cls, name, None))
    )


def _is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _instance_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes in the dict and in the slots of an object."""
    attributes = getattr(owner, "__dict__", None)
    found = dict(attributes) if isinstance(attributes, dict) else {}
    for base in type(owner).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if isinstance(vars(base).get(slot), types.MemberDescriptorType):
                value = getattr(owner, slot, _MISSING)
                if value is not _MISSING:
                    found[slot] = value
    return found


def read_state(
    attributes: dict[str, Any], links: Iterable[Any] = (), *, unchanged: Summary | None = None
) -> dict[str, Any]:
    """Return copies of attributes.

    :param attributes: values by name
    :param links: objects that are not copied, because they have a state of their own or none
    :param unchanged: summary of the attributes at construction: large arrays that are still the same are left out
    """
    reader = _Reader(links)
    parts = {name: reader.read_attribute(value) for name, value in attributes.items()}
    if unchanged:
        _leave_out_static_arrays(parts, unchanged)
    return parts


class _Reader:
    """Copier of values that keeps which objects are shared."""

    def __init__(self, links: Iterable[Any]) -> None:
        self._links = {id(link) for link in links}
        self._parts: dict[int, SavedValue] = {}
        self._originals: list[Any] = []  # so that their ids stay valid
        self._limit = 0

    def read_attribute(self, value: Any) -> Any:
        self._limit, known = len(self._originals) + _MAX_PARTS, len(self._originals)
        try:
            return self.read(value)
        except (_TooLargeError, RecursionError):
            for original in self._originals[known:]:
                del self._parts[id(original)]
            del self._originals[known:]
            return SavedValue("unsaved", _type_name(value), _UNKNOWN)

    def read(self, value: Any) -> Any:
        if type(value) in _LEAVES or (isinstance(value, np.generic) and not value.dtype.hasobject):
            return value
        if id(value) in self._links:
            return SavedValue(_LINK)
        part = self._parts.get(id(value))
        if part is None:
            if len(self._originals) >= self._limit:
                raise _TooLargeError
            part = self._parts[id(value)] = SavedValue("", _type_name(value))
            self._originals.append(value)
            try:
                part.kind, part.content = self._read_object(value)
            except (_TooLargeError, RecursionError):
                raise
            except Exception:  # its code may raise anything
                part.kind, part.content = "unsaved", _UNKNOWN
        return part

    def read_all(self, values: Iterable[Any]) -> list[Any]:
        return list(map(self.read, values))

    def _read_object(self, value: Any) -> tuple[str, Any]:
        """Return the kind and the content of a value that is not plain."""
        if type(value) is np.ndarray:
            return self._read_array(value)
        if isinstance(value, enum.Enum):
            return "enum", (value.name, value.value if isinstance(value, enum.Flag) else None)
        if isinstance(value, (list, deque, tuple, set, frozenset)):
            kind = next(base.__name__ for base in (list, deque, tuple, set, frozenset) if isinstance(value, base))
            items = list(value) if _LEAVES.issuperset(map(type, value)) else self.read_all(value)
            return kind, (items, getattr(value, "maxlen", None), self._read_extra(value))
        if isinstance(value, dict):
            factory = value.default_factory if isinstance(value, defaultdict) else None
            items = [(self.read(key), self.read(each)) for key, each in list(value.items())]
            return "dict", (items, self.read(factory), self._read_extra(value))
        if isinstance(value, (bytearray, array.array)):
            return "buffer", (getattr(value, "typecode", ""), bytes(value))
        if isinstance(value, np.random.BitGenerator):
            return "generator", value.state
        if isinstance(value, _GENERATORS):
            state = state_of_generator(value)
            return (_HANDLE, None) if state is None else ("generator", state)
        if "torch" in sys.modules and (found := _read_torch(value)) is not None:
            return found
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return "function", (_code_name(value), self.read_all(cells), self.read_all(defaults))
        if isinstance(value, types.MethodType):
            return "method", (self.read(value.__self__), value.__name__)
        if isinstance(value, (type, types.BuiltinFunctionType)):
            return "class", None
        if isinstance(value, types.ModuleType) or _is_gym_space(value):
            return _LINK, None
        hidden = self._read_hidden_state(value)
        return self._read_instance(value) if hidden is None else ("unsaved", hidden)

    def _read_array(self, value: np.ndarray) -> tuple[str, Any]:
        if value.dtype.hasobject:
            return "object array", (value.shape, self.read_all(value.ravel().tolist()))
        if value.nbytes > _MAX_BYTES:
            sample = np.ascontiguousarray(value.reshape(-1)[:: value.nbytes // _SAMPLED_BYTES])
            return "unsaved", zlib.crc32(sample.tobytes())
        return "array", (value.copy(), value.strides)

    def _read_hidden_state(self, value: Any) -> Any:
        """Return what shows that an object has changed whose state cannot be restored; None for other objects."""
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return "ended" if frame is None else [frame.f_lasti, self.read_all(frame.f_locals.values())]
        if isinstance(value, io.IOBase):
            try:
                return value.tell() if value.readable() else 0  # other files are output, not state
            except (OSError, ValueError):  # a pipe, or a closed file
                return 0
        if isinstance(value, np.random.SeedSequence):
            return repr(value.state)
        if hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            return self._read_pickled(value, _UNKNOWN)
        if hasattr(type(value), "__array__") and not isinstance(value, np.ndarray) and not hasattr(value, "__dict__"):
            return zlib.crc32(np.ascontiguousarray(np.asarray(value)).tobytes())
        return None

    def _read_pickled(self, value: Any, otherwise: Any) -> Any:
        """Return what the pickle of an object would contain."""
        try:
            with warnings.catch_warnings():  # of iterators, which later versions of Python do not pickle
                warnings.simplefilter("ignore")
                reduced = value.__reduce_ex__(4)
        except Exception:  # its code may raise anything
            return otherwise
        return self.read_all(reduced[1:3]) if isinstance(reduced, tuple) else otherwise

    def _read_instance(self, value: Any) -> tuple[str, Any]:
        cls: Any = type(value)
        if isinstance(value, types.SimpleNamespace):
            return "object", {name: self.read(each) for name, each in vars(value).items()}
        module = str(getattr(cls, "__module__", "")).partition(".")[0].lstrip("_")
        if module in _PROCESS_MODULES or not cls.__flags__ & _HEAP_TYPE:
            is_value = cls.__hash__ not in (None, object.__hash__) and cls.__eq__ is not object.__eq__
            return self._read_value(value) if is_value else (_HANDLE, None)
        base = cls
        while base.__flags__ & _HEAP_TYPE and base.__base__ is not None:
            base = base.__base__
        attributes = _instance_attributes(value)
        if base is object:
            is_value = not attributes and cls.__hash__ not in (None, object.__hash__)
            if is_value:
                return self._read_value(value)
            items = {name: self.read(each) for name, each in attributes.items()}
            return ("object", items) if attributes else (_HANDLE, None)
        if cls.__hash__ not in (None, object.__hash__) and cls.__eq__ is not object.__eq__:
            return self._read_value(value)
        hidden = self._read_pickled(value, None)  # the base class may have a state that Python does not see
        return (_HANDLE, None) if hidden is None else ("unsaved", hidden)

    def _read_value(self, value: Any) -> tuple[str, Any]:
        """Return an immutable value, such as a date or a path."""
        try:
            return "value", pickle.dumps(value, 4)
        except Exception:  # its code may raise anything
            return _HANDLE, None

    def _read_extra(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object of a subclass of list, dict etc."""
        attributes = getattr(value, "__dict__", None) if type(value).__module__ != "builtins" else None
        return {name: self.read(each) for name, each in attributes.items()} if attributes else {}


def _type_name(value: Any) -> tuple[str, str]:
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return str(getattr(named, "__module__", "")), str(getattr(named, "__qualname__", ""))


def _has_contents(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that is not set yet
        return False
    return True


def _code_name(function: types.FunctionType) -> str:
    """Return a text that is equal for the same code in another process."""
    code = function.__code__
    return f"{code.co_firstlineno} {zlib.crc32(code.co_code + repr(code.co_names).encode())}"


def _is_gym_space(value: Any) -> bool:
    import gymnasium

    return isinstance(value, gymnasium.Space)


def _read_torch(value: Any) -> tuple[str, Any] | None:
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Generator):
        return "torch generator", value.get_state().numpy().tobytes()
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.is_quantized or value.numel() * value.element_size() > _MAX_BYTES:
        return "unsaved", _UNKNOWN
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return "tensor", (str(value.dtype).rpartition(".")[2], tuple(value.shape), data)


def _leave_out_static_arrays(parts: dict[str, Any], unchanged: Summary) -> None:
    """Drop the copies of large arrays that have not changed since construction."""
    for path, part in _paths(parts):
        if isinstance(part, SavedValue) and part.kind == "array" and part.content[0].nbytes > _STATIC_BYTES:
            checksum = _checksum_of_value(part, {})
            if path in unchanged and unchanged[path].checksum == checksum:
                part.kind, part.content = "static", checksum


# -- summaries


def _paths(parts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths of all values that are not attributes or entries of others, with their parts."""
    seen: set[int] = set()

    def visit(path: str, part: Any) -> Iterator[tuple[str, Any]]:
        children = _children(path, part)
        if children is None:
            yield path, part
        elif id(part) not in seen:
            seen.add(id(part))
            for child in children:
                yield from visit(*child)

    for name, part in parts.items():
        yield from visit(name, part)


def _children(path: str, part: Any) -> list[tuple[str, Any]] | None:
    """Return the paths of an object's attributes or a dict's entries; None for other values."""
    if not isinstance(part, SavedValue):
        return None
    if part.kind == "object":
        return [(f"{path}.{name}", child) for name, child in part.content.items()]
    if part.kind == "dict" and part.content[0] and all(type(key) is str for key, _ in part.content[0]):
        return [(f"{path}[{key!r}]", child) for key, child in part.content[0]]
    return None


def summarize(parts: dict[str, Any]) -> Summary:
    """Return a checksum of each value, by its path."""
    known: dict[int, bytes] = {}
    summary = {}
    for path, part in _paths(parts):
        if not isinstance(part, SavedValue):
            summary[path] = Mark(_checksum_of_value(part, known))
            continue
        unsaved = list(_unsaved_parts(part, set()))
        checksum = b"".join(_checksum_of_value(each, known) for each in unsaved) if unsaved else None
        summary[path] = Mark(
            _checksum_of_value(part, known),
            checksum,
            unsaved[0].type_name[1] if unsaved else "",
            any(type(each.content) is str and each.content == _UNKNOWN for each in unsaved),
            part.kind in ("generator", "torch generator"),
        )
    return summary


def find_unsaved(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the paths of values that are not saved, with their classes."""
    found = []
    for path, part in _paths(parts):
        hidden = next(_unsaved_parts(part, set(), ("unsaved", _HANDLE)), None)
        if hidden is not None:
            found.append((path, hidden.type_name[1]))
    return found


def differing(one: Summary | None, other: Summary | None) -> set[str]:
    """Return the paths whose values differ; none if a summary is missing."""
    if one is None or other is None:
        return set()
    return {path for path in {**one, **other} if one.get(path, ())[:1] != other.get(path, ())[:1]}


def _unsaved_parts(part: Any, seen: set[int], kinds: tuple[str, ...] = ("unsaved",)) -> Iterator[SavedValue]:
    if not isinstance(part, SavedValue) or id(part) in seen:
        return
    seen.add(id(part))
    if part.kind in kinds:
        yield part
    for child in _parts_in(part.content):
        yield from _unsaved_parts(child, seen, kinds)


def _parts_in(content: Any) -> Iterator[SavedValue]:
    """Yield the parts in nested lists, tuples and dicts."""
    if isinstance(content, SavedValue):
        yield content
    elif isinstance(content, (list, tuple)):
        for each in content:
            yield from _parts_in(each)
    elif isinstance(content, dict):
        yield from _parts_in(list(content.values()))


def _checksum_of_value(part: Any, known: dict[int, bytes]) -> bytes:
    """Return a checksum that is equal for equal values in all processes."""
    if isinstance(part, SavedValue):
        found = known.get(id(part))
        if found is None:
            known[id(part)] = b"cycle"
            found = known[id(part)] = _checksum_of_part(part, known)
        return found
    if isinstance(part, np.generic):
        text = repr((part.dtype.str, part.tobytes()))
    elif isinstance(part, (list, tuple)):
        text = (
            repr([_checksum_of_value(each, known) for each in part])
            if not _LEAVES.issuperset(map(type, part))
            else repr(part)
        )
    elif isinstance(part, dict):
        text = repr([(name, _checksum_of_value(each, known)) for name, each in part.items()])
    else:
        text = f"{type(part).__name__} {part!r}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _checksum_of_part(part: SavedValue, known: dict[int, bytes]) -> bytes:
    content = part.content
    if part.kind == "static":
        return content  # type: ignore[no-any-return]
    if part.kind == "array":
        content = content[0].dtype.str, content[0].shape, content[0].tobytes()
    elif part.kind == "generator":
        content = repr(content) if not isinstance(content, dict) else _plain_items(content)
    elif part.kind in ("set", "frozenset"):
        content = sorted(_checksum_of_value(each, known) for each in content[0])
    return _checksum_of_value([part.kind, *part.type_name, content], known)


def _plain_items(state: dict[str, Any]) -> list[Any]:
    return [
        (key, _plain_items(each) if isinstance(each, dict) else each.tobytes() if hasattr(each, "tobytes") else each)
        for key, each in state.items()
    ]


# -- writing


def write_state(
    owner: Any,
    parts: dict[str, Any],
    links: Iterable[Any] = (),
    *,
    kept: Callable[[str], bool] = lambda path: False,
    replaced: Collection[str] = (),
) -> list[str]:
    """Fill the attributes of an object with copies, in place.

    :param owner: the object
    :param parts: result of :func:`read_state`
    :param links: as for :func:`read_state`
    :param kept: whether the value at a path stays as it is
    :param replaced: names of attributes that get a new object, because others may have the present one
    :return: paths of attributes that cannot be restored
    """
    present = _instance_attributes(owner)
    before = summarize(read_state(present, links))
    writer, lost = _Writer(type(owner), kept), []
    for name, part in parts.items():
        try:
            value = writer.write(name, part, _MISSING if name in replaced else present.get(name, _MISSING))
        except _CannotRestoreError:
            lost.append(name)
            continue
        if value is not present.get(name, _MISSING):
            _set_attribute(owner, name, value)
    for path, mark in summarize(parts).items():
        is_equal = path in before and mark.unsaved == before[path].unsaved and not mark.is_unknown
        if mark.unsaved is not None and not is_equal and not kept(path):
            lost.append(path)
    return [*lost, *writer.lost]


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    attributes = getattr(owner, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(
        inspect.getattr_static(type(owner), name, None), types.MemberDescriptorType
    ):
        attributes[name] = value  # without a call of __setattr__
    else:
        object.__setattr__(owner, name, value)


class _Writer:
    """Restorer of values in the present objects, each of which takes the place of one saved object."""

    def __init__(self, cls: type, kept: Callable[[str], bool]) -> None:
        self._class, self._kept = cls, kept
        self._values: dict[int, Any] = {}
        self._used: set[int] = set()
        self.lost: list[str] = []

    def write(self, path: str, part: Any, present: Any) -> Any:
        """Return the value for a path: the present object, filled with the saved contents, or a new one."""
        if not isinstance(part, SavedValue):
            return present if present is not _MISSING and self._kept(path) else part
        if id(part) in self._values:
            return self._values[id(part)]
        if part.kind in (_LINK, _HANDLE, "unsaved", "static") or (present is not _MISSING and self._kept(path)):
            if present is _MISSING:
                raise _CannotRestoreError
            if part.kind == "static" and _checksum_of_value(_Reader(()).read_attribute(present), {}) != part.content:
                self.lost.append(path)
            self._values[id(part)] = present
            return present
        if id(present) in self._used:  # it takes the place of another saved object
            present = _MISSING
        value: Any = getattr(self, "_write_" + part.kind.replace(" ", "_"))(path, part, present)
        self._values[id(part)] = value
        return value

    def _begin(self, part: SavedValue, present: Any, build: Callable[[], Any]) -> Any:
        """Return the object to fill, and remember it for parts that contain it."""
        fits = present is not _MISSING and _type_name(present) == part.type_name
        value = present if fits else build()
        self._used.add(id(value))
        self._values[id(part)] = value
        return value

    def _build(self, part: SavedValue) -> Any:
        """Return a new object of the saved class, whose constructor is not called."""
        cls = self._find(part)
        return cls.__new__(cls)

    def _find(self, part: SavedValue) -> Any:
        """Return the class or function of a part by its name."""
        module, name = part.type_name
        found: Any = sys.modules.get(module)
        for each in name.split("."):
            found = getattr(found, each, None)
        if found is None:  # a class of the script, in a worker
            functions = (value for base in self._class.__mro__ for value in vars(base).values())
            globals_ = (function.__globals__ for function in functions if isinstance(function, types.FunctionType))
            found = next((names[name] for names in globals_ if name in names), None)
        if found is None:
            raise _CannotRestoreError
        return found

    def _items(self, path: str, items: list[Any], present: Iterable[Any]) -> list[Any]:
        olds = itertools.chain(present, itertools.repeat(_MISSING))
        return [self.write(f"{path}[]", item, old) for item, old in zip(items, olds, strict=False)]

    def _write_array(self, path: str, part: SavedValue, present: Any) -> Any:
        saved, strides = part.content
        if isinstance(present, np.ndarray) and (present.dtype, present.shape) == (saved.dtype, saved.shape):
            value = self._begin(part, present, lambda: None)
            if value.tobytes() == saved.tobytes():
                return value
            if value.flags.writeable:
                value[...] = saved
                return value
        return copy_with_strides(saved, strides)

    def _write_object_array(self, path: str, part: SavedValue, present: Any) -> Any:
        shape, items = part.content
        fits = isinstance(present, np.ndarray) and present.dtype.hasobject and present.shape == shape
        value = self._begin(part, present if fits else _MISSING, lambda: np.empty(shape, object))
        for index, item in enumerate(self._items(path, items, value.ravel().tolist())):
            value.flat[index] = item
        return value

    def _write_list(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present, lambda: self._build(part))
        list.__setitem__(value, slice(None), self._items(path, part.content[0], list(value)))
        return self._write_extra(path, part, value)

    def _write_deque(self, path: str, part: SavedValue, present: Any) -> Any:
        items, maxlen, _ = part.content
        fits = isinstance(present, deque) and present.maxlen == maxlen
        value = self._begin(part, present if fits else _MISSING, lambda: self._find(part)(maxlen=maxlen))
        merged = self._items(path, items, list(value))
        deque.clear(value)
        deque.extend(value, merged)
        return self._write_extra(path, part, value)

    def _write_tuple(self, path: str, part: SavedValue, present: Any) -> Any:
        old = present if isinstance(present, tuple) and _type_name(present) == part.type_name else ()
        items = self._items(path, part.content[0], old)
        if len(items) == len(old) and all(map(lambda one, other: one is other, items, old)) and present is not _MISSING:
            return present
        cls = self._find(part)
        return cls(*items) if hasattr(cls, "_fields") else cls(items)

    def _write_set(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present, lambda: self._build(part))
        merged = self._keys(path, part.content[0], value)
        set.clear(value)
        set.update(value, merged)
        return self._write_extra(path, part, value)

    def _write_frozenset(self, path: str, part: SavedValue, present: Any) -> Any:
        old = present if isinstance(present, frozenset) else ()
        return self._find(part)(self._keys(path, part.content[0], old))

    def _keys(self, path: str, keys: list[Any], present: Iterable[Any]) -> list[Any]:
        """Return the keys of a dict or set: the present ones that are equal to the saved ones, or new ones."""
        if all(not isinstance(key, SavedValue) for key in keys):
            return list(keys)
        reader = _Reader(())
        olds = {_checksum_of_value(reader.read_attribute(old), {}): old for old in present}
        return [
            self.write(f"{path}[]", key, olds.get(_checksum_of_value(key, {}), _MISSING))
            if isinstance(key, SavedValue)
            else key
            for key in keys
        ]

    def _write_dict(self, path: str, part: SavedValue, present: Any) -> Any:
        items, factory, _ = part.content

        def build() -> Any:
            value = self._build(part)
            if isinstance(value, defaultdict) and factory is not None:
                value.default_factory = self.write(f"{path}[]", factory, _MISSING)
            return value

        value = self._begin(part, present, build)
        has_paths = _children(path, part) is not None
        merged = OrderedDict[Any, Any]()
        for key, item in zip(
            self._keys(path, [key for key, _ in items], value), (each for _, each in items), strict=True
        ):
            place = f"{path}[{key!r}]" if has_paths else f"{path}[]"
            try:
                merged[key] = self.write(place, item, dict.get(value, key, _MISSING))
            except _CannotRestoreError:
                if value is not present:
                    raise
                self.lost.append(place)
        for key in list(value):
            if key not in merged and self._kept(f"{path}[{key!r}]"):
                merged[key] = dict.__getitem__(value, key)
        if list(value) != list(merged):
            dict.clear(value)
        dict.update(value, merged)
        return self._write_extra(path, part, value)

    def _write_extra(self, path: str, part: SavedValue, value: Any) -> Any:
        for name, item in part.content[2].items():
            vars(value)[name] = self.write(f"{path}[]", item, vars(value).get(name, _MISSING))
        return value

    def _write_object(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present, lambda: self._build(part))
        attributes = _instance_attributes(value)
        for name, item in part.content.items():
            old = attributes.get(name, _MISSING)
            try:
                new = self.write(f"{path}.{name}", item, old)
            except _CannotRestoreError:
                if value is not present:  # an incomplete object would fail later
                    raise
                self.lost.append(f"{path}.{name}")
                continue
            if new is not old:
                _set_attribute(value, name, new)
        return value

    def _write_buffer(self, path: str, part: SavedValue, present: Any) -> Any:
        typecode, data = part.content
        new: Any = array.array(typecode, data) if typecode else bytearray(data)
        value = self._begin(part, present, lambda: new)
        value[:] = new
        return value

    def _write_generator(self, path: str, part: SavedValue, present: Any) -> Any:
        old = None if present is _MISSING else present
        if issubclass(kind := self._find(part), np.random.BitGenerator):
            old = old if isinstance(old, kind) else kind()
            old.state = part.content
        else:
            old = restore_generator(old, part.content)
        self._used.add(id(old))
        return old

    def _write_torch_generator(self, path: str, part: SavedValue, present: Any) -> Any:
        import torch

        value = self._begin(part, present, torch.Generator)
        value.set_state(torch.frombuffer(bytearray(part.content), dtype=torch.uint8))
        return value

    def _write_tensor(self, path: str, part: SavedValue, present: Any) -> Any:
        import torch

        name, shape, data = part.content
        dtype = getattr(torch, name)
        saved = (
            torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        )
        if isinstance(present, torch.Tensor) and (present.dtype, tuple(present.shape)) == (dtype, shape):
            value = self._begin(part, present, lambda: None)
            with torch.no_grad():
                value.copy_(saved)
            return value
        if part.type_name[1] == "Parameter":
            return torch.nn.Parameter(saved)
        return saved.to(present.device) if isinstance(present, torch.Tensor) else saved

    def _write_enum(self, path: str, part: SavedValue, present: Any) -> Any:
        is_same = isinstance(present, enum.Enum) and _type_name(present) == part.type_name
        cls, (name, value) = type(present) if is_same else self._find(part), part.content
        return cls(value) if name is None else cls[name]

    def _write_value(self, path: str, part: SavedValue, present: Any) -> Any:
        try:
            value = pickle.loads(part.content)
            return present if present is not _MISSING and value == present else value
        except Exception as error:  # its class is missing, for example
            raise _CannotRestoreError from error

    def _write_class(self, path: str, part: SavedValue, present: Any) -> Any:
        return present if present is not _MISSING and _type_name(present) == part.type_name else self._find(part)

    def _write_method(self, path: str, part: SavedValue, present: Any) -> Any:
        owner, name = part.content
        old = getattr(present, "__self__", _MISSING)
        return getattr(self.write(f"{path}[]", owner, old), name)

    def _write_function(self, path: str, part: SavedValue, present: Any) -> Any:
        name, cells, _ = part.content
        if isinstance(present, types.FunctionType) and _code_name(present) == name:
            self._begin(part, present, lambda: None)
            for cell, item in zip(filter(_has_contents, present.__closure__ or ()), cells, strict=False):
                new = self.write(f"{path}[]", item, cell.cell_contents)
                if new is not cell.cell_contents:
                    cell.cell_contents = new
            return present
        return self._find(part)


def copy_with_strides(saved: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """Return a copy of an array with the layout of the original, on which the order of later sums depends."""
    if saved.strides == strides or min(strides, default=0) < 0 or 0 in strides:
        return saved.copy()
    n_bytes = sum((size - 1) * step for size, step in zip(saved.shape, strides, strict=True)) + saved.itemsize
    memory = np.zeros(max(n_bytes, saved.itemsize), np.uint8)
    found: np.ndarray = np.ndarray(saved.shape, saved.dtype, memory, strides=strides)
    found[...] = saved
    return found
