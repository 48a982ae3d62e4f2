"""Episode logs of pools: each environment's episode can be repeated from its log, in all autoreset modes."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder
from rl_ext_core.recording.capsule import read_capsule
from rl_ext_core.vector import SharedMemoryVectorEnv

ACTIONS = np.random.default_rng(0).integers(0, 2, (200, 3))


class Adjustable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with an attribute, a method and a private generator that change its observations."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.scale = 1.0
        self.rng = np.random.default_rng(5)

    def shift(self, by: float) -> None:
        self.rng.bit_generator.advance(int(by))  # type: ignore[attr-defined]

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return (observation * self.scale + self.rng.normal()).astype(np.float32), *rest


class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that fails in one step of the first episode."""

    def __init__(self, env: gymnasium.Env[Any, Any], kind: str) -> None:
        super().__init__(env)
        self.kind, self.count = kind, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == 5:
            if self.kind == "exception":
                raise ValueError("planted")
            ctypes.string_at(0)
        return self.env.step(action)


def make_env() -> Any:
    return Adjustable(gymnasium.make("CartPole-v1"))


def make_failing_env(kind: str = "exception") -> Any:
    return Failing(make_env(), kind)


def step_repeatedly(envs: SharedMemoryVectorEnv) -> None:
    """Make more steps than the failing environment survives."""
    for _ in range(10):
        envs.step(np.zeros(envs.num_envs, np.int64))


def check_repetition(log: EpisodeLog | None, observation: Any) -> None:
    """Repeat a log in a new environment, and compare its last observation."""
    assert log is not None
    env = EpisodeRecorder(make_env())
    repetition = env.repeat(pickle.loads(pickle.dumps(log)))
    assert repetition.first_difference is None
    np.testing.assert_array_equal(repetition.observation, observation)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_episodes_are_repeated_in_all_autoreset_modes(mode: str) -> None:
    envs = SharedMemoryVectorEnv([make_env] * 3, autoreset_mode=mode, n_workers=2)
    observations, _ = envs.reset(seed=3)
    for number, actions in enumerate(ACTIONS):
        observations, _, terminated, truncated, _ = envs.step(actions)
        if mode == "Disabled" and (terminated | truncated).any():
            observations, _ = envs.reset(options={"reset_mask": terminated | truncated})
        if number == 20:
            envs.set_attr("scale", [2.0, 3.0, 4.0])
            envs.call("shift", 7)
        if number % 23 == 0:
            for log, observation in zip(envs._pool.episode_logs(), observations, strict=True):
                check_repetition(log, observation)
    envs.close()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Pendulum-v1", "Blackjack-v1", "Double"])
def test_converted_observations_are_repeated(name: str) -> None:
    def make() -> Any:
        if name != "Double":
            return gymnasium.make(name)
        env = gymnasium.make("CartPole-v1")  # returns float64, although its space is of float32
        return gymnasium.wrappers.TransformObservation(env, lambda x: x.astype(np.float64) / 3, env.observation_space)

    one, other = (SharedMemoryVectorEnv([make] * 2, autoreset_mode="SameStep") for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    for _ in range(30):
        one.step(one.action_space.sample())
    for number, log in enumerate(one._pool.episode_logs()):
        assert log is not None
        assert other._pool.repeat_episode(number, log).first_difference is None
    one.close()
    other.close()


def test_repeated_episodes_continue_equally() -> None:
    one, other = (SharedMemoryVectorEnv([make_env] * 3, n_workers=2) for _ in range(2))
    one.reset(seed=3)
    for actions in ACTIONS[:60]:
        one.step(actions)
    # A log taken during the step that follows an episode's end would omit the due reset.
    logs = one._pool.episode_logs()
    for number, log in enumerate(logs):
        assert log is not None
        assert other._pool.repeat_episode(number, log).first_difference is None
    again = other._pool.episode_logs()
    for log, copy in zip(logs, again, strict=True):
        assert log is not None
        assert copy is not None
        assert (log.checksums, len(log.calls)) == (copy.checksums, len(copy.calls))
    one.close()
    other.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_episodes_after_a_restart_are_repeated(mode: str) -> None:
    envs = SharedMemoryVectorEnv([make_env] * 3, autoreset_mode=mode, n_workers=2, restart="truncate")
    observations, _ = envs.reset(seed=3)
    for number, actions in enumerate(ACTIONS[:60]):
        if number in (7, 8, 33):
            worker = envs._pool.workers[number % 2]
            os.kill(worker.process.pid, signal.SIGKILL)
        observations, _, terminated, truncated, _ = envs.step(actions)
        if mode == "Disabled" and (terminated | truncated).any():
            observations, _ = envs.reset(options={"reset_mask": terminated | truncated})
        logs = envs._pool.episode_logs()
        if number in (6, 9, 20, 34, 50):
            for log, observation in zip(logs, observations, strict=True):
                check_repetition(log, observation)
    assert envs.timings.restarts == 3
    envs.close()


@pytest.mark.parametrize("kind", ["exception", "signal"])
def test_failure_of_a_worker_is_recorded_in_the_folder(kind: str, tmp_path: Path) -> None:
    envs = SharedMemoryVectorEnv([make_env, lambda: make_failing_env(kind)], recorder=tmp_path)
    envs.reset(seed=1)
    with pytest.raises(WorkerError, match="rl-ext replay") as raised:
        step_repeatedly(envs)
    (path,) = tmp_path.iterdir()
    assert str(path) in str(raised.value)
    capsule = read_capsule(path)
    assert (capsule.failure.kind, capsule.step, capsule.environment) == (kind, 5, 1)
    assert capsule.log.is_interrupted


def test_recorder_false_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.recording.capsule.CRASH_FOLDER", str(tmp_path))
    envs = SharedMemoryVectorEnv([make_failing_env], recorder=False)
    envs.reset(seed=1)
    assert envs._pool.episode_logs() == [None]
    with pytest.raises(WorkerError) as raised:
        step_repeatedly(envs)
    assert "record" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_full_folder_is_reported_and_kept(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"crash-{number}.rlx").touch()
    envs = SharedMemoryVectorEnv([make_failing_env], recorder=tmp_path)
    envs.reset()
    with pytest.raises(WorkerError, match="contains 10 files"):
        step_repeatedly(envs)
    assert len(list(tmp_path.iterdir())) == 10


def test_recorder_must_be_a_folder() -> None:
    with pytest.raises(InvalidArgumentError, match=r"recorder='missing' .*os.makedirs"):
        SharedMemoryVectorEnv([make_env], recorder="missing")
