"""Frame store: a ring of transitions whose frames are stored once each."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from operator import index
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, StorageError
from rl_ext_core.frames.checkpoint import FORMAT_VERSION, check_format, checksum, load, reduce_with_lock, save
from rl_ext_core.frames.codecs import block_length_of, check_codec, check_numba, describe_lossiness, validate_max_error
from rl_ext_core.frames.encoding import (
    COPY_BATCH,
    LAST_CHECK,
    LOSSY_AFTER,
    Encoding,
    EncodingOptions,
    detect_layout,
)
from rl_ext_core.frames.folder import MANIFEST, RowArrays, StoreFolder, as_corrupt_file
from rl_ext_core.frames.geometry import INTERLEAVED, PLANAR
from rl_ext_core.frames.journal import Journal
from rl_ext_core.frames.jpeg import DEFAULT_QUALITY
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.region import RegionFile, address_of

if TYPE_CHECKING:
    import torch

    from rl_ext_core.frames.gpu_decode import GpuDecoder
    from rl_ext_core.frames.pool import FramePool

_logger = logging.getLogger("rl_ext_core.frames")

_LEAST_BLOCKS = 2  # uncompressed blocks per environment that max_bytes must leave room for
_LOOK_BACK = 16  # newest transitions per environment that are used to detect the layout

Pairs = npt.NDArray[np.int64]


@functools.cache
def load_kernels(*, bounded: bool = False) -> None:
    """Import and compile the kernels. The first time takes seconds; Ctrl-C waits for the current kernel.

    :param bounded: Whether to compile the kernels for ``max_error`` too.
    :raises MissingDependencyError: If numba is not installed.
    """
    check_numba("A store of frames")
    _import_kernels()
    _call_kernels(0)
    if bounded:
        _call_kernels(1)


@defer_signals
def _import_kernels() -> None:
    """Import the kernels, without interruption by signals."""
    # numba cannot be imported again after its import was interrupted.
    from rl_ext_core.frames import pool  # noqa: F401


@defer_signals
def _call_kernels(max_error: int) -> None:
    """Call every kernel once, so that numba compiles it without interruption."""
    from rl_ext_core.frames.pool import FramePool

    layout = StackLayout((2, 4, 4), np.dtype(np.uint8), 2, 0)
    pool = FramePool(4, layout, streams=1, max_error=max_error)
    stacks = np.arange(4 * layout.stack_bytes, dtype=np.uint8).reshape(4, *layout.shape)
    stacks[2, 0] = stacks[1, 1]  # so that stacks[2] continues stacks[1]
    for row in range(2):
        pool.index[row] = pool.put_pairs(address_of(stacks[row:]), PLANAR, address_of(stacks[row + 1 :]), PLANAR)
        run_pending_handlers()
    place = np.zeros(1, dtype=np.int64)
    pool.get_pairs(place, place, stacks[2:3], stacks[3:], num_threads=1)
    run_pending_handlers()
    pool.release_pairs(pool.index[:1].reshape(-1))
    pool.free_stream_buffers()


class RecoveryReport(NamedTuple):
    """Transitions found in a ``storage_dir`` that was opened again, per environment.

    :ivar kept: Transitions in the store.
    :ivar lost: Transitions that were being written when the previous process was killed.
    :ivar overwritten: Older transitions that were lost because the lost ones had started to overwrite them.

    >>> store = FrameStore(1000, 1, layout, storage_dir="run1")  # doctest: +SKIP
    >>> store.recovered  # doctest: +SKIP
    RecoveryReport(kept=512, lost=1, overwritten=0)
    """

    kept: int
    lost: int
    overwritten: int


class FrameStore:
    """A ring buffer of transitions ``(observation, next observation)``, one of each environment per row.

    Each frame is stored once, although up to ``2 * n_stack`` stacks contain it. The store compares contents to detect
    shared frames. A stack that does not continue the one before is stored whole. Observations are returned bit for bit,
    unless ``max_error`` or the codec ``"jpeg"`` is used; ``repr`` shows these options.

    :param capacity: Transitions per environment. A full store overwrites the oldest one.
    :param n_envs: Number of environments.
    :param layout: How an observation is stacked. :meth:`adaptive` detects it.
    :param codec: ``"patch"`` (the default), ``"raw"`` or ``"jpeg"``.
    :param max_error: Maximum error per byte, for frames of dtype uint8 and the codec ``"patch"``; default 0, bit-exact.
    :param quality: JPEG quality, 1 to 100; for the codec ``"jpeg"`` only.
    :param max_bytes: Size limit of the store in bytes, index and row arrays included, or None. A store that exceeds it
        drops the oldest transitions, a block at a time. Then ``size`` shrinks, and their rows read as zeros. The stored
        transitions are the ``size`` rows from ``first`` on, around the ring.
    :param storage_dir: Folder for the frames, or None for memory. The frames may exceed the memory, and they outlive
        the process. A killed process loses the transition that it was adding. A machine that crashes may lose data that
        was not written to disk yet, which checksums detect. Only one process at a time can open the folder.
    :param options: Options to use once the layout is detected; see :meth:`adaptive`.
    :param resume: Whether to continue with the transitions in ``storage_dir``, and to set ``recovered``. The arguments
        must be those of the store that added them. Without it, a folder with transitions is refused. Default False.
    :ivar layout: Current layout of observations.
    :ivar codec: Name of the current codec.
    :ivar max_error: Current maximum error per byte.
    :ivar seen: Transitions per environment that this process has added or found.
    :ivar position: Row of the next transition.
    :ivar full: Whether all rows have been written.
    :ivar dropped: Number of dropped transitions whose rows have not been written again.
    :ivar recovered: Transitions found in ``storage_dir``, or None if it was new.
    :raises CorruptFileError: If a file in ``storage_dir`` is visibly damaged. Other damage is detected when the frames
        are read.
    :raises StorageError: If another process uses ``storage_dir``, or it cannot be created.

    >>> import numpy as np
    >>> from rl_ext_core.frames import FrameStore, StackLayout
    >>> store = FrameStore(100, 1, StackLayout((4, 84, 84), np.uint8, n_stack=4, axis=0))
    >>> observation = np.zeros((1, 4, 84, 84), np.uint8)
    >>> store.append(observation, observation)
    >>> store.size
    1
    """

    recovered: RecoveryReport | None
    _folder: StoreFolder | None
    _pool: FramePool
    layout: StackLayout
    codec: str
    max_error: int

    def __new__(
        cls, *args: Any, max_error: Any = 0, options: EncodingOptions | None = None, **kwargs: Any
    ) -> FrameStore:
        """Compile the kernels first, because ``__init__`` cannot be interrupted."""
        bounds = max_error, 0 if options is None else options.max_error
        load_kernels(bounded=any(isinstance(bound, int) and bound > 0 for bound in bounds))
        return super().__new__(cls)

    @defer_signals
    def __init__(
        self,
        capacity: int,
        n_envs: int,
        layout: StackLayout,
        *,
        codec: str = "patch",
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | StoreFolder | None = None,
        options: EncodingOptions | None = None,
        resume: bool = False,
    ) -> None:
        if resume and storage_dir is None:
            raise InvalidArgumentError("resume=True needs a folder. Pass storage_dir too, or leave resume out")
        if capacity < 1 or n_envs < 1:
            raise InvalidArgumentError(f"capacity={capacity}, n_envs={n_envs}: expected at least 1 for both")
        # Plain integers, because the pickles of NumPy's integers depend on the version of NumPy.
        self.capacity, self.n_envs = index(capacity), index(n_envs)
        self.max_bytes = max_bytes if max_bytes is None else index(max_bytes)
        check_codec(codec, quality=quality)
        encoding = Encoding(layout, codec, validate_max_error(max_error, codec=codec, dtype=layout.dtype), quality)
        self._options, self.seen = options, 0
        self._batch_shape = (self.n_envs, *layout.shape)
        # The kernels release the GIL, so without a lock a thread could read a block that another one is filling.
        self._lock = make_fork_safe_lock()
        self.position, self.full, self.dropped = 0, False, 0
        self._staged: Pairs | None = None  # stored frames that are not a transition yet
        self._unfinished = False  # in a folder, whether the owner may still write to the newest row
        self._was_full = False  # value of `full` before the newest transition
        self.recovered = None
        self._check_budget(encoding)
        if storage_dir is None or isinstance(storage_dir, StoreFolder):
            self._folder = storage_dir
        else:
            settings = self._requested_settings(encoding)
            self._folder = StoreFolder(storage_dir, settings, capacity=self.capacity, resume=resume)
        self._rows = RowArrays(self.capacity) if self._folder is None else self._folder.rows
        try:
            if self._folder is None:
                self._set_pool(self._new_pool(encoding))
            else:
                self._open_in_folder(self._folder, encoding)
                self.seen = self.size
        except BaseException:
            if self._folder is not None:
                self._folder.abandon()
            raise

    @classmethod
    def adaptive(
        cls,
        capacity: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str = "patch",
        n_stack: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> FrameStore:
        """Create a store that detects the frame stack from the data.

        It does so after 1, 2, 4, 8, ... and 4096 transitions, and stores the previous ones again if the result changes.
        A ``storage_dir`` remembers the result. A store with ``max_error`` or the codec ``"jpeg"`` stays exact for 64
        transitions, or until observations change; with ``n_stack`` it is lossy at once.

        :param capacity: Transitions per environment.
        :param n_envs: Number of environments.
        :param shape: Shape of one observation.
        :param dtype: Dtype of the observations.
        :param codec: ``"patch"`` (the default; frames below 512 bytes stay uncompressed), ``"raw"`` or ``"jpeg"``.
        :param n_stack: Frames per stack, or None to detect it.
        :param max_error: Maximum error per byte; default 0, bit-exact.
        :param quality: JPEG quality, 1 to 100; for the codec ``"jpeg"`` only.
        :param max_bytes: Size limit of the store in bytes, or None.
        :param storage_dir: Folder for the frames, or None for memory.
        :param resume: Whether to continue with the transitions in ``storage_dir``; default False.
        :return: The store.
        :raises InvalidArgumentError: If options exclude each other, or do not fit the observations.
        :raises InvalidTypeError: If an option or the dtype has the wrong type.
        """
        options = EncodingOptions.check(
            shape, dtype, codec=codec, n_stack=n_stack, max_error=max_error, quality=quality
        )
        first = options.encoding(exact=n_stack is None)._asdict()
        folder: dict[str, Any] = {"storage_dir": storage_dir, "resume": resume}
        return cls(capacity, n_envs, **first, max_bytes=max_bytes, options=options, **folder)

    def _set_pool(self, pool: FramePool) -> None:
        """Use a pool from now on."""
        layout = pool.layout
        self._pool, self.layout, self.codec, self.max_error = pool, layout, pool.codec, pool.max_error
        self._order = PLANAR if layout.planar else INTERLEAVED
        # VecTransposeImage returns views with these strides: channel-first over channel-last memory.
        channel_last = np.empty((self.n_envs, *layout.shape[1:], layout.shape[0]), dtype=layout.dtype)
        self._transposed = np.moveaxis(channel_last, -1, 1).strides if layout.planar else None

    def _new_pool(self, encoding: Encoding, file: RegionFile | None = None) -> FramePool:
        """Create a pool for the store's transitions, in memory or in a file."""
        from rl_ext_core.frames.pool import FramePool

        return FramePool(self.capacity, streams=self.n_envs, file=file, **encoding._asdict())

    def _requested_settings(self, encoding: Encoding) -> dict[str, Any]:
        """Return the requested options as plain values. The folder can be opened with the same options only."""
        if self._options is None:
            return self._settings(encoding)
        given = {"shape": list(map(int, encoding.layout.shape)), "dtype": encoding.layout.dtype.str}
        return {"capacity": self.capacity, "n_envs": self.n_envs, **given, **self._options.requested}

    def _settings(self, encoding: Encoding) -> dict[str, Any]:
        """Return the settings that determine how frames are stored, as plain values."""
        layout = encoding.layout
        return {
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "layout": [list(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)],
            "codec": encoding.codec,
            **({"max_error": encoding.max_error} if encoding.max_error else {}),
            **({"quality": encoding.quality} if encoding.codec == "jpeg" else {}),
        }

    def _check_budget(self, encoding: Encoding) -> None:
        """Raise if ``max_bytes`` is less than the open blocks may take."""
        if self.max_bytes is None:
            return
        layout = encoding.layout
        stack = layout.stack_bytes + layout.frame_bytes
        n_frames = _LEAST_BLOCKS * block_length_of(layout, encoding.codec)
        least = (stack + n_frames * layout.frame_bytes) * self.n_envs
        if self.max_bytes < least:
            raise InvalidArgumentError(
                f"max_bytes={self.max_bytes:,} is too little for n_envs={self.n_envs} and observations of shape "
                f"{layout.shape}, whose open blocks take up to {least:,} bytes; pass at least that"
            )

    def _open_in_folder(self, folder: StoreFolder, encoding: Encoding) -> None:
        """Create the store's files in an empty folder, or resume the store in it."""
        if folder.settings is None:
            self._set_pool(self._new_pool(encoding, folder.frames()))
            folder.begin(self._settings(encoding))
        else:
            encoding = encoding if self._options is None else read_settings(folder)[2]
            self._set_pool(self._new_pool(encoding, folder.frames()))
            self._resume(folder)
        folder.files.complete, folder.files.lock = _complete_newest, self._lock

    def _resume(self, folder: StoreFolder) -> None:
        """Continue with the transitions in the folder.

        :raises CorruptFileError: If a checksum does not match.
        """
        from rl_ext_core.frames.recovery import recover_pairs

        torn = self._seek_end(folder)
        overwritten = int(torn and self.full and not self.dropped)
        self.dropped += overwritten  # the oldest transition was in the row that was being written
        self._rows.reserve(self.n_written)
        self._pool.reserve_rows(self.n_written)
        counted, n_written = self.size, self.n_written
        if folder.repair:
            self._keep_longest_run()
        rows = self._stored_rows()
        for files, corrupt_rows in (
            ("row-*", self._rows.corrupt_rows(rows)),
            ("frames-*", self._pool.corrupt_rows(rows)),
        ):
            if len(corrupt_rows):
                message = f"the checksums of {len(corrupt_rows)} of {len(rows)} rows do not match"
                raise folder.corrupt_file_error(files, message)
        if lost := np.count_nonzero(~recover_pairs(self._pool, rows)):
            message = f"{lost} of {len(rows)} transitions refer to frames that do not exist"
            raise folder.corrupt_file_error(folder.frames().path.name, message)
        others = np.ones(max(n_written, self._pool.reserved_rows), dtype=np.bool_)
        others[rows] = False
        self._pool.index[: len(others)][others] = 0
        self.recovered = RecoveryReport(self.size, counted - self.size if folder.repair else int(torn), overwritten)
        self._write_journal()
        if not folder.repair:
            _logger.log(
                logging.WARNING if torn else logging.INFO,
                "%s: transitions per environment: recovered %d, lost %d that were being written when the previous "
                "process was killed, lost %d older ones that these had started to overwrite",
                folder.path,
                *self.recovered,
            )

    def _seek_end(self, folder: StoreFolder) -> bool:
        """Set the position of the next transition.

        :return: Whether a transition was being added when the previous process ended.
        """
        index = self._pool.index
        record, _ = folder.read_journal(lambda: None if index[-1].any() else int(np.count_nonzero(index.any(axis=1))))
        self.full, self.position = record.n_written == self.capacity, record.next_row % self.capacity
        self.dropped = self.n_written - record.length
        return bool(record.exposed)

    def _keep_longest_run(self) -> None:
        """Drop all rows except the longest run of intact ones."""
        from rl_ext_core.frames.recovery import find_readable_pairs

        rows = self._stored_rows()
        good = ~np.isin(rows, np.concatenate([self._rows.corrupt_rows(rows), self._pool.corrupt_rows(rows)]))
        self._pool.index[rows[~good]] = 0
        good &= find_readable_pairs(self._pool, rows)
        start, stop = longest_run(good)
        end = int(rows[0] + stop) if len(rows) else 0
        self.position = end % self.capacity if self.full else end
        self.dropped = self.n_written - (stop - start)

    def _stored_rows(self) -> Pairs:
        """Return the rows of the stored transitions, oldest first."""
        return (self.first + np.arange(self.size)) % self.capacity

    @property
    def encoding(self) -> Encoding:
        """Current encoding of transitions."""
        return self._pool.encoding

    @property
    def options(self) -> dict[str, Any]:
        """Requested options: codec, stack size, and limits of loss."""
        if self._options is not None:
            return self._options.requested
        loss = {"quality": self._pool.quality} if self.codec == "jpeg" else {}
        bound = {"max_error": self.max_error} if self.max_error else {}
        return {"codec": self.codec, "n_stack": self.layout.n_stack, **bound, **loss}

    @property
    def lossy(self) -> bool:
        """Whether returned observations may differ from the stored ones, now or later."""
        return self._pool.lossy or (self._options is not None and bool(self._options.lossy))

    def __repr__(self) -> str:
        layout, options = self.layout, self.options
        return (
            f"{type(self).__name__}({self.capacity} x {self.n_envs} transitions of {layout.shape} {layout.dtype}, "
            f"codec={options['codec']!r}, {describe_lossiness(options)})"
        )

    @property
    def closed(self) -> bool:
        """Whether ``storage_dir`` was released, so that the store cannot be used."""
        return self._folder is not None and self._folder.closed

    @property
    def row_names(self) -> set[str]:
        """Names of all row arrays, also of those in ``storage_dir`` that were not requested."""
        return {name for name in self._rows.arrays if name}

    @property
    def n_written(self) -> int:
        """Number of rows that have ever been written."""
        return self.capacity if self.full else self.position

    @property
    def size(self) -> int:
        """Number of stored transitions per environment."""
        return self.n_written - self.dropped

    @property
    def first(self) -> int:
        """Row of the oldest stored transition. The others follow it around the ring."""
        return ((self.position if self.full else 0) + self.dropped) % self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes in use by frames, index and row arrays, in memory or in files."""
        # With max_bytes, free memory does not count: it is reused first, and long free runs are returned to the system.
        frames = self._pool.nbytes if self.max_bytes is None else self._pool.used_nbytes
        return frames + self._pool.index[: self.n_written].nbytes + self._rows.nbytes(self.n_written)

    @property
    def stored_fraction(self) -> float:
        """Average stored size of a frame as a fraction of its raw size."""
        return self._pool.stored_fraction

    @defer_signals
    def append(
        self,
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic],
        *,
        row: int | None = None,
    ) -> None:
        """Store one transition of each environment. A full store overwrites the oldest one.

        An exception leaves the store as it was.

        :param observations: Shape ``(n_envs, *layout.shape)``, of the layout's dtype.
        :param next_observations: Same shape and dtype.
        :param row: Row to write to, or None for the next one. A caller that was interrupted after this call passes the
            same row again, and replaces its transition.
        :raises InvalidArgumentError: If a shape is wrong, or the row does not exist.
        :raises InvalidTypeError: If a dtype cannot be converted without loss.
        :raises OutOfMemoryError: If there is not enough memory.
        :raises StorageError: If the disk is full.
        """
        with self._lock:
            row = self._resolve_row(row)
            self._advance(row, self._stage(observations, next_observations, row))

    @defer_signals
    def stage(self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]) -> Pairs:
        """Store the frames of a transition without adding the transition: the part of :meth:`append` that may fail.

        If several stores must stay equal, stage the transition in all of them before the first commits it.

        :param observations: Shape ``(n_envs, *layout.shape)``, of the layout's dtype.
        :param next_observations: Same shape and dtype.
        :return: Argument for :meth:`commit`, valid until the next call.
        """
        with self._lock:
            return self._stage(observations, next_observations, self.position)

    def _stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic], row: int
    ) -> Pairs:
        """Check and store the frames of a transition, instead of those that were staged before."""
        stacks, order = self._validate_stacks(observations, name="obs")
        nexts, next_order = self._validate_stacks(next_observations, name="next_obs")
        if self._folder is not None:
            self._folder.check_writer()
            self._pool.reserve_rows(row + 1)
            self._rows.reserve(row + 1)
        if self._staged is not None:
            self._pool.release_pairs(self._staged)
            self._staged = None
        self._staged = self._pool.put_pairs(address_of(stacks), order, address_of(nexts), next_order)
        return self._staged

    def _validate_stacks(self, stacks: npt.NDArray[np.generic], *, name: str) -> tuple[npt.NDArray[np.generic], int]:
        """Check a batch of stacks, and copy it if the kernels cannot read its memory order.

        :param stacks: Shape ``(n_envs, *layout.shape)``. Views made by ``VecTransposeImage`` are not copied.
        :param name: Argument name for error messages.
        :return: The batch, and its memory order, PLANAR or INTERLEAVED.
        :raises InvalidTypeError: If the dtype cannot be converted without loss.
        :raises InvalidArgumentError: If the shape is wrong.
        """
        layout = self.layout
        stacks = np.asarray(stacks)
        if stacks.shape != self._batch_shape:
            raise InvalidArgumentError(
                f"{name} has shape {stacks.shape}, expected {self._batch_shape}: (number of environments, "
                "*observation shape). Nothing was stored."
            )
        if stacks.dtype != layout.dtype:
            if not np.can_cast(stacks.dtype, layout.dtype, "safe"):
                raise InvalidTypeError(
                    f"{name} has dtype {stacks.dtype}, which cannot be converted to {layout.dtype} without loss. "
                    f"Nothing was stored. To convert it all the same, use {name}.astype(np.{layout.dtype})."
                )
            stacks = stacks.astype(layout.dtype)
        if stacks.flags.c_contiguous:
            return stacks, self._order
        if stacks.strides == self._transposed:
            return stacks, INTERLEAVED
        return np.ascontiguousarray(stacks), self._order

    @defer_signals
    def commit(self, staged: Pairs, *, row: int | None = None) -> None:
        """Add a staged transition. A full store overwrites the oldest one.

        :param staged: Result of :meth:`stage`.
        :param row: Row to write to, or None for the next one.
        """
        with self._lock:
            self._advance(self._resolve_row(row), staged)

    def _resolve_row(self, row: int | None) -> int:
        """Return the row to write to, by default the next one; raise if it cannot be written."""
        if row is None:
            return self.position
        if not 0 <= row < self.capacity:
            raise InvalidArgumentError(f"row={row}: there are rows 0 to {self.capacity - 1}. Nothing was stored")
        if self._folder is not None and row not in (self.position, (self.position - 1) % self.capacity):
            raise InvalidArgumentError(
                f"row={row}: with storage_dir, transitions are stored one after the other; expected row {self.position}"
            )
        return index(row)  # a plain integer, because pickles of NumPy's depend on its version

    def _advance(self, row: int, pairs: Pairs) -> None:
        """Write a transition into a row. It becomes the newest one, unless an older row in memory is replaced."""
        older = self._folder is None and (row < self.position or (self.full and row != self.position))
        if self._folder is not None:
            self._begin_row(row)
        if self.full and self.dropped and row == self.position:
            self.dropped -= 1  # its row is in use again
        index = self._pool.index
        if self.full or row < self.position:
            self._pool.release_pairs(index[row])
        index[row] = pairs
        self._staged = None
        self._pool.update_row_checksum(row)
        if older:
            return
        self.position = row + 1
        if self.position == self.capacity:
            self.position, self.full = 0, True
        self._unfinished = self._folder is not None
        if self.max_bytes is not None:
            self._enforce_max_bytes(self.max_bytes)
        self.seen += 1
        if self._options is not None and self.seen <= LAST_CHECK and self.seen & (self.seen - 1) == 0:
            self._update_layout(self._options)

    def _update_layout(self, options: EncodingOptions) -> None:
        """Store the transitions again if another layout suits them better, or if they may become lossy."""
        if options.n_stack is not None or self._pool.lossy:
            return
        if self.position not in (0, self.size) or self.dropped:
            return  # _copy_transitions() needs the oldest transition in the first row
        # The new transition is stored already, so a failure only means that the encoding stays.
        with contextlib.suppress(MemoryError, StorageError):
            found = self._detect_layout()
            exact = self.seen < (LAST_CHECK if found is None else LOSSY_AFTER)
            encoding = options.encoding(found or self.layout, exact=exact)
            if encoding == self.encoding:
                return
            self._switch_encoding(encoding)
            message = "observations of shape %s: frames per stack: %d, codec: %r"
            _logger.info(message, self.layout.shape, self.layout.n_stack, self.codec)
            if self.max_bytes is not None:
                self._enforce_max_bytes(self.max_bytes)

    def _detect_layout(self) -> StackLayout | None:
        """Detect the layout of the newest observations; return None if they do not change."""
        before, after = self.transitions(np.arange(max(self.size - _LOOK_BACK, 0), self.size))
        # In a rollout, the next observations are those of the next row.
        return detect_layout(self.layout, before, after) or detect_layout(
            self.layout, before[: -self.n_envs], before[self.n_envs :]
        )

    def _switch_encoding(self, encoding: Encoding) -> None:
        """Store all transitions in another encoding. An exception leaves the old encoding in use."""
        if (folder := self._folder) is None:
            return self._set_pool(self._copy_transitions(encoding))
        try:
            pool = self._copy_transitions(encoding, folder.frames(next_generation=True))
            folder.begin(self._settings(encoding), next_generation=True)
        except BaseException:
            with contextlib.suppress(StorageError):
                folder.frames(next_generation=True)  # deletes the incomplete file
            raise
        self._set_pool(pool)
        folder.delete_old_frames()  # Windows could not delete files that were still mapped

    def _copy_transitions(self, encoding: Encoding, file: RegionFile | None = None) -> FramePool:
        """Copy all transitions into a pool with another encoding. The ring must not have wrapped."""
        pool = self._new_pool(encoding, file)
        order = PLANAR if encoding.layout.planar else INTERLEAVED
        for start in range(0, self.size, COPY_BATCH):
            rows = np.arange(start, min(start + COPY_BATCH, self.size))
            pool.reserve_rows(int(rows[-1]) + 1)
            before, after = (part.reshape(len(rows), *self._batch_shape) for part in self.transitions(rows))
            for row, stacks, nexts in zip(rows.tolist(), before, after, strict=True):
                pool.index[row] = pool.put_pairs(address_of(stacks), order, address_of(nexts), order)
                pool.update_row_checksum(row)
        return pool

    def transitions(self, rows: Pairs) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """Return observations and next observations of all environments, row by row.

        :param rows: Positions in the ring, shape ``(n,)``.
        :return: Two arrays of shape ``(n * n_envs, *layout.shape)``.
        """
        grid = np.repeat(rows, self.n_envs), np.tile(np.arange(self.n_envs), len(rows))
        before, after = (np.empty((len(grid[0]), *self.layout.shape), dtype=self.layout.dtype) for _ in range(2))
        self.get(*grid, before, after)
        return before, after

    def _begin_row(self, row: int) -> None:
        """Record in the journal that a row is being written, and that all before it are complete."""
        if row != self.position:  # the newest transition is replaced, so it does not count until then
            self._drop_newest(1)
        self._finish_newest()
        self._write_journal(writing=True)
        self._was_full = self.full

    def _finish_newest(self) -> None:
        """Update the checksum of the newest row, if it may have changed."""
        if self._unfinished:
            self._checksum_newest()
        self._unfinished = False

    def _checksum_newest(self) -> None:
        """Update the checksum of the newest row."""
        self._rows.update_checksums(np.array([(self.position - 1) % self.capacity]))

    def _write_journal(self, *, writing: bool = False) -> None:
        """Record which transitions are complete. The newest one is not while its row may be incomplete."""
        assert self._folder is not None
        assert self._folder.journal is not None
        length, next_row, n_written = self.size, self.position, self.n_written
        if self._unfinished:
            length, next_row = length - 1, (next_row - 1) % self.capacity
            n_written = self.capacity if self._was_full else next_row
        self._folder.journal.write_all(
            length=length, next_row=next_row, n_written=n_written, exposed=writing or self._unfinished
        )

    @defer_signals
    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic] | None,
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Decode a batch of transitions into arrays.

        :param rows: ``int64`` positions in the ring, shape ``(batch,)``. A row that was never written gives zeros.
        :param envs: ``int64`` environments, shape ``(batch,)``.
        :param observations: Output, C-contiguous, shape ``(batch, *layout.shape)``, of the layout's dtype; or None.
        :param next_observations: Output for the next observations, of the same shape and dtype, or None.
        :param num_threads: Threads to decode in; default 1.
        :raises InvalidArgumentError: If a row or environment does not exist, or an output has the wrong form.
        :raises CorruptFileError: If a frame in ``storage_dir`` is damaged.
        """
        with self._lock:
            if self._folder is not None:
                self._folder.check_open()
            # HER passes strided arrays, for which the kernels would be compiled once more.
            rows, envs = (places if places.flags.carray else places.copy() for places in (rows, envs))
            for out in (observations, next_observations):
                if out is not None:
                    self._pool.check_output(out, len(rows))
            if not _are_places(rows, envs) or not self._pool.get_pairs(
                rows, envs, observations, next_observations, num_threads=num_threads
            ):
                raise self._places_error(rows, envs)

    def get_on_gpu(
        self, rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], decoder: GpuDecoder
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Decode a batch of transitions on a GPU.

        :param rows, envs: See :meth:`get`.
        :param decoder: Decoder for the GPU.
        :return: Observations and next observations, tensors on the GPU of shape ``(batch, *layout.shape)``; None if the
            decoder cannot decode the current codec.
        :raises InvalidArgumentError: If a row or environment does not exist.
        :raises CorruptFileError: If a frame in ``storage_dir`` is damaged.
        """
        with self._lock:
            if not decoder.can_decode(self._pool):
                return None
            both = np.concatenate(self.handles(rows, envs))
            stacks = decoder.decode(self._pool, both)  # type: ignore[attr-defined]  # never called, until FrameStore is deleted
        return stacks[: len(rows)], stacks[len(rows) :]

    def _places_error(self, rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64]) -> InvalidArgumentError:
        """Return the error for rows or environments that do not exist."""
        return InvalidArgumentError(
            f"rows={rows!r}, envs={envs!r}: expected two int64 arrays of the same length, with rows from 0 to "
            f"{self.capacity - 1} and envs from 0 to {self.n_envs - 1}"
        )

    @defer_signals
    def handles(
        self, rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return handles of transitions for :meth:`get_stacks`. They are valid until the store changes.

        Equal handles refer to the same stored frames. A next observation and an equal observation in the next row have
        the same handle, with three exceptions. The later one was stored after a failed :meth:`append`, in another
        memory order, or by another process.

        :param rows: ``int64`` positions in the ring, contiguous, shape ``(batch,)``.
        :param envs: ``int64`` environments, contiguous, shape ``(batch,)``.
        :return: Handles of the observations and of the next observations, both ``int64`` of shape ``(batch,)``; 0 for
            a row without a transition.
        :raises InvalidArgumentError: If a row or environment does not exist.
        """
        with self._lock:
            if self._folder is not None:
                self._folder.check_open()
            handles = self._pool.handles_of_pairs(rows, envs) if _are_places(rows, envs) else None
            if handles is None:
                raise self._places_error(rows, envs)
            return handles

    @defer_signals
    def get_stacks(
        self,
        handles: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic],
        next_handles: npt.NDArray[np.int64] | None = None,
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Decode observations by their handles. Handle 0 gives zeros.

        :param handles: Handles that :meth:`handles` returned, shape ``(batch,)``.
        :param observations: Output, C-contiguous, shape ``(batch, *layout.shape)``, of the layout's dtype.
        :param next_handles: Handles of the next observations, shape ``(batch,)``, or None.
        :param next_observations: Output for the next observations, or None.
        :param num_threads: Threads to decode in; default 1.
        :raises InvalidArgumentError: If a handle refers to no stored frames, or an output has the wrong form.
        :raises CorruptFileError: If a frame in ``storage_dir`` is damaged.
        """
        with self._lock:
            if self._folder is not None:
                self._folder.check_open()
            self._pool.get(handles, observations, next_handles, next_observations, num_threads=num_threads)

    @defer_signals
    def drop_oldest(self, count: int) -> None:
        """Drop the oldest transitions. Their rows read as zeros then.

        :param count: Number of transitions per environment.
        :raises InvalidArgumentError: If the store contains fewer.
        """
        with self._lock:
            if count := self._check_count(count):
                self._drop_oldest(count)

    def _check_count(self, count: int) -> int:
        """Return the count as an int; raise if fewer transitions are stored."""
        if not 0 <= count <= self.size:
            raise InvalidArgumentError(f"count={count}: expected 0 to {self.size}, the number of stored transitions")
        return index(count)  # see _resolve_row

    def _drop_oldest(self, count: int) -> None:
        """Drop the oldest transitions, after the count was checked."""
        rows = (self.first + np.arange(count)) % self.capacity
        self.dropped += count
        self._free_rows(rows)

    def _free_rows(self, rows: Pairs) -> None:
        """Free the transitions in rows that were dropped."""
        if self._folder is not None:
            self._write_journal()
        self._pool.release_pairs(self._pool.index[rows].reshape(-1))
        self._pool.index[rows] = 0
        if self.max_bytes is not None:
            self._pool.trim()

    def _enforce_max_bytes(self, max_bytes: int) -> None:
        """Drop the oldest transitions until the store takes at most ``max_bytes``."""
        while self.nbytes > max_bytes and self.size > 1:
            self._drop_oldest(min(self._pool.block_length, self.size - 1))

    @defer_signals
    def drop_newest(self, count: int) -> None:
        """Drop the newest transitions, so that several stores contain the same ones.

        :param count: Number of transitions per environment.
        :raises InvalidArgumentError: If the store contains fewer.
        """
        with self._lock:
            if count := self._check_count(count):
                self._drop_newest(count)

    def _drop_newest(self, count: int) -> None:
        """Drop the newest transitions, after the count was checked."""
        rows = (self.position - 1 - np.arange(count)) % self.capacity
        if self.full:
            # The rows after the new end count as the oldest ones, which are dropped.
            self.position = (self.position - count) % self.capacity
            self.dropped += count
        else:
            self.position -= count
        self._unfinished = False
        self._free_rows(rows)

    @defer_signals
    def clear(self) -> None:
        """Delete all transitions and free their memory."""
        with self._lock:
            self.position, self.full, self.dropped, self._unfinished = 0, False, 0, False
            if self._folder is not None:
                self._folder.check_writer()
                self._write_journal()
            self._pool.clear()
            self._staged = None

    @defer_signals
    def free_stream_buffers(self) -> None:
        """Free the buffers for the next transitions, which take most of the memory of a small store.

        Transitions that are added later share no frames with the stored ones.
        """
        with self._lock:
            self._pool.free_stream_buffers()

    @defer_signals
    def rows(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, mutable: bool = False
    ) -> npt.NDArray[Any]:
        """Return an array for the caller's own data, with one row per transition: actions, rewards, flags.

        With ``storage_dir`` it is a mapped file, which is found again with the transitions. Otherwise it is in memory.
        Create all row arrays before the first transition is added. Write to row ``i`` after the transition in row ``i``
        was added, and before the next one is. For later changes see :meth:`update_newest_checksum`.

        :param name: Name of the array: letters, digits, ``_``, ``-`` and ``.``.
        :param shape: Shape of one row.
        :param dtype: Dtype of the array.
        :param mutable: Whether you write to any row at any time, default False. Such an array has no checksums, and
            may be created after transitions were added.
        :return: Zeros of shape ``(capacity, *shape)`` at first; the same array for the same name.
        :raises InvalidArgumentError: If the array exists with another shape or dtype, or, with ``storage_dir``, if
            transitions were added before.
        :raises StorageError: If the disk is full.
        """
        with self._lock:
            if self._folder is not None:
                return self._folder.array(name, shape, dtype, n_written=self.n_written, mutable=mutable)
            if self._rows.get(name, shape, dtype) is None:
                self._rows.add(name, {name: (tuple(shape), np.dtype(dtype))})
            return self._rows.arrays[name]

    @defer_signals
    def update_newest_checksum(self) -> None:
        """Update the checksum of the newest row. Call this after you write to the row again after :meth:`flush`."""
        if self._folder is not None:
            with self._lock:
                if self.size and not self._unfinished:
                    self._checksum_newest()

    @defer_signals
    def flush(self) -> None:
        """Complete the newest transition in ``storage_dir``, so that it survives the process.

        Without ``storage_dir``, do nothing, because the memory ends with the process.
        """
        if self._folder is not None:
            self._folder.check_writer()
            with self._lock:
                self._finish_newest()
                self._write_journal()

    @defer_signals
    def close(self) -> None:
        """Flush, and release ``storage_dir`` to other processes. A closed store cannot be read.

        Without ``storage_dir``, do nothing, because there is nothing to release.
        """
        folder = self._folder
        if folder is None or folder.closed:
            return
        with self._lock:
            folder.close()
            self._unfinished = False

    @defer_signals
    def save(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Write the store to a file, without a copy in memory. Row arrays are not included.

        :param file: Path, which is replaced after all is written, or a file opened for writing bytes.
        :raises StorageError: If the file cannot be written. An existing file stays as it was.
        """
        save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | BinaryIO) -> FrameStore:
        """Load a store from a file that :meth:`save` wrote, into memory.

        :param file: Path, or a file opened for reading bytes.
        :return: The store.
        :raises CorruptFileError: If the file is damaged, cut short, has another format, or contains something else.
        """
        return load(cls, file)

    def __copy__(self) -> FrameStore:
        return copy.deepcopy(self)  # because two stores must not write to the same memory

    @defer_signals
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_with_lock(self._lock, lambda: super(FrameStore, self).__reduce_ex__(protocol))

    def __getstate__(self) -> dict[str, Any]:
        """Return numbers, a checksum, and views of arrays, which pickle protocol 5 writes without a copy."""
        state = {
            "format": FORMAT_VERSION,
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            **({} if self.max_bytes is None else {"max_bytes": self.max_bytes}),
            "position": self.position,
            "full": self.full,
            "dropped": self.dropped,
            **({} if self._options is None else {"asked": self._options.requested}),
            "index": self._pool.index[: self.n_written],
            "frames": self._pool.state_dict(),
        }
        return {**state, "checksum": _state_checksum(state)}

    def __setstate__(self, state: Any) -> None:
        """Restore the store.

        :raises CorruptFileError: If the state is damaged or has another format.
        :raises MissingDependencyError: If the codec needs a package that is not installed.
        """
        check_format(state)
        if _state_checksum(state) != state.get("checksum"):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        from rl_ext_core.frames.pool import check_state_dict

        frames, asked = state["frames"], state.get("asked")
        check_state_dict(frames)
        shape, dtype, n_stack, axis = frames["layout"]
        self.__init__(  # type: ignore[misc]
            state["capacity"],
            state["n_envs"],
            StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis),
            codec=frames["codec"],
            max_error=frames["max_error"],
            quality=frames["quality"],
            max_bytes=state.get("max_bytes"),
            options=None if asked is None else EncodingOptions.check(tuple(shape), dtype, **asked),
        )
        self.position, self.full, self.dropped = state["position"], state["full"], state["dropped"]
        self._pool.load_state_dict(frames)
        self._pool.index[: self.n_written] = state["index"]
        self.seen = self.size


def _are_places(rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64]) -> bool:
    """Return whether rows and environments are int64 vectors of the same length."""
    return bool(rows.dtype == envs.dtype == np.int64 and rows.shape == envs.shape == (rows.size,))


def _state_checksum(state: dict[str, Any]) -> int:
    """Return a checksum of a pickled store's state, apart from frames."""
    frames = state.get("frames")  # which have their own checksum
    return checksum({**state, "frames": frames.get("checksum") if isinstance(frames, dict) else None})


def _complete_newest(rows: RowArrays, journal: Journal) -> None:
    """Complete the newest transition, which its owner can no longer change, and flush the journal."""
    record, _ = journal.read()
    if record.exposed and record.next_row < rows.n_rows:
        rows.update_checksums(np.array([record.next_row]))
        end = record.next_row + 1
        n_written = max(record.n_written, end)
        length = min(record.length + 1, n_written)
        journal.write_all(length=length, next_row=end % rows.n_rows, n_written=n_written, exposed=False)
    journal.flush()


class SalvageReport(NamedTuple):
    """Transitions that :func:`salvage` kept and lost, per environment.

    :ivar kept: Transitions that are intact.
    :ivar lost: Transitions that were complete and are deleted.

    >>> from rl_ext_core.frames import salvage
    >>> salvage("run1")  # doctest: +SKIP
    SalvageReport(kept=498, lost=14)
    """

    kept: int
    lost: int


def salvage(storage_dir: str | os.PathLike[str]) -> SalvageReport:
    """Repair a damaged ``storage_dir``: keep the longest run of intact transitions, and delete the others.

    All files are read. If in doubt, copy the folder first.

    :param storage_dir: Folder of a store.
    :return: Number of kept and lost transitions per environment.
    :raises InvalidArgumentError: If the folder contains no store.
    :raises CorruptFileError: If nothing can be read.
    :raises StorageError: If another process uses the folder.
    """
    folder = StoreFolder(storage_dir, {}, repair=True)
    try:
        capacity, n_envs, encoding = read_settings(folder)
        store = FrameStore(capacity, n_envs, **encoding._asdict(), storage_dir=folder)
        found = SalvageReport(*store.recovered[:2])  # type: ignore[index]
        store.close()
    finally:
        folder.close()
    _logger.warning("%s: transitions per environment: kept %d, deleted %d", folder.path, *found)
    return found


def read_settings(folder: StoreFolder) -> tuple[int, int, Encoding]:
    """Read the capacity, the number of environments and the encoding of a folder."""
    with as_corrupt_file(f"{folder.path / MANIFEST} is"):
        found = dict(folder.settings or {})
        shape, dtype, n_stack, axis = found.pop("layout")
        layout = StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis)
        return found.pop("capacity"), found.pop("n_envs"), Encoding(layout, **found)


def longest_run(good: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Find the longest run of True; the last one of equally long runs.

    :param good: Boolean array, shape ``(n,)``.
    :return: Start and stop of the run; both 0 if there is none.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = len(lengths) - 1 - int(lengths[::-1].argmax())
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
