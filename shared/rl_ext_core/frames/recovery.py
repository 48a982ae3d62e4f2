"""Making a frame pool whole again that a process left behind, from what is sure: the handles, and what they lead to.

Everything else is compared with checksums and found out anew: who uses what, what is free. Blocks that were
being filled become full ones of as many frames as are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numba import int64, njit, uint32, uint64

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import arrays as state
from rl_ext_core.frames.allocator import free_unused_grains, grains_of
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
    unpack_handle,
    open_sum,
    block_location,
    retain_handle,
    store_bytes,
    full_sum,
)
from rl_ext_core.frames.decode import entry_size_of
from rl_ext_core.frames.geometry import ENTRY_HEADER, PATCH
from rl_ext_core.frames.machine import SUM_START, add_bytes, fold_sum, kernel, mix_word
from rl_ext_core.frames.views import address_in, geometry_in, pool_in

if TYPE_CHECKING:
    from rl_ext_core.frames.pool import FramePool, Handles


@njit(nogil=True)
def _is_row_intact(p, block, geometry):  # type: ignore[no-untyped-def]
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
    """Finds out which blocks lie where they were put; what they hold is not read.

    :param good_blocks: (blocks,) written.
    """
    p, geometry = pool_in(state), geometry_in(state)
    for block in range(1, p.head[BLOCKS]):
        good_blocks[block] = _is_row_intact(p, block, geometry)


@njit(nogil=True)
def _are_entries_intact(p, block, frames, geometry):  # type: ignore[no-untyped-def]
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


@njit(nogil=True)
def _claim_grains(p, block, used):  # type: ignore[no-untyped-def]
    """Marks the grains of a block; says whether none of them is that of another one."""
    first, n_bytes = block_location(p, block)
    if first + grains_of(p, n_bytes) > used.shape[0]:
        return False
    for grain in range(first, first + grains_of(p, n_bytes)):
        if used[grain]:
            return False
        used[grain] = True
    return True


@kernel
def check_places(state, newest_places, good_blocks, used):  # type: ignore[no-untyped-def]
    """Looks closer at the blocks that are used: that none lies in another, and what was being filled.

    :param newest_places: (blocks,) the last frame of each block that a stack needs.
    :param good_blocks: (blocks,) cleared where something is wrong.
    :param used: (grains,) zeros; written.
    :return: how many blocks are wrong.
    """
    p, geometry = pool_in(state), geometry_in(state)
    n_wrong = 0
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            continue
        if p.blocks[block, KIND] == OPEN:
            right = _are_entries_intact(p, block, newest_places[block] + 1, geometry)
        else:
            right = _claim_grains(p, block, used)
        if not right:
            good_blocks[block] = False
            n_wrong += 1
    return n_wrong


@kernel
def count_users(state, handles, most, good_blocks, intact, newest_places):  # type: ignore[no-untyped-def]
    """Counts who uses which blocks; says which handles lead to blocks that are there.

    :param most: frames that a handle may name.
    :param good_blocks: (blocks,) which of them can be relied on.
    :param intact: (n,) written.
    :param newest_places: (blocks,) written: the last frame of each block that a stack needs, or -1.
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
    """Moves what is needed of blocks that were being filled out of their buffers."""
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


@kernel
def free_unused_blocks(state, used):  # type: ignore[no-untyped-def]
    """Makes free what no block is in that is used.

    :param used: (grains,) zeros; written.
    :return: whether each of them lies in grains of its own.
    """
    p = pool_in(state)
    right = True
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            p.blocks[block, KIND] = uint32(FREE)
        elif p.blocks[block, KIND] != OPEN:
            right = _claim_grains(p, block, used) and right
    free_unused_grains(p, used)
    return right


def recover(pool: FramePool, handles: Handles, *, most: int = 0) -> npt.NDArray[np.bool_]:
    """Makes a pool whole that holds these stacks and no others.

    :param handles: (n,).
    :param most: frames that a handle may name, or 0 for as many as a stack has.
    :return: (n,) which of them can be read; the others are forgotten.
    """
    pool.refresh()
    p, head = pool._pool, pool._pool.head
    _check_head(pool)
    n_blocks = int(head[BLOCKS])
    intact, newest_places = _find_intact_handles(pool, handles, most or pool.layout.n_stack)
    n_open = int(np.count_nonzero(p.blocks[:n_blocks, state.KIND] == state.OPEN))
    pool._memory.reserve_block(n_open * p.open.shape[1])
    free_unused_blocks(
        pool._state, np.zeros(int(head[GRAINS]), dtype=np.bool_)
    )  # what the lists say is not to be relied on
    close_open_blocks(pool._state, newest_places)
    _write_free_list(p.free_blocks, head, state.FREE_BLOCKS, np.r_[False, p.blocks[1:n_blocks, USERS] == 0])
    live = p.blocks[1:n_blocks][p.blocks[1:n_blocks, USERS] > 0]
    n_references = int(head[state.REFERENCES])
    references = live[:, state.REFERENCE] if pool.codec.patches else live[:0, 0]
    p.users[:n_references] = np.bincount(references, minlength=n_references)[:n_references]
    _write_free_list(p.free_references, head, state.FREE_REFERENCES, p.users[:n_references] == 0)
    head[state.RECENT : state.RECENT + state.N_RECENT] = -1
    p.streams[: head[STREAMS]] = 0
    head[STREAMS] = head[state.NEWEST_STREAM] = head[state.UNSEALED] = 0
    head[state.N_HELD] = int(intact.sum())
    pool.verify_on_read()
    return intact


def recover_pairs(pool: FramePool, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Likewise, of a pool of transitions.

    :param rows: (n,) of the index, of those that count.
    :return: (n,) which of them can be read.
    """
    handles = _read_handles(pool, rows)
    intact = recover(pool, handles.reshape(-1), most=2 * pool.layout.n_stack)
    whole: npt.NDArray[np.bool_] = np.all(intact.reshape(handles.shape), axis=1)
    return whole


def find_readable_pairs(pool: FramePool, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Makes a pool whole; says in which rows all transitions have the contents that they had."""
    there = recover_pairs(pool, rows)
    handles = _read_handles(pool, rows[there])
    there[there] = pool.are_intact(handles.reshape(-1)).reshape(handles.shape).all(axis=1)
    return there


def _read_handles(pool: FramePool, rows: npt.NDArray[np.int64]) -> Handles:
    """(n, streams) stacks of all frames that transitions name."""
    pool.refresh()
    pairs = pool.index[rows]
    block, place = pairs & (state.MOST_BLOCKS - 1), pairs >> state.PAIR_PLACE_SHIFT & (state.MOST_PLACES - 1)
    depth, step = (pairs >> shift & 0xFF for shift in (state.PAIR_DEPTH_SHIFT, state.PAIR_STEP_SHIFT))
    n_frames = np.maximum(depth + step, pairs >> state.PAIR_NEXT_DEPTH_SHIFT & 0xFF)
    handles: Handles = block | place << state.PLACE_SHIFT | n_frames << state.DEPTH_SHIFT
    return handles


def _check_head(pool: FramePool) -> None:
    head = pool._pool.head
    limits = dict(zip((BLOCKS, GRAINS, state.REFERENCES, STREAMS), pool._memory.most.tolist(), strict=True))
    if any(not 0 <= head[field] <= limit for field, limit in limits.items()):
        raise CorruptFileError(f"{pool._region.path} is damaged: its head says that it holds more than it can")


def _find_intact_handles(
    pool: FramePool, handles: Handles, most: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Counts who uses which blocks; says which handles lead to blocks that are whole, and how far these count."""
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
    numbers = np.flatnonzero(free)[::-1]
    target[: len(numbers)] = numbers
    head[field] = len(numbers)
