"""The part of a frame pool that its codec does in Python: sealing blocks, and opening those of single frames.

A lossy codec's blocks are of one frame each, which is sealed before anybody can read it: what is read never changes.
"""

from __future__ import annotations

import numpy as np

from rl_ext_core.frames import _pool_frames, _pool_memory
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._parallel import run_parts
from rl_ext_core.frames._pool_state import Pool
from rl_ext_core.frames._sealing import open_block, seal_block
from rl_ext_core.frames._state import SLACK, Addresses, Bytes, Counts, Geometry
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.codecs import Codec


def seal_full(pool: Pool, codec: Codec) -> None:
    """Seals the blocks that have become full, unless nothing needs them any more.

    Those that could not be sealed, for lack of memory, still are on the list then.
    """
    blocks = np.unique(pool.unsealed[: pool.head[state.UNSEALED]]).astype(np.int64)
    kinds = pool.blocks[blocks, state.KIND]
    blocks = blocks[(kinds == state.WHOLE) | (kinds == state.PAGED)]
    for block, contents in zip(blocks.tolist(), _stored(pool, blocks), strict=True):
        stored = seal_block(codec, contents)
        _pool_memory.replace_bytes(pool, block, address_of(stored), len(stored))
    pool.head[state.UNSEALED] = 0


def _stored(pool: Pool, blocks: Counts) -> list[Bytes]:
    """What blocks hold."""
    ends = np.zeros(len(blocks), dtype=np.int64)
    _pool_frames.list_stored(pool, blocks, ends)
    contents = allocate(int(ends[-1]) + SLACK if len(ends) else 0, "buffers")
    _pool_frames.copy_stored(pool, blocks, address_of(contents))
    return [contents[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


def read_frames(
    pool: Pool, codec: Codec, geometry: Geometry, stacks: list[tuple[Counts, int]], *, num_threads: int
) -> int:
    """Writes stacks whose frames are sealed one by one. Each frame is opened once, however many stacks contain it.

    :param stacks: handles, and the address of a batch that is written.
    :return: how many frames could not be read because their block is damaged.
    """
    wanted = [np.zeros((len(handles), geometry.n_stack), dtype=np.int64) for handles, _ in stacks]
    for blocks, (handles, _) in zip(wanted, stacks, strict=True):
        _pool_frames.list_frames(pool, handles, blocks)
    needed = np.unique(np.concatenate(wanted))
    needed = needed[needed > 0]
    frames, damaged = _opened(codec, _stored(pool, needed), geometry.frame_bytes, num_threads)
    for blocks, (_, out) in zip(wanted, stacks, strict=True):
        addresses: Addresses = np.searchsorted(needed, blocks).astype(np.uint64) * np.uint64(geometry.frame_bytes)
        addresses += np.uint64(address_of(frames))
        addresses[blocks == 0] = 0
        _pool_frames.place_frames(0, len(blocks), addresses, geometry, out)
    return damaged


def _opened(codec: Codec, stored: list[Bytes], frame_bytes: int, num_threads: int) -> tuple[Bytes, int]:
    """Frames one after the other, and how many could not be opened."""
    frames = allocate(len(stored) * frame_bytes + SLACK, "buffers")
    damaged: list[int] = []

    def unseal(start: int, stop: int) -> None:
        for i in range(start, stop):
            try:
                frame = np.frombuffer(open_block(codec, stored[i].data), dtype=np.uint8)
            except ValueError:  # of the decoder, or because there is no header
                frame = stored[i][:0]
            if len(frame) == frame_bytes:
                frames[i * frame_bytes :][:frame_bytes] = frame
            else:
                damaged.append(i)

    run_parts(unseal, len(stored), num_threads=num_threads)
    return frames, len(damaged)
