"""How a stack of frames lies in an observation, and finding that out from observations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError

_NEARLY_ALL = 0.75  # a transition or two may be odd: a wrapper that resets in the middle
MAX_STACK = 255  # a stack's valid depth is kept in a byte


@dataclass(frozen=True)
class StackLayout:
    """A stack of ``n_stack`` frames, concatenated along the first or the last axis of an observation.

    :param shape: shape of one observation, without the environment axis.
    :param dtype: dtype of the observation, or what NumPy makes one of.
    :param n_stack: number of frames in a stack; 1 treats the observation as one frame.
    :param axis: the stacking axis, 0 (channel-first) or ``len(shape) - 1`` (channel-last).
    :raises InvalidArgumentError: if the stack size does not divide the length of the axis, or of what is no number.

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
        object.__setattr__(self, "dtype", np.dtype(self.dtype))  # np.uint8 and "uint8" are what people write
        if self.dtype.kind not in "biufc":
            raise InvalidArgumentError(
                f"observations of dtype {self.dtype} are no images or numbers; for example uint8"
            )
        length = self.shape[self.axis]
        if not 1 <= self.n_stack <= MAX_STACK or length % self.n_stack:
            divisors = [d for d in range(1, min(length, MAX_STACK) + 1) if length % d == 0]
            raise InvalidArgumentError(
                f"n_stack={self.n_stack} does not divide the {length} channels of an observation of shape "
                f"{self.shape}; possible here: {divisors}. Pass one of them, or n_stack=None to find it from the data."
            )

    @property
    def planar(self) -> bool:
        """Whether each frame of a stack is one contiguous piece of a C-contiguous observation."""
        return self.axis == 0

    @property
    def stack_bytes(self) -> int:
        """Size of an observation."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def frame_bytes(self) -> int:
        """Size of one frame."""
        return self.stack_bytes // self.n_stack

    @property
    def frame_channels(self) -> int:
        """Length of the stacking axis in one frame: 1 for grey, 3 for RGB."""
        return self.shape[self.axis] // self.n_stack

    @property
    def pixels(self) -> int:
        """Number of positions, each holding ``shape[axis]`` channels."""
        return math.prod(self.shape) // self.shape[self.axis]


def stacking_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which frames may be stacked, the likelier first.

    Images follow SB3's rule: the channel axis is the shorter one of the first and the last.
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
    """All layouts that an observation of this shape can have, the finest frames first, the unstacked one last."""
    if not shape:
        raise InvalidArgumentError("observations of shape () cannot be stored; give them shape (1,)")
    if 0 in shape:
        raise InvalidArgumentError(f"observations of shape {shape} hold nothing to store; leave them out of the space")
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
    """Which of ``after`` hold all but the oldest frame of ``before``, moved on by one.

    :param before: observations of shape ``(n, *layout.shape)``.
    :param after: the observations that followed, of the same shape.
    :return: shape ``(n,)``.
    """
    channels = layout.frame_channels
    older = np.moveaxis(before, layout.axis + 1, 1)[:, channels:]
    newer = np.moveaxis(after, layout.axis + 1, 1)[:, : older.shape[1]]
    shifted: npt.NDArray[np.bool_] = ~_differ(older, newer)
    return shifted


def _differ(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    # Bytes, not values: NaN must equal itself and -0.0 must not equal 0.0.
    rows = [np.ascontiguousarray(side).view(np.uint8).reshape(len(side), -1) for side in (left, right)]
    different: npt.NDArray[np.bool_] = (rows[0] != rows[1]).any(axis=1)
    return different


def find_layout(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    before: npt.NDArray[np.generic],
    after: npt.NDArray[np.generic],
) -> StackLayout | None:
    """The finest layout under which nearly all of ``after`` continue ``before``, or None where they say nothing.

    They say nothing where observations repeat themselves, since every layout fits constant images.

    :param before: observations of shape ``(n, *shape)``.
    :param after: the observations that followed, of the same shape.
    """
    if len(before) == 0 or not (informative := _differ(before, after)).any():
        return None
    before, after = before[informative], after[informative]
    for layout in candidate_layouts(shape, dtype):
        if layout.n_stack == 1 or is_continuation(layout, before, after).mean() >= _NEARLY_ALL:
            return layout
    return None
