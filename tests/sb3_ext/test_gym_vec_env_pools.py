"""GymVecEnv over vectorized environments in C++: ALE's own, and an imitation of EnvPool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector import autoreset
from sb3_ext import GymVecEnv


class Pool(VectorEnv[Any, Any, Any]):
    """Counts as EnvPool does: its reset takes numbers first, and returns the rows that it has reset."""

    single_observation_space = spaces.Box(-100, 100, (2,), np.float32)
    single_action_space = spaces.Discrete(2)
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 3, batch_size: int = 3) -> None:
        self.num_envs = num_envs
        self.spec: Any = SimpleNamespace(
            id="Count-v0", config=SimpleNamespace(num_envs=num_envs, batch_size=batch_size)
        )
        self._counts = np.zeros(num_envs, int)
        self._due = np.zeros(num_envs, bool)
        self._episodes = np.zeros(num_envs, int)

    def _returned(self, rows: Any) -> Any:
        observations = np.stack([self._episodes[rows], self._counts[rows]], 1).astype(np.float32)
        return observations, {"elapsed_step": self._counts[rows].copy(), "env_id": rows}

    def _begin(self, rows: Any) -> None:
        self._counts[rows], self._due[rows] = 0, False
        self._episodes[rows] += 1

    def reset(self, env_id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        if options and "reset_mask" in options:
            env_id = np.flatnonzero(options["reset_mask"])
        rows = np.arange(self.num_envs) if env_id is None else env_id
        self._begin(rows)
        return self._returned(rows)

    def step(self, actions: Any) -> Any:
        late = self._due.copy()
        self._counts += 1
        self._begin(late.nonzero()[0])
        self._due = ended = self._counts >= np.arange(self.num_envs) + 3
        observation, info = self._returned(np.arange(self.num_envs))
        return observation, np.ones(self.num_envs), ended, np.zeros(self.num_envs, bool), info


class OldPool(Pool):
    """Takes numbers alone, as EnvPool did before 1.2."""

    def reset(self, env_id: Any = None) -> Any:
        return super().reset(env_id)


Pool.__module__ = OldPool.__module__ = "envpool.imitation"


class Thin(VectorWrapper[Any, Any, Any, Any, Any]):
    """Changes nothing."""


@pytest.mark.parametrize("wrap", [lambda pool: pool, Thin, RecordEpisodeStatistics, lambda pool: Thin(Thin(pool))])
def test_only_the_ended_environments_of_a_pool_are_reset(wrap: Any) -> None:
    venv = GymVecEnv(wrap(Pool()))
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


def test_wrappers_around_an_old_pool_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Use pip install 'envpool>=1\.2\.5', or the pool without wrappers"):
        GymVecEnv(Thin(OldPool()))
    assert GymVecEnv(OldPool()).reset().shape == (3, 2)


@pytest.mark.parametrize("wrap", [lambda pool: pool, Thin])
def test_an_asynchronous_pool_is_refused(wrap: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"`batch_size=2` with num_envs=4 .* Use batch_size=4"):
        GymVecEnv(wrap(Pool(4, batch_size=2)))
    with pytest.raises(InvalidArgumentError, match=r"`batch_size=2` with num_envs=4 .* Use batch_size=4"):
        GymVecEnv(wrap(AtariVectorEnv("breakout", 4, batch_size=2)))


# -- ALE's


def _breakout(mode: AutoresetMode) -> Any:
    # Episodes end after 15 steps, or with the first life, which each environment loses at another time.
    return AtariVectorEnv("breakout", 3, autoreset_mode=mode, max_num_frames_per_episode=60, episodic_life=True)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_every_step_of_ales_vector_environment_belongs_to_an_episode(mode: AutoresetMode) -> None:
    venv = GymVecEnv(_breakout(mode), infos="all")
    venv.seed(0)
    first = venv.reset()
    kept = first.copy()
    frames, ended = np.array([info["episode_frame_number"] for info in venv.reset_infos]), 0
    for turn in range(60):
        observations, _, dones, infos = venv.step(np.full(3, turn % 4))
        for index, (done, info) in enumerate(zip(dones, infos, strict=True)):
            if not done:  # a step that resets an environment would count one frame, or start over
                assert info["episode_frame_number"] == frames[index] + 4
                frames[index] += 4
                continue
            ended += 1
            assert info["terminal_observation"].shape == (4, 84, 84)
            assert not np.array_equal(info["terminal_observation"], observations[index])
            if mode is AutoresetMode.SAME_STEP:  # ALE returns those of the new episode alone
                assert "episode_frame_number" not in info
            else:
                assert info["episode_frame_number"] > venv.reset_infos[index]["episode_frame_number"]
            frames[index] = venv.reset_infos[index]["episode_frame_number"]
    assert ended > 5
    np.testing.assert_array_equal(first, kept)
    venv.close()


def test_an_ale_that_cannot_reset_some_environments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoreset, "version", lambda name: "0.12.0")
    with pytest.raises(InvalidArgumentError, match=r"Use pip install 'ale-py>=0\.12\.1', or AtariVectorEnv"):
        GymVecEnv(_breakout(AutoresetMode.NEXT_STEP))
    GymVecEnv(_breakout(AutoresetMode.SAME_STEP)).close()


def test_ales_vector_environment_by_gymnasiums_id() -> None:
    gym.register_envs(ale_py)
    env = gym.make_vec("ALE/Pong-v5", num_envs=2, vectorization_mode="vector_entry_point")
    assert GymVecEnv(env).reset().shape == (2, 4, 84, 84)
