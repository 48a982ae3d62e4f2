"""What all compressed buffers are made of: the observations of a space, ``Dict`` or not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.planning import MemoryWatch
from rl_ext_core.frames.recycle import RecycledArrays
from sb3_ext._arguments import at_least_one, with_shape
from sb3_ext._store_group import StoreGroup
from sb3_ext._stores import ALONE, naming, parts_of
from sb3_ext.observation_view import ObservationView, RolloutView

Places = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]


class Observations:
    """
    Observations go in and come out as Stable Baselines3 has them: an array, or a dictionary of arrays.

    :param space: Observation space
    :param group: A store for each part of the space
    :param places: ``(buffer_size, n_envs)``
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``
    :ivar watch: Warns where they will not fit into memory; None where that is no question
    """

    watch: MemoryWatch | None = None

    def __init__(
        self,
        space: spaces.Space[Any],
        group: StoreGroup,
        places: tuple[int, int],
        *,
        num_threads: int | None = None,
    ) -> None:
        self.group, self.stores, self._places, self._parts = group, group.stores, places, parts_of(space)
        self._alone = group.stores.get(ALONE)
        self.num_threads = None if num_threads is None else at_least_one("num_threads", num_threads)
        self._recycled = {key: RecycledArrays() for key in self.stores}

    def joined(self, parts: Mapping[Any, Any]) -> Any:
        """What belongs to the parts of the space, as Stable Baselines3 has it: by key, or the only one."""
        return parts[ALONE] if ALONE in parts else dict(parts)

    def append(self, obs: Any, next_obs: Any, *, row: int) -> None:
        """
        Store one transition of each environment in a row.

        :raises RlExtError: if it cannot be stored; then no store holds any of it
        """
        if self._alone is not None:  # there is nothing to keep in step with
            self._alone.append(*self._in_batches(ALONE, obs, next_obs), row=row)
            return
        staged = {
            key: self._stage(key, self._taken(key, obs, name="obs"), self._taken(key, next_obs, name="next_obs"))
            for key in self.stores
        }
        self.group.commit(staged, row)

    def _taken(self, key: Any, obs: Any, *, name: str) -> Any:
        if not isinstance(obs, Mapping) or key not in obs:
            there = f"has keys {list(obs)}" if isinstance(obs, Mapping) else f"is of type {type(obs).__name__}"
            raise InvalidArgumentError(f"{name} {there}, expected those of {list(self.stores)}; nothing was stored")
        return obs[key]

    def _stage(self, key: Any, obs: Any, next_obs: Any) -> npt.NDArray[np.uint64]:
        with naming(key):
            return self.stores[key].stage(*self._in_batches(key, obs, next_obs))

    def _in_batches(self, key: Any, *stacks: Any) -> tuple[Any, ...]:
        """Each with a leading dimension for the environments, which upstream's callers may leave out."""
        n_envs, part = self._places[1], self._parts[key]
        if n_envs == 1 or part.scalar:
            return tuple(with_shape(stack, (n_envs, *part.shape)) for stack in stacks)
        return stacks

    def _append_row(self, row: int, obs: Any, *, key: Any) -> None:
        if row >= self._places[0]:
            raise InvalidArgumentError(f"the rollout is full with {row} steps; call reset() before the next one")
        self.stores[key].commit(self._stage(key, obs, obs), row=row)

    def decode(self, rows: Places, envs: Places) -> tuple[Any, Any]:
        """Observations and next observations of a batch of places, in arrays that nobody else holds."""
        if self._alone is not None:
            obs, next_obs = self._empty(ALONE, len(rows)), self._empty(ALONE, len(rows))
            self._alone.get(rows, envs, obs, next_obs, num_threads=self._threads())
            return obs, next_obs
        before, after = ({key: self._empty(key, len(rows)) for key in self.stores} for _ in range(2))
        for key, store in self.stores.items():
            store.get(rows, envs, before[key], after[key], num_threads=self._threads())
        return self.joined(before), self.joined(after)

    def _decode_part(self, rows: Places, envs: Places, *, key: Any, following: bool) -> Array:
        found = self._empty(key, len(rows))
        outs = (None, found) if following else (found, None)
        self.stores[key].get(rows, envs, *outs, num_threads=self._threads())
        return found

    def _threads(self) -> int:
        return th.get_num_threads() if self.num_threads is None else self.num_threads

    def _empty(self, key: Any, n: int) -> Array:
        part = self._parts[key]
        return self._recycled[key].take((n, *part.shape), part.dtype)

    def decoded(self, array: Array) -> bool:
        """Whether the array is one that a batch was decoded into, or a view of it."""
        owner = array if array.base is None else array.base
        return any(recycled.holds(owner) for recycled in self._recycled.values())

    def views(self, *, following: bool) -> Any:
        """What Stable Baselines3 calls ``observations``, or ``next_observations``."""
        return self.joined({key: ObservationView(*self._described(key, following=following)) for key in self.stores})

    def rollout_views(self) -> Any:
        """What it calls ``observations`` in a rollout, which is filled by assignment."""
        return self.joined(
            {
                key: RolloutView(*self._described(key, following=False), append=partial(self._append_row, key=key))
                for key in self.stores
            }
        )

    def _described(self, key: Any, *, following: bool) -> tuple[Any, ...]:
        part = self._parts[key]
        return partial(self._decode_part, key=key, following=following), self._places, part.shape, part.dtype

    @property
    def recycled_nbytes(self) -> int:
        """Bytes of the arrays that batches are decoded into."""
        return sum(recycled.nbytes for recycled in self._recycled.values())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_alone", "_recycled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._alone = self.group.stores.get(ALONE)
        self._recycled = {key: RecycledArrays() for key in self.stores}
