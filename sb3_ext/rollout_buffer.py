"""Rollout buffers of images in a fraction of the memory, as drop-ins for Stable Baselines3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictRolloutBuffer, RolloutBuffer

from rl_ext_core.devices import resolve
from sb3_ext._arguments import at_least_one
from sb3_ext._buffers import HasObservations
from sb3_ext.observation_view import RolloutView

_ROWS = ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages")


class CompressedRolloutBuffer(HasObservations, RolloutBuffer):
    """
    Rollout buffer that stores every single frame once and compressed, and decodes one minibatch at a time. For the same
    seed it returns the same bits in the same order as :class:`stable_baselines3.common.buffers.RolloutBuffer` does.

    :param buffer_size: Number of steps in a rollout
    :param observation_space: Observation space; not a ``Dict``
    :param action_space: Action space
    :param device: PyTorch device
    :param gae_lambda: Factor for trade-off of bias vs variance for Generalized Advantage Estimator
    :param gamma: Discount factor
    :param n_envs: Number of parallel environments
    :param codec, n_stack, block_length, max_error, quality, num_threads: As in :class:`CompressedReplayBuffer`
    :raises InvalidArgumentError: if an argument has a value that cannot be used
    :raises InvalidTypeError: if the observation space is a ``Dict``
    :raises MissingDependencyError: if the codec needs a package that is not installed
    :raises DeviceUnavailableError: if the device is not there
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        codec: str | Mapping[str, str] = "auto",
        n_stack: int | Mapping[str, int] | None = None,
        block_length: int | Mapping[str, int] | None = None,
        max_error: int | Mapping[str, int] = 0,
        quality: int | Mapping[str, int] = 95,
        num_threads: int | None = None,
    ) -> None:
        buffer_size, n_envs = at_least_one("buffer_size", buffer_size), at_least_one("n_envs", n_envs)
        self._open(
            observation_space,
            (buffer_size, n_envs),
            codec=codec,
            n_stack=n_stack,
            block_length=block_length,
            max_error=max_error,
            quality=quality,
            num_threads=num_threads,
        )
        device = resolve(device).compute
        super().__init__(buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs=n_envs)

    _FOR_OTHERS = "use rollout_buffer_class=CompressedDictRolloutBuffer for it"

    def reset(self) -> None:
        """Forget the rollout, for the next one."""
        # Not RolloutBuffer's: it would allocate what this class exists to avoid.
        shape = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*shape, self.action_dim), dtype=self.action_space.dtype)
        for name in _ROWS:
            setattr(self, name, np.zeros(shape, dtype=np.float32))
        self.generator_ready = False
        BaseBuffer.reset(self)
        self._observations.group.clear()
        self.observations = self._observations.rollout_views()

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        """
        Compute returns and advantages of a rollout that is complete.

        :param last_values: State values behind the last step, one an environment
        :param dones: Whether the last step ended an episode
        """
        super().compute_returns_and_advantage(last_values, dones)
        self._observations.group.rest()

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """
        Swap and then flatten axes 0 (buffer_size) and 1 (n_envs), of an array or of the observations.

        :param arr: Shape ``(buffer_size, n_envs, ...)``
        :return: Shape ``(buffer_size * n_envs, ...)``
        """
        return arr.flattened() if isinstance(arr, RolloutView) else RolloutBuffer.swap_and_flatten(arr)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the rollout takes: frames, index, actions, rewards and so on."""
        rows = sum(value.nbytes for value in self.__dict__.values() if isinstance(value, np.ndarray))
        return rows + self._observations.group.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held in memory: the rollout, and the arrays that minibatches are decoded into."""
        return self.stored_nbytes + self._observations.recycled_nbytes


class CompressedDictRolloutBuffer(CompressedRolloutBuffer, DictRolloutBuffer):
    """
    :class:`CompressedRolloutBuffer` for ``Dict`` observations, in place of
    :class:`stable_baselines3.common.buffers.DictRolloutBuffer`.

    :param options: As in :class:`CompressedDictReplayBuffer`
    :raises InvalidTypeError: if the observation space is no ``Dict``
    """

    _FOR_OTHERS = "use rollout_buffer_class=CompressedRolloutBuffer for it"
