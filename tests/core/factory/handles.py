"""Environments that a library in C knows by numbers: the library is a global of their module."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.linalg import _umath_linalg

_lib = ctypes.CDLL(_umath_linalg.__file__)  # any library that belongs to no rule and is not the system's
_system = ctypes.CDLL(None)


class Plant(gym.Env[Any, Any]):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (1,))
    handle: Any

    def __init__(self, handle: Any = 0) -> None:
        self.handle = handle

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32) + (_lib is None), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


class ClassPlant(Plant):
    library: ClassVar[Any] = _lib

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32) + (self.library is None), {}


class Timed(gym.Env[Any, Any]):
    """Counts, and calls the system's library."""

    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (1,))

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count += _system.abs(-1)
        return np.full(1, self.count, np.float32), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}
