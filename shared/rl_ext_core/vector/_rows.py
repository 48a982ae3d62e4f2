"""One environment's part of shared memory: what it returns is checked while it is written there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_ext_core.errors import EnvironmentOutputError

__all__ = ["Row", "kept", "rows_of"]


class Row:
    """Where one array of an environment's observations goes.

    :param key: of the array in the observation; None: it is the observation
    :param place: in shared memory

    :ivar changed: whether values had to be changed, at any time
    """

    def __init__(self, key: Any, place: np.ndarray[Any, Any]) -> None:
        self.key, self.place, self.changed = key, place, False
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
        return "the observation" if self.key is None else f"observation[{self.key!r}]"


def rows_of(index: int, kind: str, keys: Sequence[Any], fields: Sequence[np.ndarray[Any, Any]]) -> list[Row]:
    """Give the rows of an environment.

    :param index: of the environment among all
    :param kind: of its observations, see :class:`~rl_ext_core.vector._layout.Layout`
    :param keys: of their arrays
    :param fields: of all environments
    """
    return [Row(None if kind == "array" else key, field[index, ...]) for key, field in zip(keys, fields, strict=True)]


def kept(observation: Any) -> Any:
    """Copy an observation: an environment may write the next one to the same place."""
    if isinstance(observation, np.ndarray):
        return observation.copy()
    if type(observation) is dict:
        return {key: kept(value) for key, value in observation.items()}
    if type(observation) is tuple:
        return tuple(kept(value) for value in observation)
    return observation
