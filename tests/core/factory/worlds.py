"""Small environments in which everything that they hold can be seen: what a copy has lost shows in its observations."""

from __future__ import annotations

import dataclasses
import os
import signal
import warnings
import zlib
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle, RecordConstructorArgs

# What was called in this process.
EVENTS: list[str] = []
_WIDE = gym.spaces.Box(-np.inf, np.inf, (7,), np.float64)


@dataclasses.dataclass
class Rewards:
    bonus: float = 1.0
    penalty: float = 0.25


class Line(gym.Env[Any, Any]):
    """A point that is pushed; it holds an attribute of every kind.

    :ivar gain: set by the constructor
    :ivar ticks: counted by steps, never reset
    :ivar position: set by resets and steps
    """

    action_space = gym.spaces.Discrete(3)
    observation_space = _WIDE
    drift: ClassVar[float] = 0.0

    def __init__(self, gain: float = 1.0, length: int = 30) -> None:
        EVENTS.append("made")
        self.gain = gain
        self.length = length
        self.rewards = Rewards()
        self.weights = np.ones(3)
        self.ticks = 0
        self.position = 0.0
        self.left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        EVENTS.append("reset")
        self.position = float(self.np_random.uniform(-1, 1))
        self.left = self.length
        return self._seen(), {}

    def push(self, action: Any) -> float:
        return self.gain * (int(action) - 1)

    def step(self, action: Any) -> Any:
        EVENTS.append("step")
        self.ticks += 1
        self.left -= 1
        self.position += self.push(action) + self.drift + 0.1 * float(self.np_random.standard_normal())
        reward = self.rewards.bonus * float(self.weights @ [1, self.position, 2]) - self.rewards.penalty
        return self._seen(), reward, abs(self.position) > 20, self.left <= 0, {}

    def close(self) -> None:
        EVENTS.append("close")

    def _seen(self) -> Any:
        numbers = [self.position, self.gain, self.ticks, self.left, self.rewards.bonus, self.rewards.penalty]
        return np.array([*numbers, float(self.weights.sum())])


class EzLine(Line, EzPickle):
    """One whose own way of being pickled calls the constructor again."""

    def __init__(self, gain: float = 1.0, length: int = 30) -> None:
        EzPickle.__init__(self, gain, length)
        super().__init__(gain, length)


class Sealed(Line):
    """One that holds something in C, which cannot be copied."""

    def __init__(self, gain: float = 1.0, length: int = 30) -> None:
        super().__init__(gain, length)
        self.engine = zlib.compressobj()


class Raising(Line):
    """One that raises when it is stepped."""

    def step(self, action: Any) -> Any:
        raise ArithmeticError(f"no move {action} here")


class Unmakeable(Line):
    """One of which no copy can be made, for a reason of its own."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ConnectionRefusedError("the licence is taken")


class Crashing(Line):
    """One that takes its process down."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


class Loud(Line):
    """One that prints and warns."""

    def step(self, action: Any) -> Any:
        print("a step")  # noqa: T201 that is what it is for
        warnings.warn("stepped", stacklevel=1)
        return super().step(action)


class Forgetful(Line):
    """One whose own way of being pickled, written for a reason of its own, leaves something out."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gain": 1.0}


class Turned:
    """Resets and steps, and is of no kind that is known."""

    def __init__(self) -> None:
        self.angle = 0.0

    def reset(self) -> float:
        self.angle = 0.0
        return self.angle

    def step(self, action: float) -> float:
        self.angle += action
        return self.angle


class Scaled(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not tell its arguments: it has no specification."""

    def __init__(self, env: gym.Env[Any, Any], scale: float = 2.0) -> None:
        super().__init__(env)
        self.scale = scale

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward) * self.scale, terminated, truncated, info


class Told(Scaled, RecordConstructorArgs):
    """The same, which tells them."""

    def __init__(self, env: gym.Env[Any, Any], scale: float = 2.0) -> None:
        RecordConstructorArgs.__init__(self, scale=scale)
        Scaled.__init__(self, env, scale)


class Noisy(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """One with a generator that no reset seeds."""

    def __init__(self, env: gym.Env[Any, Any], seed: int | None = 0) -> None:
        RecordConstructorArgs.__init__(self, seed=seed)
        gym.Wrapper.__init__(self, env)
        self.noise = np.random.default_rng(seed)

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return observation + self.noise.uniform(), *rest


for _cls in (Line, EzLine, Sealed, Raising, Forgetful, Unmakeable):
    gym.register(f"worlds/{_cls.__name__}-v0", entry_point=f"tests.core.factory.worlds:{_cls.__name__}")


def rollout(env: Any, seed: int | None = 7, *, steps: int = 45, action_seed: int = 3) -> list[Any]:
    """Reset and step an environment, over the ends of episodes, and give all that it returns."""
    actions = np.random.default_rng(action_seed)
    space = env.action_space
    seen: list[Any] = [_plain(env.reset(seed=seed))]
    for _ in range(steps):
        drawn = int(actions.integers(space.n)) if hasattr(space, "n") else actions.uniform(-1, 1, space.shape)
        result = env.step(drawn if not hasattr(space, "dtype") else np.asarray(drawn, space.dtype)[()])
        seen.append(_plain(result))
        if result[2] or result[3]:
            seen.append(_plain(env.reset()))
    return seen


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if key != "episode"}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
