"""What processes do that share a storage, and the environments that collectors step for them."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from tests.torchrl_ext.frame_data import Videos


def collect_into(buffer: Any, seed: int, batches: list[int]) -> None:
    """Adds batches of videos."""
    torch.set_num_threads(1)
    videos = Videos(2, seed=seed)
    for steps in batches:
        buffer.extend(videos.collect(steps).reshape(-1))


class Film(gymnasium.Env[Any, Any]):
    """Stacks of frames that depend on nothing but the seed of the first reset."""

    observation_space = spaces.Box(0, 255, (4, 28, 24), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.stack = np.zeros((4, 28, 24), np.uint8)
        self.length = int(self.np_random.integers(3, 20))
        return self._next(), {}

    def _next(self) -> Any:
        frame = np.full((28, 24), 50, np.uint8)
        y, x = self.np_random.integers(0, 20, 2)
        frame[y : y + 4, x : x + 4] = self.np_random.integers(0, 256, (4, 4))
        self.stack = np.concatenate([self.stack[1:], frame[None]])
        return self.stack.copy()

    def step(self, action: Any) -> Any:
        self.length -= 1
        return self._next(), 1.0, self.length == 0, False, {}


def make_film() -> Any:
    """The environment for TorchRL."""
    from torchrl_ext import GymWrapper

    return GymWrapper(Film())


def contents(rows: Any, keys: list[Any]) -> Counter[str]:
    """How often each element is there, as hashes of what it holds under these keys."""
    arrays = [rows[key].numpy().reshape(len(rows), -1) for key in keys]
    return Counter(
        hashlib.sha256(b"".join(array[i].tobytes() for array in arrays)).hexdigest() for i in range(len(rows))
    )
