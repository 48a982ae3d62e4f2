"""Conversion between datasets of episodes and Stable Baselines3's replay buffers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from rl_ext_core.datasets import Dataset, Episode, open_dataset, write_dataset
from rl_ext_core.datasets.episodes import Steps, map_values, split_episodes
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.environments import check_count
from sb3_ext.observations import Observations

_Buffer = TypeVar("_Buffer", bound="DatasetMethods")
_ROWS_PER_CHUNK = 512  # decoded at a time


class DatasetMethods(ReplayBuffer):
    """Methods of compressed replay buffers that read and write datasets."""

    _observations: Observations

    @classmethod
    def from_dataset(
        cls: type[_Buffer],
        source: Any,
        *,
        env: Any = None,
        buffer_size: int | None = None,
        n_envs: int | None = None,
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
        :param options: Further arguments of the class, such as ``codec`` or ``storage_dir``
        :return: The buffer, to be assigned to ``model.replay_buffer``
        :raises InvalidArgumentError: If there is no such dataset, its spaces differ from those of ``env``, it does not
            fit into ``buffer_size``, or ``storage_dir`` contains transitions already.
        :raises InvalidTypeError: If a space of the dataset is not supported, such as a Tuple.
        :raises MissingDependencyError: If ``minari`` is not installed.
        :raises CorruptFileError: If the dataset is damaged.
        """
        dataset = open_dataset(source)
        observation_space = _as_sb3_space(dataset.observation_space, f"{dataset.name}: observation_space")
        if env is not None:
            observation_space = _check_same_spaces(env, observation_space, dataset)
        action_space = dataset.action_space
        _check_action_space(action_space, dataset.name)
        n_envs = getattr(env, "num_envs", 1) if n_envs is None else check_count("n_envs", n_envs)
        buffer_size = dataset.n_steps if buffer_size is None else check_count("buffer_size", buffer_size)
        n_rows = dataset.n_steps // n_envs
        if not n_rows or buffer_size // n_envs < n_rows:
            raise InvalidArgumentError(
                f"buffer_size={buffer_size:,} and n_envs={n_envs}, but {dataset.name} has {dataset.n_steps:,} steps: "
                f"expected at least one step per environment, and buffer_size >= {max(n_rows, 1) * n_envs:,}. For a "
                "part of the episodes, pass a minari.MinariDataset of them"
            )
        if HerReplayBuffer in cls.__mro__:
            if not isinstance(env, VecEnv) or options.get("copy_info_dict"):
                raise InvalidArgumentError(
                    f"{cls.__name__} computes rewards with env, and without infos. Use {cls.__name__}.from_dataset("
                    "..., env=model.get_env()), without copy_info_dict"
                )
            options["env"] = env
        if options.get("resume"):
            raise InvalidArgumentError(
                f"resume=True is not for from_dataset(), which starts with an empty folder. Use {cls.__name__}(..., "
                "storage_dir=..., resume=True)"
            )
        storage_dir = options.get("storage_dir")
        created = storage_dir if storage_dir is not None and not Path(storage_dir).exists() else None
        buffer: Any = cls(buffer_size, observation_space, action_space, n_envs=n_envs, **options)
        try:
            columns = [_read_transitions(dataset, action_space, env * n_rows, n_rows) for env in range(n_envs)]
            for row in zip(*columns, strict=True):
                *arrays, infos = zip(*row, strict=True)
                buffer.add(*map(_stack, arrays), infos)
        except BaseException:
            buffer.reset()
            buffer.close()
            if created is not None:
                shutil.rmtree(created, ignore_errors=True)
            raise
        return buffer  # type: ignore[no-any-return]

    def to_dataset(self, target: str | os.PathLike[str], *, data_format: str = "hdf5") -> Path:
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


def _stack(values: tuple[Any, ...]) -> Any:
    """Stack the values of all environments."""
    return map_values(lambda *arrays: np.stack(arrays), *values)


def _read_transitions(
    dataset: Dataset, action_space: spaces.Space[Any], first: int, count: int
) -> Iterator[tuple[Any, ...]]:
    """Yield observation, next observation, action, reward, done and info of the steps from ``first`` on.

    Episodes are marked as ended after their last step, and after the last transition.
    """
    ends = np.cumsum(dataset.lengths)
    number = int(np.searchsorted(ends, first, side="right"))
    start, left = first - (int(ends[number - 1]) if number else 0), count
    while left:
        episode = dataset.read(number)
        observations = _transpose(dataset.observation_space, episode.observations)
        actions = _scale(action_space, np.asarray(episode.actions)).reshape(len(episode), -1)
        last = min(len(episode), start + left) - 1
        for step in range(start, last + 1):
            terminated = bool(episode.terminations[step])
            done = terminated or bool(episode.truncations[step]) or step == last
            obs, next_obs = (map_values(lambda array, row=row: array[row], observations) for row in (step, step + 1))
            info = {"TimeLimit.truncated": done and not terminated}
            yield obs, next_obs, actions[step], episode.rewards[step], done, info
        number, start, left = number + 1, 0, left - (last + 1 - start)


def read_buffer_episodes(buffer: Any) -> Iterator[Episode]:
    """
    Yield the episodes of a replay buffer, of one environment after the other, from the oldest to the newest.

    :param buffer: :class:`CompressedReplayBuffer`
    """
    rows, max_error = buffer._stored_rows(), buffer._observations.map_parts(lambda part: part.max_error)
    chunks = [rows[first : first + _ROWS_PER_CHUNK] for first in range(0, len(rows), _ROWS_PER_CHUNK)]
    for env in range(buffer.n_envs):
        yield from split_episodes((_read_steps(buffer, chunk, env) for chunk in chunks), max_error)


def _read_steps(buffer: ReplayBuffer, rows: np.ndarray, env: int) -> Steps:
    """Return the steps of one environment in these rows."""
    space = buffer.action_space
    actions = buffer.actions[rows, env].reshape(len(rows), *(space.shape or ()))
    done, timeout = buffer.dones[rows, env] > 0, buffer.timeouts[rows, env] > 0
    return Steps(
        _read_rows(buffer.observation_space, buffer.observations, rows, env),
        _read_rows(buffer.observation_space, buffer.next_observations, rows, env),
        _scale(space, actions, back=True).astype(space.dtype),
        buffer.rewards[rows, env].astype(np.float64),
        done & ~timeout,
        done & timeout,
    )


def _read_rows(space: spaces.Space[Any], arrays: Any, rows: np.ndarray, env: int) -> Any:
    """Return observations of one environment with the shapes of the space. SB3 stores discrete ones with an axis."""
    if isinstance(space, spaces.Dict):
        return {key: _read_rows(part, arrays[key], rows, env) for key, part in space.spaces.items()}
    return np.asarray(arrays[rows, env]).reshape(len(rows), *(space.shape or ()))


def _scale(space: spaces.Space[Any], actions: np.ndarray, *, back: bool = False) -> np.ndarray:
    """Scale actions of a Box to [-1, 1] as SB3's policies do, or back, in float64. Return others as they are."""
    if not isinstance(space, spaces.Box):
        return actions
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    center, half = (high + low) / 2, (high - low) / 2
    actions = actions.astype(np.float64)
    scaled: np.ndarray = actions * half + center if back else (actions - center) / half
    return scaled


def _check_action_space(space: spaces.Space[Any], name: str) -> None:
    """Check that SB3 can store actions of a space."""
    if isinstance(space, spaces.Dict) or (isinstance(space, spaces.Box) and space.dtype.kind != "f"):
        raise InvalidTypeError(
            f"{name}: action_space is {space}, expected a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        )
    if isinstance(space, spaces.Box) and not (np.isfinite(space.high - space.low) & (space.low < space.high)).all():
        raise InvalidArgumentError(
            f"{name}: action_space is {space}, expected finite bounds with low < high, because Stable Baselines3 "
            "scales actions to [-1, 1]. Record the dataset with gymnasium.wrappers.RescaleAction(env, -1, 1)"
        )


def _as_sb3_space(space: spaces.Space[Any], name: str) -> spaces.Space[Any]:
    """Return the observation space that SB3's buffers have, with images channels-first."""
    if not isinstance(space, spaces.Dict):
        return VecTransposeImage.transpose_space(space) if _is_channels_last(space) else space  # type: ignore[arg-type]
    if nested := [key for key, part in space.spaces.items() if isinstance(part, spaces.Dict)]:
        raise InvalidTypeError(f"{name} is a Dict with a Dict under {nested[0]!r}, expected a Dict without nesting")
    return spaces.Dict({key: _as_sb3_space(part, name) for key, part in space.spaces.items()})


def _transpose(space: spaces.Space[Any], values: Any) -> Any:
    """Return observations with the images channels-first, as SB3's ``VecTransposeImage`` does."""
    if isinstance(space, spaces.Dict):
        return {key: _transpose(part, values[key]) for key, part in space.spaces.items()}
    return VecTransposeImage.transpose_image(values) if _is_channels_last(space) else values


def _is_channels_last(space: spaces.Space[Any]) -> bool:
    """Return whether SB3 treats a space as images that it has to transpose."""
    return isinstance(space, spaces.Box) and is_image_space(space) and not is_image_space_channels_first(space)


def _check_same_spaces(env: Any, observation_space: spaces.Space[Any], dataset: Dataset) -> spaces.Space[Any]:
    """Check that the dataset has the spaces of an environment, and return its observation space in SB3's form."""
    if not hasattr(env, "observation_space"):
        raise InvalidTypeError(f"env={env!r}: expected an environment. Use env=model.get_env()")
    found = _as_sb3_space(env.observation_space, "env")
    for name, ours, theirs, is_same in (
        ("observations", observation_space, found, _describe(observation_space) == _describe(found)),
        ("actions", dataset.action_space, env.action_space, dataset.action_space == env.action_space),
    ):
        if not is_same:
            raise InvalidArgumentError(
                f"{dataset.name} has {name} of {ours}, but env has {theirs}. Wrap the environment as it was for the "
                "dataset, or choose another dataset"
            )
    return found


def _describe(space: spaces.Space[Any]) -> Any:
    """Return the class, shape, dtype and numbers of values of a space, by key for a Dict."""
    if isinstance(space, spaces.Dict):
        return {key: _describe(part) for key, part in space.spaces.items()}
    values = [str(getattr(space, name, None)) for name in ("n", "start", "nvec")]
    return type(space), space.shape, space.dtype, values
