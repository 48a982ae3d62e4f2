"""Layouts of frame stacks in observations, and their detection."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError

# Memory order of a stack: frame after frame, or pixel after pixel with the channels of all frames.
PLANAR, INTERLEAVED = 1, 2

_NEARLY_ALL = 0.75  # share of transitions that must fit a layout; some wrappers reset in the middle of an episode
_LEAST_ROW = 16  # pixels; an axis at the end that is shorter is that of channels
MAX_STACK = 63  # that fits into a pair of the log


@dataclass(frozen=True)
class StackLayout:
    """Layout of an observation: a stack of ``n_stack`` frames, concatenated along the first or the last axis.

    :param shape: Shape of one observation, without the environment axis.
    :param dtype: Dtype of the observation, or anything that ``np.dtype`` accepts.
    :param n_stack: Number of frames per stack; 1 treats the observation as one frame.
    :param axis: Stacking axis, 0 (channel-first) or ``len(shape) - 1`` (channel-last).
    :raises InvalidArgumentError: If ``n_stack`` does not divide the length of the axis, or the dtype is not numeric.

    >>> import numpy as np
    >>> from rl_ext_core.frames import StackLayout
    >>> layout = StackLayout((12, 84, 84), np.uint8, n_stack=4, axis=0)
    >>> layout.frame_bytes
    21168
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    n_stack: int
    axis: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))  # also accepts np.uint8 and "uint8"
        if self.dtype.kind not in "biufc":
            raise InvalidArgumentError(
                f"dtype={self.dtype} is not numeric: expected numbers or images, for example np.uint8"
            )
        length = self.shape[self.axis]
        if not 1 <= self.n_stack <= MAX_STACK or length % self.n_stack:
            divisors = [d for d in range(1, min(length, MAX_STACK) + 1) if length % d == 0]
            problem = f"is above {MAX_STACK}, for" if self.n_stack > MAX_STACK else "does not divide"
            raise InvalidArgumentError(
                f"n_stack={self.n_stack} {problem} the {length} channels of an observation of shape "
                f"{self.shape}: expected one of {divisors}. Pass one of them, or n_stack=None to detect it."
            )

    @property
    def planar(self) -> bool:
        """Whether each frame of a stack is contiguous in a C-contiguous observation."""
        return self.axis == 0

    @property
    def stack_bytes(self) -> int:
        """Size of an observation in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def frame_bytes(self) -> int:
        """Size of one frame in bytes."""
        return self.stack_bytes // self.n_stack

    @property
    def row_bytes(self) -> int:
        """Size of one row of a frame, an image, in bytes."""
        lengths = list(self.shape)
        lengths[self.axis] //= self.n_stack
        is_channel_last = len(lengths) > 1 and lengths[-1] < _LEAST_ROW
        return math.prod(lengths[-2 if is_channel_last else -1 :]) * self.dtype.itemsize

    @property
    def channel_bytes(self) -> int:
        """Size of one channel of a frame in bytes, 0 if it has one or is channel-last."""
        return self.frame_bytes // self.frame_channels if self.planar and self.frame_channels > 1 else 0

    @property
    def frame_channels(self) -> int:
        """Length of the stacking axis in one frame: 1 for gray, 3 for RGB."""
        return self.shape[self.axis] // self.n_stack

    @property
    def pixels(self) -> int:
        """Number of positions, each with ``shape[axis]`` channels."""
        return math.prod(self.shape) // self.shape[self.axis]


def stacking_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes along which frames may be stacked, the likelier one first.

    For images this follows SB3's rule: the channel axis is the shorter one of the first and the last axis.

    :param shape: Shape of one observation.
    """
    last = len(shape) - 1
    if last <= 0:
        return (0,)
    if len(shape) == 3:
        return (0,) if shape[0] <= shape[last] else (last,)
    return (0, last)


def candidate_layouts(
    shape: tuple[int, ...], dtype: npt.DTypeLike, *, n_stack: int | None = None
) -> Iterator[StackLayout]:
    """Generate all possible layouts, from the smallest frames to the unstacked layout.

    :param shape: Shape of one observation.
    :param dtype: Dtype of the observation.
    :param n_stack: Frames per stack, or None for all numbers.
    :raises InvalidArgumentError: If no layout is possible.
    """
    if not shape:
        raise InvalidArgumentError("observations of shape () cannot be stored: expected at least one axis, as in (1,)")
    if 0 in shape:
        raise InvalidArgumentError(f"observations of shape {shape} are empty. Remove them from the observation space")
    if n_stack is not None:
        axes = dict.fromkeys((*stacking_axes(shape), 0, len(shape) - 1))
        fitting = [axis for axis in axes if n_stack > 0 and shape[axis] % n_stack == 0]
        yield StackLayout(shape, np.dtype(dtype), n_stack, (fitting or list(axes))[0])
        return
    for axis in stacking_axes(shape):
        for size in range(min(shape[axis], MAX_STACK), 1, -1):
            if shape[axis] % size == 0:
                yield StackLayout(shape, np.dtype(dtype), size, axis)
    yield StackLayout(shape, np.dtype(dtype), 1, 0)


def is_continuation(
    layout: StackLayout, before: npt.NDArray[np.generic], after: npt.NDArray[np.generic]
) -> npt.NDArray[np.bool_]:
    """Return which observations continue the ones before: they contain all their frames except the oldest one.

    :param layout: Layout to test.
    :param before: Observations of shape ``(n, *layout.shape)``.
    :param after: Following observations, of the same shape.
    :return: Boolean array, shape ``(n,)``.
    """
    channels = layout.frame_channels
    older = np.moveaxis(before, layout.axis + 1, 1)[:, channels:]
    newer = np.moveaxis(after, layout.axis + 1, 1)[:, : older.shape[1]]
    shifted: npt.NDArray[np.bool_] = ~differing_rows(older, newer)
    return shifted


def differing_rows(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return in which rows two arrays differ by at least one byte."""
    # Bytes are compared instead of values, because NaN must equal itself and -0.0 must not equal 0.0.
    rows = [np.ascontiguousarray(side).view(np.uint8).reshape(len(side), -1) for side in (left, right)]
    different: npt.NDArray[np.bool_] = (rows[0] != rows[1]).any(axis=1)
    return different


def find_layout(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    before: npt.NDArray[np.generic],
    after: npt.NDArray[np.generic],
) -> StackLayout | None:
    """Detect the layout: the one with the smallest frames under which nearly all observations continue the ones before.

    :param shape: Shape of one observation.
    :param dtype: Dtype of the observations.
    :param before: Observations of shape ``(n, *shape)``.
    :param after: Following observations, of the same shape.
    :return: The layout, or None if all observations equal the ones before, because every layout fits these.
    """
    if len(before) == 0 or not (informative := differing_rows(before, after)).any():
        return None
    before, after = before[informative], after[informative]
    for layout in candidate_layouts(shape, dtype):
        if layout.n_stack == 1 or is_continuation(layout, before, after).mean() >= _NEARLY_ALL:
            return layout
    return None


def shared_byte_mask(layout: StackLayout) -> npt.NDArray[np.uint8]:
    """Return a mask of an interleaved stack: 255 for bytes that it shares with the previous stack, 0 for new ones."""
    unit = layout.frame_channels * layout.dtype.itemsize
    period = unit * layout.n_stack
    return np.tile(np.where(np.arange(period) < period - unit, 255, 0).astype(np.uint8), layout.pixels)
