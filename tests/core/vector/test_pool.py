"""Parts of the pool that a VecEnv does not show."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector.environments import EpisodeMonitor
from rl_ext_core.vector.layout import kept
from tests.sb3_ext.vec_worlds import Counting


def test_kept_observations_are_copies() -> None:
    observation = {"a": np.zeros(2), "b": (np.ones(1), 3)}
    copy = kept(observation)
    observation["a"][:] = 7
    observation["b"][0][:] = 7  # type: ignore[index]
    assert str(copy) == str({"a": np.zeros(2), "b": (np.ones(1), 3)})


def test_the_monitor_refuses_a_step_without_a_reset() -> None:
    with pytest.raises(EnvironmentOutputError, match="needs a reset"):
        EpisodeMonitor(Counting()).step(0)


def test_the_monitor_counts_as_stable_baselines3s() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    ours, theirs = EpisodeMonitor(Counting()), monitor.Monitor(Counting())
    for env in (ours, theirs):
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(10):
                *_, info = env.step(0)
        assert {name: value for name, value in info["episode"].items() if name != "t"} == {"r": 10.0, "l": 10}
    for name in ("get_total_steps", "get_episode_rewards", "get_episode_lengths"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert len(ours.get_episode_times()) == 2
    assert functools.reduce(max, ours.get_episode_times()) < 60
