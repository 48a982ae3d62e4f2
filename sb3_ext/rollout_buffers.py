"""Rollout buffers that store images compressed. They replace those of :mod:`stable_baselines3.common.buffers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictRolloutBuffer, RolloutBuffer

from rl_ext_core.devices import resolve
from rl_ext_core.vector.environments import check_count
from sb3_ext.compressed_buffer import CompressedBuffer, atomic, atomic_start
from sb3_ext.observation_view import ObservationView

_ROWS = ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages")


class CompressedRolloutBuffer(CompressedBuffer, RolloutBuffer):
    """
    Rollout buffer that stores frames once and compressed, and decodes a minibatch at a time.

    With the same seed, its minibatches are bit-identical to those of
    :class:`stable_baselines3.common.buffers.RolloutBuffer`.

    :param buffer_size: Number of steps in a rollout
    :param observation_space: Observation space; not a ``Dict``
    :param action_space: Action space
    :param device: PyTorch device of the minibatches
    :param gae_lambda: Factor for trade-off of bias vs variance for Generalized Advantage Estimator
    :param gamma: Discount factor
    :param n_envs: Number of parallel environments
    :param codec, n_stack, max_error, quality, num_threads: Storage options, see
        :class:`CompressedReplayBuffer`
    :raises InvalidArgumentError: If an argument has an invalid value.
    :raises InvalidTypeError: If the observation space is a ``Dict``.
    :raises MissingDependencyError: If the codec needs a package that is not installed.
    :raises DeviceUnavailableError: If the device is not available.

    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import CompressedRolloutBuffer
    >>> model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, rollout_buffer_class=CompressedRolloutBuffer)
    >>> model.learn(64).num_timesteps
    64
    """

    _OTHER_CLASS_HINT = "Use rollout_buffer_class=CompressedDictRolloutBuffer"

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
        codec: str | Mapping[str, str] = "patch",
        n_stack: int | Mapping[str, int] | None = None,
        max_error: int | Mapping[str, int] = 0,
        quality: int | Mapping[str, int] = 95,
        num_threads: int | None = None,
    ) -> None:
        size, n_envs = check_count("buffer_size", buffer_size), check_count("n_envs", n_envs)
        options = {"codec": codec, "n_stack": n_stack, "max_error": max_error, "quality": quality}
        self._create_observations(observation_space, (size, n_envs), num_threads=num_threads, **options)
        device = resolve(device).compute
        RolloutBuffer.__init__(self, size, observation_space, action_space, device, gae_lambda, gamma, n_envs=n_envs)

    @atomic
    def reset(self) -> None:
        """Remove the rollout, before the next one."""
        # RolloutBuffer.reset would allocate uncompressed observations.
        shape = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*shape, self.action_dim), dtype=self.action_space.dtype)
        for name in _ROWS:
            setattr(self, name, np.zeros(shape, dtype=np.float32))
        self.generator_ready = False
        BaseBuffer.reset(self)
        self._observations.store.clear()
        self.observations = self._observations.views(writable=True)

    add: Any = atomic(RolloutBuffer.add)
    get: Any = atomic_start(RolloutBuffer.get)
    compute_returns_and_advantage = atomic(RolloutBuffer.compute_returns_and_advantage)

    def to_torch(self, array: np.ndarray, copy: bool = False) -> th.Tensor:
        """Convert an array to a tensor, by default without a copy, because SB3's buffers pass only new arrays."""
        return super().to_torch(array, copy)

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """Reshape an array or observations from ``(n_steps, n_envs, ...)`` to ``(n_envs * n_steps, ...)``."""
        return arr.swap_and_flatten() if isinstance(arr, ObservationView) else RolloutBuffer.swap_and_flatten(arr)

    @property
    def stored_nbytes(self) -> int:
        """Size of the rollout in bytes: frames, index, actions, rewards and flags."""
        return super().stored_nbytes + sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))


class CompressedDictRolloutBuffer(CompressedRolloutBuffer, DictRolloutBuffer):
    """
    :class:`CompressedRolloutBuffer` for ``Dict`` observations.

    It replaces :class:`stable_baselines3.common.buffers.DictRolloutBuffer`.

    :param options: Storage options, see :class:`CompressedDictReplayBuffer`
    :raises InvalidTypeError: If the observation space is not a ``Dict``.

    >>> model = PPO("MultiInputPolicy", env, rollout_buffer_class=CompressedDictRolloutBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "Use rollout_buffer_class=CompressedRolloutBuffer"
    add = atomic(DictRolloutBuffer.add)
    get = atomic_start(DictRolloutBuffer.get)
