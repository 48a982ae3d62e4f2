"""What replay buffers and rollout buffers have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, DictRolloutBuffer

from rl_ext_core.errors import InvalidTypeError
from sb3_ext._observations import Observations
from sb3_ext._stores import OPTIONS, make_stores

_COPIED = 4096  # bytes


class HasObservations(BaseBuffer):
    """What replay buffers and rollout buffers do with the observations that they are made of."""

    _observations: Observations
    _FOR_OTHERS: str  # what to write for an observation space of the other kind

    def _open(
        self, space: spaces.Space[Any], places: tuple[int, int], *, num_threads: int | None, **options: Any
    ) -> None:
        takes_dict = isinstance(self, (DictReplayBuffer, DictRolloutBuffer))
        if isinstance(space, spaces.Dict) != takes_dict:
            given = f"a Dict of {list(space.spaces)}" if isinstance(space, spaces.Dict) else space
            expected = "a Dict" if takes_dict else "one image or vector"
            raise InvalidTypeError(f"observation_space is {given}, expected {expected}; {self._FOR_OTHERS}")
        self._observations = Observations(space, make_stores(space, places, **options), places, num_threads=num_threads)

    @property
    def codec(self) -> Any:
        """Name of the codec in use; with ``codec="auto"``, what was chosen so far. By key for a ``Dict``."""
        return self._observations.joined({key: store.codec for key, store in self._observations.stores.items()})

    @property
    def block_length(self) -> Any:
        """Number of frames in a block; with ``block_length=None``, what was chosen so far. By key for a ``Dict``."""
        return self._observations.joined({key: store.block_length for key, store in self._observations.stores.items()})

    @property
    def n_stack(self) -> Any:
        """Number of frames in an observation, as far as is known. By key for a ``Dict``."""
        stores = self._observations.stores
        return self._observations.joined({key: store.layout.n_stack for key, store in stores.items()})

    @property
    def num_threads(self) -> int | None:
        """Threads that decode large batches, or None for as many as ``torch.get_num_threads()``."""
        return self._observations.num_threads

    @num_threads.setter
    def num_threads(self, value: int | None) -> None:
        self._observations.num_threads = value

    def to_torch(self, array: np.ndarray, copy: bool = True) -> th.Tensor:
        """
        Convert an array to a tensor.

        :param array: The array
        :param copy: Whether to copy it. One that was decoded for a batch is not copied: nothing else refers to it
        :return: The tensor, on the device of the buffer
        """
        large = array.nbytes > _COPIED  # it takes as long to find out whether a small one has to be copied
        return super().to_torch(array, copy and not (large and self._observations.decoded(array)))


class TakesOptions(HasObservations):
    """Keeps the options of a store for one of our constructors, past one of upstream's that does not know them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._chosen = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        super().__init__(*args, **kwargs)

    def _open(self, space: spaces.Space[Any], places: tuple[int, int], **options: Any) -> None:
        super()._open(space, places, **{**options, **self.__dict__.pop("_chosen")})
