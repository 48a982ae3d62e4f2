"""Environments of gymnasium for all tests: of all spaces and rewards, and with all kinds of faults."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

REWARDS: dict[str, Any] = {
    "float": float,
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "int": lambda value: int(value * 100),
    "large int": lambda value: 2**60 + int(value * 100),
    "int64": lambda value: np.int64(value * 100),
    "int8": lambda value: np.int8(value * 100),
    "bool": lambda value: bool(value > 0.5),
    "numpy's bool": lambda value: np.bool_(value > 0.5),
    "array": lambda value: np.array([value, -value], np.float32),
    "array without dimensions": lambda value: np.array(value, np.float32),
    "int or float": lambda value: int(value * 100) if value > 0.5 else float(value),
    "float32 or bool": lambda value: np.float32(value) if value > 0.5 else bool(value > 0.2),
}

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "Box": spaces.Box(-1, 1, (3,), np.float32),
    "Box of 64-bit floats": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "Box without dimensions": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "Discrete": spaces.Discrete(7, start=-2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 9, 2]),
    "MultiBinary": spaces.MultiBinary(5),
    "Dict": spaces.Dict(
        {
            "z": spaces.Box(-1, 1, (2,), np.float32),
            "image": spaces.Box(0, 255, (3, 36, 36), np.uint8),
            "goal": spaces.Discrete(4),
        }
    ),
    "Tuple": spaces.Tuple((spaces.MultiBinary((2, 2)), spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float64))),
}

ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(4),
    "Discrete from -3": spaces.Discrete(5, start=-3),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "Box of 64-bit floats": spaces.Box(-1, 1, (2, 3), np.float64),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)}),
    "Tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
}


# Environment variable with the path of the log of events.
EVENT_LOG = "RL_EXT_TEST_EVENT_LOG"


def log_event(event: str) -> None:
    if EVENT_LOG in os.environ:
        with Path(os.environ[EVENT_LOG]).open("a") as file:
            file.write(f"{os.getpid()} {event}\n")


def count_events(event: str, *, in_this_process: bool) -> int:
    """Count how often this process, or all others together, logged an event."""
    entries = [line.split() for line in Path(os.environ[EVENT_LOG]).read_text().splitlines()]
    return sum(1 for pid, entry in entries if entry == event and (int(pid) == os.getpid()) == in_this_process)


def change_result(env: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Change what a method of an environment returns, and return the environment."""
    called = getattr(env, method)
    setattr(env, method, functools.wraps(called)(lambda *args, **given: change(called(*args, **given))))
    return env


def change_results(env: Any, change: Callable[..., Any], method: str = "step") -> Any:
    """Change the values that a method of an environment returns, and return the environment.

    :param change: function of these values
    """
    return change_result(env, method, lambda values: change(*values))


def add_info(env: Any, name: str, get_value: Callable[[], Any]) -> Any:
    """Add an entry to the infos of an environment's steps, and return the environment."""
    return change_results(env, lambda *result: (*result[:-1], {**result[-1], name: get_value()}))


class WithMethods(gym.Env[Any, Any]):
    """Environment with methods and attributes that callers use, and images that show its step count."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 as in gymnasium
    render_mode: str | None = "rgb_array"
    label = "new"
    _count = 0

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), self._count, np.uint8)

    def method(self) -> None:
        """Do nothing; a method to call."""

    def twice(self, number: int, *, plus: int = 0) -> int:
        """Return twice the number, plus another one. The name is not that of a method of torch modules."""
        return 2 * number + plus

    def large(self) -> bytes:
        """Return more bytes than a pipe takes at once."""
        return bytes(300_000)

    def raise_in_call(self) -> None:
        raise KeyError("raised in a call")

    def make_lock(self) -> Any:
        """Return a lock, which does not pickle."""
        return threading.Lock()

    def pid(self) -> int:
        return os.getpid()

    def loaded(self, names: Sequence[str]) -> list[str]:
        """Return which of these modules this process has imported."""
        return [name for name in names if name in sys.modules]


class RandomEnv(WithMethods):
    """Environment that returns samples of its space, and its arguments in infos.

    :param observations: name in ``OBSERVATIONS``, or a space
    :param actions: name in ``ACTIONS``, or a space
    :param rewards: name in ``REWARDS``
    :param infos: whether infos have content
    """

    def __init__(
        self,
        observations: Any = "Box",
        actions: Any = "Discrete",
        rewards: str = "float",
        *,
        infos: bool = True,
        render_mode: str | None = "rgb_array",
    ) -> None:
        self.observation_space = OBSERVATIONS.get(observations) if isinstance(observations, str) else observations
        self.action_space = ACTIONS.get(actions) if isinstance(actions, str) else actions
        self._reward, self._infos, self.render_mode = REWARDS[rewards], infos, render_mode
        self.given: list[Any] = []
        self.label = "drawn"

    def _sample_observation(self) -> Any:
        """Draw an observation that depends only on the environment's seed."""
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._sample_observation(), {"seed": seed, "options": options} if self._infos else {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._count += 1
        self.given.append(action)
        end = self.np_random.random()
        terminated, truncated = bool(end < 0.1), bool(end > 0.85 or 0.05 < end < 0.1)
        info = {"given": repr(action), "kind": type(action).__name__, "n": self._count} if self._infos else {}
        return self._sample_observation(), self._reward(self.np_random.random()), terminated, truncated, info

    def all_given(self) -> list[Any]:
        return self.given

    def draws(self) -> dict[str, list[float]]:
        """Return numbers of all random generators in the process."""
        import torch

        library = ctypes.CDLL(None)
        return {
            "random": [random.random() for _ in range(3)],
            "numpy": [float(np.random.random()) for _ in range(3)],
            "torch": [float(torch.rand(())) for _ in range(3)],
            "libc": [library.rand() for _ in range(3)],
            "own": [float(self.np_random.random()) for _ in range(3)],
        }


class ReusedArrayEnv(RandomEnv):
    def _sample_observation(self) -> Any:
        drawn = super()._sample_observation()
        parts = drawn if isinstance(drawn, dict) else {"": drawn}
        place = self.__dict__.setdefault("_place", OrderedDict(copy.deepcopy(parts)))
        for key, part in parts.items():
            if isinstance(part, np.ndarray):
                place[key][...] = part
            else:
                place[key] = part
        return place if isinstance(drawn, dict) else place[""]


class Counting(WithMethods):
    """Environment that logs its calls, and observes its steps, a random number of its reset, and its fixed depth.

    Episodes have ten steps.
    """

    def __init__(self, depth: float = 10.0) -> None:
        log_event("built")
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.depth = depth

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        log_event("reset")
        self._count = 0
        self._world = float(self.np_random.random())
        return self._observe(), {"world": self._world}

    def _observe(self) -> np.ndarray:
        return np.array([self._count, self._world, self.depth], np.float32)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        log_event("stepped")
        self._count += 1
        return self._observe(), 1.0, self._count == 10, False, {}

    def close(self) -> None:
        log_event("closed")


def hang_in_c() -> None:
    """Hang in C code, without ever releasing the GIL."""
    # Hold the GIL without a check for signals, like an endless loop in a C extension.
    sum(itertools.repeat(0))


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


class NeedsArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail(how: str) -> None:
    """Raise an error, exit, hang or be killed, as ``how`` says."""
    if how == "raise":
        raise ValueError("the rope has snapped")
    if how == "raise what does not pickle":
        raise UnpicklableError("a lock")
    if how == "raise what does not unpickle":
        raise NeedsArgumentsError("one", "two")
    if how.startswith("interrupt "):  # this process, and hang
        os.kill(int(how.split()[1]), signal.SIGINT)
        how = "hang"
    if how == "SIGSEGV":
        ctypes.string_at(0)
    elif how == "os._exit":
        os._exit(0)
    elif how == "sys.exit":
        sys.exit("enough")
    elif how == "hang":
        time.sleep(1000)
    elif how == "hang in C":
        hang_in_c()
    else:
        os.kill(os.getpid(), getattr(signal, how))


class Failing(Counting):
    """Environment that fails in a chosen method, in a chosen way.

    :param when: "constructor", "reset", "step", "reset in step", "close" or "method"
    :param how: see :func:`fail`; ``""`` does not fail
    :param after: number of steps before a failure in "step"
    """

    def __init__(self, when: str = "", how: str = "raise", *, after: int = 2) -> None:
        super().__init__()
        self._when, self._how, self._after, self._steps = when, how, after, 0
        self._fail_at("constructor")

    def _fail_at(self, when: str) -> None:
        if self._when == when and self._how:
            fail(self._how)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._steps:
            self._fail_at("reset in step")
        self._fail_at("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps > self._after:
            self._fail_at("step")
        return super().step(action)

    def method(self) -> None:
        self._fail_at("method")

    def return_unreadable(self) -> Any:
        """Return an error that cannot be unpickled, if methods are to fail."""
        return NeedsArgumentsError("one", "two") if self._when == "method" else None

    def close(self) -> None:
        super().close()
        self._fail_at("close")


class FailingOnce(Failing):
    """Environment that fails only if its mark file does not exist yet."""

    def __init__(self, mark: str, when: str) -> None:
        self._mark = Path(mark)
        super().__init__(when, "SIGSEGV", after=0)

    def _fail_at(self, when: str) -> None:
        if self._when == when and not self._mark.exists():
            self._mark.touch()
            fail(self._how)


class Gated(Counting):
    """Environment whose steps wait for a file."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate = gate

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        while not self._gate.exists():
            time.sleep(0.005)
        return super().step(action)


class Returning(Counting):
    def __init__(self, space: spaces.Space[Any], observation: Any) -> None:
        super().__init__()
        self.observation_space, self._observation = space, observation

    def _observe(self) -> Any:
        return self._observation


class Writing(Counting):
    """Environment that writes its step count to a file after some seconds, in ``close`` or in a thread after it."""

    def __init__(self, path: str | Path, how: str = "close", seconds: float = 0.0) -> None:
        super().__init__()
        self._path, self._how, self._seconds = Path(path), how, seconds

    def _write(self) -> None:
        time.sleep(self._seconds)
        self._path.write_text(f"{self._count}")

    def close(self) -> None:
        if self._how == "close":
            self._write()
        else:
            threading.Thread(target=self._write).start()


class Bounded(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that limits rewards, and returns the bound in infos."""

    def __init__(self, env: gym.Env[Any, Any], bound: int = 3) -> None:
        super().__init__(env)
        self.bound = bound

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, min(float(reward), self.bound), terminated, truncated, {**info, "bound": self.bound}


def cart_pole(gravity: float = 9.8) -> gym.Env[Any, Any]:
    """Make CartPole with a gravity, and at most 20 steps per episode."""
    env = gym.make("CartPole-v1", max_episode_steps=20)
    env.unwrapped.gravity = gravity  # type: ignore[attr-defined]
    return env


def build_and_record(build: Any, folder: str) -> gym.Env[Any, Any]:
    """Build an environment, and create a file named by this process's id."""
    Path(folder, f"{os.getpid()}-{len(list(Path(folder).iterdir()))}").touch()
    env: gym.Env[Any, Any] = build()
    return env


class Slow(Counting):
    def step(self, action: int) -> Any:
        time.sleep(0.005)
        return super().step(action)
