"""Environments whose observations show all their state, and functions that compare copies with originals."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import random
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from rl_ext_core.factory.drivers import driver_for

# Outcomes that a test allows. A copy that differs without a warning is never allowed.
COPIED, REFUSED, EITHER = {"copied"}, {"refused"}, {"copied", "refused"}
NOT_SILENT = {"copied", "refused", "warned"}
WIDE = gym.spaces.Box(-np.inf, np.inf, (7,), np.float64)


@dataclasses.dataclass
class Rewards:
    bonus: float = 1.0
    penalty: float = 0.25


GONE = weakref.proxy(Rewards())  # Its object is deleted.


class Line(gym.Env[Any, Any]):
    """A point on a line that actions push. Its number of steps, ``ticks``, is never reset."""

    action_space, observation_space = gym.spaces.Discrete(3), WIDE
    drift: ClassVar[float] = 0.0
    gone = GONE

    def __init__(self, gain: float = 1.0, length: int = 30) -> None:
        self.gain, self.length, self.rewards, self.weights = gain, length, Rewards(), np.ones(3)
        self.ticks, self.position, self.left = 0, 0.0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position, self.left = float(self.np_random.uniform(-1, 1)), self.length
        return self._observation(), {}

    def push(self, action: Any) -> float:
        return self.gain * (int(action) - 1)

    def step(self, action: Any) -> Any:
        self.ticks, self.left = self.ticks + 1, self.left - 1
        self.position += self.push(action) + self.drift + 0.1 * float(self.np_random.standard_normal())
        reward = self.rewards.bonus * float(self.weights @ [1, self.position, 2]) - self.rewards.penalty
        return self._observation(), reward, abs(self.position) > 20, self.left <= 0, {}

    def render(self) -> Any:
        return GONE

    def _observation(self) -> Any:
        numbers = [self.position, self.gain, self.ticks, self.left, self.rewards.bonus, self.rewards.penalty]
        return np.array([*numbers, float(self.weights.sum())])


class Scaled(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that scales rewards. It records no arguments, so it has no specification."""

    def __init__(self, env: gym.Env[Any, Any], scale: float = 2.0) -> None:
        super().__init__(env)
        self.scale = scale

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, float(reward) * self.scale, *rest


gym.register("copies/Line-v0", entry_point="tests.core.factory.copying:Line")


class Case(NamedTuple):
    """Object that an environment stores, with a change of it and the allowed outcomes.

    :ivar read: Reads the object in each step, as a number.
    :ivar change: Changes it after some steps. Called with the environment.
    """

    allowed: set[str]
    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], object] = lambda env: None


class HoldingEnv(gym.Env[Any, Any]):
    """Environment that stores the object of one of a module's ``CASES`` as ``held``."""

    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, module: str, case: str) -> None:
        self.module, self.case, self.sum = module, case, 0.0
        self.held = self.find_case().make()

    def find_case(self) -> Case:
        """Import the module, and return the case with the environment's number."""
        found: Case = importlib.import_module(self.module).CASES[self.case]
        return found

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.sum = 0.0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.sum += float(self.find_case().read(self.held))
        return np.full(1, self.sum), 0.0, False, False, {}


def to_text(value: Any) -> Any:
    """Convert nested data to strings that are equal only for equal bits."""
    if isinstance(value, dict):
        return {key: to_text(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_text(part) for part in value]
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.size > 1000 and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"  # repr is slow for images
    return f"{value.dtype} {value.tolist()!r}" if isinstance(value, np.ndarray) else repr(value)


def rollout(env: Any, steps: int = 7, seed: int | None = 0) -> list[Any]:
    """Seed global generators, reset and step an environment, and return its results as strings."""
    random.seed(1)
    np.random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
    driver = driver_for(env, seed=1)
    assert driver is not None, f"no driver for {env!r}"
    return [to_text(driver.reset(seed)), *(to_text(driver.step()) for _ in range(steps))]


def try_rollout(env: Any, steps: int = 12) -> list[Any]:
    """Return the results of :func:`rollout`, or the name of the exception that it raises."""
    try:
        return rollout(env, steps, seed=3)
    except Exception as error:
        return [type(error).__name__]


def rollout_of_pickle(packed: bytes, steps: int) -> list[Any]:
    return try_rollout(cloudpickle.loads(packed)(), steps)


def outcome(
    pool: ProcessPoolExecutor, log: pytest.LogCaptureFixture, env: Any, name: str = "", *, steps: int = 12
) -> str:
    """Copy an environment, and compare the results of the copy in another process.

    :param name: Name that a refusal or warning must contain.
    :return: ``"copied"``, ``"refused"`` or ``"warned"``.
    """
    log.clear()
    refusal, packed = "", b""
    try:
        packed = cloudpickle.dumps(as_factory(env))
    except NotCopyableError as error:
        refusal = str(error)
    if refusal:
        assert name in refusal
        assert "lambda" in refusal or "as_factory(" in refusal, f"no code to write: {refusal}"
        return "refused"
    warned = [record.getMessage() for record in log.records]
    mine, theirs = try_rollout(env, steps), pool.submit(rollout_of_pickle, packed, steps).result()
    if mine == theirs:
        return "warned" if warned else "copied"
    assert any(name in message for message in warned), f"differs without a warning: {theirs} instead of {mine}"
    return "warned"
