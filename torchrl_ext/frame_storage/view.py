"""Lazy views of stored images, which elements and slices of a storage contain in place of pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext.frame_storage.columns import FrameColumn, Key

_aten = torch.ops.aten


class FrameView(torch.Tensor):
    """Tensor that decodes the images of a storage when they are used.

    Slicing it along the batch returns another view. All other operations return copies. It cannot be changed in place.

    :param numbers: Numbers of the images.
    :param column: Column of the images.
    :param key: Key of the images.
    :param storage: The storage.
    :param empty_count: How often the storage had been emptied when the view was made. Default: its present count.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _numbers: torch.Tensor
    _column: FrameColumn
    _key: Key
    _storage: Any
    _expected_empty_count: int

    @staticmethod
    def __new__(
        cls, numbers: torch.Tensor, column: FrameColumn, key: Key, storage: Any, empty_count: int | None = None
    ) -> FrameView:
        """Create a tensor that has a shape and a dtype, but no memory."""
        shape = (*numbers.shape, *column.shape)
        view: FrameView = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=column.dtype)
        view._numbers, view._column, view._key, view._storage = numbers, column, key, storage
        view._expected_empty_count = storage._empty_count if empty_count is None else empty_count
        return view

    def decode(self) -> torch.Tensor:
        """Return the decoded images as a plain tensor."""
        return self._read(self._numbers)

    def _read(self, numbers: torch.Tensor) -> torch.Tensor:
        """Decode the images of these numbers; raise an error if the storage was emptied."""
        if self._expected_empty_count != self._storage._empty_count:
            raise InvalidArgumentError(
                "these images no longer exist, because the storage was emptied. To keep them, use "
                "batch = buffer[:].clone() before buffer.empty()"
            )
        images: torch.Tensor = self._storage._read_images(self._column, self._key, numbers)
        return images

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(_find_written(func, args, kwargs)):
            raise _read_only_error()
        self = args[0]
        if isinstance(self, FrameView):
            if (numbers := self._rearrange(func, args[1:], kwargs)) is not None:
                return FrameView(numbers, self._column, self._key, self._storage, self._expected_empty_count)
            if func is _aten.index.Tensor and _n_axes(args[1]) <= self._numbers.ndim:
                return self._read(func(self._numbers, args[1]))
        return func(*tree_map(_decode_view, args), **tree_map(_decode_view, kwargs))

    def _rearrange(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Apply a function to the numbers if it returns a view that consists of whole images; else, return None."""
        if func._schema.is_mutable or all(result.alias_info is None for result in func._schema.returns):
            return None
        before, n = torch.empty(self.shape, dtype=self.dtype, device="meta"), len(self._column.shape)
        after = func(before, *args, **kwargs)
        if not isinstance(after, torch.Tensor) or after.dtype != before.dtype:
            return None
        if (after.shape[-n:], after.stride()[-n:]) != (before.shape[-n:], before.stride()[-n:]):
            return None
        numbers, size = self._numbers.contiguous(), math.prod(self._column.shape)
        steps = [*after.stride()[:-n], after.storage_offset()]
        if any(step % size for step in steps):  # images that begin within others
            return None
        *strides, offset = (step // size for step in steps)
        return numbers.as_strided(after.shape[:-n], strides, numbers.storage_offset() + offset)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _read_only_error()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FrameView(shape={tuple(self.shape)}, dtype={self.dtype})"

    def is_shared(self) -> bool:
        """Return whether processes share the numbers of the images."""
        return bool(self._numbers.is_shared())  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the decoded images as an array."""
        return self.decode().numpy(force=force)

    def tolist(self) -> Any:
        """Return the decoded images as nested lists."""
        return self.decode().tolist()

    @property
    def _images(self) -> torch.Tensor:
        """Decoded images, the attribute whose bytes TensorDict counts."""
        return self.decode()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the attribute whose bytes TensorDict counts."""
        return ["_images"], None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.decode().clone()


def _n_axes(parts: Any) -> int:
    """Count the axes that an index covers. A mask covers as many as it has."""
    masks = (torch.bool, torch.uint8, np.dtype(bool))
    return sum(part.ndim if getattr(part, "dtype", None) in masks else 1 for part in parts)


def _find_written(func: Any, args: Any, kwargs: Any) -> Iterator[bool]:
    """Yield for each argument that the function changes in place whether it contains images of a storage."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield any(isinstance(part, FrameView) for part in (value if isinstance(value, (list, tuple)) else [value]))


def _read_only_error() -> InvalidArgumentError:
    return InvalidArgumentError(
        "images of an element or a slice of the buffer cannot be changed in place, because they are stored compressed. "
        "Change a copy, and store it: data = buffer[i].clone(), then buffer[i] = data"
    )


def _decode_view(value: Any) -> Any:
    """Decode a FrameView; return other values unchanged."""
    return value.decode() if isinstance(value, FrameView) else value
