"""What workers put around an environment before it is stepped: kept here, where it loads no framework."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.errors import EnvironmentOutputError, InvalidTypeError, MissingDependencyError

__all__ = [
    "CALLS",
    "EpisodeMonitor",
    "checked",
    "copy_output",
    "make",
    "monitored",
    "name_of",
    "seeded",
    "store_reward",
]


def make(spec: Any, env_kwargs: dict[str, Any]) -> Any:
    """Let gymnasium make an environment that renders images, if it takes a render mode: as Stable Baselines3 does."""
    try:
        return gymnasium.make(spec, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:
        return gymnasium.make(spec, **env_kwargs)


def checked(environment: Any) -> Any:
    """Return an environment of gymnasium as it is, and one of the old gym inside shimmy's wrapper.

    :raises InvalidTypeError: If it is another kind of environment.
    :raises MissingDependencyError: If it is one of the old gym and shimmy is not installed.
    """
    if isinstance(environment, gymnasium.Env):
        return environment
    gym_class = getattr(sys.modules.get("gym"), "Env", None)  # loaded already if the environment's class needs it
    if gym_class is not None and isinstance(environment, gym_class):
        return _from_gym(environment)
    kind = type(environment)
    advice = "Use a class that inherits from gymnasium.Env"
    if hasattr(environment, "possible_agents"):
        advice = "Of PettingZoo's, hand over a parallel environment itself: make_vec_env(parallel_env())"
    raise InvalidTypeError(
        f"the environment is a {kind.__module__}.{kind.__qualname__}; expected one of gymnasium. {advice}"
    )


def _from_gym(environment: Any) -> Any:
    """Wrap an environment of the old gym, by the rule of Stable Baselines3's ``_patch_env``."""
    is_v26 = "seed" in inspect.signature(environment.unwrapped.reset).parameters
    version, wrapper = ("0.26", "GymV26CompatibilityV0") if is_v26 else ("0.21", "GymV21CompatibilityV0")
    name = type(environment).__name__
    try:
        shimmy = importlib.import_module("shimmy")
    except ImportError as error:
        raise MissingDependencyError(
            f"`{name}` is an environment of gym {version}, expected one of gymnasium; shimmy, which converts it, is "
            f"not installed. Use pip install 'shimmy>=2.0', which makes it shimmy.{wrapper}(env=env)",
            name="shimmy",
        ) from error
    warnings.warn(
        f"`{name}` is an environment of gym {version}, which is no longer maintained; it runs inside shimmy.{wrapper}. "
        "Inherit from gymnasium.Env to avoid that.",
        stacklevel=3,
    )
    return getattr(shimmy, wrapper)(env=environment)


_IMMUTABLE = (int, float, bool, str, bytes, type(None))


def copy_output(value: Any) -> Any:
    """Copy what an environment returned, since it may write into that again. An object that cannot be copied stays."""
    kind = type(value)
    if kind in _IMMUTABLE or isinstance(value, np.generic):
        return value
    if kind is np.ndarray and value.dtype != object:
        return value.copy("K")
    if kind is dict:
        return {key: copy_output(part) for key, part in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # locks, handles of simulators, tensors with a gradient
        return value


def store_reward(rewards: np.ndarray[Any, Any], index: int, reward: Any) -> None:
    """Write a reward to its place in an array of numbers.

    :raises EnvironmentOutputError: If it is an array with axes, such as ``np.array([1.0])``.
    """
    try:
        rewards[index] = reward
    except (TypeError, ValueError) as error:
        if not np.ndim(reward):
            raise
        raise EnvironmentOutputError(
            f"environment {index} returned a reward of the shape {np.shape(reward)}: expected a number. Use "
            "float(reward[0]), or float(reward.sum()) for several"
        ) from error


def seeded(environment: Any, seed: int) -> Any:
    """Seed the space that actions are sampled from."""
    environment.action_space.seed(seed)
    return environment


def monitored(environment: Any) -> Any:
    """Record returns and lengths of episodes: by Stable Baselines3's own class where that is loaded already."""
    theirs = sys.modules.get("stable_baselines3.common.monitor")
    return EpisodeMonitor(environment) if theirs is None else theirs.Monitor(environment)


class EpisodeMonitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does what Stable Baselines3's ``Monitor`` does without a file.

    ``info["episode"]`` of an episode's last step is its return (``"r"``), its length (``"l"``) and the seconds since
    this object was made (``"t"``).
    """

    # What ``env_is_wrapped`` is asked for.
    stands_for = (("stable_baselines3.common.monitor", "Monitor"),)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.t_start = time.time()
        self.rewards: list[float] = []
        self.needs_reset = True
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []
        self.episode_times: list[float] = []
        self.total_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.rewards = []
        self.needs_reset = False
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and say what the episode was where it ends."""
        if self.needs_reset:
            raise EnvironmentOutputError("this environment needs a reset before it is stepped; write env.reset() first")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        if terminated or truncated:
            self.needs_reset = True
            total, taken = sum(self.rewards), time.time() - self.t_start
            self.episode_returns.append(total)
            self.episode_lengths.append(len(self.rewards))
            self.episode_times.append(taken)
            info["episode"] = {"r": round(total, 6), "l": len(self.rewards), "t": round(taken, 6)}
        self.total_steps += 1
        return observation, reward, terminated, truncated, info

    def get_total_steps(self) -> int:
        """Return the number of steps."""
        return self.total_steps

    def get_episode_rewards(self) -> list[float]:
        """Return the returns of all episodes."""
        return self.episode_returns

    def get_episode_lengths(self) -> list[int]:
        """Return the lengths of all episodes."""
        return self.episode_lengths

    def get_episode_times(self) -> list[float]:
        """Return the seconds from the start to the end of each episode."""
        return self.episode_times


def _called(env: Any, data: Any) -> Any:
    name, args, kwargs = data
    found = env.get_wrapper_attr(name)
    return found(*args, **kwargs) if callable(found) else found


def _has(env: Any, name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


def name_of(wrapper_class: type) -> tuple[str, str]:
    """Return what ``env_is_wrapped`` of a worker takes: to unpickle the class, it would have to import its module."""
    return wrapper_class.__module__, wrapper_class.__qualname__


def _is_wrapped(env: Any, name: tuple[str, str]) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if _is(env, name):
            return True
        env = env.env
    return False


# What methods of ``VecEnv`` and ``VectorEnv`` do to one of their environments, beside steps and resets.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "render": lambda env, _: env.render(),
    "env_method": lambda env, data: env.get_wrapper_attr(data[0])(*data[1], **data[2]),
    "get_attr": lambda env, name: env.get_wrapper_attr(name),
    "has_attr": _has,
    "set_attr": lambda env, data: setattr(env, *data),
    "env_is_wrapped": _is_wrapped,
    "call": _called,
    "set_wrapper_attr": lambda env, data: env.set_wrapper_attr(*data),
}


def _is(layer: Any, name: tuple[str, str]) -> bool:
    """Return whether a layer is of a class, given by module and name: naming it must not import the framework here."""
    own = map(name_of, type(layer).__mro__)
    return name in own or name in getattr(type(layer), "stands_for", ())
