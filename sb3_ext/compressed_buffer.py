"""Base class of the compressed buffers, and calls that take effect completely or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, DictRolloutBuffer

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidTypeError
from sb3_ext.observations import Observations

_Method = TypeVar("_Method", bound=Callable[..., Any])


def atomic(method: _Method) -> _Method:
    """Make a method atomic: defer Ctrl-C and block threads that save the buffer until it returns."""

    @defer_signals
    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Any:
        with self._observations.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def atomic_start(method: _Method) -> _Method:
    """Make a generator atomic up to its first item, before which it reorders the arrays."""

    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items = method(self, *args, **kwargs)
        yield atomic(lambda _: next(items))(self)
        yield from items

    return call  # type: ignore[return-value]


class CompressedBuffer(BaseBuffer):
    """Base class of all compressed buffers, with their observations and storage options."""

    _observations: Observations
    _OTHER_CLASS_HINT: str  # advice for an observation space of the other kind

    def _create_observations(self, space: spaces.Space[Any], buffer_shape: tuple[int, int], **options: Any) -> None:
        """Create the store of observations; refuse a space that this class is not for."""
        takes_dict = isinstance(self, (DictReplayBuffer, DictRolloutBuffer))
        if isinstance(space, spaces.Dict) != takes_dict:
            given = f"a Dict of {list(space.spaces)}" if isinstance(space, spaces.Dict) else space
            expected = "a Dict" if takes_dict else "one image or vector"
            raise InvalidTypeError(f"observation_space is {given}, expected {expected}. {self._OTHER_CLASS_HINT}")
        self._observations = Observations.create(space, buffer_shape, **options)

    @property
    def codec(self) -> Any:
        """Codec in use; ``"raw"`` if frames are too small for patches. A dict by key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.codec)

    @property
    def n_stack(self) -> Any:
        """Frames per observation, as set or as detected so far. A dict by key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.layout.n_stack)

    @property
    def stored_nbytes(self) -> int:
        """Size of all stored transitions in bytes: frames, index, actions, rewards and flags."""
        return self._observations.store.nbytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of all stored transitions and of the arrays that batches are decoded into."""
        return self.stored_nbytes + self._observations.recycled_nbytes
