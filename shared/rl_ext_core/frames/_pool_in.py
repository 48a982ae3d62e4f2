"""The hot loops of a frame pool on the way in: finding the stream that a stack continues, storing, and freeing."""

from __future__ import annotations

from numba import int64, njit, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._kernels_in import _interleaved_shift, _take_frame, leading_padding, take_frames
from rl_ext_core.frames._memory import copy_bytes
from rl_ext_core.frames._packed import append_within
from rl_ext_core.frames._patch import append_entry, encode_runs, equal_bytes
from rl_ext_core.frames._pool_memory import (
    address_in,
    drop_user,
    open_sum,
    release_one,
    release_reference,
    retain,
    store_bytes,
    take,
)
from rl_ext_core.frames._pool_state import (
    AT_ONCE,
    BLOCKS,
    CLOCK,
    DEPTH_SHIFT,
    ENDED,
    FOLLOWER,
    FRAMES,
    FREE_BLOCKS,
    FREE_REFERENCES,
    KIND,
    N_RECENT,
    NEVER,
    NEWEST,
    NEWEST_STREAM,
    OPEN,
    OPEN_BLOCK,
    OPEN_BYTES,
    OPEN_FRAMES,
    OPEN_SUM,
    PLACE_SHIFT,
    PREVIOUS,
    RECENT,
    REFERENCE,
    REFERENCES,
    STREAM,
    STREAMS,
    TOUCHED,
    UNSEALED,
    USERS,
)
from rl_ext_core.frames._state import GROUP, PATCH, PLANAR, SCRATCH_FRAMES
from rl_ext_core.frames._sums import START, add_bytes, folded, mixed


@njit(nogil=True)
def _reference_for(p, before, frame, geometry, scratch):  # type: ignore[no-untyped-def]
    """The reference frame that is most like this one, of the recent ones and that of the block before; where none is,
    this one becomes one.
    """
    n_bytes = geometry.frame_bytes
    best, size = -1, n_bytes // 2
    for i in range(N_RECENT + 1):
        candidate = p.head[RECENT + i] if i < N_RECENT else int64(p.blocks[before, REFERENCE])
        if candidate >= 0 and (i < N_RECENT or before > 0):
            start = p.starts[1] + uint64(candidate) * p.starts[2]
            runs, used = encode_runs(
                start, frame, n_bytes, scratch, scratch + uint64(n_bytes), size, geometry.max_error
            )
            if runs >= 0 and 2 * runs + used < size:
                best, size = candidate, 2 * runs + used
    if best < 0:
        best = take(p, REFERENCES, FREE_REFERENCES, p.free_references)
        copy_bytes(p.starts[1] + uint64(best) * p.starts[2], frame, n_bytes)
        p.reference_sums[best] = folded(add_bytes(START, frame, n_bytes))
        p.users[best] = uint32(1)  # being recent counts as a use
        if p.head[RECENT] >= 0:
            release_reference(p, p.head[RECENT])
        for i in range(N_RECENT - 1):
            p.head[RECENT + i] = p.head[RECENT + i + 1]
        p.head[RECENT + N_RECENT - 1] = best
    p.users[best] += uint32(1)
    return best


@njit(nogil=True)
def _put_away(p, s, seals):  # type: ignore[no-untyped-def]
    """Moves a stream's full block into pages, to be sealed if need be."""
    block = p.streams[s, OPEN_BLOCK]
    store_bytes(p, block, address_in(p.open, s), p.streams[s, OPEN_BYTES], False)
    p.streams[s, OPEN_BYTES] = 0
    if seals != NEVER:
        p.unsealed[p.head[UNSEALED]] = uint32(block)
        p.head[UNSEALED] += 1


@njit(nogil=True)
def _turn(p, s, frame, geometry, seals, turned, scratch):  # type: ignore[no-untyped-def]
    """Puts a stream's full block away and begins the next; returns how many blocks were put away so far."""
    before = p.streams[s, OPEN_BLOCK]
    if before > 0:
        if p.blocks[before, KIND] == OPEN:
            _put_away(p, s, seals)
        p.turned[turned] = uint32(before)
        turned += 1
    block = take(p, BLOCKS, FREE_BLOCKS, p.free_blocks)
    p.blocks[block, KIND] = uint32(OPEN)
    p.blocks[block, STREAM] = uint32(s)
    p.blocks[block, USERS] = uint32(1)
    p.blocks[block, PREVIOUS] = uint32(before)
    if geometry.coder == PATCH:
        reference = _reference_for(p, before, frame, geometry, scratch)
        p.blocks[block, REFERENCE] = uint32(reference)
        copy_bytes(address_in(p.frame, s), p.starts[1] + uint64(reference) * p.starts[2], geometry.frame_bytes)
    p.sums[block, OPEN_SUM] = open_sum(p, block)
    p.streams[s, OPEN_BLOCK] = block
    p.streams[s, OPEN_FRAMES] = 0
    p.streams[s, OPEN_BYTES] = 0
    return turned


@njit(nogil=True)
def _append(p, s, frame, geometry, seals, turned, scratch):  # type: ignore[no-untyped-def]
    """Appends a frame to a stream."""
    n_bytes = geometry.frame_bytes
    if p.streams[s, OPEN_BLOCK] == 0 or p.streams[s, OPEN_FRAMES] == 1 << geometry.block_shift:
        turned = _turn(p, s, frame, geometry, seals, turned, scratch)
    target = address_in(p.open, s) + uint64(p.streams[s, OPEN_BYTES])
    newest = address_in(p.frame, s)
    if geometry.max_error > 0:
        # Whatever comes next starts from what the decoder will have then, not from the frame: errors never add up.
        p.streams[s, OPEN_BYTES] += append_within(newest, frame, target, scratch, n_bytes + GROUP, geometry)
    else:
        if geometry.coder == PATCH:
            p.streams[s, OPEN_BYTES] += append_entry(newest, frame, n_bytes, target, scratch)
        else:
            copy_bytes(target, frame, n_bytes)
            p.streams[s, OPEN_BYTES] += n_bytes
        copy_bytes(newest, frame, n_bytes)
    size = address_in(p.open, s) + uint64(p.streams[s, OPEN_BYTES]) - target
    entry = folded(add_bytes(mixed(START, p.streams[s, OPEN_BLOCK]), target, int64(size)))
    p.entry_sums[s, p.streams[s, OPEN_FRAMES]] = entry
    p.streams[s, OPEN_FRAMES] += 1
    p.head[FRAMES] += 1
    if seals == AT_ONCE:
        _put_away(p, s, seals)
    return turned


@njit(nogil=True)
def _shifted(before, after, geometry, kept):  # type: ignore[no-untyped-def]
    n_bytes = geometry.frame_bytes
    stack_bytes = geometry.n_stack * n_bytes
    if geometry.stored == PLANAR:
        return equal_bytes(before + uint64(n_bytes), after, stack_bytes - n_bytes)
    return _interleaved_shift(before, after, stack_bytes, geometry.frame_channels * geometry.itemsize, kept)


@njit(nogil=True)
def _push(p, s, stack, geometry, kept, seals, scratch):  # type: ignore[no-untyped-def]
    """Stores what is new of a stack in a stream; returns its handle."""
    n_stack, n_bytes = geometry.n_stack, geometry.frame_bytes
    last = address_in(p.last, s)
    newest = p.streams[s, NEWEST]
    turned = 0
    frames = scratch + uint64(SCRATCH_FRAMES * (n_bytes + GROUP))
    if newest != 0 and equal_bytes(last, stack, n_stack * n_bytes):
        return newest
    if newest != 0 and n_stack > 1 and _shifted(last, stack, geometry, kept):
        _take_frame(stack, geometry.stored, n_stack - 1, geometry, frames)
        turned = _append(p, s, frames, geometry, seals, turned, scratch)
        depth = min((newest >> DEPTH_SHIFT) + 1, n_stack)
    else:
        take_frames(stack, geometry.stored, geometry, frames)
        padding = leading_padding(frames, geometry)
        depth = n_stack - padding
        for position in range(padding, n_stack):
            turned = _append(p, s, frames + uint64(position * n_bytes), geometry, seals, turned, scratch)
    copy_bytes(last, stack, n_stack * n_bytes)
    handle = p.streams[s, OPEN_BLOCK] | ((p.streams[s, OPEN_FRAMES] - 1) << PLACE_SHIFT) | (depth << DEPTH_SHIFT)
    retain(p, handle, geometry)
    release_one(p, newest, geometry)
    p.streams[s, NEWEST] = handle
    for i in range(turned):  # only now: until it was known which of them the stack needs, all were
        drop_user(p, int64(p.turned[i]), geometry)
    return handle


@njit(nogil=True)
def _same_or_shifted(p, s, stack, geometry, kept, shifts):  # type: ignore[no-untyped-def]
    last = address_in(p.last, s)
    if shifts:
        return _shifted(last, stack, geometry, kept)
    return equal_bytes(last, stack, geometry.n_stack * geometry.frame_bytes)


@njit(nogil=True)
def _find(p, stack, geometry, kept, alone, scratch):  # type: ignore[no-untyped-def]
    """The stream that a stack continues, or the one that it had best begin anew in. Contents alone decide.

    :param alone: whether stacks come without those that follow them.
    """
    n_streams = p.head[STREAMS]
    for shifts in range(2 if geometry.n_stack > 1 else 1):
        if n_streams > 0:
            # Trajectories come one after the other, or in turn.
            before = p.head[NEWEST_STREAM]
            if _same_or_shifted(p, before, stack, geometry, kept, shifts):
                return before
            follower = p.streams[before, FOLLOWER]
            if _same_or_shifted(p, follower, stack, geometry, kept, shifts):
                return follower
        for s in range(n_streams):
            if _same_or_shifted(p, s, stack, geometry, kept, shifts):
                return s
    if alone and geometry.n_stack == 1 and geometry.coder == PATCH:
        similar = _most_similar(p, stack, geometry, scratch)
        if similar >= 0:
            return similar
    oldest, ended = -1, -1
    for s in range(n_streams):
        if p.streams[s, ENDED] and (ended < 0 or p.streams[s, TOUCHED] > p.streams[ended, TOUCHED]):
            ended = s
        if oldest < 0 or p.streams[s, TOUCHED] < p.streams[oldest, TOUCHED]:
            oldest = s
    if ended >= 0:
        return ended
    if n_streams < p.streams.shape[0]:
        p.head[STREAMS] += 1
        p.streams[n_streams] = 0
        return n_streams
    return oldest


@njit(nogil=True)
def _most_similar(p, frame, geometry, scratch):  # type: ignore[no-untyped-def]
    """The stream whose newest frame makes the smallest patch, or -1 where none is worth it."""
    n_bytes = geometry.frame_bytes
    best, size = -1, n_bytes // 2
    for s in range(p.head[STREAMS]):
        before = address_in(p.frame, s)
        runs, used = encode_runs(before, frame, n_bytes, scratch, scratch + uint64(n_bytes), size, geometry.max_error)
        if runs >= 0 and 2 * runs + used < size:
            best, size = s, 2 * runs + used
    return best


@kernel
def put(p, stacks, nexts, n, ended, geometry, kept, seals, scratch, handles, next_handles):  # type: ignore[no-untyped-def]
    """Stores stacks, and those that follow them.

    :param stacks: address of ``n`` stacks.
    :param nexts: address of ``n`` stacks, or 0.
    :param ended: (n,) whether nothing follows, or (0,).
    :param kept: address of a mask, see ``_kernels_in``.
    :param seals: when full blocks are to be sealed.
    :param scratch: address of ``SCRATCH_FRAMES`` frames with ``GROUP`` bytes behind each, and a stack.
    :param handles: (n,) written.
    :param next_handles: (n,) written where there are any.
    """
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    scratch = uint64(scratch)
    kept = uint64(kept)
    for i in range(n):
        stack = uint64(stacks) + uint64(i * stack_bytes)
        s = _find(p, stack, geometry, kept, nexts == 0, scratch)
        handles[i] = _push(p, s, stack, geometry, kept, seals, scratch)
        retain(p, handles[i], geometry)
        if nexts != 0:
            following = uint64(nexts) + uint64(i * stack_bytes)
            next_handles[i] = _push(p, s, following, geometry, kept, seals, scratch)
            retain(p, next_handles[i], geometry)
        p.head[CLOCK] += 1
        p.streams[s, TOUCHED] = p.head[CLOCK]
        p.streams[s, ENDED] = ended[i] if ended.shape[0] > 0 else 0
        p.streams[p.head[NEWEST_STREAM], FOLLOWER] = s
        p.head[NEWEST_STREAM] = s


@kernel
def release(p, handles, geometry):  # type: ignore[no-untyped-def]
    """Gives up stacks; what no other needs is freed."""
    for handle in handles:
        if handle != 0:
            release_one(p, handle, geometry)
