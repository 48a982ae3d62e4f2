"""Gymnasium's vectorised environments take the factories: each worker has a copy that draws on its own."""

from __future__ import annotations

import gc
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from rl_ext_core.factory import as_factory
from tests.core.factory.worlds import Line

METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]


def changed_line() -> Any:
    env = gym.wrappers.TimeLimit(Line(), 20)
    env.unwrapped.rewards.bonus = 4.0  # type: ignore[attr-defined]
    return env


def rollouts(venv: VectorEnv[Any, Any, Any], *, seed: int | None = 3, steps: int = 30) -> list[Any]:
    venv.action_space.seed(1)
    seen: list[Any] = list(venv.reset(seed=seed))
    for _ in range(steps):
        seen += venv.step(venv.action_space.sample())
    venv.close()
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_environments_in_workers_do_what_the_written_line_does_and_draw_on_their_own(method: str) -> None:
    gc.collect()  # what other tests have left of libraries that do not bear it in a forked process
    env = changed_line()
    env.reset(seed=0)
    factory = as_factory(env)
    # Gymnasium builds the first of them in this process for its spaces, and closes it: the instance survives.
    ours = rollouts(AsyncVectorEnv(factory.for_workers(2), context=method))
    np.testing.assert_equal(ours, rollouts(SyncVectorEnv([changed_line] * 2)))
    assert env.step(0)[0][2] == 1
    if method != "fork":
        return  # streams are the factories', however a process starts
    seen = [
        rollouts(AsyncVectorEnv(factory.for_workers(2, seed=seed), context=method), seed=None, steps=1)[0]
        for seed in (1, 1, 2)
    ]
    assert not np.array_equal(seen[0][0], seen[0][1])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
