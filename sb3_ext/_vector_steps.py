"""Steppers of :class:`GymVecEnv`: one for single sub-environments, and one for batches."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env.util import dict_to_obs

from rl_ext_core._values import copy_output
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.array_frameworks import (
    framework_of,
    keep_freed_memory,
    map_arrays,
    take_rows,
    to_framework,
    to_numpy,
    to_torch,
)
from rl_ext_core.vector.autoreset import accepts_parameter
from rl_ext_core.vector.environments import store_reward
from rl_ext_core.vector.stepper import Stepper, drop_final_keys, infos_to_dict, is_mask, is_per_env

__all__ = [
    "BatchStepper",
    "ObservationLayout",
    "SubEnvStepper",
    "TensorInfos",
    "TensorStepper",
    "add_episode",
]

Array = np.ndarray[Any, Any]

# Observations, rewards, dones, infos, and infos of the resets of environments whose episodes have ended, by index.
StepResult = tuple[Any, Array, Array, list[Any], dict[int, dict[str, Any]]]


class ObservationLayout:
    """Conversion between observations, a Dict or Tuple too, and lists of arrays.

    :param space: space of an observation, or of the part that is returned
    :param key: key of that part in the observation; None: the whole observation
    :raises InvalidArgumentError: If a part is not an array of fixed shape.
    """

    def __init__(self, space: spaces.Space[Any], key: str | None = None) -> None:
        parts: dict[Any, spaces.Space[Any]] = {None: space}
        if isinstance(space, spaces.Dict | spaces.Tuple):
            parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        for part in parts.values():
            if part.shape is None or part.dtype is None:
                raise InvalidArgumentError(
                    f"observations contain {part}, which is not an array of fixed shape. Stable Baselines3 takes a "
                    "Dict or Tuple of Box, Discrete, MultiDiscrete and MultiBinary. Select a part with "
                    "observation_key=..., or flatten it: gymnasium.wrappers.vector.FlattenObservation"
                )
        self._space, self._key, self._keys = space, key, list(parts)
        self.is_single = not isinstance(space, spaces.Dict | spaces.Tuple)
        self.shapes_and_dtypes = [(part.shape or (), part.dtype) for part in parts.values()]

    def empty(self, count: int) -> list[Array]:
        """Return one uninitialized array per part, each with ``count`` rows."""
        return [np.empty((count, *shape), dtype) for shape, dtype in self.shapes_and_dtypes]

    def parts(self, observation: Any) -> list[Any]:
        """Return the arrays in an observation that belong to the returned part."""
        observation = observation if self._key is None else observation[self._key]
        return [observation] if self.is_single else [observation[key] for key in self._keys]

    def build_observation(self, leaves: Sequence[Any]) -> Any:
        """Build an array, dict or tuple from the arrays of its parts."""
        return leaves[0] if self.is_single else dict_to_obs(self._space, dict(zip(self._keys, leaves, strict=True)))

    def rows(self, leaves: Sequence[Array]) -> Iterable[Any]:
        """Split batches into observations of one environment each."""
        return leaves[0] if self.is_single else map(self.build_observation, zip(*leaves, strict=True))


@dataclass
class SubEnvStepper:
    """Stepper of a ``SyncVectorEnv``'s sub-environments one by one, as in ``DummyVecEnv``.

    :ivar all_infos: whether to return infos of environments whose episodes continue
    """

    envs: list[Any]
    layout: ObservationLayout
    all_infos: bool

    def __post_init__(self) -> None:
        self._running = RunningInfo()

    def step(self, actions: Any) -> StepResult:
        is_single, all_infos, leaves = self.layout.is_single, self.all_infos, self.layout.empty(len(self.envs))
        first, running = leaves[0], self._running
        infos: list[Any] = [running] * len(self.envs)
        rewards, dones = np.empty(len(self.envs), np.float32), np.zeros(len(self.envs), bool)
        reset_infos: dict[int, dict[str, Any]] = {}
        for index, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, reward, terminated, truncated, info = env.step(action)
            store_reward(rewards, index, reward)
            if terminated or truncated:
                # Copy before the reset, which may write into both.
                infos[index] = _ended_info(copy_output(info), truncated and not terminated, copy_output(observation))
                observation, reset_info = env.reset()
                dones[index], reset_infos[index] = True, copy_output(reset_info)
            elif info and all_infos:
                infos[index] = {**copy_output(info), "TimeLimit.truncated": False}
            elif info:
                running.omitted_keys.update(info)
            if is_single:
                first[index] = observation  # without a call, which would take as long
            else:
                self._write_observation(leaves, index, observation)
        return self.layout.build_observation(leaves), rewards, dones, infos, reset_infos

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> tuple[Any, list[Any]]:
        leaves, infos = self.layout.empty(len(self.envs)), []
        for index, (env, seed, given) in enumerate(zip(self.envs, seeds, options, strict=True)):
            observation, info = env.reset(seed=seed, **({"options": given} if given else {}))
            self._write_observation(leaves, index, observation)
            infos.append(copy_output(info))
        return self.layout.build_observation(leaves), infos

    def _write_observation(self, leaves: list[Array], index: int, observation: Any) -> None:
        """Write the observation of environment ``index`` into its row of each array."""
        for leaf, part in zip(leaves, self.layout.parts(observation), strict=True):
            leaf[index] = part


@dataclass
class BatchStepper:
    """Stepper of all environments at once, which converts the results to NumPy arrays.

    :ivar framework: framework of the environment's arrays; None: detected from the first observation
    :ivar device: device of the actions, if they are tensors
    :ivar all_infos: whether to return infos of environments whose episodes continue
    :ivar copy: whether the environment may write into observations that it returned
    """

    stepper: Stepper
    layout: ObservationLayout
    framework: str | None
    device: torch.device | None
    all_infos: bool
    copy: bool
    action_dtype: Any

    def __post_init__(self) -> None:
        self._num_envs, self._env_name = self.stepper.num_envs, type(self.stepper.env).__name__
        self._running = RunningInfo()
        keep_freed_memory(sum(leaf.nbytes for leaf in self.layout.empty(self._num_envs)))

    def step(self, actions: Any) -> StepResult:
        if self.framework not in (None, "numpy"):
            actions = to_framework(np.asarray(actions, self.action_dtype), self.framework, self.device)
        elif isinstance(actions, list):
            actions = np.asarray(actions)
        observation, reward, terminated, truncated, info = self.stepper.step(actions)
        info = self._to_dict_info(info)
        *leaves, reward, terminated, truncated = _to_cpu_arrays(
            [*self.layout.parts(observation), reward, terminated, truncated]
        )
        leaves = self._convert_parts(leaves, self._num_envs, copy=self.copy)
        rewards = self._as_vector(reward, "rewards").astype(np.float32)
        terminated = self._as_vector(terminated, "terminations").astype(bool, copy=False)
        dones = terminated | self._as_vector(truncated, "truncations").astype(bool, copy=False)
        rows = dones.nonzero()[0]
        infos = self._infos_of_running(info, dones)
        reset_infos: dict[int, dict[str, Any]] = {}
        if len(rows):
            time_outs = (~terminated[rows]).tolist()  # before the reset, which may write into the flags
            own, lasts, resets = self._finish_episodes(leaves, dones, rows, info)
            for row, info, time_out, last in zip(rows.tolist(), own, time_outs, lasts, strict=True):
                infos[row] = _ended_info(info, time_out, last)
            reset_infos = dict(zip(rows.tolist(), resets, strict=True))
        return self.layout.build_observation(leaves), rewards, dones, infos, reset_infos

    def _infos_of_running(self, info: dict[str, Any], dones: Array) -> list[Any]:
        """Return a list of n infos, without those of ended episodes."""
        infos: list[Any] = [self._running] * self._num_envs
        if self.all_infos and info:
            running = np.flatnonzero(~dones)
            for index, own in zip(running.tolist(), self._infos_of_rows(drop_final_keys(info), running), strict=True):
                infos[index] = {**own, "TimeLimit.truncated": False}
        elif info:
            self._running.record_omitted(drop_final_keys(info), ~dones)
        return infos

    def _finish_episodes(self, leaves: list[Array], dones: Array, rows: Array, info: Any) -> Any:
        """Reset ended environments; return their infos, last observations and reset infos.

        Writes the observations of the resets into ``leaves``.
        """
        final = self.stepper.final_observation(rows, info)
        last, reset_info = self.stepper.infos(info)
        own = self._infos_of_rows(last, rows)  # before the reset, which may write into the info
        if final is not None:
            lasts = self._convert_parts(self.layout.parts(final), len(rows))
        else:
            lasts = [leaf[rows] for leaf in leaves]
            observation, info = self.stepper.reset(dones)
            reset_info = self._to_dict_info(info)
            fresh = self._convert_parts(self.layout.parts(observation), self._num_envs)
            for leaf, new in zip(leaves, fresh, strict=True):
                leaf[rows] = new[rows]
        return own, self.layout.rows(lasts), self._infos_of_rows(reset_info, rows)

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> tuple[Any, list[Any]]:
        if any(option != options[0] for option in options):
            raise InvalidArgumentError(
                f"the options differ between environments, but {self._env_name} resets all of them with the same. "
                "Use set_options({...}) with one dict"
            )
        given: dict[str, Any] = {"options": dict(options[0])} if options[0] else {}
        if seeds[0] is not None and accepts_parameter(self.stepper.env.reset, "seed"):
            given["seed"] = int(seeds[0])  # the environments add their index, as VecEnv.seed does
        elif seeds[0] is not None:
            warnings.warn(
                f"{self._env_name}.reset takes no seed: the seed is not used. Pass it when you create the environment",
                stacklevel=3,
            )
        observation, info = self.stepper.reset(**given)
        parts = self.layout.parts(observation)
        found = framework_of(parts)
        if self.framework is not None and found != self.framework and "jax" in (found, self.framework):
            raise InvalidArgumentError(
                f"env_type={self.framework!r}, but the environment's observations are {found}. Use "
                f"env_type={found!r}, or leave it out"
            )
        if self.framework is None:
            self.framework = found
            self.device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
        infos = self._infos_of_rows(self._to_dict_info(info), np.arange(self._num_envs))
        leaves = self._convert_parts(parts, self._num_envs, copy=self.copy)
        return self.layout.build_observation(leaves), infos

    def _convert_parts(self, parts: list[Any], count: int, *, copy: bool = False) -> list[Any]:
        """Check shapes, and convert to arrays of the dtypes of the space. Read-only arrays are copied."""
        leaves = _to_cpu_arrays(parts)
        self._check_shapes(leaves, count)
        return [
            leaf.astype(dtype, order="C", copy=copy or not leaf.flags.writeable)
            for leaf, (_, dtype) in zip(leaves, self.layout.shapes_and_dtypes, strict=True)
        ]

    def _check_shapes(self, leaves: list[Any], count: int) -> None:
        for leaf, (shape, _) in zip(leaves, self.layout.shapes_and_dtypes, strict=True):
            if tuple(leaf.shape) != (count, *shape):
                raise EnvironmentOutputError(
                    f"{self._env_name} returned observations of shape {tuple(leaf.shape)}, expected "
                    f"{(count, *shape)}, as in its observation space"
                )

    def _as_vector(self, values: Any, name: str) -> Any:
        """Reshape values to (n,); raise an error if their number is not n."""
        if math.prod(values.shape) != self._num_envs:
            raise EnvironmentOutputError(
                f"{self._env_name} returned {name} of shape {tuple(values.shape)}; expected ({self._num_envs},)"
            )
        return values.reshape(self._num_envs)

    def _to_dict_info(self, info: Any) -> dict[str, Any]:
        """Return an info as a dict of arrays and masks; a list of dicts is converted."""
        if isinstance(info, dict):
            return info
        each = list(info) if is_per_env(info) or isinstance(info, tuple) else None
        if each is not None and len(each) == self._num_envs:
            return infos_to_dict(each)  # type: ignore[no-any-return]
        found = f"a value of type {type(info).__name__}" if each is None else f"a list of {len(each)} infos"
        raise EnvironmentOutputError(
            f"{self._env_name} returned {found} as the info of {self._num_envs} environments; expected a dict of "
            "arrays, or a list with a dict for each environment"
        )

    def _infos_of_rows(self, info: dict[str, Any] | None, rows: Array) -> list[dict[str, Any]]:
        """Return copies of the infos of some environments; tensors are copied to the CPU at once."""
        found: list[dict[str, Any]] = [{} for _ in range(len(rows))]
        if info and found:
            columns = _select_info_rows(info, rows, self._num_envs, broadcast=self.device is None)
            tensors: list[torch.Tensor] = []
            map_arrays(lambda part: tensors.append(part) if isinstance(part, torch.Tensor) else None, columns)
            arrays = iter(_to_cpu_arrays(tensors))
            columns = map_arrays(lambda part: next(arrays) if isinstance(part, torch.Tensor) else part, columns)
            _fill_infos(found, columns)
        return found


# -- steps on tensors


@dataclass(eq=False)
class TensorInfos(Sequence[dict[str, Any]]):
    """Infos of a step whose results are tensors, (n,) each. The list of dicts is built when it is read first.

    Read it, and copy ``final_observation``, before the next step, in which the environment may overwrite them.

    :ivar dones: whether each episode has ended, bool
    :ivar truncated: whether it ended by truncation alone, bool
    :ivar final_observation: last observations, (n, ...) each, valid where episodes have ended. None if no episode has
        ended, or if the environment does not return them
    :ivar build: function that returns the list of dicts
    :ivar missing: function that returns the error if episodes have ended and ``final_observation`` is None; None if
        that is correct
    :ivar returns: sum of rewards since the start of each episode, float64. None if the dicts contain the statistics.
        If the environment reports the return of an episode, as ``RecordEpisodeStatistics`` does, that return
    :ivar lengths: steps since the start of each episode, int64; those of the environment in the same way
    :ivar seconds: time since the environment was created
    :ivar success: ``is_success`` in the info of each environment, float64, NaN where it is missing; or None
    """

    dones: torch.Tensor
    truncated: torch.Tensor
    final_observation: Any
    build: Callable[[TensorInfos], list[Any]]
    missing: Callable[[], Exception] | None = None
    returns: Any = None
    lengths: Any = None
    seconds: float = 0.0
    success: torch.Tensor | None = None

    def copy_time_outs(self, step: int) -> list[tuple[int, torch.Tensor, Any]]:
        """Return a list with the step's number, rows that a time limit ended, and their last observations.

        To find the rows would wait for another device than the CPU. There, it is a mask, with last observations of all.
        """
        final = self.final_observation
        if final is None:
            return []
        if not self.truncated.is_cpu:
            return [(step, self.truncated, map_arrays(torch.clone, final))]
        rows = self.truncated.nonzero().flatten()
        return [(step, rows, map_arrays(partial(take_rows, rows=rows), final))] if len(rows) else []

    @cached_property
    def _list(self) -> list[Any]:
        """Dicts of all environments, whose construction waits for the device."""
        return self.build(self)

    def __len__(self) -> int:
        return len(self.dones)

    def __getitem__(self, index: Any) -> Any:
        return self._list[index]


class TensorStepper(BatchStepper):
    """Stepper of all environments at once, which returns tensors on their device.

    A step does not wait for the device if the environment resets itself in the step and returns all last observations.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._start_time = time.time()
        self._returns = torch.zeros(self._num_envs, dtype=torch.float64, device=self.device)
        self._lengths = torch.zeros(self._num_envs, dtype=torch.int64, device=self.device)
        keep_freed_memory(8 << 20)  # rollout buffers store the observations of many steps, and free them at once

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> tuple[Any, list[Any]]:
        # New tensors, because those of steps in torch.inference_mode() cannot be written.
        self._returns, self._lengths = torch.zeros_like(self._returns), torch.zeros_like(self._lengths)
        return super().reset(seeds, options)

    def step(self, actions: Any) -> Any:
        """Take a step.

        :param actions: tensor, (n, ...)
        :return: observations, rewards, dones and :class:`TensorInfos`
        """
        dtype = torch_dtype(self.action_dtype)
        observation, reward, terminated, truncated, info = self.stepper.step(actions.to(self.device, dtype))
        info = self._to_dict_info(info)
        leaves = self._convert_parts(self.layout.parts(observation), self._num_envs, copy=self.copy)
        rewards = self._as_tensor(reward, "rewards").to(torch.float32, copy=True)
        terminated = self._as_tensor(terminated, "terminations").bool()
        truncated = self._as_tensor(truncated, "truncations").bool()
        dones, truncated = terminated | truncated, truncated & ~terminated
        final = self._final_leaves(leaves, dones, info)
        if not self.stepper.resets_in_step and final is not None:
            leaves, info = self._reset_ended(final, dones, info)
        # Splitting the info takes time, and few environments report successes or episodes.
        own = self.stepper.infos(info)[0] if info.keys() & {"is_success", "episode", "final_info"} else {}
        returns, lengths = self._returns + rewards, self._lengths + 1
        self._returns, self._lengths = returns.masked_fill(dones, 0), lengths.masked_fill(dones, 0)
        infos = TensorInfos(
            dones,
            truncated,
            None if final is None else self.layout.build_observation(final),
            partial(self._build_infos, info=info),
            self.stepper.missing_final_obs_error,
            _prefer(self._select_numbers(own, "episode", "r"), returns),
            _prefer(self._select_numbers(own, "episode", "l"), lengths),
            round(time.time() - self._start_time, 6),
            self._select_numbers(own, "is_success"),
        )
        return self.layout.build_observation(leaves), rewards, dones, infos

    def _convert_parts(self, parts: list[Any], count: int, *, copy: bool = False) -> list[Any]:
        """Check shapes, and convert to contiguous tensors of the dtypes of the space."""
        tensors = [torch.as_tensor(to_torch(part), device=self.device).detach() for part in parts]
        self._check_shapes(tensors, count)
        return [
            tensor.to(torch_dtype(dtype), copy=copy, memory_format=torch.contiguous_format).contiguous()
            for tensor, (_, dtype) in zip(tensors, self.layout.shapes_and_dtypes, strict=True)
        ]

    def _as_tensor(self, values: Any, name: str) -> torch.Tensor:
        """Convert values to an (n,) tensor on the device."""
        return self._as_vector(torch.as_tensor(values, device=self.device), name).detach()  # type: ignore[no-any-return]

    def _select_numbers(self, info: Any, *keys: str) -> torch.Tensor | None:
        """Return a number of each environment, (n,) float64, NaN where it is missing; None if the info lacks it.

        :param keys: keys of the number in nested dicts
        """
        found, masks = info, []
        for key in keys:
            if not isinstance(found, dict):
                return None
            masks += [found[f"_{key}"]] if is_mask(found, f"_{key}", self._num_envs) else []
            found = found.get(key)
        if is_per_env(found) or isinstance(found, tuple):
            found = [*map(to_numpy, found)]
        if isinstance(found, list | np.ndarray):
            found = np.array(found, np.float64)  # None becomes NaN
        if getattr(found, "shape", ())[:1] != (self._num_envs,):
            return None
        found = self._as_tensor(found, keys[-1]).to(torch.float64, copy=True)  # the environment may overwrite it
        for mask in masks:
            found = found.masked_fill(~torch.as_tensor(mask, device=self.device), torch.nan)
        return found

    def _final_leaves(self, leaves: list[Any], dones: torch.Tensor, info: Any) -> list[Any] | None:
        """Return last observations, (n, ...) each; None if the step returned none."""
        if not self.stepper.resets_in_step:
            return leaves if to_numpy(dones).any() else None
        final = self.stepper.final_observation(None, info)
        if final is None:
            return None
        if isinstance(final, dict | tuple | torch.Tensor):
            parts = self.layout.parts(final)
            if all(isinstance(part, torch.Tensor) and len(part) == self._num_envs for part in parts):
                return self._convert_parts(parts, self._num_envs)
        # Objects, or only the rows of ended episodes. Their numbers are read from the device.
        rows = np.flatnonzero(to_numpy(dones))
        if not len(rows):
            return None
        parts = self._convert_parts(self.layout.parts(self.stepper.final_observation(rows, info)), len(rows))
        places = (torch.from_numpy(rows).to(self.device),)
        return [leaf.index_put(places, part) for leaf, part in zip(leaves, parts, strict=True)]

    def _reset_ended(self, leaves: list[Any], dones: torch.Tensor, info: Any) -> tuple[list[Any], Any]:
        """Reset ended environments. Return observations with those of the resets, and a copy of the last info."""
        info = map_arrays(copy_output, info)  # the reset may write into it
        observation, _ = self.stepper.reset(to_numpy(dones))
        new = self._convert_parts(self.layout.parts(observation), self._num_envs, copy=self.copy)
        return [torch.where(expand(dones, old), part, old) for part, old in zip(new, leaves, strict=True)], info

    def _build_infos(self, infos: TensorInfos, info: Any) -> list[Any]:
        """Return the infos of a step as a list of dicts, with arrays."""
        dones = np.asarray(to_numpy(infos.dones))
        if infos.missing is not None and infos.final_observation is None and dones.any():
            raise infos.missing()
        found, rows = self._infos_of_running(info, dones), np.flatnonzero(dones)
        own = self._infos_of_rows(self.stepper.infos(info)[0], rows)
        final = map_arrays(to_numpy, infos.final_observation)
        truncated, returns, lengths = (
            to_numpy(part).tolist() for part in (infos.truncated, infos.returns, infos.lengths)
        )
        for index, row in zip(rows.tolist(), own, strict=True):
            last = map_arrays(lambda part, index=index: part[index].copy(), final)
            found[index] = _ended_info(row, truncated[index], last)
            add_episode(found[index], returns[index], lengths[index], infos.seconds)
        return found


def _prefer(numbers: torch.Tensor | None, others: torch.Tensor) -> torch.Tensor:
    """Return numbers of the environment, or others where they are NaN or None."""
    return others if numbers is None else torch.where(numbers.isnan(), others, numbers.to(others.dtype))


def expand(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Add axes to an (n,) mask, so that it broadcasts with a tensor (n, ...)."""
    return mask.view(-1, *[1] * (like.ndim - 1))


@cache
def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of torch with the name of a dtype of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


# -- infos


def _ended_info(own: dict[str, Any], time_out: Any, last: Any) -> dict[str, Any]:
    """Return the environment's info of an ended episode with the keys of Stable Baselines3."""
    return {**own, "TimeLimit.truncated": bool(time_out), "terminal_observation": last}


def add_episode(info: dict[str, Any], total: float, length: int, seconds: float) -> None:
    """Add the statistics of an ended episode to its info, unless the environment returns its own."""
    own, episode = info.get("episode"), {"r": total, "l": length, "t": seconds}
    if isinstance(own, dict) and own:
        # ManiSkill's episode has other keys; SB3 reads r, l and t.
        episode = own if "r" in own else {**own, **episode}
    info["episode"] = episode


def _select_info_rows(info: Any, rows: Array, count: int, *, broadcast: bool) -> dict[str, Any]:
    """Return some rows of all values and masks in an info.

    :param broadcast: whether values without a row for each environment are repeated; else they are left out
    """
    columns: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, dict):
            columns[key] = _select_info_rows(value, rows, count, broadcast=broadcast)
        elif getattr(value, "shape", ())[:1] == (count,):
            columns[key] = take_rows(value, rows)
        elif isinstance(value, list | tuple) and len(value) == count:
            columns[key] = [to_numpy(value[row]) for row in rows.tolist()]
        elif broadcast:
            columns[key] = [to_numpy(value)] * len(rows)
    return columns


def _fill_infos(infos: list[dict[str, Any]], columns: dict[str, Any]) -> None:
    """Write the values of each row into its info, except where a mask is False."""
    for key, column in columns.items():
        if is_mask(columns, key, len(infos)):
            continue
        values = column
        if isinstance(column, dict):
            values = [{} for _ in infos]
            _fill_infos(values, column)
        present = columns[f"_{key}"] if is_mask(columns, f"_{key}", len(infos)) else itertools.repeat(True)
        for info, value, is_present in zip(infos, values, present, strict=False):
            if is_present:
                info[key] = copy_output(value)


class RunningInfo(dict[str, Any]):
    """Read-only info that all environments share whose episodes continue.

    :ivar omitted_keys: keys that environments returned and that this info lacks; reading one raises KeyError
    """

    # SB3 reads these in every step.
    _KEYS_READ_BY_SB3 = frozenset({"episode", "is_success", "terminal_observation", "TimeLimit.truncated"})

    def __init__(self) -> None:
        super().__init__({"TimeLimit.truncated": False})
        self.omitted_keys: set[str] = set()

    def record_omitted(self, info: dict[str, Any], running: Array) -> None:
        """Record the keys of an info that environments with continuing episodes returned.

        :param running: whether each episode continues, (n,) bool
        """
        for key in info.keys() - self.omitted_keys:
            mask = f"_{key}"
            if not is_mask(info, mask, len(running)) or np.asarray(to_numpy(info[mask]))[running].any():
                self.omitted_keys.add(key)

    def _raise_read_only(self, *_: Any, **__: Any) -> Any:
        raise InvalidTypeError(
            "this info is shared by all environments whose episodes continue, and cannot be changed. Change a copy, "
            'info.copy(), or write GymVecEnv(..., infos="all")'
        )

    __setitem__ = __delitem__ = __ior__ = _raise_read_only
    clear = pop = popitem = setdefault = update = _raise_read_only

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r}: infos are built only for environments whose episodes have ended. For all infos write "
            'GymVecEnv(..., infos="all")'
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default.

        :raises KeyError: If an environment returned this key, because the default would be wrong.
        """
        if key in self.omitted_keys and key not in self._KEYS_READ_BY_SB3:
            self.__missing__(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self.get(str(key)) is not None

    def __reduce__(self) -> Any:  # copies and pickles are plain dicts
        return dict, (dict(self),)


# -- tensors


def _to_cpu_arrays(parts: list[Any]) -> list[Array]:
    """Convert tensors to arrays, with one copy for all that are not on the CPU."""
    remote = [index for index, part in enumerate(parts) if isinstance(part, torch.Tensor) and not part.is_cpu]
    found = list(parts)
    if len(remote) > 1:
        for index, array in zip(remote, _copy_in_one_block([parts[index] for index in remote]), strict=True):
            found[index] = array
    return [part if type(part) is np.ndarray else np.asarray(to_numpy(part)) for part in found]


def _copy_in_one_block(tensors: list[torch.Tensor]) -> list[Array]:
    """Copy tensors of one device into one block on the CPU, and return arrays in it."""
    # Sort by decreasing item size, so that each array is aligned to its items.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    flat = [tensors[index].detach().contiguous().view(-1).view(torch.uint8) for index in order]
    found: list[Any] = [None] * len(tensors)
    for index, part in zip(order, torch.split(torch.cat(flat).cpu(), [len(part) for part in flat]), strict=True):
        found[index] = to_numpy(part.view(tensors[index].dtype).view(tensors[index].shape))
    return found
