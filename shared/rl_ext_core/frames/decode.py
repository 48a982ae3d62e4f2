"""Kernels that decode stacks into a batch, and threads for large batches. ``pool`` explains the terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import int64, njit, uint64
from numba.extending import register_jitable

from rl_ext_core.frames.allocator import address_of_grain, grains_of
from rl_ext_core.frames.arrays import (
    BLOCKS,
    DEPTH_SHIFT,
    FREE,
    GRAINS,
    KIND,
    OPEN,
    PLACE_SHIFT,
    PREVIOUS,
    REFERENCE,
    SEALED,
    SEALED_SUM,
    STORED_SUM,
    STREAM,
)
from rl_ext_core.frames.blocks import block_location, read_blocks, unpack_handle, unpack_pair
from rl_ext_core.frames.bounded import is_packed, packed_size, unpack_frame
from rl_ext_core.frames.geometry import (
    ENTRY_HEADER,
    GROUP,
    PATCH,
    RAW,
    SLACK,
    WORK_FRAMES,
    Addresses,
    Bytes,
    Counts,
    Geometry,
)
from rl_ext_core.frames.interleave import clear_latest_frames, interleave_latest, latest_bytes, set_latest_frame
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.kernel_primitives import (
    SUM_START,
    add_bytes,
    copy_bytes,
    fold_sum,
    kernel,
    prefetch,
    zero_bytes,
)
from rl_ext_core.frames.patch import apply_entry, entry_size
from rl_ext_core.frames.region import address_of, allocate
from rl_ext_core.frames.threads import run_in_threads
from rl_ext_core.frames.views import address_in, geometry_in, pool_in

_PREFETCH_GROUP = 16
_PREFETCH_LINES = 32
MAX_CHAIN = 512  # maximum number of blocks that an observation and its next one span
_NO_HANDLES = np.zeros(0, dtype=np.int64)
_NO_BLOCKS = np.zeros((2, 0), dtype=np.uint64)


@njit(nogil=True)
def entry_size_of(entry, geometry, bound):  # type: ignore[no-untyped-def]
    """Return the size of an entry's contents, and whether it can be decoded without the previous frame."""
    if bound is not None and is_packed(entry):
        return packed_size(entry)
    return entry_size(entry, geometry.frame_bytes)


@register_jitable  # type: ignore[untyped-decorator]
def work_bytes(geometry: Geometry) -> int:
    """Return how many bytes of scratch memory frames take."""
    frames = (WORK_FRAMES if geometry.max_error > 0 else 1) * (geometry.frame_bytes + GROUP)
    size: int = latest_bytes(geometry) + frames
    return size


@njit(nogil=True)
def next_frame(frame, entry, geometry, bound, work):  # type: ignore[no-untyped-def]
    """Decode an entry; return the addresses of the frame and of the next entry.

    :param frame: Address of the previous frame.
    :param entry: Address of the entry.
    :param geometry: Sizes of the layout.
    :param bound: Maximum error per byte, or None for exact frames, which use other machine code.
    :param work: Address of scratch memory, :func:`work_bytes` long.
    :return: Address of the frame, and address of the next entry.
    """
    n_bytes = geometry.frame_bytes
    if bound is not None:
        other, above = work + uint64(n_bytes + GROUP), work + uint64(2 * (n_bytes + GROUP))
        if is_packed(entry):
            contents = entry + uint64(ENTRY_HEADER)
            size, independent = packed_size(entry)
            if not independent and frame != work and frame != other:
                copy_bytes(work, frame, n_bytes)
                frame = work
            after = other if frame == work else work
            unpack_frame(frame, contents, after, above, geometry)
            return after, contents + uint64(size)
        if frame == other:
            return apply_entry(frame, entry, n_bytes, other)
    return apply_entry(frame, entry, n_bytes, work)


@njit(nogil=True)
def seek_frame(address, frames, reference, geometry, bound, work):  # type: ignore[no-untyped-def]
    """Skip the first ``frames`` frames of a block.

    :param address: Address of the block's contents.
    :param reference: Address of the reference.
    :return: Address of the last skipped frame, and address of the next entry.
    """
    if geometry.coder == RAW:
        return address, address + uint64(frames * geometry.frame_bytes)
    frame = reference
    # Start at the last frame that is stored whole, because earlier patches do not matter to it.
    first, entry = 0, address
    for i in range(frames + 1):
        size, whole = entry_size_of(entry, geometry, bound)
        if whole:
            first, address = i, entry
        entry += uint64(size + ENTRY_HEADER)
    for _ in range(first, frames):
        frame, address = next_frame(frame, address, geometry, bound, work)
    return frame, address


@njit(nogil=True)
def _block_address(p, block):  # type: ignore[no-untyped-def]
    """Return the address of a block's contents."""
    if p.blocks[block, KIND] == OPEN:
        return address_in(p.open, int64(p.blocks[block, STREAM]))
    return address_of_grain(p, block_location(p, block)[0])


@njit(nogil=True)
def _frames_between(p, handle, following, geometry):  # type: ignore[no-untyped-def]
    """Count the frames between the newest ones of two stacks.

    The links to previous blocks are followed only within ``following``, because older blocks may have been freed.

    :return: The number, or -1 if ``following`` does not start in the first stack or right after it.
    """
    block, place, _ = unpack_handle(handle)
    at, at_place, depth = unpack_handle(following)
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
def _opened_address(opened, block):  # type: ignore[no-untyped-def]
    """Return the address of a block's decompressed contents, by a binary search."""
    low, high = 0, opened.shape[1] - 1
    while low < high:
        middle = (low + high) // 2
        if opened[0, middle] < block:
            low = middle + 1
        else:
            high = middle
    return uint64(opened[1, low])


@njit(nogil=True, inline="always")
def _copy_to_stacks(source, number, first, n_stacks, run, geometry):  # type: ignore[no-untyped-def]
    """Copy a frame into the planar stacks of a run that contain it.

    :param source: Address of the frame.
    :param number: Number of the frame.
    :param first: First stack that may contain it.
    """
    n_stack, n_bytes = geometry.n_stack, geometry.frame_bytes
    for k in range(first, n_stacks):
        age = run[k, 0] - number
        if age >= n_stack:
            return
        if number > run[k, 1]:
            copy_bytes(uint64(run[k, 2]) + uint64((n_stack - 1 - age) * n_bytes), source, n_bytes)


@njit(nogil=True)
def _decode_run(  # type: ignore[no-untyped-def]
    p, newest, n_frames, n_stacks, geometry, bound, opened, work, chain, run
):
    """Decode the frames of a run of stacks once each, and copy each frame into all stacks that contain it.

    :param newest: Handle of the last stack of the run.
    :param n_frames: Number of frames, up to the newest one of the run.
    :param n_stacks: Number of stacks.
    :param run: Stacks of the run: number of the newest frame, number of the frame before the oldest one, and address.
        Frames are numbered so that the newest frame of the first stack has number 0.
    :return: 1 if a block is damaged, else 0.
    """
    latest = work
    work += uint64(latest_bytes(geometry))
    in_block = 1 << geometry.block_shift
    block, place, _ = unpack_handle(newest)
    n_blocks, missing = 0, n_frames - place - 1
    chain[0] = block
    while missing > 0:
        n_blocks += 1
        chain[n_blocks] = int64(p.blocks[chain[n_blocks - 1], PREVIOUS])
        missing -= in_block
    start = -missing  # place of the first frame in the oldest block
    number = run[n_stacks - 1, 0] - n_frames
    first = 0  # first stack that may contain the frame
    for i in range(n_blocks, -1, -1):
        block = chain[i]
        address = _block_address(p, block)
        if p.blocks[block, KIND] == SEALED:
            address = _opened_address(opened, block)
            if address == uint64(0):
                return 1
        reference = p.references
        if geometry.coder == PATCH:
            reference += uint64(p.blocks[block, REFERENCE] * p.reference_bytes)
        source, address = seek_frame(address, start, reference, geometry, bound, work)
        stop = place + 1 if i == 0 else in_block
        for _ in range(start, stop):
            if geometry.coder == RAW:
                source = address
                address += uint64(geometry.frame_bytes)
            else:
                source, address = next_frame(source, address, geometry, bound, work)
            number += 1
            while run[first, 0] < number:
                first += 1
            if latest == work:
                _copy_to_stacks(source, number, first, n_stacks, run, geometry)
                continue
            set_latest_frame(latest, number, source, geometry)
            k = first
            while k < n_stacks and run[k, 0] == number:
                interleave_latest(latest, number, number - run[k, 1], chain[MAX_CHAIN:], geometry, uint64(run[k, 2]))
                k += 1
        start = 0
    return 0


@njit(nogil=True)
def prefetch_stack(p, handle, geometry):  # type: ignore[no-untyped-def]
    """Prefetch the first cache lines that decoding a stack will read."""
    block, place, depth = unpack_handle(handle)
    if depth > place + 1:
        block = int64(p.blocks[block, PREVIOUS])
        place += 1 << geometry.block_shift
    address = _block_address(p, block)
    if geometry.coder == RAW:
        address += uint64((place + 1 - depth) * geometry.frame_bytes)
    for line in range(_PREFETCH_LINES):
        prefetch(address + uint64(line * 64))


@kernel
def are_valid_handles(state, handles):  # type: ignore[no-untyped-def]
    """Return whether all handles are 0, or refer to blocks that are in use."""
    p = pool_in(state)
    for handle in handles:
        block = unpack_handle(handle)[0]
        if handle < 0 or block >= p.head[BLOCKS] or (handle != 0 and p.blocks[block, KIND] == FREE):
            return False
    return True


@kernel
def handles_of_pairs(state, index, rows, envs, handles, next_handles):  # type: ignore[no-untyped-def]
    """Get the handles of observations and next observations from rows of the index.

    :param index: Pairs, shape ``(rows, environments)``.
    :param rows: Rows of the index, shape ``(n,)``.
    :param envs: Columns of the index, shape ``(n,)``.
    :param handles: Output, handles of the observations, shape ``(n,)``.
    :param next_handles: Output, handles of the next observations, shape ``(n,)``.
    :return: Whether all rows and columns are in the index.
    """
    p, geometry = pool_in(state), geometry_in(state)
    for b in range(rows.shape[0]):
        if not (0 <= rows[b] < index.shape[0] and 0 <= envs[b] < index.shape[1]):
            return False
        block, place, depth, step, next_depth = unpack_pair(index[rows[b], envs[b]])
        next_handles[b] = block | (place << PLACE_SHIFT) | (next_depth << DEPTH_SHIFT)
        while step > place:
            step -= place + 1
            block = int64(p.blocks[block, PREVIOUS])
            place = (1 << geometry.block_shift) - 1
        handles[b] = block | ((place - step) << PLACE_SHIFT) | (depth << DEPTH_SHIFT)
    return True


@kernel
def decode_batch(  # type: ignore[no-untyped-def]
    start, stop, state, bound, handles, next_handles, outs, next_outs, opened, work, chain, run
):
    """Decode the stacks ``start`` to ``stop`` of a batch.

    :param bound: Maximum error per byte, or None.
    :param handles: Handles of the stacks, shape ``(n,)``.
    :param next_handles: Handles of the next stacks, shape ``(n,)``; or shape ``(0,)`` if they are not wanted.
    :param outs: Address of the batch.
    :param next_outs: Address of the batch of next stacks.
    :param opened: Sorted numbers of sealed blocks and addresses of their contents, shape ``(2, blocks)``. The address
        of a damaged block is 0.
    :param work: Address of scratch memory for frames, ``work_bytes()`` long.
    :param chain: Scratch array, shape ``(MAX_CHAIN + n_stack,)``.
    :param run: Scratch array, shape ``(2 * GROUP, 3)``, see :func:`_decode_run`.
    :return: Number of runs of stacks that cannot be read because a sealed block is damaged.
    """
    p, geometry = pool_in(state), geometry_in(state)
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    work, both = uint64(work), min(next_handles.shape[0], 1)
    interleaves = latest_bytes(geometry) > 0
    if interleaves:
        clear_latest_frames(work, geometry)
    failed = 0
    for group in range(start, stop, _PREFETCH_GROUP):
        group_stop = min(group + _PREFETCH_GROUP, stop)
        for b in range(group, group_stop):
            prefetch_stack(p, handles[b], geometry)
        k, end = group << both, group_stop << both
        while k < end:
            # A run is a sequence of stacks in which each one continues the one before.
            newest = n_stacks = n_frames = number = int64(0)
            while k < end:
                handle = next_handles[k >> 1] if k & both else handles[k >> both]
                depth = handle >> DEPTH_SHIFT
                if n_stacks > 0:
                    steps = _frames_between(p, newest, handle, geometry) if depth > 0 else -1
                    if steps < 0 or n_frames + steps > MAX_CHAIN:
                        break
                    number += steps
                    n_frames += steps
                out = (uint64(next_outs) if k & both else uint64(outs)) + uint64((k >> both) * stack_bytes)
                if depth == 0 or (depth < geometry.n_stack and not interleaves):
                    zero_bytes(out, (geometry.n_stack - depth) * geometry.frame_bytes)
                k += 1
                if depth == 0:
                    break
                run[n_stacks, 0], run[n_stacks, 1], run[n_stacks, 2] = number, number - depth, int64(out)
                newest, n_stacks, n_frames = handle, n_stacks + 1, max(n_frames, depth)
            if n_stacks > 0:
                failed += _decode_run(p, newest, n_frames, n_stacks, geometry, bound, opened, work, chain, run)
    return failed


@kernel
def list_sealed_blocks(state, handles, blocks):  # type: ignore[no-untyped-def]
    """List the sealed blocks of stacks. Some are listed more than once.

    :param blocks: Output, numbers of the blocks.
    :return: Number of listed blocks.
    """
    p, geometry = pool_in(state), geometry_in(state)
    found = 0
    for handle in handles:
        block, place, missing = unpack_handle(handle)
        while missing > 0:
            if p.blocks[block, KIND] == SEALED:
                blocks[found] = block
                found += 1
            missing -= place + 1
            place = (1 << geometry.block_shift) - 1
            block = int64(p.blocks[block, PREVIOUS])
    return found


@njit(nogil=True)
def _has_right_contents(p, block):  # type: ignore[no-untyped-def]
    """Return whether a block's contents match their checksum."""
    column = SEALED_SUM if p.blocks[block, KIND] == SEALED else STORED_SUM
    first, n_bytes = block_location(p, block)
    if first + grains_of(p, n_bytes) > p.head[GRAINS]:
        return False
    return p.sums[block, column] == fold_sum(add_bytes(SUM_START, address_of_grain(p, first), n_bytes))


@njit(nogil=True)
def _has_right_reference(p, number, geometry):  # type: ignore[no-untyped-def]
    """Return whether a reference's contents match their checksum."""
    start = p.references + uint64(number * p.reference_bytes)
    return p.reference_sums[number] == fold_sum(add_bytes(SUM_START, start, geometry.frame_bytes))


@kernel
def verify_contents(state, handles, unchecked, unchecked_references, right):  # type: ignore[no-untyped-def]
    """Verify the checksums of the blocks and references of stacks that were not verified before.

    :param unchecked: Shape ``(blocks,)``, True for blocks that were not verified; updated.
    :param unchecked_references: Shape ``(references,)``, True for references that were not verified; updated.
    :param right: Output, shape ``(n,)``, True for intact stacks.
    """
    p, geometry = pool_in(state), geometry_in(state)
    for i in range(handles.shape[0]):
        block, place, depth = unpack_handle(handles[i])
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


def decode(
    state: Counts,
    geometry: Geometry,
    jpeg: JpegCodec | None,
    wanted: Sequence[tuple[Counts, int]],
    *,
    num_threads: int,
) -> bool:
    """Decode a batch of stacks, and optionally their next ones; return whether all blocks are intact.

    :param state: Kernel state of the pool.
    :param geometry: Sizes of the layout.
    :param jpeg: Decoder of sealed blocks, or None if there are none.
    :param wanted: Handles and address of a batch; once, or twice for the next stacks.
    :param num_threads: Threads to decode in.
    :return: Whether all stacks could be read. If not, a block is damaged.
    """
    handles, out = wanted[0]
    nexts, next_out = wanted[1] if len(wanted) > 1 else (_NO_HANDLES, 0)
    opened, contents = _NO_BLOCKS, np.zeros(0, dtype=np.uint8)
    if jpeg is not None:
        most = geometry.n_stack // (1 << geometry.block_shift) + 2
        blocks = np.empty((len(handles) + len(nexts)) * most, dtype=np.int64)
        found = np.unique(blocks[: list_sealed_blocks(state, np.concatenate([handles, nexts]), blocks)])
        opened, contents = _open_blocks(jpeg, read_blocks(state, found), found, geometry.frame_bytes, num_threads)
    bound = geometry.max_error or None
    unreadable: list[int] = []  # a list, because threads that add to the same number would lose counts

    def decode_part(start: int, stop: int) -> None:
        """Decode the stacks ``start`` to ``stop`` of the batch."""
        work = allocate(work_bytes(geometry))
        chain = np.empty(MAX_CHAIN + geometry.n_stack, dtype=np.int64)
        places = address_of(work), chain, np.empty((2 * _PREFETCH_GROUP, 3), dtype=np.int64)
        unreadable.append(decode_batch(start, stop, state, bound, handles, nexts, out, next_out, opened, *places))

    run_in_threads(decode_part, len(handles), num_threads=num_threads)
    del contents  # must live until here: the addresses in ``opened`` point into it
    return sum(unreadable) == 0


def _open_blocks(
    jpeg: JpegCodec, sealed: list[Bytes], blocks: Counts, frame_bytes: int, num_threads: int
) -> tuple[Addresses, Bytes]:
    """Decompress sealed blocks, in several threads.

    :param sealed: Contents of the blocks.
    :param blocks: Numbers of the blocks.
    :param frame_bytes: Size of a frame.
    :return: Argument ``opened`` of :func:`decode_batch`, and the buffer of the contents.
    """
    contents = allocate(len(sealed) * (frame_bytes + SLACK) + SLACK)
    starts = np.arange(len(sealed), dtype=np.int64) * (frame_bytes + SLACK)
    opened = np.stack([blocks, starts + address_of(contents)]).astype(np.uint64)

    def open_part(start: int, stop: int) -> None:
        """Decompress the blocks ``start`` to ``stop``; give damaged ones the address 0."""
        for i in range(start, stop):
            try:
                frame = sealed[i]
                if len(frame) != frame_bytes:  # otherwise it is uncompressed
                    frame = np.frombuffer(jpeg.decode(frame.data), dtype=np.uint8)
                contents[starts[i] : starts[i] + frame_bytes] = frame
            except ValueError:  # raised by the decoder, or for another size
                opened[1, i] = 0

    run_in_threads(open_part, len(sealed), num_threads=num_threads)
    return opened, contents
