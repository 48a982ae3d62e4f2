"""The frame store: every single frame once, transitions as references to frames."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import os
import weakref
from operator import index
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import run_pending_handlers, defer_signals
from rl_ext_core._system import make_fork_safe_lock
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, StorageError
from rl_ext_core.frames.arrays import MOST_PLACES
from rl_ext_core.frames.auto import COPY_BATCH, LAST_CHECK, Encoding, EncodingChooser
from rl_ext_core.frames.checkpoint import FORMAT_VERSION, check_format, checksum, load, reduce_with_lock, save
from rl_ext_core.frames.codecs import (
    DEFAULT_QUALITY,
    Codec,
    check_numba,
    resolve_block_length,
    validate_max_error,
    get_codec,
    describe_lossiness,
)
from rl_ext_core.frames.folder import MANIFEST, RowArrays, StoreFolder, as_corrupt_file
from rl_ext_core.frames.geometry import INTERLEAVED, PLANAR
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.region import RegionFile, address_of

if TYPE_CHECKING:
    from rl_ext_core.frames.pool import FramePool

_logger = logging.getLogger("rl_ext_core.frames")

_LEAST_BLOCKS = 2  # an environment, of noise, that a budget has to be enough for

_open_stores: weakref.WeakSet[FrameStore] = weakref.WeakSet()

Pairs = npt.NDArray[np.int64]


@functools.cache
def load_kernels(*, bounded: bool = False) -> None:
    """Imports and compiles the hot loops: it takes seconds, once, in which Ctrl-C waits for the end of a loop.

    :param bounded: whether those for ``max_error`` will be wanted too.
    :raises MissingDependencyError: if numba is not installed.
    """
    check_numba("A store of frames")
    _import_kernels()
    _call_kernels(0)
    if bounded:
        _call_kernels(1)


@defer_signals
def _import_kernels() -> None:
    # Where its import was interrupted, numba cannot be imported again.
    from rl_ext_core.frames import pool  # noqa: F401


@defer_signals
def _call_kernels(max_error: int) -> None:
    """Calls every kernel once. Numba does not compile any more in a process where compiling was interrupted."""
    from rl_ext_core.frames.pool import FramePool

    layout = StackLayout((2, 4, 4), np.dtype(np.uint8), 2, 0)
    pool = FramePool(4, layout, block_length=1, streams=1, max_error=max_error)
    stacks = np.arange(4 * layout.stack_bytes, dtype=np.uint8).reshape(4, *layout.shape)
    stacks[2, 0] = stacks[1, 1]  # its second frame is all that is new
    for row in range(2):
        pool.index[row] = pool.put_pairs(address_of(stacks[row:]), PLANAR, address_of(stacks[row + 1 :]), PLANAR)
        run_pending_handlers()
    place = np.zeros(1, dtype=np.int64)
    pool.get_pairs(place, place, stacks[2:3], stacks[3:], num_threads=1)
    run_pending_handlers()
    pool.release_pairs(pool.index[:1].reshape(-1))
    pool.free_stream_buffers()


class RecoveryReport(NamedTuple):
    """What was in a folder that was opened again.

    :ivar kept: transitions, an environment, that are there.
    :ivar lost: transitions, an environment, that were being added when their process was killed.
    :ivar overwritten: transitions, an environment, that are gone because those lost had taken their rows.

    >>> store = FrameStore(1000, 1, layout, storage_dir="run1")  # doctest: +SKIP
    >>> store.recovered  # doctest: +SKIP
    Recovered(kept=512, lost=1, overwritten=0)
    """

    kept: int
    lost: int
    overwritten: int


class FrameStore:
    """A ring of transitions ``(observation, next observation)`` for several environments in step.

    A frame is stored once although up to ``2 * n_stack`` stacks contain it. What is shared is decided by comparing
    contents: a stack that does not continue the one before is stored whole. What comes out equals what went in, bit
    for bit, unless a ``max_error`` or the codec ``"jpeg"`` was asked for; then ``repr`` says so.

    :param capacity: transitions an environment; then the oldest is overwritten.
    :param n_envs: number of environments.
    :param layout: how an observation is stacked; :meth:`adaptive` finds it out.
    :param codec: name of the codec, or a codec.
    :param block_length: frames in a block, a power of two, or None for 16. Longer blocks are smaller and slower to
        sample from.
    :param max_error: how far off each byte may be, for frames of dtype uint8 and codecs that patch; 0 is bit-exact.
    :param quality: of JPEG, 1 to 100; for the codec ``"jpeg"`` only.
    :param max_bytes: what the store may hold in all, index and row arrays included, or None. Where that is exceeded the
        oldest transitions are given up, a block at a time: ``size`` shrinks, their rows read as zeros, and those held
        are the ``size`` rows from ``first`` on, around the ring.
    :param storage_dir: a folder for the frames, or None for memory. They may exceed the memory there, since files are
        mapped, and outlive the process: opened again with the same arguments, the store goes on where it was, and
        ``recovered`` says what was found. A process that is killed loses the transition that it was adding; a machine
        that goes down may lose what the system had not written yet, which checksums find. One process at a time may
        open it.
    :param chooser: chooses again how they are stored, as more is seen; see :meth:`adaptive`.
    :ivar layout: how an observation is stacked, as far as is known.
    :ivar codec: name of the codec in use.
    :ivar block_length: frames in a block.
    :ivar max_error: how far off each byte may be now.
    :ivar seen: transitions an environment that were ever added, as far as this process knows.
    :ivar position: the row that the next transition goes to.
    :ivar full: whether all rows were written.
    :ivar dropped: how many of the oldest transitions were given up, whose rows were not written again yet.
    :ivar recovered: what was found in ``storage_dir``; None where nothing was.
    :raises CorruptFileError: if a file in ``storage_dir`` is damaged, where that shows without reading all of it. What
        does not show then is found when it is read.
    :raises StorageError: if another process uses ``storage_dir``, or it cannot be made.

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
    block_length: int
    max_error: int

    def __new__(
        cls, *args: Any, max_error: Any = 0, chooser: EncodingChooser | None = None, **kwargs: Any
    ) -> FrameStore:
        """Before anything is there that Ctrl-C could leave half done, all that takes long once."""
        bounds = max_error, 0 if chooser is None else chooser.loss.options.get("max_error", 0)
        load_kernels(bounded=any(isinstance(bound, int) and bound > 0 for bound in bounds))
        return super().__new__(cls)

    @defer_signals
    def __init__(
        self,
        capacity: int,
        n_envs: int,
        layout: StackLayout,
        *,
        codec: str | Codec = "patch",
        block_length: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | StoreFolder | None = None,
        chooser: EncodingChooser | None = None,
    ) -> None:
        if capacity < 1 or n_envs < 1:
            raise InvalidArgumentError(f"capacity={capacity} and n_envs={n_envs} must both be at least 1")
        # Plain integers: those of NumPy are written in a way that depends on its version.
        self.capacity, self.n_envs = index(capacity), index(n_envs)
        self.max_bytes = max_bytes if max_bytes is None else index(max_bytes)
        encoding = _checked(layout, codec=codec, block_length=block_length, max_error=max_error, quality=quality)
        self._chooser, self.seen = chooser, 0
        self._batch_shape = (self.n_envs, *layout.shape)
        # The kernels release the GIL: a thread that samples must not read a block while another one fills it.
        self._lock = make_fork_safe_lock()
        self.position, self.full, self.dropped = 0, False, 0
        self._staged: Pairs | None = None  # what was stored and is no transition yet
        self._unfinished = False  # in a folder: whether the owner may yet write to the newest transition's row
        self._was_full = False  # before that one
        self.recovered = None
        self._check_budget(encoding)
        if storage_dir is None or isinstance(storage_dir, StoreFolder):
            self._folder = storage_dir
        else:
            self._folder = StoreFolder(storage_dir, self._requested_settings(encoding), capacity=self.capacity)
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
        codec: str = "auto",
        n_stack: int | None = None,
        block_length: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
    ) -> FrameStore:
        """A store that chooses what is left open: how observations are stacked, the codec, and the block length.

        That is done when the first transitions are seen, and again when 2, 4, 8, ... 4096 are stored; what is there
        then is stored anew if it has changed. In a ``storage_dir``, what was found out is found again.

        One that may be lossy is exact until it knows the layout and has seen enough to choose.

        :param shape: of one observation.
        :param dtype: of the observations.
        :param codec: name of a codec, or ``"auto"``.
        :param n_stack: frames a stack, or None to find it from the data.
        :param block_length: frames a block, a power of two, or None to choose it by what is seen.
        :raises InvalidArgumentError: if options exclude each other, or do not fit the observations.
        :raises InvalidTypeError: likewise, because of a type.
        """
        asked: dict[str, Any] = {"codec": codec, "n_stack": n_stack, "block_length": block_length}
        chooser = EncodingChooser.from_options(shape, dtype, **asked, max_error=max_error, quality=quality)
        first = chooser.lossless(chooser.first_layout)._asdict()
        return cls(capacity, n_envs, **first, max_bytes=max_bytes, storage_dir=storage_dir, chooser=chooser)

    def _set_pool(self, pool: FramePool) -> None:
        """Stores transitions in that pool from here on."""
        layout = pool.layout
        self._pool, self.layout, self.codec = pool, layout, pool.codec.name
        self.block_length, self.max_error = pool.block_length, pool.max_error
        self._order = PLANAR if layout.planar else INTERLEAVED
        # The strides of views that VecTransposeImage makes: channel-first over channel-last memory.
        channel_last = np.empty((self.n_envs, *layout.shape[1:], layout.shape[0]), dtype=layout.dtype)
        self._transposed = np.moveaxis(channel_last, -1, 1).strides if layout.planar else None

    def _new_pool(self, encoding: Encoding, file: RegionFile | None = None) -> FramePool:
        from rl_ext_core.frames.pool import FramePool

        return FramePool(self.capacity, streams=self.n_envs, file=file, **encoding._asdict())

    def _requested_settings(self, encoding: Encoding) -> dict[str, Any]:
        """What was asked for, as plain values; who opens the folder again has to ask for the same."""
        if self._chooser is None:
            return self._settings(encoding)
        given = {"shape": list(map(int, encoding.layout.shape)), "dtype": encoding.layout.dtype.str}
        return {"capacity": self.capacity, "n_envs": self.n_envs, **given, **self._chooser.options}

    def _settings(self, encoding: Encoding) -> dict[str, Any]:
        """What decides how frames are stored, as plain values."""
        layout, codec = (
            encoding.layout,
            encoding.codec if isinstance(encoding.codec, Codec) else get_codec(encoding.codec),
        )
        return {
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            "layout": [list(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)],
            "codec": codec.name,
            "block_length": encoding.block_length,
            **({"max_error": encoding.max_error} if encoding.max_error else {}),
            **({"quality": encoding.quality} if codec.lossy else {}),
        }

    def _check_budget(self, encoding: Encoding) -> None:
        if self.max_bytes is None:
            return
        layout = encoding.layout
        stack = layout.stack_bytes + layout.frame_bytes
        least = (stack + _LEAST_BLOCKS * encoding.block_length * layout.frame_bytes) * self.n_envs
        if self.max_bytes < least:
            raise InvalidArgumentError(
                f"max_bytes={self.max_bytes:,} is too little for {self.n_envs} environments with observations of shape "
                f"{layout.shape}: what they have in the works takes up to {least:,}; pass at least that, or a "
                "smaller block_length"
            )

    def _open_in_folder(self, folder: StoreFolder, encoding: Encoding) -> None:
        if folder.settings is None:
            self._set_pool(self._new_pool(encoding, folder.frames()))
            folder.begin(self._settings(encoding))
        else:
            self._set_pool(
                self._new_pool(encoding if self._chooser is None else read_settings(folder)[2], folder.frames())
            )
            self._resume(folder)
        _open_stores.add(self)

    def _resume(self, folder: StoreFolder) -> None:
        """Goes on with what is in the folder.

        :raises CorruptFileError: if it is not what was stored.
        """
        from rl_ext_core.frames.recovery import recover_pairs

        torn = self._seek_end(folder)
        overwritten = int(torn and self.full and not self.dropped)
        self.dropped += overwritten  # the oldest, in the row that was being written
        self._rows.reserve(self.n_written)
        self._pool.reserve_rows(self.n_written)
        counted, n_written = self.size, self.n_written
        if folder.repair:
            self._keep_longest_run()
        rows = self._stored_rows()
        for what, corrupt_rows in (
            ("row-*", self._rows.corrupt_rows(rows)),
            ("frames-*", self._pool.corrupt_rows(rows)),
        ):
            if len(corrupt_rows):
                raise folder.corrupt_file_error(
                    what, f"{len(corrupt_rows)} rows have another checksum than when they were stored"
                )
        if lost := np.count_nonzero(~recover_pairs(self._pool, rows)):
            raise folder.corrupt_file_error(folder.frames().path.name, f"{lost} transitions lead nowhere")
        others = np.ones(max(n_written, self._pool.reserved_rows), dtype=np.bool_)
        others[rows] = False
        self._pool.index[: len(others)][others] = 0
        self.recovered = RecoveryReport(self.size, counted - self.size if folder.repair else int(torn), overwritten)
        self._write_journal()
        if not folder.repair:
            _logger.log(
                logging.WARNING if torn else logging.INFO,
                "%s: %d transitions of each environment are kept; %d were being added when the process before ended, "
                "and %d that they had overwritten are gone",
                folder.path,
                *self.recovered,
            )

    def _seek_end(self, folder: StoreFolder) -> bool:
        """Goes to where the next transition goes; says whether one was being added."""
        index = self._pool.index
        record, _ = folder.read_journal(lambda: None if index[-1].any() else int(np.count_nonzero(index.any(axis=1))))
        self.full, self.position = record.n_written == self.capacity, record.next_row % self.capacity
        self.dropped = self.n_written - record.length
        return bool(record.exposed)

    def _keep_longest_run(self) -> None:
        """Gives up all but the longest run of rows that can be read."""
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
        return (self.first + np.arange(self.size)) % self.capacity

    @property
    def encoding(self) -> Encoding:
        """How transitions are stored now."""
        return self._pool.encoding

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for: codec, stack size, and what may be lost."""
        if self._chooser is not None:
            return {name: value for name, value in self._chooser.options.items() if name != "block_length"}
        bound = {"max_error": self.max_error} if self.max_error else {}
        return {"codec": self.codec, "n_stack": self.layout.n_stack, **bound, **self._pool.codec.options}

    @property
    def lossy(self) -> bool:
        """Whether what comes out may differ from what went in, now or later."""
        return self._pool.lossy or (self._chooser is not None and bool(self._chooser.loss.options))

    def __repr__(self) -> str:
        layout, options = self.layout, self.options
        return (
            f"{type(self).__name__}({self.capacity} x {self.n_envs} transitions of {layout.shape} {layout.dtype}, "
            f"codec={options['codec']!r}, {describe_lossiness(options)})"
        )

    @property
    def n_written(self) -> int:
        """Rows ever written."""
        return self.capacity if self.full else self.position

    @property
    def size(self) -> int:
        """Transitions held, an environment."""
        return self.n_written - self.dropped

    @property
    def first(self) -> int:
        """The row of the oldest transition held; the others follow it around the ring."""
        return ((self.position if self.full else 0) + self.dropped) % self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held, with the index and the row arrays: what the process, or its files, have grown by."""
        # With a budget, what is free is given back where it is much, and used again before more is taken.
        frames = self._pool.nbytes if self.max_bytes is None else self._pool.used_nbytes
        return frames + self._pool.index[: self.n_written].nbytes + self._rows.nbytes(self.n_written)

    @property
    def stored_fraction(self) -> float:
        """What a frame takes on average, as a fraction of its raw size."""
        return self._pool.stored_fraction

    @defer_signals
    def append(
        self,
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic],
        *,
        row: int | None = None,
    ) -> None:
        """Stores one transition of each environment, over the oldest where the store is full.

        :param observations: shape ``(n_envs, *layout.shape)``, of the layout's dtype.
        :param next_observations: likewise.
        :param row: where the caller's own rows have come to. One that was interrupted behind this call says the same
            row again, and what it had stored there is replaced.
        :raises InvalidArgumentError: if a shape is another one.
        :raises InvalidTypeError: if a dtype cannot be converted without loss.
        :raises OutOfMemoryError: where the system has no more.
            Whatever is raised, the store holds what it held before.
        """
        with self._lock:
            row = self._resolve_row(row)
            self._advance(row, self._stage(observations, next_observations, row))

    @defer_signals
    def stage(self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]) -> Pairs:
        """The part of :meth:`append` that may fail: stores frames, and changes no transition.

        Several stores that belong together all stage a transition before the first of them commits it.

        :return: what :meth:`commit` needs, valid until the next call.
        """
        with self._lock:
            return self._stage(observations, next_observations, self.position)

    def _stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic], row: int
    ) -> Pairs:
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
        """Checks a batch of stacks and brings it into one of the two memory orders that the kernels read.

        :param stacks: shape ``(n_envs, *layout.shape)``; views as ``VecTransposeImage`` makes them are not copied.
        :param name: what the caller calls it.
        :raises InvalidTypeError: if its dtype cannot be converted without loss.
        :raises InvalidArgumentError: if its shape is another one.
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
                    f"{name} has dtype {stacks.dtype}, which does not fit into {layout.dtype} without loss. Nothing "
                    f"was stored; convert it with {name}.astype(np.{layout.dtype}) if that is meant."
                )
            stacks = stacks.astype(layout.dtype)
        if stacks.flags.c_contiguous:
            return stacks, self._order
        if stacks.strides == self._transposed:
            return stacks, INTERLEAVED
        return np.ascontiguousarray(stacks), self._order

    @defer_signals
    def commit(self, staged: Pairs, *, row: int | None = None) -> None:
        """Makes what was staged a transition, over the oldest where the store is full."""
        with self._lock:
            self._advance(self._resolve_row(row), staged)

    def _resolve_row(self, row: int | None) -> int:
        if row is None:
            return self.position
        if not 0 <= row < self.capacity:
            raise InvalidArgumentError(f"row={row}: there are rows 0 to {self.capacity - 1}. Nothing was stored")
        if self._folder is not None and row not in (self.position, (self.position - 1) % self.capacity):
            raise InvalidArgumentError(
                f"row={row}: with storage_dir, transitions are stored one after the other, next in row {self.position}"
            )
        return index(row)  # NumPy's integers are written in a way that depends on its version

    def _advance(self, row: int, pairs: Pairs) -> None:
        """Makes the transition with these numbers the newest; or that of an older row, where that is in memory."""
        older = self._folder is None and (row < self.position or (self.full and row != self.position))
        if self._folder is not None:
            self._begin_row(row)
        if self.full and self.dropped and row == self.position:
            self.dropped -= 1  # its row is taken
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
        if self._chooser is not None and self.seen <= LAST_CHECK and self.seen & (self.seen - 1) == 0:
            self._update_encoding(self._chooser)

    def _update_encoding(self, chooser: EncodingChooser) -> None:
        """Stores what is there in another way, where that suits it better."""
        if self.position not in (0, self.size) or self.dropped:
            return  # the oldest is not in the first row
        # The transition is stored, and what is there is complete: it stays as it is.
        with contextlib.suppress(MemoryError, StorageError):
            encoding = chooser.better_for_store(self)
            if encoding is not None:
                self._switch_encoding(encoding)
                encoding.log("observations")
                if self.max_bytes is not None:
                    self._enforce_max_bytes(self.max_bytes)

    def _switch_encoding(self, encoding: Encoding) -> None:
        """Stores the same transitions in another way. Whatever is raised, they are stored as before."""
        if (folder := self._folder) is None:
            return self._set_pool(self.reencode(encoding))
        try:
            pool = self.reencode(encoding, folder.frames(next_generation=True))
            folder.begin(self._settings(encoding), next_generation=True)
        except BaseException:
            with contextlib.suppress(StorageError):
                folder.frames(next_generation=True)  # removes it
            raise
        self._set_pool(pool)
        folder.delete_old_frames()  # Windows has kept what was still mapped

    def reencode(self, encoding: Encoding, file: RegionFile | None = None) -> FramePool:
        """A pool with the same transitions in the same rows, which must not have wrapped."""
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
        """Observations and next observations of all environments, row by row."""
        grid = np.repeat(rows, self.n_envs), np.tile(np.arange(self.n_envs), len(rows))
        before, after = (np.empty((len(grid[0]), *self.layout.shape), dtype=self.layout.dtype) for _ in range(2))
        self.get(*grid, before, after)
        return before, after

    def _begin_row(self, row: int) -> None:
        """Notes that a row is being written, and that all before count."""
        if row != self.position:  # the newest is replaced: until then there is one less
            self._drop_newest(1)
        self._finish_newest()
        self._write_journal(writing=True)
        self._was_full = self.full

    def _finish_newest(self) -> None:
        if self._unfinished:
            self._checksum_newest()
        self._unfinished = False

    def _checksum_newest(self) -> None:
        self._rows.record(np.array([(self.position - 1) % self.capacity]))

    def _write_journal(self, *, writing: bool = False) -> None:
        """Notes what counts. The newest transition does not, as long as its row may be half written."""
        assert self._folder is not None
        assert self._folder.journal is not None
        length, next_row, n_written = self.size, self.position, self.n_written
        if self._unfinished:
            length, next_row = length - 1, (next_row - 1) % self.capacity
            n_written = self.capacity if self._was_full else next_row
        self._folder.journal.record(
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
        """Writes a batch of transitions into the arrays given.

        :param rows: (batch,) ``int64`` positions in the ring; one that was never written gives zeros.
        :param envs: (batch,) ``int64`` environments.
        :param observations: C-contiguous, shape ``(batch, *layout.shape)``, of the layout's dtype; written. None where
            they are not wanted.
        :param next_observations: likewise.
        :param num_threads: threads to decode in.
        :raises InvalidArgumentError: if a place does not exist, or an array does not fit.
        """
        with self._lock:
            if self._folder is not None:
                self._folder.check_open()
            # As HER has them they are strided: kernels would be compiled once more for that.
            rows, envs = (places if places.flags.carray else places.copy() for places in (rows, envs))
            for out in (observations, next_observations):
                if out is not None:
                    self._check_output(out, len(rows))
            whole = rows.dtype == envs.dtype == np.int64 and rows.shape == envs.shape == (rows.size,)
            if not whole or not self._pool.get_pairs(
                rows, envs, observations, next_observations, num_threads=num_threads
            ):
                raise InvalidArgumentError(
                    f"rows {rows!r} and envs {envs!r} must be as many numbers of dtype int64, from 0 to "
                    f"{self.capacity - 1} and from 0 to {self.n_envs - 1}"
                )

    def _check_output(self, out: npt.NDArray[np.generic], n: int) -> None:
        expected = (n, *self.layout.shape)
        if not (out.shape == expected and out.dtype == self.layout.dtype and out.flags.carray):
            kind = "an" if out.flags.writeable else "a read-only"
            raise InvalidArgumentError(
                f"an output is {kind} array of shape {out.shape} and dtype {out.dtype}, expected a C-contiguous "
                f"one to write to, of shape {expected} and dtype {self.layout.dtype}; for example "
                f"np.empty({expected}, np.{self.layout.dtype})"
            )

    @defer_signals
    def drop_oldest(self, count: int) -> None:
        """Gives up the oldest transitions. Their rows read as zeros then.

        :param count: how many, an environment.
        :raises InvalidArgumentError: if there are not so many.
        """
        with self._lock:
            if count := self._checked(count):
                self._drop_oldest(count)

    def _checked(self, count: int) -> int:
        if not 0 <= count <= self.size:
            raise InvalidArgumentError(f"count={count} transitions cannot be given up, {self.size} are held")
        return index(count)  # see _row

    def _drop_oldest(self, count: int) -> None:
        rows = (self.first + np.arange(count)) % self.capacity
        self.dropped += count
        self._free_rows(rows)

    def _free_rows(self, rows: Pairs) -> None:
        """Frees what lies in rows that do not count any more."""
        if self._folder is not None:
            self._write_journal()
        self._pool.release_pairs(self._pool.index[rows].reshape(-1))
        self._pool.index[rows] = 0
        if self.max_bytes is not None:
            self._pool.trim()

    def _enforce_max_bytes(self, max_bytes: int) -> None:
        while self.nbytes > max_bytes and self.size > 1:
            self._drop_oldest(min(self.block_length, self.size - 1))

    @defer_signals
    def drop_newest(self, count: int) -> None:
        """Takes the newest transitions back, so that stores that belong together hold the same ones.

        :param count: how many, an environment.
        :raises InvalidArgumentError: if there are not so many.
        """
        with self._lock:
            if count := self._checked(count):
                self._drop_newest(count)

    def _drop_newest(self, count: int) -> None:
        rows = (self.position - 1 - np.arange(count)) % self.capacity
        if self.full:
            # Rows behind the new end were written before: they count as the oldest, given up.
            self.position = (self.position - count) % self.capacity
            self.dropped += count
        else:
            self.position -= count
        self._unfinished = False
        self._free_rows(rows)

    @defer_signals
    def clear(self) -> None:
        """Forgets all transitions and gives their memory back."""
        with self._lock:
            self.position, self.full, self.dropped, self._unfinished = 0, False, 0, False
            if self._folder is not None:
                self._folder.check_writer()
                self._write_journal()
            self._pool.clear()
            self._staged = None

    @defer_signals
    def free_stream_buffers(self) -> None:
        """Gives back the memory that only transitions to come need, which is most of what a small store takes.

        Should there be any, the next ones share nothing with those before.
        """
        with self._lock:
            self._pool.free_stream_buffers()

    @defer_signals
    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of the caller's own with one row a transition: actions, rewards, flags.

        It is kept where the frames are: in a mapped file with ``storage_dir``, else in memory. Ask for all of them
        before the first transition is added; write to row ``i`` after the transition in row ``i`` was added, and no
        more once the next one is; see :meth:`update_newest_checksum`. After the folder was opened again they hold what
        belongs to the transitions there.

        :param name: letters, digits, ``_``, ``-`` and ``.``.
        :param shape: of one row.
        :param dtype: of the array.
        :return: shape ``(capacity, *shape)``, zero where nothing was written; the same array for the same name.
        :raises InvalidArgumentError: if there is such an array of another shape or dtype, or it comes too late.
        :raises StorageError: if there is no room for it on the disk.
        """
        with self._lock:
            if self._folder is not None:
                return self._folder.array(name, shape, dtype, empty=self.n_written == 0)
            if self._rows.get(name, shape, dtype) is None:
                self._rows.add(name, {name: (tuple(shape), np.dtype(dtype))})
            return self._rows.arrays[name]

    @defer_signals
    def update_newest_checksum(self) -> None:
        """To be called where the row of the newest transition was written to once more after :meth:`flush`.

        Its checksum would not be that of its contents.
        """
        if self._folder is not None:
            with self._lock:
                if self.size and not self._unfinished:
                    self._checksum_newest()

    @defer_signals
    def flush(self) -> None:
        """Makes sure that what was added survives the process. Does nothing without ``storage_dir``."""
        if self._folder is not None:
            self._folder.check_writer()
            with self._lock:
                self._finish_newest()
                self._write_journal()

    @defer_signals
    def close(self) -> None:
        """Writes what is not written yet, and lets another process open ``storage_dir``. Nothing can be read after."""
        folder = self._folder
        if folder is None or folder.closed:
            return
        with self._lock:
            try:
                if folder.is_writer and folder.journal is not None:
                    self.flush()
                    folder.journal.flush()
            finally:
                folder.close()
                _open_stores.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_folder", None) is not None:
            _close_quietly(self)

    @defer_signals
    def save(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes the store to a file, without another copy in memory. Row arrays are not part of it.

        :param file: a path, which is replaced once all is written, or a file opened for writing bytes.
        :raises StorageError: if it cannot be written; nothing is left of it then.
        """
        save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | BinaryIO) -> FrameStore:
        """Reads what :meth:`save` wrote, into memory.

        :raises CorruptFileError: if it is damaged, cut short, of a later format, or holds something else.
        """
        return load(cls, file)

    def __copy__(self) -> FrameStore:
        return copy.deepcopy(self)  # no two stores may write to the same memory

    @defer_signals
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_with_lock(self._lock, lambda: super(FrameStore, self).__reduce_ex__(protocol))

    def __getstate__(self) -> dict[str, Any]:
        """Arrays and numbers only: views that pickle protocol 5 writes without a copy, and a checksum."""
        state = {
            "format": FORMAT_VERSION,
            "capacity": self.capacity,
            "n_envs": self.n_envs,
            **({} if self.max_bytes is None else {"max_bytes": self.max_bytes}),
            "position": self.position,
            "full": self.full,
            "dropped": self.dropped,
            **({} if self._chooser is None else {"asked": self._chooser.options}),
            "index": self._pool.index[: self.n_written],
            "frames": self._pool.state_dict(),
        }
        return {**state, "checksum": _state_checksum(state)}

    def __setstate__(self, state: Any) -> None:
        """
        :raises CorruptFileError: if the state is damaged, or of a later format.
        :raises MissingDependencyError: if its codec needs a package that is not installed.
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
            block_length=frames["block_length"],
            max_error=frames["max_error"],
            quality=frames.get("quality", DEFAULT_QUALITY),
            max_bytes=state.get("max_bytes"),
            chooser=None if asked is None else EncodingChooser.from_options(tuple(shape), dtype, **asked),
        )
        self.position, self.full, self.dropped = state["position"], state["full"], state["dropped"]
        self._pool.load_state_dict(frames)
        self._pool.index[: self.n_written] = state["index"]
        self.seen = self.size


def _state_checksum(state: dict[str, Any]) -> int:
    frames = state.get("frames")  # they have one of their own
    return checksum({**state, "frames": frames.get("checksum") if isinstance(frames, dict) else None})


def _close_quietly(store: FrameStore) -> None:
    try:
        store.close()
    except Exception:  # nobody is there to be told otherwise
        _logger.exception("what was added last to %s may be lost", store._folder.path if store._folder else "")


def _close_all() -> None:
    for store in list(_open_stores):
        _close_quietly(store)


atexit.register(_close_all)


class SalvageReport(NamedTuple):
    """What was left of a damaged folder.

    :ivar kept: transitions, an environment, that can be read.
    :ivar lost: transitions, an environment, that counted and are gone.

    >>> from rl_ext_core.frames import salvage
    >>> salvage("run1")  # doctest: +SKIP
    Salvaged(kept=498, given_up=14)
    """

    kept: int
    lost: int


def salvage(storage_dir: str | os.PathLike[str]) -> SalvageReport:
    """Makes a damaged ``storage_dir`` one that can be opened again, with the longest run of intact transitions.

    All files are read. What is damaged is given up for good: copy the folder first if in doubt.

    :param storage_dir: the folder.
    :raises InvalidArgumentError: if there is no store in it.
    :raises CorruptFileError: if nothing can be read at all.
    :raises StorageError: if it is in use.
    """
    folder = StoreFolder(storage_dir, {}, repair=True)
    try:
        capacity, n_envs, encoding = read_settings(folder)
        store = FrameStore(capacity, n_envs, **encoding._asdict(), storage_dir=folder)
        found = SalvageReport(*store.recovered[:2])  # type: ignore[index]
        store.close()
    finally:
        folder.close()
    _logger.warning("%s: kept %d transitions of each environment, gave up %d", folder.path, *found)
    return found


def read_settings(folder: StoreFolder) -> tuple[int, int, Encoding]:
    """Capacity, number of environments, and how the frames in a folder are stored."""
    with as_corrupt_file(f"{folder.path / MANIFEST} is"):
        found = dict(folder.settings or {})
        shape, dtype, n_stack, axis = found.pop("layout")
        layout = StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis)
        return found.pop("capacity"), found.pop("n_envs"), Encoding(layout, **found)


def _checked(
    layout: StackLayout, *, codec: str | Codec, block_length: int | None, max_error: int, quality: int
) -> Encoding:
    """How to store, with what was left open, and what is wrong refused."""
    codec = (get_codec(codec, quality=quality) if isinstance(codec, str) else codec).for_frames(layout)
    length = index(resolve_block_length(block_length, codec, most=MOST_PLACES))
    bound = validate_max_error(max_error, codec=codec, dtype=layout.dtype)
    return Encoding(layout, codec, length, bound, codec.options.get("quality", DEFAULT_QUALITY))


def longest_run(good: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest run of what is true begins and ends; the newest one of equals."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = len(lengths) - 1 - int(lengths[::-1].argmax())
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
