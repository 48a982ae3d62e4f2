"""Kernel that gathers the compressed blocks of a batch into one buffer, to upload it to a GPU."""

from __future__ import annotations

from numba import int64, njit, uint64

from rl_ext_core.frames.allocator import address_of_grain
from rl_ext_core.frames.arrays import KIND, OPEN, OPEN_BYTES, PREVIOUS, REFERENCE, STREAM
from rl_ext_core.frames.blocks import block_location, unpack_handle
from rl_ext_core.frames.decode import prefetch_stack
from rl_ext_core.frames.geometry import SLACK
from rl_ext_core.frames.kernel_primitives import copy_bytes, kernel
from rl_ext_core.frames.views import address_in, geometry_in, pool_in

ALIGNMENT = 16  # of blocks and references in the buffer
# Columns of a segment: consecutive frames of a stack that are in one block.
BLOCK, START_FRAME, FIRST, LAST, TARGET = range(5)
N_SEGMENT = 5
# Places of the latest blocks and references. A place is overwritten by another block with the same remainder.
N_RECENT = 4096
_PREFETCHED = 8  # stacks whose blocks are prefetched


@njit(nogil=True)
def _block_size(p, block):  # type: ignore[no-untyped-def]
    """Return the address of a block's contents and their size."""
    if p.blocks[block, KIND] == OPEN:
        stream = int64(p.blocks[block, STREAM])
        return address_in(p.open, stream), p.streams[stream, OPEN_BYTES]
    first, n_bytes = block_location(p, block)
    return address_of_grain(p, first), n_bytes


@njit(nogil=True)
def _after(used, n_bytes):  # type: ignore[no-untyped-def]
    """Return the next aligned place in the buffer after some bytes."""
    return (used + n_bytes + SLACK + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@kernel
def gather_blocks(state, handles, buffer, start, capacity, segments, recent):  # type: ignore[no-untyped-def]
    """Copy the blocks and references of stacks into a buffer, and list the segments to decode.

    A block that many stacks share is copied once, unless others came in between.

    :param handles: Handles of the stacks, shape ``(n,)``; 0 has no segments.
    :param buffer: Address of the buffer.
    :param start: First byte to write to.
    :param capacity: Size of the buffer. If it is too small, nothing is written behind it.
    :param segments: Output, ``(segments, 5)``, see ``BLOCK``. Places are in the buffer. The target is the number of the
        first frame in the batch.
    :param recent: Scratch array, shape ``(2, N_RECENT, 2)``, filled with -1.
    :return: Number of segments, bytes that the buffer needs, number of frames without data.
    """
    p, geometry = pool_in(state), geometry_in(state)
    buffer = uint64(buffer)
    n_stack, in_block = geometry.n_stack, 1 << geometry.block_shift
    used, n_segments, padding = int64(start), 0, 0
    for k in range(handles.shape[0]):
        if k + _PREFETCHED < handles.shape[0]:
            prefetch_stack(p, handles[k + _PREFETCHED], geometry)
        block, place, missing = unpack_handle(handles[k])
        padding += n_stack - missing
        target = (k + 1) * n_stack
        while missing > 0:
            slot = block % N_RECENT
            if recent[0, slot, 0] != block:
                address, n_bytes = _block_size(p, block)
                if _after(used, n_bytes) <= capacity:
                    copy_bytes(buffer + uint64(used), address, n_bytes)
                recent[0, slot, 0], recent[0, slot, 1] = block, used
                used = _after(used, n_bytes)
            reference = int64(p.blocks[block, REFERENCE])
            other = reference % N_RECENT
            if recent[1, other, 0] != reference:
                n_bytes = geometry.frame_bytes
                if _after(used, n_bytes) <= capacity:
                    copy_bytes(buffer + uint64(used), p.references + uint64(reference * p.reference_bytes), n_bytes)
                recent[1, other, 0], recent[1, other, 1] = reference, used
                used = _after(used, n_bytes)
            n_frames = min(missing, place + 1)
            target -= n_frames
            segments[n_segments, BLOCK] = recent[0, slot, 1]
            segments[n_segments, START_FRAME] = recent[1, other, 1]
            segments[n_segments, FIRST], segments[n_segments, LAST] = place + 1 - n_frames, place
            segments[n_segments, TARGET] = target
            n_segments += 1
            missing -= n_frames
            place = in_block - 1
            block = int64(p.blocks[block, PREVIOUS])
    return n_segments, used, padding
