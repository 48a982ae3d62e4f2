"""An environment that shares objects with its module and its class, as a user's module may contain it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

UNSET = object()
LEVEL: dict[str, Any] = {"level": 1, "extra": [{"speed": 1}]}
VISITS: defaultdict[str, int] = defaultdict(int)
WEIGHTS = np.ones(3)


class Budget:
    def __init__(self) -> None:
        self.left = 10


BUDGET = Budget()


class Curriculum(gym.Env[Any, Any]):
    """Environment that refers to each shared object by two names."""

    START = object()
    history: ClassVar[list[int]] = []
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-99, 99, (6,), np.float64)

    def __init__(self) -> None:
        self.last, self.start = UNSET, self.START
        self.level, self.visits, self.weights, self.budget, self.seen = LEVEL, VISITS, WEIGHTS, BUDGET, self.history
        self.extra, self.options = LEVEL["extra"], {"first": LEVEL["extra"][0]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        LEVEL["level"] += 1
        VISITS["all"] += 1
        WEIGHTS[0] += 1
        BUDGET.left -= 1
        Curriculum.history.append(1)
        held = self.last, self.start, self.level, self.visits, self.weights, self.budget, self.seen
        shared = UNSET, self.START, LEVEL, VISITS, WEIGHTS, BUDGET, self.history
        same = float(all(one is other for one, other in zip(held, shared, strict=True)))
        return np.array([same, LEVEL["level"], VISITS["all"], WEIGHTS[0], BUDGET.left, len(self.history)]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}
