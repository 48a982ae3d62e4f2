"""``VecEnv`` wrappers on tensors: conversion from arrays, and normalization.

The algorithms of :mod:`sb3_ext.tensor` use them, and that module exports them.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.array_frameworks import framework_of, leaves, map_arrays, to_numpy
from sb3_ext._vector_steps import TensorInfos
from sb3_ext.gym_vec_env import GymVecEnv, reject_array_algorithm, to_arrays

__all__ = ["TensorVecEnv", "TensorVecNormalize", "check_layers", "copy_to_array", "locals_for_callbacks"]


class TensorVecEnv(VecEnvWrapper):
    """Wrapper that returns the arrays of a ``VecEnv`` as tensors on the CPU.

    The algorithms of this module add it to environments on arrays. A step whose actions are an array returns arrays.

    :param venv: vectorized environment on arrays
    """

    tensors = True
    _returns_arrays = False

    def reset(self) -> Any:
        """Reset all environments, and return tensors.

        :raises EnvironmentOutputError: If the ``VecEnv`` does not return arrays.
        """
        reject_array_algorithm()
        observations = self.venv.reset()
        if framework_of(observations) != "numpy":
            raise EnvironmentOutputError(
                f"{type(self.unwrapped).__name__} is a VecEnv that returns {framework_of(observations)} tensors, "
                "expected arrays. Pass the environment in it: GymVecEnv(env, tensors=True)"
            )
        return map_arrays(_copy_to_tensor, observations)

    def step_async(self, actions: Any) -> None:
        """Begin a step with a tensor or an array of actions."""
        self._returns_arrays = not isinstance(actions, torch.Tensor)
        self.venv.step_async(to_numpy(actions))

    def step_wait(self) -> Any:
        """Finish the step: observations, rewards, dones, infos."""
        observations, rewards, dones, infos = result = self.venv.step_wait()
        if self._returns_arrays:
            return result
        dones, truncated = np.array(dones, bool), np.zeros(len(dones), bool)
        rows = dones.nonzero()[0].tolist()
        truncated[rows] = [infos[row].get("TimeLimit.truncated", False) for row in rows]
        ended = [(row, infos[row]) for row in rows if infos[row].get("terminal_observation") is not None]
        final = map_arrays(_copy_to_tensor, observations) if ended else None
        for row, info in ended:
            map_arrays(partial(_write_row, row), final, info["terminal_observation"])
        build = partial(_write_final_observations, infos, final)
        found = TensorInfos(torch.from_numpy(dones), torch.from_numpy(truncated), final, build)
        return map_arrays(_copy_to_tensor, observations), torch.tensor(rewards), found.dones, found


def _copy_to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Copy an array to a tensor. torch refuses negative strides, as of images that a wrapper has flipped."""
    is_flipped = any(stride < 0 for stride in array.strides)
    return torch.tensor(array.copy("K") if is_flipped else array)


def copy_to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy a tensor to an array."""
    return to_numpy(tensor).copy()  # type: ignore[no-any-return]


def map_data(function: Any, value: Any) -> Any:
    """Apply a function to a tensor or array, or to a dict of them; return other values as is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return function(value)
    if isinstance(value, dict) and all(isinstance(part, torch.Tensor | np.ndarray) for part in value.values()):
        return {key: function(part) for key, part in value.items()}
    return value


def _write_row(row: int, batch: torch.Tensor, value: Any) -> None:
    batch[row] = _copy_to_tensor(np.asarray(value))


def _write_final_observations(infos: list[Any], original: Any, found: TensorInfos) -> list[Any]:
    """Write last observations that a wrapper has normalized into the infos, as ``VecNormalize`` does.

    :param original: last observations before the wrapper
    """
    final = found.final_observation
    for row, info in enumerate(infos) if final is not original else ():
        if "terminal_observation" in info:
            info["terminal_observation"] = map_arrays(lambda part, row=row: copy_to_array(part[row]), final)
    return infos


def check_layers(env: Any) -> None:
    """Raise an error if the algorithms on tensors cannot train on an environment.

    :param env: environment, or ``VecEnv``
    :raises InvalidTypeError: If a wrapper works on arrays, or if ``env`` is a vectorized environment without one.
    :raises InvalidArgumentError: If tensors would be copied to the CPU, or have the channels of images last.
    """
    if not isinstance(env, VecEnv) and hasattr(env, "num_envs"):
        raise InvalidTypeError(
            f"{type(env).__name__} is not a VecEnv. Use GymVecEnv(env, tensors=True), or without tensors if it steps "
            "on arrays"
        )
    layers = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    # A wrapper also has the attributes of the environment in it.
    returns_tensors = [vars(layer).get("tensors", getattr(type(layer), "tensors", False)) for layer in layers]
    on_tensors = any(returns_tensors)
    for layer in layers:
        if isinstance(layer, VecNormalize) and not isinstance(layer, TensorVecNormalize):
            raise InvalidTypeError(
                f"{type(layer).__name__} works on arrays. Use sb3_ext.tensor.TensorVecNormalize(env), which has the "
                "same arguments and reads the same files"
            )
    for layer, is_on_tensors in zip(layers, returns_tensors, strict=True):
        if isinstance(layer, TensorVecEnv):
            break  # it converts arrays, on which all other wrappers work
        if on_tensors and not is_on_tensors:
            raise InvalidTypeError(
                f"{type(layer).__name__} works on arrays, but the environment in it returns tensors. Leave it out "
                "(GymVecEnv has episode statistics; TensorVecNormalize normalizes), or leave out tensors=True"
            )
    base = layers[-1]
    if isinstance(base, GymVecEnv) and base.device is not None and not base.tensors:
        raise InvalidArgumentError(
            f"GymVecEnv copies the tensors of {type(base.env).__name__} to the CPU. Use "
            "GymVecEnv(env, tensors=True), or use the algorithm of stable_baselines3"
        )
    space = env.observation_space
    parts: Any = space.spaces.values() if isinstance(space, spaces.Dict) else (space,)
    for part in parts:
        if on_tensors and is_image_space(part) and not is_image_space_channels_first(part):
            raise InvalidArgumentError(
                f"images of shape {part.shape} have their channels last, expected them first, as torch does. Permute "
                "them in the environment: image.permute(0, 3, 1, 2)"
            )


def _to_tensor_env(env: VecEnv) -> VecEnv:
    check_layers(env)
    return env if getattr(env, "tensors", False) else TensorVecEnv(env)


class _Flags(torch.Tensor):
    """Flags on which ``np.sum`` works, for callbacks such as ``StopTrainingOnMaxEpisodes``."""

    def sum(self, *args: Any, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """Sum as a tensor; NumPy passes ``axis`` and ``out``."""
        return self.as_subclass(torch.Tensor).sum(*args, **kwargs)


def locals_for_callbacks(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables of ``collect_rollouts`` as callbacks read them."""
    return {**variables, "dones": variables["dones"].as_subclass(_Flags)}


class TensorRunningMeanStd(RunningMeanStd):
    """Running mean and variance on a device, in float64. The count stays on the CPU."""

    mean: Any
    var: Any

    @classmethod
    def from_arrays(cls, other: RunningMeanStd) -> TensorRunningMeanStd:
        """Copy statistics of Stable Baselines3."""
        found = cls()
        found.mean, found.var = (torch.tensor(np.asarray(part, np.float64)) for part in (other.mean, other.var))
        found.count = float(other.count)
        return found

    def to_arrays(self) -> RunningMeanStd:
        """Copy the statistics to arrays."""
        found = RunningMeanStd()
        found.mean, found.var, found.count = (copy_to_array(self.mean), copy_to_array(self.var), self.count)
        return found

    def to(self, device: torch.device) -> TensorRunningMeanStd:
        """Move the statistics to a device."""
        self.mean, self.var = self.mean.to(device), self.var.to(device)
        return self

    def update(self, arr: Any) -> None:
        """Add a batch, (n, ...)."""
        self.to(arr.device)
        if not arr.is_floating_point():
            arr = arr.double()
        elif arr.dtype == torch.float16:
            arr = arr.float()  # np.var stays in float16, where squares of numbers above 255 overflow
        mean = arr.mean(0)
        # np.var adds up squares in this order, which torch.var does not.
        variance = (arr - mean).square().sum(0) / len(arr)
        self.update_from_moments(mean, variance, len(arr))

    def update_from_moments(self, batch_mean: Any, batch_var: Any, batch_count: float) -> None:
        """Combine with the moments of a batch."""
        delta, total = batch_mean - self.mean, self.count + batch_count
        squares = self.var * self.count + batch_var * batch_count
        squares = squares + delta.square() * self.count * batch_count / total
        self.mean, self.var = self.mean + delta * batch_count / total, squares / total
        self.count = total


def _statistics(name: str, doc: str) -> Any:
    """Return a property that stores statistics as tensors in the instance's ``__dict__``, and returns arrays."""

    def copy(self: Any) -> Any:
        # VecEnvWrapper does not permit that a property raises AttributeError.
        stored = vars(self).get(name)
        return None if stored is None else map_arrays(TensorRunningMeanStd.to_arrays, stored)

    def store(self: Any, value: Any) -> None:
        if value is not None:
            vars(self)[name] = map_arrays(TensorRunningMeanStd.from_arrays, value)

    return property(copy, store, doc=doc)


class TensorVecNormalize(VecNormalize):
    """``VecNormalize`` on tensors, with the same arguments and files.

    ``obs_rms`` and ``ret_rms`` are copies of the statistics as arrays, so that ``EvalCallback`` can pass them to a
    ``VecNormalize``. :meth:`save` writes a file that ``VecNormalize.load`` reads, and :meth:`load` reads both.

    :param venv: vectorized environment; one on arrays is converted
    :param kwargs: see ``VecNormalize``
    """

    tensors = True
    venv: Any
    returns: Any
    old_obs: Any
    old_reward: Any
    _returns_arrays = False

    def __init__(self, venv: VecEnv, *args: Any, **kwargs: Any) -> None:
        super().__init__(_to_tensor_env(venv), *args, **kwargs)

    obs_rms = _statistics("obs_rms", "Copy of the statistics of observations; of a Dict, one for each key; or None.")
    ret_rms = _statistics("ret_rms", "Copy of the statistics of discounted returns.")

    def reset(self) -> Any:
        """Reset all environments, and return normalized tensors."""
        self.old_obs = observations = self.venv.reset()
        device = next(leaves(observations)).device
        self.returns = torch.zeros(self.num_envs, dtype=torch.float64, device=device)
        self._update_observations(observations)
        return self.normalize_obs(observations)

    def step_async(self, actions: Any) -> None:
        """Begin a step with a tensor or an array of actions."""
        self._returns_arrays = not isinstance(actions, torch.Tensor)
        self.venv.step_async(torch.from_numpy(np.asarray(actions)) if self._returns_arrays else actions)

    def step_wait(self) -> Any:
        """Finish the step: normalized observations and rewards, dones, infos."""
        observations, rewards, dones, infos = self.venv.step_wait()
        self.old_obs, self.old_reward = observations, rewards
        self._update_observations(observations)
        observations = self.normalize_obs(observations)
        if self.training:
            self.returns = self.returns * self.gamma + rewards
            vars(self)["ret_rms"].update(self.returns)
        rewards = self.normalize_reward(rewards)
        if infos.final_observation is not None:
            infos.final_observation = self.normalize_obs(infos.final_observation)
        self.returns = self.returns.masked_fill(dones, 0)
        result = observations, rewards, dones, infos
        return to_arrays(*result) if self._returns_arrays else result

    def _update_observations(self, observations: Any) -> None:
        """Add observations to the statistics."""
        if self.training and self.norm_obs:
            map_arrays(TensorRunningMeanStd.update, vars(self)["obs_rms"], observations)

    def _map_observations(self, function: Any, observations: Any) -> Any:
        """Apply a function of a tensor and its statistics to observations that are normalized."""
        if not self.norm_obs:
            return observations

        def apply(statistics: TensorRunningMeanStd, part: torch.Tensor) -> torch.Tensor:
            return function(part, statistics.to(part.device))  # type: ignore[no-any-return]

        found = map_arrays(apply, vars(self)["obs_rms"], observations)
        return {**observations, **found} if isinstance(found, dict) else found

    def normalize_obs(self, obs: Any) -> Any:
        """Normalize tensors or arrays of observations."""
        if framework_of(obs) == "numpy":
            return super().normalize_obs(obs)
        return self._map_observations(self._normalize_tensor, obs)

    def _normalize_tensor(self, part: torch.Tensor, statistics: Any) -> torch.Tensor:
        """Normalize a tensor, in float64 as VecNormalize does."""
        scale = torch.sqrt(statistics.var + self.epsilon)
        return (part - statistics.mean).div_(scale).clamp_(-self.clip_obs, self.clip_obs).float()  # type: ignore[no-any-return]

    def unnormalize_obs(self, obs: Any) -> Any:
        """Undo :meth:`normalize_obs`, except for clipping."""
        if framework_of(obs) == "numpy":
            return super().unnormalize_obs(obs)
        return self._map_observations(
            lambda part, statistics: part * torch.sqrt(statistics.var + self.epsilon) + statistics.mean, obs
        )

    def normalize_reward(self, reward: Any) -> Any:
        """Normalize a tensor or array of rewards."""
        if not isinstance(reward, torch.Tensor):
            return super().normalize_reward(reward)
        if self.norm_reward:
            scale = torch.sqrt(vars(self)["ret_rms"].to(reward.device).var + self.epsilon)
            reward = (reward.double() / scale).clamp_(-self.clip_reward, self.clip_reward)
        return reward.float()

    def unnormalize_reward(self, reward: Any) -> Any:
        """Undo :meth:`normalize_reward`, except for clipping."""
        if not isinstance(reward, torch.Tensor) or not self.norm_reward:
            return super().unnormalize_reward(reward)
        return reward.double() * torch.sqrt(vars(self)["ret_rms"].to(reward.device).var + self.epsilon)

    def get_original_obs(self) -> Any:
        """Return the observations of the last step or reset, without normalization."""
        return self.old_obs  # steps return new tensors

    def get_original_reward(self) -> Any:
        """Return the rewards of the last step, without normalization."""
        return self.old_reward

    def set_venv(self, venv: VecEnv) -> None:
        """Set the vectorized environment, after the wrapper was loaded."""
        super().set_venv(_to_tensor_env(venv))

    def save(self, save_path: str) -> None:
        """Save statistics and settings to a file for ``VecNormalize.load``; of several ranks, rank 0 does."""
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        plain = VecNormalize.__new__(VecNormalize)
        state = {name: getattr(self, name) for name in vars(self).keys() - {"_returns_arrays"}}
        vars(plain).update(state, old_obs=None, old_reward=np.array([]))
        with open(save_path, "wb") as file:
            pickle.dump(plain, file)

    @staticmethod
    def load(load_path: str, venv: VecEnv) -> TensorVecNormalize:
        """Load statistics and settings from a file of this class or of ``VecNormalize``."""
        with open(load_path, "rb") as file:
            plain = pickle.load(file)
        found = TensorVecNormalize.__new__(TensorVecNormalize)
        for name, value in vars(plain).items():
            setattr(found, name, value)
        found.set_venv(venv)
        return found
