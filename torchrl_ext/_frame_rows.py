"""The elements of a frame storage: small leaves in plain tensors, and handles of frames in place of images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict.utils import unravel_key
from torchrl.data import TensorStorage

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames._choice import LAST_CHECK
from rl_ext_core.frames._process_lock import ProcessLock
from torchrl_ext._frame_arguments import as_tensordict, last_of_each, on_cpu
from torchrl_ext._frame_columns import FrameColumn, Key, NewPool, columns_for
from torchrl_ext._frame_upkeep import Upkeep
from torchrl_ext._frame_view import FrameView

_logger = logging.getLogger("torchrl_ext")


class FrameRows(Upkeep):
    """What :class:`FrameStorage` is, without its options and files.

    TorchRL reads ``_storage`` of its tensor storages; here that holds int64 handles where the images would be.

    :param max_size: Max number of elements.
    :param device: Where samples go.
    :param ndim: Number of batch dimensions that count for the size.
    :param pixels: Keys of the images, or None to find them.
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``.
    """

    device: Any
    _storage: Any

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str,
        ndim: int,
        pixels: Sequence[Key] | None,
        num_threads: int | None,
    ) -> None:
        super().__init__(None, max_size, device=device, ndim=ndim)
        self._pixels, self._num_threads = pixels, num_threads
        self._columns: list[FrameColumn] = []
        self._closed = False
        self.lock = ProcessLock()
        self.lock.recover = self._make_whole

    def _pool_maker(self, n_rows: int) -> NewPool:
        """What makes the pools of a storage with so many rows."""
        raise NotImplementedError

    def _new_rows(self, rows: Any) -> Any:
        """Room for elements like these."""
        return torch.empty_like(rows)

    def _init(self, row: Any) -> None:
        if self.device == "auto":
            self.device = row.device or torch.device("cpu")
        new_pool = self._pool_maker(self._shape_for(row)[0])
        columns = columns_for(row, self._pixels, new_pool, num_threads=self._num_threads)
        if not columns:
            _logger.warning(
                "no images were found in the data (%s), so nothing is compressed; name them: FrameStorage(..., "
                'pixels=["pixels"])',
                ", ".join(map(str, row.keys(include_nested=True, leaves_only=True))),
            )
        small = row.copy()
        for column in columns:
            for key in column.keys:
                shape = row.get(key).shape
                small.set(key, torch.zeros(shape[: len(shape) - len(column.shape)], dtype=torch.int64))
        self._allocate(small.to("cpu"), columns)

    def _shape_for(self, row: Any) -> torch.Size:
        if self.ndim == 1:
            return torch.Size((self.max_size, *row.shape))
        return torch.Size((-(self.max_size // -row.shape[: self.ndim - 1].numel()), *row.shape))

    def _allocate(self, row: Any, columns: list[FrameColumn]) -> None:
        """Makes room for elements like ``row``, which has handles in place of images."""
        shape = self._shape_for(row)
        self._columns = columns
        rows = self._new_rows(row.expand(shape))
        for key in self._image_keys if not rows.is_memmap() else ():
            # 0 is no image. Unlike zeros_like, this takes no memory before it is used.
            rows.set(key, torch.zeros(rows.get(key).shape, dtype=torch.int64))
        self._hold(rows)

    def _hold(self, rows: Any) -> None:
        self._storage = rows
        if self.ndim > 1:
            self.max_size = rows.shape[: self.ndim].numel()
        self.__dict__.pop("_total_shape_value", None)
        self.initialized = True

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("this FrameStorage is closed; open its folder again, with the same arguments")
        self.lock.check_process()

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Stores elements at their places.

        :param cursor: an index, or several.
        :param data: a TensorDict of as many elements.
        :raises InvalidTypeError: if it is no TensorDict, or a dtype is another one.
        :raises InvalidArgumentError: if a shape is another one. Whatever is raised, nothing is stored.
        """
        self._check_open()
        data = as_tensordict(data)
        single = not isinstance(cursor, slice) and np.ndim(cursor) == 0 and not isinstance(cursor, range)
        with self.lock:
            if not self.initialized:
                self._init(data if single else data[0])
            if not single:
                cursor, data = last_of_each(cursor, data)
            self._check_shapes(data, self.ndim - single)
            length, last = len(self), self._last_cursor_index
            old: dict[Key, torch.Tensor] = {}
            encoded, new = self._encoded(data)
            try:
                self._will_write(cursor)
                old = {key: self._storage.get(key)[cursor].clone() for key in new}
                super().set(cursor, encoded, set_cursor=set_cursor)
            except BaseException:
                self._len = length
                for key, before in old.items():
                    self._storage.get(key)[cursor] = before
                self._set_last_cursor(last)
                self._written()
                self._release(new)
                raise
            self._written()
            self._release(old)
            self._look_again()

    def _check_shapes(self, data: Any, batch_dims: int) -> None:
        """Refuses what would be noticed when half of it is stored."""
        held = self._storage
        shapes = {key: column.shape for column in self._columns for key in column.keys}
        for key, leaf in data.items(include_nested=True, leaves_only=True):
            stored = held.get(key, None)
            if isinstance(leaf, torch.Tensor) and isinstance(stored, torch.Tensor):
                expected = (*stored.shape[self.ndim :], *shapes.get(key, ()))
                if tuple(leaf.shape[batch_dims:]) != expected:
                    raise InvalidArgumentError(
                        f"{key!r} has shape {tuple(leaf.shape)}, expected {expected} behind the {batch_dims} batch "
                        "dimensions, as in what was stored first; nothing was stored"
                    )

    def _encoded(self, data: Any) -> tuple[Any, dict[Key, torch.Tensor]]:
        """The data with handles in place of images, and these handles by key."""
        ended = data.get(("next", "done"), None)
        if ended is not None:
            ended = ended.reshape(data.batch_size.numel(), -1).any(-1).cpu().numpy()
        new: dict[Key, torch.Tensor] = {}
        try:
            for column in self._columns:
                keys = [key for key in column.keys if data.get(key, None) is not None]
                if keys:
                    handles = column.encode(keys, [data.get(key) for key in keys], ended)
                    new.update(zip(keys, handles, strict=True))
        except BaseException:
            self._release(new)
            raise
        small = data.copy()
        for key, leaf in new.items():
            small.set(key, leaf)
        return small.to("cpu"), new

    def _release(self, handles: dict[Key, torch.Tensor]) -> None:
        for column in self._columns:
            for key in column.keys:
                if key in handles:
                    column.release(handles[key])

    def _look_again(self) -> None:
        """Lets the pools choose again how to store, as long as there is little in them."""
        if len(self) > LAST_CHECK or self._len_along_dim0 is None:
            return
        for column in self._columns:
            held: list[torch.Tensor] = [self._storage.get(key)[: self._len_along_dim0] for key in column.keys]
            for leaf, anew in zip(held, column.look_again(held), strict=False):
                leaf.copy_(anew)

    def get(self, index: Any) -> Any:
        """The elements at an index; images of a slice are decoded when they are used."""
        lazy = isinstance(index, slice) or (isinstance(index, tuple) and all(isinstance(i, slice) for i in index))
        self._check_open()
        with self.lock:
            self._expose(index)
            rows = super().get(on_cpu(index)).copy()
            for column in self._columns:
                handles = [rows.get(key) for key in column.keys]
                images = [self._view(column, part) for part in handles] if lazy else column.decode(handles)
                for key, image in zip(column.keys, images, strict=True):
                    rows.set(key, image)
        return rows if self.device.type == "cpu" else rows.to(self.device)

    def _view(self, column: FrameColumn, handles: torch.Tensor) -> FrameView:
        def read(part: torch.Tensor) -> torch.Tensor:
            with self.lock:
                return column.decode([part])[0]

        def write(part: torch.Tensor, index: Any, images: torch.Tensor) -> None:
            with self.lock:
                new = column.encode(column.keys[:1], [images], None)[0]
                old = part[index].clone()
                part[index] = new
                column.release(old)

        return FrameView(handles, column.shape, column.dtype, read, write)

    def _conditional_patch_leaf(self, key: Key) -> torch.Tensor:
        leaf: torch.Tensor = super()._conditional_patch_leaf(key)
        column = next((column for column in self._columns if unravel_key(key) in column.keys), None)
        return leaf if column is None else self._view(column, leaf)

    def flatten(self) -> TensorStorage:
        """A storage of one dimension with the same elements, which reads and writes those of this one."""
        return self if self.ndim == 1 else TensorStorage(self[:].flatten(0, self.ndim - 1))

    def _empty(self) -> None:
        self._check_open()
        with self.lock:
            super()._empty()
            self._written()
            # In this order, so that a handle that is there always leads somewhere.
            for key in self._image_keys:
                self._storage.get(key).zero_()
            for column in self._columns:
                column.pool.clear()

    def close(self) -> None:
        """Gives up what is held; with ``storage_dir``, the folder can be opened again then, also by another process."""
        with self.lock:
            self._check_open()
            if self._sums is not None and self._exposed:
                self._sums.update(np.arange(self._len_along_dim0))
            if self._marks is not None:
                self._marks.settle()
            self._let_go()
            self._columns, self._marks, self._sums, self._storage = [], None, None, None
            self.initialized, self._len = False, 0
            self._closed = True

    @property
    def used_nbytes(self) -> int:
        """Bytes that the elements take: less than :attr:`nbytes` where room of former ones waits to be used again."""
        rows = self._storage[: self._len_along_dim0]
        return int(rows.bytes()) + sum(column.pool.used_nbytes for column in self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes held: the images, the arrays that batches are decoded into, and the elements stored of all else."""
        if not self.initialized:
            return 0
        rows = self._storage[: self._len_along_dim0]
        return int(rows.bytes()) + sum(column.nbytes for column in self._columns)
