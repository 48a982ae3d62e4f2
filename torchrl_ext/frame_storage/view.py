"""Lazy views of stored images, which slices of a storage contain in place of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext.frame_storage.columns import FrameColumn

_aten = torch.ops.aten
# Number of leading arguments that are dimensions. If all are batch dimensions, the function works on handles.
_N_DIM_ARGUMENTS = {
    _aten.slice.Tensor: 1,
    _aten.select.int: 1,
    _aten.unsqueeze.default: 1,
    _aten.transpose.int: 2,
}
_UNCHANGED = {_aten.detach.default, _aten.alias.default}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}


class FrameView(torch.Tensor):
    """Tensor that reads and writes the images of a storage, like a view of its memory.

    Slicing it along the batch returns another view. Assigning to an index and changing it in place store images. All
    other operations decode the images and return copies. If an image changes in part, all of it is encoded again, so a
    lossy codec adds to the error of the rest.

    :param handles: handles of the images, a view of those in the storage
    :param column: column of the images
    :param storage: the storage
    :param empty_count: how often the storage had been emptied when the handles were read; default: its present count
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _handles: torch.Tensor
    _column: FrameColumn
    _storage: Any
    _expected_empty_count: int

    @staticmethod
    def __new__(
        cls, handles: torch.Tensor, column: FrameColumn, storage: Any, empty_count: int | None = None
    ) -> FrameView:
        """Create a tensor that has a shape and a dtype, but no memory."""
        shape = (*handles.shape, *column.shape)
        view: FrameView = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=column.dtype)
        view._handles, view._column, view._storage = handles, column, storage
        view._expected_empty_count = storage._empty_count if empty_count is None else empty_count
        return view

    def decode(self) -> torch.Tensor:
        """Return the decoded images as a plain tensor."""
        return self._read(self._handles)

    def _read(self, handles: torch.Tensor) -> torch.Tensor:
        """Decode the images of these handles; raise an error if the storage was emptied."""
        self._check_not_emptied()
        images: torch.Tensor = self._storage._read_images(self._column, handles)
        return images

    def _check_not_emptied(self) -> None:
        """Raise an error if the storage was emptied after this view was created."""
        if self._expected_empty_count != self._storage._empty_count:
            raise InvalidArgumentError(
                "these images no longer exist, because the storage was emptied. To keep them, use "
                "batch = buffer[:].clone() before buffer.empty()"
            )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _call_mutating(func, args, kwargs)
        self = args[0]
        if isinstance(self, FrameView):
            if (handles := self._rearrange_handles(func, args, kwargs)) is not None:
                return FrameView(handles, self._column, self._storage, self._expected_empty_count)
            if func is _aten.index.Tensor and _n_axes(args[1]) <= self._handles.ndim:
                return self._read(func(self._handles, args[1]))
        return func(*tree_map(_decode_view, args), **tree_map(_decode_view, kwargs))

    def _rearrange_handles(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Apply a function to the handles; return None if it does not move whole images."""
        handles, n_image = self._handles, len(self._column.shape)
        if func in _UNCHANGED:
            return handles
        if func in _RESHAPES:
            shape = tuple(args[1])
            batch = len(shape) - n_image
            # Only views: the images of copied handles could be freed.
            return (
                handles.view(shape[:batch]) if shape[batch:] == self._column.shape and handles.is_contiguous() else None
            )
        if (n_dims := _N_DIM_ARGUMENTS.get(func, 0)) == 0:
            return None
        dims = [args[i + 1] if len(args) > i + 1 else kwargs.get("dim", 0) for i in range(n_dims)]
        extra = 1 if func is _aten.unsqueeze.default else 0
        dims = [dim + self.ndim + extra if dim < 0 else dim for dim in dims]
        if max(dims) >= handles.ndim + extra:
            return None
        rest = {name: value for name, value in kwargs.items() if name != "dim"}
        result: torch.Tensor = func(handles, *dims, *args[n_dims + 1 :], **rest)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        value = _decode_view(value)
        if _n_axes(parts) > self._handles.ndim or any(part is None or part is ... for part in parts):
            before = self.decode()
            images = before.clone()
            images[index] = value
            return self._store(images, before)
        images = torch.as_tensor(value).to(self.dtype)
        self._write(parts, images.expand(*self._handles[parts].shape, *self._column.shape))

    def _store(self, images: torch.Tensor, before: torch.Tensor) -> None:
        """Write only those images that differ from ``before``."""
        # Unchanged images are not encoded again, because a lossy codec would add to their error. Bits are compared,
        # because 0.0 equals -0.0, and NaN does not equal itself.
        changed = images.contiguous().view(torch.uint8) != before.contiguous().view(torch.uint8)
        changed = changed.flatten(self._handles.ndim).any(-1)
        self._write(changed, images[changed])

    def _write(self, index: Any, images: torch.Tensor) -> None:
        """Write images to the selected places of the storage."""
        self._check_not_emptied()
        self._storage._write_images(self._column, self._handles, index, images)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FrameView(shape={tuple(self.shape)}, dtype={self.dtype})"

    def is_shared(self) -> bool:
        """Return whether processes share the handles of the images."""
        return bool(self._handles.is_shared())  # type: ignore[no-untyped-call]

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


def _call_mutating(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that works in place, and store the images that it changed."""
    written: list[tuple[FrameView, torch.Tensor, torch.Tensor]] = []

    def decode_argument(value: Any, argument: Any) -> Any:
        """Decode the views in an argument, and record those that the function will change."""
        if isinstance(value, (list, tuple)):
            return [decode_argument(each, argument) for each in value]
        if not isinstance(value, FrameView):
            return value
        before = value.decode()
        if argument.alias_info is None or not argument.alias_info.is_write:
            return before
        written.append((value, before.clone(), before))
        return written[-1][1]

    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    result = func(
        *[decode_argument(value, argument) for value, argument in zip(args, arguments, strict=False)],
        **{name: decode_argument(value, named[name]) for name, value in kwargs.items()},
    )
    for view, images, before in written:
        view._store(images, before)
    return next((view for view, images, _ in written if images is result), result)


def _decode_view(value: Any) -> Any:
    """Decode a FrameView; return other values unchanged."""
    return value.decode() if isinstance(value, FrameView) else value
