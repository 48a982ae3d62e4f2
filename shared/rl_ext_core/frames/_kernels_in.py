"""The hot loops on the way in: what of a stack is new, and storing that.

Arrays come in the named tuples of ``_state``, bulk data as addresses.
"""

from __future__ import annotations

from numba import int64, njit, uint8, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._memory import WORD, copy_bytes, load_u8, narrow_8, store_u8, words_differ_where
from rl_ext_core.frames._packed import append_within
from rl_ext_core.frames._patch import append_entry, encode_runs, equal_bytes
from rl_ext_core.frames._state import (
    ALL_STORED,
    BOUNDARY,
    DEPTH_SHIFT,
    FRAME_NUMBERS,
    NEXT_DEPTH_SHIFT,
    PATCH,
    PLANAR,
    PUSHED,
    SAME,
    STEP_SHIFT,
    STUCK_AT_NEXT,
    STUCK_AT_OBSERVATION,
    UNSHARED,
)


@njit(nogil=True)
def _interleaved_shift(before, after, n_bytes, unit, kept):  # type: ignore[no-untyped-def]
    """Whether, in interleaved memory, ``after`` is ``before`` moved on by one frame of ``unit`` bytes a pixel.

    :param kept: address of 255 for every byte of ``after`` that is in ``before`` too, 0 for those of the new frame.
    """
    moved = before + uint64(unit)
    n_compared = n_bytes - unit  # the last pixel's last frame is new
    i = 0
    while i + WORD <= n_compared:
        at = uint64(i)
        if words_differ_where(moved + at, after + at, kept + at) != uint64(0):
            return False
        i += WORD
    while i < n_compared:
        at = uint64(i)
        if (load_u8(moved + at) ^ load_u8(after + at)) & load_u8(kept + at) != uint8(0):
            return False
        i += 1
    return True


@njit(nogil=True)
def _take_frame(stack, memory, position, geometry, out):  # type: ignore[no-untyped-def]
    """Copies one frame of a stack to ``out``, in the order in which frames are stored."""
    if memory == PLANAR:
        offset = position * geometry.frame_bytes
        copy_bytes(uint64(out), stack + uint64(offset), geometry.frame_bytes)
        return
    unit = geometry.frame_channels * geometry.itemsize
    period = unit * geometry.n_stack
    out = uint64(out)
    stack += uint64(position * unit)
    # A stored frame is planar or interleaved; with one channel a frame, both are the same.
    inner = geometry.itemsize if geometry.stored == PLANAR else unit
    if period == 4 and unit == 1:
        _take_grey_of_four(stack, position, geometry.pixels, out)
    elif inner == 1:
        for channel in range(geometry.frame_channels):
            for pixel in range(geometry.pixels):
                store_u8(out, load_u8(stack + uint64(channel + pixel * period)))
                out += uint64(1)
    else:
        for group in range(unit // inner):
            for pixel in range(geometry.pixels):
                copy_bytes(out, stack + uint64(group * inner + pixel * period), inner)
                out += uint64(inner)


@njit(nogil=True)
def _take_grey_of_four(frame, position, pixels, out):  # type: ignore[no-untyped-def]
    """One of four interleaved grey frames, the usual case, eight pixels at a time."""
    words = frame - uint64(position)
    shift = uint32(8 * position)
    pixel = 0
    while pixel + 8 <= pixels:
        narrow_8(out + uint64(pixel), words + uint64(4 * pixel), shift)
        pixel += 8
    while pixel < pixels:
        store_u8(out + uint64(pixel), load_u8(frame + uint64(4 * pixel)))
        pixel += 1


@kernel
def take_frames(stack, memory, geometry, out):  # type: ignore[no-untyped-def]
    """Copies all frames of a stack to ``out``, oldest first."""
    for position in range(geometry.n_stack):
        _take_frame(stack, memory, position, geometry, out + uint64(position * geometry.frame_bytes))


@kernel
def take_newest(e, geometry, streams):  # type: ignore[no-untyped-def]
    """Copies the newest frame of an environment's newest stack to ``fresh``."""
    last, fresh = uint64(streams.last[e].ctypes.data), uint64(streams.fresh[0].ctypes.data)
    _take_frame(last, streams.last_memory[e], geometry.n_stack - 1, geometry, fresh)


@kernel
def append_frame(e, frame, geometry, streams):  # type: ignore[no-untyped-def]
    """Appends a frame to the open block of a stream, which has room for it."""
    n_bytes, frame = geometry.frame_bytes, uint64(frame)
    target = uint64(streams.open[e].ctypes.data) + uint64(streams.open_bytes[e])
    newest = uint64(streams.frame[e].ctypes.data)
    scratch = uint64(streams.scratch[0].ctypes.data)
    if geometry.max_error > 0:
        # Whatever comes next starts from what the decoder will have then, not from the frame: errors never add up.
        stride = streams.scratch.shape[1]
        streams.open_bytes[e] += append_within(newest, frame, target, scratch, stride, geometry)
    else:
        if geometry.coder == PATCH:
            streams.open_bytes[e] += append_entry(newest, frame, n_bytes, target, scratch)
        else:
            copy_bytes(target, frame, n_bytes)
            streams.open_bytes[e] += n_bytes
        copy_bytes(newest, frame, n_bytes)
    streams.open_frames[e] += 1
    streams.total[e] += 1


@kernel
def push(stacks, memory, geometry, streams, status):  # type: ignore[no-untyped-def]
    """Stores what is new in one stack an environment; says in ``status`` what became of each. Returns the worst.

    Equality of contents alone decides what is shared.
    """
    n_stack, n_bytes = geometry.n_stack, geometry.frame_bytes
    stack_bytes = n_stack * n_bytes
    unit = geometry.frame_channels * geometry.itemsize
    kept = uint64(streams.kept[0].ctypes.data)
    worst = 0
    for e in range(status.shape[0]):
        stack = uint64(stacks) + uint64(e * stack_bytes)
        last = uint64(streams.last[e].ctypes.data)
        status[e] = UNSHARED
        if streams.last_memory[e] == memory:
            if equal_bytes(last, stack, stack_bytes):
                status[e] = SAME
            else:
                if memory == PLANAR:
                    shifted = equal_bytes(last + uint64(n_bytes), stack, stack_bytes - n_bytes)
                else:
                    shifted = _interleaved_shift(last, stack, stack_bytes, unit, kept)
                if shifted:
                    fresh = uint64(streams.fresh[0].ctypes.data)
                    _take_frame(stack, memory, n_stack - 1, geometry, fresh)
                    copy_bytes(last, stack, stack_bytes)
                    if streams.open_frames[e] % (1 << geometry.block_shift) == 0:
                        status[e] = BOUNDARY
                    else:
                        append_frame(e, fresh, geometry, streams)
                        streams.depth[e] = min(int64(streams.depth[e]) + 1, n_stack)
                        status[e] = PUSHED
        worst = max(worst, status[e])
    return worst


@kernel
def begin_entries(streams, entries):  # type: ignore[no-untyped-def]
    """Notes the newest stacks as the observations of transitions; ``entries`` is (E,), as in the index."""
    for e in range(entries.shape[0]):
        newest = uint64(streams.total[e] - 1) & uint64(FRAME_NUMBERS - 1)
        entries[e] = newest | (uint64(streams.depth[e]) << uint64(DEPTH_SHIFT))


@kernel
def complete_entries(streams, entries):  # type: ignore[no-untyped-def]
    """Notes the newest stacks as the next observations of these transitions."""
    for e in range(entries.shape[0]):
        step = (uint64(streams.total[e] - 1) - entries[e]) & uint64(0xFF)
        entries[e] |= (step << uint64(STEP_SHIFT)) | (uint64(streams.depth[e]) << uint64(NEXT_DEPTH_SHIFT))


@kernel
def push_pair(stacks, memory, next_stacks, next_memory, geometry, streams, status, entries):  # type: ignore[no-untyped-def]
    """Stores one transition an environment, as far as no new block is needed; says how far that was.

    Where it got stuck, ``status`` says at which stacks, as :func:`push` does.
    """
    if push(stacks, memory, geometry, streams, status) > PUSHED:
        return STUCK_AT_OBSERVATION
    begin_entries(streams, entries)
    if push(next_stacks, next_memory, geometry, streams, status) > PUSHED:
        return STUCK_AT_NEXT
    complete_entries(streams, entries)
    return ALL_STORED


@kernel
def best_reference(frame, geometry, candidates, addresses, limit, scratch):  # type: ignore[no-untyped-def]
    """The reference frame with the smallest patch to ``frame``, or -1 where none is smaller than ``limit``.

    :param candidates: (n,) numbers of reference frames; of equals the first wins.
    :param scratch: address of ``2 * limit`` bytes.
    """
    best, best_size = -1, limit
    data = uint64(scratch) + uint64(limit)
    for candidate in candidates:
        before = addresses[candidate]
        runs, used = encode_runs(
            before, uint64(frame), geometry.frame_bytes, uint64(scratch), data, best_size, geometry.max_error
        )
        if runs >= 0 and 2 * runs + used < best_size:
            best, best_size = candidate, 2 * runs + used
    return best


@kernel
def leading_padding(stack, geometry):  # type: ignore[no-untyped-def]
    """How many of the oldest frames of a planar stack are all zero; never all of them."""
    frames = 0
    while frames < geometry.n_stack - 1:
        at = uint64(stack) + uint64(frames * geometry.frame_bytes)
        seen = uint8(0)
        for i in range(geometry.frame_bytes):
            seen |= load_u8(at + uint64(i))
        if seen != uint8(0):
            return frames
        frames += 1
    return frames


@kernel
def copy(target, source, n_bytes):  # type: ignore[no-untyped-def]
    """``memcpy``."""
    copy_bytes(uint64(target), uint64(source), n_bytes)
