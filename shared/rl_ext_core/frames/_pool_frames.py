"""The loops around a codec that works in Python: blocks for it to seal or open, and frames that it has opened."""

from __future__ import annotations

from numba import int64, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._kernels_out import _put_frame, _put_padding
from rl_ext_core.frames._memory import copy_bytes
from rl_ext_core.frames._pool_memory import newest_block, page_after, place_of
from rl_ext_core.frames._pool_state import KIND, PAGE, PAGED, PREVIOUS


@kernel
def list_stored(p, blocks, ends):  # type: ignore[no-untyped-def]
    """Where blocks would end if they lay one after the other.

    :param blocks: (n,) none of them open.
    :param ends: (n,) written.
    """
    end = 0
    for i in range(blocks.shape[0]):
        end += place_of(p, blocks[i])[1]
        ends[i] = end


@kernel
def copy_stored(p, blocks, target):  # type: ignore[no-untyped-def]
    """Copies blocks from their pages, one after the other.

    :param blocks: (n,) none of them open.
    :param target: address.
    """
    out = uint64(target)
    for i in range(blocks.shape[0]):
        page, left = place_of(p, blocks[i])
        paged = p.blocks[blocks[i], KIND] & PAGED == PAGED
        while left > 0:
            n_bytes = min(left, PAGE)
            copy_bytes(out, p.starts[0] + uint64(int64(page) * PAGE), n_bytes)
            out += uint64(n_bytes)
            left -= n_bytes
            if left > 0:
                page = page_after(p, page, paged)


@kernel
def list_frames(p, handles, blocks):  # type: ignore[no-untyped-def]
    """The block of each frame of stacks, where blocks are of one frame.

    :param blocks: (n, n_stack) written, the newest frame last; 0 where a stack has none.
    """
    newest = blocks.shape[1] - 1
    for i in range(handles.shape[0]):
        block, _, depth = newest_block(handles[i])
        for age in range(depth):
            blocks[i, newest - age] = block
            block = int64(p.blocks[block, PREVIOUS])


@kernel
def place_frames(frames, geometry, outs):  # type: ignore[no-untyped-def]
    """Writes stacks.

    :param frames: (n, n_stack) addresses of the frames; 0 where there is none.
    :param outs: address of the batch.
    """
    stack_bytes = geometry.n_stack * geometry.frame_bytes
    for i in range(frames.shape[0]):
        out = uint64(outs) + uint64(i * stack_bytes)
        padding = 0
        while padding < geometry.n_stack and frames[i, padding] == 0:
            padding += 1
        _put_padding(out, padding, geometry)
        for position in range(padding, geometry.n_stack):
            _put_frame(frames[i, position], out, position, geometry)
