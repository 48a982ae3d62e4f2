"""Image columns of a storage: detection of images, and handles in place of pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.utils import unravel_key

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.codecs import check_numba
from rl_ext_core.frames.encoding import COPY_BATCH, LAST_CHECK, LOSSY_AFTER, Encoding, EncodingOptions, detect_layout
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.frames.region import RegionFile
from torchrl_ext.frame_storage.format import dtype_from_name, dtype_name

if TYPE_CHECKING:
    from rl_ext_core.frames.gpu_decode import GpuDecoder
    from rl_ext_core.frames.pool import FramePool, Handles

_MIN_IMAGE_NBYTES = 1024  # smaller leaves are not worth compressing
_FLOATS = (torch.float16, torch.float32, torch.float64)
_MIN_SIDE = 8  # height and width of images of floats
_UNCHANGED = 0.5  # fraction of values that stay the same from one image to the next

Key = Any  # a string, or a tuple of strings


class FrameColumn:
    """Compressed images of a leaf, and of its counterpart under ``"next"``.

    Both share their frames. The frame stack is detected from the first batch, and again when 2, 4, 8, ... 4096 images
    are stored. If other processes share the column, or it is in a file, the first result is final.

    :param kind: description of the column by :func:`describe_image_columns`; other entries are ignored
    :param n_rows: size of the storage along the first dimension
    :param options: options of :class:`EncodingOptions`
    :param num_threads: threads that decode large batches; None: ``torch.get_num_threads()``
    :param file: file of the frames; None: memory
    :ivar pool: the frames
    :ivar shared: whether other processes share the column
    """

    shared = False

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
        self.shape, self.dtype = tuple(kind["shape"]), dtype_from_name(kind["dtype"])
        self._numpy_dtype, self._num_threads = _numpy_dtype(self.dtype), num_threads
        self._recycled = RecycledArrays()
        # A batch is stored before the elements that it replaces are freed, hence twice as many.
        self._n_handles = 2 * n_rows * kind["n_images"]
        self._options = EncodingOptions.check(self.shape, self._numpy_dtype, **options)
        self._next_check, self._in_file = 2, file is not None
        self.pool = self._new_pool(self._options.encoding(), file)

    @staticmethod
    def _pool_class() -> type[FramePool]:
        """Import and return ``FramePool``; raise an error if numba is missing."""
        check_numba("A store of frames")
        from rl_ext_core.frames.pool import FramePool  # imports numba

        return FramePool

    def _new_pool(self, encoding: Encoding, file: RegionFile | None = None) -> FramePool:
        """Create an empty pool with an encoding."""
        return self._pool_class()(self._n_handles, file=file, **encoding._asdict())

    def encode(
        self, keys: list[Key], leaves: list[torch.Tensor], ended: npt.NDArray[np.bool_] | None
    ) -> list[torch.Tensor]:
        """Store images; return their handles in the same order.

        Each handle has to be released once.

        :param keys: one or both keys of the column
        :param leaves: (*batch, *shape) images of each key
        :param ended: (n,) whether the trajectory ends, per element; None: unknown
        """
        batch = leaves[0].shape[: leaves[0].ndim - len(self.shape)]
        if ended is not None:
            ended = np.repeat(ended, batch.numel() // max(len(ended), 1))
        arrays = [self._as_numpy(leaf, key) for key, leaf in zip(keys, leaves, strict=True)]
        handles = self._put_frames(*arrays, ended=ended)
        return [torch.from_numpy(part).reshape(batch) for part in handles[: len(leaves)]]

    def _put_frames(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None = None,
        *,
        ended: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Handles, Handles]:
        """Store stacks, and return their handles; the first ones determine the encoding."""
        self.pool.refresh()
        if self.pool.held == 0 and self._options.n_stack is None:
            exact = len(stacks) < LOSSY_AFTER and not (self.shared or self._in_file)
            encoding = self._options.encoding(detect_layout(self.pool.layout, stacks, nexts), exact=exact)
            if encoding != self.pool.encoding:
                self.pool.reconfigure(**encoding._asdict())
            self._next_check = 2
        return self.pool.put(stacks, nexts, ended=ended)

    def _as_numpy(self, leaf: torch.Tensor, key: Key) -> npt.NDArray[Any]:
        """Return the images of a leaf as an array; refuse a dtype other than the column's."""
        if leaf.dtype != self.dtype:
            raise InvalidTypeError(
                f"{key!r} has dtype {leaf.dtype}, expected {self.dtype} as in the storage; nothing was stored. "
                f"Use data[{key!r}] = data[{key!r}].to({self.dtype})"
            )
        images: npt.NDArray[Any] = leaf.detach().cpu().reshape(-1, *self.shape).contiguous().numpy()
        return images

    def decode(
        self, handles: list[torch.Tensor], decoder: GpuDecoder | None = None, *, reuse_memory: bool = True
    ) -> list[torch.Tensor]:
        """Decode the images of one or two tensors of handles, which have the same shape.

        :param decoder: decoder for a GPU; it is used if it can decode the column's codec
        :param reuse_memory: whether the images are a batch, whose memory later batches use again
        """
        if decoder is not None and decoder.can_decode(self.pool):
            both = torch.stack(handles)
            images = decoder.decode(self.pool, both.reshape(-1).numpy())  # type: ignore[attr-defined]  # never called
            return list(images.reshape(*both.shape, *self.shape).unbind())
        flat = [part.reshape(-1).numpy() for part in handles]
        empty = self._recycled.empty if reuse_memory else np.empty
        outs = [empty((len(part), *self.shape), self._numpy_dtype) for part in flat]
        num_threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        following = (flat[1], outs[1]) if len(flat) == 2 else (None, None)
        self.pool.get(flat[0], outs[0], *following, num_threads=num_threads)
        return [
            torch.from_numpy(out).reshape(*part.shape, *self.shape) for out, part in zip(outs, handles, strict=True)
        ]

    def reencode_if_better(self, rows: Any, length: int) -> None:
        """Encode all elements again if another layout suits them, or if they may become lossy.

        :param rows: all elements, with handles in place of images
        :param length: number of stored elements along the first dimension
        """
        held = [rows.get(key)[:length] for key in self.keys]
        flat = [part.reshape(-1).numpy() for part in held]
        if self.shared or self._in_file or self._options.n_stack is not None:
            return
        if not self._next_check <= len(flat[0]) <= LAST_CHECK:
            return
        if sum(map(np.count_nonzero, flat)) != self.pool.held or not flat[0].all() or self.pool.lossy:
            return  # handles exist elsewhere, places are empty, or errors of a lossy encoding would add up
        while self._next_check <= len(flat[0]):
            self._next_check *= 2
        # The stored elements are complete: if memory is short, they stay as they are.
        with contextlib.suppress(MemoryError):
            self._reencode(held, flat)

    def _reencode(self, held: list[torch.Tensor], flat: list[Handles]) -> None:
        """Copy all images to a new pool if another encoding is better."""
        stacks, *following = self._decode_to_arrays([part[-COPY_BATCH:] for part in flat])
        layout = detect_layout(self.pool.layout, stacks, following[0] if following else None) or self.pool.layout
        encoding = self._options.encoding(layout, exact=len(flat[0]) < LOSSY_AFTER)
        if encoding == self.pool.encoding:
            return
        pool, parts = self._new_pool(encoding), []
        for start in range(0, len(flat[0]), COPY_BATCH):
            parts.append(pool.put(*self._decode_to_arrays([part[start : start + COPY_BATCH] for part in flat])))
        self.pool = pool
        for leaf, encoded in zip(held, zip(*parts, strict=True), strict=False):
            leaf.copy_(torch.from_numpy(np.concatenate(encoded)).reshape(leaf.shape))

    def _decode_to_arrays(self, handles: list[Handles]) -> list[npt.NDArray[Any]]:
        """Return the decoded images of each array of handles."""
        outs = [np.empty((len(part), *self.shape), dtype=self._numpy_dtype) for part in handles]
        for part, out in zip(handles, outs, strict=True):
            self.pool.get(part, out)
        return outs

    def handles(self, rows: Any, length: int) -> npt.NDArray[np.int64]:
        """Return the handles of the first ``length`` elements, key after key."""
        return np.concatenate([rows.get(key)[:length].reshape(-1).numpy() for key in self.keys])

    def clear(self, rows: Any, start: int, end: int) -> None:
        """Remove the images from the elements ``start`` to ``end``.

        Their handles are not released.
        """
        for key in self.keys:
            rows.get(key)[start:end] = 0

    def recover(self, rows: Any, length: int, where: Path | None) -> None:
        """Repair the pool after its process was killed, or after a file was opened.

        :param rows: all elements, with handles in place of images
        :param length: number of valid elements along the first dimension
        :param where: folder of the pool, for the error; None: memory
        :raises CorruptFileError: If an image is missing.
        """
        handles = self.handles(rows, length)
        advice = "" if where is None else ". Keep the intact elements with FrameStorage.salvage(storage_dir)"
        if lost := int(np.count_nonzero(handles[~self.recover_handles(handles)])):
            raise CorruptFileError(
                f"{lost} of {len(handles)} images of {self.keys} in {where or 'memory'} are missing: the data was "
                f"truncated or overwritten{advice}"
            )

    def recover_handles(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Repair the pool, and return which handles can be read. All other frames are dropped.

        :param handles: all handles in the elements
        """
        from rl_ext_core.frames.recovery import recover

        if self.pool.was_interrupted:
            self.pool.reconfigure(**self._options.encoding()._asdict())
        return recover(self.pool, handles)

    def restore(self, description: Any) -> None:
        """Replace the pool by a saved one.

        :param description: description of a pool by ``FramePool``
        :raises CorruptFileError: If it is damaged, or has a later format.
        :raises InvalidArgumentError: If it was made with a lossier codec than this column's options allow.
        """
        pool = self._pool_class().from_state_dict(description, self._n_handles)
        allowed, is_jpeg = self._options.lossy, pool.codec == "jpeg"
        if pool.max_error > allowed.get("max_error", 0) or (is_jpeg and allowed != {"quality": pool.quality}):
            made_with = f"codec='jpeg', quality={pool.quality}" if is_jpeg else f"max_error={pool.max_error}"
            raise InvalidArgumentError(
                f"the saved images are lossy: they were made with {made_with}. Pass the same options to FrameStorage"
            )
        self.pool, self._next_check = pool, LAST_CHECK + 1

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays that batches are decoded into."""
        return self._recycled.nbytes

    def __getstate__(self) -> dict[str, Any]:
        # Only child processes receive the pickle, and share the frames from now on.
        self.shared = True
        return {**self.__dict__, "_recycled": RecycledArrays()}


def encode_images(columns: list[FrameColumn], data: Any) -> tuple[Any, dict[Key, torch.Tensor]]:
    """Store images; return the elements with handles in their place, and the handles.

    Each handle has to be released once.
    """
    ended = data.get(("next", "done"), None)
    if ended is not None:
        n = data.batch_size.numel()
        ended = ended.reshape(n, ended.numel() // max(n, 1)).any(-1).cpu().numpy()
    new: dict[Key, torch.Tensor] = {}
    try:
        for column in columns:
            keys = [key for key in column.keys if data.get(key, None) is not None]
            if keys:
                handles = column.encode(keys, [data.get(key) for key in keys], ended)
                new.update(zip(keys, handles, strict=True))
    except BaseException:
        release_images(columns, new)
        raise
    small = data.copy()
    for key, leaf in new.items():
        small.set(key, leaf)
    return small.to("cpu"), new


def release_images(columns: list[FrameColumn], handles: dict[Key, torch.Tensor]) -> None:
    """Free the images that these handles refer to.

    :param handles: their handles, by key
    """
    for column in columns:
        for key in column.keys:
            if key in handles:
                column.pool.release(handles[key].reshape(-1).numpy())


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's equivalent of a torch dtype; raise an error if there is none."""
    try:
        return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    except TypeError:
        raise InvalidTypeError(
            f"images of dtype {dtype} cannot be compressed, because NumPy does not support it. Convert them, for "
            "example to torch.float16, or leave their key out of pixels="
        ) from None


def list_items(data: Any, *, leaves_only: bool = False) -> list[tuple[Key, Any]]:
    """List the keys and values of elements, nested ones included.

    :raises InvalidArgumentError: If a lazy stack's elements differ in shape.
    """
    try:
        return list(data.items(include_nested=True, leaves_only=leaves_only))
    except RuntimeError as error:  # of a lazy stack
        raise InvalidArgumentError(
            f"the elements differ in shape ({str(error)[:200]}); nothing was stored. Pad them to one shape, for "
            "example with tensordict.pad_sequence"
        ) from error


def describe_image_columns(row: Any, pixels: Sequence[Key] | None, data: Any) -> list[dict[str, Any]]:
    """Describe the image columns of a storage in plain values that JSON can store.

    :param row: one element
    :param pixels: keys of the images; None: all leaves that look like images
    :param data: first elements
    :return: per column, ``keys`` (one or two, the key under ``"next"`` last), ``shape`` and ``dtype`` of an image, and
        ``n_images``, the number of images per element
    :raises InvalidArgumentError: If a key is missing, or its value has no image dimensions.
    """
    found = _image_shapes(row, pixels, data)
    kinds = []
    for key, shape in found.items():
        root, following = key, unravel_key(("next", key))
        if isinstance(key, tuple) and key[0] == "next":
            root, following = unravel_key(key[1:]), key
        leaf = row.get(key)
        pair = [k for k in (root, following) if found.get(k) == shape and _same_shape_and_dtype(row.get(k), leaf)]
        if key == pair[0]:
            n_images = len(pair) * _parent_of(row, key).batch_size.numel()
            kinds.append({"keys": pair, "shape": list(shape), "dtype": dtype_name(leaf.dtype), "n_images": n_images})
    return kinds


def _image_shapes(row: Any, pixels: Sequence[Key] | None, data: Any) -> dict[Key, torch.Size]:
    """Return the keys of the leaves to compress, and the shape of an image of each."""
    leaves = {key: leaf for key, leaf in list_items(row, leaves_only=True) if isinstance(leaf, torch.Tensor)}
    shapes = {key: leaf.shape[_parent_of(row, key).batch_dims :] for key, leaf in leaves.items()}
    if pixels is None:
        first = dict(list_items(data, leaves_only=True))
        return {
            key: shape
            for key, shape in shapes.items()
            if len(shape) >= 2
            and shape.numel() * leaves[key].element_size() >= _MIN_IMAGE_NBYTES
            and (leaves[key].dtype == torch.uint8 or _are_float_images(first, key, shape))
        }
    keys = [unravel_key(key) for key in pixels]
    for key in keys:
        if not shapes.get(key):
            raise InvalidArgumentError(
                f"pixels={list(pixels)!r}: {key!r} is not a tensor of the data with a dimension after the batch; "
                f"expected keys among {sorted(shapes, key=str)}"
            )
    for key in list(keys):
        following = unravel_key(("next", key))
        if following in leaves and _same_shape_and_dtype(leaves[key], leaves[following]):
            keys.append(following)
    return {key: shapes[key] for key in keys}


def _are_float_images(leaves: dict[Key, Any], key: Key, shape: torch.Size) -> bool:
    """Return whether a leaf contains floating-point images: each repeats parts of the one before.

    If there is one element, which is too little to tell, three axes count as an image.
    """
    leaf = leaves[key]
    if leaf.dtype not in _FLOATS or sum(side >= _MIN_SIDE for side in shape) < 2:
        return False
    root = unravel_key(key[1:]) if isinstance(key, tuple) and key[0] == "next" else key
    pair = [leaves.get(name) for name in (root, unravel_key(("next", root)))]
    stacks, *nexts = [
        part.detach().cpu().reshape(-1, *shape)[:COPY_BATCH].contiguous().numpy()
        for part in pair
        if part is not None and _same_shape_and_dtype(part, leaf)
    ]
    if len(stacks) == 1 and len(shape) >= 3:
        return True
    before, after = (stacks, nexts[0]) if nexts else (stacks[:-1], stacks[1:])
    if len(before) == 0:
        return False
    unstacked = StackLayout(tuple(shape), stacks.dtype, 1, 0)
    layout = detect_layout(unstacked, stacks, nexts[0] if nexts else None)
    is_stacked = layout is not None and layout.n_stack > 1
    is_repeated = bool(np.mean(before == after) >= _UNCHANGED)
    return is_stacked or is_repeated or (nexts != [] and _share_rows(stacks, nexts[0]))


def _share_rows(stacks: npt.NDArray[Any], nexts: npt.NDArray[Any]) -> bool:
    """Return whether an image is the next one of another element."""
    return not {row.tobytes() for row in nexts}.isdisjoint(row.tobytes() for row in stacks)


def _parent_of(row: Any, key: Key) -> Any:
    """Return the TensorDict that contains a leaf.

    It may have more batch dimensions, such as agents.
    """
    return row.get(key[:-1]) if isinstance(key, tuple) and len(key) > 1 else row


def _same_shape_and_dtype(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype
