"""The memory of a frame pool, for its kernels: pages, blocks, reference frames, and who uses them."""

from __future__ import annotations

from numba import int64, njit, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._memory import copy_bytes
from rl_ext_core.frames._pool_state import (
    BLOCK_BYTES,
    DEPTH_SHIFT,
    FIRST_PAGE,
    FREE,
    FREE_BLOCKS,
    FREE_PAGES,
    FREE_REFERENCES,
    KIND,
    N_BYTES,
    OPEN,
    PAGE,
    PAGED,
    PAGES,
    PLACE_SHIFT,
    PREVIOUS,
    REFERENCE,
    SEALED,
    SEALED_BYTES,
    SEALED_PAGE,
    SEALED_SUM,
    STORED_SUM,
    STREAM,
    USERS,
    WHOLE,
)
from rl_ext_core.frames._state import PATCH
from rl_ext_core.frames._sums import START, add_bytes, folded, mixed

_NUMBER = 0xFFFFFFFF


@njit(nogil=True, inline="always")
def newest_block(handle):  # type: ignore[no-untyped-def]
    """The block of a stack's newest frame, the place there, and the number of frames."""
    return handle & _NUMBER, (handle >> PLACE_SHIFT) & 0xFFFF, handle >> DEPTH_SHIFT


@njit(nogil=True)
def address_in(array, row):  # type: ignore[no-untyped-def]
    """Where a row of bytes begins."""
    return uint64(array.ctypes.data) + uint64(row * array.shape[1])


@njit(nogil=True)
def take(p, used, freed, free):  # type: ignore[no-untyped-def]
    """A number that is free, or one that was never used."""
    if p.head[freed] > 0:
        p.head[freed] -= 1
        return int64(free[p.head[freed]])
    p.head[used] += 1
    return p.head[used] - 1


@njit(nogil=True)
def open_sum(p, block):  # type: ignore[no-untyped-def]
    """Checksum of what is noted of a block that is being filled."""
    total = mixed(mixed(START, block), OPEN)
    for column in (PREVIOUS, REFERENCE, STREAM):
        total = mixed(total, p.blocks[block, column])
    return folded(total)


@njit(nogil=True)
def stored_sum(p, block, page, n_bytes, kind, contents):  # type: ignore[no-untyped-def]
    """Checksum of what is noted of a block in pages.

    :param contents: checksum of what it holds.
    """
    total = mixed(mixed(mixed(mixed(mixed(START, block), kind), page), n_bytes), contents)
    for column in (PREVIOUS, REFERENCE):
        total = mixed(total, p.blocks[block, column])
    return folded(total)


@njit(nogil=True)
def store_bytes(p, block, source, n_bytes, seal):  # type: ignore[no-untyped-def]
    """Copies bytes into pages and notes them as a block's contents, or what its contents were sealed to."""
    n_pages = (n_bytes + PAGE - 1) // PAGE
    free = p.head[FREE_PAGES]
    base = p.starts[0]
    kind = WHOLE
    if free >= n_pages:
        first = int64(p.free_pages[free - 1])
        for i in range(n_pages):
            if int64(p.free_pages[free - 1 - i]) != first + i:
                kind = PAGED
        p.head[FREE_PAGES] = free - n_pages
    else:
        first = p.head[PAGES]
        p.head[PAGES] += n_pages
    if kind == WHOLE:
        copy_bytes(base + uint64(first * PAGE), source, n_bytes)
    else:
        for i in range(n_pages):
            page = int64(p.free_pages[free - 1 - i])
            copy_bytes(base + uint64(page * PAGE), source + uint64(i * PAGE), min(PAGE, n_bytes - i * PAGE))
            if i + 1 < n_pages:
                p.links[page] = p.free_pages[free - 2 - i]
    if seal:
        kind |= SEALED
    column = SEALED_SUM if seal else STORED_SUM
    contents = folded(add_bytes(START, source, n_bytes))
    p.sums[block, column] = contents
    p.sums[block, column + 1] = stored_sum(p, block, first, n_bytes, kind, contents)
    p.blocks[block, SEALED_PAGE if seal else FIRST_PAGE] = uint32(first)
    p.blocks[block, SEALED_BYTES if seal else N_BYTES] = uint32(n_bytes)
    p.blocks[block, KIND] = uint32(kind)
    p.head[BLOCK_BYTES] += n_bytes


@njit(nogil=True, inline="always")
def place_of(p, block):  # type: ignore[no-untyped-def]
    """First page and length of a block that is not open."""
    sealed = p.blocks[block, KIND] & SEALED
    return p.blocks[block, SEALED_PAGE if sealed else FIRST_PAGE], int64(
        p.blocks[block, SEALED_BYTES if sealed else N_BYTES]
    )


@njit(nogil=True, inline="always")
def page_after(p, page, paged):  # type: ignore[no-untyped-def]
    """The page behind one of a block, which lie one after the other or where ``links`` lead."""
    return p.links[page] if paged else page + uint32(1)


@njit(nogil=True)
def free_pages(p, page, n_bytes, paged):  # type: ignore[no-untyped-def]
    """Gives pages back, so that they are taken again in the same order."""
    n_pages = (n_bytes + PAGE - 1) // PAGE
    free = p.head[FREE_PAGES]
    for i in range(n_pages):
        p.free_pages[free + n_pages - 1 - i] = page
        if i + 1 < n_pages:
            page = page_after(p, page, paged)
    p.head[FREE_PAGES] = free + n_pages


@njit(nogil=True)
def seal_bytes(p, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Stores what the contents of a full block were sealed to in their place."""
    page, old = place_of(p, block)
    paged = p.blocks[block, KIND] & PAGED == PAGED
    p.head[BLOCK_BYTES] -= old
    store_bytes(p, block, source, n_bytes, True)
    free_pages(p, page, old, paged)


@njit(nogil=True)
def release_reference(p, reference):  # type: ignore[no-untyped-def]
    """Takes back one use of a reference frame; the last one frees it."""
    p.users[reference] -= uint32(1)
    if p.users[reference] == 0:
        p.free_references[p.head[FREE_REFERENCES]] = uint32(reference)
        p.head[FREE_REFERENCES] += 1


@njit(nogil=True)
def drop_user(p, block, geometry):  # type: ignore[no-untyped-def]
    """Takes back one use of a block; the last one frees it."""
    p.blocks[block, USERS] -= uint32(1)
    if p.blocks[block, USERS] > 0:
        return
    page, n_bytes = place_of(p, block)
    free_pages(p, page, n_bytes, p.blocks[block, KIND] & PAGED == PAGED)
    if geometry.coder == PATCH:
        release_reference(p, p.blocks[block, REFERENCE])
    p.blocks[block, KIND] = uint32(FREE)
    p.free_blocks[p.head[FREE_BLOCKS]] = uint32(block)
    p.head[FREE_BLOCKS] += 1


@njit(nogil=True)
def retain(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Counts a use of a stack's blocks."""
    block, place, depth = newest_block(handle)
    missing = depth
    while missing > 0:
        p.blocks[block, USERS] += uint32(1)
        missing -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = int64(p.blocks[block, PREVIOUS])


@njit(nogil=True)
def release_one(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Takes one back."""
    block, place, depth = newest_block(handle)
    missing = depth
    while missing > 0:
        previous = int64(p.blocks[block, PREVIOUS])
        drop_user(p, block, geometry)
        missing -= place + 1
        place = (1 << geometry.block_shift) - 1
        block = previous


@kernel
def replace_bytes(p, block, source, n_bytes):  # type: ignore[no-untyped-def]
    """Seals a block: :func:`seal_bytes`, for Python."""
    seal_bytes(p, block, uint64(source), n_bytes)
