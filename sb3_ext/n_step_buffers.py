"""Compressed replay buffers with n-step returns, which Stable Baselines3 has since version 2.7."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.environments import check_count
from sb3_ext.caller_frames import find_creating_algorithm
from sb3_ext.prioritized import CompressedPrioritizedReplayBuffer
from sb3_ext.replay_buffers import CompressedReplayBuffer

_logger = logging.getLogger("sb3_ext")


class CompressedNStepReplayBuffer(CompressedReplayBuffer, NStepReplayBuffer):
    """
    Compressed replay buffer with n-step returns.

    It replaces :class:`stable_baselines3.common.buffers.NStepReplayBuffer`.

    ``n_steps`` and ``gamma`` are those of the algorithm that creates the buffer. With a custom class, Stable
    Baselines3 warns that it ignores the algorithm's ``n_steps``. To avoid the warning, pass ``n_steps`` only here::

        DQN("CnnPolicy", env, replay_buffer_class=CompressedNStepReplayBuffer, replay_buffer_kwargs={"n_steps": 3})

    :param args, kwargs: As in :class:`CompressedReplayBuffer`
    :param n_steps: Number of steps to accumulate rewards for; by default the algorithm's, or 3 if that is 1
    :param gamma: Discount factor; by default the algorithm's, or 0.99 without an algorithm
    :raises InvalidArgumentError: If the algorithm has another ``n_steps`` or ``gamma``.

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import CompressedNStepReplayBuffer
    >>> options = {"buffer_size": 1000, "replay_buffer_kwargs": {"n_steps": 3}}
    >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=CompressedNStepReplayBuffer, **options)
    >>> model.replay_buffer.n_steps
    3
    """

    _OTHER_CLASS_HINT = "As in Stable Baselines3, n-step returns do not support Dict observations"
    _NO_SEQUENCES = "its samples are not single steps. Use replay_buffer_class=CompressedReplayBuffer"

    def __init__(self, *args: Any, n_steps: int | None = None, gamma: float | None = None, **kwargs: Any) -> None:
        if kwargs.get("decode_on_gpu"):
            raise InvalidArgumentError(
                "decode_on_gpu=True is for single steps, but n-step returns need several. Leave it out"
            )
        # Algorithms pass both only to SB3's own class. Other values would silently change training.
        algorithm, _ = find_creating_algorithm(self)
        if n_steps is not None:
            n_steps = check_count("n_steps", n_steps)
        algorithm_value = getattr(algorithm, "n_steps", 1)
        if algorithm_value > 1:
            n_steps = _check_matches_algorithm("n_steps", n_steps, algorithm_value)
            _logger.warning(
                "n_steps=%d of the algorithm is used, although Stable Baselines3 warns that it is ignored", n_steps
            )
        if algorithm is not None:
            gamma = _check_matches_algorithm("gamma", gamma, algorithm.gamma)
        self.n_steps, self.gamma = 3 if n_steps is None else n_steps, 0.99 if gamma is None else gamma
        super().__init__(*args, **kwargs)

    def _samples_at(self, rows: np.ndarray, envs: np.ndarray, env: VecNormalize | None) -> ReplayBufferSamples:
        # SB3's method marks the newest transition as truncated while it samples. If the process were killed then, the
        # mark would stay in the files of storage_dir.
        steps, newest = np.arange(self.n_steps), (self.pos - 1) % self.buffer_size
        window = (rows[:, None] + steps) % self.buffer_size, envs[:, None]
        ends = (self.dones[window] != 0) | (self.timeouts[window] != 0) | (window[0] == newest)
        n_more = np.where(ends.any(axis=1), ends.argmax(axis=1), self.n_steps - 1)
        counts = steps <= n_more[:, None]
        discounts = self.gamma ** steps.astype(np.float32)
        rewards = self._normalize_reward(self.rewards[window], env) * discounts * counts
        last = (rows + n_more) % self.buffer_size, envs
        dones = self.dones[last] * (1 - self.timeouts[last])
        parts: tuple[Any, ...] = (
            self._normalize_obs(self.observations[rows, envs], env),
            self.actions[rows, envs],
            self._normalize_obs(self.next_observations[last], env),
            dones[:, None],
            rewards.sum(axis=1, keepdims=True),
            self.gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32),
        )
        return ReplayBufferSamples(*(self.to_torch(part, copy=False) for part in parts))


def _check_matches_algorithm(name: str, given_value: Any, algorithm_value: Any) -> Any:
    """Return the algorithm's value, or raise an error if the buffer was given another one."""
    if given_value is not None and given_value != algorithm_value:
        raise InvalidArgumentError(
            f"{name}={given_value!r} of the replay buffer differs from {name}={algorithm_value!r} of the algorithm. "
            f"Leave {name} out of replay_buffer_kwargs"
        )
    return algorithm_value


class CompressedPrioritizedNStepReplayBuffer(CompressedPrioritizedReplayBuffer, CompressedNStepReplayBuffer):
    """
    :class:`CompressedPrioritizedReplayBuffer` with n-step returns.

    :param args, kwargs: As in :class:`CompressedPrioritizedReplayBuffer` and :class:`CompressedNStepReplayBuffer`

    >>> model = DQN(  # doctest: +SKIP
    ...     "CnnPolicy", env, replay_buffer_class=CompressedPrioritizedNStepReplayBuffer
    ... )
    """

    _OTHER_CLASS_HINT = CompressedNStepReplayBuffer._OTHER_CLASS_HINT
