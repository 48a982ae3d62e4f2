"""The loops that go over all of a frame pool, to find out what is used."""

from __future__ import annotations

from numba import int64, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._kernels_out import _entry_size
from rl_ext_core.frames._pool_memory import address_in, newest_block, page_after, place_of, retain, store_bytes
from rl_ext_core.frames._pool_state import BLOCKS, FREE, KIND, OPEN, PAGE, PAGED, PREVIOUS, STREAM, USERS
from rl_ext_core.frames._state import ENTRY_HEADER, PATCH


@kernel
def count_users(p, handles, geometry, good, intact, newest_places):  # type: ignore[no-untyped-def]
    """Counts who uses which blocks; says which handles lead to blocks that are there.

    :param good: (blocks,) which of them can be relied on.
    :param intact: (n,) written.
    :param newest_places: (blocks,) written: the last frame of each block that a stack needs, or -1.
    """
    for i in range(handles.shape[0]):
        block, place, depth = newest_block(handles[i])
        intact[i] = handles[i] > 0 and 0 < depth <= geometry.n_stack
        missing = depth
        while missing > 0 and intact[i]:
            intact[i] = (
                0 < block < p.head[BLOCKS]
                and place < 1 << geometry.block_shift
                and p.blocks[block, KIND] != FREE
                and good[block]
            )
            missing -= place + 1
            place = (1 << geometry.block_shift) - 1
            block = int64(p.blocks[block, PREVIOUS]) if intact[i] else 0
        if not intact[i]:
            continue
        retain(p, handles[i], geometry)
        block, place, depth = newest_block(handles[i])
        newest_places[block] = max(newest_places[block], place)
        missing = depth - place - 1
        while missing > 0:
            block = int64(p.blocks[block, PREVIOUS])
            newest_places[block] = (1 << geometry.block_shift) - 1
            missing -= 1 << geometry.block_shift


@kernel
def close_open(p, geometry, newest_places):  # type: ignore[no-untyped-def]
    """Moves what is needed of blocks that were being filled into pages."""
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, KIND] != OPEN or p.blocks[block, USERS] == 0:
            continue
        start = address_in(p.open, int64(p.blocks[block, STREAM]))
        n_bytes = (newest_places[block] + 1) * geometry.frame_bytes
        if geometry.coder == PATCH:
            n_bytes = 0
            for _ in range(newest_places[block] + 1):
                size, _ = _entry_size(start + uint64(n_bytes), geometry)
                n_bytes += size + ENTRY_HEADER
        store_bytes(p, block, start, n_bytes, False)


@kernel
def mark_pages(p, used):  # type: ignore[no-untyped-def]
    """Marks the pages of all blocks that are used."""
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            p.blocks[block, KIND] = uint32(FREE)
            continue
        page, left = place_of(p, block)
        while left > 0:
            used[page] = True
            left -= PAGE
            if left > 0:
                page = page_after(p, page, p.blocks[block, KIND] & PAGED == PAGED)
