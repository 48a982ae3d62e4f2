"""Logs of episodes in shared memory, against those of ``EpisodeRecorder``."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.shared_log import SharedEpisodeRecorder, read_shared_log

SPACES = {
    "scalars": gymnasium.spaces.Discrete(3),
    "arrays": gymnasium.spaces.Box(-1, 1, (2, 3), np.float32),
    "dicts": gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3), "b": gymnasium.spaces.Box(-1, 1, (2,))}),
}


class Walk(gymnasium.Env[Any, Any]):
    """Random walk, with actions of any kind."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space
        self.scale = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action is None:
            raise ValueError("no action")
        return self.np_random.random(2) * self.scale, 0.0, False, False, {}


def assert_equal(found: Any, expected: Any) -> None:
    """Compare logs, whose arrays must have the same type."""
    assert (found.generators, found.settings, found.checksums) == (
        expected.generators,
        expected.settings,
        expected.checksums,
    )
    assert list(map(repr, found.calls)) == list(map(repr, expected.calls))
    assert [getattr(data, "dtype", None) for _, data in found.calls] == [
        getattr(data, "dtype", None) for _, data in expected.calls
    ]


@pytest.mark.parametrize("kind", SPACES)
def test_shared_log_equals_log_of_recorder(kind: str) -> None:
    space = SPACES[kind]
    memory = mmap.mmap(-1, 1 << 16)
    envs = [SharedEpisodeRecorder(Walk(space), memory), EpisodeRecorder(Walk(space))]
    assert read_shared_log(memory) is None
    space.seed(0)
    actions = [space.sample() for _ in range(20)]
    for env in envs:
        env.scale = 2.0
        env.reset(seed=3)
        for _ in range(2):
            env.reset()
            for action in actions:
                env.step(action)
        with pytest.raises(ValueError, match="no action"):
            env.step(None)
    found = read_shared_log(memory)
    assert found is not None
    assert found.is_interrupted
    assert_equal(found, envs[1].episode_log())
    assert_equal(found, envs[0].episode_log())


def test_episodes_that_cannot_be_written_are_not_recorded() -> None:
    memory = mmap.mmap(-1, 4096)
    env = SharedEpisodeRecorder(Walk(SPACES["arrays"]), memory)
    for action, count in ((np.zeros((2, 3), np.float32), 100), (threading.Lock(), 1)):
        env.reset(seed=1)
        assert read_shared_log(memory) is not None
        for _ in range(count):
            env.step(action)
        assert read_shared_log(memory) is None
