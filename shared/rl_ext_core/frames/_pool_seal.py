"""Sealing the blocks of a frame pool, which its codec does in Python."""

from __future__ import annotations

import numpy as np

from rl_ext_core.frames import _pool_frames, _pool_memory
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._pool_state import Pool
from rl_ext_core.frames._sealing import seal_block
from rl_ext_core.frames._state import SLACK, Bytes, Counts
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.codecs import Codec


def seal_full(pool: Pool, codec: Codec) -> None:
    """Seals the blocks that have become full, unless nothing needs them any more.

    Where memory is short, those that could not be sealed stay on the list.
    """
    blocks = np.unique(pool.unsealed[: pool.head[state.UNSEALED]]).astype(np.int64)
    kinds = pool.blocks[blocks, state.KIND]
    blocks = blocks[(kinds == state.WHOLE) | (kinds == state.PAGED)]
    for block, contents in zip(blocks.tolist(), stored(pool, blocks), strict=True):
        sealed = seal_block(codec, contents)
        _pool_memory.replace_bytes(pool, block, address_of(sealed), len(sealed))
    pool.head[state.UNSEALED] = 0


def stored(pool: Pool, blocks: Counts) -> list[Bytes]:
    """What blocks hold, in a copy.

    :param blocks: (n,) none of them open.
    """
    ends = np.zeros(len(blocks), dtype=np.int64)
    _pool_frames.list_stored(pool, blocks, ends)
    contents = allocate((int(ends[-1]) if len(ends) else 0) + SLACK, "buffers")
    _pool_frames.copy_stored(pool, blocks, address_of(contents))
    return [contents[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
