"""GymVecEnv over vectorized environments in C++: ALE, and imitations of EnvPool. See also tests/test_stepper.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector import autoreset
from sb3_ext import GymVecEnv


class Pool(VectorEnv[Any, Any, Any]):
    """Counter in the style of EnvPool: ``reset`` takes indices, and returns only the rows that it has reset."""

    single_observation_space = spaces.Box(-100, 100, (2,), np.float32)
    single_action_space = spaces.Discrete(2)
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 3
    spec: Any = SimpleNamespace(id="Count-v0", config=SimpleNamespace(num_envs=3, batch_size=3))

    def __init__(self) -> None:
        self._counts = np.zeros(3, int)
        self._due = np.zeros(3, bool)
        self._episodes = np.zeros(3, int)

    def _output(self, rows: Any) -> Any:
        """Return the observations and the info of some rows."""
        observations = np.stack([self._episodes[rows], self._counts[rows]], 1).astype(np.float32)
        return observations, {"elapsed_step": self._counts[rows].copy(), "env_id": rows}

    def _begin(self, rows: Any) -> None:
        """Start a new episode in some rows."""
        self._counts[rows], self._due[rows] = 0, False
        self._episodes[rows] += 1

    def reset(self, env_id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        if options and "reset_mask" in options:
            env_id = np.flatnonzero(options["reset_mask"])
        rows = np.arange(3) if env_id is None else env_id
        self._begin(rows)
        return self._output(rows)

    def step(self, actions: Any) -> Any:
        late = self._due.copy()
        self._counts += 1
        self._begin(late.nonzero()[0])
        self._due = ended = self._counts >= np.arange(3) + 3
        observation, info = self._output(np.arange(3))
        return observation, np.ones(3), ended, np.zeros(3, bool), info


class OldPool(Pool):
    """Pool whose ``reset`` takes only indices, as in EnvPool before 1.2."""

    def reset(self, env_id: Any = None) -> Any:
        return super().reset(env_id)


Pool.__module__ = OldPool.__module__ = "envpool.imitation"


@pytest.mark.parametrize("wrap", [lambda pool: pool, RecordEpisodeStatistics])
@pytest.mark.parametrize("kind", [Pool, OldPool])
def test_only_ended_environments_of_pool_are_reset(wrap: Any, kind: Any) -> None:
    venv = GymVecEnv(wrap(kind()))
    venv.reset()
    counts, episodes = np.zeros(3), np.ones(3)
    for _ in range(20):
        observations, _, dones, infos = venv.step(np.zeros(3, int))
        counts += 1
        np.testing.assert_array_equal(dones, counts == np.arange(3) + 3)
        for index in np.flatnonzero(dones):
            np.testing.assert_array_equal(infos[index]["terminal_observation"], [episodes[index], counts[index]])
            assert infos[index]["episode"]["l"] == infos[index]["elapsed_step"] == counts[index]
            assert venv.reset_infos[index] == {"elapsed_step": 0, "env_id": index}
        episodes[dones] += 1
        counts[dones] = 0
        np.testing.assert_array_equal(observations, np.stack([episodes, counts], 1))


# -- ALE


def make_breakout(mode: AutoresetMode) -> Any:
    """Make ALE's vectorized Breakout with three environments."""
    return AtariVectorEnv("breakout", 3, autoreset_mode=mode)


def test_ale_without_partial_resets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoreset, "version", lambda name: "0.12.0")
    with pytest.raises(InvalidArgumentError, match=r"Use pip install 'ale-py>=0\.12\.1', or AtariVectorEnv"):
        GymVecEnv(make_breakout(AutoresetMode.NEXT_STEP))
    GymVecEnv(make_breakout(AutoresetMode.SAME_STEP)).close()
