"""Transitions to measure on: from frames that are given, or played by a random policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.layout import stacking_axes
from rl_ext_core.frames.planning._rows import ROW_BYTES, Sample

if TYPE_CHECKING:
    import gymnasium

_ACTION_BYTES = 8  # that ``ROW_BYTES`` counts for an action


class _Stacker:
    """Stacks single frames along an axis as Stable Baselines3's ``VecFrameStack`` does: zeros before an episode.

    :param frame: shape of a frame.
    :param n_stack: how many there are in a stack; 1 leaves frames as they are.
    :param axis: of a frame.
    """

    def __init__(self, frame: tuple[int, ...], n_stack: int, axis: int) -> None:
        self.shape = tuple(size * (n_stack if at == axis else 1) for at, size in enumerate(frame))
        self._length, self._axis = frame[axis], axis
        self._stack: npt.NDArray[Any] | None = None

    def first(self, frame: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The stack at the beginning of an episode."""
        self._stack = None
        return self.next(frame)

    def next(self, frame: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The stack with one more frame."""
        if self._stack is None:
            self._stack = np.zeros(self.shape, dtype=frame.dtype)
        older = np.moveaxis(self._stack, self._axis, 0)[self._length :]
        newest = np.moveaxis(frame, self._axis, 0)
        self._stack = np.moveaxis(np.concatenate([older, newest]), 0, self._axis)
        return self._stack


def _stacker(frame: tuple[int, ...], shape: tuple[int, ...] | None, n_stack: int | None, source: str) -> _Stacker:
    """What makes observations of ``shape`` of the arrays that a source gives.

    :raises InvalidArgumentError: if there is no way.
    """
    if shape is None:
        return _Stacker(frame, n_stack or 1, stacking_axes(frame)[0])
    if frame == shape:
        return _Stacker(frame, 1, 0)
    for axis in (len(shape) - 1, 0):
        if len(frame) == len(shape) and shape[axis] % frame[axis] == 0:
            stacker = _Stacker(frame, shape[axis] // frame[axis], axis)
            if stacker.shape == shape and n_stack in (None, shape[axis] // frame[axis]):
                return stacker
    raise InvalidArgumentError(
        f"{source} gives arrays of shape {frame}, which are neither observations of shape {shape} nor frames that make "
        f"them when they are stacked; pass shape={frame}, or wrap the environment so that it gives what is stored"
    )


def from_frames(frames: Any, *, shape: tuple[int, ...] | None, n_stack: int | None) -> Sample:
    """The transitions that consecutive observations, or single frames, of one environment make.

    :param frames: shape ``(n, *shape)``.
    :param shape: of the observations that are stored, or None for that of the frames.
    :raises InvalidArgumentError: if the frames cannot make such observations.
    """
    given: npt.NDArray[Any] = np.asarray(frames)
    if given.ndim < 2:
        raise InvalidArgumentError(
            f"frames has shape {given.shape}, expected (n, *shape of an observation): consecutive ones of one "
            "environment"
        )
    stacker = _stacker(given.shape[1:], shape, n_stack, "frames")
    stacks = np.stack([stacker.next(frame) for frame in given])
    return Sample(stacks[:-1], stacks[1:], f"frames ({len(given)} of them)")


def from_env(
    env: gymnasium.Env[Any, Any] | Callable[[], Any],
    *,
    steps: int,
    shape: tuple[int, ...] | None,
    n_stack: int | None,
    seed: int,
) -> Sample:
    """The transitions of a random policy.

    :param env: an environment, or what makes one. One that was made here is closed again, whatever happens.
    :param shape: of the observations that are stored, or None for that of the environment's.
    :raises InvalidArgumentError: if its observations cannot make such ones.
    :raises InvalidTypeError: if it is no environment, or its observations are no arrays.
    """
    made = not hasattr(env, "observation_space")
    if made and not callable(env):
        raise InvalidTypeError(f"env={env!r} is neither a gymnasium environment nor what makes one")
    played: Any = env() if made else env  # type: ignore[operator]
    try:
        return _played(played, steps, shape, n_stack, seed)
    finally:
        if made:
            played.close()


def _played(env: Any, steps: int, shape: tuple[int, ...] | None, n_stack: int | None, seed: int) -> Sample:
    space = env.observation_space
    if not hasattr(space, "dtype") or getattr(space, "shape", None) is None or len(space.shape) == 0:
        raise InvalidTypeError(
            f"the environment's observation_space is {space}, expected a Box; plan the image of a Dict by itself, with "
            "frames=, or wrap the environment so that it gives the image alone"
        )
    source = f"{getattr(getattr(env, 'spec', None), 'id', None) or type(env.unwrapped).__name__}"
    stacker = _stacker(tuple(space.shape), shape, n_stack, source)
    env.action_space.seed(seed)
    before, after = [], []
    newest = stacker.first(_frame(env.reset(seed=seed)[0], space))
    for _ in range(steps):
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        before.append(newest)
        newest = stacker.next(_frame(frame, space))
        after.append(newest)
        if terminated or truncated:
            newest = stacker.first(_frame(env.reset()[0], space))
    action = np.asarray(env.action_space.sample())
    row_bytes = ROW_BYTES - _ACTION_BYTES + (action.size * 4 if action.dtype.kind == "f" else action.size * 8)
    return Sample(np.stack(before), np.stack(after), f"{source}, {steps} steps of a random policy", row_bytes)


def _frame(observation: Any, space: Any) -> npt.NDArray[Any]:
    frame = np.array(observation)  # a copy: environments write into theirs
    if frame.shape != space.shape:
        raise EnvironmentOutputError(
            f"the environment gave an observation of shape {frame.shape}, its observation_space says {space.shape}"
        )
    return frame.astype(space.dtype, copy=False)
