"""Images that are decoded when they are used: what slices of a storage hold in place of pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
# How often a function's first arguments name dimensions; these stay handles as long as the dimensions are the batch's.
_ONE_DIMENSION = {_aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default}
_TWO_DIMENSIONS = {_aten.transpose.int}
_NO_DIMENSION = {_aten.detach.default, _aten.alias.default}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}


class FrameView(torch.Tensor):
    """A tensor of images that reads and writes those of a storage, as a view of its memory would.

    Slicing it gives another one, and assigning to an index of it stores images. Whatever else is done with it is done
    with the images, decoded at that moment, which are a copy.

    :param handles: handles of the images, a view of the storage's.
    :param shape: shape of an image.
    :param dtype: its dtype.
    :param read: images for handles.
    :param write: stores images in place of those that an index of the handles names.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _handles: torch.Tensor
    _image_shape: tuple[int, ...]
    _read: Callable[[torch.Tensor], torch.Tensor]
    _write: Callable[[torch.Tensor, Any, torch.Tensor], None]

    @staticmethod
    def __new__(
        cls,
        handles: torch.Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[torch.Tensor], torch.Tensor],
        write: Callable[[torch.Tensor, Any, torch.Tensor], None],
    ) -> FrameView:
        view: FrameView = torch.Tensor._make_wrapper_subclass(cls, (*handles.shape, *shape), dtype=dtype)
        view._handles, view._image_shape, view._read, view._write = handles, tuple(shape), read, write
        return view

    def _with(self, handles: torch.Tensor) -> FrameView:
        return FrameView(handles, self._image_shape, self.dtype, self._read, self._write)

    def decoded(self) -> torch.Tensor:
        """The images, as a tensor of their own."""
        return self._read(self._handles)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        self = args[0]
        if isinstance(self, FrameView):
            if (handles := _rearranged(self, func, args, kwargs)) is not None:
                return self._with(handles)
            if func is _aten.index.Tensor and len(args[1]) <= self._handles.ndim:
                return self._read(func(self._handles, args[1]))
        if isinstance(self, FrameView) and func._schema.is_mutable:
            changed = self.decoded().clone()
            func(changed, *tree_map(_decoded, args[1:]), **tree_map(_decoded, kwargs))
            self._write(self._handles, ..., changed)
            return self
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        value = _decoded(value)
        if len(parts) > self._handles.ndim or any(part is None or part is ... for part in parts):
            changed = self.decoded().clone()
            changed[index] = value
            self._write(self._handles, ..., changed)
            return
        images = torch.as_tensor(value).to(self.dtype)
        self._write(self._handles, parts, images.expand(*self._handles[parts].shape, *self._image_shape))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FrameView(shape={tuple(self.shape)}, dtype={self.dtype})"

    def is_shared(self) -> bool:
        """Whether processes share the handles of the images."""
        return bool(self._handles.is_shared())  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """The images as an array."""
        return self.decoded().numpy(force=force)

    def tolist(self) -> Any:
        """The images as nested lists."""
        return self.decoded().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.decoded().clone()


def _decoded(value: Any) -> Any:
    return value.decoded() if isinstance(value, FrameView) else value


def _rearranged(view: FrameView, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The handles that are left, where the function only picks or reorders whole images."""
    batch_dims, handles = view._handles.ndim, view._handles
    if func in _NO_DIMENSION:
        return handles
    if func in _RESHAPES:
        shape = tuple(args[1])
        n_image = len(view._image_shape)
        if shape[len(shape) - n_image :] != view._image_shape or not handles.is_contiguous():
            return None  # a copy of handles would name what may be freed
        return handles.view(shape[: len(shape) - n_image])
    n_dims = 1 if func in _ONE_DIMENSION else 2 if func in _TWO_DIMENSIONS else 0
    if n_dims == 0:
        return None
    dims = [args[i + 1] if len(args) > i + 1 else kwargs.get("dim", 0) for i in range(n_dims)]
    extra = 1 if func is _aten.unsqueeze.default else 0
    dims = [dim + view.ndim + extra if dim < 0 else dim for dim in dims]
    if max(dims) >= batch_dims + extra:
        return None
    rest = {name: value for name, value in kwargs.items() if name != "dim"}
    result: torch.Tensor = func(handles, *dims, *args[n_dims + 1 :], **rest)
    return result
