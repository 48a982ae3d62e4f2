"""
Stable Baselines3's buffers, of images in a fraction of the memory. They stand in for the classes of
:mod:`stable_baselines3.common.buffers`, in the order of that module.
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
from rl_ext_core.devices import resolve
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.checkpoint import checksum, reduce_with_lock, as_corrupt_pickle
from rl_ext_core.frames.planning import MemoryWatch
from rl_ext_core.vector.environments import check_count
from sb3_ext.observation_view import ObservationView
from sb3_ext.observations import STORE_OPTIONS, Observations

FORMAT_VERSION = 1
_SMALL_NBYTES = 4096  # bytes
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Buffer = TypeVar("_Buffer", bound="CompressedReplayBuffer")
_logger = logging.getLogger("sb3_ext")


def atomic(method: _Method) -> _Method:
    """Have Ctrl-C, and a thread that saves the buffer, wait for the end of a method that changes it."""

    @defer_signals
    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Any:
        with self._observations.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def atomic_start(method: _Method) -> _Method:
    """Do the same for a generator, which reorders a buffer's arrays before it gives the first of its items."""

    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items = method(self, *args, **kwargs)
        yield atomic(lambda _: next(items))(self)
        yield from items

    return call  # type: ignore[return-value]


def without_copy(method: _Method) -> _Method:
    """Have a method of upstream's not copy what it decodes, which nobody else holds."""

    @functools.wraps(method)
    def call(self: CompressedBuffer, *args: Any, **kwargs: Any) -> Any:
        self._may_skip_copy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__.pop("_may_skip_copy", None)

    return call  # type: ignore[return-value]


class CompressedBuffer(BaseBuffer):
    """What replay buffers and rollout buffers have in common: the observations that they are made of."""

    _observations: Observations
    _OTHER_CLASS_HINT: str  # what to write for an observation space of the other kind
    _may_skip_copy = False

    def _create_observations(self, space: spaces.Space[Any], buffer_shape: tuple[int, int], **options: Any) -> None:
        takes_dict = isinstance(self, (DictReplayBuffer, DictRolloutBuffer))
        if isinstance(space, spaces.Dict) != takes_dict:
            given = f"a Dict of {list(space.spaces)}" if isinstance(space, spaces.Dict) else space
            expected = "a Dict" if takes_dict else "one image or vector"
            raise InvalidTypeError(f"observation_space is {given}, expected {expected}; {self._OTHER_CLASS_HINT}")
        self._observations = Observations(space, buffer_shape, **{**options, **self.__dict__.pop("_store_options", {})})

    @property
    def codec(self) -> Any:
        """Name of the codec in use; with ``codec="auto"``, what was chosen so far. By key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.store.codec)

    @property
    def block_length(self) -> Any:
        """Number of frames in a block; with ``block_length=None``, what was chosen so far. By key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.store.block_length)

    @property
    def n_stack(self) -> Any:
        """Number of frames in an observation, as far as is known. By key for a ``Dict``."""
        return self._observations.map_parts(lambda part: part.store.layout.n_stack)

    @property
    def num_threads(self) -> int | None:
        """Threads that decode large batches, or None for as many as ``torch.get_num_threads()``."""
        return self._observations.num_threads

    @num_threads.setter
    def num_threads(self, value: int | None) -> None:
        self._observations.num_threads = value

    @property
    def stored_nbytes(self) -> int:
        """Bytes that all that was added takes: frames, index, actions, rewards and so on."""
        return self._observations.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held in memory: what was added, and the arrays that batches are decoded into."""
        return self.stored_nbytes + self._observations.recycled_nbytes

    def to_torch(self, array: np.ndarray, copy: bool = True) -> th.Tensor:
        """
        Convert an array to a tensor.

        :param array: The array
        :param copy: Whether to copy it
        :return: The tensor, on the device of the buffer
        """
        # To find out whether a small one was decoded takes as long as copying it.
        skip_copy = self._may_skip_copy and array.nbytes > _SMALL_NBYTES and self._observations.is_decoded_batch(array)
        return super().to_torch(array, copy and not skip_copy)


class StoreOptionsMixin(CompressedBuffer):
    """Keeps the options of a store for one of our constructors, past one of upstream's that does not know them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._store_options = {name: kwargs.pop(name) for name in STORE_OPTIONS if name in kwargs}
        super().__init__(*args, **kwargs)


class CompressedReplayBuffer(CompressedBuffer, ReplayBuffer):
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
    :param codec: ``"auto"``, or ``"raw"``, ``"patch"``, ``"patch+lz4"`` (the smallest), all lossless,
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

    >>> from stable_baselines3 import DQN
    >>> from sb3_ext import CompressedReplayBuffer
    >>> model = DQN("MlpPolicy", "CartPole-v1", buffer_size=1000, replay_buffer_class=CompressedReplayBuffer)
    >>> model.learn(200).replay_buffer.size()
    200
    """

    _OTHER_CLASS_HINT = "use replay_buffer_class=CompressedDictReplayBuffer for it"
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
        codec: str | Mapping[str, str] = "auto",
        n_stack: int | Mapping[str, int] | None = None,
        block_length: int | Mapping[str, int] | None = None,
        max_error: int | Mapping[str, int] = 0,
        quality: int | Mapping[str, int] = 95,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        buffer_size, n_envs = check_count("buffer_size", buffer_size), check_count("n_envs", n_envs)
        # Not ReplayBuffer's: it would allocate what this class exists to avoid.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, resolve(device).compute, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False  # read by ``sample``: no row is invalid here
        self.handle_timeout_termination = handle_timeout_termination
        self._create_observations(
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
            self._observations.check_budget()
        except BaseException:
            self.close()
            raise
        # Not at the start where ``storage_dir`` holds what was added before.
        self.pos, self.full = self._observations.first.position, self._observations.first.full
        if max_bytes is None and storage_dir is None:
            rows = sum(array.nbytes for array in self._observations.arrays.values())
            self._observations.watch = MemoryWatch(self._observations.stores, other_bytes=rows)
            self._observations.watch.warn_if_too_large()

    @property
    def _rows_written(self) -> int:
        return self.buffer_size if self.full else self.pos

    def _allocate_rows(self) -> None:
        rows, shape = self._observations.rows, (self.n_envs,)
        action_dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        self.actions = rows("actions", (*shape, self.action_dim), action_dtype)
        self.rewards, self.dones, self.timeouts = (
            rows(name, shape, np.float32) for name in ("rewards", "dones", "timeouts")
        )

    def size(self) -> int:
        """
        :return: Number of transitions held, an environment
        """
        return min(self._rows_written, self._observations.size)

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """The observations, shape ``(buffer_size, n_envs, *obs_shape)``, decoded when indexed; read-only."""
        return self._observations.views()

    @property
    def next_observations(self) -> Any:  # type: ignore[override]
        """The next observations, likewise."""
        return self._observations.views(of_next_obs=True)

    @atomic
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

        :param obs: Shape ``(n_envs, *obs_shape)``; without ``n_envs`` if there is one. Cast to the space's dtype
        :param next_obs: Likewise; the terminal observation where an episode ended
        :param action: ``n_envs`` actions
        :param reward: ``n_envs`` rewards
        :param done: ``n_envs`` flags
        :param infos: ``n_envs`` dictionaries
        :raises InvalidArgumentError: if a shape or the number of environments is another one
        :raises InvalidTypeError: if a dtype cannot be cast to that of the space
        :raises OutOfMemoryError: if memory ran out. Whatever is raised, the buffer is as it was before
        """
        # All that can fail comes before the first change.
        action = _as_env_rows("action", action, (self.n_envs, self.action_dim), self.actions.dtype)
        reward = _as_env_rows("reward", reward, (self.n_envs,), self.rewards.dtype)
        done = _as_env_rows("done", done, (self.n_envs,), self.dones.dtype)
        if self.handle_timeout_termination:
            if len(infos) != self.n_envs:
                raise InvalidArgumentError(
                    f"infos has {len(infos)} entries, expected {self.n_envs}, one an environment; nothing was stored"
                )
            truncated = [info.get("TimeLimit.truncated", False) for info in infos]
            timeouts = _as_env_rows("TimeLimit.truncated", truncated, (self.n_envs,), self.timeouts.dtype)
        self._observations.append(obs, next_obs, row=self.pos)

        row = self.pos
        self.actions[row] = action
        self.rewards[row] = reward
        self.dones[row] = done
        if self.handle_timeout_termination:
            self.timeouts[row] = timeouts
        self.pos = row + 1
        if self.pos == MemoryWatch.MEASURED_AFTER and self._observations.watch is not None:
            self._observations.watch.warn_if_too_large()
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    @property
    def recovered(self) -> Any:
        """What was found in ``storage_dir``: transitions ``kept``, ``lost`` and ``overwritten``, an environment; or
        None.
        """
        return self._observations.recovered

    @defer_signals
    def flush(self) -> None:
        """Make sure that what was added survives the process. Does nothing without ``storage_dir``."""
        for store in self._observations.stores:
            store.flush()

    def close(self) -> None:
        """Let another process open ``storage_dir``, with all that was added. Nothing can be sampled after."""
        self._observations.close()

    @atomic
    def reset(self) -> None:
        """Forget all transitions and give their memory back."""
        super().reset()
        self._observations.clear()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """
        Sample transitions.

        :param batch_size: Number of transitions
        :param env: Environment to normalize observations and rewards with
        :return: Samples
        """
        with self._observations.lock:  # another thread may add, and give up what is drawn here
            held = self.size()
            rows = np.random.randint(0, held, size=batch_size)
            if held < self._rows_written:  # the oldest were given up
                rows = (self.pos - held + rows) % self.buffer_size
            return self._get_samples(rows, env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        # The same call to the generator as in the class this one stands in for.
        env_indices = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        obs, next_obs = self._observations.decode(batch_inds, env_indices)
        rewards = self.rewards[batch_inds, env_indices]
        return self._make_samples(batch_inds, env_indices, obs, next_obs, rewards, env)

    def _make_samples(
        self, rows: np.ndarray, envs: np.ndarray, obs: Any, next_obs: Any, rewards: np.ndarray, env: VecNormalize | None
    ) -> Any:
        dones = self.dones[rows, envs] * (1 - self.timeouts[rows, envs])
        rewards = rewards.reshape(-1, 1)
        if env is not None:
            obs, next_obs = self._normalize_obs(obs, env), self._normalize_obs(next_obs, env)
            rewards = self._normalize_reward(rewards, env)
        actions = self.actions[rows, envs, :]
        # All of these are fresh arrays, or recycled ones that nobody else sees: no copy is needed.
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
        Load a buffer that ``model.save_replay_buffer(path)`` wrote. ``model.load_replay_buffer(path)`` does it too,
        with pickle's own errors for damaged files.

        :param path: The file; ``.pkl`` may be left out
        :param device: PyTorch device for the samples
        :return: The buffer
        :raises CorruptFileError: if the file is damaged, cut short, or holds something else
        """
        # Not load_from_pkl: it leaves the file open where it fails.
        with (
            as_corrupt_pickle(path, "replay buffer", written_by="model.save_replay_buffer(path)"),
            open_path(path, "r", suffix="pkl") as file,
        ):
            buffer = pickle.load(file)
        if not isinstance(buffer, cls) or not hasattr(buffer, "actions"):  # damage can have pickle pass its state over
            raise CorruptFileError(f"{path} holds a {type(buffer).__name__}, expected a {cls.__name__} with its state")
        buffer.device = resolve(device).compute
        return buffer

    @defer_signals
    def __reduce_ex__(self, protocol: Any) -> Any:
        # Nothing is added until all is written: a file would hold one part from before and one from after.
        return reduce_with_lock(self._observations.lock, functools.partial(super().__reduce_ex__, protocol))

    def __getstate__(self) -> dict[str, Any]:
        unsaved = (*self._UNSAVED_ATTRIBUTES, *self._observations.arrays)
        state = {name: value for name, value in self.__dict__.items() if name not in unsaved}
        return {**state, "format": FORMAT_VERSION, "checksum": _checksum(state)}

    def __setstate__(self, state: Any) -> None:
        state = dict(state) if isinstance(state, dict) else {}
        state.pop("held", None)
        version = state.pop("format", None)
        if version != FORMAT_VERSION:
            raise CorruptFileError(
                f"the replay buffer has format {version!r}, this version reads {FORMAT_VERSION}; "
                "load it with the version of rl-ext that wrote it"
            )
        if state.pop("checksum", None) != _checksum(state):
            raise CorruptFileError("the replay buffer is damaged: its checksum does not match its contents")
        self.__dict__.update(state)
        self.__dict__.update(self._observations.arrays)


def _checksum(state: dict[str, Any]) -> int:
    """Return that of the names of all that a file holds, and of what is in no checksum of its own."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            plain[name] = value
        elif isinstance(value, (int, float, np.integer)):
            plain[name] = float(value)  # NumPy's numbers are written in a way that depends on its version
    observations: Observations = state["_observations"]
    shapes = [
        state["obs_shape"],
        *((part.buffer_shape, part.shape, part.dtype.str) for part in observations.parts.values()),
    ]
    known = {**observations.__getstate__(), "parts": list(observations.parts), "shapes": shapes}
    return checksum([list(state), plain, known])


def _as_env_rows(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the value as an array of one row an environment, or an error that names it."""
    if type(value) is np.ndarray and value.shape == shape and value.dtype in (dtype, bool):
        return value  # the usual case: storing it converts it, and cannot fail
    try:
        array = np.asarray(value)
        if array.dtype != dtype:
            array = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is {value!r}, expected numbers ({error}); nothing was stored") from error
    if array.shape == shape:
        return array
    if array.size != math.prod(shape):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, expected {shape}: one row an environment; nothing was stored"
        )
    return array.reshape(shape)


class CompressedDictReplayBuffer(CompressedReplayBuffer, DictReplayBuffer):  # type: ignore[misc,override]
    """
    :class:`CompressedReplayBuffer` for ``Dict`` observations, in place of
    :class:`stable_baselines3.common.buffers.DictReplayBuffer`. Each key is stored by itself: images compressed, and
    short vectors as they are, but one that is both a next observation and the observation after it only once.

    :param options: As in :class:`CompressedReplayBuffer`. A dictionary gives an option by key, such as
        ``codec={"camera": "patch+lz4"}``; any other value holds for the images, which are the keys of two or more
        dimensions
    :raises InvalidTypeError: if the observation space is no ``Dict``

    >>> model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedDictReplayBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "use replay_buffer_class=CompressedReplayBuffer for it"


if hasattr(buffers, "NStepReplayBuffer"):  # from Stable Baselines3 2.7 on; all else here works with earlier ones

    class CompressedNStepReplayBuffer(buffers.NStepReplayBuffer, CompressedReplayBuffer):
        """
        :class:`CompressedReplayBuffer` in place of :class:`stable_baselines3.common.buffers.NStepReplayBuffer`.

        ``n_steps`` and ``gamma`` are those of the algorithm that makes the buffer. Stable Baselines3 warns that it
        ignores its ``n_steps`` with a class of one's own; to be without the warning, pass ``n_steps`` here alone::

            DQN("CnnPolicy", env, replay_buffer_class=CompressedNStepReplayBuffer, replay_buffer_kwargs={"n_steps": 3})

        :param args, kwargs: As in :class:`CompressedReplayBuffer`
        :param n_steps: Number of steps to accumulate rewards for; by default the algorithm's, and 3 where it has just
            one
        :param gamma: Discount factor; by default the algorithm's, and 0.99 without one
        :raises InvalidArgumentError: if the algorithm has other ones

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

        _OTHER_CLASS_HINT = "n-step returns are for these alone, as in Stable Baselines3"

        def __init__(self, *args: Any, n_steps: int | None = None, gamma: float | None = None, **kwargs: Any) -> None:
            algorithm = _find_building_algorithm(self)
            if n_steps is not None:
                n_steps = check_count("n_steps", n_steps)
            algorithm_value = getattr(algorithm, "n_steps", 1)
            if algorithm_value > 1:
                n_steps = _check_matches_algorithm("n_steps", n_steps, algorithm_value)
                _logger.warning(
                    "n_steps=%d of the algorithm is used, although Stable Baselines3 says that it ignores it", n_steps
                )
            if algorithm is not None:
                gamma = _check_matches_algorithm("gamma", gamma, algorithm.gamma)
            super().__init__(
                *args, n_steps=3 if n_steps is None else n_steps, gamma=0.99 if gamma is None else gamma, **kwargs
            )

        def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ReplayBufferSamples:
            # Not upstream's, which marks the newest transition as truncated meanwhile: that may be in a file, where a
            # process that is killed would leave the mark. The calls to the generator are the same.
            envs = np.random.randint(0, self.n_envs, size=batch_inds.shape)
            steps, newest = np.arange(self.n_steps), (self.pos - 1) % self.buffer_size
            rows = (batch_inds[:, None] + steps) % self.buffer_size, envs[:, None]
            ends = (self.dones[rows] != 0) | (self.timeouts[rows] != 0) | (rows[0] == newest)
            n_more = np.where(ends.any(axis=1), ends.argmax(axis=1), self.n_steps - 1)
            counts = steps <= n_more[:, None]
            rewards = self._normalize_reward(self.rewards[rows], env) * self.gamma ** steps.astype(np.float32) * counts
            last = (batch_inds + n_more) % self.buffer_size, envs
            dones = self.dones[last] * (1 - self.timeouts[last])
            parts: tuple[Any, ...] = (
                self._normalize_obs(self.observations[batch_inds, envs], env),
                self.actions[batch_inds, envs],
                self._normalize_obs(self.next_observations[last], env),
                dones[:, None],
                rewards.sum(axis=1, keepdims=True),
                self.gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32),
            )
            return ReplayBufferSamples(*(self.to_torch(part, copy=False) for part in parts))


def _check_matches_algorithm(name: str, given_value: Any, algorithm_value: Any) -> Any:
    if given_value is not None and given_value != algorithm_value:
        raise InvalidArgumentError(
            f"the replay buffer is given {name}={given_value!r} and the algorithm {name}={algorithm_value!r}; leave it out of "
            "replay_buffer_kwargs"
        )
    return algorithm_value


def _find_building_algorithm(buffer: Any) -> OffPolicyAlgorithm | None:
    """
    Return the algorithm in whose set-up the buffer is made. It hands ``n_steps`` and ``gamma`` to the class of Stable
    Baselines3 alone, and with other ones than its own it would learn something else in silence.
    """
    own = inspect.currentframe()
    frame = own and own.f_back  # what a frame's variables are read by holds itself, if it is asked for its own
    del own
    while frame is not None and frame.f_locals.get("self", frame.f_locals.get("buffer")) is buffer:
        frame = frame.f_back
    caller = None if frame is None or frame.f_code.co_name != "_setup_model" else frame.f_locals.get("self")
    return caller if isinstance(caller, OffPolicyAlgorithm) else None


class CompressedHerReplayBuffer(StoreOptionsMixin, HerReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[override]
    """
    :class:`CompressedDictReplayBuffer` in place of :class:`stable_baselines3.her.her_replay_buffer.HerReplayBuffer`,
    whose arguments it takes. Without ``copy_info_dict`` no dictionaries are kept for infos, which nobody reads then.

    :param options: As in :class:`CompressedDictReplayBuffer`

    >>> model = SAC("MultiInputPolicy", env, replay_buffer_class=CompressedHerReplayBuffer)  # doctest: +SKIP
    """

    _UNSAVED_ATTRIBUTES = ("env",)
    _OTHER_CLASS_HINT = "hindsight needs the keys observation, achieved_goal and desired_goal"
    env: VecEnv | None = None  # set_env() brings it back where the buffer was loaded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.copy_info_dict:
            self.infos = self.infos[:0].copy()
        elif kwargs.get("storage_dir") is not None:
            self.close()
            raise InvalidArgumentError(
                "copy_info_dict=True keeps dictionaries, which storage_dir does not; leave one out"
            )
        self.__dict__.update(self._observations.arrays)  # upstream has made its own
        if self.size():
            self._restore_episodes()

    def _allocate_rows(self) -> None:
        super()._allocate_rows()
        self.ep_start = self._observations.rows("ep_start", (self.n_envs,), np.int64)
        self.ep_length = self._observations.rows("ep_length", (self.n_envs,), np.int64, any_row_writable=True)

    def _restore_episodes(self) -> None:
        """Of what ``storage_dir`` held: those that are there from their start. What comes next begins new ones."""
        rows = (self.pos - self.size() + np.arange(self.size())) % self.buffer_size
        for env in range(self.n_envs):
            starts = self.ep_start[rows, env]
            ends = [*(np.flatnonzero(starts[1:] != starts[:-1]) + 1), len(rows)]
            for first, end in zip([0, *ends[:-1]], ends, strict=True):
                intact = starts[first] == rows[first]
                self.ep_length[rows[first:end], env] = intact * (end - first)
        self._current_ep_start[:] = self.pos

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
        """
        Add one transition of each environment, as :meth:`CompressedReplayBuffer.add` does.

        :param obs, next_obs, action, reward, done, infos: As there
        """
        # Not HerReplayBuffer's, which changes the oldest transition's row before that is known to be overwritten: an
        # error would leave it changed, and so would the end of the process in a folder.
        row, before = self.pos, self.size()
        CompressedDictReplayBuffer.add(self, obs, next_obs, action, reward, done, infos)
        self._invalidate_episodes_from(row)
        self.ep_start[row] = self._current_ep_start
        if self.copy_info_dict:
            self.infos[row] = infos
        for env in np.flatnonzero(done).tolist():
            self._compute_episode_length(env)
        held = self.size()
        if held < self._rows_written:
            self._invalidate_dropped_episodes(min(before + 1, self.buffer_size) - held)

    def _invalidate_dropped_episodes(self, count: int) -> None:
        """Those that lost some of their oldest transitions: as upstream does where they are overwritten."""
        dropped_rows = (self.pos - self.size() - 1 - np.arange(count)) % self.buffer_size
        if count:
            self._invalidate_episodes_from(dropped_rows[0])
            self.ep_length[dropped_rows] = 0

    def _invalidate_episodes_from(self, row: int) -> None:
        """Have hindsight pass over the episodes of a row, from there on."""
        for env in np.flatnonzero(self.ep_length[row]).tolist():
            past = (row - self.ep_start[row, env]) % self.buffer_size
            free_stream_buffers = np.arange(max(self.ep_length[row, env] - past, 0))
            self.ep_length[(row + free_stream_buffers) % self.buffer_size, env] = 0

    @atomic
    def reset(self) -> None:
        """
        Forget all transitions and give their memory back. Upstream's goes on to sample the episodes from before, and
        takes the one that was under way for one that goes on; this one begins anew.
        """
        super().reset()
        self.ep_length[:] = 0
        self._current_ep_start[:] = 0

    @atomic
    def truncate_last_trajectory(self) -> None:
        """Take the last trajectory for one that has ended, as upstream does."""
        super().truncate_last_trajectory()
        self._observations.first.update_newest_checksum()

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
        with self._observations.lock:  # another thread may add
            return self._sample(batch_size, env)

    def _sample(self, batch_size: int, env: VecNormalize | None) -> DictReplayBufferSamples:
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
        samples: DictReplayBufferSamples = self._make_samples(rows, envs, obs, next_obs, rewards, env)
        return samples

    # Not HerReplayBuffer's.
    __getstate__ = CompressedDictReplayBuffer.__getstate__
    __setstate__ = CompressedDictReplayBuffer.__setstate__


_ROLLOUT_ROWS = ("rewards", "returns", "episode_starts", "values", "log_probs", "advantages")


class CompressedRolloutBuffer(CompressedBuffer, RolloutBuffer):
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

    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import CompressedRolloutBuffer
    >>> model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, rollout_buffer_class=CompressedRolloutBuffer)
    >>> model.learn(64).num_timesteps
    64
    """

    _OTHER_CLASS_HINT = "use rollout_buffer_class=CompressedDictRolloutBuffer for it"

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
        buffer_size, n_envs = check_count("buffer_size", buffer_size), check_count("n_envs", n_envs)
        self._create_observations(
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

    @atomic
    def reset(self) -> None:
        """Forget the rollout, for the next one."""
        # Not RolloutBuffer's: it would allocate what this class exists to avoid.
        shape = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*shape, self.action_dim), dtype=self.action_space.dtype)
        for name in _ROLLOUT_ROWS:
            setattr(self, name, np.zeros(shape, dtype=np.float32))
        self.generator_ready = False
        BaseBuffer.reset(self)
        self._observations.clear()
        self.observations = self._observations.views(writable=True)

    @atomic
    def add(self, *args: Any, **kwargs: Any) -> None:
        """
        Add one step of each environment.

        :param args, kwargs: As in the class this one stands in for
        """
        super().add(*args, **kwargs)

    @atomic_start
    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """
        Minibatches of a rollout that is complete, in random order.

        :param batch_size: Number of steps in each; by default all
        """
        yield from super().get(batch_size)

    @atomic
    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        """
        Compute returns and advantages of a rollout that is complete.

        :param last_values: State values behind the last step, one an environment
        :param dones: Whether the last step ended an episode
        """
        super().compute_returns_and_advantage(last_values, dones)
        for store in self._observations.stores:
            store.free_stream_buffers()

    _get_samples: Any = without_copy(RolloutBuffer._get_samples)

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """
        Swap and then flatten axes 0 (buffer_size) and 1 (n_envs), of an array or of the observations.

        :param arr: Shape ``(buffer_size, n_envs, ...)``
        :return: Shape ``(buffer_size * n_envs, ...)``
        """
        return arr.swap_and_flatten() if isinstance(arr, ObservationView) else RolloutBuffer.swap_and_flatten(arr)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the rollout takes: frames, index, actions, rewards and so on."""
        return super().stored_nbytes + sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))


class CompressedDictRolloutBuffer(CompressedRolloutBuffer, DictRolloutBuffer):
    """
    :class:`CompressedRolloutBuffer` for ``Dict`` observations, in place of
    :class:`stable_baselines3.common.buffers.DictRolloutBuffer`.

    :param options: As in :class:`CompressedDictReplayBuffer`
    :raises InvalidTypeError: if the observation space is no ``Dict``

    >>> model = PPO("MultiInputPolicy", env, rollout_buffer_class=CompressedDictRolloutBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "use rollout_buffer_class=CompressedRolloutBuffer for it"
    _get_samples: Any = without_copy(DictRolloutBuffer._get_samples)
