"""Where observations, actions, rewards and flags of all environments lie in shared memory."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from rl_ext_core.processes.report import unnamed_file

__all__ = ["Layout", "Memory", "Progress", "common_spaces", "leaves_of"]

_LINE = 64  # bytes of a cache line: arrays do not share one

Leaf = tuple[Any, tuple[int, ...], np.dtype[Any]]


def leaves_of(space: Any) -> tuple[str, list[Leaf]] | None:
    """Take a space apart into arrays.

    :param space: of gymnasium
    :return: ``"array"``, ``"dict"`` or ``"tuple"``, and each array's key, shape and dtype; None if it does not consist
        of arrays of fixed shape
    """
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, dict):
        kind, parts = "dict", list(spaces.items())
    elif spaces is not None:
        kind, parts = "tuple", list(enumerate(spaces))
    else:
        kind, parts = "array", [(None, space)]
    leaves = []
    for key, part in parts:
        if getattr(part, "spaces", None) is not None or part.shape is None or part.dtype is None:
            return None
        dtype = np.dtype(part.dtype)
        if dtype.kind not in "biuf":
            return None
        leaves.append((key, tuple(part.shape), dtype))
    return kind, leaves


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of one block of shared memory; each has the environments first.

    :ivar kind: what observations are: ``"array"``, ``"dict"`` or ``"tuple"``
    :ivar keys: of the observation's arrays
    :ivar fields: per array its name, offset in bytes, shape and dtype
    :ivar size: of the block, in bytes
    """

    kind: str
    keys: tuple[Any, ...]
    fields: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...]
    size: int

    @classmethod
    def of(cls, num_envs: int, observation_space: Any, action_space: Any, *, after: int) -> Layout:
        """Lay out what environments of these spaces exchange.

        :param after: bytes at the beginning that are taken
        :raises InvalidArgumentError: observations that do not consist of arrays of fixed shape
        """
        observations = leaves_of(observation_space)
        if observations is None:
            raise InvalidArgumentError(
                f"observation_space={observation_space} has no fixed arrays to share; expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or one Dict or Tuple of these. Flatten it: "
                "gymnasium.wrappers.FlattenObservation(env)"
            )
        kind, leaves = observations
        wanted: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (f"observation {index}", shape, dtype) for index, (_, shape, dtype) in enumerate(leaves)
        ]
        actions = leaves_of(action_space)
        if actions is not None and actions[0] == "array":
            wanted.append(("action", actions[1][0][1], actions[1][0][2]))
        wanted += [("reward", (), np.dtype(np.float64)), ("reward kind", (), np.dtype(np.uint8))]
        wanted += [("flags", (), np.dtype(np.uint8))]
        fields, offset = [], after
        for name, shape, dtype in wanted:
            offset = -(-offset // _LINE) * _LINE
            fields.append((name, offset, (num_envs, *shape), dtype))
            offset += num_envs * int(np.prod(shape)) * dtype.itemsize
        return cls(kind, tuple(leaf[0] for leaf in leaves), tuple(fields), max(offset, 1))

    def arrays(self, block: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Give the arrays that lie in a block of memory."""
        return {name: np.ndarray(shape, dtype, block, offset) for name, offset, shape, dtype in self.fields}

    def joined(self, parts: list[Any]) -> Any:
        """Make an observation of its arrays."""
        if self.kind == "array":
            return parts[0]
        return dict(zip(self.keys, parts, strict=True)) if self.kind == "dict" else tuple(parts)


def common_spaces(found: Sequence[Any]) -> Any:
    """Give the spaces that all environments have.

    :param found: observation and action space of each
    :raises EnvironmentOutputError: one has others than the first
    """
    for number, spaces in enumerate(found):
        for name, one, other in zip(("observation_space", "action_space"), found[0], spaces, strict=True):
            if one != other:
                raise EnvironmentOutputError(
                    f"environment {number} has {name}={other}, and environment 0 has {one}; the environments of one "
                    "VecEnv have the same spaces. Build them alike"
                )
    return found[0]


class Progress:
    """What each worker is at, what it was told last and what it has answered: readable however it ends.

    Every cell is written at once, by one of the two sides. So each finds out where the other is at any time, also after
    Ctrl-C has come between two lines: what goes through pipes only wakes.

    :param block: of shared memory; this is at its beginning
    :param num_workers: how many there are
    """

    # Places of a worker's cells: the environment that it is at, among its own, and the phase; number and size of the
    # last command; number, kind and size of the last answer.
    ENVIRONMENT, PHASE, TOLD, TOLD_SIZE, ANSWERED, ANSWER_KIND, ANSWER_SIZE = range(7)
    _CELLS = 8

    def __init__(self, block: Any, num_workers: int) -> None:
        self.cells = memoryview(block).cast("B")[: self.size(num_workers)].cast("Q")

    @classmethod
    def size(cls, num_workers: int) -> int:
        """Give the bytes that it takes."""
        return 8 * cls._CELLS * num_workers

    def of(self, worker: int) -> memoryview:
        """Give a worker's cells."""
        return self.cells[self._CELLS * worker : self._CELLS * (worker + 1)]

    def read(self, worker: int) -> tuple[int, int]:
        """Give the number of the environment, among its worker's, and the phase."""
        cells = self.of(worker)
        return cells[self.ENVIRONMENT], cells[self.PHASE]

    def write(self, worker: int, number: int, phase: int) -> None:
        """Say it, in the worker."""
        cells = self.of(worker)
        cells[self.ENVIRONMENT] = number
        cells[self.PHASE] = phase


class Memory:
    """Shared memory without a name: nothing is left of it when the last process is gone.

    :param size: in bytes

    :ivar descriptor: of the file that it is
    """

    @uninterrupted
    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = unnamed_file("vector") if descriptor is None else descriptor
        if descriptor is None:
            self.grow(size)

    def grow(self, size: int) -> None:
        """Make it that large."""
        os.ftruncate(self.descriptor, size)

    def map(self, size: int) -> mmap.mmap:
        """Map its first bytes into this process."""
        return mmap.mmap(self.descriptor, size)

    def close(self) -> None:
        """Close it here; what is mapped stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (reduction.DupFd(self.descriptor),)


def _inherited(descriptor: Any) -> Memory:
    return Memory(0, descriptor.detach())
