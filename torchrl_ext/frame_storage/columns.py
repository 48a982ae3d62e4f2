"""The columns of a storage that hold images: which those are, and handles of frames in place of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.utils import unravel_key

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.adaptive import AdaptivePool
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.frames.region import RegionFile
from torchrl_ext.frame_storage.format import dtype_name, dtype_named

_SMALL = 1024  # bytes: below, a leaf is no image worth the trouble

Key = Any  # a string, or a tuple of strings


class FrameColumn:
    """One image leaf, and the leaf of the same name under ``"next"``, which shares its frames.

    :param kind: what :func:`image_kinds` says of it; more entries do no harm.
    :param n_rows: room along the first dimension.
    :param options: of the pool.
    :param num_threads: threads that decode large batches, or None for as many as ``torch.get_num_threads()``.
    :param file: where the frames lie, or None for memory.
    """

    def __init__(
        self,
        kind: dict[str, Any],
        n_rows: int,
        options: dict[str, Any],
        *,
        num_threads: int | None,
        file: RegionFile | None = None,
    ) -> None:
        self.kind = {name: kind[name] for name in ("keys", "shape", "dtype", "n_images")}
        self.keys: list[Key] = [key if isinstance(key, str) else tuple(key) for key in kind["keys"]]
        self.shape, self.dtype = tuple(kind["shape"]), dtype_named(kind["dtype"])
        self._numpy_dtype, self._num_threads = _numpy_dtype(self.dtype), num_threads
        self._recycled = RecycledArrays()
        # A batch is stored before what it replaces is freed, hence twice as many.
        n_handles = 2 * n_rows * kind["n_images"]
        self.pool = AdaptivePool(n_handles, self.shape, self._numpy_dtype, **options, file=file)

    def encode(
        self, keys: list[Key], leaves: list[torch.Tensor], ended: npt.NDArray[np.bool_] | None
    ) -> list[torch.Tensor]:
        """Store images; return their handles in the same order, each to be released once.

        :param keys: one or two of the column's.
        :param leaves: their images, of shape ``(*batch, *shape)``.
        :param ended: where a trajectory is over, an element each.
        """
        batch = leaves[0].shape[: leaves[0].ndim - len(self.shape)]
        if ended is not None:
            ended = np.repeat(ended, batch.numel() // max(len(ended), 1))
        arrays = [self._array(leaf, key) for key, leaf in zip(keys, leaves, strict=True)]
        handles = self.pool.put(*arrays, ended=ended)
        return [torch.from_numpy(part).reshape(batch) for part in handles[: len(leaves)]]

    def _array(self, leaf: torch.Tensor, key: Key) -> npt.NDArray[Any]:
        if leaf.dtype != self.dtype:
            raise InvalidTypeError(
                f"{key!r} has dtype {leaf.dtype}, the storage holds {self.dtype}; nothing was stored. If that is "
                f"meant, convert it: data[{key!r}] = data[{key!r}].to({self.dtype})"
            )
        images: npt.NDArray[Any] = leaf.detach().cpu().reshape(-1, *self.shape).contiguous().numpy()
        return images

    def decode(self, handles: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the images of one or two tensors of handles of the same shape."""
        flat = [part.reshape(-1).numpy() for part in handles]
        outs = [self._recycled.take((len(part), *self.shape), self._numpy_dtype) for part in flat]
        num_threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        following = (flat[1], outs[1]) if len(flat) == 2 else (None, None)
        self.pool.get(flat[0], outs[0], *following, num_threads=num_threads)
        return [
            torch.from_numpy(out).reshape(*part.shape, *self.shape) for out, part in zip(outs, handles, strict=True)
        ]

    def look_again(self, rows: Any, length: int) -> None:
        """Put other handles into all elements that are held, where the pool has chosen another way to store them."""
        held = [rows.get(key)[:length] for key in self.keys]
        flat = [part.reshape(-1).numpy() for part in held]
        anew = self.pool.look_again(flat[0], flat[1] if len(flat) == 2 else None)
        for leaf, handles in zip(held, anew or (), strict=False):
            leaf.copy_(torch.from_numpy(handles).reshape(leaf.shape))

    def handles(self, rows: Any, length: int) -> npt.NDArray[np.int64]:
        """Return all handles in the first elements, key after key."""
        return np.concatenate([rows.get(key)[:length].reshape(-1).numpy() for key in self.keys])

    def clear(self, rows: Any, start: int, end: int) -> None:
        """Put no images into some elements; what they had is not released."""
        for key in self.keys:
            rows.get(key)[start:end] = 0

    def recover(self, rows: Any, length: int, where: Path | None) -> None:
        """Make a pool whole that another process left behind, or a file held.

        :param length: how many elements count.
        :param where: where the pool lies, or None for memory.
        :raises CorruptFileError: if an image is not there.
        """
        handles = self.handles(rows, length)
        if lost := int(np.count_nonzero(handles[~self.pool.recover(handles)])):
            raise CorruptFileError(
                f"{lost} of {len(handles)} images of {self.keys} in {where or 'shared memory'} lead nowhere: it was "
                "cut short or written to; to keep what is intact, salvage it"
            )

    @property
    def nbytes(self) -> int:
        """Bytes held, the arrays that batches are decoded into included."""
        return self.pool.nbytes + self._recycled.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recycled": RecycledArrays()}


def encoded(columns: list[FrameColumn], data: Any) -> tuple[Any, dict[Key, torch.Tensor]]:
    """Return elements with handles in place of images, and these handles by key, each to be released once."""
    ended = data.get(("next", "done"), None)
    if ended is not None:
        ended = ended.reshape(data.batch_size.numel(), -1).any(-1).cpu().numpy()
    new: dict[Key, torch.Tensor] = {}
    try:
        for column in columns:
            keys = [key for key in column.keys if data.get(key, None) is not None]
            if keys:
                handles = column.encode(keys, [data.get(key) for key in keys], ended)
                new.update(zip(keys, handles, strict=True))
    except BaseException:
        release(columns, new)
        raise
    small = data.copy()
    for key, leaf in new.items():
        small.set(key, leaf)
    return small.to("cpu"), new


def release(columns: list[FrameColumn], handles: dict[Key, torch.Tensor]) -> None:
    """Give images up, by key."""
    for column in columns:
        for key in column.keys:
            if key in handles:
                column.pool.release(handles[key].reshape(-1).numpy())


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    except TypeError:
        raise InvalidTypeError(
            f"images of dtype {dtype} cannot be compressed, since NumPy does not know it; convert them, for example "
            "to torch.float16, or leave their key out of pixels="
        ) from None


def image_kinds(row: Any, pixels: Sequence[Key] | None) -> list[dict[str, Any]]:
    """Return what the image columns of a storage are like, in values that JSON knows.

    :param row: a TensorDict of the shape that one element of the storage has.
    :param pixels: keys, or None for all images of bytes.
    :return: for each its one or two keys, that under ``"next"`` last, shape and dtype of an image, and how many images
        an element has.
    :raises InvalidArgumentError: if a key is not there or holds no images.
    """
    found = _images(row, pixels)
    kinds = []
    for key, shape in found.items():
        root, following = key, unravel_key(("next", key))
        if isinstance(key, tuple) and key[0] == "next":
            root, following = unravel_key(key[1:]), key
        leaf = row.get(key)
        pair = [k for k in (root, following) if found.get(k) == shape and _alike(row.get(k), leaf)]
        if key == pair[0]:
            n_images = len(pair) * _holder(row, key).batch_size.numel()
            kinds.append({"keys": pair, "shape": list(shape), "dtype": dtype_name(leaf.dtype), "n_images": n_images})
    return kinds


def _images(row: Any, pixels: Sequence[Key] | None) -> dict[Key, torch.Size]:
    """The leaves of a row to compress, and the shape of one image of each."""
    leaves = {
        key: leaf for key, leaf in row.items(include_nested=True, leaves_only=True) if isinstance(leaf, torch.Tensor)
    }
    shapes = {key: leaf.shape[_holder(row, key).batch_dims :] for key, leaf in leaves.items()}
    if pixels is None:
        return {
            key: shape
            for key, shape in shapes.items()
            if leaves[key].dtype == torch.uint8 and len(shape) >= 2 and shape.numel() >= _SMALL
        }
    keys = [unravel_key(key) for key in pixels]
    for key in keys:
        if not shapes.get(key):
            raise InvalidArgumentError(
                f"pixels={list(pixels)!r}: {key!r} is no tensor of the data with at least one dimension behind the "
                f"batch; the data has {sorted(shapes, key=str)}"
            )
    return {key: shapes[key] for key in keys}


def _holder(row: Any, key: Key) -> Any:
    """The TensorDict that a leaf lies in, which may have more batch dimensions, such as agents."""
    return row.get(key[:-1]) if isinstance(key, tuple) and len(key) > 1 else row


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype
