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
from rl_ext_core.frames.recycle import RecycledArrays
from torchrl_ext.frame_storage.format import dtype_from_name, dtype_name

_COPY_BATCH = 64  # elements in which images are looked for
_MIN_IMAGE_NBYTES = 1024  # smaller leaves are not worth compressing
_FLOATS = (torch.float16, torch.float32, torch.float64)
_MIN_SIDE = 8  # height and width of images of floats

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
        return expand_numbers(numbers, self.batch[dims:])

    @property
    def per_row(self) -> int:
        """Number of images per element of the first dimension."""
        return math.prod(self.batch[1:])

    def rows_of(self, place: int) -> npt.NDArray[np.int64]:
        """Return the numbers of all images of an element of the first dimension."""
        return place * self.per_row + np.arange(self.per_row)

    def detect(self, data: Any) -> None:
        """Choose the layout for the first elements, before they are put."""
        self.table.detect(*[self._check(data.get(key), key).numpy() for key in self.keys])

    def put(self, numbers: torch.Tensor, images: dict[Key, torch.Tensor]) -> None:
        """Store images. The table must be committed or rolled back afterwards, also if an exception was raised.

        :param numbers: Numbers of the images.
        :param images: Images of one or both keys, by key.
        """
        rows = numbers.reshape(-1).numpy()
        checked: dict[Key, Any] = {key: self._check(leaf, key) for key, leaf in images.items()}
        if self.is_scaled:
            scaled = {key: to_bytes(leaf) for key, leaf in checked.items()}
            if any(leaf is None for leaf in scaled.values()):
                self.store_as_floats()
            else:
                checked = scaled
        arrays = [checked[key].numpy() if key in checked else None for key in self.keys]
        if len(checked) < len(self.keys):  # both images of a number are stored together
            if self.table.is_lossy:
                missing = next(key for key in self.keys if key not in checked)
                raise InvalidArgumentError(
                    f"{missing!r} is missing. With max_error or codec='jpeg', its errors would add up if only the "
                    "other image were written; nothing was stored. Write both"
                )
            outs = [np.empty((len(rows), *self.shape), self._stored_dtype) if a is None else None for a in arrays]
            self.table.get(rows, *outs)
            arrays = [out if array is None else array for array, out in zip(arrays, outs, strict=True)]
        self.table.put(rows, *arrays)

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
        """
        rows = np.ascontiguousarray(numbers.reshape(-1).numpy())
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
        if self.is_scaled:
            from torchrl_ext.frame_storage.byte_floats import as_floats  # imports numba

            for key, numerators in outs.items():
                outs[key] = empty(numerators.shape, self._numpy_dtype)
                as_floats(numerators.reshape(-1), outs[key].reshape(-1))
        return [torch.from_numpy(outs[key]).reshape(*numbers.shape, *self.shape) for key in keys]

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays that batches are decoded into."""
        return self._recycled.nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recycled": RecycledArrays()}


def expand_numbers(numbers: torch.Tensor, inner: Sequence[int]) -> torch.Tensor:
    """Return the numbers of all parts of shape ``inner`` of numbered elements."""
    if not inner:
        return numbers
    n = math.prod(inner)
    return (numbers.unsqueeze(-1) * n + torch.arange(n)).reshape(*numbers.shape, *inner)


def to_bytes(images: torch.Tensor) -> torch.Tensor | None:
    """Return the numerators of float32 images that are n/255 bit for bit; None if one is not."""
    from torchrl_ext.frame_storage.byte_floats import as_bytes  # imports numba

    floats, found = images.numpy().reshape(-1), torch.empty(images.shape, dtype=torch.uint8)
    return found if as_bytes(floats, floats.view(np.int32), found.numpy().reshape(-1)) else None


def _are_bytes(leaves: list[torch.Tensor]) -> bool:
    """Return whether leaves of the first elements are float32 of n/255, with enough values to tell."""
    if any(leaf.dtype != torch.float32 for leaf in leaves):
        return False
    found = [to_bytes(leaf.detach().cpu().contiguous()) for leaf in leaves]
    return all(part is not None for part in found) and len(found[0].unique()) > 2  # type: ignore[union-attr]


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


def describe_image_columns(
    row: Any, pixels: Sequence[Key] | None, data: Any, *, may_scale: bool
) -> list[dict[str, Any]]:
    """Describe the image columns of a storage in plain values that JSON can store.

    :param row: One element.
    :param pixels: Keys of the images. None: all leaves that may be images.
    :param data: First elements.
    :param may_scale: Whether floats of n/255 may be stored as bytes.
    :return: Dictionary per column: ``keys``, the one under ``"next"`` last; ``shape`` and ``dtype`` of an image; its
        other dimensions, ``batch``; ``scaled``, see :class:`FrameColumn`.
    :raises InvalidArgumentError: If a key is missing, or its value has no image dimensions.
    """
    found, first = _image_shapes(row, pixels), dict(list_items(data, leaves_only=True))
    kinds = []
    for key, shape in found.items():
        leaf, names = row.get(key), _pair_of(key)
        pair = [name for name in names if found.get(name) == shape and _is_twin(row.get(name), leaf)]
        if key == pair[0]:
            batch = list(_parent_of(row, key).batch_size)
            kind = {"keys": pair, "shape": list(shape), "dtype": dtype_name(leaf.dtype), "batch": batch}
            kinds.append({**kind, "scaled": may_scale and _are_bytes([first[name] for name in pair])})
    return kinds


def _pair_of(key: Key) -> tuple[Key, Key]:
    """Return the key of a leaf, and that of its counterpart under ``"next"``, of which one is given."""
    root = unravel_key(key[1:]) if isinstance(key, tuple) and key[0] == "next" else key
    return root, unravel_key(("next", root))


def _image_shapes(row: Any, pixels: Sequence[Key] | None) -> dict[Key, torch.Size]:
    """Return the keys of the leaves to compress, and the shape of an image of each."""
    leaves = {key: leaf for key, leaf in list_items(row, leaves_only=True) if isinstance(leaf, torch.Tensor)}
    shapes = {key: leaf.shape[_parent_of(row, key).batch_dims :] for key, leaf in leaves.items()}
    if pixels is None:
        return {key: shape for key, shape in shapes.items() if _may_be_images(leaves[key], shape)}
    keys = [unravel_key(key) for key in pixels]
    for key in keys:
        if not shapes.get(key):
            raise InvalidArgumentError(
                f"pixels={list(pixels)!r}: {key!r} is not a tensor of the data with a dimension after the batch; "
                f"expected keys among {sorted(shapes, key=str)}"
            )
    nexts = [name for key in keys if (name := _pair_of(key)[1]) in leaves and _is_twin(leaves[key], leaves[name])]
    return {key: shapes[key] for key in [*keys, *nexts]}


def _may_be_images(leaf: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a leaf probably contains images of a shape, judging by its dtype and that shape."""
    if shape.numel() * leaf.element_size() < _MIN_IMAGE_NBYTES:
        return False
    if leaf.dtype == torch.uint8:
        return len(shape) >= 2
    return leaf.dtype in _FLOATS and len(shape) >= 3 and sum(side >= _MIN_SIDE for side in shape) >= 2


def _parent_of(row: Any, key: Key) -> Any:
    """Return the TensorDict that contains a leaf.

    It may have more batch dimensions, such as agents.
    """
    return row.get(key[:-1]) if isinstance(key, tuple) and len(key) > 1 else row


def _is_twin(left: Any, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype
