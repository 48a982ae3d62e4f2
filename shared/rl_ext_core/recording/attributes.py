"""State of an object's attributes: copies of what they contain, and their restoration in place.

:func:`read_state` copies attributes to plain values and :class:`SavedValue` objects, which contain no class of the
user. :func:`summarize` returns checksums of them by path, such as ``helper.level``. :func:`write_state` fills the
present objects with copies, so that all objects that share them see the change.
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
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rl_ext_core.recording.generators import restore_generator, state_of_generator

__all__ = [
    "SavedValue",
    "Summary",
    "differing",
    "read_attributes",
    "read_state",
    "summarize",
    "write_state",
]

_MAX_BYTES = 1 << 24  # of an array or tensor that is copied
_MAX_PARTS = 20_000  # of an attribute
_LIBRARIES = {*sys.stdlib_module_names, "rich", "tqdm"}
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis)))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Kinds of values whose content is not saved, by importance
_HIDDEN = ("unknown", "unsaved", "opaque", "reference")
_HEAP_TYPE = 1 << 9  # flag of classes that Python code has defined
_MISSING: Any = object()


class SavedValue:
    """Copy of an object that is not a plain value. Objects that share one also do so in copies.

    :ivar kind: how it is copied, such as ``"list"``. A ``"link"`` refers to an object with an own state. These are
        not copied: an ``"opaque"`` object, such as a lock, an ``"unknown"`` value, which cannot be read, and an
        ``"unsaved"`` one. Only changes of the last are detected.
    :ivar type_name: module and qualified name of its class, or of a function
    :ivar content: plain values, and parts
    """

    __slots__ = ("content", "kind", "type_name")

    def __init__(self, kind: str, type_name: tuple[str, str] = ("", ""), content: Any = None) -> None:
        self.kind, self.type_name, self.content = kind, type_name, content


class Mark(NamedTuple):
    """Checksum of the value at a path.

    :ivar kind: ``"generator"``, or the kind of what is not saved in it
    :ivar description: class of what is not saved
    """

    checksum: bytes
    kind: str
    description: str


Summary = dict[str, Mark]


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


def read_state(attributes: dict[str, Any], links: Iterable[Any] = ()) -> dict[str, Any]:
    """Return copies of attributes.

    :param attributes: values by name
    :param links: objects that are not copied, because they have a state of their own or none
    """
    reader = _Reader(links)
    return {name: reader.read_attribute(value) for name, value in attributes.items()}


class _Reader:
    """Copier of values that keeps which objects are shared."""

    def __init__(self, links: Iterable[Any]) -> None:
        self._links = {id(link) for link in links}
        self._parts: dict[int, tuple[SavedValue, Any]] = {}  # with the originals, so that their ids stay valid
        self._limit = 0

    def read_attribute(self, value: Any) -> Any:
        known = dict(self._parts)
        self._limit = len(known) + _MAX_PARTS
        try:
            return self.read(value)
        except RecursionError:
            self._parts = known
            return SavedValue("unknown", _type_name(value))

    def read(self, value: Any) -> Any:
        if _is_plain(value):
            return value
        if id(value) in self._links or isinstance(value, (types.ModuleType, gymnasium.Space)):
            return SavedValue("link")
        if id(value) in self._parts:
            return self._parts[id(value)][0]
        if len(self._parts) >= self._limit:
            raise RecursionError
        part = SavedValue("", _type_name(value))
        self._parts[id(value)] = part, value
        try:
            part.kind, part.content = self._read_object(value)
        except RecursionError:
            raise
        except Exception:  # its code may raise anything
            part.kind = "unknown"
        return part

    def _read_object(self, value: Any) -> tuple[str, Any]:
        """Return the kind and the content of a value that is not plain."""
        cls, torch = type(value), sys.modules.get("torch")
        if isinstance(value, enum.Enum):
            return ("enum", value.name) if value.name in cls.__members__ else ("unsaved", repr(value))
        if isinstance(value, (list, deque, tuple, dict, set, frozenset)):
            return self._read_container(value)
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
        if cls is np.ndarray and not value.dtype.hasobject:
            if value.nbytes > _MAX_BYTES:
                return "unsaved", zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return "array", value.copy(order="K")
        if (held := _held_by(value)) is not None:
            return "reference", list(map(self.read, held))
        return self._read_instance(value)

    def _read_container(self, value: Any) -> tuple[str, Any]:
        kind = next(each.__name__ for each in (list, deque, tuple, dict, set, frozenset) if isinstance(value, each))
        if kind == "dict":
            content: Any = {key: self.read(each) for key, each in list(value.items())}
        else:
            content = set(value) if kind == "set" else list(map(self.read, value))
        if kind == "deque":
            content.append(value.maxlen)
        # Keys that are objects, and attributes of subclasses, are not saved.
        extra = getattr(value, "__dict__", None)
        if extra or kind == "frozenset" or (kind in ("dict", "set") and not all(map(_is_plain, value))):
            return "unsaved", [self.read(list(value)), self.read(extra), *(content.values() if kind == "dict" else ())]
        return kind, content

    def _read_instance(self, value: Any) -> tuple[str, Any]:
        cls: Any = type(value)
        if isinstance(value, io.IOBase):
            return "unsaved", value.tell() if value.readable() else 0  # other files are output, not state
        if isinstance(value, np.memmap):  # the content of a file
            return "opaque", None
        # Objects with a base class in C may have a state that is not in their attributes. Those of Python's own modules
        # and of progress bars belong to the process, as threads and loggers do.
        in_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            in_python = cls is types.SimpleNamespace
        attributes = _instance_attributes(value) if in_python else {}
        if attributes:
            return "object", {name: self.read(each) for name, each in attributes.items()}
        if in_python and not hasattr(cls, "__array__"):
            return "opaque", None
        try:
            with warnings.catch_warnings():  # of iterators, which later versions of Python do not pickle
                warnings.simplefilter("ignore")
                return "unsaved", zlib.crc32(pickle.dumps(value, 4))
        except Exception:  # its code may raise anything
            return "unknown" if hasattr(cls, "__next__") else "opaque", None


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _LEAVES or (isinstance(value, np.generic) and not value.dtype.hasobject)


def _type_name(value: Any) -> tuple[str, str]:
    named = value if isinstance(value, (type, *_FUNCTIONS)) else type(value)
    return str(getattr(named, "__module__", "")), str(getattr(named, "__qualname__", ""))


def _held_by(value: Any) -> list[Any] | None:
    """Return what a class, function, method or partial refers to; None for other values."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, type):
        return []
    return [value.__self__] if isinstance(value, (types.MethodType, types.BuiltinFunctionType)) else None


# -- summaries


def _children(path: str, part: Any) -> dict[str, Any] | None:
    """Return an object's attributes or a dict's entries by their paths; None for other values."""
    if isinstance(part, SavedValue) and part.kind == "object":
        return {f"{path}.{name}" if path else name: child for name, child in part.content.items()}
    if isinstance(part, SavedValue) and part.kind == "dict" and {type(key) for key in part.content} == {str}:
        return {f"{path}[{key!r}]": child for key, child in part.content.items()}
    return None


def summarize(parts: dict[str, Any]) -> Summary:
    """Return the checksums of all values that are not attributes or entries of others, by their paths."""
    known: dict[int, bytes] = {}
    seen: set[int] = set()
    summary: Summary = {}

    def visit(path: str, part: Any) -> None:
        children = _children(path, part)
        if children is None:
            found = (each for each in _parts_in(part, set()) if each.kind in _HIDDEN)
            hidden = min(found, key=lambda each: _HIDDEN.index(each.kind), default=SavedValue(""))
            kind = "generator" if getattr(part, "kind", "") == "generator" else hidden.kind
            summary[path] = Mark(_checksum_of(part, known), kind, hidden.type_name[1])
        elif id(part) not in seen:
            seen.add(id(part))
            for place, child in children.items():
                visit(place, child)

    visit("", SavedValue("object", content=parts))
    return summary


def _parts_in(part: Any, seen: set[int]) -> Iterator[SavedValue]:
    """Yield a part, and all parts in it."""
    if isinstance(part, SavedValue) and id(part) not in seen:
        seen.add(id(part))
        yield part
        yield from _parts_in(part.content, seen)
    elif isinstance(part, (list, tuple, dict)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _parts_in(each, seen)


def differing(one: Summary | None, other: Summary | None) -> set[str]:
    """Return the paths whose values differ; none if a summary is missing."""
    if one is None or other is None:
        return set()
    return {path for path in {**one, **other} if one.get(path, ())[:1] != other.get(path, ())[:1]}


def _checksum_of(part: Any, known: dict[int, bytes]) -> bytes:
    """Return a checksum that is equal for equal values in all processes."""
    if isinstance(part, SavedValue):
        if id(part) not in known:
            known[id(part)] = b"cycle"
            content = part.content
            if part.kind == "reference":  # what it refers to is saved, except plain values
                content = list(filter(_is_plain, content))
            known[id(part)] = _checksum_of([part.kind, *part.type_name, content], known)
        return known[id(part)]
    if isinstance(part, (np.ndarray, np.generic)):
        part = part.dtype.str, part.shape, part.tobytes()
    elif isinstance(part, dict):
        part = list(part.items())
    elif isinstance(part, (set, frozenset)):
        part = sorted(_checksum_of(each, known) for each in part)
    if isinstance(part, (list, tuple)) and not _LEAVES.issuperset(map(type, part)):
        part = [_checksum_of(each, known) for each in part]
    text = f"{type(part).__name__} {part!r}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# -- writing


def write_state(
    owner: Any,
    parts: dict[str, Any],
    links: Collection[Any] = (),
    *,
    first: Summary | None,
    first_here: Summary | None,
    replaced: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Fill the attributes of an object with copies, in place. What construction has set otherwise stays as it is.

    :param owner: the object
    :param parts: result of :func:`read_state`
    :param links: as for :func:`read_state`
    :param first: summary of the saved object after its construction; None if it is not known
    :param first_here: summary of the present object after its construction
    :param replaced: names of attributes that get a new object, because others may have the present one
    :return: paths that stay although the saved run has changed them, and paths that cannot be restored
    """
    saved = summarize(parts)
    own = {path for path in differing(first, first_here) if path not in saved or saved[path].kind != "generator"}
    present = _instance_attributes(owner)
    olds = {name: value for name, value in present.items() if name not in replaced}
    merged = _Writer(own).merge("", SavedValue("object", content=parts), olds)
    for name, value in merged.items():
        if value is not present.get(name, _MISSING):
            object.__setattr__(owner, name, value)
    restored = {name: value for name, value in _instance_attributes(owner).items() if name in parts}
    different = differing(saved, summarize(read_state(restored, links))) & saved.keys()
    lost = different | {path for path, mark in saved.items() if mark.kind == "unknown"}
    return sorted(own & different & differing(first, saved)), sorted(lost - own)


class _Writer:
    """Restorer of values in the present objects, each of which takes the place of one saved object.

    :param kept: paths of values that stay as they are
    """

    def __init__(self, kept: set[str]) -> None:
        self._kept = kept
        self._values: dict[int, Any] = {}
        self._used: set[int] = set()

    def write(self, path: str, part: Any, present: Any) -> Any:
        """Return the value for a path: the present object, filled with the saved contents, or a new one."""
        is_kept = present is not _MISSING and path in self._kept
        if not isinstance(part, SavedValue):
            return present if is_kept else part
        if id(part) in self._values:
            return self._values[id(part)]
        if is_kept or part.kind in ("link", "unknown", "unsaved", "opaque"):
            if present is _MISSING:
                raise LookupError
            return self._remember(part, present)
        is_frozen = getattr(getattr(type(present), "__dataclass_params__", None), "frozen", False)
        if id(present) in self._used or _type_name(present) != part.type_name or is_frozen:
            present = _MISSING
        return self._remember(part, getattr(self, f"_write_{part.kind}")(path, part, present))

    def _remember(self, part: SavedValue, value: Any) -> Any:
        self._used.add(id(value))
        self._values[id(part)] = value
        return value

    def merge(self, path: str, part: SavedValue, olds: dict[Any, Any]) -> dict[Any, Any]:
        """Return the restored attributes of an object, or entries of a dict."""
        places, merged = list(_children(path, part) or [f"{path}[]"] * len(part.content)), {}
        for place, (key, item) in zip(places, part.content.items(), strict=True):
            try:
                merged[key] = self.write(place, item, olds.get(key, _MISSING))
            except Exception:  # an object cannot be built, or its code may raise anything
                if not olds:  # an incomplete object would fail later
                    raise
                merged |= {key: olds[key]} if key in olds else {}
        return merged

    def _begin(self, part: SavedValue, present: Any) -> Any:
        """Return the object to fill: the present one, or a new one, whose constructor is not called."""
        if present is _MISSING:
            cls = _find(part)
            if issubclass(cls, defaultdict):  # whose argument is a function
                raise LookupError
            present = cls(maxlen=part.content[-1]) if issubclass(cls, deque) else cls.__new__(cls)
        return self._remember(part, present)

    def _items(self, path: str, items: list[Any], present: list[Any]) -> list[Any]:
        olds = [*present, *([_MISSING] * len(items))]
        return [self.write(f"{path}[]", item, old) for item, old in zip(items, olds, strict=False)]

    def _write_list(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present)
        items = self._items(path, part.content[:-1] if part.kind == "deque" else part.content, list(value))
        value.clear()
        value.extend(items)
        return value

    _write_deque = _write_list

    def _write_set(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present)
        value.clear()
        value.update(part.content)
        return value

    def _write_tuple(self, path: str, part: SavedValue, present: Any) -> Any:
        olds = [] if present is _MISSING else list(present)
        items = self._items(path, part.content, olds)
        if present is not _MISSING and list(map(id, olds)) == list(map(id, items)):
            return present
        cls = _find(part)
        return cls(*items) if hasattr(cls, "_fields") else cls(items)

    def _write_dict(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present)
        olds = dict(value)
        merged = self.merge(path, part, olds)
        kept = {key: old for key, old in olds.items() if key not in merged and f"{path}[{key!r}]" in self._kept}
        value.clear()
        value.update({**merged, **kept})
        return value

    def _write_object(self, path: str, part: SavedValue, present: Any) -> Any:
        value = self._begin(part, present)
        olds = _instance_attributes(value)
        for name, new in self.merge(path, part, olds).items():
            if new is not olds.get(name, _MISSING):
                object.__setattr__(value, name, new)
        return value

    def _write_reference(self, path: str, part: SavedValue, present: Any) -> Any:
        if present is _MISSING and part.content:
            raise LookupError
        if present is not _MISSING:
            self._items(path, part.content, _held_by(present) or [])
        return _find(part) if present is _MISSING else present

    def _write_enum(self, path: str, part: SavedValue, present: Any) -> Any:
        return (_find(part) if present is _MISSING else type(present))[part.content]

    def _write_array(self, path: str, part: SavedValue, present: Any) -> Any:
        saved = part.content
        if present is not _MISSING and (present.dtype, present.shape) == (saved.dtype, saved.shape):
            if present.flags.writeable:
                present[...] = saved
            if present.tobytes() == saved.tobytes():
                return present
        return saved.copy(order="K")

    def _write_tensor(self, path: str, part: SavedValue, present: Any) -> Any:
        torch = sys.modules["torch"]
        name, shape, data = part.content
        saved = torch.from_numpy(data.copy()).view(getattr(torch, name)).reshape(shape)
        if present is not _MISSING and (present.dtype, present.shape) == (saved.dtype, saved.shape):
            present.detach().copy_(saved)
            return present
        if part.type_name[1] != "Tensor":
            raise LookupError
        return saved

    def _write_generator(self, path: str, part: SavedValue, present: Any) -> Any:
        if not isinstance(part.content, np.ndarray):
            return restore_generator(None if present is _MISSING else present, part.content)
        torch = sys.modules["torch"]
        value = torch.Generator() if present is _MISSING else present
        value.set_state(torch.from_numpy(part.content.copy()))
        return value


def _find(part: SavedValue) -> Any:
    """Return the class or function of a part by its name."""
    module, name = part.type_name
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    if found is None:
        raise LookupError
    return found
