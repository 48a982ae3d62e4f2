"""The memory of a frame pool, for its kernels: blocks, reference frames, and who uses them."""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint32, uint64

from rl_ext_core.frames.allocator import address_of_grain, free_grains, grains_of, allocate_grains
from rl_ext_core.frames.arrays import (
    BLOCK_BYTES,
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
from rl_ext_core.frames.machine import SUM_START, add_bytes, copy_bytes, fold_sum, kernel, mix_word
from rl_ext_core.frames.region import address_of, allocate
from rl_ext_core.frames.views import pool_in

_BLOCK_MASK = 0xFFFFFFFF


@njit(nogil=True, inline="always")
def unpack_handle(handle):  # type: ignore[no-untyped-def]
    """The block of a stack's newest frame, the place there, and the number of frames."""
    return handle & _BLOCK_MASK, (handle >> PLACE_SHIFT) & 0xFFFF, handle >> DEPTH_SHIFT


@njit(nogil=True, inline="always")
def unpack_pair(pair):  # type: ignore[no-untyped-def]
    """What a transition names: the block of the newest frame and the place there; how many frames of the observation
    there are, how much further the newest one is than that, and how many frames of the next observation there are.
    """
    block, place = pair & (MOST_BLOCKS - 1), (pair >> PAIR_PLACE_SHIFT) & (MOST_PLACES - 1)
    depth, step = (pair >> PAIR_DEPTH_SHIFT) & 0xFF, (pair >> PAIR_STEP_SHIFT) & 0xFF
    return block, place, depth, step, (pair >> PAIR_NEXT_DEPTH_SHIFT) & 0xFF


@njit(nogil=True)
def allocate_number(p, used, freed, free):  # type: ignore[no-untyped-def]
    """A number that is free, or one that was never used."""
    if p.head[freed] > 0:
        p.head[freed] -= 1
        return int64(free[p.head[freed]])
    p.head[used] += 1
    return p.head[used] - 1


@njit(nogil=True)
def open_sum(p, block):  # type: ignore[no-untyped-def]
    """Checksum of what is noted of a block that is being filled."""
    total = mix_word(mix_word(SUM_START, block), OPEN)
    for column in (PREVIOUS, REFERENCE, STREAM):
        total = mix_word(total, p.blocks[block, column])
    return fold_sum(total)


@njit(nogil=True)
def full_sum(p, block, first, n_bytes, kind, contents):  # type: ignore[no-untyped-def]
    """Checksum of what is noted of a full block.

    :param contents: checksum of what it holds.
    """
    total = mix_word(mix_word(mix_word(mix_word(mix_word(SUM_START, block), kind), first), n_bytes), contents)
    for column in (PREVIOUS, REFERENCE):
        total = mix_word(total, p.blocks[block, column])
    return fold_sum(total)


@njit(nogil=True)
def store_bytes(p, block, source, n_bytes, seal):  # type: ignore[no-untyped-def]
    """Notes bytes as a full block's contents, or what these were sealed to."""
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
    """First grain and length of a block that is not open."""
    apart = p.has_checksums and p.blocks[block, KIND] == SEALED
    grain, n_bytes = (SEALED_GRAIN, SEALED_BYTES) if apart else (GRAIN, N_BYTES)
    return int64(p.blocks[block, grain]), int64(p.blocks[block, n_bytes])


@njit(nogil=True)
def replace_with_sealed(p, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Stores what the contents of a full block were sealed to in their place."""
    first, old = block_location(p, block)
    p.head[BLOCK_BYTES] -= old
    store_bytes(p, block, source, n_bytes, True)
    free_grains(p, first, grains_of(p, old))


@njit(nogil=True)
def release_reference(p, reference):  # type: ignore[no-untyped-def]
    """Takes back one use of a reference frame; the last one frees it."""
    p.users[reference] -= uint32(1)
    if p.users[reference] == 0:
        p.free_references[p.head[FREE_REFERENCES]] = uint32(reference)
        p.head[FREE_REFERENCES] += 1


@njit(nogil=True)
def release_block(p, block, geometry):  # type: ignore[no-untyped-def]
    """Takes back one use of a block; the last one frees it."""
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
    """Counts a use of the blocks that the frames up to this one are in."""
    while n_frames > 0:
        p.blocks[block, USERS] += uint32(1)
        n_frames -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = int64(p.blocks[block, PREVIOUS])


@njit(nogil=True)
def release_frames(p, block, place, n_frames, geometry):  # type: ignore[no-untyped-def]
    """Takes one back."""
    while n_frames > 0:
        previous = int64(p.blocks[block, PREVIOUS])
        release_block(p, block, geometry)
        n_frames -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = previous


@njit(nogil=True)
def retain_handle(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Counts a use of a stack's blocks."""
    block, place, depth = unpack_handle(handle)
    retain_frames(p, block, place, depth, geometry)


@njit(nogil=True)
def release_handle(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Takes one back."""
    block, place, depth = unpack_handle(handle)
    release_frames(p, block, place, depth, geometry)


@kernel
def seal_stored_block(state, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Seals a block: :func:`replace_with_sealed`, for Python."""
    replace_with_sealed(pool_in(state), block, uint64(source), n_bytes)


@kernel
def list_block_ends(state, blocks, ends):  # type: ignore[no-untyped-def]
    """Where blocks would end if they lay one after the other.

    :param blocks: (n,) none of them open.
    :param ends: (n,) written.
    """
    p, end = pool_in(state), 0
    for i in range(blocks.shape[0]):
        end += block_location(p, blocks[i])[1]
        ends[i] = end


@kernel
def copy_blocks(state, blocks, target):  # type: ignore[no-untyped-def]
    """Copies blocks, one after the other.

    :param blocks: (n,) none of them open.
    :param target: address.
    """
    p, out = pool_in(state), uint64(target)
    for i in range(blocks.shape[0]):
        first, n_bytes = block_location(p, blocks[i])
        copy_bytes(out, address_of_grain(p, first), n_bytes)
        out += uint64(n_bytes)


def stored(state: Counts, blocks: Counts) -> list[Bytes]:
    """What blocks hold, in a copy.

    :param blocks: (n,) none of them open.
    """
    ends = np.zeros(len(blocks), dtype=np.int64)
    list_block_ends(state, blocks, ends)
    contents = allocate((int(ends[-1]) if len(ends) else 0) + SLACK)
    copy_blocks(state, blocks, address_of(contents))
    return [contents[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
