"""Export of TorchRL's storages as datasets of episodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rl_ext_core.datasets import write_dataset
from rl_ext_core.datasets.episodes import Steps, split_episodes
from rl_ext_core.errors import InvalidArgumentError

_ROWS_PER_CHUNK = 512  # decoded at a time
# Leaves that are in an element and under "next", and are not observations.
_NOT_OBSERVED = {"done", "terminated", "truncated", "reward", "info", "is_init", "step_count", "reward_sum", "index"}


def save_storage(
    storage: Any,
    target: str | os.PathLike[str],
    action_space: spaces.Space[Any],
    *,
    observation_space: spaces.Space[Any] | None = None,
    data_format: str = "hdf5",
) -> Path:
    """Write all elements as a Minari dataset, from the oldest to the newest.

    Episodes without their beginning or end are included. Where an observation is not the next one of the step before,
    a new episode begins. An episode that was not finished is marked as truncated. No image is stored as JPEG. Infos
    are left out.

    :param target: Minari id, such as ``"cartpole/mine-v0"``, or folder. It must not exist.
    :param action_space: Gymnasium space of the actions, such as ``gymnasium.spaces.Discrete(6)``. One-hot actions are
        written as numbers.
    :param observation_space: Gymnasium space of the observations. None: a space of their shapes and dtypes, a ``Dict``
        if there are several keys.
    :param data_format: ``"hdf5"``, ``"arrow"`` or ``"parquet"``.
    :return: Folder that ``minari.MinariDataset`` loads.
    :raises InvalidArgumentError: If the target exists, the storage is empty, or values do not fit the spaces.
    :raises MissingDependencyError: If ``minari`` is not installed.
    :raises StorageError: If the folder cannot be written.
    """
    storage._require_open()
    with storage.lock:  # other threads and processes could add
        keys = _find_observation_keys(storage)
        space = _infer_space(_observations(storage.get(0), keys)) if observation_space is None else observation_space
        parts = _rows_by_age(storage).split(_ROWS_PER_CHUNK)
        steps = (_as_steps(storage.get(part), keys, space, action_space) for part in parts)
        episodes = split_episodes(steps, storage._options["max_error"])
        return write_dataset(target, episodes, space, action_space, data_format=data_format)


def _rows_by_age(storage: Any) -> Any:
    """Return the rows of a storage, from the oldest element to the newest."""
    n_steps, last = len(storage), storage._last_cursor_index
    if last is None and n_steps == storage.max_size:
        raise InvalidArgumentError(
            "the storage is full, and it is unknown which element is the oldest, because its contents were loaded. "
            "Export it before it is saved, or from its storage_dir"
        )
    first = 0 if last is None or n_steps < storage.max_size else last + 1
    return (first + torch.arange(n_steps)) % n_steps


def _find_observation_keys(storage: Any) -> list[str]:
    """Return the keys of the observations: those in an element and under ``"next"``, except flags and counters."""
    if storage.ndim != 1 or not len(storage):
        raise InvalidArgumentError(
            f"the storage has ndim={storage.ndim} and {len(storage)} elements, expected ndim=1 and at least one element"
        )
    element = storage.get(0)
    found = element.keys(), element.get("next", TensorDict()).keys()
    keys = [str(key) for key in found[0] if key in found[1] and key not in _NOT_OBSERVED]
    if not keys or "action" not in found[0] or not {"reward", "done"} <= set(found[1]):
        raise InvalidArgumentError(
            f"elements have the keys {[*found[0]]}, and {[*found[1]]} under 'next': expected observations in both, "
            "'action', ('next', 'reward') and ('next', 'done')"
        )
    return keys


def _observations(elements: Any, keys: list[str]) -> Any:
    """Return the observations of elements, as a TensorDict if there are several keys."""
    return elements.get(keys[0]) if len(keys) == 1 else elements.select(*keys, strict=True)


def _infer_space(leaf: Any) -> spaces.Space[Any]:
    """Return a space for one observation, or for a TensorDict of them. Images have bounds, and floats have none."""
    if isinstance(leaf, TensorDict):
        return spaces.Dict({key: _infer_space(value) for key, value in leaf.items()})
    dtype = leaf.cpu().numpy().dtype
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, tuple(leaf.shape), dtype.type)
    if dtype.kind == "b":
        return spaces.MultiBinary(tuple(leaf.shape))
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, tuple(leaf.shape), dtype.type)


def _as_steps(
    elements: Any, keys: list[str], observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> Steps:
    """Convert elements to steps."""
    following = elements.get("next")
    done = _as_column("done", following.get("done")).astype(bool)
    terminated = following.get("terminated", None)
    terminations = done if terminated is None else _as_column("terminated", terminated).astype(bool)
    observations, next_observations = (
        _as_arrays(observation_space, _observations(part, keys), "observations") for part in (elements, following)
    )
    actions = _as_arrays(action_space, elements.get("action"), "actions")
    rewards = _as_column("reward", following.get("reward"))
    return Steps(observations, next_observations, actions, rewards, terminations, done & ~terminations)


def _as_column(name: str, values: torch.Tensor) -> npt.NDArray[Any]:
    """Return one number per step, as an array."""
    if values[0].numel() != 1:
        raise InvalidArgumentError(
            f"('next', {name!r}) has shape {tuple(values.shape)}, expected one number per step; Minari has one agent"
        )
    return values.reshape(-1).cpu().numpy()


def _as_arrays(space: spaces.Space[Any], values: Any, name: str) -> Any:
    """Return values with the shape and dtype of a space. One-hot values become numbers of a Discrete space."""
    if isinstance(space, spaces.Dict) and isinstance(values, TensorDict):
        if missing := space.spaces.keys() - set(values.keys()):
            raise InvalidArgumentError(f"{name} lack the keys {sorted(missing)} of {space}")
        return {key: _as_arrays(part, values.get(key), name) for key, part in space.spaces.items()}
    shape = tuple(values.shape[1:])
    if isinstance(space, spaces.Discrete) and shape == (int(space.n),) and space.n > 1:
        return values.to(torch.int64).argmax(-1).cpu().numpy() + space.start
    expected = tuple(space.shape or ())
    long_axes, expected_axes = ([n for n in sizes if n != 1] for sizes in (shape, expected))
    if isinstance(values, TensorDict) or long_axes != expected_axes or isinstance(space, spaces.Dict):
        raise InvalidArgumentError(f"{name} have shape {shape}, expected {expected} as in {space}. Pass their space")
    array = values.reshape(len(values), *expected).cpu().numpy()
    cast = array.astype(space.dtype, copy=False)
    if cast.dtype.kind != "f" and (cast != array).any():
        raise InvalidArgumentError(f"{name} of dtype {array.dtype} are not values of {space}. Pass their space")
    return cast
