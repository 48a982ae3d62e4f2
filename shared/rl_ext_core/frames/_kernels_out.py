"""The hot loops on the way out: frames are decoded, and copied to where a batch needs them.

Frame numbers are used modulo 2**32 and only their low bits pick a block, so they may wrap.
"""

from __future__ import annotations

from numba import int64, njit, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._memory import call_decompressor, copy_bytes, load_u8, load_u32, prefetch, store_u8, zero_bytes
from rl_ext_core.frames._packed import is_packed, packed_size, unpack
from rl_ext_core.frames._patch import apply_entry, entry_size
from rl_ext_core.frames._state import (
    DEPTH_SHIFT,
    ENTRY_HEADER,
    FRAME_NUMBERS,
    GROUP,
    NEXT_DEPTH_SHIFT,
    OFFSET,
    PLANAR,
    RAW,
    REFERENCE,
    SEALED_HEADER,
    SLAB,
    STEP_SHIFT,
    WORK_FRAMES,
)

CALLS_C = True  # sealed blocks are opened by a codec's C function, where it has one
_PREFETCH_GROUP = 16
_PREFETCH_LINES = 32


@njit(nogil=True)
def _put_frame(frame, out, position, geometry):  # type: ignore[no-untyped-def]
    """Copies a frame to its place in the stack at ``out``."""
    n_bytes = geometry.frame_bytes
    if geometry.stored == PLANAR:
        copy_bytes(out + uint64(position * n_bytes), frame, n_bytes)
        return
    unit = geometry.frame_channels * geometry.itemsize
    target = out + uint64(position * unit)
    for _ in range(geometry.pixels):
        if unit == 1:
            store_u8(target, load_u8(frame))
        else:
            copy_bytes(target, frame, unit)
        target += uint64(unit * geometry.n_stack)
        frame += uint64(unit)


@njit(nogil=True)
def _put_padding(out, frames, geometry):  # type: ignore[no-untyped-def]
    """Zeroes the oldest ``frames`` frames of the stack at ``out``."""
    if frames <= 0:
        return
    if geometry.stored == PLANAR or frames == geometry.n_stack:
        zero_bytes(out, frames * geometry.frame_bytes)
        return
    unit = geometry.frame_channels * geometry.itemsize
    for _ in range(geometry.pixels):
        zero_bytes(out, frames * unit)
        out += uint64(unit * geometry.n_stack)


@njit(nogil=True, inline="always")
def _unpack(transition):  # type: ignore[no-untyped-def]
    """The newest frame of an observation, its depth, and the same of the next observation."""
    newest = int64(transition & uint64(0xFFFFFFFF))
    depth = int64((transition >> uint64(DEPTH_SHIFT)) & uint64(0xFF))
    step = int64((transition >> uint64(STEP_SHIFT)) & uint64(0xFF))
    next_depth = int64((transition >> uint64(NEXT_DEPTH_SHIFT)) & uint64(0xFF))
    return newest, depth, newest + step, next_depth


@njit(nogil=True, inline="always")
def _block_address(blocks, e, slot):  # type: ignore[no-untyped-def]
    slab = blocks.table[e, slot, SLAB]
    return blocks.slab_address[slab] + uint64(blocks.table[e, slot, OFFSET])


@njit(nogil=True)
def _prefetch_blocks(start, stop, rows, envs, index, geometry, blocks):  # type: ignore[no-untyped-def]
    """Asks for the blocks of transitions to come. They lie anywhere, and waiting for one after the other adds up."""
    ring_mask = blocks.table.shape[1] - 1
    for b in range(start, stop):
        e = envs[b]
        newest, depth, _, _ = _unpack(index[rows[b], e])
        first = newest - depth + 1
        slot = (first >> geometry.block_shift) & ring_mask
        address = _block_address(blocks, e, slot)
        if geometry.coder == RAW:
            address += uint64((first & ((1 << geometry.block_shift) - 1)) * geometry.frame_bytes)
        for line in range(_PREFETCH_LINES):
            prefetch(address + uint64(line * 64))


@njit(nogil=True, inline="always")
def _entry_size(entry, geometry):  # type: ignore[no-untyped-def]
    """Size of an entry's contents, and whether the frame before does not matter to it."""
    if geometry.max_error > 0 and is_packed(entry):
        return packed_size(entry)
    return entry_size(entry, geometry.frame_bytes)


@njit(nogil=True, inline="always")
def work_bytes(geometry):  # type: ignore[no-untyped-def]
    """How much of ``work`` is for frames; behind that is room for a block."""
    return (WORK_FRAMES if geometry.max_error > 0 else 1) * (geometry.frame_bytes + GROUP)


@njit(nogil=True, inline="always")
def _next_frame(frame, entry, geometry, work):  # type: ignore[no-untyped-def]
    """The frame that an entry makes of ``frame``, as :func:`apply_entry` does.

    :param work: address of scratch frames, as many as :func:`work_bytes` says.
    """
    n_bytes = geometry.frame_bytes
    if geometry.max_error > 0:
        other, above = work + uint64(n_bytes + GROUP), work + uint64(2 * (n_bytes + GROUP))
        if is_packed(entry):
            contents = entry + uint64(ENTRY_HEADER)
            size, independent = packed_size(entry)
            if not independent and frame != work and frame != other:
                copy_bytes(work, frame, n_bytes)
                frame = work
            after = other if frame == work else work
            unpack(frame, contents, after, above, geometry)
            return after, contents + uint64(size)
        if frame == other:
            return apply_entry(frame, entry, n_bytes, other)
    return apply_entry(frame, entry, n_bytes, work)


@njit(nogil=True, inline="always")
def _seek(address, frames, e, slot, geometry, blocks, work):  # type: ignore[no-untyped-def]
    """Goes past the first ``frames`` frames of a block; returns the frame before, and the address of the next one."""
    if geometry.coder == RAW:
        return address, address + uint64(frames * geometry.frame_bytes)
    frame = blocks.reference_address[blocks.table[e, slot, REFERENCE]]
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
def _gather_one(b, e, transition, geometry, blocks, opened, out, next_out, decompressor, work):  # type: ignore[no-untyped-def]
    """Writes the stacks of one transition: its frames are decoded once, and each is copied to where it belongs."""
    n_stack, n_bytes, shift = geometry.n_stack, geometry.frame_bytes, geometry.block_shift
    in_block = (1 << shift) - 1
    newest, depth, next_newest, next_depth = _unpack(transition)
    _put_padding(out, n_stack - depth, geometry)
    if next_out == uint64(0):
        next_newest, next_depth = newest, 0
    else:
        _put_padding(next_out, n_stack - next_depth, geometry)
    if depth == 0:
        return 0
    frame = newest - depth + 1
    next_oldest = next_newest - next_depth + 1
    first_block = frame >> shift
    while frame <= next_newest:
        block = frame >> shift
        slot = block & (blocks.table.shape[1] - 1)
        address = opened[b, block - first_block] if opened.shape[0] > 0 else _block_address(blocks, e, slot)
        if decompressor != uint64(0) and blocks.table[e, slot, SLAB] >= blocks.table.shape[0]:
            address = _unsealed(address, decompressor, work + uint64(work_bytes(geometry)))
            if address == uint64(0):
                return 1
        source, address = _seek(address, frame & in_block, e, slot, geometry, blocks, work)
        end = min(next_newest, (block << shift) + in_block)
        while frame <= end:
            if geometry.coder == RAW:
                source = address
                address += uint64(n_bytes)
            else:
                source, address = _next_frame(source, address, geometry, work)
            if frame <= newest:
                _put_frame(source, out, n_stack - 1 - (newest - frame), geometry)
            if frame >= next_oldest:
                _put_frame(source, next_out, n_stack - 1 - (next_newest - frame), geometry)
            frame += 1
    return 0


@kernel
def all_exist(rows, envs, index):  # type: ignore[no-untyped-def]
    """Whether all of the places are in the index."""
    for b in range(rows.shape[0]):  # noqa: SIM110 - numba has no all()
        if not (0 <= rows[b] < index.shape[0] and 0 <= envs[b] < index.shape[1]):
            return False
    return True


@kernel
def next_entries(rows, envs, index, entries):  # type: ignore[no-untyped-def]
    """Makes observations of the next observations of a batch: an index of them, with one row a place."""
    for b in range(rows.shape[0]):
        _, _, newest, depth = _unpack(index[rows[b], envs[b]])
        entries[b, envs[b]] = uint64(newest & (FRAME_NUMBERS - 1)) | (uint64(depth) << uint64(DEPTH_SHIFT))


@kernel
def gather(start, stop, rows, envs, index, geometry, blocks, opened, observations, nexts, decompressor, work):  # type: ignore[no-untyped-def]
    """Writes the stacks of transitions ``start`` to ``stop`` of a batch.

    :param opened: (batch, blocks a transition may touch) addresses of unsealed blocks; of shape (0, 0) where blocks are
        stored as they are.
    :param observations: address of the batch of observations.
    :param nexts: address of the batch of next observations, or 0.
    :param decompressor: address of a C function, see :func:`call_decompressor`, that opens sealed blocks, or 0.
    :param work: address of :func:`work_bytes` bytes, and a block behind them if there is a decompressor.
    :return: how many transitions could not be read because a sealed block is damaged.
    """
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    failed = 0
    for group in range(start, stop, _PREFETCH_GROUP):
        group_stop = min(group + _PREFETCH_GROUP, stop)
        if opened.shape[0] == 0:
            _prefetch_blocks(group, group_stop, rows, envs, index, geometry, blocks)
        for b in range(group, group_stop):
            place = uint64(b * stack_bytes)
            next_out = uint64(nexts) + place if nexts != 0 else uint64(0)
            out = uint64(observations) + place
            e = envs[b]
            failed += _gather_one(
                b, e, index[rows[b], e], geometry, blocks, opened, out, next_out, uint64(decompressor), uint64(work)
            )
    return failed


@njit(nogil=True)
def _unsealed(sealed, decompressor, out):  # type: ignore[no-untyped-def]
    """Address of the contents of a sealed block, which may be at ``out``; 0 where they are damaged."""
    n_sealed, n_bytes = load_u32(sealed), load_u32(sealed + uint64(4))
    contents = sealed + uint64(SEALED_HEADER)
    if n_sealed == n_bytes:
        return contents
    written = call_decompressor(decompressor, contents, out, sealed)
    return out if written == n_bytes else uint64(0)


@kernel
def list_sealed(rows, envs, index, geometry, blocks, opened, places):  # type: ignore[no-untyped-def]
    """Fills ``opened`` with the addresses of blocks that are still open, and lists the sealed ones.

    :param opened: (batch, n) written; column ``i`` is for the ``i``-th block that a transition touches.
    :param places: (batch * n, 4) written: row and column in ``opened``, environment, slot in its ring.
    :return: how many are listed.
    """
    shift, ring_mask = geometry.block_shift, blocks.table.shape[1] - 1
    found = 0
    for b in range(rows.shape[0]):
        e = envs[b]
        newest, depth, next_newest, _ = _unpack(index[rows[b], e])
        if depth == 0:
            continue
        first = (newest - depth + 1) >> shift
        for block in range(first, (next_newest >> shift) + 1):
            slot = block & ring_mask
            slab = blocks.table[e, slot, SLAB]
            if slab < blocks.table.shape[0]:
                opened[b, block - first] = _block_address(blocks, e, slot)
                continue
            places[found, 0] = b
            places[found, 1] = block - first
            places[found, 2] = e
            places[found, 3] = slot
            found += 1
    return found
