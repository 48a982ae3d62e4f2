"""What storing is likely to cost where no frames are given: the range of this project's recordings.

Grey frames: five Atari games, 84×84, four a stack. Others: HalfCheetah and Walker2d filmed from where they start and
from a camera that follows them, and two levels of ViZDoom, all 100×100 RGB, three a stack. ``python -m
benchmarks.lossy --estimates`` measures them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_ext_core.frames.layout import StackLayout, candidate_layouts


class Estimate(NamedTuple):
    """Bytes a frame takes as a fraction of its raw size: of the smallest recording, in the geometric middle, of the
    largest.
    """

    low: float
    middle: float
    high: float


_GREY = {
    ("raw", 0): Estimate(1.0, 1.0, 1.03),
    ("lz4", 0): Estimate(0.012, 0.024, 0.049),
    ("patch", 0): Estimate(0.014, 0.024, 0.044),
    ("patch+lz4", 0): Estimate(0.008, 0.014, 0.024),
    ("patch", 4): Estimate(0.014, 0.023, 0.043),
    ("patch+lz4", 4): Estimate(0.008, 0.014, 0.023),
    ("jpeg", 0): Estimate(0.15, 0.32, 0.67),
}
_COLOUR = {
    ("raw", 0): Estimate(1.0, 1.02, 1.05),
    ("lz4", 0): Estimate(0.12, 0.23, 0.71),
    ("patch", 0): Estimate(0.049, 0.25, 0.90),
    ("patch+lz4", 0): Estimate(0.038, 0.17, 0.77),
    ("patch", 4): Estimate(0.040, 0.15, 0.38),
    ("patch+lz4", 4): Estimate(0.032, 0.12, 0.32),
    ("jpeg", 0): Estimate(0.17, 0.21, 0.31),
}


def likely_layout(shape: tuple[int, ...], dtype: Any, *, n_stack: int | None) -> StackLayout:
    """How observations of a shape are likely to be stacked: images of RGB where that is possible, else of grey."""
    layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
    if n_stack is not None or len(shape) != 3:
        return layouts[0] if n_stack is not None else layouts[-1]
    by_channels = {layout.frame_channels: layout for layout in layouts[:-1]}
    if min(shape[0], shape[2]) <= 3:
        return layouts[-1]
    return by_channels.get(3) or by_channels.get(1) or layouts[-1]


def estimate(layout: StackLayout, options: Mapping[str, Any]) -> Estimate | None:
    """What a frame of such a layout is likely to take; None where the recordings say nothing about the options."""
    channels = layout.frame_channels if layout.n_stack > 1 else min(layout.shape[0], layout.shape[-1])
    codec = "patch" if options["codec"] == "auto" else options["codec"]
    table = _GREY if channels == 1 else _COLOUR
    return table.get((codec, options.get("max_error", 0)))
