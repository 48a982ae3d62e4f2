"""Kernels that drop transitions from a log, and find and check those in files of an earlier process, or a pickle."""

from __future__ import annotations

from numba import int64, uint32, uint64

from rl_ext_core.frames.kernel_primitives import (
    atomic_kernel,
    copy_frame,
    inner,
    int64s,
    kernel,
    load_u8,
    load_u16,
    load_u32,
    uint32s,
)
from rl_ext_core.frames.log_patch import EXACT_RUNS, LARGE_FRAME
from rl_ext_core.frames.log_quantize import BY_CHANNEL, GROUP
from rl_ext_core.frames.log_state import (
    ABOVE,
    BOUND,
    CAPACITY,
    CHANNEL,
    DELTA,
    ENCODED,
    FRAME_BYTES,
    FULL,
    KEY_FRAME,
    MAX_CHAIN,
    N_COLUMNS,
    N_ENVS,
    N_STACK,
    NEXT,
    OPAQUE,
    PADDED_BYTES,
    PAIRS,
    POSITION,
    QUANTIZED,
    RECORD_HEADER,
    RECORDS,
    RESIDUAL_DELTA,
    RESIDUAL_START,
    ROW_BYTES,
    ROWS,
    SEGMENT_HEADER,
    SEGMENT_SHIFT,
    SIZE_BITS,
    START,
    STORED,
    address_at,
    column_start,
    read_header,
)
from rl_ext_core.frames.log_write import finish_record, header_words, record_checksum, set_pair


@atomic_kernel
def drop_rows(state, n_rows, position, stored):  # type: ignore[no-untyped-def]
    """Drop all transitions except the ``stored`` ones before a position, which becomes the next one.

    :param n_rows: Rows from here on are empty.
    """
    capacity, n_pairs = state[CAPACITY], state[N_ENVS] * state[N_COLUMNS]
    for row in range(n_rows):
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


# A checksum detects damage, but not a change whose checksum was computed again. The kernels that decode check nothing,
# because that would take time in each batch. So each entry and pair is checked once, when its segment is opened.


@inner
def _is_patch(patch, size, narrow, n_bytes):  # type: ignore[no-untyped-def]
    """Return whether a patch reads its own bytes only, and writes to its frame only."""
    if size == 0:
        return True
    is_large, step = n_bytes > LARGE_FRAME, 2 if narrow else 3
    at = 4 if is_large else 2
    if size < at:
        return False
    n_headers = int64(load_u32(uint64(patch))) if is_large else int64(load_u16(uint64(patch)))
    used, to = at + step * n_headers, int64(0)
    if used > size:
        return False
    for i in range(n_headers):
        header = uint64(patch + at)
        to += int64(load_u8(header)) if narrow else int64(load_u16(header))
        if is_large and i < n_headers - EXACT_RUNS and to + 16 > n_bytes:
            return False
        n = int64(load_u8(header + uint64(step - 1)))
        to += n
        used += n
        at += step
    return to <= n_bytes and used <= size


@inner
def _is_quantized(state, c, contents, size):  # type: ignore[no-untyped-def]
    """Return whether a quantized frame reads its own bytes only."""
    n_groups, channel = (state[c + FRAME_BYTES] + GROUP - 1) // GROUP, state[c + CHANNEL]
    used = n_groups
    if used <= size:
        for group in range(n_groups):
            n_bits = int64(load_u8(uint64(contents + group)))
            if n_bits >= BY_CHANNEL and channel and group * GROUP >= state[c + ABOVE] + channel:
                n_bits -= BY_CHANNEL
            used += n_bits * (GROUP // 8) if n_bits <= 8 else size
    return used <= size


@inner
def _is_entry(state, c, position, start, stop):  # type: ignore[no-untyped-def]
    """Return whether an entry can be decoded, given the frame of the previous one."""
    address = address_at(state, position)
    kind, narrow, size, _, contents = read_header(address)
    n_bytes, behind = state[c + FRAME_BYTES], address + 4 * (stop - position)
    if kind == START or kind == RESIDUAL_START:  # noqa: SIM109
        key = position - int64(load_u32(uint64(contents)))
        contents += 4
        if not start <= key < position:
            return False
        key_kind, _, key_size, _, frame = read_header(address_at(state, key))
        if key_kind > KEY_FRAME or key_size != n_bytes or frame + n_bytes > behind:
            return False
    if contents + size > behind:
        return False
    if kind <= KEY_FRAME:
        return size == n_bytes
    if kind == OPAQUE or state[c + ENCODED]:
        return kind == OPAQUE and state[c + ENCODED] != 0
    if kind >= RESIDUAL_START:
        if state[c + BOUND] == 0:
            return False
        if kind == QUANTIZED:
            return _is_quantized(state, c, contents, size)
        contents += state[c + PADDED_BYTES] // 4
        size -= state[c + PADDED_BYTES] // 4
    return size >= 0 and _is_patch(contents, size, narrow, n_bytes)


@inner
def _is_pair(state, c, pair, start, stop, checked):  # type: ignore[no-untyped-def]
    """Return whether a transition can be decoded.

    :param pair: Its pair.
    :param start, stop: Positions of the first entry or record of its segment, and behind the last word.
    :param checked: By word of the segment, whether an entry there was checked; updated.
    """
    position, back, depth, next_depth = pair >> 23, pair >> 12 & 63, pair >> 6 & 63, pair & 63
    if back > state[c + N_STACK] or not 0 < depth <= state[c + N_STACK] or not 0 < next_depth <= state[c + N_STACK]:
        return False
    needed, n, in_chain = max(next_depth, back + depth), 0, 0
    while in_chain < MAX_CHAIN:
        if not start <= position < stop:
            return False
        word = position & ((1 << state[SEGMENT_SHIFT]) - 1)
        if checked[word] == 0:
            if not _is_entry(state, c, position, start, stop):
                return False
            checked[word] = 1
        kind, _, _, distance, _ = read_header(address_at(state, position))
        n += 1
        in_chain += 1
        if kind != DELTA and kind != RESIDUAL_DELTA:
            if n >= needed:
                return True
            in_chain = 0
        position -= distance
    return False


@kernel
def are_pairs(state, slot, n_words, places, checked):  # type: ignore[no-untyped-def]
    """Return whether all transitions can be decoded whose pairs refer to a segment.

    :param slot, n_words: Slot of the segment, and number of its words.
    :param places: Places of the pairs in their table.
    :param checked: Zeros, shape ``(n_words,)``.
    """
    pairs = int64s(state[PAIRS], state[CAPACITY] * state[N_ENVS] * state[N_COLUMNS])
    start = slot << state[SEGMENT_SHIFT]
    for i in range(len(places)):
        c = column_start(places[i] % state[N_COLUMNS])
        if not _is_pair(state, c, pairs[places[i]], start + SEGMENT_HEADER, start + n_words, checked):
            return False
    return True


@inner
def _is_record(state, start, stop, checked):  # type: ignore[no-untyped-def]
    """Return whether a record is intact, and refers to rows and entries that exist.

    :param start, stop: Position of the record, and behind the last word of the segment.
    :param checked: As for :func:`replay_segment`.
    """
    words, n_pairs = uint32s(address_at(state, start), RECORD_HEADER), state[N_ENVS] * state[N_COLUMNS]
    size, is_transition = int64(words[0]) & SIZE_BITS, int64(words[0]) >> 31
    least = header_words(state) if is_transition else RECORD_HEADER
    if size < least or start + size > stop or record_checksum(state, start, words[0]) != words[1]:
        return False
    if int64(words[3]) >= state[CAPACITY] or int64(words[4]) > state[CAPACITY]:
        return False
    if not is_transition:
        return size == RECORD_HEADER or size == RECORD_HEADER + (state[ROW_BYTES] + 3) // 4
    for k in range(n_pairs):
        first = (start >> state[SEGMENT_SHIFT] << state[SEGMENT_SHIFT]) + SEGMENT_HEADER
        pair = _read_pair(state, start, k)
        if not _is_pair(state, column_start(k % state[N_COLUMNS]), pair, first, start + size, checked):
            return False
    return True


@inner
def _read_pair(state, start, k):  # type: ignore[no-untyped-def]
    """Return pair number ``k`` of a record, in the slot in which its segment is now."""
    words, shift = uint32s(address_at(state, start) + 4 * (RECORD_HEADER + 2 * k), 2), 23 + state[SEGMENT_SHIFT]
    pair = int64(words[0]) | int64(words[1]) << 32
    return (pair & ((int64(1) << shift) - 1)) | start >> state[SEGMENT_SHIFT] << shift


@kernel
def replay_segment(state, slot, n_words, expected, checked):  # type: ignore[no-untyped-def]
    """Enter the transitions of a segment that an earlier process wrote into the ring.

    ``SEQUENCE`` must be the number of the segment. ``RECORDS`` and ``NEXT`` become those behind its last record.

    :param slot: Slot of the segment.
    :param n_words: Words in its file.
    :param expected: Number that its first record must have, modulo 2**32, or -1.
    :param checked: Zeros, shape ``(n_words,)``, see ``_is_pair``.
    :return: Whether all records are intact, and have the expected numbers.
    """
    n_pairs, start = state[N_ENVS] * state[N_COLUMNS], slot << state[SEGMENT_SHIFT]
    at, stop = start + SEGMENT_HEADER, start + n_words
    while at < stop:
        words = uint32s(address_at(state, at), RECORD_HEADER)
        if words[0] == 0:
            break
        if (expected >= 0 and words[2] != uint32(expected)) or not _is_record(state, at, stop, checked):
            return False
        size, row, stored = int64(words[0]) & SIZE_BITS, int64(words[3]), int64(words[4])
        if int64(words[0]) >> 31:
            for k in range(n_pairs):
                set_pair(state, row * n_pairs + k, _read_pair(state, at, k))
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
    return True
