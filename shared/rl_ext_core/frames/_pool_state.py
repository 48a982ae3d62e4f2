"""The arrays of a frame pool, as its kernels see them. All lie in one region, so that processes can share them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames._state import ENTRY_HEADER, SLACK, Addresses, Bytes, Counts

Numbers = npt.NDArray[np.uint32]

PAGE = 256  # bytes: blocks of Atari frames take a dozen, and half of one is lost on average

# The fields of ``head``.
BLOCKS, FREE_BLOCKS = 0, 1  # block numbers ever used (0 is none), and how many of these are free
PAGES, FREE_PAGES = 2, 3
REFERENCES, FREE_REFERENCES = 4, 5
STREAMS = 6
CLOCK = 7
NEWEST_STREAM = 8
FRAMES, BLOCK_BYTES = 9, 10  # ever stored
UNSEALED = 11  # full blocks that a codec has to seal yet
RECENT = 12  # and the four fields behind: the latest reference frames, or -1
N_RECENT = 4
HELD = 16  # stacks that were put and not released
KIND_OF_POOL = 17  # counts the changes of the six fields behind
N_STACK, AXIS, BLOCK_LENGTH, CODEC, MAX_ERROR, QUALITY = 18, 19, 20, 21, 22, 23
SUM_OF_KIND = 30  # of the six fields
BECOMING = 31  # whether the fields and all that they are about are being changed
N_HEAD = 64
_MOST = 2**32 - 2

# How many rows of an array are in use.
COUNTS = {
    "blocks": BLOCKS,
    "sums": BLOCKS,
    "free_blocks": FREE_BLOCKS,
    "links": PAGES,
    "free_pages": FREE_PAGES,
    "users": REFERENCES,
    "reference_sums": REFERENCES,
    "free_references": FREE_REFERENCES,
    "streams": STREAMS,
}

# The columns of ``blocks``. Where a block lies is written before its kind says so: a process may be killed in between.
FIRST_PAGE = 0
N_BYTES = 1
USERS = 2  # stacks that need it, and the stream that fills it
PREVIOUS = 3  # block of the same stream before it
REFERENCE = 4
KIND = 5
STREAM = 6  # that fills it
SEALED_PAGE, SEALED_BYTES = 7, 8  # where it lies and how long it is once it is sealed
N_BLOCK = 9

# The columns of ``sums``, checksums: of a block's row while it is filled; of what it holds in pages, and of its row
# then; likewise of what that was sealed to. Each is written before the kind of the block changes.
OPEN_SUM = 0
STORED_SUM = 1
SEALED_SUM = 3
N_SUMS = 5

# Kinds of blocks.
FREE = 0
OPEN = 1  # being filled: in the buffer of a stream
WHOLE = 2  # in pages one after the other
PAGED = 3  # in pages that ``links`` lead through
SEALED = 4  # added to the former two: compressed

# When a full block is noted to be sealed: once the next one begins, or, where it holds one frame, at once.
NEVER, IN_TURN, AT_ONCE = 0, 1, 2

# The columns of ``streams``.
OPEN_BLOCK = 0
OPEN_FRAMES = 1
OPEN_BYTES = 2
NEWEST = 3  # handle of the newest stack
TOUCHED = 4
ENDED = 5
FOLLOWER = 6  # the stream that was pushed to after this one
N_STREAM = 8

# A handle names a stack: its newest frame's block, the frame's place in it, and how many frames are not padding. 0 is
# none. It is an ``int64``.
PLACE_SHIFT = 32
DEPTH_SHIFT = 48


class Pool(NamedTuple):
    """Views of one region. Rows of bytes are ``SLACK`` longer than what they hold."""

    head: Counts
    blocks: Numbers  # (n, 9)
    sums: Numbers  # (n, 5)
    free_blocks: Numbers  # a stack
    unsealed: Numbers  # numbers of full blocks
    turned: Numbers  # blocks that became full while a stack was pushed
    links: Numbers  # the page behind a page
    free_pages: Numbers  # a stack
    users: Numbers  # blocks a reference frame
    reference_sums: Numbers  # their checksums
    free_references: Numbers  # a stack
    streams: Counts  # (n, 8)
    last: Bytes  # (streams, stack bytes): the newest stack
    frame: Bytes  # (streams, frame bytes): the newest frame as it will be decoded
    open: Bytes  # (streams, block bytes)
    entry_sums: Numbers  # (streams, frames in a block): checksums of the frames in ``open``
    starts: Addresses  # addresses of the pages and of the reference frames, and the bytes from one of these to the next


class Sizes(NamedTuple):
    """How large the arrays may become."""

    blocks: int
    pages: int
    references: int  # the most frames, of the smallest size
    streams: int
    stack_bytes: int
    block_frames: int  # the most that a block may be asked to hold


def worst_case(
    n_handles: int, *, stack_bytes: int, n_stack: int, least_frames: int, block_frames: int, streams: int
) -> Sizes:
    """Sizes that suffice for so many stacks, however little they share.

    :param n_handles: stacks.
    :param n_stack: the most frames that a stack may turn out to have.
    :param least_frames: the fewest frames that a block may hold.
    :param block_frames: the most.
    """
    n_handles += 3 * streams  # each stream keeps its newest stack
    blocks = min(n_handles * ((n_stack - 1) // least_frames + 2) + 2 * streams, _MOST)
    # Each stack may have its own frames, in blocks of which the other frames serve nobody any more.
    contents = 4 * n_handles * (stack_bytes + PAGE) + blocks * PAGE + streams * block_frames * (stack_bytes + PAGE)
    references = min(blocks, contents // (stack_bytes // n_stack + SLACK))
    return Sizes(blocks, min(contents // PAGE, _MOST), references, streams, stack_bytes, block_frames)


def _fields(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    row = sizes.stack_bytes + SLACK
    opened = sizes.block_frames * (sizes.stack_bytes + ENTRY_HEADER) + SLACK
    return {
        "head": ((N_HEAD,), np.int64),
        "blocks": ((sizes.blocks, N_BLOCK), np.uint32),
        "sums": ((sizes.blocks, N_SUMS), np.uint32),
        "free_blocks": ((sizes.blocks,), np.uint32),
        "unsealed": ((sizes.blocks,), np.uint32),
        "turned": ((1024,), np.uint32),
        "links": ((sizes.pages,), np.uint32),
        "free_pages": ((sizes.pages,), np.uint32),
        "users": ((sizes.references,), np.uint32),
        "reference_sums": ((sizes.references,), np.uint32),
        "free_references": ((sizes.references,), np.uint32),
        "streams": ((sizes.streams, N_STREAM), np.int64),
        "last": ((sizes.streams, row), np.uint8),
        "frame": ((sizes.streams, row), np.uint8),
        "open": ((sizes.streams, opened), np.uint8),
        "entry_sums": ((sizes.streams, sizes.block_frames), np.uint32),
        "pages": ((sizes.pages * PAGE + SLACK,), np.uint8),
        "references": ((sizes.references * row,), np.uint8),
    }


_ALIGNMENT = 4096


@functools.cache
def _offsets(sizes: Sizes) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, (shape, dtype) in _fields(sizes).items():
        offsets[name] = end
        end += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def region_bytes(sizes: Sizes) -> int:
    """Size of the region that such arrays need."""
    return _offsets(sizes)[1]


def offset_of(name: str, sizes: Sizes) -> int:
    """Where an array begins in its region."""
    return _offsets(sizes)[0][name]


def fields(sizes: Sizes) -> dict[str, tuple[int, tuple[int, ...], type[np.generic]]]:
    """Where each array begins, its shape, and its dtype."""
    offsets, _ = _offsets(sizes)
    return {name: (offsets[name], shape, dtype) for name, (shape, dtype) in _fields(sizes).items()}
