"""Sizes of a layout for the kernels, and constants that kernels share."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.layout import StackLayout

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

# Memory order of a stack: frame after frame, or pixel after pixel with the channels of all frames.
PLANAR = 1
INTERLEAVED = 2

# Encoding of the frames in a block.
RAW = 0
PATCH = 1

GROUP = 64  # maximum number of bytes that are predicted and packed together, see ``bounded``
# Scratch memory if frames may differ by ``max_error``; ``GROUP`` bytes follow each frame.
SCRATCH_FRAMES = 7  # for encoding
WORK_FRAMES = 3  # for decoding: two frames, and a row in groups
SLACK = 16  # readable and writable bytes after every buffer, because the kernels move short runs in whole words
ENTRY_HEADER = 3  # bytes before each frame of a block of patches


class Geometry(NamedTuple):
    """Sizes of a layout, in bytes unless noted. It is a named tuple because numba unpacks these without a copy."""

    n_stack: int
    frame_bytes: int
    pixels: int  # number of positions in a frame, each with ``frame_channels`` values
    frame_channels: int
    itemsize: int
    stored: int  # memory order of returned stacks and stored frames: PLANAR or INTERLEAVED
    coder: int  # encoding: RAW or PATCH
    block_shift: int  # a block has up to 2**block_shift frames
    max_error: int = 0  # maximum error per byte; 0 is exact
    row: int = 1  # bytes from a pixel to the one above
    plane: int = 0  # bytes from a pixel to the same one in the previous channel; 0 if channels are not planes
    keeps_stack: int = 1  # whether a stream stores its newest stack separately


def geometry_of(layout: StackLayout, *, codec: str, block_length: int, max_error: int) -> Geometry:
    """Compute the geometry of a layout and a codec.

    :param layout: How a stack is made of frames.
    :param codec: Name of the codec.
    :param block_length: Frames per block.
    :param max_error: Maximum error per byte.
    """
    return Geometry(
        n_stack=layout.n_stack,
        frame_bytes=layout.frame_bytes,
        pixels=layout.pixels,
        frame_channels=layout.frame_channels,
        itemsize=layout.dtype.itemsize,
        stored=PLANAR if layout.planar else INTERLEAVED,
        coder=PATCH if codec == "patch" else RAW,
        block_shift=block_length.bit_length() - 1,
        max_error=max_error,
        keeps_stack=int(layout.n_stack > 1 or max_error > 0 or codec == "jpeg"),
        **_neighbor_strides(layout),
    )


def _neighbor_strides(layout: StackLayout) -> dict[str, int]:
    """Return the distances in bytes to the pixel above, and to the same pixel in the previous channel."""
    shape = list(layout.shape)
    shape[layout.axis] //= layout.n_stack
    if not 2 <= len(shape) <= 3:
        return {"row": layout.frame_bytes, "plane": 0}
    in_planes = len(shape) == 3 and shape[0] <= shape[2]
    if in_planes:
        return {"row": shape[2], "plane": shape[1] * shape[2]}
    return {"row": math.prod(shape[1:]), "plane": 0}


def shared_byte_mask(layout: StackLayout) -> Bytes:
    """Return a mask of an interleaved stack: 255 for bytes that it shares with the previous stack, 0 for new ones."""
    unit = layout.frame_channels * layout.dtype.itemsize
    period = unit * layout.n_stack
    return np.tile(np.where(np.arange(period) < period - unit, 255, 0).astype(np.uint8), layout.pixels)
