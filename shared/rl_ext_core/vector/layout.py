"""Where observations, actions, rewards and flags of all environments lie in shared memory, and how they get there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError

__all__ = ["Layout", "Row", "common_spaces", "leaves_of"]

_LINE = 64  # bytes of a cache line: arrays do not share one

Leaf = tuple[tuple[Any, ...], tuple[int, ...], np.dtype[Any]]


def leaves_of(space: Any) -> tuple[Any, list[Leaf]] | None:
    """Take a space apart into arrays.

    :param space: of gymnasium
    :return: dicts and tuples as in the space, with an array's number in its place, and each array's path of keys, shape
        and dtype; None if it does not consist of arrays of fixed shape
    """
    leaves: list[Leaf] = []

    def taken_apart(part: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(part, spaces.Dict):
            return {key: taken_apart(inner, (*path, key)) for key, inner in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(taken_apart(inner, (*path, index)) for index, inner in enumerate(part.spaces))
        if part.shape is None or part.dtype is None or np.dtype(part.dtype).kind not in "biuf":
            raise _NoArrayError
        leaves.append((path, tuple(part.shape), np.dtype(part.dtype)))
        return len(leaves) - 1

    try:
        return taken_apart(space, ()), leaves
    except _NoArrayError:
        return None


class _NoArrayError(Exception):
    """A space's values are no arrays of one shape."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of one block of shared memory; each has the environments first.

    :ivar tree: dicts and tuples as in observations, with an array's number in its place
    :ivar paths: keys that lead to each of the observation's arrays
    :ivar fields: per array its name, offset in bytes, shape and dtype
    :ivar size: of the block, in bytes
    """

    tree: Any
    paths: tuple[tuple[Any, ...], ...]
    fields: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...]
    size: int

    @classmethod
    def of(cls, num_envs: int, observation_space: Any, action_space: Any) -> Layout:
        """Lay out what environments of these spaces exchange.

        :raises InvalidArgumentError: observations that do not consist of arrays of fixed shape
        """
        observations = leaves_of(observation_space)
        if observations is None:
            raise InvalidArgumentError(
                f"observation_space={observation_space} has no fixed arrays to share; expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or Dict and Tuple of these. Flatten it: "
                "gymnasium.wrappers.FlattenObservation(env)"
            )
        tree, leaves = observations
        wanted: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (f"observation {index}", shape, dtype) for index, (_, shape, dtype) in enumerate(leaves)
        ]
        actions = leaves_of(action_space)
        if actions is not None and actions[0] == 0:
            wanted.append(("action", actions[1][0][1], actions[1][0][2]))
        wanted += [("reward", (), np.dtype(np.float64)), ("reward kind", (), np.dtype(np.uint8))]
        wanted += [("flags", (), np.dtype(np.uint8))]
        fields, offset = [], 0
        for name, shape, dtype in wanted:
            offset = -(-offset // _LINE) * _LINE
            fields.append((name, offset, (num_envs, *shape), dtype))
            offset += num_envs * int(np.prod(shape)) * dtype.itemsize
        return cls(tree, tuple(leaf[0] for leaf in leaves), tuple(fields), max(offset, 1))

    def arrays(self, block: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays that lie in a block of memory."""
        return {name: np.ndarray(shape, dtype, block, offset) for name, offset, shape, dtype in self.fields}

    def rows(self, arrays: dict[str, np.ndarray[Any, Any]], environment: int) -> list[Row]:
        """Return the rows of an environment, by its number."""
        return [Row(path, arrays[f"observation {index}"][environment, ...]) for index, path in enumerate(self.paths)]

    def joined(self, parts: list[Any]) -> Any:
        """Make an observation of its arrays."""
        return parts[0] if self.tree == 0 else _joined(self.tree, parts)


def _joined(tree: Any, parts: list[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _joined(inner, parts) for key, inner in tree.items()}
    return tuple(_joined(inner, parts) for inner in tree) if isinstance(tree, tuple) else parts[tree]


def common_spaces(found: Sequence[Any]) -> Any:
    """Return the spaces that all environments have.

    :raises EnvironmentOutputError: one has others than the first
    """
    for number, pair in enumerate(found):
        for name, one, other in zip(("observation_space", "action_space"), found[0], pair, strict=True):
            if one != other:
                raise EnvironmentOutputError(
                    f"environment {number} has {name}={other}, and environment 0 has {one}; environments that are "
                    "stepped together have the same spaces. Build them alike"
                )
    return found[0]


class Row:
    """Where one array of an environment's observations goes.

    :param path: keys that lead to the array in the observation; empty: it is the observation
    :param place: in shared memory

    :ivar changed: whether values had to be changed, at any time
    """

    def __init__(self, path: tuple[Any, ...], place: np.ndarray[Any, Any]) -> None:
        self.path, self.place, self.changed = path, place, False
        self.shape, self.dtype = place.shape, place.dtype
        whole = (int,) if self.dtype == np.int64 else ()
        self.scalars = (self.dtype.type, *whole) if self.shape == () else ()

    def write(self, value: Any) -> None:
        """Write a value.

        Values that the dtype cannot hold are changed to such that it can.

        :raises EnvironmentOutputError: it has another shape
        """
        kind = type(value)
        if kind is np.ndarray:
            if value.shape == self.shape and value.dtype == self.dtype:
                self.place[...] = value
                return
        elif kind in self.scalars:
            self.place[...] = value
            return
        self._convert(np.asarray(value))

    def _convert(self, value: np.ndarray[Any, Any]) -> None:
        if value.shape != self.shape:
            raise EnvironmentOutputError(
                f"{self._name} has the shape {value.shape} where the observation space says {self.shape}; give the "
                "space the shape of what reset and step return"
            )
        with np.errstate(all="ignore"):  # what does not fit is found below
            self.place[...] = value
        # Rounding between floats is nobody's surprise: policies compute with 32 bits.
        if self.dtype.kind != "f" and not self.changed and not np.array_equal(self.place, value):
            self.changed = True

    @property
    def _name(self) -> str:
        return f"observation{''.join(f'[{key!r}]' for key in self.path)}" if self.path else "the observation"
