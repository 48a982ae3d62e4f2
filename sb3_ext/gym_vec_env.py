"""``GymVecEnv``: environments that are vectorised already, for Stable Baselines3."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.autoreset import find_mode, layers, require_synchronous
from rl_ext_core.vector.environments import EpisodeMonitor, copy_output, name_of
from sb3_ext._compat import call_in_workers
from sb3_ext._vector_steps import Batched, Ended, Layout, Separate
from sb3_ext.vec_env import CheckedVecEnv, Indices

__all__ = ["GymVecEnv"]

Array = np.ndarray[Any, Any]

# Classes of gymnasium that return new arrays in every step unless copy=False, and its wrappers that leave observations
# alone or compute new ones. A subclass may do otherwise, and so may a function given to TransformObservation.
_RETURN_NEW_ARRAYS = {"AsyncVectorEnv", "CartPoleVectorEnv", "SyncVectorEnv"}
_KEEP_ARRAYS_NEW = {
    "ClipAction",
    "ClipReward",
    "DictInfoToList",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "TransformAction",
    "TransformReward",
    "VectorizeTransformAction",
    "VectorizeTransformReward",
}


class GymVecEnv(CheckedVecEnv):
    """A vectorised environment of gymnasium, EnvPool, Isaac Lab, mjlab or ManiSkill as Stable Baselines3's ``VecEnv``.

    ``PPO("MlpPolicy", GymVecEnv(gymnasium.make_vec("CartPole-v1", 16)))``. Whatever the environment's autoreset mode, a
    step that ends an episode returns the first observation of the next one, and the last one as
    ``info["terminal_observation"]``: what resets itself one step late is reset by ``reset_mask`` at once. Over a plain
    ``SyncVectorEnv`` the results are those of ``DummyVecEnv`` with the same seed, bit for bit; its sub-environments are
    then stepped one after the other here, which takes less time than its own step.

    Observations, infos and actions are copied where the environment could write into them again. Tensors are copied to
    the CPU once a step, all in one; those of the last observations once more, where there are some.

    :param vector_env: a gymnasium ``VectorEnv``, wrapped or not, or a torch environment with ``num_envs``
    :param env_type: ``"numpy"`` or ``"torch"``: what its ``step`` takes; ``"auto"``: torch where it has a ``device``
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; None: as its metadata say
    :param missing_final_obs: what to do where an environment has reset itself and returns no last observation:
        ``"error"``, or ``"previous"`` takes the observation before it
    :param infos: ``"finished"`` builds infos of environments whose episodes have ended and gives the others one dict
        that cannot be written to, with ``"TimeLimit.truncated": False``. Asking that dict for a key that an environment
        has returned raises KeyError. ``"all"`` builds all infos
    :param observation_key: which part of a Dict of observations to return; default: ``"policy"`` of a torch environment
        that has it, as in Isaac Lab, else all
    :param clip_actions: bound of continuous actions that have none: Stable Baselines3 draws them from
        ``Box(-clip_actions, clip_actions)``
    :param copy: whether to copy observations that the environment could write into again: those of all classes except
        gymnasium's own that are known to return new arrays. False promises that it returns new arrays in every step
    :raises InvalidTypeError: no vectorised environment
    :raises InvalidArgumentError: an option with another value; an environment that resets itself one step late and
        cannot be told to reset at once; an asynchronous EnvPool; actions without bounds
    :raises EnvironmentOutputError: from a step: it does not return what its spaces promise, or no last observations, or
        SyncVectorEnv in the mode SameStep has overwritten them

    ``reset`` and ``step`` return observations, (n, ...) each, of the dtypes of their spaces; rewards, (n,) float32;
    dones, (n,) bool; a list of n infos. Those of finished ones hold ``terminal_observation``, ``TimeLimit.truncated``
    and ``episode`` (``r``: sum of rewards, ``l``: steps, ``t``: seconds since the start), unless the environment has
    its own. An environment that resets itself returns the infos of last steps as ``info["final_info"]``. Without it,
    its info is that of the last step. ``NormalizeObservation`` of gymnasium counts observations again when others are
    reset: prefer ``VecNormalize``.

    Source: https://github.com/DLR-RM/stable-baselines3/issues/1745, https://github.com/isaac-sim/IsaacLab/issues/1769

    >>> import gymnasium
    >>> from sb3_ext import GymVecEnv
    >>> env = GymVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
    >>> env.seed(0)
    [0, 1, 2, 3]
    >>> env.reset().shape
    (4, 4)
    """

    made_of = "vector_env"

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
        require_synchronous(vector_env)
        self.env = vector_env
        self._base = getattr(vector_env, "unwrapped", vector_env)
        device = _device(self._base) if env_type != "numpy" else None
        if env_type == "torch" and device is None:
            device = torch.device("cpu")
        observation_space, key = _observed(_single(vector_env, "observation_space"), observation_key, device)
        action_space = _bounded(_single(vector_env, "action_space"), clip_actions)
        mode = find_mode(vector_env, autoreset_mode, speaks_torch=device is not None)
        # Those of which each sub-environment is in this process and nothing stands in between.
        separate = type(vector_env) is SyncVectorEnv and not {"step", "reset"} & set(vars(vector_env)) and key is None
        layout = Layout(observation_space)
        self._source: Any = (
            Separate(vector_env.envs, layout, infos == "all")
            if separate
            else Batched(
                vector_env,
                layout,
                num_envs=num_envs,
                device=device,
                key=key,
                mode=mode,
                previous=missing_final_obs == "previous",
                all_infos=infos == "all",
                copy=copy and not _returns_new_arrays(vector_env),
                action_space=action_space,
            )
        )
        self._start = time.time()
        # Of the episodes that go on: the sums of rewards, and the steps that were taken before.
        self._steps, self._returns, self._begun = 0, np.zeros(num_envs), np.zeros(num_envs, np.int64)
        super().__init__(num_envs, observation_space, action_space)
        # What records videos takes the frames per second from it.
        self.metadata = {**(getattr(vector_env, "metadata", None) or {}), **self.metadata}

    def step_async(self, actions: Any) -> None:
        """Note the actions of the next step.

        :param actions: (n, ...)
        """
        # Environments that clip their action in place must not change what SB3 stores.
        self._note_actions(copy_output(actions))

    def step_wait(self) -> Any:
        """Take the step.

        :return: observations, rewards, dones and infos, see the class
        :raises EnvironmentOutputError: the environment does not return what its spaces promise
        """
        observations, rewards, dones, infos, ended = self._source.step(self._noted_actions())
        self._returns += rewards
        self._steps += 1
        if ended is not None:
            self._conclude(ended, infos)
        return observations, rewards, dones, infos

    def _conclude(self, ended: Ended, infos: list[Any]) -> None:
        """Put together the informations of episodes that have ended, and begin to count anew."""
        rows, steps, seconds = ended.rows, self._steps, round(time.time() - self._start, 6)
        indices, totals, lengths = rows.tolist(), self._returns[rows].tolist(), (steps - self._begun[rows]).tolist()
        for index, own, last, time_out, total, length in zip(
            indices, ended.infos, ended.observations, ended.time_outs, totals, lengths, strict=True
        ):
            episode = {"r": total, "l": length, "t": seconds}
            theirs = own.get("episode") if own else None
            if isinstance(theirs, dict) and theirs:
                # ManiSkill's has other names: Stable Baselines3 asks for these.
                episode = theirs if "r" in theirs else {**theirs, **episode}
            info = {"TimeLimit.truncated": time_out, "terminal_observation": last, "episode": episode}
            infos[index] = {**own, **info} if own else info
        self._returns[rows], self._begun[rows] = 0, steps
        self.reset_infos = list(self.reset_infos)  # those before are the caller's to keep
        for index, info in zip(indices, ended.reset_infos, strict=True):
            self.reset_infos[index] = info

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n, ...) each
        :raises InvalidArgumentError: options differ between environments that are reset together
        """
        self._require_open()
        self._actions = None
        observations, self.reset_infos = self._source.reset(self._seeds, self._options)
        self._returns[:], self._begun[:] = 0, self._steps
        self._reset_seeds()
        self._reset_options()
        return observations

    def close(self) -> None:
        """Close the vectorised environment; again does nothing."""
        if not self.closed:
            self.closed = True
            self.env.close()

    def _render(self) -> Sequence[Any]:
        frames = self.env.render()
        if isinstance(frames, torch.Tensor):
            frames = frames.cpu().numpy()
        # Isaac Lab's is one view of all.
        return [frames] if isinstance(frames, np.ndarray) and frames.ndim == 3 else list(frames)

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute."""
        found = self._called(range(self.num_envs), "has_wrapper_attr", attr_name)
        return super().has_attr(attr_name) if found is None else all(found)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of sub-environments; where none can be reached, of the vectorised one, row by row.

        :raises AttributeError: there is none
        """
        chosen = self._chosen(indices, self.num_envs)
        found = self._called(chosen, "get_wrapper_attr", attr_name, needs=attr_name)
        if found is not None:
            return found
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
        chosen = self._chosen(indices, self.num_envs)
        if self._called(chosen, "set_wrapper_attr", attr_name, value) is not None:
            return
        if set(chosen) != set(range(self.num_envs)):
            raise InvalidArgumentError(
                f"{type(self._base).__name__} has no sub-environments that could differ in {attr_name!r}. Set it for "
                f"all: set_attr({attr_name!r}, value)"
            )
        owner = next((layer for layer in layers(self.env) if attr_name in vars(layer)), self._base)
        setattr(owner, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of sub-environments; where none can be reached, of the vectorised one, once.

        What that returns is the result of each; where ``indices`` is None, a result with n rows is one row for each.
        """
        chosen = self._chosen(indices, self.num_envs)
        found = self._called(chosen, method_name, *method_args, needs=method_name, **method_kwargs)
        if found is not None:
            return found
        result = _found(self.env, method_name)(*method_args, **method_kwargs)
        if isinstance(result, torch.Tensor):
            result = result.detach().cpu().numpy()
        rows = indices is None and isinstance(result, np.ndarray | list | tuple) and len(result) == self.num_envs
        return list(result) if rows else [result for _ in chosen]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return which environments have a wrapper of a class: around all of them, or around each."""
        chosen = self._chosen(indices, self.num_envs)
        if any(isinstance(layer, wrapper_class) for layer in layers(self.env)):
            return [True for _ in chosen]
        if isinstance(self._base, SyncVectorEnv):
            return [is_wrapped(self._base.envs[index], wrapper_class) for index in chosen]
        if hasattr(self._base, "env_is_wrapped"):  # SharedMemoryVectorEnv
            self._require_open()
            return list(self._base.env_is_wrapped(wrapper_class, chosen))
        told = self._called(chosen, "__str__")
        if told is None:
            return [False for _ in chosen]
        # By name, "<TimeLimit<Monitor<E instance>>>": AsyncVectorEnv's workers die of an answer that does not pickle.
        names = _names_of(wrapper_class)
        return [bool(names.intersection(re.findall(r"<(\w+)", text))) for text in told]

    def _called(
        self, indices: Sequence[int], name: str, *args: Any, needs: str | None = None, **kwargs: Any
    ) -> list[Any] | None:
        """Call a method of each of these sub-environments; None: they cannot be reached one by one.

        :param needs: an attribute that all of them have; asked first, since the worker of one without it would end
        :raises AttributeError: one does not have it
        """
        self._require_open()
        if isinstance(self._base, SyncVectorEnv):
            found = [self._base.envs[index].get_wrapper_attr(name) for index in indices]
            return [method(*args, **kwargs) for method in found]
        # That of SharedMemoryVectorEnv, whose class needs a later gymnasium than all else here.
        call = getattr(self._base, "call_some", self._call_workers if isinstance(self._base, AsyncVectorEnv) else None)
        if call is None:
            return None
        if needs is not None and not all(call(indices, "has_wrapper_attr", needs)):
            raise AttributeError(f"a sub-environment has no attribute {needs!r}")
        return list(call(indices, name, *args, **kwargs))

    def _call_workers(self, indices: Sequence[int], name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return call_in_workers(self._base, indices, name, *args, **kwargs)


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
    """Return the space of one sub-environment."""
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
    """Return the space of what is returned, and the key of it in a Dict."""
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


def _names_of(wrapper_class: type) -> set[str]:
    """Return the names of a class of wrappers, of those that stand for it, and of those derived from it."""
    names = {wrapper_class.__name__}.union(*map(_names_of, wrapper_class.__subclasses__()))
    return names | {EpisodeMonitor.__name__} if name_of(wrapper_class) in EpisodeMonitor.stands_for else names


def _bounded(space: Any, clip: Any) -> Any:
    if clip is not None and not (isinstance(clip, int | float | np.number) and clip > 0):
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


def _returns_new_arrays(env: Any) -> bool:
    """Return whether an environment and its wrappers are known never to write into observations that they returned."""
    *around, base = layers(env)
    of_workers = name_of(type(base)) == ("rl_ext_core.vector.vector_env", "SharedMemoryVectorEnv")
    return (
        (of_workers or _is_one_of(_RETURN_NEW_ARRAYS, base))
        and getattr(base, "copy", True) is True
        and all(_is_one_of(_KEEP_ARRAYS_NEW, layer) for layer in around)
        and not any({"step", "reset"} & set(vars(layer)) for layer in (*around, base))
    )


def _is_one_of(names: set[str], layer: Any) -> bool:
    """Return whether gymnasium has defined the class, under one of these names."""
    module, name = name_of(type(layer))
    return module.startswith("gymnasium.") and name in names


def _found(env: Any, name: str) -> Any:
    for layer in layers(env):
        if hasattr(layer, name):
            return getattr(layer, name)
    raise AttributeError(f"{type(env).__name__} has no attribute {name!r}")
