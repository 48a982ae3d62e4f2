"""Compressed replay buffer for hindsight experience replay."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.environments import check_count
from sb3_ext.compressed_buffer import atomic
from sb3_ext.replay_buffers import CompressedDictReplayBuffer


class CompressedHerReplayBuffer(CompressedDictReplayBuffer, HerReplayBuffer):  # type: ignore[override]
    """
    Compressed replay buffer for hindsight experience replay.

    It replaces :class:`stable_baselines3.her.her_replay_buffer.HerReplayBuffer`, with its arguments. Without
    ``copy_info_dict``, infos are not stored, because nothing reads them.

    :param options: Storage options, see :class:`CompressedDictReplayBuffer`
    :raises InvalidArgumentError: If ``achieved_goal`` and ``desired_goal`` differ in shape or dtype, or as in
        :class:`CompressedDictReplayBuffer`.

    >>> model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedHerReplayBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "Hindsight needs the keys observation, achieved_goal and desired_goal"
    _NO_SEQUENCES = "it replaces the goals of single steps. Use replay_buffer_class=CompressedDictReplayBuffer"
    env: VecEnv | None = None  # a loaded buffer has none before set_env()
    _current_ep_start: Any = -1  # rows in which the running episodes started; a buffer that is being created has none

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        if options.pop("decode_on_gpu", False):
            raise InvalidArgumentError(
                "decode_on_gpu=True is not for hindsight, which changes sampled goals on the CPU. Leave it out"
            )
        if copy_info_dict and options.get("storage_dir") is not None:
            raise InvalidArgumentError(
                "copy_info_dict=True stores dicts, which storage_dir does not support. Leave one of them out"
            )
        if isinstance(goal_selection_strategy, str):
            goal_selection_strategy = KEY_TO_GOAL_STRATEGY.get(goal_selection_strategy.lower(), goal_selection_strategy)
        if not isinstance(goal_selection_strategy, GoalSelectionStrategy):
            raise InvalidArgumentError(
                f"goal_selection_strategy={goal_selection_strategy!r}: expected one of {[*KEY_TO_GOAL_STRATEGY]}"
            )
        if isinstance(observation_space, spaces.Dict):  # others are refused below
            goals: Any = [observation_space.spaces.get(key) for key in ("achieved_goal", "desired_goal")]
            if None in goals or goals[0].shape != goals[1].shape or not np.can_cast(goals[0].dtype, goals[1].dtype):
                raise InvalidArgumentError(
                    f"achieved_goal is {goals[0]} and desired_goal is {goals[1]}: expected spaces of the same shape "
                    "and dtype, because hindsight replaces desired goals by achieved ones"
                )
        # HerReplayBuffer's constructor would replace the arrays of the store.
        self.env, self.copy_info_dict = env, copy_info_dict
        self.goal_selection_strategy = goal_selection_strategy
        self.n_sampled_goal = check_count("n_sampled_goal", n_sampled_goal, least=0)
        self.her_ratio = 1 - 1.0 / (self.n_sampled_goal + 1)
        options |= {"device": device, "n_envs": n_envs, "optimize_memory_usage": optimize_memory_usage}
        options["handle_timeout_termination"] = handle_timeout_termination
        super().__init__(buffer_size, observation_space, action_space, **options)
        shape = self.buffer_size if copy_info_dict else 0, self.n_envs
        self.infos = np.array([{} for _ in range(shape[0] * shape[1])], dtype=object).reshape(shape)
        self._current_ep_start = np.full(self.n_envs, self.pos, dtype=np.int64)

    def _row_fields(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        return [("ep_start", np.dtype(np.int64), (self.n_envs,)), *super()._row_fields()]

    def _allocate_arrays(self) -> None:
        """Set the arrays of transitions, and the lengths of their episodes."""
        super()._allocate_arrays()
        self.ep_length = self._arrays["ep_length"] = np.zeros((self.buffer_size, self.n_envs), np.int64)
        rows = self._stored_rows()
        has_ended = self.ep_start[self.pos - 1] != self._current_ep_start  # a saved buffer may have running episodes
        for env in range(self.n_envs if len(rows) else 0):
            starts = self.ep_start[rows, env]
            # Two episodes in succession may have the same start, if the first one went once around the ring.
            is_first = np.append(True, (starts[1:] != starts[:-1]) | (starts[1:] == rows[1:]))
            firsts = np.flatnonzero(is_first)
            # SB3 does not sample an episode that is as long as the buffer.
            lengths = np.diff(firsts, append=len(rows)) % self.buffer_size
            lengths *= starts[firsts] == rows[firsts]  # others have lost their beginning
            lengths[-1] *= has_ended[env]
            self.ep_length[rows, env] = lengths[np.cumsum(is_first) - 1]

    @atomic
    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition of each environment, see :meth:`CompressedReplayBuffer.add`."""
        # HerReplayBuffer.add changes the row of the oldest transition before it is overwritten. After an error it would
        # stay changed.
        row, before = self.pos, self.size()
        self._row["ep_start"] = self._current_ep_start
        super().add(obs, next_obs, action, reward, done, infos)
        self._forget_episodes(self._lost_rows(before))
        if self.copy_info_dict:
            self.infos[row] = infos
        for env in np.flatnonzero(done).tolist():
            self._compute_episode_length(env)

    def _forget_episodes(self, lost: np.ndarray) -> None:
        """Set ``ep_length`` of lost rows to 0, and of episodes that have lost their beginning, as HER skips zeros."""
        oldest = self._observations.store.first
        for env in np.flatnonzero(self.ep_length[lost].any(axis=0)).tolist():
            past = (oldest - self.ep_start[oldest, env]) % self.buffer_size
            n_left = max(self.ep_length[oldest, env] - past, 0) if past else 0
            rest = (oldest + np.arange(n_left)) % self.buffer_size
            self._set_episode_length(np.append(lost, rest), env, 0)

    @atomic
    def reset(self) -> None:
        """
        Remove all transitions and free their memory.

        Unlike SB3's buffer, which keeps sampling the old episodes after ``reset()``, this one starts empty.
        """
        super().reset()
        self._current_ep_start[:] = 0

    @atomic
    def truncate_last_trajectory(self) -> None:
        """Treat the last trajectory as ended, as SB3 does."""
        super().truncate_last_trajectory()
        self._observations.store.write_newest_data()

    def _compute_episode_length(self, env_idx: int) -> None:
        """End the running episode of an environment, without HER if its start was dropped."""
        start = self._current_ep_start[env_idx]
        length = (self.pos - start) % self.buffer_size
        rows = (start + np.arange(length)) % self.buffer_size
        self._set_episode_length(rows, env_idx, length if length <= self.size() else 0)
        self._current_ep_start[env_idx] = self.pos

    def _set_episode_length(self, rows: np.ndarray, env_idx: int, length: int) -> None:
        """Set ``ep_length`` of the rows of an episode. HER does not sample rows with 0."""
        self.ep_length[rows, env_idx] = length

    def _saved_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._saved_attributes().items() if name != "env"}

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples:  # type: ignore[override]
        """
        Sample transitions, most of them with goals that were achieved later in the episode.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        :raises RuntimeError: If no episode has ended yet.
        :raises InvalidArgumentError: If there is no environment to compute rewards with, or it does not return one
            reward per goal.
        """
        with self._observations.lock:  # another thread could add
            is_valid = self.ep_length > 0
            if not is_valid.any():
                return HerReplayBuffer.sample(self, batch_size, env)  # raises the RuntimeError
            # SB3 makes the same calls to the generator, but reads each part of a batch separately.
            picked = np.random.choice(np.flatnonzero(is_valid), size=batch_size, replace=True)
            rows, envs = np.unravel_index(np.roll(picked, -int(self.her_ratio * batch_size)), is_valid.shape)
            return self._samples_at(rows, envs, env)

    def _samples_at(self, rows: np.ndarray, envs: np.ndarray, env: VecNormalize | None) -> DictReplayBufferSamples:
        """Return the samples of these transitions, of which the last ones get goals that were achieved later."""
        if self.env is None:
            raise InvalidArgumentError("the buffer has no environment to compute rewards with. Call set_env(env) first")
        virtual = slice(len(rows) - int(self.her_ratio * len(rows)), None)
        obs, next_obs = self._observations.decode(rows, envs)
        obs["desired_goal"][virtual] = next_obs["desired_goal"][virtual] = self._sample_goals(
            rows[virtual], envs[virtual]
        )
        infos: Any = [{} for _ in rows[virtual]]
        if self.copy_info_dict:
            infos = copy.deepcopy(self.infos[rows[virtual], envs[virtual]])
        rewards = self.rewards[rows, envs]
        achieved, desired = next_obs["achieved_goal"][virtual], obs["desired_goal"][virtual]
        computed = np.asarray(self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])[0])
        if computed.size != len(desired):
            raise InvalidArgumentError(
                f"compute_reward() returned {computed.size} rewards for {len(desired)} goals, expected one per goal. "
                "Reduce only the last axis, for example: -np.linalg.norm(achieved_goal - desired_goal, axis=-1)"
            )
        rewards[virtual] = computed.reshape(-1)
        samples: DictReplayBufferSamples = self._make_samples(rows, envs, obs, next_obs, rewards, env)
        return samples
