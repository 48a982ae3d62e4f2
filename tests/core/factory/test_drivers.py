"""Drivers step environments of every interface reproducibly, without using the environments' generators."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.factory.drivers import driver_for


class Recorder(gym.Env[Any, Any]):
    """Environment that ends episodes after three steps, and records the actions."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, space: Any) -> None:
        self.action_space, self.actions, self.seeds = space, list[Any](), list[Any]()
        self._buffer = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self._buffer[:] = 0
        return self._buffer, {"when": object()}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self._buffer += 1
        return self._buffer, 1.0, False, bool(self._buffer[0] == 3), {"when": object()}


SPACES = [
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.Box(-np.inf, np.inf, (4,), np.float64),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Text(7),
    spaces.Sequence(spaces.Discrete(4)),
    spaces.Dict({"move": spaces.Discrete(3), "aim": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_actions_of_each_gymnasium_space_depend_only_on_the_seed(space: Any) -> None:
    drawn = []
    for seed in (1, 1, 2):
        environment = Recorder(space)
        driver = driver_for(environment, seed=seed)
        assert driver is not None
        driver.reset(0)
        for _ in range(8):
            driver.step()
        drawn.append(repr(environment.actions))
    assert drawn[0] == drawn[1] != drawn[2]
    assert space._np_random is None  # The driver drew from a copy.


def test_step_at_the_end_of_an_episode_also_returns_the_next_reset() -> None:
    environment = Recorder(spaces.Discrete(2))
    driver = driver_for(environment, seed=0)
    assert driver is not None
    assert driver.reset(5).tolist() == [0, 0]
    returned = [driver.step() for _ in range(4)]
    assert environment.seeds == [5, None]
    last, first = returned[2]
    assert (last[0].tolist(), last[1:], first.tolist()) == ([3, 3], [1.0, False, True], [0, 0])
    # Observations are copies, although the environment writes all of them into one array.
    assert [returned[0][0].tolist(), returned[1][0].tolist(), returned[3][0].tolist()] == [[1, 1], [2, 2], [1, 1]]


def test_actions_of_dm_env_stay_within_the_limits_of_the_spec() -> None:
    dm_env = pytest.importorskip("dm_env")

    class Catch(dm_env.Environment):  # type: ignore[misc, name-defined]
        def reset(self) -> Any:
            return dm_env.restart(np.zeros(1))

        def step(self, action: Any) -> Any:
            assert action.dtype == np.int32
            assert 1 <= action <= 3
            return dm_env.transition(1.0, np.ones(1))

        def action_spec(self) -> Any:
            return dm_env.specs.BoundedArray((), np.int32, 1, 3)

        def observation_spec(self) -> Any:
            return dm_env.specs.Array((1,), np.float64)

    driver = driver_for(Catch(), seed=0)
    assert driver is not None
    assert driver.reset(3)[3].tolist() == [0]
    assert [driver.step()[1] for _ in range(30)] == [1.0] * 30
