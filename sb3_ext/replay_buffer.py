"""A replay buffer of images in a fraction of the memory, as a drop-in for Stable Baselines3's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.devices import resolve
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.planning import MemoryWatch
from sb3_ext._arguments import at_least_one, per_env
from sb3_ext._saving import SavedBuffer


class CompressedReplayBuffer(SavedBuffer, ReplayBuffer):
    """
    Replay buffer that stores every single frame once and compressed. For the same seed it returns the same bits in the
    same order as :class:`stable_baselines3.common.buffers.ReplayBuffer` does.

    Terminal observations are kept, so ``optimize_memory_usage`` and ``handle_timeout_termination`` may both be set
    (Stable Baselines3 refuses that, see its issue #934); the first one changes nothing here.

    :param buffer_size: Max number of transitions, over all environments
    :param observation_space: Observation space; not a ``Dict``
    :param action_space: Action space
    :param device: PyTorch device
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: Accepted and without effect: memory is saved in any case, and every transition can be
        sampled
    :param handle_timeout_termination: Handle timeout termination (due to timelimit) separately and treat the task as
        infinite horizon task
    :param codec: ``"auto"``, or ``"raw"``, ``"patch"``, ``"patch+lz4"`` (the smallest), ``"lz4"``, all lossless,
        or ``"jpeg"``, which is not
    :param n_stack: Frames in an observation, or None to find it from the data
    :param block_length: Frames in a block, a power of two, or None to choose it by what is seen. Longer blocks take
        less memory and more time to sample from
    :param max_error: How far off each value of an image may be; 0 is bit-exact
    :param quality: Of JPEG, 1 to 100
    :param max_bytes: Bytes that the buffer may hold; the oldest transitions go first. None for as many as it takes
    :param storage_dir: Folder that transitions are kept in instead of memory. What it holds is there again for the next
        buffer that is made with it, see ``recovered``
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``
    :raises InvalidArgumentError: if an argument has a value that cannot be used
    :raises InvalidTypeError: if the observation space is a ``Dict``
    :raises MissingDependencyError: if the codec needs a package that is not installed
    :raises DeviceUnavailableError: if the device is not there
    :raises StorageError: if ``storage_dir`` is in use, or cannot be written
    :raises CorruptFileError: if a file in it is damaged
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        codec: str | Mapping[str, str] = "auto",
        n_stack: int | Mapping[str, int] | None = None,
        block_length: int | Mapping[str, int] | None = None,
        max_error: int | Mapping[str, int] = 0,
        quality: int | Mapping[str, int] = 95,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        buffer_size, n_envs = at_least_one("buffer_size", buffer_size), at_least_one("n_envs", n_envs)
        # Not ReplayBuffer's: it would allocate what this class exists to avoid.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, resolve(device).compute, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False  # read by ``sample``: no row is invalid here
        self.handle_timeout_termination = handle_timeout_termination
        self._open(
            observation_space,
            (self.buffer_size, n_envs),
            codec=codec,
            n_stack=n_stack,
            block_length=block_length,
            max_error=max_error,
            quality=quality,
            max_bytes=max_bytes,
            storage_dir=storage_dir,
            num_threads=num_threads,
        )
        try:
            self._allocate_rows()
            self._observations.group.check_budget()
        except BaseException:
            self.close()
            raise
        # Not at the start where ``storage_dir`` holds what was added before.
        self.pos, self.full = self._observations.group.position, self._observations.group.full
        if max_bytes is None and storage_dir is None:
            rows = sum(getattr(self, name).nbytes for name in self._ROWS)
            self._observations.watch = MemoryWatch(list(self._observations.stores.values()), other_bytes=rows)
            self._observations.watch.look()

    _FOR_OTHERS = "use replay_buffer_class=CompressedDictReplayBuffer for it"

    @property
    def _on_cpu(self) -> bool:
        return th.device(self.device).type == "cpu"

    def _allocate_rows(self) -> None:
        rows, shape = self._observations.group.rows, (self.n_envs,)
        action_dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        self.actions = rows("actions", (*shape, self.action_dim), action_dtype)
        self.rewards, self.dones, self.timeouts = (
            rows(name, shape, np.float32) for name in ("rewards", "dones", "timeouts")
        )

    def size(self) -> int:
        """
        :return: Number of transitions held, an environment
        """
        return min(self._rows_written, self._observations.group.size)

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """The observations, shape ``(buffer_size, n_envs, *obs_shape)``, decoded when indexed; read-only."""
        return self._observations.views(following=False)

    @property
    def next_observations(self) -> Any:  # type: ignore[override]
        """The next observations, likewise."""
        return self._observations.views(following=True)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the transitions take: frames, index, actions, rewards and flags."""
        return self._observations.group.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held in memory: the transitions, and the arrays that batches are decoded into."""
        return self.stored_nbytes + self._observations.recycled_nbytes

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Add one transition of each environment.

        :param obs: Shape ``(n_envs, *obs_shape)``, of the observation space's dtype; without ``n_envs`` if there is one
        :param next_obs: Likewise; the terminal observation where an episode ended
        :param action: ``n_envs`` actions
        :param reward: ``n_envs`` rewards
        :param done: ``n_envs`` flags
        :param infos: ``n_envs`` dictionaries
        :raises InvalidArgumentError: if a shape or the number of environments is another one
        :raises InvalidTypeError: if a dtype does not fit without loss
        :raises OutOfMemoryError: if memory ran out. Whatever is raised, the buffer is as it was before
        """
        # All that can fail comes before the first change.
        action = per_env("action", action, (self.n_envs, self.action_dim), self.actions.dtype)
        reward = per_env("reward", reward, (self.n_envs,), self.rewards.dtype)
        done = per_env("done", done, (self.n_envs,), self.dones.dtype)
        if self.handle_timeout_termination:
            if len(infos) != self.n_envs:
                raise InvalidArgumentError(
                    f"infos has {len(infos)} entries, expected {self.n_envs}, one an environment; nothing was stored"
                )
            truncated = [info.get("TimeLimit.truncated", False) for info in infos]
            timeouts = per_env("TimeLimit.truncated", truncated, (self.n_envs,), self.timeouts.dtype)
        self._observations.append(obs, next_obs, row=self.pos)

        row = self.pos
        self.actions[row] = action
        self.rewards[row] = reward
        self.dones[row] = done
        if self.handle_timeout_termination:
            self.timeouts[row] = timeouts
        self.pos = row + 1
        if self.pos == MemoryWatch.KNOWN_AT and self._observations.watch is not None:
            self._observations.watch.look()
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    @property
    def recovered(self) -> Any:
        """What was found in ``storage_dir``: transitions ``kept``, ``lost`` and ``overwritten``, an environment; or
        None.
        """
        return self._observations.group.recovered

    def flush(self) -> None:
        """Make sure that what was added survives the process. Does nothing without ``storage_dir``."""
        self._observations.group.flush()

    def close(self) -> None:
        """Let another process open ``storage_dir``, with all that was added. Nothing can be sampled after."""
        self._observations.group.close()

    def reset(self) -> None:
        """Forget all transitions and give their memory back."""
        super().reset()
        self._observations.group.clear()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """
        Sample transitions.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        """
        if not self._observations.group.has_dropped:
            return super().sample(batch_size, env)
        held = self.size()
        rows = (self.pos - held + np.random.randint(0, held, size=batch_size)) % self.buffer_size
        return self._get_samples(rows, env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        # The same call to the generator as in the class this one stands in for.
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        obs, next_obs = self._observations.decode(batch_inds, env_indices)
        rewards = self.rewards[batch_inds, env_indices]
        return self._as_samples(batch_inds, env_indices, obs, next_obs, rewards, env)

    def _as_samples(
        self, rows: np.ndarray, envs: np.ndarray, obs: Any, next_obs: Any, rewards: np.ndarray, env: VecNormalize | None
    ) -> Any:
        dones = self.dones[rows, envs] * (1 - self.timeouts[rows, envs])
        rewards = rewards.reshape(-1, 1)
        if env is not None:
            obs, next_obs = self._normalize_obs(obs, env), self._normalize_obs(next_obs, env)
            rewards = self._normalize_reward(rewards, env)
        actions = self.actions[rows, envs, :]
        # All of these are fresh arrays, or recycled ones that nobody else sees: no copy is needed.
        tensor = th.from_numpy if self._on_cpu else self.to_torch
        parts = tensor(actions), tensor(dones.reshape(-1, 1)), tensor(rewards)
        if not isinstance(obs, dict):
            return ReplayBufferSamples(tensor(obs), parts[0], tensor(next_obs), *parts[1:])
        both = ({key: tensor(array) for key, array in part.items()} for part in (obs, next_obs))
        return DictReplayBufferSamples(next(both), parts[0], next(both), *parts[1:])


class CompressedDictReplayBuffer(CompressedReplayBuffer, DictReplayBuffer):  # type: ignore[misc,override]
    """
    :class:`CompressedReplayBuffer` for ``Dict`` observations, in place of
    :class:`stable_baselines3.common.buffers.DictReplayBuffer`. Each key is stored by itself: images compressed, and
    short vectors as they are, but one that is both a next observation and the observation after it only once.

    :param options: As in :class:`CompressedReplayBuffer`. A dictionary gives an option by key, such as
        ``codec={"camera": "patch+lz4"}``; any other value holds for the images, which are the keys of two or more
        dimensions
    :raises InvalidTypeError: if the observation space is no ``Dict``
    """

    _FOR_OTHERS = "use replay_buffer_class=CompressedReplayBuffer for it"
