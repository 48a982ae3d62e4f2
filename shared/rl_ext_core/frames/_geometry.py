"""What the kernels need to know of a layout."""

from __future__ import annotations

import math

import numpy as np

from rl_ext_core.frames._state import INTERLEAVED, PLANAR, Bytes, Geometry
from rl_ext_core.frames.codecs import Codec
from rl_ext_core.frames.layout import StackLayout


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
        **_neighbours(layout),
    )


def _neighbours(layout: StackLayout) -> dict[str, int]:
    """How far the byte above and that of the channel before are from a byte of a frame."""
    shape = list(layout.shape)
    shape[layout.axis] //= layout.n_stack
    if not 2 <= len(shape) <= 3:
        return {"row": layout.frame_bytes, "plane": 0}
    in_planes = len(shape) == 3 and shape[0] <= shape[2]
    if in_planes:
        return {"row": shape[2], "plane": shape[1] * shape[2]}
    return {"row": math.prod(shape[1:]), "plane": 0}


def kept_bytes(layout: StackLayout) -> Bytes:
    """255 for every byte of an interleaved stack that is in the one before it too, 0 for those of its newest frame."""
    unit = layout.frame_channels * layout.dtype.itemsize
    period = unit * layout.n_stack
    return np.tile(np.where(np.arange(period) < period - unit, 255, 0).astype(np.uint8), layout.pixels)
