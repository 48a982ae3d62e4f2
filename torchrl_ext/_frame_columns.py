"""The columns of a storage that hold images: which those are, and handles of frames in place of pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.utils import unravel_key

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.adaptive_pool import AdaptivePool
from rl_ext_core.frames.recycle import RecycledArrays

_SMALL = 1024  # bytes: below, a leaf is no image worth the trouble

Key = Any  # a string, or a tuple of strings
NewPool = Callable[[tuple[int, ...], np.dtype[Any], int], AdaptivePool]


class FrameColumn:
    """One image leaf, and the leaf of the same name under ``"next"``, which shares its frames.

    :param keys: one leaf, or two, that under ``"next"`` last.
    :param shape: shape of one image.
    :param dtype: its dtype.
    :param pool: holds the frames.
    :param num_threads: threads that decode large batches, or None for as many as ``torch.get_num_threads()``.
    """

    def __init__(
        self,
        keys: list[Key],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pool: AdaptivePool,
        num_threads: int | None,
    ) -> None:
        self.keys, self.shape, self.dtype, self.pool = keys, tuple(shape), dtype, pool
        self._num_threads = num_threads
        self._recycled = RecycledArrays()

    @property
    def _numpy_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype)

    def encode(
        self, keys: list[Key], leaves: list[torch.Tensor], ended: npt.NDArray[np.bool_] | None
    ) -> list[torch.Tensor]:
        """Stores images; returns their handles in the same order, each to be released once.

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
        images = leaf.detach().cpu().reshape(-1, *self.shape).contiguous()
        array: npt.NDArray[Any] = images.numpy()
        return array

    def decode(self, handles: list[torch.Tensor]) -> list[torch.Tensor]:
        """The images of one or two tensors of handles of the same shape."""
        flat = [part.reshape(-1).numpy() for part in handles]
        outs = [self._recycled.take((len(part), *self.shape), self._numpy_dtype) for part in flat]
        num_threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        if len(flat) == 1:
            self.pool.get(flat[0], outs[0], num_threads=num_threads)
        else:
            self.pool.get(flat[0], outs[0], flat[1], outs[1], num_threads=num_threads)
        return [
            torch.from_numpy(out).reshape(*part.shape, *self.shape) for out, part in zip(outs, handles, strict=True)
        ]

    def look_again(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """Other handles for all that is held, where the pool has chosen another way to store it.

        :param held: the handles of each key.
        """
        flat = [part.reshape(-1).numpy() for part in held]
        anew = self.pool.look_again(flat[0], flat[1] if len(flat) == 2 else None)
        return [] if anew is None else [torch.from_numpy(part).reshape(held[0].shape) for part in anew[: len(held)]]

    def release(self, handles: torch.Tensor) -> None:
        """Gives images up."""
        self.pool.release(handles.reshape(-1).numpy())

    @property
    def nbytes(self) -> int:
        """Bytes held, the arrays that batches are decoded into included."""
        return self.pool.nbytes + self._recycled.nbytes

    def kind(self, n_images: int) -> dict[str, Any]:
        """What :meth:`like` needs.

        :param n_images: of the column in an element.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        return {"keys": self.keys, "shape": list(self.shape), "dtype": dtype, "n_images": n_images}

    @classmethod
    def like(cls, kind: dict[str, Any], new_pool: NewPool, *, num_threads: int | None) -> FrameColumn:
        """A column of that kind."""
        keys = [key if isinstance(key, str) else tuple(key) for key in kind["keys"]]
        shape, dtype = tuple(kind["shape"]), getattr(torch, kind["dtype"])
        pool = new_pool(shape, numpy_dtype(dtype), kind["n_images"])
        return cls(keys, shape, dtype, pool=pool, num_threads=num_threads)

    def state(self, n_images: int) -> dict[str, Any]:
        """What a file needs; see :meth:`kind`."""
        return {**self.kind(n_images), "pool": self.pool.state()}

    @classmethod
    def restored(cls, state: dict[str, Any], new_pool: NewPool, *, num_threads: int | None) -> FrameColumn:
        """The column that :meth:`state` described.

        :raises CorruptFileError: if it is damaged.
        """
        column = cls.like(state, new_pool, num_threads=num_threads)
        column.pool.restore(state["pool"])
        return column

    def recover(self, held: list[torch.Tensor], length: int, touched: int, path: Path | None) -> None:
        """Makes a pool that another process left behind whole.

        :param held: the handles of each key; those from ``length`` on are forgotten.
        :param touched: there are none from here on.
        :param path: where the pool lies, or None for memory.
        :raises CorruptFileError: if one leads nowhere.
        """
        for handles in held:
            handles[length:touched] = 0
        flat = np.concatenate([handles[:length].reshape(-1).numpy() for handles in held])
        intact = self.pool.recover(flat)
        if lost := int(np.count_nonzero(flat[~intact])):
            raise CorruptFileError(
                f"{lost} of {len(flat)} images of {self.keys} in {path or 'shared memory'} lead nowhere: it was cut "
                "short or written to; to keep what is intact, salvage it"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recycled": RecycledArrays()}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's name for a dtype.

    :raises InvalidTypeError: if NumPy has none.
    """
    try:
        return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    except TypeError:
        raise InvalidTypeError(
            f"images of dtype {dtype} cannot be compressed, since NumPy does not know it; convert them, for example "
            "to torch.float16, or leave their key out of pixels="
        ) from None


def _images(row: Any, pixels: Sequence[Key] | None) -> dict[Key, torch.Size]:
    """The leaves of a row to compress, and the shape of one image of each.

    :param row: a TensorDict of the shape that one element of the storage has.
    :param pixels: keys, or None for all images of bytes.
    :raises InvalidArgumentError: if a key is not there or holds no images.
    """
    shapes = {
        key: leaf.shape[_holder(row, key).batch_dims :]
        for key, leaf in row.items(include_nested=True, leaves_only=True)
        if isinstance(leaf, torch.Tensor)
    }
    if pixels is None:
        return {
            key: shape
            for key, shape in shapes.items()
            if row.get(key).dtype == torch.uint8 and len(shape) >= 2 and shape.numel() >= _SMALL
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


def columns_for(
    row: Any, pixels: Sequence[Key] | None, new_pool: NewPool, *, num_threads: int | None
) -> list[FrameColumn]:
    """The image columns of a storage whose elements are like ``row``.

    :param new_pool: makes a pool for images of that shape and dtype, so many an element.
    """
    found = _images(row, pixels)
    columns = []
    for key, shape in found.items():
        root, following = key, unravel_key(("next", key))
        if isinstance(key, tuple) and key[0] == "next":
            root, following = unravel_key(key[1:]), key
        leaf = row.get(key)
        pair = [k for k in (root, following) if found.get(k) == shape and _alike(row.get(k), leaf)]
        if key == pair[0]:
            n_images = len(pair) * _holder(row, key).batch_size.numel()
            pool = new_pool(tuple(shape), numpy_dtype(leaf.dtype), n_images)
            columns.append(FrameColumn(pair, tuple(shape), leaf.dtype, pool=pool, num_threads=num_threads))
    return columns


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype
