"""Kernels that drop transitions from a log, and find those in the files of an earlier process."""

from __future__ import annotations

from numba import int64, uint32, uint64

from rl_ext_core.frames.kernel_primitives import atomic_kernel, copy_frame, int64s, kernel, uint32s
from rl_ext_core.frames.log_state import (
    CAPACITY,
    FULL,
    N_COLUMNS,
    N_ENVS,
    NEXT,
    PAIRS,
    POSITION,
    RECORD_HEADER,
    RECORDS,
    ROW_BYTES,
    ROWS,
    SEGMENT_HEADER,
    SEGMENT_SHIFT,
    SIZE_BITS,
    STORED,
    address_at,
)
from rl_ext_core.frames.log_write import finish_record, header_words, record_checksum, set_pair

# Results of ``replay_segment``.
CLEAN, DAMAGED = range(2)

_MOST_SKIPPED = 1 << 22  # records; a segment has fewer


@atomic_kernel
def drop_rows(state, position, stored):  # type: ignore[no-untyped-def]
    """Drop all transitions except the ``stored`` ones before a position, which becomes the next one."""
    capacity, n_pairs = state[CAPACITY], state[N_ENVS] * state[N_COLUMNS]
    for row in range(capacity if state[FULL] else state[POSITION]):
        if (position - 1 - row) % capacity >= stored:
            for k in range(n_pairs):
                if int64s(state[PAIRS] + 8 * (row * n_pairs + k), 1)[0]:
                    set_pair(state, row * n_pairs + k, int64(0))
    state[POSITION], state[STORED] = position, stored


@atomic_kernel
def write_note(state, has_data):  # type: ignore[no-untyped-def]
    """Write a record that only sets the position and the number of stored rows.

    :param has_data: Whether it also replaces the caller's data of the newest row.
    """
    start = state[NEXT]
    end = start + RECORD_HEADER
    if has_data:
        row = (state[POSITION] - 1) % state[CAPACITY]
        source = state[ROWS] + row * state[ROW_BYTES]
        copy_frame(uint64(address_at(state, end)), uint64(source), state[ROW_BYTES])
        end += (state[ROW_BYTES] + 3) // 4
    finish_record(state, start, end, state[POSITION], False)
    state[NEXT] = end


@kernel
def replay_segment(state, slot, n_words, expected):  # type: ignore[no-untyped-def]
    """Enter the transitions of a segment that an earlier process wrote into the ring.

    ``SEQUENCE`` must be the number of the segment. ``RECORDS`` and ``NEXT`` become those behind its last record.

    :param slot: Slot of the segment.
    :param n_words: Words in its file.
    :param expected: Number that its first record must have, modulo 2**32, or -1.
    :return: ``CLEAN`` or ``DAMAGED``.
    """
    n_pairs, n_header = state[N_ENVS] * state[N_COLUMNS], header_words(state)
    start = slot << state[SEGMENT_SHIFT]
    at, stop = start + SEGMENT_HEADER, start + n_words
    result = CLEAN
    while at < stop:
        words = uint32s(address_at(state, at), RECORD_HEADER)
        if words[0] == 0:
            break
        size, is_transition = int64(words[0]) & SIZE_BITS, int64(words[0]) >> 31
        least = n_header if is_transition else RECORD_HEADER
        if size < least or at + size > stop or record_checksum(state, at, words[0]) != words[1]:
            result = DAMAGED
            break
        if expected >= 0 and words[2] != uint32(expected):
            result = DAMAGED
            break
        row, stored = int64(words[3]), int64(words[4])
        if is_transition:
            heads = uint32s(address_at(state, at) + 4 * RECORD_HEADER, 2 * n_pairs)
            for k in range(n_pairs):
                pair = int64(heads[2 * k]) | int64(heads[2 * k + 1]) << 32
                # The slot was that of another process.
                shift = 23 + state[SEGMENT_SHIFT]
                set_pair(state, row * n_pairs + k, (pair & ((int64(1) << shift) - 1)) | slot << shift)
            if state[ROW_BYTES]:
                source = address_at(state, at) + 4 * (RECORD_HEADER + 2 * n_pairs)
                copy_frame(uint64(state[ROWS] + row * state[ROW_BYTES]), uint64(source), state[ROW_BYTES])
            state[POSITION] = row + 1
            if state[POSITION] == state[CAPACITY]:
                state[POSITION], state[FULL] = 0, 1
        else:
            state[POSITION] = row
            if size > RECORD_HEADER:  # it replaces the data of the newest row
                newest = (row - 1) % state[CAPACITY]
                source = address_at(state, at) + 4 * RECORD_HEADER
                copy_frame(uint64(state[ROWS] + newest * state[ROW_BYTES]), uint64(source), state[ROW_BYTES])
            if row == 0 and stored == 0:
                state[FULL] = 0
        state[STORED] = stored
        expected = int64(words[2]) + 1 & 0xFFFFFFFF
        state[RECORDS] = expected
        at += size
    state[NEXT] = at
    return result


@kernel
def count_records(state, slot, n_words):  # type: ignore[no-untyped-def]
    """Return the number of completed records, with those behind damage in a segment.

    :param slot, n_words: As for :func:`replay_segment`, which has replayed this segment last.
    """
    start, n_records = slot << state[SEGMENT_SHIFT], state[RECORDS]
    stop = start + n_words
    if state[NEXT] < stop:  # a damaged record was complete if it has a size
        n_records += int64(uint32s(address_at(state, state[NEXT]), 1)[0] != 0)
    for at in range(state[NEXT], stop - RECORD_HEADER):
        words = uint32s(address_at(state, at), RECORD_HEADER)
        size, skipped = int64(words[0]) & SIZE_BITS, int64(words[2]) - n_records
        if size >= RECORD_HEADER and at + size <= stop and 0 <= skipped <= _MOST_SKIPPED:  # noqa: SIM102
            if record_checksum(state, at, words[0]) == words[1]:
                n_records += skipped + 1
    return n_records
