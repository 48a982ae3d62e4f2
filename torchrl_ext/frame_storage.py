"""A TorchRL storage that keeps images compressed, and each frame once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
from tensordict.utils import unravel_key

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import Salvaged
from rl_ext_core.frames._loss import options_in_words
from rl_ext_core.frames.adaptive_pool import AdaptivePool
from rl_ext_core.frames.codecs import DEFAULT_QUALITY
from torchrl_ext._frame_arguments import at_least_one
from torchrl_ext._frame_budget import Budget, moved_down
from torchrl_ext._frame_buffers import bear_kills, go_on_at
from torchrl_ext._frame_columns import FrameColumn, Key, NewPool
from torchrl_ext._frame_copies import FrameCopies
from torchrl_ext._frame_files import FrameStorageCheckpointer
from torchrl_ext._frame_folder import StorageFolder
from torchrl_ext._frame_marks import Marks
from torchrl_ext._frame_recovery import places_of
from torchrl_ext._frame_salvage import arguments_of, log, mend_sizes, salvage_elements
from torchrl_ext._frame_sums import RowSums


class FrameStorage(FrameCopies):
    """Like :class:`~torchrl.data.LazyTensorStorage`, for TensorDicts with images, in a fraction of the memory.

    Each frame is stored once and compressed, although stacks of frames and ``("next", "pixels")`` repeat it; whether
    they do is found out by comparing contents. All else is kept in plain tensors. What is sampled equals what
    ``LazyTensorStorage`` gives, bit for bit, unless ``max_error`` or JPEG was asked for; then ``repr`` says so::

        buffer = TensorDictReplayBuffer(storage=FrameStorage(1_000_000), batch_size=256)

    Slices, such as ``buffer[:]``, decode images when they are used; what is changed in place in a decoded image is a
    copy, so write by an index: ``buffer[:]["pixels"][3] = image``.

    :param max_size: Max number of elements, as in ``LazyTensorStorage``.
    :param device: Where samples go; what is stored stays in main memory.
    :param ndim: Number of batch dimensions that count for the size, as in ``LazyTensorStorage``.
    :param pixels: Keys of the images, or None for all leaves of bytes with at least two dimensions and 1,024 bytes.
    :param codec: ``"auto"``, or ``"raw"``, ``"patch"``, ``"patch+lz4"`` (the smallest), ``"lz4"``, or ``"jpeg"``,
        which is lossy, slow, and never chosen by itself: for natural images of one channel or three.
    :param max_error: How far a pixel may be off; 0 is exact.
    :param quality: Of JPEG, 1 to 100; for ``codec="jpeg"`` only. ``pixels`` says which leaves become JPEG.
    :param n_stack: Frames in an image stack, or None to find it from the data.
    :param block_length: Frames in a block, a power of two, or None to choose it by what is seen. Longer blocks take
        less memory and more time to sample from.
    :param max_bytes: What it may hold, in bytes; where that is reached, ``max_size`` is lowered, and the oldest go.
    :param storage_dir: A folder to keep everything in, memory-mapped: it may exceed main memory, and whoever opens it
        again with the same arguments finds what was there and goes on behind it, even after a crash of the process,
        but for elements that were being added at that moment. Damage is found by checksum: of elements when the folder
        is opened, of images when they are first read. Elements that were handed out as views, as by ``buffer[:]``, may
        change without notice: if the process was killed since then, only images are compared.
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``.
    :raises InvalidArgumentError: if an argument has a value that cannot be used.
    :raises MissingDependencyError: if numba is not installed, or what the codec needs.
    :raises StorageError: if the folder cannot be used, or another process uses it.
    :raises CorruptFileError: if what is in the folder is damaged.
    """

    _default_checkpointer = FrameStorageCheckpointer
    _goes_on_at: int | None = None  # of a storage that was opened again, until the first element is added

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        pixels: Sequence[Key] | None = None,
        codec: str = "auto",
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        n_stack: int | None = None,
        block_length: int | None = None,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        max_size, ndim = at_least_one("max_size", max_size), at_least_one("ndim", ndim)
        super().__init__(max_size, device=device, ndim=ndim, pixels=pixels, num_threads=num_threads)
        self._options: dict[str, Any] = {
            "codec": codec,
            "max_error": max_error,
            "n_stack": n_stack,
            "block_length": block_length,
            **({} if quality == DEFAULT_QUALITY and codec != "jpeg" else {"quality": quality}),
        }
        self._budget = None if max_bytes is None else Budget(at_least_one("max_bytes", max_bytes))
        if max_bytes is not None and ndim > 1:
            raise InvalidArgumentError(f"max_bytes={max_bytes} is for storages of one dimension; leave out ndim={ndim}")
        if max_bytes is not None and storage_dir is not None:
            raise InvalidArgumentError(
                f"max_bytes={max_bytes} is for main memory; leave it out, or storage_dir={str(storage_dir)!r}"
            )
        self._folder = None if storage_dir is None else StorageFolder(storage_dir)
        if self._folder is not None:
            keys = None if pixels is None else [unravel_key(key) for key in pixels]
            self._folder.arguments = {"max_size": max_size, "ndim": ndim, "pixels": keys, **self._options}
            try:
                self._reopen(self._folder)
            except BaseException:
                self._let_go()
                raise

    def __repr__(self) -> str:
        codec = self._options["codec"]
        return f"{super().__repr__()[:-1]}, \n    codec={codec!r}, {options_in_words(self._options)})"

    def _pool_maker(self, n_rows: int) -> NewPool:
        folder, options = self._folder, self._options
        numbers = itertools.count()

        def new_pool(image: tuple[int, ...], dtype: Any, n_images: int) -> AdaptivePool:
            # A batch is stored before what it replaces is freed, hence twice as many.
            path = None if folder is None else folder.frames(next(numbers))
            return AdaptivePool(2 * n_rows * n_images, image, dtype, **options, path=path)

        return new_pool

    def _new_rows(self, rows: Any) -> Any:
        if self._folder is None:
            return super()._new_rows(rows)
        if not self._columns:
            raise InvalidArgumentError(
                "storage_dir is for data with images, and none were found; use LazyMemmapStorage, or name them: "
                'FrameStorage(..., pixels=["pixels"])'
            )
        try:
            return self._new_files(self._folder, rows)
        except BaseException:
            self._let_go()
            self._columns, self._marks, self._sums = [], None, None
            self._folder.clear()
            raise

    def _new_files(self, folder: StorageFolder, rows: Any) -> Any:
        mapped = folder.new_rows(rows)
        n_images = [sum(rows.get(key)[0].numel() for key in column.keys) for column in self._columns]
        kinds = [column.kind(n) for column, n in zip(self._columns, n_images, strict=True)]
        self._marks = Marks(len(rows), path=folder.marks)
        self._sums = RowSums(mapped, path=folder.sums)
        self._marks.written(0, 0)
        folder.begin(kinds)
        return mapped

    def _reopen(self, folder: StorageFolder) -> None:
        """Finds again what is in the folder."""
        if (kinds := folder.found()) is None:
            return
        self._open_files(folder, kinds)
        self._goes_on_at = self._recover("their process", folder.path)

    def _open_files(self, folder: StorageFolder, kinds: list[dict[str, Any]]) -> None:
        rows = folder.rows()
        self._marks = Marks(len(rows), path=folder.marks)
        new_pool = self._pool_maker(len(rows))
        for kind in kinds:
            self._columns.append(FrameColumn.like(kind, new_pool, num_threads=self._num_threads))
        self._hold(rows)
        self._sums = RowSums(rows, path=folder.sums)

    @staticmethod
    def salvage(storage_dir: str | os.PathLike[str]) -> Salvaged:
        """Makes a damaged ``storage_dir`` one that can be opened again, with the longest run of intact elements.

        All files are read. What is damaged is given up for good: copy the folder first if in doubt.

        :param storage_dir: the folder.
        :return: how many elements were kept and given up.
        :raises InvalidArgumentError: if there is no storage in it.
        :raises CorruptFileError: if nothing can be read at all.
        :raises StorageError: if it is in use.
        """
        storage = _Salvaged(**arguments_of(storage_dir), storage_dir=storage_dir)
        storage.close()
        return storage.found

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Stores elements at their places; see :meth:`FrameCopies.set`."""
        if self._budget is not None:
            self._budget.check(self)
        if set_cursor and self._goes_on_at is not None:
            first = int(places_of(cursor, len(self._storage))[0])
            if first != self._goes_on_at:
                raise InvalidArgumentError(
                    f"this storage was opened again and goes on at {self._goes_on_at}, got elements for {first}, "
                    "since a writer is in use that cannot go on; leave out writer=, or pass another storage_dir"
                )
        with self.lock:
            super().set(cursor, data, set_cursor=set_cursor)
            self._goes_on_at = None
            if self._budget is not None and set_cursor:
                self._budget.keep(self)

    def drop_oldest(self, n: int) -> None:
        """Forgets the oldest elements; the storage holds that many fewer from now on.

        :param n: how many; where they lie at the end and the beginning, those at the end.
        """
        length = len(self)
        start = (self._last_cursor_index + 1) % length
        n = min(n, length - start)
        self._release({key: self._storage.get(key)[start : start + n].clone() for key in self._image_keys})
        moved_down(self._storage, start, n, length)
        self.max_size = self._len = length - n
        self._hold(self._storage[: self.max_size])
        self._set_last_cursor((start - 1) % self.max_size)
        go_on_at(self, start % self.max_size)
        self._bump_mutation_revision()

    @property
    def checkpointer(self) -> FrameStorageCheckpointer:
        """What ``dumps`` and ``loads`` go through."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None and not isinstance(value, FrameStorageCheckpointer):
            raise InvalidTypeError(
                f"checkpointer={value!r} cannot save compressed images; leave checkpointer= out, which saves a "
                "FrameStorage as small as it is"
            )
        self._checkpointer = FrameStorageCheckpointer() if value is None else value
        # The last thing that a buffer does with its storage while it is made: its writer is there by now.
        bear_kills(self)
        if self._goes_on_at is not None:
            go_on_at(self, self._goes_on_at)


class _Salvaged(FrameStorage):
    """A storage in a folder of which it keeps what is intact."""

    def _reopen(self, folder: StorageFolder) -> None:
        mend_sizes(folder)
        self._open_files(folder, folder.found() or [])
        assert self._marks is not None
        assert self._sums is not None
        kept, length = salvage_elements(self._storage, self._columns, self._marks, self._sums)
        n = self.max_size // len(self._storage)
        self._len = kept * n
        self.found = log(folder.path, Salvaged(kept * n, (length - kept) * n))
