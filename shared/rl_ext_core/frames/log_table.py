"""Table of stacks on a log: rows of an observation and its next observation, which are written in any order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import log_state as fields
from rl_ext_core.frames.checkpoint import checksum
from rl_ext_core.frames.layout import INTERLEAVED, StackLayout, find_layout
from rl_ext_core.frames.log import CHAIN, FrameLog, SharedLog
from rl_ext_core.frames.log_folder import as_corrupt_file
from rl_ext_core.frames.log_move import copy_rows, find_stream
from rl_ext_core.frames.log_patch import PADDING
from rl_ext_core.frames.log_state import N_LOG
from rl_ext_core.frames.memory import address_of
from rl_ext_core.frames.shared_memory import MemoryFile
from rl_ext_core.frames.store import Observation, StoredPart, load_kernels

_COPY_BATCH = 64  # rows that are copied, or used to detect the layout
_LAST_CHECK = 4096  # puts of rows after which the layout is not detected any more
_MOST_NEW = 0.25  # rows of a put that continue no stream, above which later puts are ordered
_MOST_STREAMS, _LEAST_STREAMS = 256, 4
_STREAM_BYTES = 3_000_000  # newest stacks of all streams
_MAX_EXCESS = 1.3  # words of all segments, relative to those that live rows need
_MOST_COPIED = 4  # segments that are copied after a put

Array = npt.NDArray[Any]


class FrameTable:
    """Rows of images, each with an observation and a next observation, in an append-only log.

    Rows may be written in any order, and replaced. A row shares the frames of rows that were written shortly before.
    Segments with few live rows are copied, so that the table takes at most 1.3 times the words that live rows need.

    :param n_rows: Number of rows.
    :param observation: Form of the images, and how to store them.
    :param folder: Existing folder for the segments, or None for memory.
    :param settings: Settings of the table that left its segments in the folder, or None for a new table.
    :ivar locations: Location of each row, as a file that the caller has mapped; None in memory.
    :ivar fixed_layout: Whether the layout that the first put detects is final.
    :raises InvalidArgumentError: If the options exclude each other.

    >>> import numpy as np
    >>> from rl_ext_core.frames.store import Observation
    >>> from rl_ext_core.frames.log_table import FrameTable
    >>> table = FrameTable(100, Observation((4, 84, 84), np.uint8))
    >>> images = np.zeros((2, 4, 84, 84), np.uint8)
    >>> table.put(np.array([7, 3]), images, images)
    >>> table.commit()
    >>> table.n_stored
    2
    """

    def __init__(
        self,
        n_rows: int,
        observation: Observation,
        *,
        folder: Path | None = None,
        settings: list[Any] | None = None,
    ) -> None:
        self._n_rows, self._folder = n_rows, folder
        self.part = StoredPart(None, observation, 1)
        self.fixed_layout = folder is not None
        self._seen = 0  # rows that were put
        self._is_shuffled = True  # whether rows of one put may have to be ordered
        self._newest = np.zeros(0, dtype=np.int64)
        self._n_touched = 0  # no later row was ever written
        self._written: tuple[Any, ...] | None = None  # what put() has written, until it is committed
        if settings is not None:
            self.part.restore(settings)
            self._seen = _LAST_CHECK + 1
        self._shared: SharedLog | None = None
        self.locations: npt.NDArray[np.int64] | None = None
        self._use(self._new_log())

    def _new_log(self) -> FrameLog:
        load_kernels(int(self.part.max_error > 0))
        layout, part = self.part.layout, self.part
        padded = -(-layout.frame_bytes // PADDING) * PADDING
        n_bytes = (layout.n_stack + 1 + part.column.max_error) * padded
        n_bytes += layout.stack_bytes if part.order == INTERLEAVED else 0
        n_streams = max(min(_STREAM_BYTES // n_bytes, _MOST_STREAMS), _LEAST_STREAMS)
        self._stream_bytes = n_bytes
        return FrameLog(self._n_rows, 1, [part.column], folder=self._folder, n_streams=n_streams)

    def _use(self, log: FrameLog) -> None:
        self.log = log
        self._pairs = log.pairs[:, 0, 0]
        if self.part.order == INTERLEAVED:
            log.set_inputs(0, 0, INTERLEAVED, 0, INTERLEAVED)  # allocates the newest stacks
        starts = [log.state[N_LOG + field] for field in (fields.FRAMES, fields.DECODED, fields.STREAMS)]
        self._first = np.array(starts, dtype=np.int64)

    # Writing

    def put(self, rows: Array, stacks: Array, nexts: Array | None = None) -> None:
        """Write rows. :meth:`commit` or :meth:`roll_back` must follow, also if an exception was raised.

        :param rows: ``int64`` numbers of different rows, shape ``(n,)``.
        :param stacks: Observations, C-contiguous, shape ``(n, *shape)``.
        :param nexts: Next observations of the same form, or None if rows have a single image.
        :raises OutOfMemoryError: If there is not enough memory.
        :raises StorageError: If the disk is full.
        """
        if not len(rows):
            return
        if self._folder is None and self.log.n_words == 0:
            self._seen = 0
            self.detect(stacks, nexts)
        log = self.log
        self._written = log.mark(), rows, log.pairs[rows], nexts is not None
        log.keeps_dead = True
        self._push(log, rows, stacks, stacks if nexts is None else nexts)

    def roll_back(self) -> None:
        """Undo the last :meth:`put`, if it was not committed."""
        if self._written is not None:
            mark, rows, pairs, _ = self._written
            self.log.roll_back(mark, rows, pairs)
            self._written, self.log.keeps_dead = None, False

    def commit(self) -> None:
        """Keep the rows of the last :meth:`put`, and free the memory of those that they replaced."""
        if self._written is None:
            return
        (_, _, sequence), rows, _, has_next = self._written
        log, self._written = self.log, None
        log.keeps_dead = False
        self._n_touched = max(self._n_touched, int(rows.max()) + 1)
        self._record(rows)
        if log.state[fields.DIED]:
            log._free_dead_segments()
        if log.state[fields.SEQUENCE] != sequence:
            self.compact()
        seen, self._seen = self._seen, self._seen + len(rows)
        if seen <= _LAST_CHECK and not self.fixed_layout:
            self._newest = np.concatenate([self._newest, rows])[-_COPY_BATCH:]
            if seen.bit_length() != self._seen.bit_length() and self._seen > 1:
                self._detect_again(has_next)

    def _push(self, log: FrameLog, rows: Array, stacks: Array, nexts: Array) -> None:
        order, size, state = self.part.order, self.part.layout.stack_bytes, log.state
        begin, next_begin = address_of(stacks), address_of(nexts)
        first, uses, n_new = self._first, log.uses, 0
        places: Any = range(len(rows))
        if self._is_shuffled and len(rows) > 1 and nexts is not stacks:
            places = order_by_successors(stacks, nexts)
            self._is_shuffled = places != sorted(places)
        for place in places:
            obs, next_obs = begin + place * size, next_begin + place * size
            log.set_inputs(0, obs, order, next_obs, order)
            n_new += find_stream(state, first, uses)
            log.push(row=int(rows[place]))
        self._is_shuffled |= n_new > _MOST_NEW * len(rows)

    def clear(self, start: int = 0) -> None:
        """Drop all rows from a number on."""
        self._pairs[start : self._n_touched] = 0
        if not start:
            self.log.close_segment()  # so that it can be freed
        if self._shared is None:  # other processes write to any row
            self._n_touched = min(start, self._n_touched)
        self.log.count_live()

    def copy(self, sources: Array, targets: Array) -> None:
        """Replace rows by copies of others."""
        self._copy(self._pairs[sources], targets)

    @property
    def _shift(self) -> int:
        """Number of bits of a position within its segment."""
        return int(self.log.state[fields.SEGMENT_SHIFT])

    def _copy(self, pairs: Array, targets: Array) -> None:
        """Write copies of the entries of pairs, and let rows refer to them."""
        log, slots = self.log, pairs >> 23 >> self._shift
        if log.limit and (slots[pairs != 0] == log.limit >> self._shift).any():
            log.close_segment()
        log.keeps_dead = True
        try:
            for slot in np.unique(slots[pairs != 0]).tolist():
                some = np.flatnonzero((slots == slot) & (pairs != 0))
                some = some[np.argsort(pairs[some], kind="stable")]
                copies, done = np.zeros(int(log._used[slot]), dtype=np.int64), 0
                while True:
                    done = copy_rows(log.state, pairs[some], targets[some], done, log.limit, copies)
                    if done == len(some):
                        break
                    log._open_segment()
                    copies[:] = 0
        finally:
            log.keeps_dead = False
        self._record(targets)
        if (pairs == 0).any():
            self._pairs[targets[pairs == 0]] = 0
            log.count_live()
        elif log.state[fields.DIED]:
            log._free_dead_segments()

    def _record(self, rows: Array) -> None:
        """Record where rows are stored, so that missing files are found."""
        if self.locations is not None:
            self.locations[rows] = self.log.locate(self._pairs[rows])

    def recover(self) -> npt.NDArray[np.bool_]:
        """Read the rows that an earlier process left in the folder.

        :return: Which rows are found as they were written last, shape ``(n_rows,)``.
        :raises CorruptFileError: If a file is damaged.
        """
        self.log.recover()
        found = np.flatnonzero(self._pairs)
        self._n_touched = int(found[-1]) + 1 if len(found) else 0
        assert self.locations is not None
        intact: npt.NDArray[np.bool_] = (self._pairs != 0) & (self.log.locate(self._pairs) >= self.locations)
        return intact

    def close(self) -> None:
        """Close the open segment, so that its file takes no more space than needed."""
        self.log.close_segment()

    def compact(self) -> None:
        """Copy rows out of the segments that contain the fewest live ones, until the excess is permitted."""
        log, window = self.log, self.part.layout.n_stack + CHAIN // 2  # a live row needs about so many entries
        for _ in range(_MOST_COPIED):
            slots, words, live, most = log.closed_segments()
            if len(slots) < 2:
                return
            shares = 1 - (1 - np.minimum(live / most, 1)) ** window
            worst = int(np.argmin(shares))
            if words.sum() <= _MAX_EXCESS * (shares * words).sum() or shares[worst] * _MAX_EXCESS > 1:
                return
            pairs = self._pairs[: self._n_touched]
            rows = np.flatnonzero((pairs != 0) & (pairs >> 23 >> self._shift == slots[worst]))
            self._copy(pairs[rows], rows)

    # Layout

    def detect(self, stacks: Array, nexts: Array | None = None) -> None:
        """Choose the layout for the first rows, if it is to be detected."""
        part = self.part
        if part.detects:
            found = find_stack_layout(part.layout, stacks, nexts)
            if part.update_layout(found, len(stacks), is_final=self.fixed_layout):
                self._use(self._new_log())
                if self._shared is not None:
                    self._attach(self._shared)
                    self._shared_layout[:] = self.part.settings

    def _detect_again(self, has_next: bool) -> None:
        """Detect the layout again, and store all rows again if another one is better."""
        part = self.part
        if not part.can_change:
            return
        rows = self._newest[self._pairs[self._newest] != 0]
        shape, dtype = (len(rows), *part.layout.shape), part.layout.dtype
        stacks, nexts = np.empty(shape, dtype), np.empty(shape, dtype)
        self.get(rows, stacks, nexts)
        found, before = find_stack_layout(part.layout, stacks, nexts if has_next else None), part.settings
        if part.update_layout(found, self.n_stored, is_final=self._seen >= _LAST_CHECK):
            with contextlib.suppress(MemoryError):  # all rows are stored already, so they stay as they are
                self._store_again(before)

    def _store_again(self, before: list[Any]) -> None:
        """Copy all rows to a log with the present settings. An exception leaves the old log and settings in use."""
        old, part = self.log, self.part
        kept = {name: getattr(self, name) for name in ("log", "_pairs", "_first", "_stream_bytes")}
        rows = self.stored_rows()
        try:
            self._use(self._new_log())
            for some in np.split(rows, range(_COPY_BATCH, len(rows), _COPY_BATCH)):
                stacks, nexts = np.empty((2, len(some), *part.layout.shape), part.layout.dtype)
                old.decode(0, some, np.zeros_like(some), stacks, nexts)
                self._push(self.log, some, stacks, nexts)
        except BaseException:
            part.restore(before)
            self.__dict__.update(kept)
            raise

    # Reading

    def get(self, rows: Array, stacks: Array | None, nexts: Array | None = None, *, num_threads: int = 1) -> None:
        """Decode rows into arrays. A row that was never written gives zeros.

        :param rows: ``int64`` numbers of rows, shape ``(n,)``.
        :param stacks: Output for the observations, C-contiguous, shape ``(n, *shape)``; or None.
        :param nexts: The same for the next observations.
        :param num_threads: Threads to decode in; default 1.
        """
        self.log.decode(0, rows, np.zeros_like(rows), stacks, nexts, num_threads=num_threads)

    def handles(self, rows: Array) -> tuple[Array, Array]:
        """Return handles of observations and next observations, for :meth:`GpuDecoder.decode`."""
        return self.log.find_handles(0, rows, np.zeros_like(rows))

    # State

    @property
    def is_lossy(self) -> bool:
        """Whether decoded images may differ from those that were put."""
        return self.part.is_jpeg or self.part.max_error > 0

    @property
    def n_stored(self) -> int:
        """Number of stored rows."""
        return int(np.count_nonzero(self._pairs[: self._n_touched]))

    def stored_rows(self) -> Array:
        """Return the numbers of the stored rows, in the order of their frames."""
        rows = np.flatnonzero(self._pairs[: self._n_touched])
        return rows[np.argsort(self._pairs[rows], kind="stable")]

    @property
    def nbytes(self) -> int:
        """Bytes in use by frames, pairs and the newest stacks of streams."""
        n_streams = int(np.count_nonzero(self.log.uses[:-2]))
        return 4 * self.log.n_words + 8 * self._n_touched + self._stream_bytes * n_streams

    def share(self) -> None:
        """Let child processes share the table, to which it is sent when they are started.

        A layout that is detected later is final.
        """
        if self._shared is not None:
            return
        part, settings, sizes = self.part, self.part.settings, [self.log.shared_sizes()]
        for layout in part.candidates if part.detects else []:
            part.set_layout(layout)
            sizes.append(self._new_log().shared_sizes())
        part.restore(settings)
        self._shared = self.log.share((max(size for size, _ in sizes), max(size for _, size in sizes)))
        self._layout_memory = MemoryFile(24)
        (self._shared_layout,) = self._layout_memory.arrays(((3,), np.int64))
        self._shared_layout[:] = self.part.settings
        self._use(self.log)
        self.fixed_layout, self._n_touched = True, self._n_rows

    def _attach(self, shared: SharedLog) -> None:
        self.log.attach(shared)
        self._use(self.log)

    def load(self) -> None:
        """Use what other processes have written."""
        if self._shared_layout.tolist() != self.part.settings:  # another process has detected it
            self.part.restore(self._shared_layout.tolist())
            self._use(self._new_log())
            assert self._shared is not None
            self._attach(self._shared)
        self.log.load()

    def save(self) -> None:
        """Let other processes use what this one has written."""
        self.log.save()

    def repair(self) -> None:
        """Repair the table after a process was killed while it wrote rows, each of which is the old or the new one."""
        self.load()
        self.log.repair()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a process that shares the table."""
        assert self._shared is not None
        return {**self.__dict__, "log": None, "_pairs": None, "_first": None, "_shared_layout": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        (self._shared_layout,) = self._layout_memory.arrays(((3,), np.int64))
        self._use(self._new_log())
        self._attach(state["_shared"])
        self.load()

    def contents(self) -> dict[str, Any]:
        """Return everything that is stored, as plain values and views of arrays."""
        contents = self.log.contents()
        pairs = self._pairs[: self._n_touched]
        state = {"settings": self.part.settings, "pairs": pairs}
        state |= {"shift": contents["shift"], "segments": [*contents["segments"].items()]}
        state |= {"max_error": self.part.max_error, "quality": self.part.options.quality if self.part.is_jpeg else 0}
        return {**state, "checksum": checksum(state)}

    def restore(self, contents: dict[str, Any]) -> None:
        """Restore what :meth:`contents` has returned, in a new table in memory.

        :raises CorruptFileError: If it is damaged.
        :raises InvalidArgumentError: If the frames are lossier than this table's options allow.
        """
        part = self.part
        if checksum(contents) != contents["checksum"]:
            raise CorruptFileError("the images are damaged: their checksum does not match their contents")
        quality = part.options.quality if part.is_jpeg else 0
        was_lossy = contents["max_error"] > (0 if part.is_jpeg else part.max_error)
        if was_lossy or (contents["quality"] and contents["quality"] != quality):
            made_with = f"max_error={contents['max_error']}"
            if contents["quality"]:
                made_with = f"codec='jpeg', quality={contents['quality']}"
            raise InvalidArgumentError(
                f"the saved images are lossy: they were made with {made_with}. Pass the same options to FrameStorage"
            )
        with as_corrupt_file("the images are"):
            part.restore(contents["settings"])
            log, n = self._new_log(), len(contents["pairs"])
            pairs = np.ascontiguousarray(contents["pairs"]).reshape(n, 1, 1)
            rows = np.zeros((n, 0), dtype=np.uint8)
            counters = {"position": 0, "stored": 0, "full": 0, "shift": contents["shift"]}
            log.restore({**counters, "pairs": pairs, "rows": rows, "segments": dict(contents["segments"])})
        self._use(log)
        self._n_touched, self._seen = n, _LAST_CHECK + 1


def order_by_successors(stacks: Array, nexts: Array) -> list[int]:
    """Order shuffled rows so that each one follows the row whose next observation it contains, if there is one.

    :param stacks: Observations, C-contiguous, shape ``(n, *shape)``.
    :param nexts: Next observations of the same form.
    :return: Positions of the rows in that order. Rows of one environment that are in order already stay so.
    """
    n = len(stacks)
    n_words = stacks[0].nbytes // 8
    weights = np.random.default_rng(0).integers(1 << 63, size=n_words, dtype=np.uint64) * 2 + 1
    parts = [part.reshape(n, -1).view(np.uint8)[:, : 8 * n_words] for part in (stacks, nexts)]
    # Hashes that differ by mistake, or not, cost compression only.
    hashes, next_hashes = ((np.ascontiguousarray(part).view(np.uint64) @ weights).tolist() for part in parts)
    waiting: dict[int, list[int]] = {}
    # Of equal observations, those that do not change come first, because the others lead on.
    for row in sorted(range(n), key=lambda row: (hashes[row] == next_hashes[row], -row)):
        waiting.setdefault(hashes[row], []).append(row)
    reached = {after for before, after in zip(hashes, next_hashes, strict=True) if before != after}
    found: list[int] = []
    for start in [*(row for row in range(n) if hashes[row] not in reached), *range(n)]:
        value = hashes[start]
        while rows := waiting.get(value):
            found.append(rows.pop())
            value = next_hashes[found[-1]]
    return found


def find_stack_layout(layout: StackLayout, stacks: Array, nexts: Array | None) -> StackLayout | None:
    """Detect the layout of stacks from successive ones.

    :param layout: Any layout of the stacks.
    :param stacks: Stacks of shape ``(n, *layout.shape)``.
    :param nexts: Next stacks of the same shape, or None if ``stacks`` contains them.
    :return: The layout, or None if the stacks do not change.
    """
    shape, dtype = layout.shape, layout.dtype
    stacks, unstacked = stacks[:_COPY_BATCH], None
    if nexts is not None:
        return find_layout(shape, dtype, stacks, nexts[:_COPY_BATCH])
    for distance in range(1, len(stacks) // 2 + 1):  # the next stack comes later if environments take turns
        found = find_layout(shape, dtype, stacks[:-distance], stacks[distance:])
        if found is not None and found.n_stack > 1:
            return found
        unstacked = unstacked or found
    return unstacked
