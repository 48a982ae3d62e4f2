"""Episodes of datasets, and the spaces that they may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core._values import may_be_same
from rl_ext_core.errors import InvalidTypeError

# An array with one row per step, or a dict of them by key of a Dict space, which may be nested.
Values = Any


@dataclass(frozen=True)
class Episode:
    """Steps of one episode, or of a part of one.

    :ivar observations: Observations, including the one after the last step, shape ``(n_steps + 1, *shape)``; a dict of
        such arrays for a ``Dict`` space
    :ivar actions: Actions, shape ``(n_steps, *shape)``; a dict of such arrays for a ``Dict`` space
    :ivar rewards: Rewards, shape ``(n_steps,)``
    :ivar terminations: Whether each step reached a terminal state, bool of shape ``(n_steps,)``
    :ivar truncations: Whether the episode was cut after each step, bool of shape ``(n_steps,)``

    >>> import numpy as np
    >>> from rl_ext_core.datasets import Episode
    >>> flags = np.array([False, True])
    >>> len(Episode(np.zeros((3, 4)), np.zeros(2, int), np.ones(2), flags, np.zeros(2, bool)))
    2
    """

    observations: Values
    actions: Values
    rewards: npt.NDArray[Any]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rewards)


class Steps(NamedTuple):
    """Consecutive steps of one environment, as a replay buffer stores them.

    :ivar observations: Observations, shape ``(n_steps, *shape)``; a dict of such arrays for a ``Dict`` space
    :ivar next_observations: Observations after each step, with the same shape
    :ivar actions: Actions, shape ``(n_steps, *shape)``
    :ivar rewards: Rewards, shape ``(n_steps,)``
    :ivar terminations: Whether each step reached a terminal state, bool of shape ``(n_steps,)``
    :ivar truncations: Whether the episode was cut after each step, bool of shape ``(n_steps,)``
    """

    observations: Values
    next_observations: Values
    actions: Values
    rewards: npt.NDArray[Any]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]

    def part(self, first: int, end: int | None) -> Steps:
        """Return the steps from ``first`` to ``end``."""
        return Steps(*(map_values(lambda array: array[first:end], values) for values in self))


def map_values(function: Callable[..., Any], values: Values, *others: Values) -> Values:
    """Apply a function to an array, or to each array of a dict. ``others`` have the same keys."""
    if isinstance(values, Mapping):
        return {key: map_values(function, value, *(other[key] for other in others)) for key, value in values.items()}
    return function(values, *others)


def split_episodes(chunks: Iterable[Steps], max_error: Any = 0) -> Iterator[Episode]:
    """Yield the episodes of consecutive steps of one environment.

    An episode ends at a termination, at a truncation, and where the observation after a step is not the next
    observation. In the latter case, and after the last step, the episode is marked as truncated.

    :param chunks: Steps, from the oldest to the newest
    :param max_error: Largest error of observations, which may have been stored twice; or a dict of these
    """
    parts: list[Steps] = []  # of the episode that has not ended
    for chunk in chunks:
        n_steps = len(chunk.rewards)
        if (
            parts
            and not _equal_rows(parts[-1].part(-1, None).next_observations, chunk.part(0, 1).observations, max_error)[0]
        ):
            yield _join(parts)
            parts = []
        ends = chunk.terminations | chunk.truncations
        before, after = chunk.part(0, n_steps - 1).next_observations, chunk.part(1, n_steps).observations
        ends[:-1] |= ~_equal_rows(before, after, max_error)
        first = 0
        for end in (np.flatnonzero(ends) + 1).tolist():
            yield _join([*parts, chunk.part(first, end)])
            parts, first = [], end
        if first < n_steps:
            parts.append(chunk.part(first, n_steps))
    if parts:
        yield _join(parts)


def _equal_rows(values: Values, others: Values, max_error: Any) -> npt.NDArray[np.bool_]:
    """Return which rows are equal, in all arrays of a dict. NaN equals NaN."""
    if isinstance(values, Mapping):
        errors = max_error if isinstance(max_error, Mapping) else dict.fromkeys(values, max_error)
        equal = np.stack([_equal_rows(values[key], others[key], errors[key]) for key in values], axis=1)
    elif max_error and np.asarray(values).dtype == np.uint8:  # only these have errors
        equal = may_be_same(values, others, max_error)
    else:
        equal = np.asarray((values == others) | ((values != values) & (others != others)))
    return np.asarray(equal.all(axis=tuple(range(1, equal.ndim))))


def _join(parts: list[Steps]) -> Episode:
    """Return the episode that consists of these steps."""
    steps = Steps(*(map_values(lambda *arrays: np.concatenate(arrays), *values) for values in zip(*parts, strict=True)))
    last = steps.part(-1, None).next_observations
    observations = map_values(lambda *arrays: np.concatenate(arrays), steps.observations, last)
    truncations = steps.truncations.copy()
    truncations[-1] |= not steps.terminations[-1]
    return Episode(observations, steps.actions, steps.rewards, steps.terminations, truncations)


def check_space(space: Any, name: str) -> None:
    """Check that steps of a space are arrays, or dicts of arrays.

    :param name: Name of the space for the error, such as ``"observation_space"``
    :raises InvalidTypeError: If the space is a Tuple, a Text, or contains one
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            check_space(part, f"{name}[{key!r}]")
    elif not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise InvalidTypeError(
            f"{name} is {space}, expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these. Other spaces "
            "cannot be stored in arrays"
        )
