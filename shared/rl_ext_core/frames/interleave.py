"""Kernels that convert between interleaved stacks, in which the frames take turns at each pixel, and planar frames."""

from __future__ import annotations

from typing import Any

from numba import int64, uint8, uint16, uint32, uint64

from rl_ext_core.frames.kernel_primitives import (
    WORD,
    copy_bytes,
    define_move,
    inner,
    interleave_4,
    load_u8,
    load_u32,
    narrow_8,
    stack_of_four_differs,
    store_u8,
    store_u16,
    words_differ_where,
)
from rl_ext_core.frames.layout import PLANAR


@inner
def is_interleaved_shift(before, after, n_bytes, unit, shared_mask):  # type: ignore[no-untyped-def]
    """Return whether an interleaved stack is another one moved on by one frame.

    :param before: Address of the earlier stack.
    :param after: Address of the later stack.
    :param n_bytes: Size of a stack.
    :param unit: Bytes per pixel of one frame.
    :param shared_mask: Address of a mask, see :func:`shared_byte_mask`.
    """
    moved = before + uint64(unit)
    n_compared = n_bytes - unit  # the last bytes belong to the new frame
    i = 0
    while i + WORD <= n_compared:
        at = uint64(i)
        if words_differ_where(moved + at, after + at, shared_mask + at) != uint64(0):
            return False
        i += WORD
    while i < n_compared:
        at = uint64(i)
        if (load_u8(moved + at) ^ load_u8(after + at)) & load_u8(shared_mask + at) != uint8(0):
            return False
        i += 1
    return True


@inner
def is_stack_of_four(stack, first, second, third, fourth, pixels):  # type: ignore[no-untyped-def]
    """Return whether an interleaved stack has these four gray frames, given by their addresses."""
    pixel = 0
    while pixel + 16 <= pixels:
        at, words = uint64(pixel), stack + uint64(4 * pixel)
        if stack_of_four_differs(words, first + at, second + at, third + at, fourth + at) != uint64(0):
            return False
        pixel += 16
    while pixel < pixels:
        at, word = uint64(pixel), load_u32(stack + uint64(4 * pixel))
        low, high = load_u8(first + at) | load_u8(second + at) << 8, load_u8(third + at) | load_u8(fourth + at) << 8
        if int64(word) != low | high << 16:
            return False
        pixel += 1
    return True


@inner
def extract_frame(stack, order, position, geometry, out):  # type: ignore[no-untyped-def]
    """Copy one frame of a stack to ``out``, in the memory order of stored frames."""
    if order == PLANAR:
        offset = position * geometry.frame_bytes
        copy_bytes(uint64(out), stack + uint64(offset), geometry.frame_bytes)
        return
    unit = geometry.frame_channels * geometry.itemsize
    period = unit * geometry.n_stack
    out = uint64(out)
    stack += uint64(position * unit)
    # Stored frames are planar or interleaved, which is the same for one channel per frame.
    inner = geometry.itemsize if geometry.stored == PLANAR else unit
    if period == 4 and unit == 1:
        _take_grey_of_four(stack, position, geometry.pixels, out)
        return
    for group in range(unit // inner):
        _copy_strided(out, inner, stack + uint64(group * inner), period, geometry.pixels, inner)
        out += uint64(geometry.pixels * inner)


def _define_strided_copy(move: Any) -> Any:
    """Define a kernel function that copies words with a function for one word."""

    @inner
    def copy_words(target, target_step, source, source_step, n):  # type: ignore[no-untyped-def]
        """Copy words that are a number of bytes apart."""
        for _ in range(n):
            move(target, source)
            target += uint64(target_step)
            source += uint64(source_step)

    return copy_words


_copy_1, _copy_2, _copy_4, _copy_8, _copy_16 = (_define_strided_copy(define_move(2**i)) for i in range(5))


@inner
def _copy_strided(target, target_step, source, source_step, n, unit):  # type: ignore[no-untyped-def]
    """Copy ``n`` units of bytes that are a number of bytes apart, a word of each at a time."""
    done = 0
    while done < unit:
        rest, to, at = unit - done, target + uint64(done), source + uint64(done)
        if rest >= 16:
            _copy_16(to, target_step, at, source_step, n)
            done += 16
        elif rest >= 8:
            _copy_8(to, target_step, at, source_step, n)
            done += 8
        elif rest >= 4:
            _copy_4(to, target_step, at, source_step, n)
            done += 4
        elif rest >= 2:
            _copy_2(to, target_step, at, source_step, n)
            done += 2
        else:
            _copy_1(to, target_step, at, source_step, n)
            done += 1


@inner
def _take_grey_of_four(frame, position, pixels, out):  # type: ignore[no-untyped-def]
    """Copy one of four interleaved gray frames, the usual case, eight pixels at a time."""
    words = frame - uint64(position)
    shift = uint32(8 * position)
    pixel = 0
    while pixel + 8 <= pixels:
        narrow_8(out + uint64(pixel), words + uint64(4 * pixel), shift)
        pixel += 8
    while pixel < pixels:
        store_u8(out + uint64(pixel), load_u8(frame + uint64(4 * pixel)))
        pixel += 1


# Decoded frames are collected until their stack is complete, and then written in one pass. Writing each frame alone, to
# every n-th place of the stack, takes longer than decoding it.


@inner
def interleave_frames(frames, geometry, out):  # type: ignore[no-untyped-def]
    """Write frames, given by their addresses, to ``out`` in turn at each pixel. Nothing behind ``out`` is written."""
    n_stack, unit = geometry.n_stack, geometry.frame_channels * geometry.itemsize
    period = n_stack * unit
    pixel = position = 0
    if n_stack == 4 and unit == 1:  # the usual case
        first, second, third, fourth = uint64(frames[0]), uint64(frames[1]), uint64(frames[2]), uint64(frames[3])
        while pixel + 16 <= geometry.pixels:
            at = uint64(pixel)
            interleave_4(out + uint64(4 * pixel), first + at, second + at, third + at, fourth + at)
            pixel += 16
    n = geometry.pixels - pixel
    while position < n_stack:
        to, frame = out + uint64(pixel * period + position * unit), uint64(frames[position] + pixel * unit)
        if unit == 1 and position + 1 < n_stack:
            _pair_bytes(frame, uint64(frames[position + 1] + pixel), n, to, period)
            position += 2
        else:
            _copy_strided(to, period, frame, unit, n, unit)
            position += 1


@inner
def _pair_bytes(left, right, n, target, step):  # type: ignore[no-untyped-def]
    """Write pairs of bytes of two frames, ``step`` bytes apart. One store per byte would take longer."""
    for i in range(n):
        at = uint64(i)
        store_u16(target, uint16(load_u8(left + at)) | (uint16(load_u8(right + at)) << uint16(8)))
        target += uint64(step)
