"""Recovery of a frame pool after a process was killed, from its valid handles.

Blocks are verified by checksums. The counts of users and the lists of free memory are rebuilt from the handles. Blocks
that were being filled become full blocks, cut to the frames that are needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import int64, njit, uint64

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import arrays as state
from rl_ext_core.frames.allocator import grains_of
from rl_ext_core.frames.arrays import (
    BLOCKS,
    FREE,
    FULL,
    GRAINS,
    KIND,
    OPEN,
    OPEN_SUM,
    PREVIOUS,
    REFERENCE,
    REFERENCES,
    SEALED,
    SEALED_SUM,
    STORED_SUM,
    STREAM,
    STREAMS,
    USERS,
)
from rl_ext_core.frames.blocks import (
    block_location,
    claim_grains,
    free_unused_blocks,
    full_sum,
    open_sum,
    retain_handle,
    store_bytes,
    unpack_handle,
)
from rl_ext_core.frames.decode import entry_size_of
from rl_ext_core.frames.geometry import ENTRY_HEADER, PATCH
from rl_ext_core.frames.kernel_primitives import SUM_START, add_bytes, fold_sum, kernel, mix_word
from rl_ext_core.frames.pool import FramePool, Handles
from rl_ext_core.frames.views import address_in, geometry_in, pool_in


@njit(nogil=True)
def _is_row_intact(p, block, geometry):  # type: ignore[no-untyped-def]
    """Return whether a block's row in the table of blocks is valid and matches its checksum."""
    kind = p.blocks[block, KIND]
    if p.blocks[block, PREVIOUS] >= p.head[BLOCKS]:
        return False
    if geometry.coder == PATCH and p.blocks[block, REFERENCE] >= p.head[REFERENCES]:
        return False
    if kind == OPEN:
        return p.blocks[block, STREAM] < p.most_streams and p.sums[block, OPEN_SUM] == open_sum(p, block)
    if kind != FULL and kind != SEALED:
        return False
    column = SEALED_SUM if kind == SEALED else STORED_SUM
    first, n_bytes = block_location(p, block)
    if first + grains_of(p, n_bytes) > p.head[GRAINS]:
        return False
    expected = full_sum(p, block, first, n_bytes, kind, p.sums[block, column])
    return p.sums[block, column + 1] == expected


@kernel
def check_rows(state, good_blocks):  # type: ignore[no-untyped-def]
    """Check each block's row in the table of blocks, and mark intact ones in ``good_blocks``.

    :param good_blocks: (n_blocks,) output
    """
    p, geometry = pool_in(state), geometry_in(state)
    for block in range(1, p.head[BLOCKS]):
        good_blocks[block] = _is_row_intact(p, block, geometry)


@njit(nogil=True)
def _are_entries_intact(p, block, frames, geometry):  # type: ignore[no-untyped-def]
    """Return whether the first ``frames`` entries of an open block match their checksums."""
    s = int64(p.blocks[block, STREAM])
    start = address_in(p.open, s)
    end = start + uint64(p.open_bytes)
    for place in range(frames):
        if place >= p.block_frames or end - start < uint64(ENTRY_HEADER):
            return False
        size = geometry.frame_bytes
        if geometry.coder == PATCH:
            size = entry_size_of(start, geometry, geometry.max_error)[0] + ENTRY_HEADER
        if uint64(size) > end - start:
            return False
        if p.entry_sums[s, place] != fold_sum(add_bytes(mix_word(SUM_START, block), start, size)):
            return False
        start += uint64(size)
    return True


@kernel
def check_places(state, newest_places, good_blocks, used):  # type: ignore[no-untyped-def]
    """Check the blocks in use, and clear ``good_blocks`` for the damaged ones.

    Full blocks must not overlap, and the frames of open blocks must match their checksums.

    :param newest_places: (n_blocks,) index of the last needed frame of each block
    :param good_blocks: (n_blocks,) entries of damaged blocks are cleared
    :param used: (n_grains,) zeros; output
    :return: Number of damaged blocks
    """
    p, geometry = pool_in(state), geometry_in(state)
    n_wrong = 0
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            continue
        if p.blocks[block, KIND] == OPEN:
            right = _are_entries_intact(p, block, newest_places[block] + 1, geometry)
        else:
            right = claim_grains(p, block, used)
        if not right:
            good_blocks[block] = False
            n_wrong += 1
    return n_wrong


@kernel
def count_users(state, handles, most, good_blocks, intact, newest_places):  # type: ignore[no-untyped-def]
    """Count the users of each block; find the handles that need good blocks only.

    :param most: Largest number of frames of a handle
    :param good_blocks: (n_blocks,) which blocks are intact
    :param intact: (n,) output: which handles can be read
    :param newest_places: (n_blocks,) output: index of the last needed frame of each block, or -1
    """
    p, geometry = pool_in(state), geometry_in(state)
    for i in range(handles.shape[0]):
        block, place, depth = unpack_handle(handles[i])
        intact[i] = handles[i] > 0 and 0 < depth <= most
        missing = depth
        while missing > 0 and intact[i]:
            intact[i] = (
                0 < block < p.head[BLOCKS]
                and place < 1 << geometry.block_shift
                and p.blocks[block, KIND] != FREE
                and good_blocks[block]
            )
            missing -= place + 1
            place = (1 << geometry.block_shift) - 1
            block = int64(p.blocks[block, PREVIOUS]) if intact[i] else 0
        if not intact[i]:
            continue
        retain_handle(p, handles[i], geometry)
        block, place, depth = unpack_handle(handles[i])
        newest_places[block] = max(newest_places[block], place)
        missing = depth - place - 1
        while missing > 0:
            block = int64(p.blocks[block, PREVIOUS])
            newest_places[block] = (1 << geometry.block_shift) - 1
            missing -= 1 << geometry.block_shift


@kernel
def close_open_blocks(state, newest_places):  # type: ignore[no-untyped-def]
    """Move the needed frames of open blocks out of the streams' buffers."""
    p, geometry = pool_in(state), geometry_in(state)
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, KIND] != OPEN or p.blocks[block, USERS] == 0:
            continue
        start = address_in(p.open, int64(p.blocks[block, STREAM]))
        n_bytes = (newest_places[block] + 1) * geometry.frame_bytes
        if geometry.coder == PATCH:
            n_bytes = 0
            for _ in range(newest_places[block] + 1):
                size, _ = entry_size_of(start + uint64(n_bytes), geometry, geometry.max_error)
                n_bytes += size + ENTRY_HEADER
        store_bytes(p, block, start, n_bytes, False)


def recover(pool: FramePool, handles: Handles, *, most: int = 0) -> npt.NDArray[np.bool_]:
    """Repair a pool so that it contains exactly the stacks of these handles.

    :param handles: (n,) handles of stacks
    :param most: Largest number of frames of a handle; 0 for the frames of a stack
    :return: (n,) which handles can be read; the other stacks are dropped
    :raises CorruptFileError: If the pool's head is damaged
    """
    pool.refresh()
    p, head = pool._pool, pool._pool.head
    _check_head(pool)
    n_blocks = int(head[BLOCKS])
    intact, newest_places = _find_intact_handles(pool, handles, most or pool.layout.n_stack)
    n_open = int(np.count_nonzero(p.blocks[:n_blocks, state.KIND] == state.OPEN))
    pool._memory.reserve_block(n_open * p.open.shape[1])
    # The free lists may be damaged, so they are rebuilt here and below.
    free_unused_blocks(pool._state, np.zeros(int(head[GRAINS]), dtype=np.bool_))
    close_open_blocks(pool._state, newest_places)
    _write_free_list(p.free_blocks, head, state.FREE_BLOCKS, np.r_[False, p.blocks[1:n_blocks, USERS] == 0])
    live = p.blocks[1:n_blocks][p.blocks[1:n_blocks, USERS] > 0]
    n_references = int(head[state.REFERENCES])
    references = live[:, state.REFERENCE] if pool.codec == "patch" else live[:0, 0]
    p.users[:n_references] = np.bincount(references, minlength=n_references)[:n_references]
    _write_free_list(p.free_references, head, state.FREE_REFERENCES, p.users[:n_references] == 0)
    head[state.RECENT : state.RECENT + state.N_RECENT] = -1
    p.streams[: head[STREAMS]] = 0
    head[STREAMS] = head[state.NEWEST_STREAM] = head[state.UNSEALED] = 0
    head[state.N_HELD] = int(intact.sum())
    pool.verify_on_read()
    return intact


def recover_pairs(pool: FramePool, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Repair a pool of transitions so that it contains exactly these rows.

    :param rows: (n,) valid rows of the index
    :return: (n,) which rows can be read
    """
    handles = _read_handles(pool, rows)
    intact = recover(pool, handles.reshape(-1), most=2 * pool.layout.n_stack)
    whole: npt.NDArray[np.bool_] = np.all(intact.reshape(handles.shape), axis=1)
    return whole


def find_readable_pairs(pool: FramePool, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Repair a pool of transitions, and verify the contents of its rows.

    :param rows: (n,) valid rows of the index
    :return: (n,) which rows have all transitions intact
    """
    there = recover_pairs(pool, rows)
    handles = _read_handles(pool, rows[there])
    there[there] = pool.are_intact(handles.reshape(-1)).reshape(handles.shape).all(axis=1)
    return there


def _read_handles(pool: FramePool, rows: npt.NDArray[np.int64]) -> Handles:
    """Return (n, n_streams) handles that cover all frames of these rows of transitions."""
    pool.refresh()
    pairs = pool.index[rows]
    block, place = pairs & (state.MOST_BLOCKS - 1), pairs >> state.PAIR_PLACE_SHIFT & (state.MOST_PLACES - 1)
    depth, step = (pairs >> shift & 0xFF for shift in (state.PAIR_DEPTH_SHIFT, state.PAIR_STEP_SHIFT))
    n_frames = np.maximum(depth + step, pairs >> state.PAIR_NEXT_DEPTH_SHIFT & 0xFF)
    handles: Handles = block | place << state.PLACE_SHIFT | n_frames << state.DEPTH_SHIFT
    return handles


def _check_head(pool: FramePool) -> None:
    """Raise if the counts in a pool's head exceed its capacity."""
    head = pool._pool.head
    limits = dict(zip((BLOCKS, GRAINS, state.REFERENCES, STREAMS), pool._memory.capacity.tolist(), strict=True))
    if any(not 0 <= head[field] <= limit for field, limit in limits.items()):
        raise CorruptFileError(f"{pool._region.path} is damaged: its head has counts that exceed its capacity")


def _find_intact_handles(
    pool: FramePool, handles: Handles, most: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Find the handles that can be read, and the last needed frame of each block.

    It also counts the users of each block.
    """
    p = pool._pool
    n_blocks = int(p.head[BLOCKS])
    good_blocks = np.ones(n_blocks, dtype=np.bool_)
    intact = np.zeros(len(handles), dtype=np.bool_)
    check_rows(pool._state, good_blocks)
    while True:
        p.blocks[:n_blocks, USERS] = 0
        newest_places = np.full(n_blocks, -1, dtype=np.int64)
        count_users(pool._state, handles, most, good_blocks, intact, newest_places)
        used = np.zeros(int(p.head[GRAINS]), dtype=np.bool_)
        if not check_places(pool._state, newest_places, good_blocks, used):
            return intact, newest_places


def _write_free_list(
    target: npt.NDArray[np.uint32], head: npt.NDArray[np.int64], field: int, free: npt.NDArray[np.bool_]
) -> None:
    """Write the free numbers into a list, and their count into a field of the head."""
    numbers = np.flatnonzero(free)[::-1]
    target[: len(numbers)] = numbers
    head[field] = len(numbers)
