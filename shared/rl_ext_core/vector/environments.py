"""Options and environments of worker pools: checks, factories, wrappers and calls.

Workers load this module, which therefore does not import SB3, torch or TorchRL.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import operator
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.factory import convert
from rl_ext_core.recording.recorder import RECORDED_CALLS
from rl_ext_core.resources import check_folder
from rl_ext_core.vector.spaces import device_of, find_attribute
from rl_ext_core.vector.stepper import STEP_RESULT, check_result_length

# -- arguments of vectorized environments


def check_recorder(recorder: Any) -> None:
    """Raise an error if ``recorder`` is neither a bool nor a folder."""
    if isinstance(recorder, (str, os.PathLike)):
        check_folder("recorder", recorder)
    elif not isinstance(recorder, bool):
        raise InvalidArgumentError(
            f"recorder={recorder!r} is not a folder: expected a folder for records of crashes, True (the working "
            'directory), or False (no records). Use recorder="crashes"'
        )


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return an argument as an int.

    :raises InvalidTypeError: If ``value`` is not an integer.
    :raises InvalidArgumentError: If ``value`` is less than ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}={_suggest_count(value)}")
    if number < least:
        raise InvalidArgumentError(f"{name}={number} must be at least {least}")
    return number


def _suggest_count(value: Any) -> str:
    """Return the integer that the caller probably meant, for example for 1e6 or "4GB"."""
    from rl_ext_core.frames.planning import parse_bytes  # which workers need not load

    try:
        number = parse_bytes(value) if isinstance(value, str) else int(value)
    except (InvalidArgumentError, TypeError, ValueError, OverflowError):
        number = 1
    return f"{max(number, 1):_}"


def check_seconds(name: str, seconds: Any) -> None:
    """Raise if a time limit is neither None nor a positive number of seconds."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise InvalidArgumentError(
            f"{name}={seconds!r} is not a time; expected seconds above 0, or None for no limit. Use {name}=60"
        )


def check_env_fns(env_fns: Any) -> None:
    """Raise if ``env_fns`` is not a sequence, or is empty."""
    if not isinstance(env_fns, Sequence) or isinstance(env_fns, str):
        raise InvalidTypeError(f"env_fns={env_fns!r} is not a list; expected a list of functions. Use [make_env] * 4")
    if not env_fns:
        raise InvalidArgumentError("env_fns is empty; expected a function for each environment. Use [make_env] * 4")


@dataclasses.dataclass(frozen=True)
class Caller:
    """Names by which an adapter's users know a pool, for messages.

    :ivar label: what errors are about, each with a single environment
    :ivar workers_argument: what users write for a number of workers
    :ivar close_argument: what users write for ``close_timeout``
    :ivar different_spaces: advice if the environments have different spaces
    :ivar failed_calls_end: whether an exception in a call ends the workers, as in a step
    """

    label: str = "environment"
    workers_argument: str = "n_workers={}"
    close_argument: str = "close_timeout"
    different_spaces: str = "Build them alike"
    failed_calls_end: bool = False


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Options of a worker pool. They are checked before a process is started.

    Options that are not listed here are those of :class:`~rl_ext_core.vector.SharedMemoryVectorEnv`.

    :ivar cwd: ``"own"`` for an empty working directory per worker, or a folder that each worker gets a copy of;
        default: the working directory of this process
    :ivar caller: names in messages
    :ivar spaces: expected observation space and action space; default: those of the first environment
    :ivar worker_seeds: seed of each worker, for errors; default: the seed of its last reset
    :ivar initializer: function that each worker calls first; default: none
    """

    start_method: str | None = None
    n_workers: int | None = None
    start_timeout: float | None = None
    step_timeout: float | None = None
    close_timeout: float | None = None
    restart: str | None = None
    max_restarts: int = 0
    cwd: str | os.PathLike[str] | None = None
    recorder: bool | str | os.PathLike[str] = True
    caller: Caller = Caller()
    spaces: tuple[Any, Any] | None = None
    worker_seeds: Sequence[int] | None = None
    initializer: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        if self.start_method is not None and self.start_method not in methods:
            raise InvalidArgumentError(
                f"start_method={self.start_method!r}: cannot find context for {self.start_method!r}; expected one of "
                f'{", ".join(methods)} on this system. Use start_method="{methods[0]}", or leave it out'
            )
        if self.n_workers is not None:
            check_count("n_workers", self.n_workers)
        for name in ("start_timeout", "step_timeout", "close_timeout"):
            check_seconds(name, getattr(self, name))
        if self.restart not in (None, "truncate"):
            raise InvalidArgumentError(
                f'restart={self.restart!r} is neither "truncate" nor None. Use restart="truncate"'
            )
        check_count("max_restarts", self.max_restarts, least=0)
        check_recorder(self.recorder)
        if self.cwd not in (None, "own") and not os.path.isdir(self.cwd):
            raise InvalidArgumentError(
                f'cwd={self.cwd!r} is not a folder: expected "own" (an empty directory for each worker), a folder of '
                'which each gets a copy, or None (this process\'s own). Use cwd="own"'
            )


def make_factories(env_fns: Sequence[Any], timeout: float | None = None) -> list[EnvFactory[Any]]:
    """Convert functions, environments, ids and factories to factories, one for each worker.

    Factories that are bound to a worker stay as they are. An object that occurs several times is converted once.

    :param timeout: time limit in seconds for building and stepping a copy of an environment; default: none
    """
    others = {id(env_fn): env_fn for env_fn in env_fns if not isinstance(env_fn, EnvFactory) or env_fn.worker is None}
    factories = {key: convert(env_fn, verify=True, timeout=timeout) for key, env_fn in others.items()}
    made = {key: factory.for_workers(len(env_fns)) for key, factory in factories.items()}
    return [made[id(env_fn)][index] if id(env_fn) in made else env_fn for index, env_fn in enumerate(env_fns)]


# -- environments


def make(spec: Any, env_kwargs: dict[str, Any]) -> Any:
    """Call ``gymnasium.make``, with ``render_mode="rgb_array"`` if the environment accepts it."""
    try:
        return gymnasium.make(spec, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:
        return gymnasium.make(spec, **env_kwargs)


def store_reward(rewards: np.ndarray[Any, Any], index: int, reward: Any) -> None:
    """Write the reward of an environment, a number or an array of one number, to an array.

    :raises EnvironmentOutputError: If ``reward`` is anything else, as None or ``np.array([1.0, 2.0])``.
    """
    if isinstance(reward, (float, int)):  # checking the axes of a number takes ten times as long
        rewards[index] = reward
        return
    number = np.squeeze(reward) if np.ndim(reward) else reward
    try:
        float(number)  # NumPy would store None as NaN
        rewards[index] = number
    except (TypeError, ValueError) as error:
        kind = f"the shape {np.shape(reward)}" if np.ndim(reward) else f"type {type(reward).__name__}"
        raise EnvironmentOutputError(
            f"environment {index} returned a reward of {kind}: expected a number. Use float(reward.sum()) for several"
        ) from error


def seed_action_space(environment: Any, seed: int) -> Any:
    """Seed the action space of an environment, and return the environment."""
    environment.action_space.seed(seed)
    return environment


def wrap_in_monitor(environment: Any) -> Any:
    """Wrap an environment in SB3's Monitor if that is imported, else in EpisodeMonitor."""
    sb3_monitor = sys.modules.get("stable_baselines3.common.monitor")
    return EpisodeMonitor(environment) if sb3_monitor is None else sb3_monitor.Monitor(environment)


def is_plain(environment: Any) -> bool:
    """Return whether an environment is a single gymnasium environment that TorchRL describes like a batch of them.

    Environments with a ``torch.device`` take and return tensors.
    """
    return (
        isinstance(environment, gymnasium.Env)
        and not find_attribute(environment, "num_envs")
        and device_of(environment) is None
        and all(map(_has_spec_of_batch, (environment.observation_space, environment.action_space)))
    )


def _has_spec_of_batch(space: Any) -> bool:
    """Return whether TorchRL describes a batch of a space like the space with one more axis.

    For example, it makes one-hot vectors of a MultiDiscrete, and numbers of a batch of them.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return all(map(_has_spec_of_batch, space.values()))
    return type(space) is gymnasium.spaces.Discrete or (type(space) is gymnasium.spaces.Box and space.shape != ())


def adapt_unless_plain(environment: Any, adapt: bytes) -> Any:
    """Return a plain gymnasium environment, or what a pickled function returns for another one.

    The function is unpickled only if it is needed, because that may import a framework.
    """
    return environment if is_plain(environment) else pickle.loads(adapt)(environment)


def read_unless_plain(environment: Any, read: bytes) -> Any:
    """Return the spaces of a plain gymnasium environment, and what a pickled function returns for others."""
    if is_plain(environment):
        return environment.observation_space, environment.action_space
    return pickle.loads(read)(environment)


def limit_threads(environment: Any, number: int) -> None:
    """Limit torch to a number of threads, if it is imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(number)


def seed_torch(environment: Any, seed: int | None) -> None:
    """Seed torch's generator, if torch is imported, as TorchRL's workers do."""
    if seed is not None and "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that repeats each action ``frames`` times and sums rewards, as TorchRL's ``frame_skip`` does."""

    def __init__(self, env: gymnasium.Env[Any, Any], frames: int) -> None:
        super().__init__(env)
        self.frames = frames

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment until the episode ends, or ``frames`` times; sum the rewards."""
        total: Any = 0
        for _ in range(self.frames):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class EpisodeMonitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that replaces SB3's ``Monitor`` without a file, and without importing SB3.

    In the last step of an episode, ``info["episode"]`` contains the return (``"r"``), the length (``"l"``), and the
    seconds since this object was created (``"t"``).
    """

    # env_is_wrapped returns True for these classes too.
    equivalent_classes = (("stable_baselines3.common.monitor", "Monitor"),)

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
        """Reset the environment and start an episode."""
        self.rewards = []
        self.needs_reset = False
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; add ``info["episode"]`` if the episode ends.

        :raises EnvironmentOutputError: If the environment needs a reset, or does not return five values.
        """
        if self.needs_reset:
            raise EnvironmentOutputError("this environment needs a reset before it is stepped; use env.reset() first")
        result: Any = self.env.step(action)
        if type(result) is not tuple or len(result) != 5:
            result = check_result_length(result, STEP_RESULT)
        observation, reward, terminated, truncated, info = result
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
        """Return the number of steps in all episodes."""
        return self.total_steps

    def get_episode_rewards(self) -> list[float]:
        """Return the return of each finished episode."""
        return self.episode_returns

    def get_episode_lengths(self) -> list[int]:
        """Return the length of each finished episode."""
        return self.episode_lengths

    def get_episode_times(self) -> list[float]:
        """Return the seconds from the creation of this object to the end of each episode."""
        return self.episode_times


# -- calls


def qualified_name(wrapper_class: type) -> tuple[str, str]:
    """Return the module and name of a class, for calls of ``env_is_wrapped`` in a worker.

    Unpickling the class itself would import its module in the worker.
    """
    return wrapper_class.__module__, wrapper_class.__qualname__


def _is_wrapped(env: Any, name: tuple[str, str]) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if name in map(qualified_name, type(env).__mro__) or name in getattr(type(env), "equivalent_classes", ()):
            return True
        env = env.env
    return False


def _has_attr(env: Any, name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


# Methods of VecEnv and VectorEnv, except steps and resets: each function calls one environment with its data.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "apply": lambda env, data: data[0](env, *data[1:]),
    "render": lambda env, _: env.render(),
    "get_attr": lambda env, name: env.get_wrapper_attr(name),
    "has_attr": _has_attr,
    "env_is_wrapped": _is_wrapped,
    **RECORDED_CALLS,
}
