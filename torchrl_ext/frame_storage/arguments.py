"""Validation of the indices and elements that a frame storage gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection, lazy_stack

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from torchrl_ext.frame_storage.columns import FrameColumn, expand_numbers, list_items

Places = npt.NDArray[np.int64]
_INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64  # torch takes uint8 as a mask


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
    :raises IndexError: If the index is out of range. Other types raise what torch raises.
    """
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, (list, range, np.ndarray, int, np.integer)) and not isinstance(index, bool):
        index = torch.as_tensor(list(index) if isinstance(index, range) else index)
        index = index if index.numel() else index.long()
    if isinstance(index, slice):
        numbers = torch.arange(*index.indices(shape[0]))
    elif isinstance(index, torch.Tensor) and index.dtype in _INTEGERS:
        numbers = torch.from_numpy(_wrap(index.numpy(), shape[0]))  # NumPy is faster for small arrays
    elif isinstance(index, tuple) and len(index) == len(shape) and all(map(_is_integers, index)):
        parts = [_wrap(part.numpy(), size) for part, size in zip(index, shape, strict=True)]
        return torch.from_numpy(np.ravel_multi_index(parts, tuple(shape)).astype(np.int64, copy=False))
    else:  # rare: as slow as the storage is large
        return torch.arange(math.prod(shape)).reshape(tuple(shape))[index]
    return expand_numbers(numbers, shape[1:])


def _is_integers(part: Any) -> bool:
    """Return whether a part of an index is a tensor of 64-bit numbers."""
    return isinstance(part, torch.Tensor) and part.dtype == torch.int64


def _wrap(places: npt.NDArray[Any], size: int) -> Places:
    """Count negative numbers from the end; raise IndexError if a number is out of range."""
    low, high = places.min(initial=0), places.max(initial=-1)
    if low < -size or high >= size:
        raise IndexError(f"index {low if low < -size else high} is out of range for {size} elements")
    return (np.where(places < 0, places + size, places) if low < 0 else places).astype(np.int64, copy=False)


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


def is_single_index(cursor: Any) -> bool:
    """Return whether an index selects one element, without a batch dimension."""
    return not isinstance(cursor, (slice, range, tuple)) and cursor is not ... and np.ndim(cursor) == 0


def is_slices(index: Any) -> bool:
    """Return whether an index consists of slices, so that indexing returns a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, slice) for part in parts)


def is_view(index: Any) -> bool:
    """Return whether torch returns a view for an index, and not a copy: it has only integers, slices, ... and None."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, slice) or _is_number(part) for part in parts)


def _is_number(part: Any) -> bool:
    """Return whether a part of an index is a single integer, also as a tensor, and not a bool."""
    is_integer = part.dtype in _INTEGERS if isinstance(part, torch.Tensor) else type(part) is not bool
    return is_integer and np.ndim(part) == 0


def resolve_target(cursor: Any, data: Any, *, shape: torch.Size, ndim: int) -> Target:
    """Return the places that an index selects, and one element for each.

    Of repeated places, the last one counts.

    :param shape: Batch dimensions of the storage.
    :param ndim: Number of dimensions that ``max_size`` counts.
    :raises InvalidArgumentError: If the index is out of range, or selects another number of elements than ``data`` has.
    """
    parts, index = cursor if isinstance(cursor, tuple) else (cursor,), cursor
    if any(part is None or isinstance(part, bool) for part in parts):
        raise InvalidArgumentError(
            f"index {cursor!r} adds a dimension and names no elements; nothing was stored. Use storage[:] = data"
        )
    if isinstance(cursor, set):
        raise InvalidArgumentError(
            f"index {cursor!r:.200} has no order, so elements cannot be assigned to its places; nothing was stored. "
            "Use storage[sorted(index)] = data"
        )
    if is_single_index(cursor):
        place = int(_number_written(int(cursor), shape[:1]))
        return Target(place, data, np.array([place], dtype=np.int64), ndim - 1, ndim)
    keeps_slices = is_slices(cursor) and len(parts) <= len(shape)
    if isinstance(cursor, (range, list, np.ndarray)):
        index = torch.as_tensor(list(cursor))
    elif not keeps_slices:
        index = index_to_cpu(cursor)
    # An index of the first dimension selects all elements along the others. Any other index selects single elements.
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    dims = max(ndim if isinstance(index, tuple) or keeps_slices else 1, len(parts), index.ndim if is_mask else 1)
    dims = min(dims, len(shape))
    places = _number_written(index, shape[:dims])
    if tuple(data.batch_size[: places.ndim]) != tuple(places.shape):
        raise InvalidArgumentError(
            f"index {cursor!r:.200} selects {tuple(places.shape)} elements, got a batch of {tuple(data.batch_size)}; "
            "nothing was stored. Pass as many elements as the index selects"
        )
    if keeps_slices:
        # Slices stay slices, so that a view of the same elements, such as buffer[:], can be written back to its place.
        return Target(cursor, data, np.arange(*parts[0].indices(shape[0]), dtype=np.int64), dims, dims)
    flat = places.reshape(-1).numpy()
    data = data.unsqueeze(0) if places.ndim == 0 else data.flatten(0, places.ndim - 1) if places.ndim > 1 else data
    distinct, newest = np.unique(flat[::-1], return_index=True)
    if len(distinct) < len(flat):
        kept = np.sort(len(flat) - 1 - newest)
        flat, data = flat[kept], data[torch.from_numpy(kept)]
    if dims == 1:
        return Target(torch.from_numpy(flat), data, flat, ndim, ndim)
    at = np.unravel_index(flat, shape[:dims])
    indices = tuple(torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in at)
    return Target(indices, data, indices[0].numpy(), 1, dims)


def _number_written(index: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return the flat numbers of places to write; raise an error of this package if there are none."""
    try:
        return number_places(index, shape)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"index {index!r:.200} names no places of a storage of shape {tuple(shape)} ({error}); nothing was stored"
        ) from error


def check_leaves(
    where: Target,
    stored_rows: Any,
    columns: list[FrameColumn],
    *,
    may_cast: bool,
    fixed_keys: str,
    may_lack_keys: bool,
) -> bool:
    """Compare elements with the stored ones; return whether the stored tensors can contain them.

    :param where: The elements and their places.
    :param stored_rows: All stored elements without images.
    :param columns: Columns of the images.
    :param may_cast: Whether leaves other than images may have another dtype.
    :param fixed_keys: Why elements cannot have new keys, and what to do; empty if they can.
    :param may_lack_keys: Whether elements may lack stored keys, because the stored values are to be kept.
    :raises InvalidArgumentError: If a shape differs, or if a key is new or missing and must not be.
    :raises InvalidTypeError: If a dtype or a kind of leaf differs.
    """
    images = {key: column for column in columns for key in column.keys}
    items, is_known = dict(list_items(where.data)), True
    for key, leaf in items.items():
        column, stored = images.get(key), stored_rows.get(key, None)
        shape, kind = _describe_leaf(leaf, where.batch_dims)
        is_known &= kind != "value"
        if column is None and stored is None:
            is_known = False
            if fixed_keys and kind != "tensordict" and not _is_optional(key):
                raise InvalidArgumentError(f"{key!r} was not among the first elements, {fixed_keys}")
            continue
        expected_shape, expected_kind = _describe_leaf(stored, where.stored_dims) if column is None else (None, "")
        if column is not None:
            expected_shape, expected_kind = (*column.batch, *column.shape)[where.stored_dims :], str(column.dtype)
        may_differ = may_cast and column is None and kind.startswith("torch.") and expected_kind.startswith("torch.")
        if shape != expected_shape or (kind != expected_kind and not may_differ):
            is_castable = shape is not None and shape == expected_shape
            raise (InvalidTypeError if kind != expected_kind else InvalidArgumentError)(
                f"{key!r} is {_name(shape, kind)}, expected {_name(expected_shape, expected_kind)} as in the first "
                "elements; nothing was stored. Use "
                + (f"data[{key!r}] = data[{key!r}].to({expected_kind})" if is_castable else "one form for all elements")
            )
    if not may_lack_keys:  # otherwise, places would keep the value of an overwritten element
        for key in {**images, **dict(list_items(stored_rows))}.keys() - items.keys():
            if _is_optional(key):
                continue
            raise InvalidArgumentError(
                f"{key!r} is missing, expected all keys of the stored elements; nothing was stored. Add it to the "
                "data, or change some keys of stored elements with storage[index] = data"
            )
    return is_known


def _is_optional(key: Any) -> bool:
    """Return whether only some elements may have a key.

    ``TensorDictReplayBuffer`` adds ``"index"``, ``ReplayBuffer`` does not. Collectors leave ``"_reset"`` in some.
    """
    return key == "index" or "_reset" in (key, key[-1])


def _describe_leaf(value: Any, batch_dims: int) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape of a leaf after the batch, and its dtype. Anything else has no shape, and is named."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape[batch_dims:]), str(value.dtype)
    # The text of several elements is returned as a list.
    return None, "tensordict" if isinstance(value, TensorDictBase) and not is_non_tensor(value) else "value"


def _name(shape: tuple[int, ...] | None, kind: str) -> str:
    """Return a result of :func:`_describe_leaf` as text."""
    return f"a {kind}" if shape is None else f"a tensor of shape {shape} and dtype {kind}"


def snapshot_rows(rows: Any, cursor: Any) -> Callable[[], None]:
    """Copy the rows at an index, and return a function that restores them."""
    keys = set(rows.keys(include_nested=True))
    before = rows[cursor].clone()

    def undo() -> None:
        for key in set(rows.keys(include_nested=True)) - keys:
            rows.del_(key) if isinstance(key, str) else rows.get(key[:-1]).del_(key[-1])
        rows[cursor] = before

    return undo
