"""Layout of the shared memory in which a pool of environments steps: observations, actions, rewards, flags."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.vector.array_frameworks import map_arrays

_LINE = 64  # bytes of a cache line. Each array begins a new one
# Types of rewards that float64 represents exactly. SB3's SubprocVecEnv returns rewards in their own type.
REWARD_KINDS: dict[type, int] = {float: 0, np.float64: 0, np.float32: 1, int: 2, np.int64: 2, bool: 3, np.bool_: 3}
OTHER_REWARD = 4
MAX_EXACT = 2**53  # larger integers are not represented exactly
# Bits of the flags: end of the episode, an observation that did not fit its dtype, and no step of this environment.
TERMINATED, TRUNCATED, CONVERTED, SKIPPED = 1, 2, 4, 8
ENDED = TERMINATED | TRUNCATED

# An array in a space: the keys that lead to it, its shape and its dtype.
Leaf = tuple[tuple[Any, ...], tuple[int, ...], np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Layout of the arrays in a block of shared memory, each with the environments first.

    :ivar tree: nested dicts and tuples of the observation space, with the number of the array in place of each array
    :ivar paths: keys that lead to each array of an observation
    :ivar fields: name, offset in bytes, shape and dtype of each array
    :ivar size: size of the block in bytes
    """

    tree: Any
    paths: tuple[tuple[Any, ...], ...]
    fields: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...]
    size: int

    @classmethod
    def from_spaces(cls, num_envs: int, observation_space: Any, action_space: Any) -> MemoryLayout:
        """Create the layout for environments with these spaces.

        :param observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these
        :param action_space: any space; actions have an array if the space is a single array
        :raises InvalidArgumentError: If observations are not arrays of fixed shape.
        """
        leaves: list[Leaf] = []
        tree = _flatten_space(observation_space, (), leaves)
        wanted: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (f"observation {index}", shape, dtype) for index, (_, shape, dtype) in enumerate(leaves)
        ]
        actions: list[Leaf] = []
        with contextlib.suppress(InvalidArgumentError):  # actions of other spaces are pickled
            if _flatten_space(action_space, (), actions) == 0:
                wanted.append(("action", *actions[0][1:]))
        wanted += [("reward", (), np.dtype(np.float64)), ("reward kind", (), np.dtype(np.uint8))]
        wanted += [("flags", (), np.dtype(np.uint8))]
        fields, offset = [], 0
        for name, shape, dtype in wanted:
            offset = -(-offset // _LINE) * _LINE
            fields.append((name, offset, (num_envs, *shape), dtype))
            offset += num_envs * int(np.prod(shape)) * dtype.itemsize
        return cls(tree, tuple(leaf[0] for leaf in leaves), tuple(fields), max(offset, 1))

    def arrays(self, block: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays in a block of memory, by name."""
        return {name: np.ndarray(shape, dtype, block, offset) for name, offset, shape, dtype in self.fields}

    def slots(self, arrays: dict[str, np.ndarray[Any, Any]], environment: int) -> list[ObservationSlot]:
        """Return the slots for the observation of one environment."""
        return [
            ObservationSlot(path, arrays[f"observation {index}"][environment, ...])
            for index, path in enumerate(self.paths)
        ]

    def build_observation(self, parts: list[Any]) -> Any:
        """Build an observation from its arrays."""
        return parts[0] if self.tree == 0 else map_arrays(parts.__getitem__, self.tree)


def _flatten_space(space: Any, path: tuple[Any, ...], leaves: list[Leaf]) -> Any:
    """Append the arrays of a space to ``leaves``, and return their indices, nested as there."""
    if isinstance(space, spaces.Dict):
        return {key: _flatten_space(part, (*path, key), leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_flatten_space(part, (*path, index), leaves) for index, part in enumerate(space.spaces))
    if space.shape is None or space.dtype is None or np.dtype(space.dtype).kind not in "biuf":
        raise InvalidArgumentError(
            f"{space} in an observation_space has no fixed arrays to share; expected Box, Discrete, MultiDiscrete, "
            "MultiBinary, or Dict and Tuple of these. Flatten it: gymnasium.wrappers.FlattenObservation(env)"
        )
    leaves.append((path, tuple(space.shape), np.dtype(space.dtype)))
    return len(leaves) - 1


class ObservationSlot:
    """Place in shared memory for one array of an environment's observation.

    :param path: keys that lead to the array in the observation; empty if the observation is the array

    :ivar has_converted: whether any value so far did not fit the dtype
    """

    def __init__(self, path: tuple[Any, ...], place: np.ndarray[Any, Any]) -> None:
        self.path, self.place, self.has_converted = path, place, False
        self.shape, self.dtype = place.shape, place.dtype
        whole = (int,) if self.dtype == np.int64 else ()
        self._scalars = (self.dtype.type, *whole) if self.shape == () else ()

    def write(self, observation: Any) -> None:
        """Write the array of an observation, converted to the dtype of the space.

        :raises EnvironmentOutputError: If the array has another shape.
        """
        value = observation
        for key in self.path:
            value = value[key]
        kind = type(value)
        same = value.dtype == self.dtype and value.shape == self.shape if kind is np.ndarray else kind in self._scalars
        if same:
            self.place[...] = value
            return
        value = np.asarray(value)
        if value.shape != self.shape:
            name = f"observation{''.join(f'[{key!r}]' for key in self.path)}" if self.path else "the observation"
            advice = "give the space the shape that reset and step return"
            if value.shape[1:] == self.shape:
                advice = f"if these are {len(value)} environments at once, use GymVecEnv(env) with env.num_envs set"
            raise EnvironmentOutputError(
                f"{name} has the shape {value.shape} where the observation space says {self.shape}; {advice}"
            )
        with np.errstate(all="ignore"):  # values that do not fit are detected below
            self.place[...] = value
        # Rounding between floats is not reported, because policies compute with 32 bits.
        if not self.has_converted and self.dtype.kind != "f":
            self.has_converted = not np.array_equal(self.place, value)
