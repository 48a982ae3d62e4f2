"""``GymVecEnv``: environments that are vectorised already, for Stable Baselines3."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.autoreset import find_mode, layers
from sb3_ext._vector_steps import Batched, Layout, Separate

__all__ = ["GymVecEnv"]

Array = np.ndarray[Any, Any]
Indices = int | Iterable[int] | None


class GymVecEnv(VecEnv):
    """A vectorised environment of gymnasium, EnvPool, Isaac Lab, mjlab or ManiSkill as Stable Baselines3's ``VecEnv``.

    ``PPO("MlpPolicy", GymVecEnv(gymnasium.make_vec("CartPole-v1", 16)))``. Whatever the environment's autoreset mode, a
    step that ends an episode returns the first observation of the next one, and the last one as
    ``info["terminal_observation"]``: what resets itself one step late is reset by ``reset_mask`` at once. Over a plain
    ``SyncVectorEnv`` the results are those of ``DummyVecEnv`` with the same seed, bit for bit; its sub-environments are
    then stepped one after the other here, which takes less time than its own step.

    Arrays that are returned are the caller's to keep. Tensors are copied to the CPU once a step, all in one; those of
    the last observations once more, where there are some.

    :param vector_env: a gymnasium ``VectorEnv``, wrapped or not, or a torch environment with ``num_envs``
    :param env_type: ``"numpy"`` or ``"torch"``: what its ``step`` takes; ``"auto"``: torch where it has a ``device``
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; None: as its metadata say
    :param missing_final_obs: what to do where an environment has reset itself and returns no last observation:
        ``"error"``, or ``"previous"`` takes the observation before it
    :param infos: ``"finished"`` builds informations of environments whose episodes have ended and gives the others one
        dict that cannot be written to, with ``"TimeLimit.truncated": False``; ``"all"`` builds all of them
    :param observation_key: which part of a Dict of observations to return; default: ``"policy"`` of a torch environment
        that has it, as in Isaac Lab, else all
    :param clip_actions: bound of continuous actions that have none: Stable Baselines3 draws them from
        ``Box(-clip_actions, clip_actions)``
    :param copy: whether to copy what the environment could write into again; False: it returns new arrays every time
    :raises InvalidTypeError: no vectorised environment
    :raises InvalidArgumentError: an option with another value; an environment that resets itself one step late and
        cannot be told to reset at once; actions without bounds
    :raises EnvironmentOutputError: from a step: it does not return what its spaces promise, or no last observations

    ``reset`` and ``step`` return observations, (n, ...) each, of the dtypes of their spaces; rewards, (n,) float32;
    dones, (n,) bool; a list of n infos. Those of finished ones hold ``terminal_observation``, ``TimeLimit.truncated``
    and ``episode`` (``r``: sum of rewards, ``l``: steps, ``t``: seconds since the start), unless the environment has
    its own. ``NormalizeObservation`` of gymnasium counts observations again when others are reset: prefer
    ``VecNormalize``.

    Source: https://github.com/DLR-RM/stable-baselines3/issues/1745, https://github.com/isaac-sim/IsaacLab/issues/1769

    >>> import gymnasium
    >>> from sb3_ext import GymVecEnv
    >>> env = GymVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
    >>> env.seed(0)
    [0, 1, 2, 3]
    >>> env.reset().shape
    (4, 4)
    """

    def __init__(
        self,
        vector_env: Any,
        *,
        env_type: Literal["auto", "numpy", "torch"] = "auto",
        autoreset_mode: Any = None,
        missing_final_obs: Literal["error", "previous"] = "error",
        infos: Literal["finished", "all"] = "finished",
        observation_key: str | None = None,
        clip_actions: float | None = None,
        copy: bool = True,
    ) -> None:
        _check_options(env_type=env_type, missing_final_obs=missing_final_obs, infos=infos)
        num_envs = _count(vector_env)
        self.env, self.closed = vector_env, False
        self._base = getattr(vector_env, "unwrapped", vector_env)
        device = _device(self._base) if env_type != "numpy" else None
        if env_type == "torch" and device is None:
            device = torch.device("cpu")
        observation_space, key = _observed(_single(vector_env, "observation_space"), observation_key, device)
        action_space = _bounded(_single(vector_env, "action_space"), clip_actions)
        # Those of which each sub-environment is in this process and nothing stands in between.
        self._separate = type(vector_env) is SyncVectorEnv and not {"step", "reset"} & set(vars(vector_env))
        layout = Layout(observation_space)
        self._source: Any = (
            Separate(vector_env.envs, layout, infos == "all")
            if self._separate
            else Batched(
                vector_env,
                layout,
                num_envs=num_envs,
                device=device,
                key=key,
                mode=find_mode(vector_env, autoreset_mode, speaks_torch=device is not None),
                previous=missing_final_obs == "previous",
                all_infos=infos == "all",
                copy=copy and not _gives_new_arrays(vector_env),
                action_space=action_space,
            )
        )
        self._actions: Any = None
        self._began = time.time()
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        super().__init__(num_envs, observation_space, action_space)
        # What records videos takes the frames per second from it.
        self.metadata = {**(getattr(vector_env, "metadata", None) or {}), **self.metadata}

    def step_async(self, actions: Any) -> None:
        """Note the actions of the next step.

        :param actions: (n, ...)
        """
        self._require_open()
        if len(actions) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(actions)} actions for {self.num_envs} environments; expected an action for each"
            )
        self._actions = actions

    def step_wait(self) -> Any:
        """Take the step.

        :return: observations, rewards, dones and infos, see the class
        :raises EnvironmentOutputError: the environment does not return what its spaces promise
        """
        self._require_open()
        actions, self._actions = self._actions, None
        if actions is None:
            raise InvalidArgumentError("no step was begun; write step_async(actions) first, or step(actions)")
        observations, rewards, dones, infos, ended, reset_infos = self._source.step(actions)
        returns, lengths = self._returns, self._lengths
        returns += rewards
        lengths += 1
        if len(ended):
            seconds = round(time.time() - self._began, 6)
            rows = np.array(ended)
            for index, total, length in zip(ended, returns[rows].tolist(), lengths[rows].tolist(), strict=True):
                info = infos[index]
                if "episode" not in info:
                    info["episode"] = {"r": total, "l": length, "t": seconds}
                elif "r" not in (info["episode"] or ()):
                    # ManiSkill's has other names: Stable Baselines3 asks for these.
                    info["episode"] = {**(info["episode"] or {}), "r": total, "l": length, "t": seconds}
            returns[rows] = 0
            lengths[rows] = 0
            if reset_infos is not None:
                self.reset_infos = list(self.reset_infos)  # those before are the caller's to keep
                for index, info in zip(ended, reset_infos, strict=True):
                    self.reset_infos[index] = info
        return observations, rewards, dones, infos

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n, ...) each
        :raises InvalidArgumentError: options differ between environments that are reset together
        """
        self._require_open()
        self._actions = None
        observations, self.reset_infos = self._source.reset(self._seeds, self._options)
        self._returns[:] = self._lengths[:] = 0
        self._reset_seeds()
        self._reset_options()
        return observations

    def close(self) -> None:
        """Close the vectorised environment; again does nothing."""
        if not self.closed:
            self.closed = True
            self.env.close()

    def get_images(self) -> Sequence[Array | None]:
        """Render all environments.

        :return: (height, width, 3) uint8 each; None where the render mode is another one
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        self._require_open()
        frames = self.env.render()
        if isinstance(frames, torch.Tensor):
            frames = frames.cpu().numpy()
        # Isaac Lab's is one view of all.
        return [frames] if isinstance(frames, np.ndarray) and frames.ndim == 3 else list(frames)

    def has_attr(self, attr_name: str) -> bool:
        """Tell whether all environments have an attribute."""
        if isinstance(self._base, AsyncVectorEnv):
            return all(self._in_workers(None, "_call", ("has_wrapper_attr", (attr_name,), {})))
        return super().has_attr(attr_name)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of sub-environments; where none can be reached, of the vectorised one, row by row.

        :raises AttributeError: there is none
        """
        self._require_open()
        chosen = self._chosen(indices)
        if isinstance(self._base, SyncVectorEnv):
            return [self._base.envs[index].get_wrapper_attr(attr_name) for index in chosen]
        if isinstance(self._base, AsyncVectorEnv):
            # Asked first: the worker of an environment without it would end.
            if not all(self._in_workers(chosen, "_call", ("has_wrapper_attr", (attr_name,), {}))):
                raise AttributeError(f"a sub-environment has no attribute {attr_name!r}")
            return self._in_workers(chosen, "_call", ("get_wrapper_attr", (attr_name,), {}))
        try:
            value = _found(self.env, attr_name)
        except AttributeError:
            if attr_name != "render_mode":  # Stable Baselines3 would warn of environments that have none
                raise
            value = None
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        rows = isinstance(value, np.ndarray) and value.shape[:1] == (self.num_envs,)
        return [value[index] if rows else value for index in chosen]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of sub-environments, on the wrapper that has it; where none can be reached, of all at once.

        :raises InvalidArgumentError: of some, where none can be reached
        """
        self._require_open()
        chosen = self._chosen(indices)
        if isinstance(self._base, SyncVectorEnv):
            for index in chosen:
                self._base.envs[index].set_wrapper_attr(attr_name, value)
        elif isinstance(self._base, AsyncVectorEnv):
            self._in_workers(chosen, "_setattr", (attr_name, value))
        elif set(chosen) != set(range(self.num_envs)):
            raise InvalidArgumentError(
                f"{type(self._base).__name__} has no sub-environments that could differ in {attr_name!r}. Set it for "
                f"all: set_attr({attr_name!r}, value)"
            )
        else:
            owner = next((layer for layer in layers(self.env) if attr_name in vars(layer)), self._base)
            setattr(owner, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of sub-environments; where none can be reached, of the vectorised one, once.

        What that returns is the result of each; where ``indices`` is None, a result with n rows is one row for each.
        """
        self._require_open()
        chosen = self._chosen(indices)
        if isinstance(self._base, SyncVectorEnv):
            found = [self._base.envs[index].get_wrapper_attr(method_name) for index in chosen]
            return [method(*method_args, **method_kwargs) for method in found]
        if isinstance(self._base, AsyncVectorEnv):
            if not self.has_attr(method_name):
                raise AttributeError(f"a sub-environment has no attribute {method_name!r}")
            return self._in_workers(chosen, "_call", (method_name, method_args, method_kwargs))
        result = _found(self.env, method_name)(*method_args, **method_kwargs)
        if isinstance(result, torch.Tensor):
            result = result.detach().cpu().numpy()
        rows = indices is None and isinstance(result, np.ndarray | list | tuple) and len(result) == self.num_envs
        return list(result) if rows else [result for _ in chosen]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Tell which environments have a wrapper of a class: around all of them, or around each."""
        chosen = self._chosen(indices)
        if any(isinstance(layer, wrapper_class) for layer in layers(self.env)):
            return [True for _ in chosen]
        if isinstance(self._base, SyncVectorEnv):
            return [is_wrapped(self._base.envs[index], wrapper_class) for index in chosen]
        if not isinstance(self._base, AsyncVectorEnv):
            return [False for _ in chosen]
        # By name: what workers tell of their wrappers.
        name = f"{wrapper_class.__module__}:{wrapper_class.__name__}"
        specs = self.get_attr("spec", chosen)
        return [
            name in [wrapper.entry_point for wrapper in spec.additional_wrappers] if spec else False for spec in specs
        ]

    def _in_workers(self, indices: Iterable[int] | None, command: str, data: Any) -> list[Any]:
        """Send a message to some workers of an AsyncVectorEnv, which itself talks to all or none."""
        chosen = self._chosen(indices)
        self._base._assert_is_running()
        for index in chosen:
            self._base.parent_pipes[index].send((command, data))
        answers = {index: self._base.parent_pipes[index].recv() for index in chosen}
        self._base._raise_if_errors([answers.get(index, (None, True))[1] for index in range(self.num_envs)])
        return [answers[index][0] for index in chosen]

    def _chosen(self, indices: Indices) -> list[int]:
        numbers = range(self.num_envs)
        return [numbers[index] for index in self._get_indices(indices)]

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidArgumentError("this GymVecEnv is closed; make a new one: GymVecEnv(vector_env)")


# -- what is given


def _check_options(*, env_type: Any, missing_final_obs: Any, infos: Any) -> None:
    for name, value, known in (
        ("env_type", env_type, ("auto", "numpy", "torch")),
        ("missing_final_obs", missing_final_obs, ("error", "previous")),
        ("infos", infos, ("finished", "all")),
    ):
        if value not in known:
            expected = ", ".join(repr(choice) for choice in known)
            raise InvalidArgumentError(f'{name}={value!r} is none of {expected}. Write {name}="{known[0]}"')


def _count(env: Any) -> int:
    config = getattr(getattr(env, "spec", None), "config", None)  # EnvPool's
    count = getattr(env, "num_envs", getattr(getattr(env, "unwrapped", None), "num_envs", None))
    count = getattr(config, "num_envs", None) if count is None else count
    if isinstance(env, VecEnv):
        raise InvalidTypeError(f"{type(env).__name__} is a VecEnv of Stable Baselines3 already: use it as it is")
    if not isinstance(count, int | np.integer):
        raise InvalidTypeError(
            f"{env!r} is no vectorised environment: it has no num_envs. Write "
            'GymVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=16)); for a single one, sb3_ext.make_vec_env(env)'
        )
    return int(count)


def _device(base: Any) -> torch.device | None:
    named = getattr(base, "device", None)
    with contextlib.suppress(RuntimeError, TypeError):
        return torch.device(named) if isinstance(named, str | torch.device) else None
    return None


def _single(env: Any, name: str) -> Any:
    """Give the space of one sub-environment."""
    for owner in (env, getattr(env, "unwrapped", env)):
        found = getattr(owner, f"single_{name}", None)
        if found is not None:
            break
    else:
        found = getattr(env, name)  # EnvPool's
    return _of_gymnasium(found, f"{name} of {type(env).__name__}")


def _of_gymnasium(space: Any, whose: str) -> Any:
    """Turn a space of another library, such as mjlab's, into gymnasium's by what it holds."""
    if isinstance(space, gymnasium.Space):
        return space
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return spaces.Dict({key: _of_gymnasium(part, whose) for key, part in parts.items()})
    shape, low, high = (getattr(space, name, None) for name in ("shape", "low", "high"))
    if shape is None or low is None or high is None:
        raise InvalidTypeError(
            f"the {whose} is a {type(space).__module__}.{type(space).__name__}; expected one of gymnasium's, or low, "
            f"high and shape. Set env.single_{whose.split()[0]} = gymnasium.spaces.Box(...)"
        )
    dtype = np.dtype(str(getattr(space, "dtype", None) or "float32").removeprefix("torch."))
    bounds = [np.broadcast_to(np.asarray(bound), shape).astype(dtype) for bound in (low, high)]
    return spaces.Box(bounds[0], bounds[1], dtype=dtype.type)


def _observed(space: Any, key: str | None, device: Any) -> tuple[Any, str | None]:
    """Give the space of what is returned, and the key of it in a Dict."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {}
    if key is None and device is not None and "policy" in parts:
        key = "policy"
    if key is None:
        return space, None
    if key not in parts:
        raise InvalidArgumentError(
            f"observation_key={key!r} is no part of {space}; expected one of {', '.join(map(repr, parts)) or 'a Dict'}"
        )
    return parts[key], key


def _bounded(space: Any, clip: float | None) -> Any:
    if clip is not None and not clip > 0:
        raise InvalidArgumentError(f"clip_actions={clip!r} is not a positive number. Write clip_actions=1.0")
    if not isinstance(space, spaces.Box) or space.is_bounded("both"):
        return space
    if clip is None:
        raise InvalidArgumentError(
            f"actions have no bounds, {space}, and Stable Baselines3 draws them from bounded spaces alone. Write "
            "clip_actions=1.0"
        )
    low, high = np.maximum(space.low, -clip), np.minimum(space.high, clip)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)


def _gives_new_arrays(env: Any) -> bool:
    """Tell whether an environment and its wrappers are gymnasium's, which copy unless told otherwise."""
    base = getattr(env, "unwrapped", env)
    return getattr(base, "copy", True) is True and all(
        type(layer).__module__.startswith("gymnasium.") for layer in layers(env)
    )


def _found(env: Any, name: str) -> Any:
    for layer in layers(env):
        if hasattr(layer, name):
            return getattr(layer, name)
    raise AttributeError(f"{type(env).__name__} has no attribute {name!r}")
