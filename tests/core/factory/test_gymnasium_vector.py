"""Gymnasium's vectorised environments take the factories: each worker has a copy that draws on its own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from rl_ext_core.factory import as_factory
from tests.core.factory import worlds

METHODS = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")), "fork"]


def changed_line() -> Any:
    env = gym.make("worlds/Line-v0", max_episode_steps=20)
    env.unwrapped.rewards.bonus = 4.0  # type: ignore[attr-defined]
    return env


def changed_sealed() -> Any:
    env = gym.make("worlds/Sealed-v0", max_episode_steps=20)
    env.unwrapped.gain = 4.0  # type: ignore[attr-defined]
    return env


def changed_pendulum() -> Any:
    env = gym.wrappers.NormalizeObservation(gym.make("InvertedPendulum-v5", max_episode_steps=20))
    env.unwrapped.model.opt.gravity[2] = -3.0  # type: ignore[attr-defined]
    return env


CASES = [changed_line, changed_sealed, changed_pendulum]


def rollouts(venv: VectorEnv[Any, Any, Any], *, seed: int | None = 3, steps: int = 30) -> list[Any]:
    venv.action_space.seed(1)
    seen: list[Any] = list(venv.reset(seed=seed))
    for _ in range(steps):
        seen += venv.step(venv.action_space.sample())
    venv.close()
    return seen


@pytest.mark.parametrize("make", CASES)
def test_environments_in_this_process_do_what_the_written_line_does(make: Any) -> None:
    ours = rollouts(SyncVectorEnv(as_factory(make()).for_workers(3)))
    np.testing.assert_equal(ours, rollouts(SyncVectorEnv([make] * 3)))


@pytest.mark.sample
@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "fork"))]
)
@pytest.mark.parametrize("make", CASES)
def test_environments_in_workers_do_what_the_written_line_does(make: Any, method: str) -> None:
    ours = rollouts(AsyncVectorEnv(as_factory(make()).for_workers(2), context=method))
    np.testing.assert_equal(ours, rollouts(SyncVectorEnv([make] * 2)))


@pytest.mark.parametrize("method", METHODS)
def test_copies_draw_differently_and_the_same_again_with_a_seed(method: str) -> None:
    factory = as_factory(changed_line())
    seen = [
        rollouts(AsyncVectorEnv(factory.for_workers(2, seed=seed), context=method), seed=None, steps=1)[0]
        for seed in (1, 1, 2)
    ]
    assert not np.array_equal(seen[0][0], seen[0][1])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])


def test_the_instance_survives_what_gymnasium_does_with_the_first_of_them() -> None:
    # It builds one in this process for its spaces, and closes it.
    env = changed_line()
    env.reset(seed=0)
    factories = as_factory(env).for_workers(2)
    worlds.EVENTS.clear()
    venv = AsyncVectorEnv(factories)
    assert worlds.EVENTS == ["close"]
    assert env.step(0)[0][2] == 1
    venv.close()
