"""What the kernels know of a layout, and the plain arrays that they work on.

Named tuples, because numba takes them apart without a copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.layout import StackLayout

if TYPE_CHECKING:
    from rl_ext_core.frames.codecs import Codec

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

# How the bytes of a stack lie in memory: frame after frame, or pixel after pixel with the frames' channels inside.
PLANAR = 1
INTERLEAVED = 2

# How the frames of a block are laid out.
RAW = 0
PATCH = 1

GROUP = 64  # bytes that are predicted and packed together, at most; see ``bounded``
# Where frames may be off, each with ``GROUP`` bytes behind it:
SCRATCH_FRAMES = 7  # on the way in
WORK_FRAMES = 3  # on the way out: two frames, and a row in groups
SLACK = 16  # readable and writable bytes behind every region: the kernels move short runs in whole words
SEALED_HEADER = 8  # bytes before a sealed block: its size and that of its contents, u32 little-endian
ENTRY_HEADER = 3  # bytes before each frame of a block of patches


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
    keeps_stack: int = 1  # whether a stream keeps its newest stack: it is not what was stored last
    keeps_frame: int = 1  # likewise its newest frame, apart from the block that is being filled


def geometry_of(layout: StackLayout, *, codec: Codec, block_length: int, max_error: int) -> Geometry:
    """Sizes, and how frames are stored."""
    return Geometry(
        n_stack=layout.n_stack,
        frame_bytes=layout.frame_bytes,
        pixels=layout.pixels,
        frame_channels=layout.frame_channels,
        itemsize=layout.dtype.itemsize,
        stored=PLANAR if layout.planar else INTERLEAVED,
        coder=codec.coder,
        block_shift=block_length.bit_length() - 1,
        max_error=max_error,
        keeps_stack=int(layout.n_stack > 1 or max_error > 0 or codec.lossy),
        keeps_frame=int(codec.coder == PATCH or max_error > 0 or codec.lossy),
        **_neighbor_strides(layout),
    )


def _neighbor_strides(layout: StackLayout) -> dict[str, int]:
    """How far the byte above and that of the channel before are from a byte of a frame."""
    shape = list(layout.shape)
    shape[layout.axis] //= layout.n_stack
    if not 2 <= len(shape) <= 3:
        return {"row": layout.frame_bytes, "plane": 0}
    in_planes = len(shape) == 3 and shape[0] <= shape[2]
    if in_planes:
        return {"row": shape[2], "plane": shape[1] * shape[2]}
    return {"row": math.prod(shape[1:]), "plane": 0}


def shared_byte_mask(layout: StackLayout) -> Bytes:
    """255 for every byte of an interleaved stack that is in the one before it too, 0 for those of its newest frame."""
    unit = layout.frame_channels * layout.dtype.itemsize
    period = unit * layout.n_stack
    return np.tile(np.where(np.arange(period) < period - unit, 255, 0).astype(np.uint8), layout.pixels)
