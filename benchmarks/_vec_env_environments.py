"""Environments of ``benchmarks.vec_env``, in a module that workers import quickly."""

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
    """Wrapper that steps many times per call, to measure a worker without communication."""

    def step_many(self, steps: int) -> None:
        """Step with one random action, and reset after each episode."""
        action = self.action_space.sample()
        for _ in range(steps):
            _, _, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                self.env.reset()

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def die(self) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)


class Busy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper whose steps take one more millisecond of CPU time."""

    def step(self, action: Any) -> Any:
        """Spin for ``BUSY_S``, then step."""
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        return self.env.step(action)


class Frames(gymnasium.Env[np.ndarray, int]):
    """Environment that returns 100 KB frames at no cost."""

    observation_space = gymnasium.spaces.Box(0, 255, FRAME, np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(256, size=(4, *FRAME), dtype=np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._steps = 0
        return self._frames[0], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the next of four frames; episodes have 1000 steps."""
        self._steps += 1
        return self._frames[self._steps % 4], 1.0, False, self._steps >= 1000, {}


def cart_pole() -> gymnasium.Env[Any, Any]:
    """Make a plain CartPole."""
    return SelfStepping(gymnasium.make("CartPole-v1"))


def monitored_cart_pole() -> gymnasium.Env[Any, Any]:
    """Make a CartPole that reports returns and lengths of episodes."""
    return EpisodeMonitor(cart_pole())


def busy() -> gymnasium.Env[Any, Any]:
    """Make a CartPole whose steps take a millisecond."""
    return SelfStepping(Busy(gymnasium.make("CartPole-v1")))


def frames() -> gymnasium.Env[Any, Any]:
    """Make an environment with frames as large as Atari's."""
    return SelfStepping(Frames())
