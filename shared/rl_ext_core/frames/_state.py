"""The plain arrays that the kernels work on. Named tuples, because numba takes them apart without a copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

# How the bytes of a stack lie in memory: frame after frame, or pixel after pixel with the frames' channels inside.
PLANAR = 1
INTERLEAVED = 2

# How the frames of a block are laid out.
RAW = 0
PATCH = 1

GROUP = 64  # bytes that are predicted and packed together, at most; see ``_packed``
# Where frames may be off, each with ``GROUP`` bytes behind it:
SCRATCH_FRAMES = 7  # on the way in
WORK_FRAMES = 3  # on the way out: two frames, and a row in groups
SLACK = 16  # readable and writable bytes behind every region: the kernels move short runs in whole words
SEALED_HEADER = 8  # bytes before a sealed block: its size and that of its contents, u32 little-endian
ENTRY_HEADER = 3  # bytes before each frame of a block of patches

# What became of one stack on its way in.
SAME = 0  # it is the stack before
PUSHED = 1  # it is the stack before moved on by one frame, and that frame is stored
BOUNDARY = 2  # likewise, but the frame, the newest in ``last``, has to begin a new block
UNSHARED = 3  # it has to be stored whole; nothing was changed

# How far a transition was stored by the kernel alone.
ALL_STORED = 0
STUCK_AT_OBSERVATION = 1
STUCK_AT_NEXT = 2


class Geometry(NamedTuple):
    """Sizes of one layout, in bytes unless named otherwise."""

    n_stack: int
    frame_bytes: int
    pixels: int  # positions in a frame, each with ``frame_channels`` values
    frame_channels: int
    itemsize: int
    stored: int  # PLANAR or INTERLEAVED: how observations are returned, and single frames stored
    coder: int  # RAW or PATCH
    block_shift: int  # a block holds 2**block_shift frames
    max_error: int = 0  # how far off a byte may be; 0 is exact
    row: int = 1  # from a byte of a frame to the one above
    plane: int = 0  # likewise to the same pixel in the channel before, 0 where frames do not lie in planes


class Streams(NamedTuple):
    """One row an environment: what is known of its newest stack, and its open block.

    Rows of bytes are ``SLACK`` longer than what they hold.
    """

    last: Bytes  # (E, stack bytes): the newest stack, as it lay in memory
    last_memory: Bytes  # (E,): PLANAR or INTERLEAVED, 0 where there is none
    fresh: Bytes  # (1, frame bytes): the newest frame of the stack being pushed
    frame: Bytes  # (E, frame bytes): the newest frame stored
    depth: Bytes  # (E,): frames of the newest stack that are not padding
    total: Counts  # (E,): frames stored so far
    open: Bytes  # (E, block bytes): the block being filled
    open_bytes: Counts  # (E,)
    open_frames: Counts  # (E,)
    scratch: Bytes  # (1, frame bytes)
    kept: Bytes  # (1, stack bytes): in interleaved memory, 255 at the bytes that the next stack has one frame earlier


class Blocks(NamedTuple):
    """Where the blocks lie: a ring of ``2**n`` blocks an environment, and the addresses of what they lie in."""

    table: npt.NDArray[np.uint32]  # (E, ring, 3), with the columns below
    slab_address: Addresses  # slab ``e`` is the open block of environment ``e``; those of the arena follow
    reference_address: Addresses


# The columns of the table: where a block begins, and which reference frame its first patch starts from.
SLAB = 0
OFFSET = 1
REFERENCE = 2

# A transition is one ``uint64``: the number of the observation's newest frame modulo 2**32, then a byte each for how
# many of its frames are not padding (0 where nothing was stored), how much further the newest frame of the next
# observation is, and how many frames of that are not padding.
DEPTH_SHIFT = 32
STEP_SHIFT = 40
NEXT_DEPTH_SHIFT = 48
FRAME_NUMBERS = 1 << 32
