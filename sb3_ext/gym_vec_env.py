"""``GymVecEnv``: adapter from vectorized environments to Stable Baselines3."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core._values import copy_output
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.array_frameworks import map_arrays, to_numpy
from rl_ext_core.vector.autoreset import wrapper_chain
from rl_ext_core.vector.environments import EpisodeMonitor, qualified_name
from rl_ext_core.vector.spaces import convert_space, device_of, find_attribute
from rl_ext_core.vector.stepper import Stepper, num_envs_of
from sb3_ext._compat import call_in_workers
from sb3_ext._vector_steps import (
    BatchStepper,
    ObservationLayout,
    SubEnvStepper,
    TensorStepper,
    add_episode,
)
from sb3_ext.caller_frames import calling_frames
from sb3_ext.vec_env import CheckedVecEnv, Indices

__all__ = ["GymVecEnv"]

Array = np.ndarray[Any, Any]


class GymVecEnv(CheckedVecEnv):
    """Adapter that makes a vectorized environment a ``VecEnv`` of Stable Baselines3.

    It supports gymnasium, EnvPool, Isaac Lab, mjlab and ManiSkill:
    ``PPO("MlpPolicy", GymVecEnv(gymnasium.make_vec("CartPole-v1", 16)))``.

    In every autoreset mode, a step that ends an episode returns the first observation of the next one, and the last one
    as ``info["terminal_observation"]``. A plain ``SyncVectorEnv`` is bypassed: its sub-environments are stepped one by
    one. Results are then those of ``DummyVecEnv`` with the same seed, bit for bit. Tensors are copied to the CPU once
    per step, and once more if episodes end.

    :param vector_env: gymnasium ``VectorEnv``, wrapped or not, or torch environment with ``num_envs``
    :param env_type: type of the actions that ``step`` takes: ``"numpy"``, ``"torch"`` or ``"jax"``. ``"auto"`` selects
        torch if the environment has a ``device``, else the type of its first observation
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; by default read from the metadata
    :param missing_final_obs: what to return if the environment resets itself without a last observation. ``"error"``
        raises, ``"previous"`` returns the preceding observation
    :param infos: ``"finished"`` returns infos of ended episodes only. All other environments share one read-only dict
        with ``"TimeLimit.truncated": False``. Reading a key there that an environment returned raises KeyError.
        ``"all"`` returns all infos
    :param observation_key: key of a Dict observation to return. By default ``"policy"`` of a torch environment that has
        it, else the whole observation
    :param clip_actions: bound of continuous actions without bounds: SB3 draws them from
        ``Box(-clip_actions, clip_actions)``
    :param copy: whether to copy observations, default True. Pass False only if each step returns new arrays
    :param tensors: whether to return tensors on the environment's device, for the algorithms of
        :mod:`sb3_ext.tensor`. Default False. See below
    :raises InvalidTypeError: If ``vector_env`` has no ``num_envs``.
    :raises InvalidArgumentError: If an option has an invalid value, if the environment is asynchronous, or if actions
        have no bounds.
    :raises InvalidArgumentError: If the environment resets itself one step late, and cannot be reset at once.
    :raises EnvironmentOutputError: From a step, if outputs do not match the spaces or last observations are missing.
    :raises EnvironmentOutputError: If last observations are overwritten (SyncVectorEnv in the mode SameStep).
    :raises InvalidTypeError: From ``reset`` or a step, if tensors have a dtype that NumPy lacks, such as bfloat16.

    ``reset`` and ``step`` return observations, (n, ...) each, of the dtypes of their spaces; rewards, (n,) float32;
    dones, (n,) bool; a list of n infos. Infos of ended episodes contain ``terminal_observation``,
    ``TimeLimit.truncated`` and ``episode``, unless the environment sets its own. ``episode`` has ``r`` (sum of
    rewards), ``l`` (steps) and ``t`` (seconds since the start). An info without ``final_info`` is that of the last
    step. ``NormalizeObservation`` of gymnasium refuses to reset single environments: use ``VecNormalize``.

    With ``tensors=True``, ``reset`` returns tensors, and so does a step whose actions are a tensor. Its infos are a
    sequence whose dicts are built when one is read. A step whose actions are an array returns arrays, so that
    ``evaluate_policy`` works. Infos of resets are not returned.

    Source: https://github.com/DLR-RM/stable-baselines3/issues/1745, https://github.com/isaac-sim/IsaacLab/issues/1769

    >>> import gymnasium
    >>> from sb3_ext import GymVecEnv
    >>> env = GymVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
    >>> env.seed(0)
    [0, 1, 2, 3]
    >>> env.reset().shape
    (4, 4)
    """

    constructor_argument = "vector_env"

    def __init__(
        self,
        vector_env: Any,
        *,
        env_type: Literal["auto", "numpy", "torch", "jax"] = "auto",
        autoreset_mode: Any = None,
        missing_final_obs: Literal["error", "previous"] = "error",
        infos: Literal["finished", "all"] = "finished",
        observation_key: str | None = None,
        clip_actions: float | None = None,
        copy: bool = True,
        tensors: bool = False,
    ) -> None:
        for name, value, known in (
            ("env_type", env_type, ("auto", "numpy", "torch", "jax")),
            ("missing_final_obs", missing_final_obs, ("error", "previous")),
            ("infos", infos, ("finished", "all")),
        ):
            if value not in known:
                expected = ", ".join(map(repr, known))
                raise InvalidArgumentError(f'{name}={value!r}, expected one of {expected}. Use {name}="{known[0]}"')
        if not isinstance(tensors, bool):
            raise InvalidArgumentError(f"tensors={tensors!r}, expected True or False. Use tensors=True")
        self.env, num_envs = vector_env, _check_num_envs(vector_env)
        self._base = getattr(vector_env, "unwrapped", vector_env)
        device = device_of(vector_env) if env_type in ("auto", "torch") else None
        if env_type == "torch" and device is None:
            device = torch.device("cpu")
        stepper = Stepper(
            vector_env,
            autoreset_mode=autoreset_mode,
            uses_torch=device is not None,
            missing_final_obs=missing_final_obs,
            partial_resets=False,
        )
        observation_space, key = _select_observation(
            _single_space(vector_env, "observation_space"), observation_key, device
        )
        action_space = _bound_actions(_single_space(vector_env, "action_space"), clip_actions)
        layout = ObservationLayout(observation_space, key)
        self.device, self.tensors = device, tensors
        if tensors and device is None:
            raise InvalidArgumentError(
                f"tensors=True: {type(self._base).__name__} has no device, expected an environment that steps on "
                'tensors. If it does, use env_type="torch". If it steps on arrays, leave tensors out: the algorithms '
                "of sb3_ext.tensor convert them"
            )
        self._stepper: SubEnvStepper | BatchStepper
        is_plain = type(vector_env) is SyncVectorEnv and {"step", "reset"}.isdisjoint(vars(vector_env))
        if is_plain and key is None and not tensors:
            self._stepper = SubEnvStepper(vector_env.envs, layout, infos == "all")
        else:
            framework = "torch" if device is not None else None if env_type == "auto" else env_type
            kind = TensorStepper if tensors else BatchStepper
            self._stepper = kind(stepper, layout, framework, device, infos == "all", copy, action_space.dtype)
        # Per environment: sum of rewards of its running episode, and step count at the start of that episode.
        self._steps, self._returns, self._start_steps = 0, np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._start_time = time.time()
        super().__init__(num_envs, observation_space, action_space)
        # VecVideoRecorder reads the frame rate from metadata.
        self.metadata = {**(getattr(vector_env, "metadata", None) or {}), **self.metadata}

    def step_async(self, actions: Any) -> None:
        """Store the actions of the next step, (n, ...)."""
        # Environments that clip their action in place must not change what SB3 stores.
        self._store_actions(copy_output(actions))

    def step_wait(self) -> Any:
        """Take the step.

        :return: observations, rewards, dones and infos, see the class
        :raises EnvironmentOutputError: If the environment does not return what its spaces promise.
        """
        if self.tensors:
            return self._step_tensors(self._take_actions())
        observations, rewards, dones, infos, reset_infos = self._stepper.step(self._take_actions())
        self._returns += rewards
        self._steps += 1
        if reset_infos:
            self._complete_infos(infos, reset_infos)
        return observations, rewards, dones, infos

    def _step_tensors(self, actions: Any) -> Any:
        """Take a step on tensors. If the actions are an array, convert the results to arrays."""
        is_tensor = isinstance(actions, torch.Tensor)
        actions = actions if is_tensor else torch.from_numpy(np.asarray(actions, self.action_space.dtype))
        results: Any = self._stepper.step(actions)
        return results if is_tensor else to_arrays(*results)

    def _complete_infos(self, infos: list[Any], reset_infos: dict[int, dict[str, Any]]) -> None:
        """Complete the infos of ended episodes, and restart the counts of their environments."""
        seconds, rows = round(time.time() - self._start_time, 6), np.array([*reset_infos])
        totals, lengths = self._returns[rows].tolist(), (self._steps - self._start_steps[rows]).tolist()
        self._returns[rows], self._start_steps[rows] = 0, self._steps
        self.reset_infos = list(self.reset_infos)  # the caller may keep the previous list
        for (row, reset_info), total, length in zip(reset_infos.items(), totals, lengths, strict=True):
            self.reset_infos[row] = reset_info
            add_episode(infos[row], total, length, seconds)

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n, ...) each
        :raises InvalidArgumentError: If options differ between environments that are reset together.
        """
        self._require_open()
        if self.tensors:
            reject_array_algorithm()
        self._actions = None
        observations, self.reset_infos = self._stepper.reset(self._seeds, self._options)
        self._returns[:], self._start_steps[:] = 0, self._steps
        self._reset_seeds()
        self._reset_options()
        return observations

    def close(self) -> None:
        """Close the vectorized environment. If it is closed, do nothing."""
        if not self.closed:
            self.closed = True
            self.env.close()

    def _render(self) -> Sequence[Any]:
        frames = to_numpy(self.env.render())
        # Isaac Lab renders one image of all environments.
        return [frames] if isinstance(frames, np.ndarray) and frames.ndim == 3 else list(frames)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute."""
        call = self._find_call(None)
        return super().has_attr(attr_name) if call is None else all(call("has_wrapper_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of sub-environments.

        If they are not accessible, get it from the vectorized environment, row by row.

        :raises AttributeError: If the attribute does not exist.
        """
        call = self._find_call(indices, required_attr=attr_name)
        if call is not None:
            return call("get_wrapper_attr", attr_name)
        # SB3 warns about environments without a render_mode.
        default = [None] if attr_name == "render_mode" else []
        value = to_numpy(getattr(self._find_owner(attr_name), attr_name, *default))
        rows = isinstance(value, np.ndarray) and value.shape[:1] == (self.num_envs,)
        return [value[index] if rows else value for index in self._resolve_indices(indices, self.num_envs)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of sub-environments, on the wrapper that has it.

        If they are not accessible, set it on the vectorized environment.

        :raises InvalidArgumentError: If ``indices`` selects some sub-environments, and they are not accessible.
        """
        call = self._find_call(indices)
        if call is not None:
            call("set_wrapper_attr", attr_name, value)
            return
        if set(self._resolve_indices(indices, self.num_envs)) != set(range(self.num_envs)):
            raise InvalidArgumentError(
                f"{type(self._base).__name__} has no sub-environments that could differ in {attr_name!r}. Set it for "
                f"all: set_attr({attr_name!r}, value)"
            )
        owner = next((layer for layer in wrapper_chain(self.env) if attr_name in vars(layer)), self._base)
        setattr(owner, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of sub-environments.

        If they are not accessible, call it once on the vectorized environment, and return the result for each
        environment. A result with n rows is split into rows if ``indices`` is None.
        """
        call = self._find_call(indices, required_attr=method_name)
        if call is not None:
            return call(method_name, *method_args, **method_kwargs)
        result = to_numpy(getattr(self._find_owner(method_name), method_name)(*method_args, **method_kwargs))
        rows = indices is None and isinstance(result, np.ndarray | list | tuple) and len(result) == self.num_envs
        return list(result) if rows else [result for _ in self._resolve_indices(indices, self.num_envs)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return whether each environment has a wrapper of a class, its own or one around all."""
        chosen = self._resolve_indices(indices, self.num_envs)
        if any(isinstance(layer, wrapper_class) for layer in wrapper_chain(self.env)):
            return [True for _ in chosen]
        if isinstance(self._base, SyncVectorEnv):
            return [is_wrapped(self._base.envs[index], wrapper_class) for index in chosen]
        # Compare names in "<TimeLimit<Monitor<E instance>>>": a worker dies if its answer does not pickle.
        call, names = self._find_call(chosen), _wrapper_names(wrapper_class)
        texts = [""] * len(chosen) if call is None else call("__str__")
        return [bool(names.intersection(re.findall(r"<(\w+)", text))) for text in texts]

    def _find_owner(self, name: str) -> Any:
        """Return the outermost wrapper that has an attribute, or the environment."""
        return next((layer for layer in wrapper_chain(self.env) if hasattr(layer, name)), self._base)

    def _find_call(self, indices: Indices, required_attr: str | None = None) -> Callable[..., list[Any]] | None:
        """Return a function that calls a method of these sub-environments; None if they are not accessible.

        :param required_attr: attribute that all must have; it is checked first, because a worker without it would end
        :raises AttributeError: If a sub-environment in a worker lacks ``required_attr``.
        """
        self._require_open()
        base, chosen = self._base, self._resolve_indices(indices, self.num_envs)
        if isinstance(base, SyncVectorEnv):
            return partial(_call_each, [base.envs[index] for index in chosen])
        if isinstance(base, AsyncVectorEnv):
            call: Any = partial(call_in_workers, base, chosen)
        elif hasattr(base, "call_some"):  # SharedMemoryVectorEnv, whose import would require a later gymnasium
            call = partial(base.call_some, chosen)
        else:
            return None
        if required_attr is not None and not all(call("has_wrapper_attr", required_attr)):
            raise AttributeError(f"a sub-environment has no attribute {required_attr!r}")
        return call  # type: ignore[no-any-return]


def _call_each(envs: list[Any], name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
    return [env.get_wrapper_attr(name)(*args, **kwargs) for env in envs]


# -- tensors


def to_arrays(observations: Any, rewards: Any, dones: Any, infos: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Convert the results of a step on tensors to arrays, and a list of dicts."""
    return map_arrays(to_numpy, observations), to_numpy(rewards), to_numpy(dones), list(infos)


def reject_array_algorithm() -> None:
    """Raise an error if the caller is an algorithm that works on arrays.

    :raises InvalidTypeError: If the nearest algorithm among the callers is not of ``sb3_ext.tensor``.
    """
    # Stable Baselines3 calls reset() without its algorithm, so that only the calling frames show it. Without a check,
    # PPO would fail with an error that does not name the cause, and SAC would copy each step to the CPU.
    owners = (frame.f_locals.get("self") for frame in calling_frames())
    algorithm = next((owner for owner in owners if isinstance(owner, BaseAlgorithm)), None)
    if algorithm is not None and not getattr(algorithm, "uses_tensors", False):
        raise InvalidTypeError(
            f"{'.'.join(qualified_name(type(algorithm)))} works on arrays, but the environment returns tensors. "
            "Leave out tensors=True. Or use an algorithm on tensors: from sb3_ext.tensor import A2C, DQN, PPO, SAC, TD3"
        )


# -- arguments


def _check_num_envs(env: Any) -> int:
    """Return the number of environments; refuse environments that are not vectorized."""
    if isinstance(env, VecEnv):
        raise InvalidTypeError(
            f"{type(env).__name__} is a VecEnv of Stable Baselines3 already. Use it without GymVecEnv"
        )
    count = num_envs_of(env)
    if not isinstance(count, int | np.integer):
        raise InvalidTypeError(
            f"{env!r} is not a vectorized environment: it has no num_envs. Use "
            'GymVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=16)). For a single environment, use '
            "sb3_ext.make_vec_env(env); for Brax, copy BraxVectorEnv from the guide on vectorized environments"
        )
    return int(count)


def _single_space(env: Any, name: str) -> Any:
    """Return the space of one sub-environment, under gymnasium's name or EnvPool's."""
    return _to_gymnasium_space(find_attribute(env, f"single_{name}", name), f"{name} of {type(env).__name__}")


def _to_gymnasium_space(space: Any, whose: str) -> Any:
    """Convert a space of another library to gymnasium's; raise an error if that fails."""
    if isinstance(space, gymnasium.Space):
        return space
    converted = convert_space(space, lambda part: _to_gymnasium_space(part, whose))
    if converted is None:
        raise InvalidTypeError(
            f"the {whose} is a {type(space).__module__}.{type(space).__name__}; expected one of gymnasium's, or low, "
            f"high and shape. Set env.single_{whose.split()[0]} = gymnasium.spaces.Box(...)"
        )
    return converted


def _select_observation(space: Any, key: str | None, device: Any) -> tuple[Any, str | None]:
    """Return the space of the returned observations, and their key in a Dict, or None."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {}
    if key is None and device is not None and "policy" in parts:
        key = "policy"
    if key is None:
        return space, None
    if key not in parts:
        raise InvalidArgumentError(
            f"observation_key={key!r} is not in {space}, expected one of {', '.join(map(repr, parts)) or 'a Dict'}"
        )
    return parts[key], key


def _wrapper_names(wrapper_class: type) -> set[str]:
    """Return the names of a wrapper class, its subclasses and its equivalents in workers."""
    names = {wrapper_class.__name__}.union(*map(_wrapper_names, wrapper_class.__subclasses__()))
    return (
        names | {EpisodeMonitor.__name__}
        if qualified_name(wrapper_class) in EpisodeMonitor.equivalent_classes
        else names
    )


def _bound_actions(space: Any, clip: Any) -> Any:
    """Bound a Box space by ``clip_actions``; refuse a space that stays unbounded."""
    if clip is not None and not (isinstance(clip, int | float | np.number) and clip > 0):
        raise InvalidArgumentError(f"clip_actions={clip!r} is not a positive number. Use clip_actions=1.0")
    if not isinstance(space, spaces.Box) or space.is_bounded("both"):
        return space
    if clip is None:
        raise InvalidArgumentError(
            f"the action space {space} has no bounds, but Stable Baselines3 draws actions only from bounded spaces. "
            "Use clip_actions=1.0"
        )
    low, high = np.maximum(space.low, -clip), np.minimum(space.high, clip)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)
