"""The loops that compare what is found of a frame pool in a file with checksums."""

from __future__ import annotations

from numba import int64, njit, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._kernels_out import _entry_size
from rl_ext_core.frames._pool_memory import address_in, newest_block, open_sum, page_after, place_of, stored_sum
from rl_ext_core.frames._pool_state import (
    BLOCKS,
    FREE,
    KIND,
    OPEN,
    OPEN_SUM,
    PAGE,
    PAGED,
    PAGES,
    PREVIOUS,
    REFERENCE,
    REFERENCES,
    SEALED,
    SEALED_SUM,
    STORED_SUM,
    STREAM,
    USERS,
)
from rl_ext_core.frames._state import ENTRY_HEADER, PATCH
from rl_ext_core.frames._sums import START, add_bytes, folded, mixed


@njit(nogil=True)
def _has_right_row(p, block, geometry):  # type: ignore[no-untyped-def]
    kind = p.blocks[block, KIND]
    if p.blocks[block, PREVIOUS] >= p.head[BLOCKS]:
        return False
    if geometry.coder == PATCH and p.blocks[block, REFERENCE] >= p.head[REFERENCES]:
        return False
    if kind == OPEN:
        return p.blocks[block, STREAM] < p.open.shape[0] and p.sums[block, OPEN_SUM] == open_sum(p, block)
    if kind == FREE or kind & ~uint32(SEALED | PAGED):
        return False
    column = SEALED_SUM if kind & SEALED else STORED_SUM
    page, n_bytes = place_of(p, block)
    n_pages = (n_bytes + PAGE - 1) // PAGE
    if page >= p.head[PAGES] or (kind & PAGED != PAGED and int64(page) + n_pages > p.head[PAGES]):
        return False
    expected = stored_sum(p, block, page, n_bytes, kind, p.sums[block, column])
    return p.sums[block, column + 1] == expected


@kernel
def check_rows(p, geometry, good):  # type: ignore[no-untyped-def]
    """Finds out which blocks lie where they were put; what they hold is not read.

    :param good: (blocks,) written.
    """
    for block in range(1, p.head[BLOCKS]):
        good[block] = _has_right_row(p, block, geometry)


@njit(nogil=True)
def _has_right_entries(p, block, frames, geometry):  # type: ignore[no-untyped-def]
    s = int64(p.blocks[block, STREAM])
    start = address_in(p.open, s)
    end = start + uint64(p.open.shape[1])
    for place in range(frames):
        if place >= p.entry_sums.shape[1] or end - start < uint64(ENTRY_HEADER):
            return False
        size = geometry.frame_bytes
        if geometry.coder == PATCH:
            size = _entry_size(start, geometry)[0] + ENTRY_HEADER
        if uint64(size) > end - start:
            return False
        if p.entry_sums[s, place] != folded(add_bytes(mixed(START, block), start, size)):
            return False
        start += uint64(size)
    return True


@kernel
def check_places(p, geometry, newest_places, good, used):  # type: ignore[no-untyped-def]
    """Looks closer at the blocks that are used: the links between pages, and what was being filled.

    :param newest_places: (blocks,) the last frame of each block that a stack needs.
    :param good: (blocks,) cleared where something is wrong.
    :param used: (pages,) zeros; written.
    :return: how many blocks are wrong.
    """
    n_wrong = 0
    for block in range(1, p.head[BLOCKS]):
        if p.blocks[block, USERS] == 0:
            continue
        if p.blocks[block, KIND] == OPEN:
            right = _has_right_entries(p, block, newest_places[block] + 1, geometry)
        else:
            page, left = place_of(p, block)
            right = True
            while left > 0 and right:
                right = page < p.head[PAGES] and not used[page]
                if right:
                    used[page] = True
                    left -= PAGE
                    if left > 0:
                        page = page_after(p, page, p.blocks[block, KIND] & PAGED == PAGED)
        if not right:
            good[block] = False
            n_wrong += 1
    return n_wrong


@njit(nogil=True)
def _has_right_contents(p, block):  # type: ignore[no-untyped-def]
    paged = p.blocks[block, KIND] & PAGED == PAGED
    column = SEALED_SUM if p.blocks[block, KIND] & SEALED else STORED_SUM
    page, left = place_of(p, block)
    total = uint64(START)
    while left > 0:
        if page >= p.head[PAGES]:
            return False
        n_bytes = min(left, PAGE)
        total = add_bytes(total, p.starts[0] + uint64(int64(page) * PAGE), n_bytes)
        left -= n_bytes
        if left > 0:
            page = page_after(p, page, paged)
    return p.sums[block, column] == folded(total)


@njit(nogil=True)
def _has_right_reference(p, number, geometry):  # type: ignore[no-untyped-def]
    start = p.starts[1] + uint64(number) * p.starts[2]
    return p.reference_sums[number] == folded(add_bytes(START, start, geometry.frame_bytes))


@kernel
def check_contents(p, handles, geometry, unchecked, unchecked_references, right):  # type: ignore[no-untyped-def]
    """Compares what stacks are made of with checksums, unless that was done before.

    :param unchecked: (blocks,) where it was not done yet; cleared where it is found right.
    :param unchecked_references: (reference frames,) likewise.
    :param right: (n,) written.
    """
    for i in range(handles.shape[0]):
        block, place, depth = newest_block(handles[i])
        missing = depth
        right[i] = True
        while missing > 0:
            if block < unchecked.shape[0] and unchecked[block] and p.blocks[block, KIND] != OPEN:
                if _has_right_contents(p, block):
                    unchecked[block] = False
                else:
                    right[i] = False
            reference = p.blocks[block, REFERENCE]
            starts = geometry.coder == PATCH and reference < unchecked_references.shape[0]
            if starts and unchecked_references[reference]:
                if _has_right_reference(p, reference, geometry):
                    unchecked_references[reference] = False
                else:
                    right[i] = False
            missing -= place + 1
            place = (1 << geometry.block_shift) - 1
            block = int64(p.blocks[block, PREVIOUS])
