"""Environments of ``benchmarks.vec_env``; workers import this, so it imports nothing heavy."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.vector.environments import EpisodeMonitor

FRAME = (210, 160, 3)
BUSY_S = 0.001


class SelfStepping(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps by itself, many times: what a process does that talks to nobody."""

    def step_many(self, steps: int) -> None:
        """Step, and reset where that is due."""
        action = self.action_space.sample()
        for _ in range(steps):
            _, _, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                self.env.reset()

    def pid(self) -> int:
        """Tell which process this is."""
        return os.getpid()

    def die(self) -> None:
        """End this process."""
        os.kill(os.getpid(), signal.SIGKILL)


class Busy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes a millisecond of a core for a step."""

    def step(self, action: Any) -> Any:
        """Spin."""
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        return self.env.step(action)


class Frames(gymnasium.Env[np.ndarray, int]):
    """Costs nothing and returns 100 KB."""

    observation_space = gymnasium.spaces.Box(0, 255, FRAME, np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(256, size=(4, *FRAME), dtype=np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start counting again."""
        self._steps = 0
        return self._frames[0], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count."""
        self._steps += 1
        return self._frames[self._steps % 4], 1.0, False, self._steps >= 1000, {}


def cart_pole() -> gymnasium.Env[Any, Any]:
    """As it is."""
    return SelfStepping(gymnasium.make("CartPole-v1"))


def monitored() -> gymnasium.Env[Any, Any]:
    """With returns and lengths of episodes."""
    return EpisodeMonitor(cart_pole())


def busy() -> gymnasium.Env[Any, Any]:
    """CartPole that takes a millisecond."""
    return SelfStepping(Busy(gymnasium.make("CartPole-v1")))


def frames() -> gymnasium.Env[Any, Any]:
    """Of the size of Atari's."""
    return SelfStepping(Frames())
