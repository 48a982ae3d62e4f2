"""
Drop-in replacements for Stable Baselines3's buffers that store images compressed.

They replace the classes of :mod:`stable_baselines3.common.buffers`, in the order of that module.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import os
import pathlib
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.buffers import (
    BaseBuffer,
    DictReplayBuffer,
    DictRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.datasets import write_dataset
from rl_ext_core.devices import resolve
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.checkpoint import as_corrupt_pickle, checksum, format_error, reduce_with_lock
from rl_ext_core.frames.gpu_decode import check_decode_on_gpu
from rl_ext_core.frames.planning import MemoryWatch
from rl_ext_core.vector.environments import check_count
from sb3_ext.datasets import load_buffer, read_buffer_episodes
from sb3_ext.observation_view import ObservationView
from sb3_ext.observations import STORE_OPTIONS, Observations
from sb3_ext.sequences import SequenceSamples, sequences_around

FORMAT_VERSION = 1
# Smaller arrays are always copied: checking whether one was decoded takes as long.
_SMALL_NBYTES = 4096
_BOOL = np.dtype(np.bool_)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Buffer = TypeVar("_Buffer", bound="CompressedReplayBuffer")
_logger = logging.getLogger("sb3_ext")


def atomic(method: _Method) -> _Method:
    """Make a method atomic: defer Ctrl-C and block threads that save the buffer until it returns."""

    @defer_signals
    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Any:
        """Call the method with signals deferred and the buffer's lock held."""
        with self._observations.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def atomic_start(method: _Method) -> _Method:
    """Make a generator atomic up to its first item, before which it reorders the arrays."""

    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the method's items; the first one is made with signals deferred and the lock held."""
        items = method(self, *args, **kwargs)
        yield atomic(lambda _: next(items))(self)
        yield from items

    return call  # type: ignore[return-value]


def without_copy(method: _Method) -> _Method:
    """Let an SB3 method skip the copy in ``to_torch`` of arrays that were decoded for this call."""

    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Any:
        """Call the method with ``_may_skip_copy`` set."""
        self._may_skip_copy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_may_skip_copy", None)

    return call  # type: ignore[return-value]


class CompressedBuffer(BaseBuffer):
    """Base class of all compressed buffers, with their observations and storage options."""

    _observations: Observations
    _OTHER_CLASS_HINT: str  # advice for an observation space of the other kind
    _may_skip_copy = False

    def _create_observations(self, space: spaces.Space[Any], buffer_shape: tuple[int, int], **options: Any) -> None:
        """Create the store of observations; refuse a space that this class is not for."""
        takes_dict = isinstance(self, (DictReplayBuffer, DictRolloutBuffer))
        if isinstance(space, spaces.Dict) != takes_dict:
            given = f"a Dict of {list(space.spaces)}" if isinstance(space, spaces.Dict) else space
            expected = "a Dict" if takes_dict else "one image or vector"
            raise InvalidTypeError(f"observation_space is {given}, expected {expected}. {self._OTHER_CLASS_HINT}")
        options |= self.__dict__.pop("_store_options", {})
        options["row_fields"] = self._row_fields()
        if options.get("storage_dir") is not None and _is_built_by_load(self):
            options["resume"] = True
        self._observations = Observations(space, buffer_shape, **options)

    def _row_fields(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """Return name, dtype and shape of the values that are stored with the observations of each row."""
        return []

    @property
    def codec(self) -> Any:
        """Codec in use; ``"raw"`` if frames are too small for patches. A dict by key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.codec)

    @property
    def n_stack(self) -> Any:
        """Frames per observation, as set or as detected so far. A dict by key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.layout.n_stack)

    @property
    def num_threads(self) -> int | None:
        """Number of threads that decode large batches; None for ``torch.get_num_threads()``."""
        return self._observations.num_threads

    @num_threads.setter
    def num_threads(self, value: int | None) -> None:
        self._observations.num_threads = value

    @property
    def stored_nbytes(self) -> int:
        """Size of all stored transitions in bytes: frames, index, actions, rewards and flags."""
        return self._observations.store.nbytes

    @property
    def nbytes(self) -> int:
        """Size in bytes of all stored transitions and of the arrays that batches are decoded into."""
        return self.stored_nbytes + self._observations.recycled_nbytes

    def to_torch(self, array: np.ndarray, copy: bool = True) -> th.Tensor:
        """
        Convert an array to a tensor.

        :param array: Array to convert
        :param copy: Whether to copy it, default True. Batches skip the copy of arrays that were decoded for them
        :return: Tensor on the device of the buffer
        """
        skip_copy = self._may_skip_copy and array.nbytes > _SMALL_NBYTES and self._observations.is_decoded_batch(array)
        return super().to_torch(array, copy and not skip_copy)


class StoreOptionsMixin(CompressedBuffer):
    """Mixin that removes store options from the arguments of an SB3 constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._store_options = {name: kwargs.pop(name) for name in STORE_OPTIONS if name in kwargs}
        super().__init__(*args, **kwargs)


class CompressedReplayBuffer(CompressedBuffer, ReplayBuffer):
    """
    Replay buffer that stores each frame once and compressed.

    With the same seed, its samples are bit-identical to those of
    :class:`stable_baselines3.common.buffers.ReplayBuffer`.

    Terminal observations are stored, so ``optimize_memory_usage`` and ``handle_timeout_termination`` may both be set.
    Stable Baselines3 refuses that, see its issue #934.

    :param buffer_size: Maximum number of transitions, over all environments
    :param observation_space: Observation space; not a ``Dict``
    :param action_space: Action space
    :param device: PyTorch device of the samples
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: Accepted, without effect: memory is saved in any case, and every transition can be
        sampled
    :param handle_timeout_termination: Handle timeout termination (due to timelimit) separately and treat the task as
        infinite horizon task
    :param codec: ``"patch"`` (the default) or ``"raw"`` (uncompressed), both lossless; or ``"jpeg"``, which is lossy
    :param n_stack: Frames per observation; by default detected from the data
    :param max_error: Maximum error of each value of an image; 0, the default, is bit-exact
    :param quality: JPEG quality, 1 to 100
    :param max_bytes: Size limit in bytes. The oldest transitions are dropped to stay within it. By default unlimited
    :param storage_dir: Folder to store transitions in, instead of memory. A saved model continues in it after
        ``load()``; a saved replay buffer refers to it
    :param resume: Whether a new model continues with the transitions in ``storage_dir``, see ``recovered``. By default,
        a folder with transitions is refused
    :param num_threads: Number of threads that decode large batches; by default ``torch.get_num_threads()``
    :param decode_on_gpu: Upload images compressed, and decode them on the GPU. Samples are the same. It has no effect
        if ``device`` is the CPU, if observations are normalized, or if the codec does not compress
    :raises InvalidArgumentError: If an argument has an invalid value, or ``storage_dir`` contains transitions.
    :raises InvalidTypeError: If the observation space is a ``Dict``.
    :raises MissingDependencyError: If the codec needs a package that is not installed.
    :raises DeviceUnavailableError: If the device is not available.
    :raises StorageError: If ``storage_dir`` is in use, or cannot be written.
    :raises CorruptFileError: If a file in ``storage_dir`` is damaged.

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import CompressedReplayBuffer
    >>> model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_class=CompressedReplayBuffer)
    >>> model.learn(200).replay_buffer.size()
    200
    """

    _OTHER_CLASS_HINT = "Use replay_buffer_class=CompressedDictReplayBuffer"
    _NO_SEQUENCES: str | None = None  # why sequences are refused, and what to use instead
    _UNSAVED_ATTRIBUTES: tuple[str, ...] = ()

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
        codec: str | Mapping[str, str] = "patch",
        n_stack: int | Mapping[str, int] | None = None,
        max_error: int | Mapping[str, int] = 0,
        quality: int | Mapping[str, int] = 95,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        num_threads: int | None = None,
        decode_on_gpu: bool = False,
    ) -> None:
        buffer_size, n_envs = check_count("buffer_size", buffer_size), check_count("n_envs", n_envs)
        # ReplayBuffer's constructor would allocate uncompressed observations.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, resolve(device).compute, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False  # SB3's sampling methods read it; no row is invalid here
        self.handle_timeout_termination = handle_timeout_termination
        self._create_observations(
            observation_space,
            (self.buffer_size, n_envs),
            codec=codec,
            n_stack=n_stack,
            max_error=max_error,
            quality=quality,
            max_bytes=max_bytes,
            storage_dir=storage_dir,
            resume=resume,
            num_threads=num_threads,
            decode_on_gpu=check_decode_on_gpu(decode_on_gpu, self.device, codec=codec, max_error=max_error),
        )
        try:
            self._allocate_arrays()
            self._observations.check_budget(sum(array.nbytes for array in self._arrays.values()))
            if others := self._observations.store.array_names - self._arrays.keys():
                raise InvalidArgumentError(
                    f"storage_dir={str(storage_dir)!r} contains {sorted(others)} of another class of buffer, which "
                    f"{type(self).__name__} does not update. Pass the class that made the folder, or another "
                    "storage_dir"
                )
        except BaseException:
            self.close()
            raise
        if max_bytes is None and storage_dir is None:
            n_bytes = sum(array.nbytes for array in self._arrays.values())
            self._observations.watch = MemoryWatch(self._observations.store, other_bytes=n_bytes)
            self._observations.watch.warn_if_too_large()

    # The position is that of the store, which changes in the same instant as its contents.

    @property
    def pos(self) -> int:
        """Row of the next transition."""
        return self._observations.store.position

    @pos.setter
    def pos(self, value: int) -> None:
        self._check_setter("pos", value)

    @property
    def full(self) -> bool:
        """Whether all rows have been written."""
        return self._observations.store.full

    @full.setter
    def full(self, value: bool) -> None:
        self._check_setter("full", value)

    def _check_setter(self, name: str, value: Any) -> None:
        """Raise unless a value is what the store has. Before there is one, SB3's constructor sets it."""
        if "_observations" in self.__dict__ and value != getattr(self, name):
            raise InvalidArgumentError(f"{name} cannot be set to {value!r}. Use add() or reset()")

    @property
    def _rows_written(self) -> int:
        """Number of rows that contain transitions."""
        return self.buffer_size if self.full else self.pos

    def _stored_rows(self) -> np.ndarray:
        """Return the rows of the stored transitions, from the oldest to the newest."""
        return (self.pos - self.size() + np.arange(self.size())) % self.buffer_size

    def _dropped_rows(self, size_before: int) -> np.ndarray:
        """Return the rows that the last ``add`` has dropped because of ``max_bytes``, the newest first."""
        count = min(size_before + 1, self.buffer_size) - self.size()
        return (self.pos - self.size() - 1 - np.arange(count)) % self.buffer_size

    def _row_fields(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        action_dtype, shape = np.dtype(self._maybe_cast_dtype(self.action_space.dtype)), (self.n_envs,)
        others = [(name, np.dtype(np.float32), shape) for name in ("rewards", "dones", "timeouts")]
        return [("actions", action_dtype, (*shape, self.action_dim)), *others]

    def _allocate_arrays(self) -> None:
        """Set the arrays with one row per transition. They are views of the store's rows."""
        rows = self._observations.store.rows
        self._arrays = {name: rows[name] for name in rows.dtype.names or ()}
        self.__dict__.update(self._arrays)
        self._row = np.zeros(1, rows.dtype)
        self._row_views = [self._row[name][0] for name in ("actions", "rewards", "dones", "timeouts")]

    @property
    def stored_nbytes(self) -> int:
        """Size of all stored transitions in bytes: frames, index, actions, rewards and flags."""
        n_rows, names = self._rows_written, self._row.dtype.names or ()
        own = sum(array[:n_rows].nbytes for name, array in self._arrays.items() if name not in names)
        return super().stored_nbytes + own

    def size(self) -> int:
        """Return the number of stored transitions per environment."""
        return self._observations.store.size

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """Observations, ``(buffer_size, n_envs, *obs_shape)``; read-only, decoded when indexed."""
        return self._observations.views()

    @property
    def next_observations(self) -> Any:  # type: ignore[override]
        """Next observations, with the same shape and the same lazy decoding as ``observations``."""
        return self._observations.views(of_next_obs=True)

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

        After an error, the buffer is unchanged.

        :param obs: Observations, shape ``(n_envs, *obs_shape)``, cast to the dtype of the space. The first axis may be
            omitted for a single environment
        :param next_obs: Next observations, with the same shape; the terminal observation if an episode ended
        :param action: Actions, shape ``(n_envs, action_dim)``
        :param reward: Rewards, shape ``(n_envs,)``
        :param done: Whether each episode ended, shape ``(n_envs,)``
        :param infos: One info dict per environment
        :raises InvalidArgumentError: If a shape or the number of environments does not match.
        :raises InvalidTypeError: If a dtype cannot be cast to that of the space.
        :raises OutOfMemoryError: If there is not enough memory.
        """
        observations = self._observations
        with observations.lock:
            # Everything that can fail runs before the first change.
            actions, rewards, dones, timeouts = self._row_views
            actions[...] = _as_env_rows("action", action, actions)
            rewards[...] = _as_env_rows("reward", reward, rewards)
            dones[...] = _as_env_rows("done", done, dones)
            if self.handle_timeout_termination:
                if len(infos) != self.n_envs:
                    raise InvalidArgumentError(
                        f"infos has length {len(infos)}, expected {self.n_envs}: one per environment; nothing was "
                        "stored"
                    )
                truncated = [info.get("TimeLimit.truncated", False) for info in infos]
                timeouts[...] = _as_env_rows("TimeLimit.truncated", truncated, timeouts)
            observations.store.append(obs, next_obs, self._row)
            if observations.watch is not None and observations.store.position == MemoryWatch.MEASURED_AFTER:
                observations.watch.warn_if_too_large()

    @property
    def recovered(self) -> Any:
        """Numbers of transitions found in ``storage_dir``, per environment, or None.

        The fields are ``kept`` and ``lost``.
        """
        return self._observations.store.recovered

    def flush(self) -> None:
        """Do nothing, because every transition in ``storage_dir`` survives the process once it was added."""

    def close(self) -> None:
        """Release ``storage_dir`` for other processes. The buffer cannot be sampled afterwards."""
        self._observations.store.close()

    def reset(self) -> None:
        """Remove all transitions and free their memory."""
        self._observations.store.clear()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """
        Sample transitions.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        """
        with self._observations.lock:  # another thread could add, and drop the rows that are drawn here
            return self._get_samples(self._draw_rows(batch_size), env)

    def _draw_rows(self, batch_size: int) -> np.ndarray:
        """Draw rows that contain transitions."""
        held = self.size()
        rows = np.random.randint(0, held, size=batch_size)
        if held < self._rows_written:  # the oldest were dropped
            rows = (self.pos - held + rows) % self.buffer_size
        return rows

    def sample_sequences(
        self, batch_size: int, length: int, burn_in: int = 0, env: VecNormalize | None = None
    ) -> SequenceSamples:
        """
        Sample sequences of consecutive steps, for recurrent networks.

        A sequence never crosses the end of an episode, or a place where the environment was reset without one.

        :param batch_size: Number of sequences
        :param length: Number of steps to learn from. The first is drawn as in :meth:`sample`
        :param burn_in: Number of steps before these, fewer if the episode starts later
        :param env: Environment to normalize observations and rewards with
        :return: Sequences, padded with zeros to ``burn_in + length`` steps
        :raises InvalidArgumentError: If an argument is too small, or the buffer is empty.
        :raises InvalidTypeError: If a number is not an integer.
        """
        if self._NO_SEQUENCES is not None:
            raise InvalidArgumentError(
                f"sample_sequences() is not supported by {type(self).__name__}, because {self._NO_SEQUENCES}"
            )
        batch_size, length = check_count("batch_size", batch_size), check_count("length", length)
        burn_in = check_count("burn_in", burn_in, least=0)
        with self._observations.lock:  # another thread could add, and overwrite the rows that are drawn here
            if not self.size():
                raise InvalidArgumentError(
                    "the buffer is empty, expected transitions. Call add() before sample_sequences()"
                )
            rows = self._draw_rows(batch_size)
            # The calls to the generator are those of sample(), so the same transitions are drawn.
            envs = np.random.randint(0, self.n_envs, size=batch_size)
            return sequences_around(self, self._observations, rows, envs, length=length, burn_in=burn_in, env=env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        # SB3 makes the same call to the generator, so the same rows are drawn.
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        return self._samples_at(batch_inds, env_indices, env)

    def _samples_at(self, rows: np.ndarray, envs: np.ndarray, env: VecNormalize | None) -> Any:
        """Return SB3's samples of these transitions, which are ``(n,)`` rows and environments."""
        is_normalized = env is not None and env.norm_obs
        obs, next_obs = self._observations.decode(rows, envs, None if is_normalized else th.device(self.device))
        return self._make_samples(rows, envs, obs, next_obs, self.rewards[rows, envs], env)

    def _make_samples(
        self, rows: np.ndarray, envs: np.ndarray, obs: Any, next_obs: Any, rewards: np.ndarray, env: VecNormalize | None
    ) -> Any:
        """Build SB3's samples from decoded observations and the other values of their rows."""
        dones = self.dones[rows, envs] * (1 - self.timeouts[rows, envs])
        rewards = rewards.reshape(-1, 1)
        if env is not None:
            obs, next_obs = self._normalize_obs(obs, env), self._normalize_obs(next_obs, env)
            rewards = self._normalize_reward(rewards, env)
        actions = self.actions[rows, envs, :]
        # These arrays are new, or recycled and used by no other batch: no copy is needed.
        on_cpu = th.device(self.device).type == "cpu"
        tensor = th.from_numpy if on_cpu else functools.partial(self.to_torch, copy=False)
        parts = tensor(actions), tensor(dones.reshape(-1, 1)), tensor(rewards)
        if not isinstance(obs, dict):
            return ReplayBufferSamples(tensor(obs), parts[0], tensor(next_obs), *parts[1:])
        obs_tensors, next_obs_tensors = [
            {key: tensor(array) for key, array in part.items()} for part in (obs, next_obs)
        ]
        return DictReplayBufferSamples(obs_tensors, parts[0], next_obs_tensors, *parts[1:])

    @classmethod
    def load(cls: type[_Buffer], path: str | pathlib.Path, device: th.device | str = "auto") -> _Buffer:
        """
        Load a buffer that ``model.save_replay_buffer(path)`` wrote.

        ``model.load_replay_buffer(path)`` does the same, but raises pickle's own errors for damaged files.

        :param path: File to load; ``.pkl`` may be omitted
        :param device: PyTorch device of the samples
        :return: The buffer
        :raises CorruptFileError: If the file is damaged, incomplete, or contains something else.
        """
        # SB3's load_from_pkl leaves the file open if it fails.
        with (
            as_corrupt_pickle(path, "replay buffer", written_by="model.save_replay_buffer(path)"),
            open_path(path, "r", suffix="pkl") as file,
        ):
            buffer = pickle.load(file)
        if not isinstance(buffer, cls) or not hasattr(buffer, "actions"):  # a damaged file may lack the state
            raise CorruptFileError(
                f"{path} contains a {type(buffer).__name__}, expected a {cls.__name__} with its state"
            )
        buffer.device = resolve(device).compute
        return buffer

    @classmethod
    def from_dataset(
        cls: type[_Buffer],
        source: Any,
        *,
        env: Any = None,
        buffer_size: int | None = None,
        n_envs: int | None = None,
        download: bool = False,
        **options: Any,
    ) -> _Buffer:
        """
        Create a buffer that contains the steps of a dataset, one episode after the other.

        They are stored as Stable Baselines3 stores those of an environment: ``Box`` actions scaled to [-1, 1], rewards
        as float32, and images channels-first. With several environments, each gets an equal part of consecutive
        steps; up to ``n_envs - 1`` steps at the end are left out.

        :param source: Minari id, such as ``"atari/pong/expert-v0"``, folder of a dataset, or ``minari.MinariDataset``
        :param env: Environment to train in later, such as ``model.get_env()``. Its spaces must be those of the
            dataset. Required by :class:`CompressedHerReplayBuffer`
        :param buffer_size: Maximum number of transitions; by default the number of steps in the dataset
        :param n_envs: Number of parallel environments; by default that of ``env``, or 1
        :param download: Whether to download a Minari id that is not on this machine
        :param options: Further arguments of the class, such as ``codec`` or ``storage_dir``
        :return: The buffer, to be assigned to ``model.replay_buffer``
        :raises InvalidArgumentError: If there is no such dataset, its spaces differ from those of ``env``, it does not
            fit into ``buffer_size``, or ``storage_dir`` contains transitions already.
        :raises InvalidTypeError: If a space of the dataset is not supported, such as a Tuple.
        :raises MissingDependencyError: If ``minari`` is not installed.
        :raises CorruptFileError: If the dataset is damaged.
        """
        found = {"env": env, "buffer_size": buffer_size, "n_envs": n_envs, "download": download}
        return load_buffer(cls, source, **found, **options)

    def to_dataset(self, target: str | os.PathLike[str], *, data_format: str = "hdf5") -> pathlib.Path:
        """
        Write all transitions as a Minari dataset, of one environment after the other, from the oldest to the newest.

        Episodes without their beginning or end are included. An episode that was not finished is marked as truncated.
        ``Box`` actions are scaled back, images stay channels-first, and no image is stored as JPEG.

        :param target: Minari id, such as ``"cartpole/mine-v0"``, or folder. It must not exist
        :param data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``
        :return: Folder that ``minari.MinariDataset`` loads
        :raises InvalidArgumentError: If the target exists, or the buffer is empty.
        :raises MissingDependencyError: If ``minari`` is not installed.
        :raises StorageError: If the folder cannot be written.
        """
        with self._observations.lock:  # another thread could add
            episodes = read_buffer_episodes(self)
            return write_dataset(target, episodes, self.observation_space, self.action_space, data_format=data_format)

    @defer_signals
    def __reduce_ex__(self, protocol: Any) -> Any:
        # Other threads cannot add until everything is written: the file could mix two states of the buffer.
        return reduce_with_lock(self._observations.lock, functools.partial(super().__reduce_ex__, protocol))

    def __getstate__(self) -> dict[str, Any]:
        unsaved = ("_arrays", "_row", "_row_views", *self._arrays, *self._UNSAVED_ATTRIBUTES)
        state = {name: value for name, value in self.__dict__.items() if name not in unsaved}
        state["saved_arrays"] = self._saved_arrays()
        if self._observations.storage_dir is not None:
            state["_observations"], state["saved_arrays"] = self._observations.folder_state(), {}
        return {**state, "format": FORMAT_VERSION, "checksum": _checksum(state)}

    def __setstate__(self, state: Any) -> None:
        state = dict(state) if isinstance(state, dict) else {}
        state.pop("held", None)
        version = state.pop("format", None)
        if version != FORMAT_VERSION:
            raise format_error("the replay buffer", version, FORMAT_VERSION)
        if state.pop("checksum", None) != _checksum(state):
            raise CorruptFileError("the replay buffer is damaged: its checksum does not match its contents")
        saved_arrays = state.pop("saved_arrays")
        self.__dict__.update(state)
        replaced = _find_replaced_buffer()
        if isinstance(self._observations, dict):
            self._open_saved(self._observations, replaced)
        elif replaced is not None and (folder := replaced._observations.storage_dir) is not None:
            _logger.warning(
                "the loaded replay buffer is in memory, so its transitions and all later ones are not stored in "
                "storage_dir=%r of the model",
                os.fspath(folder),
            )
        self._allocate_arrays()
        for name, rows in saved_arrays.items():
            self._arrays[name][: len(rows)] = rows

    def _saved_arrays(self) -> dict[str, np.ndarray]:
        """Return arrays with one row per transition that are saved, and are not part of the store's rows."""
        return {}

    def _open_saved(self, saved: dict[str, Any], replaced: CompressedReplayBuffer | None) -> None:
        """Continue in the folder of a saved buffer."""
        self._observations = Observations.open_saved(saved, None if replaced is None else replaced._observations)


def _checksum(state: dict[str, Any]) -> int:
    """Return a checksum of all attribute names, and of values without their own checksum."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            plain[name] = value
        elif isinstance(value, (int, float, np.integer)):
            plain[name] = float(value)  # how NumPy's scalars are written depends on its version
    observations: Any = state["_observations"]
    if isinstance(observations, dict):
        return checksum([list(state), plain, observations])
    shapes = [
        state["obs_shape"],
        *((part.buffer_shape, part.shape, part.dtype.str) for part in observations.parts.values()),
    ]
    known = {**observations.__getstate__(), "store": shapes}  # the store has a checksum of its own
    return checksum([list(state), plain, state["saved_arrays"], known])


def _as_env_rows(name: str, value: Any, target: np.ndarray) -> np.ndarray:
    """Return a value as an array that can be assigned to ``target``. Errors contain its name."""
    shape, dtype = target.shape, target.dtype
    if type(value) is np.ndarray and value.shape == shape and value.dtype in (dtype, _BOOL):
        return value  # the usual case; assigning it converts the dtype, and cannot fail
    try:
        array = np.asarray(value)
        if array.dtype not in (dtype, _BOOL):
            array = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error
    if array.shape == shape:
        return array
    if array.size != math.prod(shape):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, expected {shape}: one row per environment; nothing was stored"
        )
    return array.reshape(shape)


class CompressedDictReplayBuffer(CompressedReplayBuffer, DictReplayBuffer):  # type: ignore[misc,override]
    """
    :class:`CompressedReplayBuffer` for ``Dict`` observations.

    It replaces :class:`stable_baselines3.common.buffers.DictReplayBuffer`. Each key is stored separately. Images are
    compressed; short vectors are not, but a next observation that is also the following observation is stored once.

    :param options: As in :class:`CompressedReplayBuffer`. A dict sets an option by key, such as
        ``codec={"camera": "jpeg"}``. Any other value applies to the images: the keys with two or more dimensions
    :raises InvalidTypeError: If the observation space is not a ``Dict``.

    >>> model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedDictReplayBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "Use replay_buffer_class=CompressedReplayBuffer"


if hasattr(buffers, "NStepReplayBuffer"):  # since SB3 2.7; the other buffers support earlier versions

    class CompressedNStepReplayBuffer(buffers.NStepReplayBuffer, CompressedReplayBuffer):
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
        >>> options = {"n_steps": 3}
        >>> model = DQN(
        ...     "MlpPolicy",
        ...     "CartPole-v1",
        ...     buffer_size=1000,
        ...     replay_buffer_class=CompressedNStepReplayBuffer,
        ...     replay_buffer_kwargs=options,
        ... )
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
            algorithm = _find_building_algorithm(self)
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
            super().__init__(
                *args, n_steps=3 if n_steps is None else n_steps, gamma=0.99 if gamma is None else gamma, **kwargs
            )

        _get_samples = CompressedReplayBuffer._get_samples

        def _samples_at(self, rows: np.ndarray, envs: np.ndarray, env: VecNormalize | None) -> ReplayBufferSamples:
            # SB3's method marks the newest transition as truncated while it samples. If the process were killed then,
            # the mark would stay in the files of storage_dir.
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


def _find_building_frame(buffer: Any) -> FrameType | None:
    """Return the frame of the ``_setup_model`` that is creating the buffer, or None."""
    own = inspect.currentframe()
    frame = own and own.f_back  # f_locals of this frame itself would contain the frame: a reference cycle
    del own
    while frame is not None and frame.f_locals.get("self", frame.f_locals.get("buffer")) is buffer:
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_name != "_setup_model" else frame


def _find_building_algorithm(buffer: Any) -> OffPolicyAlgorithm | None:
    """
    Return the algorithm whose ``_setup_model`` is creating the buffer, or None.

    Algorithms pass ``n_steps`` and ``gamma`` only to SB3's own class. Other values would silently change training.
    """
    frame = _find_building_frame(buffer)
    caller = frame and frame.f_locals.get("self")
    return caller if isinstance(caller, OffPolicyAlgorithm) else None


def _is_built_by_load(buffer: Any) -> bool:
    """Return whether ``load()`` of an algorithm is creating the buffer, with the arguments of the saved model."""
    frame = _find_building_frame(buffer)
    while frame is not None and frame.f_code.co_name == "_setup_model":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "load"


def _find_replaced_buffer() -> CompressedReplayBuffer | None:
    """Return the buffer that ``load_replay_buffer`` is replacing, or None."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "load_replay_buffer":
        frame = frame.f_back
    buffer = getattr(frame and frame.f_locals.get("self"), "replay_buffer", None)
    return buffer if isinstance(buffer, CompressedReplayBuffer) else None


class CompressedHerReplayBuffer(StoreOptionsMixin, HerReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[override]
    """
    Compressed replay buffer for hindsight experience replay.

    It replaces :class:`stable_baselines3.her.her_replay_buffer.HerReplayBuffer`, with its arguments. Without
    ``copy_info_dict``, infos are not stored, because nothing reads them.

    :param options: Storage options, see :class:`CompressedDictReplayBuffer`

    >>> model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedHerReplayBuffer)  # doctest: +SKIP
    """

    _UNSAVED_ATTRIBUTES: tuple[str, ...] = ("env",)
    _OTHER_CLASS_HINT = "Hindsight needs the keys observation, achieved_goal and desired_goal"
    _NO_SEQUENCES = "it replaces the goals of single steps. Use replay_buffer_class=CompressedDictReplayBuffer"
    env: VecEnv | None = None  # a loaded buffer has none before set_env()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("decode_on_gpu", False):
            raise InvalidArgumentError(
                "decode_on_gpu=True is not for hindsight, which changes sampled goals on the CPU. Leave it out"
            )
        super().__init__(*args, **kwargs)
        if not self.copy_info_dict:
            self.infos = self.infos[:0].copy()
        elif kwargs.get("storage_dir") is not None:
            self.close()
            raise InvalidArgumentError(
                "copy_info_dict=True stores dicts, which storage_dir does not support. Leave one of them out"
            )
        self.__dict__.update(self._arrays)  # SB3's constructor has replaced them
        self._current_ep_start[:] = self.pos

    def _row_fields(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        return [("ep_start", np.dtype(np.int64), (self.n_envs,)), *super()._row_fields()]

    def _allocate_arrays(self) -> None:
        """Set the arrays of transitions, and the lengths of their episodes."""
        super()._allocate_arrays()
        self.ep_length = self._arrays["ep_length"] = np.zeros((self.buffer_size, self.n_envs), np.int64)
        self._restore_episodes()

    def _restore_episodes(self) -> None:
        """Set the lengths of episodes. Those that are still running when a buffer is saved have none."""
        rows = self._stored_rows()
        for env in range(self.n_envs if self.size() else 0):
            starts = self.ep_start[rows, env]
            ends = [*(np.flatnonzero(starts[1:] != starts[:-1]) + 1), len(rows)]
            for first, end in zip([0, *ends[:-1]], ends, strict=True):
                intact = starts[first] == rows[first]
                self.ep_length[rows[first:end], env] = intact * (end - first)
            if (start := self.__dict__.get("_current_ep_start")) is not None:
                running = (start[env] + np.arange((self.pos - start[env]) % self.buffer_size)) % self.buffer_size
                self.ep_length[running, env] = 0

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
        overwritten = self.ep_start[row].copy()
        self._row["ep_start"] = self._current_ep_start
        CompressedDictReplayBuffer.add(self, obs, next_obs, action, reward, done, infos)
        self._invalidate_rest_of_episodes(row, overwritten)
        if self.copy_info_dict:
            self.infos[row] = infos
        for env in np.flatnonzero(done).tolist():
            self._compute_episode_length(env)
        dropped = self._dropped_rows(before)
        if len(dropped):  # their episodes have lost the beginning
            self._invalidate_rest_of_episodes(dropped[0], self.ep_start[dropped[0]])
            for env in range(self.n_envs):
                self._set_episode_length(dropped, env, 0)

    def _invalidate_rest_of_episodes(self, row: int, starts: np.ndarray) -> None:
        """Set ``ep_length`` to 0 from a row to the ends of its episodes, as HER skips zeros.

        :param starts: Rows in which these episodes started, one per environment
        """
        for env in np.flatnonzero(self.ep_length[row]).tolist():
            past = (row - starts[env]) % self.buffer_size
            later = np.arange(max(self.ep_length[row, env] - past, 0))
            self._set_episode_length((row + later) % self.buffer_size, env, 0)

    @atomic
    def reset(self) -> None:
        """
        Remove all transitions and free their memory.

        Unlike SB3's buffer, which keeps sampling the old episodes after ``reset()``, this one starts empty.
        """
        super().reset()
        self.ep_length[:] = 0
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

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples:  # type: ignore[override]
        """
        Sample transitions, most of them with goals that were achieved later in the episode.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        :raises RuntimeError: If no episode has ended yet.
        :raises InvalidArgumentError: If there is no environment to compute rewards with.
        """
        with self._observations.lock:  # another thread could add
            return self._sample(batch_size, env)

    def _sample(self, batch_size: int, env: VecNormalize | None) -> DictReplayBufferSamples:
        """Draw and decode the batch that :meth:`sample` returns."""
        is_valid = self.ep_length > 0
        if not is_valid.any():
            return super().sample(batch_size, env)  # raises the RuntimeError
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
        rewards[virtual] = self.env.env_method(
            "compute_reward", next_obs["achieved_goal"][virtual], obs["desired_goal"][virtual], infos, indices=[0]
        )[0]
        samples: DictReplayBufferSamples = self._make_samples(rows, envs, obs, next_obs, rewards, env)
        return samples

    # HerReplayBuffer's own methods would take precedence.
    __getstate__ = CompressedDictReplayBuffer.__getstate__
    __setstate__ = CompressedDictReplayBuffer.__setstate__


_ROLLOUT_ROWS = ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages")


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
        buffer_size, n_envs = check_count("buffer_size", buffer_size), check_count("n_envs", n_envs)
        self._create_observations(
            observation_space,
            (buffer_size, n_envs),
            codec=codec,
            n_stack=n_stack,
            max_error=max_error,
            quality=quality,
            num_threads=num_threads,
        )
        device = resolve(device).compute
        super().__init__(buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs=n_envs)

    @atomic
    def reset(self) -> None:
        """Remove the rollout, before the next one."""
        # RolloutBuffer.reset would allocate uncompressed observations.
        shape = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*shape, self.action_dim), dtype=self.action_space.dtype)
        for name in _ROLLOUT_ROWS:
            setattr(self, name, np.zeros(shape, dtype=np.float32))
        self.generator_ready = False
        BaseBuffer.reset(self)
        self._observations.store.clear()
        self.observations = self._observations.views(writable=True)

    @atomic
    def add(self, *args: Any, **kwargs: Any) -> None:
        """
        Add one step of each environment.

        :param args, kwargs: Arguments of the SB3 class that this class replaces
        """
        super().add(*args, **kwargs)

    @atomic_start
    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """
        Yield minibatches of a complete rollout, in random order.

        :param batch_size: Number of steps per minibatch; by default all
        """
        yield from super().get(batch_size)

    compute_returns_and_advantage = atomic(RolloutBuffer.compute_returns_and_advantage)
    _get_samples: Any = without_copy(RolloutBuffer._get_samples)

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """
        Swap and flatten axes 0 (buffer_size) and 1 (n_envs) of an array or of observations.

        :param arr: Shape ``(buffer_size, n_envs, ...)``
        :return: Shape ``(buffer_size * n_envs, ...)``
        """
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
    _get_samples: Any = without_copy(DictRolloutBuffer._get_samples)
