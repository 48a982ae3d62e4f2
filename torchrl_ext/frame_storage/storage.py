"""``FrameStorage``: a TorchRL storage that stores each image frame once and compressed."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_non_tensor
from tensordict.utils import unravel_key
from torchrl.data import TensorStorage

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.devices import resolve_device
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, NotCopyableError, StorageError
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, check_codec, describe_lossiness
from rl_ext_core.frames.gpu_decode import GpuDecoder, check_decode_on_gpu
from rl_ext_core.frames.log_folder import LogFolder, as_corrupt_file
from rl_ext_core.frames.shared_memory import MemoryFile, ProcessLock
from rl_ext_core.vector.environments import check_count
from torchrl_ext._compat import is_sampler
from torchrl_ext.datasets import save_storage
from torchrl_ext.frame_storage.arguments import (
    Places,
    as_tensordict,
    check_leaves,
    index_to_cpu,
    is_key,
    is_single_index,
    is_slices,
    is_view,
    number_places,
    resolve_target,
    snapshot_rows,
)
from torchrl_ext.frame_storage.buffers import (
    make_kill_safe,
    refuse_setting_key,
    rewind_writer,
    set_writer_cursor,
)
from torchrl_ext.frame_storage.checkpoint import FrameStorageCheckpointer, collect_contents, read_contents
from torchrl_ext.frame_storage.columns import _COPY_BATCH, FrameColumn, Key, describe_image_columns, list_items
from torchrl_ext.frame_storage.folder import (
    Marks,
    check_images,
    create_elements,
    drop_torn_elements,
    map_elements,
    open_columns,
)
from torchrl_ext.frame_storage.view import FrameView

_logger = logging.getLogger("torchrl_ext")

# Arguments of LazyTensorStorage that must be False. The lines between images and TensorDicts cannot be compiled; the
# first elements must exist before processes share them; and frames are not stored in one piece of memory.
_UNSUPPORTED = "compilable", "shared_init", "consolidated"


class FrameStorage(TensorStorage):
    """Replacement for :class:`~torchrl.data.LazyTensorStorage` that compresses images.

    Each frame is stored once, although stacks of frames and ``("next", "pixels")`` repeat it. Repeated frames are
    detected by comparing pixels. All other values are stored in plain tensors. Samples equal those of
    ``LazyTensorStorage`` bit for bit, unless you set ``max_error`` or ``codec="jpeg"``, which ``repr`` shows::

        buffer = TensorDictReplayBuffer(storage=FrameStorage(1_000_000), batch_size=256)

    It stores TensorDicts and lists of TensorDicts. Plain tensors, dictionaries and other trees are refused: use
    ``TensorDict(data, batch_size=[n])``.

    An element or a slice, such as ``buffer[3]`` or ``buffer[2:5]``, decodes images when they are used. They cannot be
    changed in place. To change an image, assign an element: ``buffer[3] = data``. A part of the keys is enough, as in
    ``buffer[3] = TensorDict({"pixels": image})``.

    Priorities are not part of the storage. Save them with ``buffer.dumps(path)``, or with
    ``buffer.sampler.dumps(path)`` if the storage has a ``storage_dir``.

    :param max_size: Maximum number of elements, as in ``LazyTensorStorage``.
    :param device: Device of samples. Stored elements stay in main memory.
    :param ndim: Number of batch dimensions that ``max_size`` counts, as in ``LazyTensorStorage``.
    :param pixels: Keys of the images; ``"pixels"`` includes ``("next", "pixels")``. None: all uint8 leaves with at
        least two dimensions and 1,024 bytes. Floating-point leaves need three dimensions, of which two are 8 or longer.
    :param codec: ``"patch"`` (the default), ``"raw"`` (uncompressed), or ``"jpeg"``, which is lossy and slow, for
        natural images of one or three channels.
    :param max_error: Largest error of a pixel value. 0 is lossless.
    :param quality: JPEG quality, 1 to 100, for ``codec="jpeg"`` only. ``pixels`` selects the leaves.
    :param n_stack: Number of frames in an image stack. None: detected from the data.
    :param storage_dir: Folder for memory-mapped files, which may exceed main memory. To continue with its elements,
        open it again with the same arguments and ``resume=True``. A crash loses only elements that were being added.
        Checksums of images are verified on opening. Processes cannot share it.
    :param resume: Whether to continue with the elements in ``storage_dir``. By default, such a folder is refused.
    :param num_threads: Number of threads that decode large batches. None: ``torch.get_num_threads()``.
    :param decode_on_gpu: Whether to upload images compressed, and to decode them on the GPU. Samples are the same. It
        has no effect if ``device`` is the CPU, or if the codec does not compress.
    :param compilable, shared_init, consolidated, cleanup_memmap: Arguments of ``LazyTensorStorage``. True is refused
        for the first three, because images are not stored as tensors. The last one has no effect without the second.
    :raises InvalidArgumentError: If an argument has an invalid value, or ``storage_dir`` contains elements.
    :raises InvalidTypeError: If an argument has an invalid type.
    :raises DeviceUnavailableError: If the device is a GPU that is not available.
    :raises MissingDependencyError: If numba is not installed, or a package that the codec needs.
    :raises StorageError: If the folder cannot be used, or another process uses it.
    :raises CorruptFileError: If the files in the folder are damaged.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from torchrl.data import TensorDictReplayBuffer
    >>> from torchrl_ext import FrameStorage
    >>> buffer = TensorDictReplayBuffer(storage=FrameStorage(1000), batch_size=32)
    >>> _ = buffer.extend(TensorDict({"pixels": torch.zeros(64, 4, 84, 84, dtype=torch.uint8)}, [64]))
    >>> buffer.sample()["pixels"].shape
    torch.Size([32, 4, 84, 84])
    """

    _default_checkpointer = FrameStorageCheckpointer
    device: Any
    _len: int
    _storage: Any  # all elements, which TorchRL reads too, without images
    _folder: LogFolder | None = None
    _marks: Marks | None = None  # set if another process may have to repair the elements
    _resume_cursor: int | None = None  # next place in a reopened folder, until the first element is added
    _is_shared = False
    _empty_count = 0  # number of calls of empty()
    _gpu_decoder: GpuDecoder | None = None

    @defer_signals
    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        pixels: Sequence[Key] | None = None,
        codec: str = "patch",
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        n_stack: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        num_threads: int | None = None,
        decode_on_gpu: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        consolidated: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        for name, value in zip(_UNSUPPORTED, (compilable, shared_init, consolidated), strict=True):
            if value:
                raise InvalidArgumentError(
                    f"{name}=True is not possible, because images are not stored as tensors; leave it out. Sample "
                    "outside of compiled functions, and add elements before processes share the buffer"
                )
        max_size, ndim = check_count("max_size", max_size), check_count("ndim", ndim)
        if isinstance(device, int) or (device != "auto" and torch.device(device).type == "cuda"):
            resolve_device(device)  # raises, before any data is collected for a GPU that is not available
        super().__init__(None, max_size, device=device, ndim=ndim)
        self._initial_max_size, self._pixels, self._num_threads = max_size, pixels, num_threads
        self._decode_on_gpu = check_decode_on_gpu(
            decode_on_gpu, "cpu" if device == "auto" else device, codec=codec, max_error=max_error
        )
        check_codec(codec, quality=quality, max_error=max_error, dtype=np.uint8)
        if n_stack is not None:
            n_stack = check_count("n_stack", n_stack)
        self._columns: list[FrameColumn] = []
        self._closed = False
        self.lock = ProcessLock()
        self._options: dict[str, Any] = {
            "codec": codec,
            "max_error": max_error,
            "n_stack": n_stack,
            **({} if quality == DEFAULT_QUALITY and codec != "jpeg" else {"quality": quality}),
        }
        if resume and storage_dir is None:
            raise InvalidArgumentError("resume=True needs a folder. Pass storage_dir too, or leave resume out")
        if storage_dir is not None:
            keys = None if pixels is None else [unravel_key(key) for key in pixels]
            arguments = {"max_size": max_size, "ndim": ndim, "pixels": keys, **self._options}
            self._folder = LogFolder(storage_dir, arguments)
            try:
                self._reopen(self._folder)
                if len(self) and not resume:
                    raise InvalidArgumentError(
                        f"storage_dir={str(storage_dir)!r} contains {len(self):,} rows of an earlier buffer, expected "
                        "an empty folder. Pass resume=True to continue with them, or another storage_dir"
                    )
            except BaseException:
                self._drop_contents()
                self._folder.close()
                raise

    def __repr__(self) -> str:
        codec = self._options["codec"]
        return f"{super().__repr__()[:-1]}, \n    codec={codec!r}, {describe_lossiness(self._options)})"

    def _share(self) -> None:
        """Let the lock keep the images up to date with those of other processes, and repair them after a kill."""
        self.lock.recover = self._recover_after_kill
        self.lock.on_enter = partial(self._call_tables, "load")
        self.lock.on_exit = partial(self._call_tables, "save")

    def _call_tables(self, name: str) -> None:
        for column in self._columns:
            getattr(column.table, name)()

    @property
    def checkpointer(self) -> FrameStorageCheckpointer:
        """Checkpointer that ``dumps`` and ``loads`` use."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None and not isinstance(value, FrameStorageCheckpointer):
            raise InvalidTypeError(
                f"checkpointer={value!r} cannot save compressed images; expected a FrameStorageCheckpointer, which is "
                "the default. Leave checkpointer= out"
            )
        self._checkpointer = FrameStorageCheckpointer() if value is None else value
        # A buffer's constructor sets the checkpointer last. The writer exists by now.
        make_kill_safe(self)
        if self._resume_cursor is not None:
            set_writer_cursor(self, self._resume_cursor)

    def _require_open(self) -> None:
        """Raise an error if the storage is closed, its folder was replaced, or this process is a fork of its owner."""
        if self._closed:
            raise InvalidArgumentError(
                "this FrameStorage is closed. Open its folder again with the same arguments and resume=True: "
                "FrameStorage(..., resume=True)"
            )
        if self._folder is not None and not self._folder.is_in_place():
            raise StorageError(
                f"{self._folder.path} was moved, deleted or replaced since it was opened. Move it back, or pass "
                "another storage_dir"
            )
        self.lock.check_process()

    # Allocation

    def _init(self, row: Any, data: Any) -> None:
        """Create the columns and allocate all elements.

        :param row: One element.
        :param data: First elements, from which the form of images is detected.
        """
        if self.device == "auto":
            self.device = row.device or torch.device("cpu")
        kinds = describe_image_columns(row, self._pixels, data, may_scale=self._may_scale)
        if not kinds:
            _logger.warning(
                "no images were found in the data (%s), so nothing is compressed. If there are images, name them: "
                'FrameStorage(..., pixels=["pixels", ("next", "pixels")])',
                ", ".join(map(str, row.keys(include_nested=True, leaves_only=True))),
            )
        try:
            columns = [self._new_column(kind, self._shape_for(row)[0]) for kind in kinds]
            small = row.exclude(*[key for column in columns for key in column.keys]).to("cpu")
            if self._folder is None:
                self._allocate(small, columns)
            else:
                self._create_files(self._folder, columns, small, data)
        except BaseException:
            self._uninitialize()
            raise

    @property
    def _may_scale(self) -> bool:
        """Whether floats of n/255 may be stored as bytes: losslessly, and where all images can be stored again."""
        return self._folder is None and not self._options["max_error"] and self._options["codec"] != "jpeg"

    def _shape_for(self, row: Any) -> torch.Size:
        """Return the shape of the whole storage for elements like ``row``."""
        if self.ndim == 1:
            return torch.Size((self.max_size, *row.shape))
        return torch.Size((-(self.max_size // -row.shape[: self.ndim - 1].numel()), *row.shape))

    def _new_column(self, kind: dict[str, Any], n_rows: int) -> FrameColumn:
        return FrameColumn(kind, n_rows, self._options, num_threads=self._num_threads)

    def _allocate(self, row: Any, columns: list[FrameColumn]) -> None:
        """Allocate all elements.

        :param row: one element without images
        """
        rows: Any = torch.empty_like(row.expand(self._shape_for(row)))
        self._columns = columns
        self._set_rows(rows)

    def _create_files(self, folder: LogFolder, columns: list[FrameColumn], row: Any, data: Any) -> None:
        """Create the files of the folder.

        :param row: one element without images
        :param data: first elements
        """
        if not columns:
            raise InvalidArgumentError(
                "storage_dir is for data with images, but none were found. Use LazyMemmapStorage, or name the images: "
                'FrameStorage(..., pixels=["pixels"])'
            )
        for column in columns:
            column.detect(data)
        create_elements(folder, columns, row.expand(self._shape_for(row)))
        self._reopen(folder)
        self._resume_cursor = None

    def _reopen(self, folder: LogFolder) -> None:
        """Load the elements in the folder, if there are any."""
        if folder.settings is None:
            return
        rows, self._marks = map_elements(folder)
        self._columns = open_columns(folder, self._options, num_threads=self._num_threads)
        check_images(self._columns, self._marks, folder)
        self._set_rows(rows)
        self._resume_cursor = self._recover("their process")

    def _set_rows(self, rows: Any) -> None:
        """Set the TensorDict of all elements, and mark the storage as initialized."""
        self._storage = rows
        if self.ndim > 1:
            self.max_size = rows.shape[: self.ndim].numel()
        self.__dict__.pop("_total_shape_value", None)
        self.initialized = True

    def _drop_contents(self) -> None:
        """Drop elements and columns, and reset the attributes that describe them."""
        self._call_tables("close")
        self._columns, self._marks = [], None
        self._storage, self.initialized = None, False
        self.max_size = self._initial_max_size
        self.__dict__.pop("_total_shape_value", None)

    def _uninitialize(self) -> None:
        """Drop all elements, and return to the state before the first element was stored."""
        self._drop_contents()
        if self._folder is not None:
            self._folder.reset()

    # Elements

    @defer_signals
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store elements at an index. If they are invalid, nothing is stored.

        :param cursor: an index or several. If a place is repeated, the last element for it is stored
        :param data: TensorDict with one element per place
        :param set_cursor: whether elements are added, as TorchRL's writers do, and not changed. They need all keys of
            the stored ones, and the place is recorded as the last one written
        :raises InvalidTypeError: If ``data`` is not a TensorDict, or a dtype differs from that of the first elements.
        :raises InvalidArgumentError: If a shape differs from that of the first elements, a key is missing, or the index
            is invalid.
        :raises OutOfMemoryError: If memory is exhausted.
        :raises StorageError: If the disk of ``storage_dir`` is full.
        """
        self._require_open()
        with self.lock:
            try:
                self._set(cursor, as_tensordict(data), set_cursor=set_cursor)
            except BaseException:
                if set_cursor:
                    rewind_writer(self, cursor)
                raise
            if set_cursor:
                self._resume_cursor = None

    def _set(self, cursor: Any, data: Any, *, set_cursor: bool) -> None:
        """Store elements at an index; if that fails, restore the previous state."""
        fresh = not self.initialized
        if fresh:
            first = data.unsqueeze(0) if is_single_index(cursor) else data
            if not len(first):
                raise InvalidArgumentError("the first batch has no elements; nothing was stored. Pass one or more")
        shape = self._shape_for(first[0]) if fresh else self._storage.batch_size
        where = resolve_target(cursor, data, shape=shape, ndim=self.ndim)
        if fresh:
            self._init(first[0], first[:_COPY_BATCH])
        length, last = self._len, self._last_cursor_index
        undo: Callable[[], None] | None = None
        try:
            if set_cursor and self._resume_cursor is not None and where.places[0] != self._resume_cursor:
                raise self._writer_error(where.places[0])
            may_cast = is_single_index(cursor) or is_slices(cursor)  # as torch does
            if not check_leaves(
                where,
                self._storage,
                self._columns,
                may_cast=may_cast,
                fixed_keys=self._describe_fixed_keys(),
                may_lack_keys=not set_cursor,
            ):
                undo = snapshot_rows(self._storage, where.cursor)
            small = where.data.exclude(*[key for column in self._columns for key in column.keys]).to("cpu")
            numbers = number_places(where.cursor, self._storage.shape)
            if self._marks is not None:
                self._marks.writing[where.places] = True
            for column in self._columns:
                images = {key: leaf for key in column.keys if (leaf := where.data.get(key, None)) is not None}
                if images:
                    column.put(column.expand(numbers, len(self._storage.shape)), images)
            super().set(where.cursor, small, set_cursor=set_cursor)
            # TorchRL adds the number of elements, although another buffer may have written to these places.
            per_row = self.max_size // len(self._storage)
            self._len = min(self._len, max(length, (int(where.places.max(initial=0)) + 1) * per_row))
        except BaseException:
            if undo is not None:
                undo()
            self._call_tables("roll_back")
            self._len = length
            self._set_last_cursor(last)
            if self._marks is not None:
                self._marks.writing[:] = False
            if fresh:
                self._uninitialize()
            raise
        self._mark_written(where.places)
        self._call_tables("commit")

    def _describe_fixed_keys(self) -> str:
        """Return why elements cannot have new keys, and what to do; an empty text if they can."""
        if self._folder is not None:
            return (
                "and the files in storage_dir have no room for it; nothing was stored. Use the same keys in all "
                "elements, or leave storage_dir out"
            )
        if self._is_shared:
            return (
                "and other processes would not see it; nothing was stored. Store an element with all keys before "
                "processes share the buffer: buffer.extend(data), then buffer.empty()"
            )
        return ""

    def get(self, index: Any) -> Any:
        """Return the elements at an index. Images of an element or a slice are decoded when they are used.

        :param index: an index; or a key, which returns that leaf of all elements
        """
        return self._get(index, by_sampler=is_sampler(sys._getframe(1)))

    __getitem__ = get

    @defer_signals
    def _get(self, index: Any, *, by_sampler: bool) -> Any:
        """Return the elements at an index.

        :param by_sampler: whether a sampler of TorchRL reads them
        """
        if is_key(index):
            return self.get(slice(None))[index]
        # TorchRL's samplers read whole elements, but use only flags and ids. They drop the elements before the buffer
        # can write, so images can be left encoded.
        lazy = by_sampler or is_view(index)
        if is_slices(index):
            refuse_setting_key()
        self._require_open()
        with self.lock:
            index = index_to_cpu(index)
            if not self.initialized:
                super().get(index)  # raises
            shape = (self._len_along_dim0, *self._storage.shape[1:])
            numbers = number_places(index, shape)
            if isinstance(index, torch.Tensor) and index.ndim and len(shape) == 1:
                rows = self._storage[numbers]  # TorchRL would take a slice of the elements first
            else:
                rows = super().get(index).copy()
            on_gpu = self._decode_on_gpu and self.device.type != "cpu" and not lazy
            if on_gpu:
                rows = rows.to(self.device)
            for column in self._columns:
                part = column.expand(numbers, len(shape))
                if lazy:
                    images: list[Any] = [FrameView(part, column, key, self) for key in column.keys]
                else:
                    images = column.decode(part, column.keys, decoder=self._decoder() if on_gpu else None)
                for key, image in zip(column.keys, images, strict=True):
                    rows.set(key, image)
        return rows if self.device.type == "cpu" else rows.to(self.device)

    def _decoder(self) -> GpuDecoder:
        if self._gpu_decoder is None or self._gpu_decoder.device != self.device:
            self._gpu_decoder = GpuDecoder(self.device)
        return self._gpu_decoder

    @defer_signals
    def _read_images(self, column: FrameColumn, key: Key, numbers: torch.Tensor) -> torch.Tensor:
        """Decode the images of a key that have these numbers."""
        self._require_open()
        with self.lock:
            return column.decode(numbers, [key], reuse_memory=False)[0]

    def _conditional_patch_leaf(self, key: Key) -> torch.Tensor:
        name = unravel_key(key)
        column = next((column for column in self._columns if name in column.keys), None)
        if column is None:
            leaf: torch.Tensor = super()._conditional_patch_leaf(key)
            return leaf
        numbers = number_places(slice(None), self._storage.shape)
        return FrameView(column.expand(numbers, len(self._storage.shape)), column, name, self)

    def _apply_conditional_patch(self, index: Any, patch: Any) -> None:
        places = tuple(index.unbind(-1)) if index.ndim > 1 else index
        self.set(
            places, TensorDict({unravel_key(key): part for key, part in patch.items()}, [len(index)]), set_cursor=False
        )

    def flatten(self) -> TensorStorage:
        """Return a storage of one dimension that is a view of this one."""
        return self if self.ndim == 1 else TensorStorage(self[:].flatten(0, self.ndim - 1))

    def _writer_error(self, place: int) -> InvalidArgumentError:
        """Return the error for a first element after loading that would leave a gap, or overwrite elements."""
        return InvalidArgumentError(
            f"{len(self)} elements were loaded into FrameStorage({self.max_size}), and the next one is for place "
            f"{self._resume_cursor}, got {place}, since the buffer's writer was saved when it was full, or cannot "
            f"continue. Use FrameStorage({len(self)}), leave out writer=, or load only the storage: "
            'buffer.storage.loads(path + "/storage")'
        )

    @defer_signals
    def _empty(self) -> None:
        self._require_open()
        with self.lock:
            super()._empty()
            self._empty_count += 1
            self._mark_written(np.zeros(0, dtype=np.int64))
            self._call_tables("clear")
            self._resume_cursor = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements.

        They exclude :attr:`recycled_nbytes`.
        """
        rows = int(self._storage[: self._len_along_dim0].bytes()) if self.initialized else 0
        return rows + sum(column.table.nbytes for column in self._columns)

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays of recent batches, which later batches of that size are decoded into."""
        return sum(column.recycled_nbytes for column in self._columns)

    # Recovery by other processes, or by a later one

    def _mark_written(self, places: Places) -> None:
        """Record that elements are complete."""
        if self._marks is not None and self._len_along_dim0 is not None:
            last = self._last_cursor_index
            self._marks.update(self._len_along_dim0, 0 if last is None or not len(self) else last + 1)
            self._marks.writing[places] = False

    def _recover(self, process_name: str) -> int:
        """Repair the elements after another process ended; return the place of the next element."""
        assert self._marks is not None
        drop_torn_elements(self._storage, self._columns, self._marks, process_name)
        length, next_row = self._marks.length, self._marks.next_row
        self._len = length * (self.max_size // len(self._storage))
        self._set_last_cursor((next_row - 1) % length if length else None)
        return next_row

    def _recover_after_kill(self, dead: int) -> None:
        """Repair the elements after the process ``dead`` was killed while it held the lock."""
        assert self._marks is not None
        self._call_tables("repair")
        if not self._marks.writing.any():
            _logger.warning("process %d was killed while it used a FrameStorage; no element is lost", dead)
        set_writer_cursor(self, self._recover(f"process {dead}"))
        self._call_tables("save")  # copies of elements are new entries
        self._bump_mutation_revision()

    @defer_signals
    def close(self) -> None:
        """Free all memory. A ``storage_dir`` can then be opened again, also by another process."""
        with self.lock:
            self._drop_contents()
            if self._folder is not None:
                self._folder.close()
            self._closed, self._len = True, 0

    # Other processes, copies and checkpoints

    @defer_signals
    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return self._shared_state()
        if self._folder is not None:
            raise NotCopyableError(
                f"a FrameStorage in {self._folder.path} cannot be pickled, because a folder belongs to one storage. "
                "Save a copy with storage.dumps(path)"
            )
        with self.lock:
            state: dict[str, Any] = super().__getstate__()
            del state["lock"], state["_columns"], state["_storage"]
            state.update(_marks=None, _is_shared=False)
            if self.initialized:
                rows, frames = self._contents()
                state["held"] = rows.clone(), deepcopy(frames), state.pop("len__context")
                state.update(initialized=False, len__context=0)
        return state

    def _shared_state(self) -> dict[str, Any]:
        """Return the state for a process that is being started, and that shares this storage."""
        if not self.initialized:
            raise NotCopyableError(
                "an empty FrameStorage cannot be shared with another process, because the shapes of its elements are "
                "not known yet. Add elements first: buffer.extend(data), or buffer.extend(data) and buffer.empty()"
            )
        if self._folder is not None:
            raise NotCopyableError(
                "a FrameStorage with storage_dir cannot be shared with another process. Leave storage_dir out, or save "
                "the elements with storage.dumps(path)"
            )
        for key, leaf in list_items(self._storage):
            if is_non_tensor(leaf):
                raise NotCopyableError(
                    f"a FrameStorage whose elements contain {key!r}, which is not a tensor, cannot be shared with "
                    f"another process, because it would not see changes. Leave it out: data.exclude({key!r})"
                )
        with self.lock:
            make_kill_safe(self)
            if not self._is_shared:
                for column in self._columns:
                    column.store_as_floats()
                    column.table.share()
                n_bytes = Marks.n_bytes(len(self._storage))
                self._marks, self._is_shared = Marks(MemoryFile(n_bytes)), True
                self._mark_written(np.zeros(0, dtype=np.int64))
                self._share()
            return super().__getstate__()

    @defer_signals
    def __setstate__(self, state: dict[str, Any]) -> None:
        contents, shared = state.pop("held", None), "lock" in state
        super().__setstate__(state if shared else {**state, "_storage": None, "_columns": []})
        if not shared:
            self.lock = ProcessLock()
            make_kill_safe(self)
        if self._is_shared:
            self._share()
        if contents is not None:
            self._replace_contents(*contents, is_copy=True)

    def _contents(self) -> tuple[Any, list[dict[str, Any]]]:
        """Return views of the elements, without images, and of the tables. The caller must hold the lock."""
        frames = [{**column.kind, "table": column.table.contents()} for column in self._columns]
        return self._storage[: self._len_along_dim0], frames

    @defer_signals
    def _replace_contents(self, rows: Any, frames: list[dict[str, Any]], length: int, *, is_copy: bool = False) -> None:
        """Replace all elements by those of another storage.

        :param rows: The elements, as returned by :meth:`_contents`.
        :param frames: The descriptions of the tables.
        :param length: Number of elements.
        :param is_copy: Whether the other storage has this storage's ``max_size`` and writers.
        :raises CorruptFileError: If the contents are damaged.
        :raises InvalidArgumentError: If they do not fit, or this storage has a folder or is shared.
        """
        if rows.ndim < self.ndim or len(rows) > self._shape_for(_example_row(rows))[0]:
            raise InvalidArgumentError(
                f"{length} elements of {rows.ndim} batch dimensions do not fit into FrameStorage({self.max_size}, "
                f"ndim={self.ndim}). Use the max_size and ndim of the storage that was saved"
            )
        if self._folder is not None:
            raise InvalidArgumentError(
                f"a FrameStorage in {self._folder.path} cannot be loaded into; leave out storage_dir, or add the "
                "elements: buffer.extend(other[:])"
            )
        rows = rows.to("cpu")
        with self.lock:
            if self._is_shared:
                raise InvalidArgumentError(
                    "a FrameStorage cannot be loaded while other processes share it; load it first, then share it"
                )
            with as_corrupt_file("the images are"):
                columns = [self._new_column(state, self._shape_for(_example_row(rows))[0]) for state in frames]
                for column, state in zip(columns, frames, strict=True):
                    column.table.restore(state["table"])
                    if not self._may_scale:
                        column.store_as_floats()
            self._allocate(_example_row(rows), columns)
            self._storage[: len(rows)] = rows
            self._len = length
            self._last_cursor = None
            if not is_copy:
                self._resume_cursor = len(rows) if len(rows) < len(self._storage) else None
                set_writer_cursor(self, len(rows) % len(self._storage))
            self._bump_mutation_revision()

    @defer_signals
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the contents, which stay compressed: the bytes that ``dumps`` writes, as a tensor.

        Only a ``FrameStorage`` can load it.
        """
        self._require_open()
        with self.lock:
            if not self.initialized:
                return {"initialized": False, "_len": 0}
            file = io.BytesIO()
            np.savez(file, *collect_contents(self))
            contents = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            return {"frame_storage": contents, "initialized": True, "_len": self._len}

    @defer_signals
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the contents by those in a state dictionary.

        :param state_dict: result of :meth:`state_dict`
        :raises CorruptFileError: If it is damaged.
        :raises InvalidArgumentError: If it contains more elements than fit, or belongs to another kind of storage.
        """
        self._require_open()
        if state_dict.get("frame_storage") is not None:
            with as_corrupt_file("this state is"):
                contents = read_contents(io.BytesIO(state_dict["frame_storage"].cpu().numpy()), "this state")
            self._replace_contents(*contents)
        elif state_dict.get("initialized"):
            raise InvalidArgumentError(
                "this is the state of another kind of storage than FrameStorage; load it into a storage of that kind, "
                "and add its elements: buffer.extend(other[:])"
            )
        elif self.initialized:
            self._empty()

    def _is_stored_in(self, path: str | os.PathLike[str]) -> bool:
        """Return whether ``path`` is the ``storage_dir`` of this storage."""
        return self._folder is not None and Path(path).absolute() == self._folder.path

    to_dataset = save_storage


def _example_row(rows: Any) -> Any:
    """Return the first element, or an element of zeros if there are none."""
    return rows[0] if len(rows) else rows.apply(lambda leaf: leaf.new_zeros(leaf.shape[1:]), batch_size=rows.shape[1:])
