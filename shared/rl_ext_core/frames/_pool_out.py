"""The hot loops of a frame pool on the way out: stacks are decoded into where a batch needs them."""

from __future__ import annotations

from numba import int64, njit, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._kernels_out import (
    _entry_size,
    _next_frame,
    _put_frame,
    _put_padding,
    _unsealed,
    work_bytes,
)
from rl_ext_core.frames._memory import copy_bytes, prefetch
from rl_ext_core.frames._pool_memory import address_in, newest_block, place_of
from rl_ext_core.frames._pool_state import (
    BLOCKS,
    FREE,
    KIND,
    OPEN,
    PAGE,
    PAGED,
    PREVIOUS,
    REFERENCE,
    SEALED,
    STREAM,
)
from rl_ext_core.frames._state import ENTRY_HEADER, PATCH, RAW, SLACK

_PREFETCH_GROUP = 16
_PREFETCH_LINES = 32
MOST_BLOCKS = 512  # that two stacks span together


@njit(nogil=True)
def _start_of(p, block):  # type: ignore[no-untyped-def]
    if p.blocks[block, KIND] == OPEN:
        return address_in(p.open, int64(p.blocks[block, STREAM]))
    return p.starts[0] + uint64(int64(place_of(p, block)[0]) * PAGE)


@njit(nogil=True)
def _collect(p, block, out):  # type: ignore[no-untyped-def]
    """Copies the bytes of a block from its pages."""
    page, left = place_of(p, block)
    while left > 0:
        copy_bytes(out, p.starts[0] + uint64(int64(page) * PAGE), min(left, PAGE))
        out += uint64(PAGE)
        left -= PAGE
        if left > 0:
            page = p.links[page]


@njit(nogil=True)
def _contents(p, block, decompressor, work, block_bytes):  # type: ignore[no-untyped-def]
    """Where the bytes of a block lie one after the other; 0 where they are damaged.

    :param work: address of two blocks.
    """
    kind = p.blocks[block, KIND]
    address = _start_of(p, block)
    if kind & PAGED == PAGED:
        _collect(p, block, work)
        address = work
    if kind & SEALED:
        address = _unsealed(address, decompressor, work + uint64(block_bytes))
    return address


@njit(nogil=True, inline="always")
def _seek(address, frames, reference, geometry, work):  # type: ignore[no-untyped-def]
    """Goes past the first ``frames`` frames of a block; returns the frame before, and the address of the next one."""
    if geometry.coder == RAW:
        return address, address + uint64(frames * geometry.frame_bytes)
    frame = reference
    # Patches before a frame that is stored whole need not be applied.
    first, entry = 0, address
    for i in range(frames + 1):
        size, whole = _entry_size(entry, geometry)
        if whole:
            first, address = i, entry
        entry += uint64(size + ENTRY_HEADER)
    for _ in range(first, frames):
        frame, address = _next_frame(frame, address, geometry, work)
    return frame, address


@njit(nogil=True)
def _steps_between(p, handle, following, geometry):  # type: ignore[no-untyped-def]
    """How many frames the newest one of ``following`` is behind that of ``handle``, or -1 where they are no neighbours.

    Only links that ``following`` itself needs are sure to lead anywhere.
    """
    block, place, _ = newest_block(handle)
    at, at_place, depth = newest_block(following)
    steps = 0
    while at != block:
        steps += at_place + 1
        if steps >= depth:
            return -1
        at = int64(p.blocks[at, PREVIOUS])
        at_place = (1 << geometry.block_shift) - 1
    steps += at_place - place
    return steps if 0 <= steps <= depth else -1


@njit(nogil=True)
def _decode(p, newest, n_frames, depth, back, next_depth, geometry, out, next_out, decompressor, work, chain):  # type: ignore[no-untyped-def]
    """Decodes the ``n_frames`` frames up to ``newest`` once each, and copies them to where they belong.

    :param depth: frames of the stack at ``out``, whose newest is ``back`` frames before ``newest``.
    :param next_depth: frames of the stack at ``next_out``, whose newest is ``newest``.
    :return: 1 where a block is damaged.
    """
    n_stack, n_bytes = geometry.n_stack, geometry.frame_bytes
    in_block = 1 << geometry.block_shift
    block_bytes = in_block * (n_bytes + ENTRY_HEADER) + SLACK
    block, place, _ = newest_block(newest)
    n_blocks, missing = 0, n_frames - place - 1
    chain[0] = block
    while missing > 0:
        n_blocks += 1
        chain[n_blocks] = int64(p.blocks[chain[n_blocks - 1], PREVIOUS])
        missing -= in_block
    start = -missing  # of the first frame in the first block
    left = n_frames
    for i in range(n_blocks, -1, -1):
        block = chain[i]
        address = _contents(p, block, decompressor, work + uint64(work_bytes(geometry)), block_bytes)
        if address == uint64(0):
            return 1
        reference = p.starts[1]
        if geometry.coder == PATCH:
            reference += uint64(p.blocks[block, REFERENCE]) * p.starts[2]
        source, address = _seek(address, start, reference, geometry, work)
        stop = place + 1 if i == 0 else in_block
        for _ in range(start, stop):
            if geometry.coder == RAW:
                source = address
                address += uint64(n_bytes)
            else:
                source, address = _next_frame(source, address, geometry, work)
            left -= 1
            before = left - back  # frames of the first stack that come later
            if 0 <= before < depth:
                _put_frame(source, out, n_stack - 1 - before, geometry)
            if left < next_depth:
                _put_frame(source, next_out, n_stack - 1 - left, geometry)
        start = 0
    return 0


@njit(nogil=True)
def _gather_alone(p, handle, geometry, out, decompressor, work, chain):  # type: ignore[no-untyped-def]
    depth = handle >> 48
    _put_padding(out, geometry.n_stack - depth, geometry)
    if depth == 0:
        return 0
    return _decode(p, handle, depth, 0, 0, depth, geometry, out, out, decompressor, work, chain)


@njit(nogil=True)
def _prefetch(p, handle, geometry):  # type: ignore[no-untyped-def]
    block, place, depth = newest_block(handle)
    if depth > place + 1:
        block = int64(p.blocks[block, PREVIOUS])
        place += 1 << geometry.block_shift
    address = _start_of(p, block)
    if geometry.coder == RAW:
        address += uint64((place + 1 - depth) * geometry.frame_bytes)
    for line in range(_PREFETCH_LINES):
        prefetch(address + uint64(line * 64))


@kernel
def all_held(p, handles):  # type: ignore[no-untyped-def]
    """Whether all handles name blocks that hold something."""
    for handle in handles:
        block = newest_block(handle)[0]
        if handle < 0 or block >= p.head[BLOCKS] or (handle != 0 and p.blocks[block, KIND] == FREE):
            return False
    return True


@kernel
def gather(start, stop, p, handles, next_handles, geometry, outs, next_outs, decompressor, work, chain):  # type: ignore[no-untyped-def]
    """Writes the stacks ``start`` to ``stop`` of a batch.

    :param next_handles: (n,), or (0,) where only one batch of stacks is wanted.
    :param outs: address of the batch.
    :param next_outs: address of the batch of those that follow.
    :param decompressor: address of a C function, see ``_memory``, that opens sealed blocks, or 0.
    :param work: address of ``work_bytes()``, and two blocks behind.
    :param chain: (MOST_BLOCKS,) scratch.
    :return: how many could not be read because a sealed block is damaged.
    """
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    decompressor, work = uint64(decompressor), uint64(work)
    failed = 0
    for group in range(start, stop, _PREFETCH_GROUP):
        group_stop = min(group + _PREFETCH_GROUP, stop)
        for b in range(group, group_stop):
            _prefetch(p, handles[b], geometry)
        for b in range(group, group_stop):
            out = uint64(outs) + uint64(b * stack_bytes)
            if next_handles.shape[0] == 0:
                failed += _gather_alone(p, handles[b], geometry, out, decompressor, work, chain)
                continue
            next_out = uint64(next_outs) + uint64(b * stack_bytes)
            depth, next_depth = handles[b] >> 48, next_handles[b] >> 48
            steps = _steps_between(p, handles[b], next_handles[b], geometry) if depth and next_depth else -1
            if steps < 0:
                failed += _gather_alone(p, handles[b], geometry, out, decompressor, work, chain)
                failed += _gather_alone(p, next_handles[b], geometry, next_out, decompressor, work, chain)
                continue
            _put_padding(out, geometry.n_stack - depth, geometry)
            _put_padding(next_out, geometry.n_stack - next_depth, geometry)
            n_frames = max(depth + steps, next_depth)
            failed += _decode(
                p,
                next_handles[b],
                n_frames,
                depth,
                steps,
                next_depth,
                geometry,
                out,
                next_out,
                decompressor,
                work,
                chain,
            )
    return failed
