"""A replay buffer of images in a fraction of the memory, as a drop-in for Stable Baselines3's."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core.devices import resolve
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, RlExtError
from rl_ext_core.frames import AdaptiveStore
from rl_ext_core.frames.recycle import RecycledArrays
from rl_ext_core.frames.store import checksum
from sb3_ext._arguments import at_least_one, per_env, with_shape
from sb3_ext.observation_view import ObservationView

FORMAT_VERSION = 1
_SIZES = ("buffer_size", "n_envs", "pos", "full", "handle_timeout_termination", "action_dim")
_ROWS = ("actions", "rewards", "dones", "timeouts")


class CompressedReplayBuffer(ReplayBuffer):
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
    :param codec: ``"auto"``, or ``"raw"``, ``"patch"``, ``"patch+lz4"`` (the smallest), or ``"lz4"``; all are lossless
    :param n_stack: Frames in an observation, or None to find it from the data
    :param block_length: Frames in a block, a power of two, or None to choose it by what is seen. Longer blocks take
        less memory and more time to sample from
    :param num_threads: Threads that decode large batches, or None for as many as ``torch.get_num_threads()``
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
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        codec: str = "auto",
        n_stack: int | None = None,
        block_length: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        buffer_size, n_envs = at_least_one("buffer_size", buffer_size), at_least_one("n_envs", n_envs)
        n_stack, block_length, num_threads = (
            value if value is None else at_least_one(name, value)
            for name, value in (("n_stack", n_stack), ("block_length", block_length), ("num_threads", num_threads))
        )
        if isinstance(observation_space, spaces.Dict):
            raise InvalidTypeError(
                f"observation_space is a Dict of {list(observation_space.spaces)}, expected one image or vector; use "
                "replay_buffer_class=DictReplayBuffer of stable_baselines3 for it"
            )
        # Not ReplayBuffer's: it would allocate what this class exists to avoid.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, resolve(device).compute, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False  # read by ``sample``: no row is invalid here
        self.handle_timeout_termination = handle_timeout_termination
        self.num_threads = num_threads
        self._recycled = RecycledArrays()
        self._store = AdaptiveStore(
            self.buffer_size,
            n_envs,
            self.obs_shape,
            np.dtype(observation_space.dtype),
            codec=codec,
            n_stack=n_stack,
            block_length=block_length,
        )
        self._allocate_rows()

    @property
    def _on_cpu(self) -> bool:
        return th.device(self.device).type == "cpu"

    def _allocate_rows(self) -> None:
        shape = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*shape, self.action_dim), dtype=self._maybe_cast_dtype(self.action_space.dtype))
        self.rewards = np.zeros(shape, dtype=np.float32)
        self.dones = np.zeros(shape, dtype=np.float32)
        self.timeouts = np.zeros(shape, dtype=np.float32)

    @property
    def observations(self) -> ObservationView:  # type: ignore[override]
        """The observations, shape ``(buffer_size, n_envs, *obs_shape)``, decoded when indexed; read-only."""
        return ObservationView(self._store, (self.buffer_size, self.n_envs), following=False)

    @property
    def next_observations(self) -> ObservationView:  # type: ignore[override]
        """The next observations, likewise."""
        return ObservationView(self._store, (self.buffer_size, self.n_envs), following=True)

    @property
    def codec(self) -> str:
        """Name of the codec in use; with ``codec="auto"``, what was chosen so far."""
        return self._store.codec

    @property
    def block_length(self) -> int:
        """Number of frames in a block; with ``block_length=None``, what was chosen so far."""
        return self._store.block_length

    @property
    def n_stack(self) -> int:
        """Number of frames in an observation, as far as is known."""
        return self._store.layout.n_stack

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the transitions take: frames, index, actions, rewards and flags."""
        rows = sum(int(getattr(self, name)[: self.size()].nbytes) for name in _ROWS)
        return self._store.nbytes + rows

    @property
    def nbytes(self) -> int:
        """Bytes held in memory: the transitions, and the arrays that batches are decoded into."""
        return self.stored_nbytes + self._recycled.nbytes

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
        shape = (self.n_envs, *self.obs_shape)
        if self.n_envs == 1 or isinstance(self.observation_space, spaces.Discrete):
            obs, next_obs = (with_shape(stack, shape) for stack in (obs, next_obs))
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
        self._store.append(obs, next_obs, row=self.pos)

        row = self.pos
        self.actions[row] = action
        self.rewards[row] = reward
        self.dones[row] = done
        if self.handle_timeout_termination:
            self.timeouts[row] = timeouts
        self.pos = row + 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def reset(self) -> None:
        """Forget all transitions and give their memory back."""
        super().reset()
        self._store.clear()

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ReplayBufferSamples:
        # The same call to the generator as in the class this one stands in for.
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        observations: tuple[Any, Any] = self._decode(batch_inds, env_indices)
        not_timeouts = 1 - self.timeouts[batch_inds, env_indices]
        dones = self.dones[batch_inds, env_indices] * not_timeouts
        rewards = self.rewards[batch_inds, env_indices].reshape(-1, 1)
        if env is not None:
            observations = self._normalize_obs(observations[0], env), self._normalize_obs(observations[1], env)
            rewards = self._normalize_reward(rewards, env)
        actions = self.actions[batch_inds, env_indices, :]
        parts = (observations[0], actions, observations[1], dones.reshape(-1, 1), rewards)
        if self._on_cpu:
            # All of these are fresh arrays, or recycled ones that nobody else sees: no copy is needed.
            return ReplayBufferSamples(*map(th.from_numpy, parts))
        return ReplayBufferSamples(*map(self.to_torch, parts))

    def _decode(self, rows: np.ndarray, envs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(rows), *self.obs_shape)
        dtype = np.dtype(self.observation_space.dtype)
        stacks = self._recycled.take(shape, dtype)
        next_stacks = self._recycled.take(shape, dtype)
        num_threads = th.get_num_threads() if self.num_threads is None else self.num_threads
        self._store.get(rows, envs, stacks, next_stacks, num_threads=num_threads)
        return stacks, next_stacks

    @classmethod
    def load(cls, path: str | pathlib.Path, device: th.device | str = "auto") -> CompressedReplayBuffer:
        """
        Load a buffer that ``model.save_replay_buffer(path)`` wrote. ``model.load_replay_buffer(path)`` does it too,
        with pickle's own errors for damaged files.

        :param path: The file; ``.pkl`` may be left out
        :param device: PyTorch device for the samples
        :return: The buffer
        :raises CorruptFileError: if the file is damaged, cut short, or holds something else
        """
        try:
            # Not load_from_pkl: it leaves the file open where it fails.
            with open_path(path, "r", suffix="pkl") as file:
                buffer = pickle.load(file)
        except (RlExtError, OSError):
            raise
        except Exception as error:  # damaged bytes can make pickle do anything
            raise CorruptFileError(
                f"{path} is cut short, damaged, or no replay buffer ({type(error).__name__}: {error}); "
                "write it with model.save_replay_buffer(path)"
            ) from error
        if not isinstance(buffer, cls):
            raise CorruptFileError(f"{path} holds a {type(buffer).__name__}, expected a {cls.__name__}")
        buffer.device = resolve(device).compute
        return buffer

    def __getstate__(self) -> dict[str, Any]:
        # Views of the rows in use: pickle protocol 5 writes them without a copy.
        state = {name: value for name, value in self.__dict__.items() if name != "_recycled"}
        rows = {name: getattr(self, name)[: self.size()] for name in _ROWS}
        state = {**state, **rows, "format": FORMAT_VERSION}
        return {**state, "checksum": _checksum(state)}

    def __setstate__(self, state: Any) -> None:
        state = dict(state) if isinstance(state, dict) else {}
        version = state.get("format")
        if version != FORMAT_VERSION:
            raise CorruptFileError(
                f"the replay buffer has format {version!r}, this version reads {FORMAT_VERSION}; "
                "load it with the version of rl-ext that wrote it"
            )
        if state.pop("checksum", None) != _checksum(state):
            raise CorruptFileError("the replay buffer is damaged: its checksum does not match its contents")
        del state["format"]
        rows = {name: state.pop(name) for name in _ROWS}
        self.__dict__.update(state)
        self._recycled = RecycledArrays()
        self._allocate_rows()
        for name, stored in rows.items():
            getattr(self, name)[: len(stored)] = stored


def _checksum(state: dict[str, Any]) -> int:
    """Of the names of all that a file holds, and of what is in no checksum of its own."""
    sizes = [int(state.get(name, -1)) for name in _SIZES]
    return checksum([sorted(state), sizes, [state.get(name) for name in _ROWS]])
