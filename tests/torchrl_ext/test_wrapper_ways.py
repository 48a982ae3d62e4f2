"""The wrapper around a script's own classes, in the ways in which people run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ways import WAYS, run_as

TEXT = """
import gymnasium, numpy, torch
from torchrl_ext import GymWrapper

LEVEL = 1.0
calls = []

class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        self.steps += 1
        calls.append(action)
        return numpy.full(1, LEVEL, numpy.float32), LEVEL, self.steps >= 3, False, {}

class Doubles(GymWrapper):
    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("reward", out["reward"] * 2)

env, doubles = GymWrapper(Own()), Doubles(Own())
env.rollout(5, break_when_any_done=False)
# %%
LEVEL = 4.0
rewards = [each.rollout(4, break_when_any_done=False)["next", "reward"].flatten().tolist() for each in (env, doubles)]
print(rewards, len(calls))
"""


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_classes_and_globals_of_main(way: str, tmp_path: Path) -> None:
    assert run_as(way, TEXT, tmp_path).strip().endswith("[[4.0, 4.0, 4.0, 4.0], [8.0, 8.0, 8.0, 8.0]] 13")
