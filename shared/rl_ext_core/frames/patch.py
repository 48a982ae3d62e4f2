"""The patch format: what changed from one frame to the next, as runs of bytes.

A patch is ``n`` run headers ``[skip: u8][length: u8]``, then the bytes of all runs: skip that many bytes of the
previous frame, then overwrite. Headers stand apart from the bytes so that reading one does not wait for the one before.
Differences a few equal bytes apart share a run, since a header costs two bytes.

In a block each frame is an entry: ``[size: u16][n: u8]`` and ``size`` bytes of patch, where ``n = 255`` says that the
number of runs is in the first two of these. ``size = 0xFFFF`` marks a frame stored as it is, where a patch would not
have been smaller. Numbers are little-endian.

With a bound, a patch leaves out the bytes that are at most that far off in the frame that the decoder has. What it does
write is exact, so errors do not add up as long as each patch is taken against what the patches before it make. Loops
that are called with ``bound=None`` are compiled for exactly that, and cost nothing more.
"""

from __future__ import annotations

from numba import int64, njit, uint8, uint16, uint64

from rl_ext_core.frames.geometry import ENTRY_HEADER
from rl_ext_core.frames.machine import (
    WORD,
    blend_16,
    copy_bytes,
    count_different,
    count_far_apart,
    far_apart_8,
    load_u8,
    load_u16,
    load_u64,
    store_u8,
    store_u16,
    words_differ,
)

_MAX_GAP = 3
_MAX_DENSE_GAP = 6  # where much has changed: half of the runs, which take time, for a few per cent more bytes
WHOLE = 0xFFFF
PACKED = 0xFFFE  # where there is a bound: see ``bounded``
_MANY_RUNS = 255


@njit(nogil=True, inline="always")
def _write_run(heads, runs, data, used, skip, source, length):  # type: ignore[no-untyped-def]
    """Appends one run, split where skip or length exceeds a byte; returns the numbers of runs and bytes so far."""
    while skip > 255:
        store_u16(heads + uint64(2 * runs), uint16(255))
        runs += 1
        skip -= 255
    while length > 0:
        part = min(length, 255)
        store_u16(heads + uint64(2 * runs), uint16(skip | (part << 8)))
        copy_bytes(data + uint64(used), source, part)
        runs += 1
        used += part
        source += uint64(part)
        length -= part
        skip = 0
    return runs, used


@njit(nogil=True)
def encode_runs(before, after, n_bytes, heads, data, limit, bound):  # type: ignore[no-untyped-def]
    """Writes the headers and the bytes of the runs from ``before`` to ``after`` to separate places.

    :param heads: address of ``limit`` bytes.
    :param data: address of ``limit`` bytes.
    :param bound: how far off a byte may be that is left out, or None.
    :return: the numbers of runs and of bytes; -1 runs once both together would exceed ``limit`` bytes.
    """
    different = (
        _count_different_bytes(before, after, n_bytes)
        if bound is None
        else _count_far_bytes(before, after, n_bytes, bound)
    )
    if different > limit:
        return -1, 0
    gap = _MAX_DENSE_GAP if different > n_bytes // 8 else _MAX_GAP
    runs = 0
    used = 0
    last = 0  # the end of the run written last
    start = -1  # the run being collected is [start, end)
    end = 0
    i = 0
    while i <= n_bytes:
        found = -1
        if i == n_bytes:
            i += 1  # past the end: nothing differs any more, and the run being collected is written
        elif i + 8 <= n_bytes:
            if bound is None:
                difference = load_u64(before + uint64(i)) ^ load_u64(after + uint64(i))
            else:
                difference = far_apart_8(before + uint64(i), after + uint64(i), uint8(bound))
            if difference == uint64(0):
                i += 8
                continue
            while difference & uint64(0xFF) == uint64(0):
                difference >>= uint64(8)
                i += 1
            found = i
            i += 1
        else:
            distance = abs(int64(load_u8(before + uint64(i))) - int64(load_u8(after + uint64(i))))
            if distance > (0 if bound is None else bound):
                found = i
            i += 1
            if found < 0:
                continue
        if start >= 0 and (found < 0 or found - end > gap):
            length, skip = end - start, start - last
            if used + length + 2 * (runs + length // 255 + skip // 255 + 1) > limit:
                return -1, 0
            runs, used = _write_run(heads, runs, data, used, skip, after + uint64(start), length)
            last = end
            start = -1
        if start < 0:
            start = found
        end = found + 1
    return runs, used


@njit(nogil=True)
def append_entry(before, frame, n_bytes, out, scratch, bound):  # type: ignore[no-untyped-def]
    """Writes one entry at ``out``; returns its size.

    :param out: address of ``n_bytes + ENTRY_HEADER`` bytes.
    :param scratch: address of ``n_bytes`` bytes.
    :param bound: how far off a byte may be that a patch leaves out, or None.
    """
    contents = out + uint64(ENTRY_HEADER)
    limit = min(n_bytes - n_bytes // 16, WHOLE - 3 if bound is None else PACKED - 3)
    # Where there are many runs their number takes two bytes more, which are moved in later.
    runs, used = encode_runs(before, frame, n_bytes, contents, scratch, limit, bound)
    if runs < 0:
        store_u16(out, uint16(WHOLE))
        store_u8(out + uint64(2), uint8(0))
        copy_bytes(contents, frame, n_bytes)
        return ENTRY_HEADER + n_bytes
    heads = 2 * runs
    if runs >= _MANY_RUNS:
        for i in range(heads - 1, -1, -1):
            store_u8(contents + uint64(i + 2), load_u8(contents + uint64(i)))
        store_u16(contents, uint16(runs))
        heads += 2
    store_u16(out, uint16(heads + used))
    store_u8(out + uint64(2), uint8(min(runs, _MANY_RUNS)))
    copy_bytes(contents + uint64(heads), scratch, used)
    return ENTRY_HEADER + heads + used


@njit(nogil=True)
def entry_size(entry, n_bytes):  # type: ignore[no-untyped-def]
    """Size of an entry's contents, and whether they are a whole frame."""
    size = int64(load_u16(entry))
    if size == WHOLE:
        return n_bytes, True
    return size, False


@njit(nogil=True)
def _apply_patch(target, contents, runs):  # type: ignore[no-untyped-def]
    """Applies a patch in place. Short runs are written as whole words, so both sides need 16 bytes behind them."""
    if runs == _MANY_RUNS:
        runs = int64(load_u16(contents))
        contents += uint64(2)
    data = contents + uint64(2 * runs)
    for _ in range(runs):
        head = uint64(load_u16(contents))
        contents += uint64(2)
        target += head & uint64(0xFF)
        length = head >> uint64(8)
        if length <= uint64(16):
            blend_16(target, data, uint8(length))
        else:
            copy_bytes(target, data, int64(length))
        target += length
        data += length


@njit(nogil=True)
def apply_entry(frame, entry, n_bytes, work):  # type: ignore[no-untyped-def]
    """The frame that an entry makes of ``frame``, and the address behind the entry.

    Nothing is copied before it has to be: the frame returned lies in ``work``, in the entry, or is ``frame`` itself.
    """
    size, whole = entry_size(entry, n_bytes)
    contents = entry + uint64(ENTRY_HEADER)
    if whole:
        return contents, contents + uint64(size)
    if size > 0:
        if frame != work:
            copy_bytes(work, frame, n_bytes)
        _apply_patch(work, contents, int64(load_u8(entry + uint64(2))))
        frame = work
    return frame, contents + uint64(size)


@njit(nogil=True)
def equal_bytes(left, right, n_bytes):  # type: ignore[no-untyped-def]
    """Whether two regions hold the same bytes."""
    i = 0
    while i + WORD <= n_bytes:
        if words_differ(left + uint64(i), right + uint64(i)) != uint64(0):
            return False
        i += WORD
    while i < n_bytes:
        if load_u8(left + uint64(i)) != load_u8(right + uint64(i)):
            return False
        i += 1
    return True


@njit(nogil=True)
def _count_different_bytes(left, right, n_bytes):  # type: ignore[no-untyped-def]
    """How many bytes differ, but for the last few: a lower bound of a patch's size."""
    total = 0
    for i in range(0, n_bytes - WORD + 1, WORD):
        total += count_different(left + uint64(i), right + uint64(i))
    return total


@njit(nogil=True)
def _count_far_bytes(left, right, n_bytes, bound):  # type: ignore[no-untyped-def]
    """Likewise, by more than ``bound``."""
    total = 0
    for i in range(0, n_bytes - WORD + 1, WORD):
        total += count_far_apart(left + uint64(i), right + uint64(i), uint8(bound))
    return total
