"""What objects consist of: attributes, built-in containers, memory of libraries in C, and arrays that share memory."""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

_Found = TypeVar("_Found")

CONTAINERS = (dict, list, set, frozenset, tuple)
# They add nothing that could not be read by name or by iterating.
_TRANSPARENT = {object, typing.Generic, *CONTAINERS}
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def per_class(function: Callable[[type], _Found]) -> Callable[[type], _Found]:
    """Keep what a function of a class returns for as long as the class lives."""
    known: weakref.WeakKeyDictionary[type, _Found] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def find(kind: type) -> _Found:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, function(kind))

    return find


def full_name(kind: type) -> str:
    """Return module and name of a class."""
    return ".".join(name_of(kind))


def name_of(kind: type) -> tuple[str, str]:
    """Return module and qualified name of a class."""
    return str(getattr(kind, "__module__", "builtins")), kind.__qualname__  # SWIG's has no module


def namespace(kind: type) -> dict[str, Any]:
    """Return what a class statement has defined, but for weak proxies: their class would be asked of what is gone."""
    return {name: part for name, part in vars(kind).items() if type(part) not in weakref.ProxyTypes}


@per_class
def made_in_python(kind: type) -> bool:
    """Whether a class statement made this class: then its instances hold nothing but attributes."""
    # Libraries such as nanobind make their classes by a metaclass in C.
    if type(kind) is not type and not made_in_python(type(kind)):
        return False
    for name, part in namespace(kind).items():
        if getattr(part, "__objclass__", None) is not kind:
            continue
        if isinstance(part, _IN_C):
            return False
        if isinstance(part, types.GetSetDescriptorType) and name not in ("__dict__", "__weakref__"):
            return False
    return True


def is_inherited(kind: type, name: str, part: Any) -> bool:
    """Whether a class says of an attribute what its base says: cloudpickle leaves that out of the classes it packs."""
    return any(vars(base).get(name, kind) is part for base in kind.__mro__[1:])


@per_class
def foreign_base(kind: type) -> type | None:
    """Return the class in C, other than the plain containers, whose memory instances have; None: there is none."""
    return next((base for base in kind.__mro__ if base not in _TRANSPARENT and not made_in_python(base)), None)


@per_class
def container(kind: type) -> type | None:
    """Return the plain container that instances are."""
    return next((base for base in kind.__mro__ if base in CONTAINERS), None)


@per_class
def _dictionary_of(kind: type) -> Any:
    for base in kind.__mro__:
        part = vars(base).get("__dict__")
        if isinstance(part, _SLOTS):
            return part
    return None


@per_class
def _slots_of(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if made_in_python(base):
            members = {
                name: part for name, part in namespace(base).items() if isinstance(part, types.MemberDescriptorType)
            }
            found = {**members, **found}
    return found


def dictionary(instance: Any) -> dict[str, Any] | None:
    """Return an instance's own ``__dict__``, whatever its class says of that name; None: it has none."""
    part = _dictionary_of(type(instance))
    found = None if part is None else part.__get__(instance)
    return found if isinstance(found, dict) else None


def slots(instance: Any) -> dict[str, Any]:
    """Return what is in an instance's ``__slots__``, past properties and ``__getattr__``."""
    found = {}
    for name, part in _slots_of(type(instance)).items():
        try:
            found[name] = part.__get__(instance)
        except AttributeError:  # empty
            continue
    return found


def attributes(instance: Any) -> dict[str, Any]:
    """Return all attributes that are an instance's own."""
    return {**slots(instance), **(dictionary(instance) or {})}


def set_state(copy: Any, state: Mapping[str, Any]) -> None:
    """Fill a new object, past ``__setattr__`` and ``__getattr__``, which may ask the layer below it."""
    held = dictionary(copy)
    assert held is not None, f"{type(copy)} has no __dict__"
    held.update(state)


# Which memory (of the host, or of a device), the first byte, and the one behind the last.
Extent = tuple[str, int, int]
# So that a copy is aligned as the original: the C library aligns what is large to this.
_ALIGNMENT = 16


def extent(item: Any) -> Extent | None:
    """Return where an array's or a tensor's values lie; None: it is neither, or it has none."""
    kind = type(item)
    if issubclass(kind, np.ndarray):
        return _span("host", item.__array_interface__["data"][0], item.itemsize, item.shape, item.strides)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor) and item.layout is torch.strided:
        try:
            strides = tuple(stride * item.itemsize for stride in item.stride())
            space = "host" if item.device.type == "cpu" else str(item.device)
            return _span(space, item.data_ptr(), item.itemsize, tuple(item.shape), strides)
        except (RuntimeError, ValueError):  # meta and uninitialized tensors have no memory
            return None
    if issubclass(kind, (ctypes.Array, ctypes.Structure)):
        return _span("host", ctypes.addressof(item), 1, (ctypes.sizeof(item),), (1,))
    if issubclass(kind, bytearray) and item:
        return _span("host", ctypes.addressof(ctypes.c_char.from_buffer(item)), 1, (len(item),), (1,))
    return None


def _span(space: str, address: int, size: int, shape: Sequence[int], strides: Sequence[int]) -> Extent | None:
    if 0 in shape or size == 0 or address == 0:
        return None
    ends = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    low = address + sum(end for end in ends if end < 0)
    return space, low, address + sum(end for end in ends if end > 0) + size


def mapped() -> list[tuple[int, int]]:
    """List the pieces of memory that this process has, as far as the system tells."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
            pieces = [line.split(" ", 1)[0].split("-") for line in lines]
    except OSError:
        return []
    return [(int(low, 16), int(high, 16)) for low, high in pieces]


def overlapping(extents: Sequence[Extent | None]) -> list[list[int]]:
    """Group what overlaps.

    :return: the indices of each group of two or more, in order
    """
    found: list[list[int]] = []
    space, end, group = "", 0, list[int]()
    known = [(where, index) for index, where in enumerate(extents) if where is not None]
    for where, index in sorted(known):
        if where[0] != space or where[1] >= end:
            found.append(group)
            space, end, group = where[0], 0, []
        group.append(index)
        end = max(end, where[2])
    return [sorted(group) for group in [*found, group] if len(group) > 1]


def reductions(items: Iterable[Any], owners: Iterable[tuple[Any, Mapping[str, Any]]]) -> dict[int, tuple[Any, ...]]:
    """Reduce arrays and tensors that share memory so that their copies do; pickle copies each by itself.

    :param items: all that are in a pickle
    :param owners: objects of libraries in C, with those attributes that are views of their memory
    :return: by the array's id, what ``__reduce__`` gives
    """
    plain = {id(item): item for item in items if _is_plain(item)}
    arrays = [(item, place) for item in plain.values() if (place := extent(item)) is not None]
    fields = [((owner, name), whole) for owner, parts in owners for name, whole in _places(parts)]
    reduced: dict[int, tuple[Any, ...]] = {}
    for item, place in arrays:
        around = [(whole[2] - whole[1], whole[1], source) for source, whole in fields if _within(place, whole)]
        if around:
            _, start, source = min(around, key=lambda field: field[0])
            reduced[id(item)] = _reduced(item, source, start)
    for group in overlapping([place for _, place in arrays]):
        members = [arrays[index] for index in group]
        if not any(id(item) in reduced for item, _ in members):
            block, start = _block(*members)
            reduced.update((id(item), _reduced(item, block, start)) for item, _ in members)
    return reduced


def _places(parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Extent]]:
    for name, part in parts.items():
        if isinstance(part, Mapping):
            yield from _places(part, f"{prefix}{name}.")
        elif (place := extent(part)) is not None:
            yield prefix + name, place


def _within(place: Extent, whole: Extent) -> bool:
    return place[0] == whole[0] and whole[1] <= place[1] and place[2] <= whole[2]


def _is_plain(item: Any) -> bool:
    if type(item) is np.ndarray:
        return not item.dtype.hasobject
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and type(item) is torch.Tensor
        and item.layout is torch.strided
        and item.grad_fn is None
        and not (item.requires_grad or item.is_conj() or item.is_neg() or vars(item))
    )


def _block(*members: tuple[Any, Extent]) -> tuple[Any, int]:
    """Copy the memory of arrays that overlap into one array, or one tensor; give it with the address it stands for."""
    first, (space, low, _) = members[0]
    low = min(place[1] for _, place in members)
    if space == "host":
        start = low - low % _ALIGNMENT
        block = np.zeros(max(place[2] for _, place in members) - start, np.uint8)
        ctypes.memmove(block.ctypes.data + low - start, low, len(block) - (low - start))
        return block, start
    torch, storage = sys.modules["torch"], first.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage).clone(), storage.data_ptr()


def _reduced(item: Any, source: Any, start: int) -> tuple[Any, ...]:
    if type(item) is np.ndarray:
        offset = item.__array_interface__["data"][0] - start
        return _array, (source, offset, item.dtype, item.shape, item.strides, item.flags.writeable)
    return _tensor, (source, item.data_ptr() - start, item.dtype, tuple(item.shape), item.stride())


def _array(source: Any, offset: int, dtype: Any, shape: Any, strides: Any, writeable: bool) -> Any:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, _memory(source), offset, strides)
    array.flags.writeable = writeable
    return array


def _tensor(source: Any, offset: int, dtype: Any, shape: Any, strides: Any) -> Any:
    import torch

    memory = _memory(source)
    flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory).reshape(-1).view(torch.uint8)
    flat = flat[offset : len(flat) - (len(flat) - offset) % dtype.itemsize]
    return flat.view(dtype).as_strided(shape, strides)


def _memory(source: Any) -> Any:
    return operator.attrgetter(source[1])(source[0]) if isinstance(source, tuple) else source
