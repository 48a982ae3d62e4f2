"""Hindsight experience replay of images in a fraction of the memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext._buffers import TakesOptions
from sb3_ext.replay_buffer import CompressedDictReplayBuffer


class CompressedHerReplayBuffer(TakesOptions, HerReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[override]
    """
    :class:`CompressedDictReplayBuffer` in place of :class:`stable_baselines3.her.her_replay_buffer.HerReplayBuffer`,
    whose arguments it takes. Without ``copy_info_dict`` no dictionaries are kept for infos, which nobody reads then.

    :param options: As in :class:`CompressedDictReplayBuffer`
    """

    _ROWS = (*CompressedDictReplayBuffer._ROWS, "ep_start", "ep_length")
    _NUMBERS = (*CompressedDictReplayBuffer._NUMBERS, "n_sampled_goal", "copy_info_dict", "_current_ep_start")
    _NOT_SAVED = (*CompressedDictReplayBuffer._NOT_SAVED, "env")
    _FOR_OTHERS = "hindsight needs the keys observation, achieved_goal and desired_goal"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.copy_info_dict:
            self.infos = self.infos[:0].copy()
        elif kwargs.get("storage_dir") is not None:
            self.close()
            raise InvalidArgumentError(
                "copy_info_dict=True keeps dictionaries, which storage_dir does not; leave one out"
            )
        self._allocate_episodes()
        if self.size():
            self._find_episodes()

    def _allocate_rows(self) -> None:
        super()._allocate_rows()
        self._allocate_episodes()

    def _allocate_episodes(self) -> None:
        self.ep_start = self._observations.group.rows("ep_start", (self.n_envs,), np.int64)
        self.ep_length = self._observations.group.changing_rows("ep_length", (self.n_envs,), np.int64)

    def _find_episodes(self) -> None:
        """Of what ``storage_dir`` held: those that are there from their start. What comes next begins new ones."""
        rows = (self.pos - self.size() + np.arange(self.size())) % self.buffer_size
        for env in range(self.n_envs):
            starts = self.ep_start[rows, env]
            ends = [*(np.flatnonzero(starts[1:] != starts[:-1]) + 1), len(rows)]
            for first, end in zip([0, *ends[:-1]], ends, strict=True):
                whole = starts[first] == rows[first]
                self.ep_length[rows[first:end], env] = whole * (end - first)
        self._current_ep_start[:] = self.pos

    def add(self, *args: Any, **kwargs: Any) -> None:
        """
        Add one transition of each environment.

        :param args, kwargs: As in :class:`CompressedDictReplayBuffer`
        """
        before = self.size()
        super().add(*args, **kwargs)
        held = self.size()
        if held < self._rows_written:
            self._forget_episodes(min(before + 1, self.buffer_size) - held)

    def _forget_episodes(self, count: int) -> None:
        """Those that lost some of their oldest transitions: as upstream does where they are overwritten."""
        gone = (self.pos - self.size() - 1 - np.arange(count)) % self.buffer_size
        for env in range(self.n_envs if count else 0):
            newest = gone[0]
            past = (newest - self.ep_start[newest, env]) % self.buffer_size
            rest = np.arange(max(self.ep_length[newest, env] - past, 0))
            self.ep_length[(newest + rest) % self.buffer_size, env] = 0
            self.ep_length[gone, env] = 0

    def truncate_last_trajectory(self) -> None:
        """Take the last trajectory for one that has ended, as upstream does."""
        super().truncate_last_trajectory()
        self._observations.group.newest_row_changed()

    def _compute_episode_length(self, env_idx: int) -> None:
        start = self._current_ep_start[env_idx]
        super()._compute_episode_length(env_idx)
        length = (self.pos - start) % self.buffer_size
        if length > self.size():
            self.ep_length[(start + np.arange(length)) % self.buffer_size, env_idx] = 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples:  # type: ignore[override]
        """
        Sample transitions, most of them with goals that were reached later.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        :raises RuntimeError: if no episode has ended yet
        :raises InvalidArgumentError: if there is no environment to compute rewards with
        """
        is_valid = self.ep_length > 0
        if not is_valid.any():
            return super().sample(batch_size, env)  # says why
        if self.env is None:
            raise InvalidArgumentError("the buffer has no environment to compute rewards with; call set_env(env) first")
        # The same calls to the generator as upstream, which takes each part of a batch out of the arrays by itself.
        picked = np.random.choice(np.flatnonzero(is_valid), size=batch_size, replace=True)
        n_virtual = int(self.her_ratio * batch_size)
        rows, envs = np.unravel_index(np.roll(picked, -n_virtual), is_valid.shape)
        virtual = slice(batch_size - n_virtual, None)
        obs, next_obs = self._observations.decode(rows, envs)
        obs["desired_goal"][virtual] = next_obs["desired_goal"][virtual] = self._sample_goals(
            rows[virtual], envs[virtual]
        )
        infos: Any = [{} for _ in picked[:n_virtual]]
        if self.copy_info_dict:
            infos = copy.deepcopy(self.infos[rows[virtual], envs[virtual]])
        rewards = self.rewards[rows, envs]
        rewards[virtual] = self.env.env_method(
            "compute_reward", next_obs["achieved_goal"][virtual], obs["desired_goal"][virtual], infos, indices=[0]
        )[0]
        samples: DictReplayBufferSamples = self._as_samples(rows, envs, obs, next_obs, rewards, env)
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return CompressedDictReplayBuffer.__getstate__(self)

    def __setstate__(self, state: Any) -> None:
        CompressedDictReplayBuffer.__setstate__(self, state)
        self.env = None  # set_env() brings it back
