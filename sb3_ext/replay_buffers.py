"""Replay buffers that store images compressed. They replace those of :mod:`stable_baselines3.common.buffers`."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.devices import resolve
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, RlExtError
from rl_ext_core.frames.checkpoint import checksum, format_error, reduce_with_lock
from rl_ext_core.frames.gpu_decode import check_decode_on_gpu
from rl_ext_core.frames.planning import MEASURED_AFTER, warn_if_too_large
from rl_ext_core.vector.environments import check_count
from sb3_ext.caller_frames import find_creating_algorithm, find_replaced_buffer
from sb3_ext.compressed_buffer import CompressedBuffer, atomic
from sb3_ext.datasets import DatasetMethods
from sb3_ext.observations import Observations
from sb3_ext.saved_folders import describe_folder, open_folder
from sb3_ext.sequences import SequenceSamples, sequences_around

FORMAT_VERSION = 1
_TIMEOUT = "TimeLimit.truncated"
_Buffer = TypeVar("_Buffer", bound="CompressedReplayBuffer")
_logger = logging.getLogger("sb3_ext")


def _write_field(views: dict[tuple[int, ...], np.ndarray], name: str, value: Any) -> None:
    """Write a value to a field of a row. Errors contain its name.

    :param views: Views of the field by shape; the first one has the shape of the field. Others are added when needed
    """
    try:
        views[value.shape][...] = value
        return
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    array, field = None, next(iter(views.values()))
    try:
        array = np.asarray(value)
        views[array.shape] = field.reshape(array.shape)
        views[array.shape][...] = array
    except (TypeError, ValueError) as error:
        if array is not None and array.size != field.size:
            raise InvalidArgumentError(
                f"{name} has shape {array.shape}, expected {field.shape}: one row per environment; nothing was stored"
            ) from None
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error


def _property_of_store(name: str, attribute: str, docstring: str) -> Any:
    """Return a property with the value of the store, which changes in the same instant as the store's contents."""

    def get_value(self: CompressedReplayBuffer) -> Any:
        return getattr(self._observations.store, attribute)

    def check_value(self: CompressedReplayBuffer, value: Any) -> None:
        """Raise unless a value is what the store has. Before there is one, SB3's constructor sets it."""
        if "_observations" in self.__dict__ and value != get_value(self):
            raise InvalidArgumentError(f"{name} cannot be set to {value!r}. Use add() or reset()")

    return property(get_value, check_value, doc=docstring)


class CompressedReplayBuffer(CompressedBuffer, DatasetMethods):
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
    pos = _property_of_store("pos", "position", "Row of the next transition.")
    full = _property_of_store("full", "full", "Whether all rows have been written.")

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
        decode_on_gpu = check_decode_on_gpu(decode_on_gpu, self.device, codec=codec, max_error=max_error)
        # load() creates the buffer with the arguments of the saved model, which may have created the folder.
        is_loading = storage_dir is not None and find_creating_algorithm(self)[1]
        folder = {"storage_dir": storage_dir, "resume": resume or is_loading, "row_dtype": np.dtype(self._row_fields())}
        options = {"codec": codec, "n_stack": n_stack, "max_error": max_error, "quality": quality, **folder}
        options |= {"max_bytes": max_bytes, "num_threads": num_threads, "decode_on_gpu": decode_on_gpu}
        self._create_observations(observation_space, (self.buffer_size, n_envs), **options)
        try:
            self._allocate_arrays()
            if others := self._observations.store.array_names - self._arrays.keys():
                raise InvalidArgumentError(
                    f"storage_dir={str(storage_dir)!r} contains {sorted(others)} of another class of buffer, which "
                    f"{type(self).__name__} does not update. Pass the class that made the folder, or another "
                    "storage_dir"
                )
        except BaseException:
            self.close()
            raise

    @property
    def _rows_written(self) -> int:
        """Number of rows that contain transitions."""
        return self.buffer_size if self.full else self.pos

    def _stored_rows(self) -> np.ndarray:
        """Return the rows of the stored transitions, from the oldest to the newest."""
        return (self._observations.store.first + np.arange(self.size())) % self.buffer_size

    def _lost_rows(self, size_before: int) -> np.ndarray:
        """Return the rows that the last ``add`` has overwritten, or dropped because of ``max_bytes``."""
        count = size_before + 1 - self.size()
        return (self._observations.store.first - 1 - np.arange(count)) % self.buffer_size

    def _row_fields(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        action_dtype, shape = np.dtype(self._maybe_cast_dtype(self.action_space.dtype)), (self.n_envs,)
        others = [(name, np.dtype(np.float32), shape) for name in ("rewards", "dones", "timeouts")]
        return [("actions", action_dtype, (*shape, self.action_dim)), *others]

    def _allocate_arrays(self) -> None:
        """Set the arrays with one row per transition. Those of :meth:`_row_fields` are views of the store's rows."""
        rows = self._observations.store.rows
        self._arrays: dict[str, np.ndarray] = {}  # other arrays, which subclasses add
        self._row = np.zeros(1, rows.dtype)  # to be added next
        self._fields = {name: {rows[name].shape[1:]: self._row[name][0]} for name in rows.dtype.names or ()}
        self._no_timeouts = np.zeros(self.n_envs)
        self.__dict__.update({name: rows[name] for name in self._fields})

    @property
    def stored_nbytes(self) -> int:
        """Size of all stored transitions in bytes: frames, index, actions, rewards and flags."""
        return super().stored_nbytes + sum(array[: self._rows_written].nbytes for array in self._arrays.values())

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
        observations, fields = self._observations, self._fields
        with observations.lock:
            # Everything that can fail runs before the first change.
            _write_field(fields["actions"], "action", action)
            _write_field(fields["rewards"], "reward", reward)
            _write_field(fields["dones"], "done", done)
            if self.handle_timeout_termination:
                if len(infos) != self.n_envs:
                    raise InvalidArgumentError(
                        f"infos has length {len(infos)}, expected {self.n_envs}: one per environment; nothing was "
                        "stored"
                    )
                timeouts = [info.get(_TIMEOUT, False) for info in infos]
                _write_field(fields["timeouts"], _TIMEOUT, timeouts if any(timeouts) else self._no_timeouts)
            observations.store.append(obs, next_obs, self._row)
            is_measured = observations.store.seen == MEASURED_AFTER
            if is_measured and observations.store.max_bytes is None and observations.storage_dir is None:
                warn_if_too_large(observations.store)

    @property
    def recovered(self) -> Any:
        """Numbers of transitions found in ``storage_dir``, per environment, or None.

        The fields are ``kept`` and ``lost``.
        """
        return self._observations.store.recovered

    def close(self) -> None:
        """Release ``storage_dir`` for other processes. The buffer cannot be sampled afterwards."""
        self._observations.store.close()

    @atomic
    def reset(self) -> None:
        """Remove all transitions and free their memory."""
        self._observations.store.clear()
        for array in self._arrays.values():
            array[:] = 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """
        Sample transitions.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        :raises InvalidArgumentError: If the buffer is empty.
        """
        with self._observations.lock:  # another thread could add, and drop the rows that are drawn here
            return self._get_samples(self._draw_rows(batch_size), env)

    def _draw_rows(self, batch_size: int) -> np.ndarray:
        """Draw rows that contain transitions."""
        held = self.size()
        if not held:
            raise InvalidArgumentError("the buffer is empty, expected transitions. Call add() first")
        rows = np.random.randint(0, held, size=batch_size)
        if held < self._rows_written:  # the oldest were dropped
            rows = (self._observations.store.first + rows) % self.buffer_size
        return rows

    def sample_sequences(
        self, batch_size: int, length: int, burn_in: int = 0, env: VecNormalize | None = None, *, period: int = 1
    ) -> SequenceSamples:
        """
        Sample sequences of consecutive steps, for recurrent networks.

        A sequence never crosses the end of an episode, or a place where the environment was reset without one.

        :param batch_size: Number of sequences
        :param length: Number of steps to learn from. The first is drawn as in :meth:`sample`
        :param burn_in: Number of steps before these, fewer if the episode starts later
        :param env: Environment to normalize observations and rewards with
        :param period: The first step to learn from has a row that is a multiple of this, or is the oldest one. With
            ``period=length``, different sequences do not overlap. Source: https://github.com/instadeepai/flashbax
        :return: Sequences, padded with zeros to ``burn_in + length`` steps
        :raises InvalidArgumentError: If an argument is too small, or the buffer is empty.
        :raises InvalidTypeError: If a number is not an integer.
        """
        if self._NO_SEQUENCES is not None:
            raise InvalidArgumentError(
                f"sample_sequences() is not supported by {type(self).__name__}, because {self._NO_SEQUENCES}"
            )
        batch_size, length = check_count("batch_size", batch_size), check_count("length", length)
        burn_in, period = check_count("burn_in", burn_in, least=0), check_count("period", period)
        with self._observations.lock:  # another thread could add, and overwrite the rows that are drawn here
            rows = self._draw_rows(batch_size)
            first, oldest = rows - rows % period, self._observations.store.first
            is_held = (first - oldest) % self.buffer_size < self.size()
            rows = np.where(is_held, first, oldest)
            # The calls to the generator are those of sample(), so the same transitions are drawn.
            envs = np.random.randint(0, self.n_envs, size=batch_size)
            return sequences_around(self, rows, envs, length=length, burn_in=burn_in, env=env)

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
        try:
            with open_path(path, "r", suffix="pkl") as file:
                buffer = pickle.load(file)
        except (RlExtError, OSError):
            raise
        except Exception as error:  # unpickling damaged bytes can fail in arbitrary ways
            raise CorruptFileError(
                f"{path} is damaged, or was not written by model.save_replay_buffer(path) ({type(error).__name__}: "
                f"{error})"
            ) from error
        if not isinstance(buffer, cls) or not hasattr(buffer, "actions"):  # a damaged file may lack the state
            raise CorruptFileError(
                f"{path} contains a {type(buffer).__name__}, expected a {cls.__name__} with its state"
            )
        buffer.device = resolve(device).compute
        return buffer

    @defer_signals
    def __reduce_ex__(self, protocol: Any) -> Any:
        # Other threads cannot add until everything is written: the file could mix two states of the buffer.
        return reduce_with_lock(self._observations.lock, functools.partial(super().__reduce_ex__, protocol))

    def __getstate__(self) -> dict[str, Any]:
        found, in_folder = self._observations, self._observations.storage_dir is not None
        contents = self._saved_attributes(), found.arguments, describe_folder(found) if in_folder else None
        # Attributes may contain lambdas and inner functions, such as schedules, which pickle refuses.
        attributes = np.frombuffer(cloudpickle.dumps(contents), np.uint8)
        state = {"format": FORMAT_VERSION, "checksum": checksum(attributes), "attributes": attributes}
        return {**state, "store": None if in_folder else found.store}  # a store has its own checksum

    def __setstate__(self, state: Any) -> None:
        state = state if isinstance(state, dict) else {}
        if (version := state.get("format")) != FORMAT_VERSION:
            raise format_error("the replay buffer", version, FORMAT_VERSION)
        if state.get("checksum") != checksum(state["attributes"]):
            raise CorruptFileError("the replay buffer is damaged: its checksum does not match its contents")
        attributes, arguments, folder = pickle.loads(state["attributes"])
        replaced = find_replaced_buffer()
        replaced = replaced._observations if isinstance(replaced, CompressedReplayBuffer) else None
        if folder is not None:
            self._observations = open_folder(folder, arguments, replaced)
        else:
            self._observations = Observations(state["store"], arguments)
            if replaced is not None and replaced.storage_dir is not None:
                _logger.warning(
                    "the loaded replay buffer is in memory, so its transitions and all later ones are not stored in "
                    "storage_dir=%r of the model",
                    os.fspath(replaced.storage_dir),
                )
        self.__dict__.update(attributes)
        self._allocate_arrays()

    def _saved_attributes(self) -> dict[str, Any]:
        """Return everything that is saved, except the transitions."""
        unsaved = ("_observations", "_arrays", "_row", "_fields", "_no_timeouts", *self._fields, *self._arrays)
        return {name: value for name, value in self.__dict__.items() if name not in unsaved}


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
