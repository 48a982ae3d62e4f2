"""Patches, the lossless format: byte runs that differ from the previous frame.

A patch is ``n`` run headers ``[skip: u8][length: u8]``, then the bytes of all runs. The decoder skips ``skip`` bytes
of the previous frame, then overwrites ``length`` bytes. Headers come first, so the decoder can read a header without
waiting for the previous run. Differences a few equal bytes apart share a run, because a header costs two bytes.

In a block each frame is an entry: ``[size: u16][n: u8]`` and ``size`` bytes of patch. If ``n`` is 255, the first two of
these bytes hold the number of runs. ``size = 0xFFFF`` marks a whole frame, stored if a patch would not be smaller.
Numbers are little-endian.

With a bound, a patch omits bytes that differ by at most the bound from the decoder's frame. The bytes that it writes
are exact. Errors do not accumulate, because each patch is computed against the decoded previous frame. Kernels called
with ``bound=None`` are compiled without the comparison, at no extra cost.
"""

from __future__ import annotations

from numba import int64, njit, uint8, uint16, uint64

from rl_ext_core.frames.geometry import ENTRY_HEADER
from rl_ext_core.frames.kernel_primitives import (
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
# For frames with many changes. It halves the number of runs, which take time, for a few percent more bytes.
_MAX_DENSE_GAP = 6
WHOLE = 0xFFFF
PACKED = 0xFFFE  # marks a packed frame, see ``bounded``
_MANY_RUNS = 255


@njit(nogil=True, inline="always")
def _write_run(heads, runs, data, used, skip, source, length):  # type: ignore[no-untyped-def]
    """Append one run; return the numbers of runs and bytes so far.

    The run is split if its skip or length exceeds a byte.
    """
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
    """Encode the change from ``before`` to ``after`` as runs, in two buffers.

    :param heads: Address of a buffer of ``limit`` bytes for the headers
    :param data: Address of a buffer of ``limit`` bytes for the bytes
    :param bound: Largest difference of a byte that is omitted, or None
    :return: The numbers of runs and of bytes; -1 runs once both together would exceed ``limit`` bytes
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
    last = 0  # end of the run written last
    start = -1  # the current run is [start, end)
    end = 0
    i = 0
    while i <= n_bytes:
        found = -1
        if i == n_bytes:
            i += 1  # behind the last byte: write the current run
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
def append_whole(frame, n_bytes, out):  # type: ignore[no-untyped-def]
    """Write an entry with a whole frame to ``out`` and return its size."""
    store_u16(out, uint16(WHOLE))
    store_u8(out + uint64(2), uint8(0))
    copy_bytes(out + uint64(ENTRY_HEADER), frame, n_bytes)
    return ENTRY_HEADER + n_bytes


@njit(nogil=True)
def append_entry(before, frame, n_bytes, out, scratch, bound):  # type: ignore[no-untyped-def]
    """Write one entry to ``out`` and return its size.

    :param out: Address of a buffer of ``n_bytes + ENTRY_HEADER`` bytes
    :param scratch: Address of a scratch buffer of ``n_bytes`` bytes
    :param bound: Largest difference of a byte that a patch omits, or None
    """
    contents = out + uint64(ENTRY_HEADER)
    limit = min(n_bytes - n_bytes // 16, WHOLE - 3 if bound is None else PACKED - 3)
    # The number of runs takes two more bytes if there are many, which are inserted below.
    runs, used = encode_runs(before, frame, n_bytes, contents, scratch, limit, bound)
    if runs < 0:
        return append_whole(frame, n_bytes, out)
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
    """Return the size of an entry's contents, and whether they are a whole frame."""
    size = int64(load_u16(entry))
    if size == WHOLE:
        return n_bytes, True
    return size, False


@njit(nogil=True)
def _apply_patch(target, contents, runs):  # type: ignore[no-untyped-def]
    """Apply a patch in place.

    Short runs are copied as whole words, so both regions need 16 bytes behind them.
    """
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
    """Decode an entry; return the addresses of the frame and of the next entry.

    It copies only if necessary. The decoded frame is in ``work``, in the entry, or is ``frame`` itself.
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
    """Return whether two regions contain the same bytes."""
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
    """Count the bytes that differ, except the last few, as a lower bound of a patch's size."""
    total = 0
    for i in range(0, n_bytes - WORD + 1, WORD):
        total += count_different(left + uint64(i), right + uint64(i))
    return total


@njit(nogil=True)
def _count_far_bytes(left, right, n_bytes, bound):  # type: ignore[no-untyped-def]
    """Count the bytes that differ by more than ``bound``, except the last few."""
    total = 0
    for i in range(0, n_bytes - WORD + 1, WORD):
        total += count_far_apart(left + uint64(i), right + uint64(i), uint8(bound))
    return total
