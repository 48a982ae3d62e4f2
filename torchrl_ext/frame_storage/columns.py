"""Image columns of a storage: detection of images, and numbers in place of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict.utils import unravel_key

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.codecs import check_numba
from rl_ext_core.frames.gpu_decode import GpuDecoder
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.recycle import RecycledArrays
from torchrl_ext.frame_storage.format import dtype_from_name, dtype_name

_COPY_BATCH = 64  # elements in which images are looked for
_MIN_IMAGE_NBYTES = 1024  # smaller leaves are not worth compressing
_FLOATS = (torch.float16, torch.float32, torch.float64)
_MIN_SIDE = 8  # height and width of images of floats
_SCALED_AT_ONCE = 4  # images whose floats fit into the cache of a CPU
_UNCHANGED = 0.5  # fraction of values that stay the same from one image to the next

Key = Any  # a string, or a tuple of strings


class FrameColumn:
    """Compressed images of a leaf, and of its counterpart under ``"next"``.

    Both share their frames. Each image of an element has a number, which the elements contain in place of images.

    :param kind: Description of the column by :func:`describe_image_columns`.
    :param n_rows: Size of the storage along the first dimension.
    :param options: Options of :class:`Observation`.
    :param num_threads: Threads that decode large batches. None: ``torch.get_num_threads()``.
    :param table: Further arguments of :class:`FrameTable`.
    :ivar batch: Batch dimensions of all images.
    :ivar table: The images, by number.
    :ivar is_scaled: Whether the images are floats from 0/255 to 255/255, which are stored as bytes.
    """

    def __init__(
        self, kind: dict[str, Any], n_rows: int, options: dict[str, Any], *, num_threads: int | None, **table: Any
    ) -> None:
        self.kind = {name: kind[name] for name in ("keys", "shape", "dtype", "batch", "scaled")}
        self.keys: list[Key] = [key if isinstance(key, str) else tuple(key) for key in kind["keys"]]
        self.shape, self.dtype, self.is_scaled = tuple(kind["shape"]), dtype_from_name(kind["dtype"]), kind["scaled"]
        self._numpy_dtype, self._num_threads = _numpy_dtype(self.dtype), num_threads
        self._recycled = RecycledArrays()
        self.batch = (n_rows, *kind["batch"])
        check_numba("A store of frames")
        self._arguments = options, table
        self.table = self._new_table()

    def _new_table(self) -> Any:
        """Create an empty table."""
        from rl_ext_core.frames.log_table import FrameTable
        from rl_ext_core.frames.store import Observation  # imports numba

        options, table = self._arguments
        return FrameTable(math.prod(self.batch), Observation(self.shape, self._stored_dtype, **options), **table)

    @property
    def _stored_dtype(self) -> np.dtype[Any]:
        """Dtype of the images in the table."""
        return np.dtype(np.uint8) if self.is_scaled else self._numpy_dtype

    def store_as_floats(self) -> None:
        """Store the images as floats instead of bytes from now on."""
        if not self.is_scaled:
            return
        scaled = copy(self)
        self.is_scaled = False
        try:
            table = self._new_table()
            for rows in np.array_split(scaled.table.stored_rows(), max(scaled.table.n_stored // _COPY_BATCH, 1)):
                images = scaled.decode(torch.from_numpy(rows), self.keys, reuse_memory=False)
                table.put(rows, *[part.numpy() for part in images])
                table.commit()
        except BaseException:
            self.is_scaled = True
            raise
        self.table, self.kind["scaled"] = table, False

    def expand(self, numbers: torch.Tensor, dims: int) -> torch.Tensor:
        """Return the numbers of the images of elements.

        :param numbers: Flat numbers of the elements.
        :param dims: Number of batch dimensions of the storage that these numbers count.
        """
        inner = self.batch[dims:]
        if not inner:
            return numbers
        n = math.prod(inner)
        return (numbers.unsqueeze(-1) * n + torch.arange(n)).reshape(*numbers.shape, *inner)

    @property
    def per_row(self) -> int:
        """Number of images per element of the first dimension."""
        return math.prod(self.batch[1:])

    def rows_of(self, places: Any) -> npt.NDArray[np.int64]:
        """Return the numbers of all images of elements.

        :param places: Place or places of the elements along the first dimension.
        """
        starts = np.atleast_1d(np.asarray(places, dtype=np.int64))[:, None] * self.per_row
        return (starts + np.arange(self.per_row)).reshape(-1)

    def detect(self, data: Any) -> None:
        """Choose the layout for the first elements, before they are put."""
        self.table.detect(*[self._check(data.get(key), key).numpy() for key in self.keys])

    def put(self, numbers: torch.Tensor, images: dict[Key, torch.Tensor]) -> None:
        """Store images. The table must be committed or rolled back afterwards, also if an exception was raised.

        :param numbers: Numbers of the images.
        :param images: Images of one or both keys, by key.
        """
        rows = numbers.reshape(-1).numpy()
        checked = {key: self._check(leaf, key) for key, leaf in images.items()}
        if self.is_scaled:
            scaled = {key: part for key, leaf in checked.items() if (part := to_bytes(leaf)) is not None}
            if len(scaled) == len(checked):
                checked = scaled
            else:
                self.store_as_floats()
        arrays = [checked[key].numpy() if key in checked else None for key in self.keys]
        for number, (key, array) in enumerate(zip(self.keys, arrays, strict=True)):
            if array is None:  # both images of a number are stored together
                if self.table.is_lossy:
                    raise InvalidArgumentError(
                        f"{key!r} is missing. With max_error or codec='jpeg', its errors would add up if only "
                        f"{next(iter(images))!r} were written; nothing was stored. Write both"
                    )
                arrays[number] = np.empty((len(rows), *self.shape), self._stored_dtype)
                outs = [arrays[number] if other is key else None for other in self.keys]
                self.table.get(rows, *outs)
        self.table.put(rows, *[array for array in arrays if array is not None])

    def _check(self, leaf: torch.Tensor, key: Key) -> torch.Tensor:
        """Return the images of a leaf in one dimension; refuse a dtype other than the column's."""
        if leaf.dtype != self.dtype:
            raise InvalidTypeError(
                f"{key!r} has dtype {leaf.dtype}, expected {self.dtype} as in the storage; nothing was stored. "
                f"Use data[{key!r}] = data[{key!r}].to({self.dtype})"
            )
        return leaf.detach().cpu().reshape(-1, *self.shape).contiguous()

    def decode(
        self, numbers: torch.Tensor, keys: list[Key], *, decoder: GpuDecoder | None = None, reuse_memory: bool = True
    ) -> list[torch.Tensor]:
        """Decode the images of some keys.

        :param decoder: Decoder for a GPU, which is used if it can decode the images.
        :param reuse_memory: Whether the images are a batch, whose memory later batches use again.
        :raises IndexError: If a number does not exist.
        """
        rows = np.ascontiguousarray(numbers.reshape(-1).numpy())
        if len(rows) and not 0 <= rows.min() <= rows.max() < math.prod(self.batch):
            raise IndexError(f"an index is out of bounds for a storage of shape {self.batch}")
        if decoder is not None and decoder.can_decode(self.table.part):
            handles = dict(zip(self.keys, self.table.handles(rows), strict=False))
            images = decoder.decode(self.table.log, 0, np.concatenate([handles[key] for key in keys]))
            if self.is_scaled:  # on a GPU, torch multiplies by the rounded inverse of a number
                images = images.to(self.dtype).div_(torch.tensor(255, dtype=self.dtype, device=images.device))
            return list(images.reshape(len(keys), *numbers.shape, *self.shape).unbind())
        empty = self._recycled.empty if reuse_memory else np.empty
        outs = {key: empty((len(rows), *self.shape), self._stored_dtype) for key in keys}
        num_threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        self.table.get(rows, *[outs.get(key) for key in self.keys], num_threads=num_threads)
        found = [torch.from_numpy(outs[key]).reshape(*numbers.shape, *self.shape) for key in keys]
        if not self.is_scaled:
            return found
        floats = []
        for images in found:
            out = torch.from_numpy(empty((len(rows), *self.shape), self._numpy_dtype))
            flat = images.reshape(-1, *self.shape)
            for start in range(0, len(flat), _SCALED_AT_ONCE):
                out[start : start + _SCALED_AT_ONCE].copy_(flat[start : start + _SCALED_AT_ONCE]).div_(255)
            floats.append(out.reshape(images.shape))
        return floats

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays that batches are decoded into."""
        return self._recycled.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recycled": RecycledArrays()}


def to_bytes(images: torch.Tensor) -> torch.Tensor | None:
    """Return the numerators of floats that are bit for bit n/255, as of ``ToTensorImage``; None if one is not."""
    found = torch.empty(images.shape, dtype=torch.uint8)
    scaled = torch.empty_like(images[:_SCALED_AT_ONCE])
    for start in range(0, len(images), _SCALED_AT_ONCE):
        part, out = (tensor[start : start + _SCALED_AT_ONCE] for tensor in (images, found))
        again = scaled[: len(part)]
        out.copy_(torch.mul(part, 255, out=again).round_())
        if not torch.equal(again.copy_(out).div_(255).view(torch.int32), part.view(torch.int32)):
            return None
    return found


def has_bytes(data: Any, keys: list[Key]) -> bool:
    """Return whether leaves of the first elements are float32 of n/255, with enough values to tell."""
    leaves = [data.get(key) for key in keys]
    if any(leaf.dtype != torch.float32 for leaf in leaves):
        return False
    found = [to_bytes(leaf.detach().cpu().contiguous()) for leaf in leaves]
    values = [np.unique(part.numpy()) for part in found if part is not None]
    return len(values) == len(leaves) and len(values[0]) > 2


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
    :return: Dictionary per column: ``keys``, the one under ``"next"`` last; ``shape`` and ``dtype`` of an image; its
        other dimensions, ``batch``; ``scaled``, see :class:`FrameColumn`.
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
            batch = list(_parent_of(row, key).batch_size)
            kind = {"keys": pair, "shape": list(shape), "dtype": dtype_name(leaf.dtype), "batch": batch}
            kinds.append({**kind, "scaled": False})
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
        part.detach().cpu().reshape(-1, *shape)[:_COPY_BATCH].contiguous().numpy()
        for part in pair
        if part is not None and _same_shape_and_dtype(part, leaf)
    ]
    if len(stacks) == 1 and len(shape) >= 3:
        return True
    before, after = (stacks, nexts[0]) if nexts else (stacks[:-1], stacks[1:])
    if len(before) == 0:
        return False
    unstacked = StackLayout(tuple(shape), stacks.dtype, 1, 0)
    from rl_ext_core.frames.log_table import find_stack_layout  # imports numba

    layout = find_stack_layout(unstacked, stacks, nexts[0] if nexts else None)
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
