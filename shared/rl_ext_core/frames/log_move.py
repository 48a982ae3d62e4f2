"""Kernels of a table of stacks: choose the stream that a stack continues, and copy rows to the open segment.

Rows that are written in any order leave segments in which few rows are live. Their entries are copied as they are, so
frames stay bit for bit the same, whatever encoded them.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint32, uint64

from rl_ext_core.frames.kernel_primitives import atomic_kernel, copy_frame, inner, int64s, load_u32, uint32s
from rl_ext_core.frames.log_state import (
    BACKOFF,
    CHAIN_BYTES,
    CHAIN_LENGTH,
    DECODED,
    DELTA,
    END,
    FRAMED,
    FRAMES,
    KEY,
    KEY_BYTES,
    N_LOG,
    N_STACK,
    N_STREAM,
    NEWEST,
    NEXT,
    OBS_INPUT,
    OBS_ORDER,
    PADDED_BYTES,
    RECORD_HEADER,
    RESIDUAL_DELTA,
    RESIDUAL_START,
    SEGMENT_HEADER,
    SEGMENT_SHIFT,
    SLOTS,
    START,
    STREAMS,
    address_at,
    read_header,
    stream_of,
    write_header,
)
from rl_ext_core.frames.log_write import continues, finish_record, header_words, set_pair

_STALE = 1024  # puts after which the episode of a stream is assumed to be over
_MAX_ENTRIES = 256


@inner
def _set_stream(state, first, stream):  # type: ignore[no-untyped-def]
    """Let the only environment of the log write to a stream.

    :param first: Addresses of the frames, decoded frames and numbers of stream 0.
    """
    c, padded = N_LOG, state[N_LOG + PADDED_BYTES]
    state[c + FRAMES] = first[0] + stream * state[c + SLOTS] * padded
    state[c + DECODED] = first[1] + stream * padded if first[1] else 0
    state[c + STREAMS] = first[2] + 8 * N_STREAM * stream


@atomic_kernel
def find_stream(state, first, uses):  # type: ignore[no-untyped-def]
    """Choose the stream whose newest stack the observation continues; otherwise, the least recently used one.

    :param first: Addresses of stream 0, see ``_set_stream``.
    :param uses: Number of the last put of each stream, 0 if there was none; then the number of puts and the last
        stream. Shape ``(n_streams + 2,)``.
    :return: Whether the observation continues no stream.
    """
    n, c = len(uses) - 2, N_LOG
    stack, order, last, found = state[c + OBS_INPUT], state[c + OBS_ORDER], uses[n + 1], int64(-1)
    _set_stream(state, first, int64(0))
    for shift in range(2 if state[c + N_STACK] > 1 else 1):
        for i in range(n):  # environments that take turns have consecutive streams
            stream = (last + i) % n
            if uses[stream] == 0 or int64s(stream_of(state, c, stream), N_STREAM)[NEWEST] < 0:
                continue
            if continues(state, c, stream, stack, order, shift):
                found = stream
                break
        if found >= 0:
            break
    is_new = found < 0
    if is_new:
        found = int64(0)
        for stream in range(n):
            if uses[stream] < uses[found]:
                found = stream
        if uses[found] == 0:  # take the oldest one instead, if it is stale
            for stream in range(n):
                if 0 < uses[stream] < uses[n] - _STALE:
                    found = stream
                    break
        numbers = int64s(stream_of(state, c, found), N_STREAM)  # its frames are unrelated
        numbers[NEWEST] = numbers[KEY] = -1
        numbers[CHAIN_LENGTH] = numbers[CHAIN_BYTES] = numbers[KEY_BYTES] = numbers[BACKOFF] = 0
    uses[n] += 1
    uses[found], uses[n + 1] = uses[n], found
    _set_stream(state, first, found)
    return is_new


@inner
def _entry_words(state, position):  # type: ignore[no-untyped-def]
    """Return the largest number of words that a copy of an entry takes, and the position of its key or -1."""
    kind, _, size, _, contents = read_header(address_at(state, position))
    key = int64(-1)
    if kind == START or kind == RESIDUAL_START:  # noqa: SIM109
        key = position - int64(load_u32(uint64(contents)))
    return 4 + (size + 3) // 4, key


@inner
def _copy_entry(state, position, previous, key, at):  # type: ignore[no-untyped-def]
    """Copy an entry; return the position behind the copy.

    :param previous: Position of the copy of the previous entry of its stream, or 0.
    :param key: Position of the copy of its key frame.
    :param at: Position to write to.
    """
    kind, narrow, size, _, contents = read_header(address_at(state, position))
    end = at + write_header(address_at(state, at), kind, narrow, size, at - previous if previous else int64(0))
    if kind == START or kind == RESIDUAL_START:  # noqa: SIM109
        uint32s(address_at(state, end), 1)[0] = uint32(at - key)
        end += 1
        contents += 4
    copy_frame(uint64(address_at(state, end)), uint64(contents), size)
    return end + (size + 3) // 4


@atomic_kernel
def copy_rows(state, pairs, targets, start, limit, copies):  # type: ignore[no-untyped-def]
    """Copy the entries of rows to the open segment.

    :param pairs: Pairs whose entries one closed segment contains, in ascending order.
    :param targets: Rows that refer to the copies afterwards.
    :param start: Number of rows that were copied before.
    :param limit: Position behind the memory of the open segment.
    :param copies: By word of the source segment: position of the copy of the entry there, 0 if there is none. Its first
        bit says whether the copy leads to a previous entry. Zeros if another segment was opened.
    :return: Number of rows that were copied, fewer than all if another segment is needed.
    """
    mask = (int64(1) << state[SEGMENT_SHIFT]) - 1
    found = np.empty(_MAX_ENTRIES, np.int64)
    for i in range(start, len(pairs)):
        pair, row = pairs[i], targets[i]
        position = pair >> 23
        needed, n, words = max(pair & 63, (pair >> 12 & 63) + (pair >> 6 & 63)), 0, header_words(state)
        while True:
            kind, _, _, distance, _ = read_header(address_at(state, position))
            found[n] = position
            n += 1
            n_words, key = _entry_words(state, position)
            words += n_words
            if key >= 0:
                words += _entry_words(state, key)[0]
            if n >= needed and kind != DELTA and kind != RESIDUAL_DELTA:
                break
            position -= distance
        begin = state[NEXT]
        if state[END] == 0 or begin >= state[END] or begin + words + SEGMENT_HEADER > limit:
            return i
        at, previous = begin + header_words(state), int64(0)
        for k in range(n - 1, -1, -1):
            copy = copies[found[k] & mask]
            if copy == 0 or (copy & 1 == 0 and previous):
                _, key = _entry_words(state, found[k])
                if key >= 0:
                    if copies[key & mask] == 0:
                        copies[key & mask] = at << 1
                        at = _copy_entry(state, key, int64(0), int64(0), at)
                    key = copies[key & mask] >> 1
                copy = at << 1 | int64(previous > 0)
                copies[found[k] & mask] = copy
                at = _copy_entry(state, found[k], previous, key, at)
            previous = copy >> 1
        new = previous << 23 | (pair & ((1 << 23) - 1))
        if state[FRAMED]:
            heads = uint32s(address_at(state, begin) + 4 * RECORD_HEADER, 2)
            heads[0], heads[1] = uint32(new & 0xFFFFFFFF), uint32(new >> 32)
        state[NEXT] = at
        set_pair(state, row, new)
        if state[FRAMED]:
            finish_record(state, begin, at, row, True)
    return len(pairs)
