"""Patches: changes from one frame to another, as runs of bytes; and two-bit residuals for frames with noise.

A patch is ``[n runs][headers of all runs][bytes of all runs]``, little-endian. A header is ``[skip: u8][length: u8]``
if the patch is narrow, else ``[skip: u16][length: u8]``. The decoder skips ``skip`` bytes of the frame, then overwrites
``length`` bytes. A longer skip or run continues in the next header. ``n`` has two bytes, and four for frames above
``LARGE_FRAME`` bytes. A patch without changes is empty.

With a bound, a patch omits bytes that differ by at most the bound from the decoder's frame. The bytes that it writes
are exact, and the next patch is computed against the decoded frame, so errors do not add up.

Residuals need a bound. They are two bits per byte: 0, 1, 2 for a byte that decreases by ``2 * bound + 1``, stays, or
increases by as much. Byte ``i`` of each quarter of the frame shares byte ``i`` of the codes. A patch follows, with the
bytes that are still further away than the bound.
"""

from __future__ import annotations

from numba import int64, uint8, uint16, uint32, uint64

from rl_ext_core.frames.kernel_primitives import (
    blend_16,
    copy_bytes,
    count_different,
    count_far_apart,
    far_apart_8,
    inner,
    load_u16,
    load_u32,
    load_u64,
    store_u8,
    store_u16,
    store_u32,
    uint8s,
    uint16s,
    uint32s,
)

PADDING = 32  # frames are compared in units of so many bytes, padded with zeros
LARGE_FRAME = 1 << 18  # bytes; a patch of a smaller frame has fewer than 2**16 runs
NARROW = 1 << 40  # flag in the size of a patch whose skips have one byte
SIZE_MASK = NARROW - 1
WORK_FRAMES = 2  # work memory of encode_patch, in frames; ``WORK_SLACK`` bytes come on top
WORK_SLACK = 512
_MAX_GAP = 3  # equal bytes inside a run, because a header costs two or three bytes
EXACT_RUNS = 8  # more than begin in the last 16 bytes of a frame, because of the equal bytes between them
_MAX_DENSE_GAP = 6  # if many bytes differ, because runs take time


@inner
def encode_patch(before, after, n_bytes, out, work, bound):  # type: ignore[no-untyped-def]
    """Write the patch from one frame to another.

    :param before, after: Addresses of the frames.
    :param n_bytes: Size of a frame, a multiple of ``PADDING``.
    :param out: Address to write to, with space for a frame.
    :param work: Address of work memory.
    :param bound: Largest difference that is omitted; 0 is exact.
    :return: Size of the patch, plus ``NARROW`` if it is; 0 if nothing differs; -1 if a whole frame is about as small.
    """
    before, after, data = uint64(before), uint64(after), uint64(work)
    limit, n_words, different = n_bytes - n_bytes // 16, 0, 0
    most = n_bytes // 4 + 16  # runs: each is followed by at least four equal bytes, or is split at 255 bytes
    lengths = uint8s(work + n_bytes + 64, most)
    skips = uint16s(work + n_bytes + most + 64, most)
    words = uint32s(work + n_bytes + 3 * most + 64, n_bytes // PADDING + 1)
    for i in range(n_bytes // PADDING):
        left, right = before + uint64(PADDING * i), after + uint64(PADDING * i)
        count = count_different(left, right) if bound == 0 else count_far_apart(left, right, uint8(bound))
        words[n_words] = i
        n_words += count != 0
        different += count
    if different > n_bytes - n_bytes // 4:  # headers would leave too little gain
        return -1
    gap = _MAX_DENSE_GAP if different > n_bytes // 8 else _MAX_GAP
    n_runs = used = last = end = extra = 0
    start = -1  # the current run is [start, end)
    for k in range(n_words + 1):
        first = PADDING * int64(words[k])
        for i in range(first, first + PADDING, 8):
            if k == n_words:  # behind the last difference: write the current run
                difference, at = uint64(1), n_bytes + 16
            else:
                left, right, at = before + uint64(i), after + uint64(i), i
                difference = load_u64(left) ^ load_u64(right) if bound == 0 else far_apart_8(left, right, uint8(bound))
            while difference:
                while difference & uint64(0xFF) == 0:
                    difference >>= uint64(8)
                    at += 1
                if start >= 0 and at - end > gap:
                    skip = start - last
                    while start < end:
                        n = min(end - start, 255)
                        if used + n + 2 * n_runs + 4 > limit:
                            return -1
                        while skip > 0xFFFF:
                            skips[n_runs], lengths[n_runs] = uint16(0xFFFF), uint8(0)
                            n_runs += 1
                            skip -= 0xFFFF
                            extra += 257
                        skips[n_runs], lengths[n_runs] = uint16(skip), uint8(n)
                        n_runs += 1
                        extra += max(skip - 1, 0) // 255
                        copy_bytes(data + uint64(used), after + uint64(start), n)
                        used += n
                        start += n
                        skip = 0
                    last, start = end, -1
                if start < 0:
                    start = at
                at += 1
                end = at
                difference >>= uint64(8)
            if k == n_words:
                break
    if n_runs == 0:
        return 0
    narrow = 2 * extra <= n_runs
    n_headers = n_runs + extra if narrow else n_runs
    n_count = 4 if n_bytes > LARGE_FRAME else 2
    total = n_count + (2 if narrow else 3) * n_headers + used
    if total > limit:
        return -1
    to = uint64(out)
    if n_count == 2:
        store_u16(to, uint16(n_headers))
    else:
        store_u32(to, uint32(n_headers))
    to += uint64(n_count)
    if narrow:
        for i in range(n_runs):
            skip = int64(skips[i])
            while skip > 255 or (skip == 255 and lengths[i] == 0):
                store_u16(to, uint16(255))
                to += uint64(2)
                skip -= 255
            store_u16(to, uint16(skip | int64(lengths[i]) << 8))
            to += uint64(2)
    else:
        for i in range(n_runs):
            store_u16(to, skips[i])
            store_u8(to + uint64(2), lengths[i])
            to += uint64(3)
    copy_bytes(to, data, used)
    return total | NARROW if narrow else total


@inner
def apply_patch(frame, patch, narrow, n_bytes, is_exact):  # type: ignore[no-untyped-def]
    """Apply a patch in place. The patch needs 16 readable bytes behind it.

    :param frame: Address of the frame.
    :param patch: Address of a patch that is not empty.
    :param narrow: Whether its skips have one byte.
    :param n_bytes: Size of a frame, as for :func:`encode_patch`.
    :param is_exact: Whether to leave the bytes behind the frame alone. Otherwise 16 of them must be writable.
    """
    to, header = uint64(frame), uint64(patch)
    if n_bytes > LARGE_FRAME:
        n_headers = int64(load_u32(header))
        header += uint64(4)
    else:
        n_headers = int64(load_u16(header))
        header += uint64(2)
    step, skip_bits = uint64(2 if narrow else 3), uint64(8 if narrow else 16)
    data, skip_mask = header + step * uint64(n_headers), (uint64(1) << skip_bits) - uint64(1)
    n_blended = n_headers - EXACT_RUNS if is_exact else n_headers
    for i in range(n_headers):
        word = uint64(load_u32(header))
        header += step
        to += word & skip_mask
        n = (word >> skip_bits) & uint64(0xFF)
        if n <= uint64(16) and i < n_blended:
            blend_16(to, data, uint8(n))
        else:
            copy_bytes(to, data, int64(n))
        to += n
        data += n


@inner
def _encode_quarter(base, frame, codes, n, bound, shift):  # type: ignore[no-untyped-def]
    """Add the codes of one quarter of a frame."""
    for i in range(n):
        difference = int64(frame[i]) - int64(base[i])
        codes[i] |= uint8((1 + int64(difference > bound) - int64(difference < -bound)) << shift)


@inner
def _decode_quarter(base, codes, out, n, step, low):  # type: ignore[no-untyped-def]
    """Decode one quarter of a frame, whose codes have ``low`` as their lowest bit."""
    up, both = uint8(low + low), uint8(3 * low)
    for i in range(n):  # all in bytes, so that LLVM uses vectors; values saturate at 0 and 255
        value, code = base[i], uint8(codes[i] & both)
        more, less = uint8(value + step), uint8(value - step)
        more = uint8(255) if more < value else more
        less = uint8(0) if less > value else less
        out[i] = more if code == up else (less if code == uint8(0) else value)


@inner
def _decode_codes(base, codes, out, n_bytes, bound):  # type: ignore[no-untyped-def]
    """Apply the two-bit codes to a base frame. The output must not be the base."""
    n = n_bytes // 4
    for i in range(4):
        before, after = uint8s(base + i * n, n), uint8s(out + i * n, n)
        _decode_quarter(before, uint8s(codes, n), after, n, uint8(2 * bound + 1), 1 << 2 * i)


@inner
def encode_codes(base, frame, codes, decoded, n_bytes, bound):  # type: ignore[no-untyped-def]
    """Write the codes of the residuals of a frame, which a patch must follow.

    :param base, frame: Addresses of the decoder's frame and of the new frame.
    :param codes: Address to write to.
    :param decoded: Address for the frame that the decoder obtains from the codes alone.
    :param n_bytes: Size of a frame, a multiple of ``PADDING``.
    :param bound: Largest error of a byte, at least 1.
    """
    n = n_bytes // 4
    array = uint8s(codes, n)
    array[:] = 0
    for i in range(4):
        _encode_quarter(uint8s(base + i * n, n), uint8s(frame + i * n, n), array, n, bound, 2 * i)
    _decode_codes(base, codes, decoded, n_bytes, bound)


@inner
def apply_residuals(base, residuals, size, narrow, out, n_bytes, bound):  # type: ignore[no-untyped-def]
    """Decode a frame from a base frame and residuals.

    :param base: Address of the decoder's frame.
    :param residuals: Address of the residuals.
    :param size: Their size in bytes.
    :param narrow: Whether the skips of their patch have one byte.
    :param out: Address of the decoded frame; it must not be the base.
    :param n_bytes: Size of a frame, as for :func:`encode_codes`.
    :param bound: Bound that the residuals were encoded with.
    """
    _decode_codes(base, residuals, out, n_bytes, bound)
    if size > n_bytes // 4:
        apply_patch(out, residuals + n_bytes // 4, narrow, n_bytes, int64(0))
