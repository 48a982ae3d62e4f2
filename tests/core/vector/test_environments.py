"""What workers put around environments."""

from __future__ import annotations

import pytest

from rl_ext_core.errors import EnvironmentOutputError
from rl_ext_core.vector.environments import EpisodeMonitor
from tests.sb3_ext.vec_worlds import Counting


def test_the_monitor_counts_as_stable_baselines3s() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    ours, theirs = EpisodeMonitor(Counting()), monitor.Monitor(Counting())
    with pytest.raises(EnvironmentOutputError, match="needs a reset"):
        ours.step(0)
    for env in (ours, theirs):
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(10):
                *_, info = env.step(0)
        assert {name: value for name, value in info["episode"].items() if name != "t"} == {"r": 10.0, "l": 10}
    for name in ("get_total_steps", "get_episode_rewards", "get_episode_lengths"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert len(ours.get_episode_times()) == 2
