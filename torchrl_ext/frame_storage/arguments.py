"""Validation of a frame storage's arguments: options, indices and elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index as as_index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection, lazy_stack

from rl_ext_core.devices import resolve_device
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, check_codec, validate_max_error
from torchrl_ext.frame_storage.columns import FrameColumn, list_items

Places = npt.NDArray[np.int64]


def positive_int(name: str, value: Any) -> int:
    """Return ``value`` as an int, and refuse values below 1.

    :param name: name of the argument, for the error
    :raises InvalidTypeError: If ``value`` is not a whole number.
    :raises InvalidArgumentError: If ``value`` is below 1.
    """
    try:
        number = as_index(value)
    except TypeError:
        raise InvalidTypeError(f"{name}={value!r} is not a whole number; expected 1 or more. Use {name}=1") from None
    if number < 1:
        raise InvalidArgumentError(f"{name}={value!r} must be at least 1")
    return number


def check_device(device: torch.device | str | int) -> None:
    """Raise an error if ``device`` is a GPU that is not available, before any data is collected for it.

    :raises DeviceUnavailableError: If there is no such GPU.
    """
    if isinstance(device, int) or (device != "auto" and torch.device(device).type == "cuda"):
        resolve_device(device)


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that are invalid for every kind of image.

    :param options: ``codec``, ``n_stack``, ``max_error``, and ``quality`` if it is set
    :raises InvalidArgumentError: If an option has an invalid value, or options contradict each other.
    :raises InvalidTypeError: If an option has an invalid type.
    :raises MissingDependencyError: If the codec needs a package that is not installed.
    """
    if options["n_stack"] is not None:
        positive_int("n_stack", options["n_stack"])
    check_codec(options["codec"], quality=options.get("quality", DEFAULT_QUALITY))
    validate_max_error(options["max_error"], codec=options["codec"], dtype=np.uint8)


def as_tensordict(data: Any) -> Any:
    """Return a TensorDict or tensorclass unchanged, and stack a list of them lazily.

    :raises InvalidTypeError: If ``data`` is neither.
    """
    if isinstance(data, list) and data and all(is_tensor_collection(item) for item in data):
        data = lazy_stack(data)
    if not is_tensor_collection(data):
        raise InvalidTypeError(
            f"FrameStorage stores TensorDicts, got {type(data).__name__}. Use TensorDict({{'pixels': images}}, "
            "batch_size=[len(images)])"
        )
    return data


def index_to_cpu(index: Any) -> Any:
    """Move the tensors in an index to the CPU, where elements are stored."""
    if isinstance(index, tuple):
        return tuple(map(index_to_cpu, index))
    return index.cpu() if isinstance(index, torch.Tensor) else index


def number_places(index: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return the flat numbers of the places that an index selects, in the shape of the result.

    :param index: Any index that torch accepts.
    :param shape: Batch dimensions of the storage.
    :raises InvalidArgumentError: If the index is out of range or has an unsupported type.
    """
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, (list, range, set, np.ndarray)):
        index = torch.as_tensor(list(index) if isinstance(index, (range, set)) else index)
        index = index if index.numel() else index.long()
    try:
        if isinstance(index, slice):
            numbers = torch.arange(*index.indices(shape[0]))
        elif isinstance(index, torch.Tensor) and index.dtype not in (torch.bool, torch.uint8):
            numbers = torch.from_numpy(_wrap(index.numpy(), shape[0]))  # NumPy is faster for small arrays
        elif isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            numbers = torch.from_numpy(_wrap(np.array(index), shape[0]))
        elif isinstance(index, tuple) and len(index) == len(shape) and all(map(_is_integers, index)):
            parts = [_wrap(part.numpy(), size) for part, size in zip(index, shape, strict=True)]
            return torch.from_numpy(np.ravel_multi_index(parts, tuple(shape)).astype(np.int64, copy=False))
        else:  # rare: as slow as the storage is large
            return torch.arange(math.prod(shape)).reshape(tuple(shape))[index]
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"index {index!r:.200} names no places of a storage of shape {tuple(shape)} ({error}); nothing was stored"
        ) from error
    rest, n = tuple(shape[1:]), math.prod(shape[1:])
    return (numbers.unsqueeze(-1) * n + torch.arange(n)).reshape(*numbers.shape, *rest) if rest else numbers


def _is_integers(part: Any) -> bool:
    """Return whether a part of an index is a tensor of 64-bit numbers."""
    return isinstance(part, torch.Tensor) and part.dtype == torch.int64


def _wrap(places: npt.NDArray[Any], size: int) -> Places:
    """Count negative numbers from the end; raise IndexError if a number is out of range."""
    if (wrong := (places < -size) | (places >= size)).any():
        raise IndexError(f"{places[wrong].reshape(-1)[0]} is out of range")
    return np.where(places < 0, places + size, places).astype(np.int64, copy=False)


class Target(NamedTuple):
    """Elements and the places that they are written to.

    :ivar cursor: index into the storage that contains each place once
    :ivar data: elements, one per place
    :ivar places: (n,) indices along the first dimension
    :ivar batch_dims: number of batch dimensions of ``data``
    :ivar stored_dims: number of batch dimensions of the stored TensorDict that ``cursor`` indexes
    """

    cursor: Any
    data: Any
    places: Places
    batch_dims: int
    stored_dims: int


def is_key(index: Any) -> bool:
    """Return whether an index is a key: a string, or a tuple that begins with one."""
    return isinstance(index, str) or (isinstance(index, tuple) and bool(index) and isinstance(index[0], str))


def normalize_index(index: Any, ndim: int) -> Any:
    """Expand ``...`` in an index, and unwrap a tuple of one part.

    :param ndim: number of batch dimensions of the storage
    :raises InvalidArgumentError: If the index adds a dimension (None or a boolean).
    """
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or isinstance(part, bool) for part in parts):
        raise InvalidArgumentError(
            f"index {index!r} adds a dimension and names no elements; nothing was stored. Use storage[:] = data"
        )
    at = next((number for number, part in enumerate(parts) if part is ...), None)
    if at is not None:
        rest = parts[:at] + (slice(None),) * max(ndim + 1 - len(parts), 0) + parts[at + 1 :]
        parts = rest or (slice(None),)
    return parts[0] if len(parts) == 1 else parts


def is_single_index(cursor: Any) -> bool:
    """Return whether an index selects one element, without a batch dimension."""
    return not isinstance(cursor, (slice, range, tuple, set)) and np.ndim(cursor) == 0


def is_slices(index: Any) -> bool:
    """Return whether an index consists of slices, so that indexing returns a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, slice) for part in parts)


def resolve_target(cursor: Any, data: Any, *, shape: torch.Size, ndim: int) -> Target:
    """Return the places that an index selects, and one element for each.

    Of repeated places, the last one counts.

    :param shape: Batch dimensions of the storage.
    :param ndim: Number of dimensions that ``max_size`` counts.
    :raises InvalidArgumentError: If the index is out of range, or selects another number of elements than ``data`` has.
    """
    if is_single_index(cursor):
        place = int(number_places(int(cursor), shape[:1]))
        return Target(place, data, np.array([place], dtype=np.int64), ndim - 1, ndim)
    slices = cursor if isinstance(cursor, tuple) else (cursor,)
    if is_slices(cursor) and len(slices) <= len(shape):
        # Slices stay slices, so that a view of the same elements, such as buffer[:], can be written back to its place.
        dims = max(ndim, len(slices))
        _check_length(data, tuple(len(range(*part.indices(size))) for part, size in zip(slices, shape)), cursor)  # noqa: B905
        return Target(cursor, data, np.arange(*slices[0].indices(shape[0]), dtype=np.int64), dims, dims)
    index = (
        torch.as_tensor(list(cursor)) if isinstance(cursor, (range, set, list, np.ndarray)) else index_to_cpu(cursor)
    )
    # An index of the first dimension selects all elements along the others. Any other index selects single elements.
    dims = max(ndim, len(index)) if isinstance(index, tuple) else index.ndim if index.dtype == torch.bool else 1
    places = number_places(index, shape[:dims])
    _check_length(data, tuple(places.shape), cursor)
    places_flat = places.reshape(-1).numpy()
    data = data.unsqueeze(0) if places.ndim == 0 else data.flatten(0, places.ndim - 1) if places.ndim > 1 else data
    kept = last_occurrences(places_flat)
    if len(kept) < len(places_flat):
        places_flat, data = places_flat[kept], data[torch.from_numpy(kept)]
    if dims == 1:
        return Target(torch.from_numpy(places_flat), data, places_flat, ndim, ndim)
    at = np.unravel_index(places_flat, shape[:dims])
    indices = tuple(torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in at)
    return Target(indices, data, indices[0].numpy(), 1, dims)


def last_occurrences(places: Places) -> Places:
    """Return the position of the last occurrence of each number, in ascending order.

    :param places: (n,) numbers
    """
    backwards, kept = np.unique(places[::-1], return_index=True)
    if len(backwards) == len(places):
        return np.arange(len(places))
    return np.sort(len(places) - 1 - kept)


def _check_length(data: Any, expected: tuple[int, ...], cursor: Any) -> None:
    """Raise an error if the batch size differs from what the index selects."""
    if tuple(data.batch_size[: len(expected)]) != expected:
        raise InvalidArgumentError(
            f"index {cursor!r:.200} selects {expected} elements, got a batch of {tuple(data.batch_size)}; nothing was "
            "stored. Pass as many elements as the index selects"
        )


def has_known_leaves(
    where: Target,
    stored_rows: Any,
    columns: list[FrameColumn],
    *,
    may_cast: bool,
    may_add_keys: bool,
    may_lack_keys: bool,
) -> bool:
    """Compare elements with the stored ones; return whether all their keys are stored.

    :param where: The elements and their places.
    :param stored_rows: All stored elements without images.
    :param columns: Columns of the images.
    :param may_cast: Whether leaves other than images may have another dtype.
    :param may_add_keys: Whether elements may have new keys.
    :param may_lack_keys: Whether elements may lack stored keys, because the stored values are to be kept.
    :raises InvalidArgumentError: If a shape differs, or if a key is new or missing and must not be.
    :raises InvalidTypeError: If a dtype or a kind of leaf differs.
    """
    images = {key: column for column in columns for key in column.keys}
    known, items = True, list_items(where.data)
    for key, leaf in items:
        column, stored = images.get(key), stored_rows.get(key, None)
        kind, stored_kind = _kind_of(leaf), "tensor" if column else None if stored is None else _kind_of(stored)
        if stored_kind is None:
            if not may_add_keys and kind != "tensordict":
                raise InvalidArgumentError(
                    f"{key!r} was not among the first elements, and the files in storage_dir have no room for it; "
                    "nothing was stored. Use the same keys in all elements, or leave storage_dir out"
                )
            known = False
        elif kind != stored_kind:
            raise InvalidTypeError(
                f"{key!r} is a {kind}, expected a {stored_kind} as in the storage; nothing was stored. Use another key "
                "for it"
            )
        elif kind == "tensor":
            shape = (*column.batch, *column.shape) if column else tuple(stored.shape)
            if tuple(leaf.shape[where.batch_dims :]) != (expected := shape[where.stored_dims :]):
                raise InvalidArgumentError(
                    f"{key!r} has shape {tuple(leaf.shape)}, expected {expected} after {where.batch_dims} batch "
                    "dimension(s), as in the first elements; nothing was stored. Use one shape for all elements"
                )
            if not column and leaf.dtype != stored.dtype and not may_cast:
                raise InvalidTypeError(
                    f"{key!r} has dtype {leaf.dtype}, expected {stored.dtype} as in the storage; nothing was stored. "
                    f"Use data[{key!r}] = data[{key!r}].to({stored.dtype})"
                )
        known &= kind != "value"
    if not may_lack_keys:  # otherwise, places would keep the value of an overwritten element
        found = {key for key, _ in items}
        # TensorDictReplayBuffer adds the key "index", and ReplayBuffer does not.
        for key in [*images, *(key for key, _ in list_items(stored_rows))]:
            if key not in found and key != "index":
                raise InvalidArgumentError(
                    f"{key!r} is missing, expected all keys of the stored elements; nothing was stored. Add it to the "
                    "data, or change some keys of stored elements with storage[index] = data"
                )
    return known


def snapshot_rows(rows: Any, cursor: Any) -> Callable[[], None]:
    """Copy the rows at an index, and return a function that restores them."""
    keys = set(rows.keys(include_nested=True))
    before = rows[cursor].clone()

    def undo() -> None:
        """Restore the copied rows, and delete the keys that were added since."""
        for key in set(rows.keys(include_nested=True)) - keys:
            rows.del_(key) if isinstance(key, str) else rows.get(key[:-1]).del_(key[-1])
        rows[cursor] = before

    return undo


def _kind_of(value: Any) -> str:
    """Return ``"tensor"``, ``"tensordict"`` or, for anything else, ``"value"``."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    # The text of several elements is returned as a list.
    return "tensordict" if isinstance(value, TensorDictBase) and not is_non_tensor(value) else "value"
