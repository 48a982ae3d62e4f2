"""The loops of ``_kernels`` without numba, for frames that are stored as they are. Same names, same arguments.

Slower by the Python around each frame, and only for codecs that do not patch.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames._state import (
    ALL_STORED,
    BOUNDARY,
    DEPTH_SHIFT,
    FRAME_NUMBERS,
    NEXT_DEPTH_SHIFT,
    OFFSET,
    PLANAR,
    PUSHED,
    SAME,
    SLAB,
    STEP_SHIFT,
    STUCK_AT_NEXT,
    STUCK_AT_OBSERVATION,
    UNSHARED,
    Addresses,
    Blocks,
    Bytes,
    Counts,
    Geometry,
    Streams,
)

CALLS_C = False


def _bytes_at(address: int, n_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(int(address)))


def copy(target: int, source: int, n_bytes: int) -> None:
    """``memcpy``."""
    ctypes.memmove(int(target), int(source), n_bytes)


def _frames(stack: Bytes, memory: int, geometry: Geometry) -> Bytes:
    """The frames of a stack as a view (or a copy) of shape (n_stack, frame bytes), in the order of storage."""
    n_stack, pixels, channels, itemsize = (
        geometry.n_stack,
        geometry.pixels,
        geometry.frame_channels,
        geometry.itemsize,
    )
    if memory == PLANAR:
        return stack.reshape(n_stack, geometry.frame_bytes)
    by_frame = stack.reshape(pixels, n_stack, channels, itemsize).transpose(1, 0, 2, 3)
    if geometry.stored == PLANAR:
        by_frame = by_frame.transpose(0, 2, 1, 3)
    return by_frame.reshape(n_stack, geometry.frame_bytes)


def take_frames(stack: int, memory: int, geometry: Geometry, out: int) -> None:
    """Copies all frames of a stack to ``out``, oldest first."""
    n_bytes = geometry.n_stack * geometry.frame_bytes
    _bytes_at(out, n_bytes)[:] = _frames(_bytes_at(stack, n_bytes), memory, geometry).reshape(-1)


def take_newest(e: int, geometry: Geometry, streams: Streams) -> None:
    """Copies the newest frame of an environment's newest stack to ``fresh``."""
    last = streams.last[e, : geometry.n_stack * geometry.frame_bytes]
    streams.fresh[0, : geometry.frame_bytes] = _frames(last, int(streams.last_memory[e]), geometry)[-1]


def leading_padding(stack: int, geometry: Geometry) -> int:
    """How many of the oldest frames of a planar stack are all zero; never all of them."""
    frames = _bytes_at(stack, geometry.n_stack * geometry.frame_bytes).reshape(geometry.n_stack, -1)
    filled = np.flatnonzero(frames[:-1].any(axis=1))
    return int(filled[0]) if len(filled) else geometry.n_stack - 1


def append_frame(e: int, frame: int, geometry: Geometry, streams: Streams) -> None:
    """Appends a frame to the open block of a stream, which has room for it."""
    used, n_bytes = int(streams.open_bytes[e]), geometry.frame_bytes
    streams.open[e, used : used + n_bytes] = _bytes_at(frame, n_bytes)
    streams.open_bytes[e] += n_bytes
    streams.open_frames[e] += 1
    streams.total[e] += 1


def push(stacks: int, memory: int, geometry: Geometry, streams: Streams, status: Counts) -> int:
    """Stores what is new in one stack an environment; says in ``status`` what became of each. Returns the worst."""
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    for e in range(len(status)):
        stack = _bytes_at(stacks + e * stack_bytes, stack_bytes)
        last = streams.last[e, :stack_bytes]
        status[e] = UNSHARED
        if streams.last_memory[e] != memory:
            continue
        if np.array_equal(stack, last):
            status[e] = SAME
            continue
        frames = _frames(stack, memory, geometry)
        if not np.array_equal(_frames(last, memory, geometry)[1:], frames[:-1]):
            continue
        streams.fresh[0, : geometry.frame_bytes] = frames[-1]
        last[:] = stack
        if streams.open_frames[e] % (1 << geometry.block_shift) == 0:
            status[e] = BOUNDARY
            continue
        append_frame(e, streams.fresh[0].ctypes.data, geometry, streams)
        streams.depth[e] = min(int(streams.depth[e]) + 1, geometry.n_stack)
        status[e] = PUSHED
    return int(status.max())


def begin_entries(streams: Streams, entries: Addresses) -> None:
    """Notes the newest stacks as the observations of transitions; ``entries`` is (E,), as in the index."""
    entries[:] = ((streams.total - 1) % FRAME_NUMBERS) | (streams.depth.astype(np.int64) << DEPTH_SHIFT)


def complete_entries(streams: Streams, entries: Addresses) -> None:
    """Notes the newest stacks as the next observations of these transitions."""
    steps = (streams.total - 1 - entries.astype(np.int64)) & 0xFF
    entries |= ((steps << STEP_SHIFT) | (streams.depth.astype(np.int64) << NEXT_DEPTH_SHIFT)).astype(np.uint64)


def push_pair(
    stacks: int,
    memory: int,
    next_stacks: int,
    next_memory: int,
    geometry: Geometry,
    streams: Streams,
    status: Counts,
    entries: Addresses,
) -> int:
    """Stores one transition an environment, as far as no new block is needed; says how far that was."""
    if push(stacks, memory, geometry, streams, status) > PUSHED:
        return STUCK_AT_OBSERVATION
    begin_entries(streams, entries)
    if push(next_stacks, next_memory, geometry, streams, status) > PUSHED:
        return STUCK_AT_NEXT
    complete_entries(streams, entries)
    return ALL_STORED


def _unpack(transition: int) -> tuple[int, int, int, int]:
    newest = transition % FRAME_NUMBERS
    depth, step, next_depth = ((transition >> at) & 0xFF for at in (DEPTH_SHIFT, STEP_SHIFT, NEXT_DEPTH_SHIFT))
    return newest, depth, newest + step, next_depth


def _stack(frames: list[Bytes], geometry: Geometry, out: Bytes) -> None:
    """Writes the newest frames of a stack to ``out``, padded with zeros."""
    by_frame: npt.NDArray[np.uint8] = np.zeros((geometry.n_stack, geometry.frame_bytes), dtype=np.uint8)
    if frames:
        by_frame[-len(frames) :] = frames
    if geometry.stored != PLANAR:
        by_frame = by_frame.reshape(geometry.n_stack, geometry.pixels, -1).transpose(1, 0, 2)
    out[:] = by_frame.reshape(-1)


def all_exist(rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], index: npt.NDArray[np.uint64]) -> bool:
    """Whether all of the places are in the index."""
    return bool(((rows >= 0) & (rows < index.shape[0])).all() and ((envs >= 0) & (envs < index.shape[1])).all())


def next_entries(
    rows: npt.NDArray[np.int64], envs: npt.NDArray[np.int64], index: npt.NDArray[np.uint64], entries: Addresses
) -> None:
    """Makes observations of the next observations of a batch: an index of them, with one row a place."""
    for b, (row, e) in enumerate(zip(rows.tolist(), envs.tolist(), strict=True)):
        _, _, newest, depth = _unpack(int(index[row, e]))
        entries[b, e] = newest % FRAME_NUMBERS | depth << DEPTH_SHIFT


def gather(
    start: int,
    stop: int,
    rows: npt.NDArray[np.int64],
    envs: npt.NDArray[np.int64],
    index: npt.NDArray[np.uint64],
    geometry: Geometry,
    blocks: Blocks,
    opened: Addresses,
    observations: int,
    nexts: int,
    decompressor: int,
    work: int,
) -> int:
    """Writes the stacks of transitions ``start`` to ``stop`` of a batch; see ``_kernels.gather``."""
    n_bytes, shift, mask = geometry.frame_bytes, geometry.block_shift, blocks.table.shape[1] - 1
    stack_bytes = geometry.n_stack * n_bytes
    for b in range(start, stop):
        e = int(envs[b])
        newest, depth, next_newest, next_depth = _unpack(int(index[rows[b], e]))
        oldest = newest - depth + 1
        frames = []
        for frame in range(oldest, (next_newest if nexts else newest) + 1) if depth else ():
            block = frame >> shift
            slab, offset = blocks.table[e, block & mask, SLAB], blocks.table[e, block & mask, OFFSET]
            if len(opened):
                address = int(opened[b, block - (oldest >> shift)])
            else:
                address = int(blocks.slab_address[slab]) + int(offset)
            frames.append(_bytes_at(address + (frame - (block << shift)) * n_bytes, n_bytes))
        _stack(frames[:depth], geometry, _bytes_at(observations + b * stack_bytes, stack_bytes))
        if nexts:
            last = frames[len(frames) - next_depth :]
            _stack(last, geometry, _bytes_at(nexts + b * stack_bytes, stack_bytes))
    return 0


def read_regions(pread: int, descriptor: int, places: Counts, sizes: Counts, target: int) -> int:
    """Reads regions of a file, one behind the other into memory; returns how many could not be read in one go."""
    failed = 0
    for place, size in zip(places.tolist(), sizes.tolist(), strict=True):
        try:
            failed += os.preadv(descriptor, [_bytes_at(target, size).data], place) != size
        except OSError:
            failed += 1
        target += size
    return failed


def list_sealed(
    rows: npt.NDArray[np.int64],
    envs: npt.NDArray[np.int64],
    index: npt.NDArray[np.uint64],
    geometry: Geometry,
    blocks: Blocks,
    opened: Addresses,
    places: Counts,
) -> int:
    """Fills ``opened`` with the addresses of blocks that are still open, and lists the sealed ones."""
    shift, mask, found = geometry.block_shift, blocks.table.shape[1] - 1, 0
    for b, (row, e) in enumerate(zip(rows.tolist(), envs.tolist(), strict=True)):
        newest, depth, next_newest, _ = _unpack(int(index[row, e]))
        if depth == 0:
            continue
        first = (newest - depth + 1) >> shift
        for block in range(first, (next_newest >> shift) + 1):
            slab, offset = (int(part) for part in blocks.table[e, block & mask, :2])
            if slab < len(blocks.table):
                opened[b, block - first] = blocks.slab_address[slab] + np.uint64(offset)
                continue
            places[found] = b, block - first, e, block & mask
            found += 1
    return found
