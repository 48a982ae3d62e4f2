"""Kernels that store stacks: find the stream that a stack continues, append its new frames, and free frames.

``pool`` explains the terms.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint8, uint32, uint64

from rl_ext_core.frames.arrays import (
    BLOCKS,
    CLOCK,
    DEPTH_SHIFT,
    ENDED,
    FOLLOWER,
    FRAMES,
    FREE_BLOCKS,
    FREE_REFERENCES,
    FULL,
    GRAINS,
    IN_REFERENCE,
    IN_ROW,
    KIND,
    LAST_USED,
    N_RECENT,
    N_STREAM,
    NEWEST,
    NEWEST_FRAME,
    NEWEST_STREAM,
    OPEN,
    OPEN_BLOCK,
    OPEN_BYTES,
    OPEN_FRAMES,
    OPEN_SUM,
    ORDER,
    PAIR_DEPTH_SHIFT,
    PAIR_NEXT_DEPTH_SHIFT,
    PAIR_PLACE_SHIFT,
    PAIR_STEP_SHIFT,
    PLACE_SHIFT,
    PREVIOUS,
    RECENT,
    REFERENCE,
    REFERENCES,
    STREAM,
    STREAMS,
    UNLIKE,
    UNSEALED,
    USERS,
    WHOLE_FRAMES,
    PoolArrays,
    PoolMemory,
)
from rl_ext_core.frames.blocks import (
    allocate_number,
    open_sum,
    read_blocks,
    release_block,
    release_frames,
    release_handle,
    release_reference,
    retain_frames,
    retain_handle,
    seal_stored_block,
    store_bytes,
    unpack_handle,
    unpack_pair,
)
from rl_ext_core.frames.bounded import append_bounded_entry
from rl_ext_core.frames.geometry import ENTRY_HEADER, GROUP, PATCH, PLANAR, RAW, SCRATCH_FRAMES, Counts
from rl_ext_core.frames.interleave import extract_frame, extract_frames, is_interleaved_shift
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.kernel_primitives import (
    SUM_START,
    add_bytes,
    copy_bytes,
    fold_sum,
    kernel,
    load_u8,
    load_u16,
    mix_word,
    zero_bytes,
)
from rl_ext_core.frames.patch import WHOLE, append_entry, append_whole, encode_runs, equal_bytes
from rl_ext_core.frames.region import address_of
from rl_ext_core.frames.views import address_in, geometry_in, pool_in

_RESEMBLING = 8  # frames resemble each other if the patch between them is smaller than this fraction of a frame
# After this many unrelated frames in a row, only one of ``_RETRY`` frames is compared with earlier ones.
_UNRELATED, _RETRY = 4, 8


@njit(nogil=True)
def _newest_frame_address(p, s):  # type: ignore[no-untyped-def]
    """Return the address of the newest frame of a stream, as it will be decoded."""
    place = p.streams[s, NEWEST_FRAME]
    if place == IN_ROW:
        return address_in(p.frame, s)
    if place == IN_REFERENCE:
        reference = int64(p.blocks[p.streams[s, OPEN_BLOCK], REFERENCE])
        return p.references + uint64(reference * p.reference_bytes)
    return address_in(p.open, s) + uint64(place - 1)


@njit(nogil=True)
def _write_entry(p, s, frame, target, scratch, geometry, bound):  # type: ignore[no-untyped-def]
    """Write a frame as the next entry of a stream's open block, which makes it the stream's newest frame.

    :param frame: Address of the frame.
    :param target: Address of the entry.
    :param scratch: Address of scratch memory.
    :param geometry: Sizes of the layout.
    :param bound: Maximum error per byte, or None for exact frames, which use other machine code.
    :return: Size of the entry in bytes.
    """
    n_bytes = geometry.frame_bytes
    row = address_in(p.frame, s)
    if bound is not None:
        # The next patch starts from the decoded frame, not from the original one, so that errors do not add up.
        return append_bounded_entry(row, frame, target, scratch, n_bytes + GROUP, geometry)
    if geometry.coder == RAW:
        copy_bytes(target, frame, n_bytes)
        p.streams[s, NEWEST_FRAME] = p.streams[s, OPEN_BYTES] + 1
        return n_bytes
    first = p.streams[s, OPEN_FRAMES] == 0  # of the block; it was compared with references already
    if first or _should_compare(p.streams[s, WHOLE_FRAMES]):
        size = append_entry(_newest_frame_address(p, s), frame, n_bytes, target, scratch, bound)
    else:
        size = append_whole(frame, n_bytes, target)
    whole = load_u16(target) == WHOLE
    if not first:
        p.streams[s, WHOLE_FRAMES] = p.streams[s, WHOLE_FRAMES] + 1 if whole else 0
    if whole:
        p.streams[s, NEWEST_FRAME] = p.streams[s, OPEN_BYTES] + ENTRY_HEADER + 1
    elif size > ENTRY_HEADER:
        copy_bytes(row, frame, n_bytes)
        p.streams[s, NEWEST_FRAME] = IN_ROW
    return size


@njit(nogil=True, inline="always")
def _should_compare(unrelated):  # type: ignore[no-untyped-def]
    """Return whether a frame is compared with earlier ones after so many unrelated frames in a row."""
    return unrelated < _UNRELATED or unrelated % _RETRY == 0


@njit(nogil=True)
def patch_size(before, frame, scratch, limit, geometry, bound):  # type: ignore[no-untyped-def]
    """Return the size of the patch from one frame to another, at most ``limit``.

    :param before: Address of the first frame.
    :param frame: Address of the second frame.
    :param scratch: Address of twice ``limit`` bytes.
    :param limit: Result if the patch is not smaller.
    """
    data = scratch + uint64(limit)
    runs, used = encode_runs(before, frame, geometry.frame_bytes, scratch, data, limit, bound)
    return min(2 * runs + used, limit) if runs >= 0 else limit


@njit(nogil=True)
def count_padding(stack, geometry):  # type: ignore[no-untyped-def]
    """Return how many of the oldest frames of a planar stack are all zero, at most all but one."""
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


@njit(nogil=True)
def _choose_reference(p, s, before, frame, geometry, bound, scratch):  # type: ignore[no-untyped-def]
    """Choose the reference for a new block: the most similar one of the recent ones and the one of the previous block.

    If none is similar, the frame becomes a new reference.

    :param before: Previous block of the stream, or 0.
    :param frame: Address of the first frame of the block.
    :return: Number of the reference.
    """
    n_bytes = geometry.frame_bytes
    best, size, place = -1, n_bytes // 2, -1
    for i in range(N_RECENT - 1, -2, -1):
        candidate = p.head[RECENT + i] if i >= 0 else int64(p.blocks[before, REFERENCE])
        if candidate >= 0 and (i >= 0 or before > 0):
            start = p.references + uint64(candidate * p.reference_bytes)
            needed = patch_size(start, frame, scratch, size, geometry, bound)
            if needed < size:
                best, size, place = candidate, needed, i
    newest = p.head[RECENT + N_RECENT - 1]
    if bound is not None and best < 0 and newest >= 0 and before > 0:
        # A frame that does not resemble the previous one will not resemble later ones either: a bad reference.
        part = n_bytes // _RESEMBLING
        if patch_size(_newest_frame_address(p, s), frame, scratch, part, geometry, bound) == part:
            best = newest
    if place >= 0:  # it becomes the most recent one
        for i in range(place, N_RECENT - 1):
            p.head[RECENT + i] = p.head[RECENT + i + 1]
        p.head[RECENT + N_RECENT - 1] = best
    if best < 0:
        best = allocate_number(p, REFERENCES, FREE_REFERENCES, p.free_references)
        copy_bytes(p.references + uint64(best * p.reference_bytes), frame, n_bytes)
        if p.has_checksums:
            p.reference_sums[best] = fold_sum(add_bytes(SUM_START, frame, n_bytes))
        p.users[best] = uint32(1)  # a recent reference counts as used
        if p.head[RECENT] >= 0:
            release_reference(p, p.head[RECENT])
        for i in range(N_RECENT - 1):
            p.head[RECENT + i] = p.head[RECENT + i + 1]
        p.head[RECENT + N_RECENT - 1] = best
    p.users[best] += uint32(1)
    return best


@njit(nogil=True)
def _store_full_block(p, s):  # type: ignore[no-untyped-def]
    """Move the full block of a stream from its buffer to grains."""
    store_bytes(p, p.streams[s, OPEN_BLOCK], address_in(p.open, s), p.streams[s, OPEN_BYTES], False)
    p.streams[s, OPEN_BYTES] = 0


@njit(nogil=True)
def _start_block(p, s, frame, geometry, bound, filled, scratch):  # type: ignore[no-untyped-def]
    """Store the full block of a stream, and start the next one.

    :param filled: Number of blocks that the current stack has filled.
    :return: New value of ``filled``.
    """
    before = p.streams[s, OPEN_BLOCK]
    if before > 0:
        if p.blocks[before, KIND] == OPEN:
            _store_full_block(p, s)
        p.filled[filled] = uint32(before)
        filled += 1
    block = allocate_number(p, BLOCKS, FREE_BLOCKS, p.free_blocks)
    p.blocks[block, KIND] = uint32(OPEN)
    p.blocks[block, STREAM] = uint32(s)
    p.blocks[block, USERS] = uint32(1)
    p.blocks[block, PREVIOUS] = uint32(before)
    if geometry.coder == PATCH:
        reference = _choose_reference(p, s, before, frame, geometry, bound, scratch)
        p.blocks[block, REFERENCE] = uint32(reference)
        p.streams[s, NEWEST_FRAME] = IN_REFERENCE
        if bound is not None:  # bounded entries are decoded in the row
            start = p.references + uint64(reference * p.reference_bytes)
            copy_bytes(address_in(p.frame, s), start, geometry.frame_bytes)
            p.streams[s, NEWEST_FRAME] = IN_ROW
    if p.has_checksums:
        p.sums[block, OPEN_SUM] = open_sum(p, block)
    p.streams[s, OPEN_BLOCK] = block
    p.streams[s, OPEN_FRAMES] = 0
    p.streams[s, OPEN_BYTES] = 0
    return filled


@njit(nogil=True)
def _end_stream(p, s, geometry):  # type: ignore[no-untyped-def]
    """Store the open block of a stream, so that the next frame starts another one, and drop the newest stack."""
    block = p.streams[s, OPEN_BLOCK]
    if block > 0 and p.blocks[block, KIND] == OPEN:
        _store_full_block(p, s)
    release_handle(p, p.streams[s, NEWEST], geometry)
    p.streams[s, NEWEST] = 0


@njit(nogil=True)
def _append_frame(p, s, frame, geometry, bound, seals, filled, scratch):  # type: ignore[no-untyped-def]
    """Append a frame to the open block of a stream.

    :param seals: Whether the frame is stored at once, and listed for sealing.
    :return: Number of blocks that the current stack has filled.
    """
    block = p.streams[s, OPEN_BLOCK]
    if block == 0 or p.blocks[block, KIND] != OPEN or p.streams[s, OPEN_FRAMES] == 1 << geometry.block_shift:
        filled = _start_block(p, s, frame, geometry, bound, filled, scratch)
    target = address_in(p.open, s) + uint64(p.streams[s, OPEN_BYTES])
    size = _write_entry(p, s, frame, target, scratch, geometry, bound)
    p.streams[s, OPEN_BYTES] += size
    if p.has_checksums:
        entry = fold_sum(add_bytes(mix_word(SUM_START, p.streams[s, OPEN_BLOCK]), target, int64(size)))
        p.entry_sums[s, p.streams[s, OPEN_FRAMES]] = entry
    p.streams[s, OPEN_FRAMES] += 1
    p.head[FRAMES] += 1
    if seals:
        _store_full_block(p, s)
        p.unsealed[p.head[UNSEALED]] = uint32(p.streams[s, OPEN_BLOCK])
        p.head[UNSEALED] += 1
    return filled


@njit(nogil=True)
def _newest_stack_address(p, s, geometry):  # type: ignore[no-untyped-def]
    """Return the address of the newest stack of a stream."""
    return address_in(p.last, s) if geometry.keeps_stack else _newest_frame_address(p, s)


@njit(nogil=True)
def _is_shifted(before, after, order, geometry, shared_mask):  # type: ignore[no-untyped-def]
    """Return whether a stack is another one moved on by one frame."""
    n_bytes = geometry.frame_bytes
    stack_bytes = geometry.n_stack * n_bytes
    if order == PLANAR:
        return equal_bytes(before + uint64(n_bytes), after, stack_bytes - n_bytes)
    return is_interleaved_shift(before, after, stack_bytes, geometry.frame_channels * geometry.itemsize, shared_mask)


@njit(nogil=True)
def _push_stack(p, s, stack, order, geometry, bound, shared_mask, seals, scratch):  # type: ignore[no-untyped-def]
    """Append the new frames of a stack to a stream.

    :param stack: Address of the stack.
    :param order: Memory order of the stack, PLANAR or INTERLEAVED.
    :return: Handle of the stack.
    """
    n_stack, n_bytes = geometry.n_stack, geometry.frame_bytes
    last = _newest_stack_address(p, s, geometry)
    newest = p.streams[s, NEWEST]
    filled = int64(0)
    frames = scratch + uint64(SCRATCH_FRAMES * (n_bytes + GROUP))
    known = newest != 0 and p.streams[s, ORDER] == order
    if known and equal_bytes(last, stack, n_stack * n_bytes):
        return newest
    if known and n_stack > 1 and _is_shifted(last, stack, order, geometry, shared_mask):
        first = n_stack - 1
        extract_frame(stack, order, first, geometry, frames + uint64(first * n_bytes))
        depth = min((newest >> DEPTH_SHIFT) + 1, n_stack)
    else:
        extract_frames(stack, order, geometry, frames)
        first = count_padding(frames, geometry)
        depth = n_stack - first
    for position in range(first, n_stack):
        filled = _append_frame(p, s, frames + uint64(position * n_bytes), geometry, bound, seals, filled, scratch)
    if geometry.keeps_stack:
        copy_bytes(last, stack, n_stack * n_bytes)
    handle = p.streams[s, OPEN_BLOCK] | ((p.streams[s, OPEN_FRAMES] - 1) << PLACE_SHIFT) | (depth << DEPTH_SHIFT)
    retain_handle(p, handle, geometry)
    release_handle(p, newest, geometry)
    p.streams[s, NEWEST] = handle
    p.streams[s, ORDER] = order
    for i in range(filled):  # after retain_handle(), because the stack may need some of these blocks
        release_block(p, int64(p.filled[i]), geometry)
    return handle


@njit(nogil=True)
def _stream_matches(p, s, stack, geometry, shared_mask, shifts):  # type: ignore[no-untyped-def]
    """Return whether a stack follows the newest one of a stream, or equals it."""
    last = _newest_stack_address(p, s, geometry)
    if shifts:
        return _is_shifted(last, stack, geometry.stored, geometry, shared_mask)
    return equal_bytes(last, stack, geometry.n_stack * geometry.frame_bytes)


@njit(nogil=True)
def _find_stream(p, stack, geometry, bound, shared_mask, without_nexts, scratch):  # type: ignore[no-untyped-def]
    """Find the stream that a stack continues, or choose the one to reuse. Only contents are compared.

    :param stack: Address of the stack.
    :param without_nexts: Whether stacks are stored without next stacks.
    :return: Number of the stream, and whether the stack continues it.
    """
    n_streams = p.head[STREAMS]
    for shifts in range(2 if geometry.n_stack > 1 else 1):
        if n_streams > 0:
            # Trajectories are usually stored one after the other, or take turns.
            before = p.head[NEWEST_STREAM]
            if _stream_matches(p, before, stack, geometry, shared_mask, shifts):
                return before, True
            follower = p.streams[before, FOLLOWER]
            if _stream_matches(p, follower, stack, geometry, shared_mask, shifts):
                return follower, True
        for s in range(n_streams):
            if _stream_matches(p, s, stack, geometry, shared_mask, shifts):
                return s, True
    if without_nexts and geometry.n_stack == 1 and geometry.coder == PATCH:
        similar = _most_similar(p, stack, geometry, bound, scratch) if _should_compare(p.head[UNLIKE]) else -1
        p.head[UNLIKE] = 0 if similar >= 0 else p.head[UNLIKE] + 1
        if similar >= 0:
            return similar, True
    oldest, ended = -1, -1
    for s in range(n_streams):
        if p.streams[s, ENDED] and (ended < 0 or p.streams[s, LAST_USED] > p.streams[ended, LAST_USED]):
            ended = s
        if oldest < 0 or p.streams[s, LAST_USED] < p.streams[oldest, LAST_USED]:
            oldest = s
    if ended >= 0:
        return ended, False
    if n_streams < p.most_streams:
        p.head[STREAMS] += 1
        zero_bytes(address_in(p.streams, n_streams), 8 * N_STREAM)
        return n_streams, False
    return oldest, False


@njit(nogil=True)
def _most_similar(p, frame, geometry, bound, scratch):  # type: ignore[no-untyped-def]
    """Return the stream whose newest frame gives the smallest patch, or -1 if no patch is small."""
    best, size = -1, geometry.frame_bytes // 2
    for s in range(p.head[STREAMS]):
        needed = patch_size(_newest_frame_address(p, s), frame, scratch, size, geometry, bound)
        if needed < size:
            best, size = s, needed
    return best


@njit(nogil=True)
def _has_room(p, capacity, per_stack, pushes):  # type: ignore[no-untyped-def]
    """Return whether the reserved memory is enough to append ``pushes`` stacks."""
    return (
        p.head[BLOCKS] + pushes * per_stack[0] <= capacity[0]
        and p.head[GRAINS] + pushes * per_stack[1] <= capacity[1]
        and p.head[REFERENCES] + pushes * per_stack[2] <= capacity[2]
        and min(p.head[STREAMS] + 1, p.most_streams) <= capacity[3]
    )


@kernel
def put_stacks(  # type: ignore[no-untyped-def]
    state, bound, capacity, per_stack, stacks, nexts, n, ended, shared_mask, seals, scratch, handles, next_handles
):
    """Store stacks and their next stacks until the reserved memory is full.

    :param bound: Maximum error per byte, or None.
    :param capacity: Number of blocks, grains, references and streams with reserved memory.
    :param per_stack: How many of these a stack takes in the worst case.
    :param stacks: Address of ``n`` stacks.
    :param nexts: Address of ``n`` next stacks, or 0.
    :param n: Number of stacks.
    :param ended: Shape ``(n,)``, whether a trajectory ends here, or shape ``(0,)``.
    :param shared_mask: Address of a mask, see :func:`shared_byte_mask`.
    :param seals: Whether each frame is a block, which is sealed.
    :param scratch: Address of ``SCRATCH_FRAMES`` frames, each followed by ``GROUP`` bytes, and a stack.
    :param handles: Output, shape ``(n,)``.
    :param next_handles: Output for the next stacks, shape ``(n,)``.
    :return: Number of stored stacks.
    """
    p, geometry = pool_in(state), geometry_in(state)
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    scratch = uint64(scratch)
    shared_mask = uint64(shared_mask)
    pushes = 1 if nexts == 0 else 2
    for i in range(n):
        if not _has_room(p, capacity, per_stack, pushes):
            return i
        stack = uint64(stacks) + uint64(i * stack_bytes)
        s, continues = _find_stream(p, stack, geometry, bound, shared_mask, nexts == 0, scratch)
        if not continues:
            # Otherwise a stack that is still used would keep unrelated frames in the same block.
            _end_stream(p, s, geometry)
        for part in range(pushes):  # a loop, because a second call would take long to compile
            following = uint64(nexts) + uint64(i * stack_bytes)
            pushed = following if part else stack
            handle = _push_stack(p, s, pushed, geometry.stored, geometry, bound, shared_mask, seals, scratch)
            retain_handle(p, handle, geometry)
            if part:
                next_handles[i] = handle
            else:
                handles[i] = handle
        p.head[CLOCK] += 1
        p.streams[s, LAST_USED] = p.head[CLOCK]
        p.streams[s, ENDED] = ended[i] if ended.shape[0] > 0 else 0
        p.streams[p.head[NEWEST_STREAM], FOLLOWER] = s
        p.head[NEWEST_STREAM] = s
    return n


@kernel
def put_pairs(  # type: ignore[no-untyped-def]
    state, bound, capacity, per_stack, first, stacks, order, nexts, next_order, shared_mask, seals, scratch, pairs
):
    """Store one transition per stream until the reserved memory is full.

    The parameters are those of :func:`put_stacks`, and these:

    :param first: Stream to start with.
    :param stacks: Address of the observations, one stack per stream.
    :param order: Memory order of the observations, PLANAR or INTERLEAVED.
    :param nexts: Address of the next observations.
    :param next_order: Memory order of the next observations.
    :param pairs: Output, shape ``(streams,)``.
    :return: Number of the first stream that was not stored.
    """
    p, geometry = pool_in(state), geometry_in(state)
    shared_mask, scratch = uint64(shared_mask), uint64(scratch)
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    for s in range(first, pairs.shape[0]):
        if not _has_room(p, capacity, per_stack, 2):
            return s
        p.head[STREAMS] = max(p.head[STREAMS], s + 1)
        offset = uint64(s * stack_bytes)
        before = after = so_far = int64(0)
        for part in range(2):  # a loop, because a second call would take long to compile
            stack, memory_order = (uint64(nexts), next_order) if part else (uint64(stacks), order)
            after = _push_stack(p, s, stack + offset, memory_order, geometry, bound, shared_mask, seals, scratch)
            if part == 0:
                before, so_far = after, p.head[FRAMES]
                retain_handle(p, before, geometry)
        further = p.head[FRAMES] - so_far
        depth = before >> DEPTH_SHIFT
        block, place, next_depth = unpack_handle(after)
        retain_frames(p, block, place, max(depth + further, next_depth), geometry)
        release_handle(p, before, geometry)
        pairs[s] = (
            block
            | (place << PAIR_PLACE_SHIFT)
            | (depth << PAIR_DEPTH_SHIFT)
            | (further << PAIR_STEP_SHIFT)
            | (next_depth << PAIR_NEXT_DEPTH_SHIFT)
        )
    return pairs.shape[0]


@kernel
def release_pairs(state, pairs):  # type: ignore[no-untyped-def]
    """Free transitions, and all frames that no other transition uses."""
    p, geometry = pool_in(state), geometry_in(state)
    for pair in pairs:
        block, place, depth, further, next_depth = unpack_pair(pair)
        release_frames(p, block, place, max(depth + further, next_depth), geometry)


@kernel
def end_streams(state):  # type: ignore[no-untyped-def]
    """Store all open blocks, and drop the newest stacks, so that later stacks share no frames with earlier ones."""
    p, geometry = pool_in(state), geometry_in(state)
    for s in range(p.head[STREAMS]):
        block = p.streams[s, OPEN_BLOCK]
        _end_stream(p, s, geometry)
        if block > 0:
            release_block(p, block, geometry)
        zero_bytes(address_in(p.streams, s), 8 * N_STREAM)


@kernel
def release_stacks(state, handles):  # type: ignore[no-untyped-def]
    """Free stacks, and all frames that no other stack uses."""
    p, geometry = pool_in(state), geometry_in(state)
    for handle in handles:
        if handle != 0:
            release_handle(p, handle, geometry)


def seal_full_blocks(state: Counts, pool: PoolArrays, jpeg: JpegCodec, room: PoolMemory) -> None:
    """Compress the listed blocks that are still used. An image that is not smaller than its frame is not used.

    If memory runs out, the remaining blocks stay listed.
    """
    blocks = np.unique(pool.unsealed[: pool.head[UNSEALED]]).astype(np.int64)
    blocks = blocks[pool.blocks[blocks, KIND] == FULL]
    for block, contents in zip(blocks.tolist(), read_blocks(state, blocks), strict=True):
        image = np.frombuffer(jpeg.encode(contents.data), dtype=np.uint8)
        sealed = image if len(image) < len(contents) else contents
        room.reserve_block(len(sealed))
        seal_stored_block(state, block, address_of(sealed), len(sealed))
    pool.head[UNSEALED] = 0
