"""Reading stacks of a frame pool: the kernels decode them, or the codec opens their frames in Python."""

from __future__ import annotations

import numpy as np

from rl_ext_core.frames import _pool_frames, _pool_out
from rl_ext_core.frames._parallel import run_parts
from rl_ext_core.frames._pool_seal import stored
from rl_ext_core.frames._pool_state import Pool
from rl_ext_core.frames._sealing import open_block
from rl_ext_core.frames._state import (
    ENTRY_HEADER,
    GROUP,
    SLACK,
    WORK_FRAMES,
    Addresses,
    Bytes,
    Counts,
    Geometry,
)
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.codecs import Codec

Wanted = list[tuple[Counts, int]]  # handles, and the address of the batch that they are decoded into: once or twice


def decode(pool: Pool, geometry: Geometry, decompressor: int, wanted: Wanted, *, num_threads: int) -> int:
    """Has the kernels write stacks, and together with them those that follow.

    :param decompressor: address of a C function that opens sealed blocks, or 0.
    :return: how many could not be read because a block is damaged.
    """
    handles, out = wanted[0]
    nexts, next_out = wanted[1] if len(wanted) > 1 else (np.zeros(0, dtype=np.int64), 0)
    block_bytes = (1 << geometry.block_shift) * (geometry.frame_bytes + ENTRY_HEADER) + 2 * SLACK
    work_frames = WORK_FRAMES if geometry.max_error else 1
    work_bytes = work_frames * (geometry.frame_bytes + GROUP) + 2 * block_bytes
    unreadable: list[int] = []

    def gather(start: int, stop: int) -> None:
        work = allocate(work_bytes, "buffers")
        chain = np.zeros(_pool_out.MOST_BLOCKS, dtype=np.int64)
        count = _pool_out.gather(
            start, stop, pool, handles, nexts, geometry, out, next_out, decompressor, address_of(work), chain
        )
        unreadable.append(count)

    run_parts(gather, len(handles), num_threads=num_threads)
    return sum(unreadable)


def open_frames(pool: Pool, geometry: Geometry, codec: Codec, wanted: Wanted, *, num_threads: int) -> int:
    """Writes stacks whose frames are sealed one by one. Each frame is opened once, however many stacks contain it.

    :return: how many frames could not be read because their block is damaged.
    """
    blocks = [np.zeros((len(handles), geometry.n_stack), dtype=np.int64) for handles, _ in wanted]
    for found, (handles, _) in zip(blocks, wanted, strict=True):
        _pool_frames.list_frames(pool, handles, found)
    needed = np.unique(np.concatenate(blocks))
    needed = needed[needed > 0]
    frames, damaged = _opened(codec, stored(pool, needed), geometry.frame_bytes, num_threads)
    for found, (_, out) in zip(blocks, wanted, strict=True):
        addresses: Addresses = np.searchsorted(needed, found).astype(np.uint64) * np.uint64(geometry.frame_bytes)
        addresses += np.uint64(address_of(frames))
        addresses[found == 0] = 0
        _pool_frames.place_frames(addresses, geometry, out)
    return damaged


def _opened(codec: Codec, blocks: list[Bytes], frame_bytes: int, num_threads: int) -> tuple[Bytes, int]:
    """Frames one after the other, and how many could not be opened."""
    frames = allocate(len(blocks) * frame_bytes + SLACK, "buffers")
    damaged: list[int] = []

    def unseal(start: int, stop: int) -> None:
        for i in range(start, stop):
            try:
                frame = np.frombuffer(open_block(codec, blocks[i].data), dtype=np.uint8)
            except ValueError:  # of the decoder, or because there is no header
                frame = blocks[i][:0]
            if len(frame) == frame_bytes:
                frames[i * frame_bytes :][:frame_bytes] = frame
            else:
                damaged.append(i)

    run_parts(unseal, len(blocks), num_threads=num_threads)
    return frames, len(damaged)
