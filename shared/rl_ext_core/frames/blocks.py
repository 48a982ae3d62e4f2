"""Kernels that store blocks, and count the users of blocks and references. ``pool`` explains the terms."""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint32, uint64

from rl_ext_core.frames.allocator import (
    address_of_grain,
    allocate_grains,
    free_grains,
    free_unused_grains,
    grains_of,
)
from rl_ext_core.frames.arrays import (
    BLOCK_BYTES,
    BLOCKS,
    DEPTH_SHIFT,
    FREE,
    FREE_BLOCKS,
    FREE_REFERENCES,
    FULL,
    GRAIN,
    KIND,
    MOST_BLOCKS,
    MOST_PLACES,
    N_BYTES,
    OPEN,
    PAIR_DEPTH_SHIFT,
    PAIR_NEXT_DEPTH_SHIFT,
    PAIR_PLACE_SHIFT,
    PAIR_STEP_SHIFT,
    PLACE_SHIFT,
    PREVIOUS,
    REFERENCE,
    SEALED,
    SEALED_BYTES,
    SEALED_GRAIN,
    SEALED_SUM,
    STORED_SUM,
    STREAM,
    USERS,
)
from rl_ext_core.frames.geometry import PATCH, SLACK, Bytes, Counts
from rl_ext_core.frames.kernel_primitives import SUM_START, add_bytes, copy_bytes, fold_sum, kernel, mix_word
from rl_ext_core.frames.region import address_of, allocate
from rl_ext_core.frames.views import pool_in

_BLOCK_MASK = 0xFFFFFFFF


@njit(nogil=True, inline="always")
def unpack_handle(handle):  # type: ignore[no-untyped-def]
    """Split a handle into block of the newest frame, place in the block, and depth."""
    return handle & _BLOCK_MASK, (handle >> PLACE_SHIFT) & 0xFFFF, handle >> DEPTH_SHIFT


@njit(nogil=True, inline="always")
def unpack_pair(pair):  # type: ignore[no-untyped-def]
    """Split the integer of a transition into block, place, depth, step and next depth.

    :return: Block and place of the next observation's newest frame, depth of the observation, number of frames between
        both newest frames, depth of the next observation.
    """
    block, place = pair & (MOST_BLOCKS - 1), (pair >> PAIR_PLACE_SHIFT) & (MOST_PLACES - 1)
    depth, step = (pair >> PAIR_DEPTH_SHIFT) & 0xFF, (pair >> PAIR_STEP_SHIFT) & 0xFF
    return block, place, depth, step, (pair >> PAIR_NEXT_DEPTH_SHIFT) & 0xFF


@njit(nogil=True)
def allocate_number(p, used, freed, free):  # type: ignore[no-untyped-def]
    """Take a free number for a block or a reference, or else the next unused one.

    :param used: Field of ``head`` that counts used numbers.
    :param freed: Field of ``head`` that counts free numbers.
    :param free: List of free numbers.
    """
    if p.head[freed] > 0:
        p.head[freed] -= 1
        return int64(free[p.head[freed]])
    p.head[used] += 1
    return p.head[used] - 1


@njit(nogil=True)
def open_sum(p, block):  # type: ignore[no-untyped-def]
    """Return the checksum of an open block's row in the table of blocks."""
    total = mix_word(mix_word(SUM_START, block), OPEN)
    for column in (PREVIOUS, REFERENCE, STREAM):
        total = mix_word(total, p.blocks[block, column])
    return fold_sum(total)


@njit(nogil=True)
def full_sum(p, block, first, n_bytes, kind, contents):  # type: ignore[no-untyped-def]
    """Return the checksum of a full block's row in the table of blocks.

    :param first: First grain of the block.
    :param n_bytes: Size of the block.
    :param kind: FULL or SEALED.
    :param contents: Checksum of the contents.
    """
    total = mix_word(mix_word(mix_word(mix_word(mix_word(SUM_START, block), kind), first), n_bytes), contents)
    for column in (PREVIOUS, REFERENCE):
        total = mix_word(total, p.blocks[block, column])
    return fold_sum(total)


@njit(nogil=True)
def store_bytes(p, block, source, n_bytes, seal):  # type: ignore[no-untyped-def]
    """Store the contents of a full block in new grains.

    :param source: Address of the contents.
    :param n_bytes: Size of the contents.
    :param seal: Whether the contents are sealed.
    """
    first = allocate_grains(p, grains_of(p, n_bytes))
    copy_bytes(address_of_grain(p, first), source, n_bytes)
    kind, column = (SEALED, SEALED_SUM) if seal else (FULL, STORED_SUM)
    if p.has_checksums:
        contents = fold_sum(add_bytes(SUM_START, source, n_bytes))
        p.sums[block, column] = contents
        p.sums[block, column + 1] = full_sum(p, block, first, n_bytes, kind, contents)
    apart = seal and p.has_checksums
    p.blocks[block, SEALED_GRAIN if apart else GRAIN] = uint32(first)
    p.blocks[block, SEALED_BYTES if apart else N_BYTES] = uint32(n_bytes)
    p.blocks[block, KIND] = uint32(kind)
    p.head[BLOCK_BYTES] += n_bytes


@njit(nogil=True, inline="always")
def block_location(p, block):  # type: ignore[no-untyped-def]
    """Return the first grain and the size of a block that is not open."""
    apart = p.has_checksums and p.blocks[block, KIND] == SEALED
    grain, n_bytes = (SEALED_GRAIN, SEALED_BYTES) if apart else (GRAIN, N_BYTES)
    return int64(p.blocks[block, grain]), int64(p.blocks[block, n_bytes])


@njit(nogil=True)
def replace_with_sealed(p, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Replace the contents of a full block by compressed ones."""
    first, old = block_location(p, block)
    p.head[BLOCK_BYTES] -= old
    store_bytes(p, block, source, n_bytes, True)
    free_grains(p, first, grains_of(p, old))


@njit(nogil=True)
def release_reference(p, reference):  # type: ignore[no-untyped-def]
    """Remove one user of a reference, and free it if that was the last one."""
    p.users[reference] -= uint32(1)
    if p.users[reference] == 0:
        p.free_references[p.head[FREE_REFERENCES]] = uint32(reference)
        p.head[FREE_REFERENCES] += 1


@njit(nogil=True)
def release_block(p, block, geometry):  # type: ignore[no-untyped-def]
    """Remove one user of a block, and free it if that was the last one."""
    p.blocks[block, USERS] -= uint32(1)
    if p.blocks[block, USERS] > 0:
        return
    first, n_bytes = block_location(p, block)
    free_grains(p, first, grains_of(p, n_bytes))
    if geometry.coder == PATCH:
        release_reference(p, p.blocks[block, REFERENCE])
    p.blocks[block, KIND] = uint32(FREE)
    p.free_blocks[p.head[FREE_BLOCKS]] = uint32(block)
    p.head[FREE_BLOCKS] += 1


@njit(nogil=True)
def retain_frames(p, block, place, n_frames, geometry):  # type: ignore[no-untyped-def]
    """Add one user to the blocks of the ``n_frames`` frames that end at a place."""
    while n_frames > 0:
        p.blocks[block, USERS] += uint32(1)
        n_frames -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = int64(p.blocks[block, PREVIOUS])


@njit(nogil=True)
def release_frames(p, block, place, n_frames, geometry):  # type: ignore[no-untyped-def]
    """Remove one user from the blocks of the ``n_frames`` frames that end at a place."""
    while n_frames > 0:
        previous = int64(p.blocks[block, PREVIOUS])
        release_block(p, block, geometry)
        n_frames -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = previous


@njit(nogil=True)
def retain_handle(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Add one user to the blocks of a stack."""
    block, place, depth = unpack_handle(handle)
    retain_frames(p, block, place, depth, geometry)


@njit(nogil=True)
def release_handle(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Remove one user from the blocks of a stack."""
    block, place, depth = unpack_handle(handle)
    release_frames(p, block, place, depth, geometry)


@njit(nogil=True)
def claim_grains(p, block, used):  # type: ignore[no-untyped-def]
    """Mark the grains of a block as used; return whether all of them were unused."""
    first, n_bytes = block_location(p, block)
    if first + grains_of(p, n_bytes) > used.shape[0]:
        return False
    for grain in range(first, first + grains_of(p, n_bytes)):
        if used[grain]:
            return False
        used[grain] = True
    return True


@kernel
def free_unused_blocks(state, used):  # type: ignore[no-untyped-def]
    """Free all blocks without users, and all grains that are not in a block.

    :param used: (n_grains,) zeros; output
    :return: Whether no two blocks share a grain
    """
    p = pool_in(state)
    right = True
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            p.blocks[block, KIND] = uint32(FREE)
        elif p.blocks[block, KIND] != OPEN:
            right = claim_grains(p, block, used) and right
    free_unused_grains(p, used)
    return right


@kernel
def seal_stored_block(state, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Replace the contents of a full block by compressed ones, from Python."""
    replace_with_sealed(pool_in(state), block, uint64(source), n_bytes)


@kernel
def list_block_ends(state, blocks, ends):  # type: ignore[no-untyped-def]
    """Compute the end of each block in a buffer that contains them one after the other.

    :param blocks: Numbers of blocks that are not open, shape ``(n,)``.
    :param ends: Output, shape ``(n,)``.
    """
    p, end = pool_in(state), 0
    for i in range(blocks.shape[0]):
        end += block_location(p, blocks[i])[1]
        ends[i] = end


@kernel
def copy_blocks(state, blocks, target):  # type: ignore[no-untyped-def]
    """Copy the contents of blocks to an address, one after the other.

    :param blocks: Numbers of blocks that are not open, shape ``(n,)``.
    :param target: Address to write to.
    """
    p, out = pool_in(state), uint64(target)
    for i in range(blocks.shape[0]):
        first, n_bytes = block_location(p, blocks[i])
        copy_bytes(out, address_of_grain(p, first), n_bytes)
        out += uint64(n_bytes)


def read_blocks(state: Counts, blocks: Counts) -> list[Bytes]:
    """Return copies of the contents of blocks.

    :param blocks: Numbers of blocks that are not open, shape ``(n,)``.
    :return: One array of bytes per block.
    """
    ends = np.zeros(len(blocks), dtype=np.int64)
    list_block_ends(state, blocks, ends)
    contents = allocate((int(ends[-1]) if len(ends) else 0) + SLACK)
    copy_blocks(state, blocks, address_of(contents))
    return [contents[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
