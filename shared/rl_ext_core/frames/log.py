"""Append-only log of frames: segments in memory or in files, and the ring of transitions that refers to them.

Nothing in a segment refers to another one. So a segment is freed once no stored transition needs it, damage stays in
one segment, and a folder is read segment by segment.

A segment begins with ``SEGMENT_HEADER`` words: magic number, format, number of the segment (two words), words in the
file. In a file, records follow, one per transition: ``[size][checksum][number][row][stored rows]``, the pairs, the
caller's data, the entries. The first bit of the size says whether it is a transition. A record that is not one only
sets the position and the number of stored rows. A size of 0 is the end. In memory, there are only entries.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames import log_state as fields
from rl_ext_core.frames.codecs import JpegCodec
from rl_ext_core.frames.layout import INTERLEAVED, PLANAR, StackLayout, shared_byte_mask
from rl_ext_core.frames.log_folder import as_corrupt_file
from rl_ext_core.frames.log_patch import LARGE_FRAME, PADDING, WORK_SLACK
from rl_ext_core.frames.log_quantize import GROUP
from rl_ext_core.frames.log_read import (
    OPAQUE_FIELDS,
    are_inside,
    count_scratch_bytes,
    decode_bounded,
    decode_transitions,
    find_handles,
)
from rl_ext_core.frames.log_recover import are_pairs, drop_rows, replay_segment, write_note
from rl_ext_core.frames.log_segment import SLACK_BYTES, Segment, open_segments
from rl_ext_core.frames.log_state import N_COLUMN, N_LOG, N_STREAM, SEGMENT_HEADER
from rl_ext_core.frames.log_write import (
    NEEDS_SEGMENT,
    PITCH_SLACK,
    SCRATCH_FRAMES,
    SCRATCH_FRAMES_BOUNDED,
    header_words,
    push,
    push_bounded,
)
from rl_ext_core.frames.memory import address_of, damaged_folder_error, out_of_memory_error
from rl_ext_core.frames.shared_memory import MemoryFile, count_bytes
from rl_ext_core.frames.threads import run_in_threads

CHAIN = 14  # entries per chain, up to 31; longer chains take less memory, and are slower to read
_LEAST_WORDS = 1 << 12
_LEAST_RESTARTS = 6  # size of a segment, in first records
_MOST_WORDS = 1 << 22
_FIRST_RESTART = 2  # frames per environment that opening a segment is assumed to cost, until it was measured

_MOST_LIVE, _NUMBERS = -1, -2  # tables that kernels do not use
_SHARED_SLOTS = 1 << 12
_N_COUNTERS = fields.ROW_INPUT - fields.POSITION + 1

_COUNTERS = {"position": fields.POSITION, "stored": fields.STORED, "full": fields.FULL}

Array = npt.NDArray[Any]
_NO_ENTRIES = np.zeros((0, OPAQUE_FIELDS), dtype=np.int64)


def _allocate_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Allocate zeros.

    :raises OutOfMemoryError: If there is not enough memory.
    """
    try:
        return np.zeros(shape, dtype)
    except MemoryError:
        raise out_of_memory_error(math.prod(shape) * np.dtype(dtype).itemsize) from None


class SharedLog(NamedTuple):
    """Memory of a log that processes share.

    :ivar arrays: Counters and arrays.
    :ivar segments: Segments, by slot.
    """

    arrays: MemoryFile
    segments: MemoryFile

    def map(self, slot: int) -> Any:
        """Map the memory of a slot."""
        size = self.segments.n_bytes // _SHARED_SLOTS
        return self.segments.map(slot * size, size)


class Column(NamedTuple):
    """Frames of one kind, such as those of one key of a ``Dict`` observation.

    :ivar layout: How a stack is made of frames.
    :ivar max_error: Largest error per byte; 0 is exact.
    :ivar patches: Whether frames are stored as patches, if these are smaller.
    :ivar is_waiting: Whether a log with an error will follow, whose kernels can be used for this one.
    :ivar encoder: Codec that encodes frames before they are written, or None.
    """

    layout: StackLayout
    max_error: int = 0
    patches: bool = True
    is_waiting: bool = False
    encoder: JpegCodec | None = None


class FrameLog:
    """Ring of transitions in an append-only log.

    :param capacity: Rows of the ring; each has one transition per environment.
    :param n_envs: Number of environments.
    :param columns: Kinds of frames.
    :param row_bytes: Size of the caller's data per row.
    :param folder: Existing folder for the segments, or None for memory.
    :param rows: Array to use as :attr:`rows`, or None for a new one of zeros.
    :param n_streams: Number of streams, if it is not that of the environments, see :func:`log_move.find_stream`.
    :ivar keeps_dead: Whether segments without live rows are kept, so that :meth:`roll_back` can restore them.
    :ivar is_in_place: Returns whether ``folder`` was neither moved nor replaced.
    :ivar state: State that the kernels share, see ``log_state``.
    :ivar pairs: Shape ``(capacity, n_envs, n_columns)``, see ``log_state``.
    :ivar rows: Data of the caller, shape ``(capacity, row_bytes)``.
    :ivar record_words: Largest number of words of a record.
    :ivar most_words: Largest number of words of a segment; a record more may be allocated.
    :raises OutOfMemoryError: If there is not enough memory.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        columns: Sequence[Column],
        *,
        row_bytes: int = 0,
        folder: Path | None = None,
        rows: Array | None = None,
        n_streams: int | None = None,
    ) -> None:
        self.columns, self.folder, self.capacity, self.n_envs = tuple(columns), folder, capacity, n_envs
        self.n_streams, self.keeps_dead = n_streams or n_envs, False
        self._has_gaps = n_streams is not None  # rows in any order
        self.uses = np.zeros(self.n_streams + 2, dtype=np.int64)  # see find_stream
        self._shared: SharedLog | None = None
        self.state = np.zeros(N_LOG + N_COLUMN * len(columns), dtype=np.int64)
        self.pairs = _allocate_zeros((capacity, n_envs, len(columns)), np.int64)
        self.rows = _allocate_zeros((capacity, row_bytes), np.uint8) if rows is None else rows
        self._encoders = {number: column.encoder for number, column in enumerate(columns) if column.encoder is not None}
        self._is_prepared, self._scratch_bytes = [False] * len(columns), list[int]()
        is_exact = not any(column.max_error or column.is_waiting for column in columns)
        self._push_rows, self._decode = (push, decode_transitions) if is_exact else (push_bounded, decode_bounded)
        self.is_in_place: Callable[[], bool] = lambda: True
        self._memory: dict[tuple[int, int], Array] = {}
        self._segments: dict[int, Segment] = {}
        self._spare: Segment | None = None
        state = self.state
        state[[fields.CAPACITY, fields.N_ENVS, fields.N_COLUMNS]] = capacity, n_envs, len(columns)
        state[[fields.ROW_BYTES, fields.FRAMED, fields.ROW_INPUT]] = row_bytes, folder is not None, -1
        state[[fields.PAIRS, fields.ROWS]] = address_of(self.pairs), address_of(self.rows)
        for number, column in enumerate(columns):
            self._add_column(N_LOG + N_COLUMN * number, column)
        self.record_words = self._count_record_words()
        self.most_words = max(_MOST_WORDS, 2 * self.record_words)
        most = self.most_words + self.record_words + 2 * SEGMENT_HEADER
        state[fields.SEGMENT_SHIFT] = most.bit_length()
        self._resize_tables(16)
        self._inputs = [N_LOG + N_COLUMN * number + fields.OBS_INPUT for number in range(len(columns))]
        self._numbers = state.data  # items of it are set in half the time

    def _allocate(self, c: int, field: int, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> Array:
        """Allocate an array of a column, zeros, and put its address in the state."""
        array = self._memory[c, field] = _allocate_zeros(shape, dtype)
        self.state[c + field] = address_of(array)
        return array

    def _add_column(self, c: int, column: Column) -> None:
        """Initialize the state of a column, which begins at index ``c``."""
        layout, n = column.layout, self.n_streams
        n_bytes = layout.frame_bytes
        padded = -(-n_bytes // PADDING) * PADDING
        order = PLANAR if layout.planar or layout.n_stack == 1 else INTERLEAVED
        self.state[c : c + fields.ORDER + 1] = (
            *(layout.n_stack, n_bytes, padded, layout.pixels, layout.frame_channels),
            *(layout.dtype.itemsize, order),
        )
        self.state[c + fields.CHAIN] = CHAIN * column.patches
        # Patches of large frames take long to apply, but little memory compared with the frames.
        self.state[c + fields.BUDGET] = n_bytes // 3 if padded > LARGE_FRAME else n_bytes
        self.state[c + fields.ENTRY_WORDS], self.state[c + fields.SHARED_KEY] = padded // 4 + 4, -1
        self.state[c + fields.ABOVE] = layout.row_bytes * -(-GROUP // layout.row_bytes)
        self.state[c + fields.CHANNEL] = layout.channel_bytes if layout.channel_bytes >= GROUP else 0
        self._allocate_frames(c, max(layout.n_stack, 2))
        self._allocate(c, fields.STREAMS, (n, N_STREAM), np.int64)
        n_frames = SCRATCH_FRAMES_BOUNDED if column.max_error else SCRATCH_FRAMES
        self._allocate(c, fields.SCRATCH, (n_frames * (padded + PITCH_SLACK) + WORK_SLACK,))
        is_planar = bool(self.state[c + fields.ORDER] == PLANAR)
        self._scratch_bytes.append(count_scratch_bytes(layout.n_stack, padded, planar=is_planar))
        self.state[c + fields.BOUND], self.state[c + fields.ENCODED] = column.max_error, column.encoder is not None
        if column.max_error:
            self._allocate(c, fields.DECODED, (n * padded + 64,))

    def _allocate_frames(self, c: int, n_slots: int) -> None:
        """Allocate memory for the newest frames of the streams of a column."""
        self._allocate(c, fields.FRAMES, (self.n_streams * n_slots * int(self.state[c + fields.PADDED_BYTES]) + 64,))
        self.state[c + fields.SLOTS] = n_slots

    @defer_signals  # otherwise the state could have the address of freed memory
    def _prepare_interleaved(self, number: int) -> None:
        """Allocate what is needed to compare interleaved stacks of a column."""
        layout, c = self.columns[number].layout, N_LOG + N_COLUMN * number
        mask = shared_byte_mask(layout)
        self._allocate(c, fields.MASK, (len(mask),))[:] = mask
        if layout.n_stack != 4 or layout.frame_bytes != layout.pixels:  # stacks are kept, too
            self.close_segment()  # the newest frames are not known any more
            self._allocate_frames(c, layout.n_stack + 1)
        self._is_prepared[number] = True

    def _resize_tables(self, n_slots: int) -> None:
        if self._shared is not None:
            raise out_of_memory_error(4 * self.most_words)
        tables = []
        for field in (fields.TABLE, fields.LIVE, fields.USED, _MOST_LIVE, _NUMBERS):
            old, table = self._memory.get((0, field)), _allocate_zeros((n_slots,), np.int64)
            if old is not None:
                table[: len(old)] = old
            tables.append(table)
        self._set_tables(tables)

    def _set_tables(self, tables: Sequence[Array]) -> None:
        """Use these tables: addresses, live rows, words, most live rows, and numbers of segments, by slot."""
        names = (fields.TABLE, fields.LIVE, fields.USED, _MOST_LIVE, _NUMBERS)
        self._memory |= {(0, field): table for field, table in zip(names, tables, strict=True)}
        self._table, self._live, self._used, self._most_live, self._numbers_by_slot = tables
        self.state[[fields.TABLE, fields.LIVE, fields.USED]] = [address_of(table) for table in tables[:3]]
        self.state[fields.N_SLOTS] = len(self._table)

    def _count_record_words(self) -> int:
        starts = range(N_LOG, len(self.state), N_COLUMN)
        n_frames = [2 * int(self.state[c + fields.N_STACK]) * int(self.state[c + fields.ENTRY_WORDS]) for c in starts]
        return int(header_words.py_func(self.state)) + self.n_envs * sum(n_frames)

    # Adding and dropping transitions

    def set_inputs(self, number: int, obs: int, order: int, next_obs: int, next_order: int) -> None:
        """Set the stacks of a column that the next :meth:`push` writes.

        :param number: Number of the column.
        :param obs, next_obs: Addresses of the observations and of the next observations of all environments.
        :param order, next_order: Their memory orders.
        """
        numbers, at = self._numbers, self._inputs[number]
        numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = obs, order, next_obs, next_order
        if (order | next_order) & INTERLEAVED and not self._is_prepared[number]:
            self._prepare_interleaved(number)

    def push(self, *, data: int = 0, row: int = -1) -> None:
        """Write one transition of each environment.

        :param data: Address of the caller's data, ``row_bytes`` long.
        :param row: Row to write to, or -1 for the next one.
        :raises OutOfMemoryError: If there is not enough memory. Nothing was written.
        :raises StorageError: If the disk is full. Nothing was written.
        """
        if self._encoders:
            self._push_encoded(data, row)
        else:
            self._push(data, row)

    def _push(self, data: int, row: int) -> None:
        self._numbers[fields.ROW_INPUT], self._numbers[fields.DATA_INPUT] = row, data
        result = self._push_rows(self.state)
        if result == NEEDS_SEGMENT:
            self._open_segment()
            result = self._push_rows(self.state)
            start = self.state[fields.NEXT] >> self.state[fields.SEGMENT_SHIFT] << self.state[fields.SEGMENT_SHIFT]
            # The size of its first record is known only now.
            self.state[fields.END] = min(self.state[fields.END], start + self._choose_words())
        if result and not self.keeps_dead:
            self._free_dead_segments()

    @defer_signals
    def _push_encoded(self, data: int, row: int) -> None:
        """Write one transition of each environment, after the new frames of some columns were encoded."""
        state = self.state
        if not state[fields.END] or state[fields.NEXT] >= state[fields.END]:
            self._open_segment()  # in a new segment, other frames are new
        new = self._find_new_frames([*self._encoders])
        kept = []  # until they were written
        try:
            for number, encoder in self._encoders.items():
                c = N_LOG + N_COLUMN * number
                n_bytes = int(state[c + fields.FRAME_BYTES])
                blobs = [np.frombuffer(encoder.encode(frame), np.uint8) for frame in new[number]]
                used = [(address_of(blob), len(blob)) if len(blob) < n_bytes else (0, 0) for blob in blobs]
                table = np.array([(0, 0), *used], dtype=np.int64).reshape(-1)[1:].copy()
                kept.append((blobs, table))
                state[c + fields.BLOBS] = address_of(table)
            self._push(data, row)
        finally:
            state[fields.BLOBS + N_LOG :: N_COLUMN] = 0

    def _find_new_frames(self, numbers: list[int]) -> dict[int, Array]:
        """Return the frames of some columns that the next push will write, without writing them."""
        state = self.state
        places = {}
        for number in numbers:
            c = N_LOG + N_COLUMN * number
            n_bytes = int(state[c + fields.FRAME_BYTES])
            kept = int(state[c + fields.SLOTS] * state[c + fields.PADDED_BYTES]) + 8 * N_STREAM
            memory = np.empty(kept + 2 * self.n_envs * int(state[c + fields.N_STACK]) * n_bytes, np.uint8)
            state[c + fields.NEW_FRAMES] = address_of(memory)
            places[number] = memory[kept:].reshape(-1, n_bytes)
        try:
            self._push_rows(state)
            new = {}
            for number, frames in places.items():
                n_bytes = int(state[N_LOG + N_COLUMN * number + fields.NEW_FRAMES]) - address_of(frames)
                new[number] = frames[: n_bytes // frames.shape[1]]
        finally:
            state[fields.NEW_FRAMES + N_LOG :: N_COLUMN] = 0
        return new

    @defer_signals
    def drop(self, position: int, stored: int) -> None:
        """Drop all transitions except the ``stored`` ones before a position, which becomes the next one.

        :raises OutOfMemoryError: If there is not enough memory. Nothing was dropped.
        :raises StorageError: If the disk is full. Nothing was dropped.
        """
        self._prepare_note()
        drop_rows(self.state, self._n_written, position, stored)
        if self.folder is not None:
            write_note(self.state, False)
        self._free_dead_segments()

    def write_newest_data(self) -> None:
        """Make a change of the caller's data in the newest row survive the process.

        :raises StorageError: If the disk is full.
        """
        if self.folder is not None:
            self._prepare_note()
            write_note(self.state, True)

    def _prepare_note(self) -> None:
        """Open a segment if a note would not fit into the open one. In memory, there are no notes."""
        state = self.state
        if self.folder is not None and (not state[fields.END] or state[fields.NEXT] >= state[fields.END]):
            self._open_segment()

    @defer_signals
    def clear(self) -> None:
        """Drop all transitions, and start in row 0 again."""
        self.drop(0, 0)
        self.state[fields.FULL] = 0
        if self.folder is None:
            self.close_segment()
            self._free_dead_segments()

    def count_oldest(self) -> int:
        """Return the number of oldest rows that must be dropped to free the oldest segment, which is closed for it."""
        shift, first = 23 + int(self.state[fields.SEGMENT_SHIFT]), self.position - self.stored
        rows = (first + np.arange(self.stored)) % self.capacity
        slots = self.pairs[rows, 0, 0] >> shift
        if self.state[fields.END] and slots[0] == self._open_slot:
            self.close_segment()
        found = np.flatnonzero(slots != slots[0])
        return int(found[0]) if len(found) else self.stored

    # Reading

    def contains(self, rows: Array, envs: Array) -> bool:
        """Return whether all these rows and environments exist.

        :param rows, envs: Contiguous, int64, shape ``(n,)``.
        """
        return bool(are_inside(rows, envs, self.capacity, self.n_envs))

    def decode(
        self,
        number: int,
        rows: Array,
        envs: Array,
        observations: Array | None,
        next_observations: Array | None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Decode a batch of transitions of a column, in several threads if it is large.

        :param number: Number of the column.
        :param rows, envs: As for :meth:`contains`. Without environments, ``rows`` are handles.
        :param observations, next_observations: Outputs, C-contiguous, or None.
        :param num_threads: Threads to decode in.
        """
        layout, encoder = self.columns[number].layout, self.columns[number].encoder
        outs = observations, next_observations
        addresses = [0 if out is None else address_of(out) for out in outs]

        def decode_part(start: int, stop: int) -> None:
            n_most = 0 if encoder is None else 2 * layout.n_stack * (stop - start)
            entries = np.empty((n_most, OPAQUE_FIELDS), np.int64) if n_most else _NO_ENTRIES
            scratch = np.empty(self._scratch_bytes[number], np.uint8)
            n = self._decode(self.state, number, rows, envs, start, stop, *addresses, entries, address_of(scratch))
            if encoder is not None:
                _decode_opaque(layout, encoder, entries[:n], outs)

        if num_threads == 1:
            decode_part(0, len(rows))
        else:
            run_in_threads(decode_part, len(rows), num_threads=num_threads)

    def find_handles(self, number: int, rows: Array, envs: Array) -> tuple[Array, Array]:
        """Return the handles of observations and next observations, which :meth:`decode` decodes.

        :param number: Number of the column.
        :param rows, envs: As for :meth:`contains`.
        """
        found = np.empty((2, len(rows)), np.int64)
        find_handles(self.state, number, rows, envs, found[0], found[1])
        return found[0], found[1]

    # Segments

    @defer_signals
    def _open_segment(self) -> None:
        """Open a new segment, in which all streams start over."""
        if not self.is_in_place():
            raise StorageError(f"{self.folder} was moved or replaced. Move it back, or pass another storage_dir")
        state, words = self.state, self._choose_words()
        number = int(state[fields.SEQUENCE]) + 1
        slot = self._take_slot()
        segment = self._new_segment(words + self.record_words + 2 * SEGMENT_HEADER, number, slot)
        self.close_segment()
        self._add_segment(slot, segment)
        start = slot << int(state[fields.SEGMENT_SHIFT])
        state[fields.SEQUENCE], state[fields.RESTART_WORDS] = number, 0
        state[fields.NEXT] = start + SEGMENT_HEADER
        for c in range(N_LOG, len(state), N_COLUMN):
            state[c + fields.SHARED_KEY] = -1
            streams = self._memory[c, fields.STREAMS]
            streams[:, [fields.NEWEST, fields.KEY]] = -1
            streams[:, [fields.CHAIN_LENGTH, fields.CHAIN_BYTES, fields.KEY_BYTES, fields.BACKOFF]] = 0
        state[fields.END] = start + words  # last, because it makes the segment usable
        self._open_slot = slot

    def _add_segment(self, slot: int, segment: Segment) -> None:
        self._segments[slot], self._table[slot] = segment, segment.address
        self._numbers_by_slot[slot] = segment.number

    def _new_segment(self, n_words: int, number: int, slot: int) -> Segment:
        """Return a segment of at least ``n_words``, in memory that was freed before if it fits."""
        if self._shared is not None:
            return Segment.create(n_words, None, number, self._shared.map(slot))
        spare = self._spare
        if spare is None or not n_words <= spare.n_words <= 2 * n_words:
            return Segment.create(n_words, self.folder, number)
        self._spare, spare.number = None, number
        return spare

    def _choose_words(self) -> int:
        """Return the size of the next segment.

        A segment's first record stores whole frames, so short segments take more memory. In long ones, more rows wait
        for the last live row of their segment. The excess is smallest if both cost the same.
        """
        state = self.state
        restart = int(state[fields.RESTART_WORDS]) or _FIRST_RESTART * self.record_words // 8
        words = min(math.isqrt(2 * restart * self.n_words), _MOST_WORDS)
        return min(max(words, _LEAST_RESTARTS * restart, _LEAST_WORDS), self.most_words)

    @property
    def n_words(self) -> int:
        """Number of words in the segments that contain live rows."""
        return int(self.state[fields.USED_WORDS]) + self._open_words

    @property
    def _open_words(self) -> int:
        state = self.state
        return int(state[fields.NEXT] & ((1 << int(state[fields.SEGMENT_SHIFT])) - 1)) if state[fields.END] else 0

    def close_segment(self) -> None:
        """Close the open segment, if there is one, so that its file takes no more space than needed."""
        state = self.state
        if not state[fields.END]:
            return
        words, slot = self._open_words, self._open_slot
        state[fields.END] = 0
        self._used[slot], self._most_live[slot] = words, int(self._live[slot])
        if self._live[slot]:
            state[fields.USED_WORDS] += words
        else:
            state[fields.DIED] += 1
        if self.is_in_place():
            self._segments[slot].truncate(words + 1)

    @defer_signals
    def _free_dead_segments(self) -> None:
        """Free the closed segments without live rows, the oldest ones first.

        Those of a ring in files wait for older ones, because :meth:`recover` expects that no number is missing. The
        newest file stays, because it may contain the position of an empty ring.
        """
        is_dead = (self._live == 0) & (self._table != 0)
        if self.folder is not None:
            is_dead[self._numbers_by_slot == self.state[fields.SEQUENCE]] = False
        elif self.state[fields.END]:
            is_dead[self._open_slot] = False
        for slot in sorted(self._segments, key=lambda slot: self._segments[slot].number):
            if is_dead[slot]:
                self._remove_segment(slot)
            elif self.folder is not None and not self._has_gaps:
                break
        self.state[fields.DIED] = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use by frames and the index of all written rows, in memory or in files."""
        n_rows = self._n_written
        kept = (fields.FRAMES, fields.DECODED, fields.STREAMS)
        streams = sum(array.nbytes for (c, field), array in self._memory.items() if c and field in kept)
        return 4 * self.n_words + self.pairs[:n_rows].nbytes + self.rows[:n_rows].nbytes + streams

    def _remove_segment(self, slot: int) -> None:
        self._used[slot] = self._table[slot] = self._numbers_by_slot[slot] = 0
        segment = self._segments.pop(slot)
        if self.is_in_place():
            segment.delete()
        if self._shared is not None:
            _system.discard_pages(segment.address, 4 * segment.n_words)
        elif self.folder is None:
            self._spare = segment  # the system takes long to provide memory of zeros

    # Rows in any order

    def mark(self) -> tuple[int, int, int]:
        """Return the end of the log, for :meth:`roll_back`."""
        state = self.state
        slot = self._open_slot if state[fields.END] else -1
        return slot, int(state[fields.NEXT]), int(state[fields.SEQUENCE])

    def roll_back(self, mark: tuple[int, int, int], rows: Array, pairs: Array) -> None:
        """Remove everything that was written since :meth:`mark`, while ``keeps_dead`` was set.

        :param mark: Result of :meth:`mark`.
        :param rows: Rows that may have been written since.
        :param pairs: Their pairs before.
        """
        state, (slot, end, sequence) = self.state, mark
        self.pairs[rows] = pairs
        for number in [number for number, segment in self._segments.items() if segment.number > sequence]:
            self._remove_segment(number)
        state[fields.END] = 0
        if slot >= 0:  # the streams continue frames that are gone, so the segment is closed
            at = end & ((1 << int(state[fields.SEGMENT_SHIFT])) - 1)
            self._segments[slot].words[at] = 0
            self._segments[slot].truncate(at + 1)
            self._used[slot], self._most_live[slot] = at, int(self._live[slot])
        self.count_live()

    def count_live(self) -> None:
        """Count the live rows of all segments after pairs were changed, and free segments without any."""
        state = self.state
        live = self.pairs[self.pairs != 0] >> 23 >> int(state[fields.SEGMENT_SHIFT])
        self._live[:] = np.bincount(live, minlength=len(self._live))
        state[fields.USED_WORDS] = self._used[self._live > 0].sum()
        self._free_dead_segments()

    def closed_segments(self) -> tuple[Array, Array, Array, Array]:
        """Return slots, words, live rows, and most live rows, of the closed segments that contain live rows."""
        open_slot = self._open_slot if self.state[fields.END] else -1
        slots = np.flatnonzero((self._live > 0) & (np.arange(len(self._live)) != open_slot))
        return slots, self._used[slots], self._live[slots], np.maximum(self._most_live[slots], 1)

    @property
    def limit(self) -> int:
        """Position behind the memory of the open segment; 0 if none is open."""
        if not self.state[fields.END]:
            return 0
        return (self._open_slot << int(self.state[fields.SEGMENT_SHIFT])) + self._segments[self._open_slot].n_words

    def locate(self, pairs: Array) -> Array:
        """Return the locations of pairs, which grow with time: number of the segment and word in it; 0 without one."""
        shift = int(self.state[fields.SEGMENT_SHIFT])
        positions = pairs >> 23
        return np.where(pairs == 0, 0, self._numbers_by_slot[positions >> shift] << 32 | positions & ((1 << shift) - 1))

    # Memory that processes share

    def shared_sizes(self) -> tuple[int, int]:
        """Return the bytes of arrays, and those of a segment, for :meth:`share`."""
        self._prepare_for_sharing()
        segment_bytes = 4 * (self.most_words + self.record_words + 2 * SEGMENT_HEADER) + SLACK_BYTES
        return count_bytes(*self._shared_forms()), -(-segment_bytes // _system.PAGE) * _system.PAGE

    def _prepare_for_sharing(self) -> None:
        """Allocate arrays of the shapes that all processes use."""
        if len(self._table) != _SHARED_SLOTS:
            self._resize_tables(_SHARED_SLOTS)
        for number, is_prepared in enumerate(self._is_prepared):
            if not is_prepared:
                self._prepare_interleaved(number)

    def share(self, sizes: tuple[int, int]) -> SharedLog:
        """Move everything that changes to memory that processes share, in which no segment is open.

        :param sizes: Bytes of arrays and of a segment, at least :meth:`shared_sizes`.
        """
        assert self.folder is None
        self.close_segment()
        self._free_dead_segments()
        if len(self._segments) > _SHARED_SLOTS // 2:
            raise out_of_memory_error(4 * self.most_words)
        self.shared_sizes()
        shared = SharedLog(MemoryFile(sizes[0]), MemoryFile(_SHARED_SLOTS * sizes[1]))
        before = self._shared_arrays()
        own, self._segments = self._segments, {}
        self.attach(shared)
        for array, old in zip(self._shared_arrays(), before, strict=True):
            array[...] = old
        for slot, segment in own.items():
            copy = Segment.create(segment.n_words, None, segment.number, shared.map(slot))
            copy.words[:] = segment.words
            self._add_segment(slot, copy)
        self.save()
        return shared

    def _shared_keys(self) -> list[tuple[int, int]]:
        """Return the keys of the columns' arrays that processes share."""
        private = (fields.SCRATCH, fields.MASK)
        return sorted(key for key in self._memory if key[0] and key[1] not in private)

    def _shared_arrays(self) -> list[Array]:
        """Return all arrays that processes share, except counters."""
        tables = [self._live, self._used, self._most_live, self._numbers_by_slot]
        return [self.pairs, self.uses, *tables, *(self._memory[key] for key in self._shared_keys())]

    def _shared_forms(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return shapes and dtypes of the counters, and of all arrays that processes share."""
        return [((_N_COUNTERS,), np.dtype(np.int64)), *((array.shape, array.dtype) for array in self._shared_arrays())]

    def attach(self, shared: SharedLog) -> None:
        """Use the memory that another process has shared, instead of that of this log, which is empty."""
        self._prepare_for_sharing()
        keys = self._shared_keys()
        self._counters, self.pairs, self.uses, *rest = shared.arrays.arrays(*self._shared_forms())
        self._set_tables([np.zeros(_SHARED_SLOTS, np.int64), *rest[:4]])
        for (c, field), array in zip(keys, rest[4:], strict=True):
            self._memory[c, field] = array
            self.state[c + field] = address_of(array)
        self.state[fields.PAIRS] = address_of(self.pairs)
        self._shared = shared

    def save(self) -> None:
        """Let other processes continue this log."""
        self._counters[:-1] = self.state[fields.POSITION : fields.ROW_INPUT]
        self._counters[-1] = self.state[N_LOG + fields.SHARED_KEY]

    def load(self) -> None:
        """Continue the log as other processes have left it."""
        state, shared = self.state, self._shared
        assert shared is not None
        state[fields.POSITION : fields.ROW_INPUT] = self._counters[:-1]
        state[N_LOG + fields.SHARED_KEY] = self._counters[-1]
        if state[fields.END]:
            self._open_slot = int(state[fields.END] - 1) >> int(state[fields.SEGMENT_SHIFT])
        mapped = np.zeros(len(self._table), dtype=np.int64)
        for slot, segment in self._segments.items():
            mapped[slot] = segment.number
        for slot in np.flatnonzero(self._numbers_by_slot != mapped).tolist():
            self._segments.pop(slot, None)
            self._table[slot] = 0
            if number := int(self._numbers_by_slot[slot]):
                self._segments[slot] = segment = Segment.share(shared.map(slot), number)
                self._table[slot] = segment.address

    def repair(self) -> None:
        """Continue the log after a process was killed while it wrote. Rows refer to complete entries at any time."""
        state = self.state
        state[fields.SEQUENCE] = max(int(state[fields.SEQUENCE]), int(self._numbers_by_slot.max(initial=0)))
        state[fields.END] = 0  # behind its end, there may be entries
        for slot, segment in self._segments.items():
            self._used[slot] = self._used[slot] or segment.n_words
        self.count_live()

    # Files of an earlier process, and pickles

    def recover(self) -> None:
        """Find the rows that an earlier process left in the folder. The newest record of a row counts.

        :raises CorruptFileError: If a file is damaged, or one of a ring is missing.
        """
        assert self.folder is not None
        state = self.state
        state[fields.RECORDS] = -1  # until the first record, because killed processes leave segments without one
        for segment in open_segments(self.folder, has_gaps=self._has_gaps):
            slot = self._take_slot()
            segment.n_words = min(segment.n_words, 1 << int(state[fields.SEGMENT_SHIFT]))
            self._add_segment(slot, segment)
            state[fields.SEQUENCE] = segment.number
            expected = -1 if self._has_gaps else int(state[fields.RECORDS])
            if not replay_segment(state, slot, segment.n_words, expected, np.zeros(segment.n_words, np.uint8)):
                raise damaged_folder_error(
                    f"{segment.path} is damaged: a record does not match its checksum or the others"
                )
            self._used[slot] = int(state[fields.NEXT]) & ((1 << int(state[fields.SEGMENT_SHIFT])) - 1)
        state[fields.RECORDS] = max(0, int(state[fields.RECORDS]))
        if not self._has_gaps:
            self._drop_stale_rows()
        self.count_live()

    def _drop_stale_rows(self) -> None:
        """Drop rows of the ring that are not stored any more; raise if one of the others is missing."""
        position, stored = (int(self.state[field]) for field in (fields.POSITION, fields.STORED))
        rows = (position - 1 - np.arange(stored)) % self.capacity
        self.state[fields.FULL] |= stored > position
        if missing := np.count_nonzero(~self.pairs[rows].all(axis=(1, 2))):
            raise damaged_folder_error(f"{self.folder} is damaged: {missing} of {stored} transitions are missing")
        is_stale: npt.NDArray[np.bool_] = np.any(self.pairs, axis=(1, 2))
        is_stale[rows] = False
        self.pairs[is_stale] = 0

    def _take_slot(self) -> int:
        """Return a free slot, and make the tables longer if there is none."""
        free = np.flatnonzero(self._table == 0)
        if not len(free):
            free = np.arange(len(self._table), 2 * len(self._table))
            self._resize_tables(2 * len(self._table))
        return int(free[0])

    def contents(self) -> dict[str, Any]:
        """Return everything that is stored, as plain values and views of arrays."""
        state, n_rows = self.state, self._n_written
        words = {slot: int(self._used[slot]) for slot in self._segments}
        if state[fields.END]:
            words[self._open_slot] = self._open_words
        return {
            **{name: int(state[field]) for name, field in _COUNTERS.items()},
            "shift": int(state[fields.SEGMENT_SHIFT]),
            "pairs": self.pairs[:n_rows],
            "rows": self.rows[:n_rows],
            "segments": {slot: self._segments[slot].words[: words[slot]] for slot in sorted(self._segments)},
        }

    def restore(self, contents: dict[str, Any]) -> None:
        """Restore what :meth:`contents` has returned, in a new log with the same columns, in memory.

        :raises CorruptFileError: If segments do not fit the columns, or a row cannot be decoded. Other exceptions are
            possible if contents have another form.
        """
        state, shift = self.state, int(self.state[fields.SEGMENT_SHIFT])
        if contents["shift"] != shift:
            raise CorruptFileError(f"segments have 2**{contents['shift']} words, but these columns need 2**{shift}")
        for name, field in _COUNTERS.items():
            state[field] = contents[name]
        if not (0 <= self.position < self.capacity and 0 <= self.stored <= self.capacity):
            raise CorruptFileError(f"row {self.position} is not one of {self.capacity}")
        n_rows = len(contents["pairs"])
        self.pairs[:n_rows], self.rows[:n_rows] = contents["pairs"], contents["rows"]
        pairs = self.pairs[:n_rows].reshape(-1)
        if contents["segments"]:
            self._resize_tables(max(2 * max(contents["segments"]) + 2, 16))
        places = np.flatnonzero(pairs)
        slots = pairs[places] >> 23 >> shift
        self._live[:] = np.bincount(slots, minlength=len(self._live))
        places, ends = places[np.argsort(slots, kind="stable")], self._live.cumsum()
        if not np.isin(slots, [*contents["segments"]]).all():
            raise CorruptFileError("a segment is missing")
        for slot, words in contents["segments"].items():
            segment = Segment.create(len(words), None, slot + 1)
            segment.words[:] = words
            self._add_segment(slot, segment)
            some, checked = places[ends[slot] - self._live[slot] : ends[slot]], np.zeros(len(words), np.uint8)
            if len(words) > 1 << shift or not are_pairs(state, slot, len(words), some, checked):
                raise CorruptFileError("an entry refers to another one that does not exist")
            self._used[slot], state[fields.SEQUENCE] = len(words), max(state[fields.SEQUENCE], slot + 1)
        self.count_live()

    @property
    def position(self) -> int:
        """Row of the next transition."""
        return self._numbers[fields.POSITION]

    @property
    def stored(self) -> int:
        """Number of rows with transitions, which end before the position."""
        return self._numbers[fields.STORED]

    @property
    def full(self) -> bool:
        """Whether the position has returned to row 0."""
        return bool(self._numbers[fields.FULL])

    @property
    def _n_written(self) -> int:
        """Number of rows that have ever been written."""
        return self.capacity if self.state[fields.FULL] else int(self.state[fields.POSITION])

    @property
    def n_records(self) -> int:
        """Number of records that were ever written, modulo 2**32."""
        return int(self.state[fields.RECORDS]) & 0xFFFFFFFF

    @n_records.setter
    def n_records(self, value: int) -> None:
        self.state[fields.RECORDS] = value

    def has_torn_record(self) -> bool:
        """Return whether a process was killed while it wrote a record, which follows the last one."""
        shift, at = int(self.state[fields.SEGMENT_SHIFT]), int(self.state[fields.NEXT])
        segment, at = self._segments.get(at >> shift), at & ((1 << shift) - 1)
        return segment is not None and at > 0 and bool(segment.words[at : at + self.record_words].any())


def _decode_opaque(
    layout: StackLayout, codec: JpegCodec, entries: Array, outs: tuple[Array | None, Array | None]
) -> None:
    """Decode the entries of a batch that a codec has encoded.

    :param entries: Result of the kernel that decodes.
    :param outs: Observations and next observations of the whole batch.
    """
    form: tuple[int, ...] = (layout.n_stack, layout.frame_bytes)
    if not layout.planar and layout.n_stack > 1:
        form = (layout.pixels, layout.n_stack, layout.frame_bytes // layout.pixels)
    views = [None if out is None else out.reshape(len(out), -1).view(np.uint8).reshape(-1, *form) for out in outs]
    decoded: dict[int, Array] = {}
    for address, size, sample, side, place in entries.tolist():
        frame = decoded.get(address)
        if frame is None:
            blob = memoryview((ctypes.c_char * size).from_address(address))
            with as_corrupt_file("a stored image is"):
                frame = decoded[address] = np.frombuffer(codec.decode(blob), np.uint8).reshape(layout.frame_bytes)
        view = views[side]
        assert view is not None
        if len(form) == 2:
            view[sample, place] = frame
        else:
            view[sample, :, place] = frame.reshape(layout.pixels, -1)
