"""Tests that a replayed recording equals ReplayBuffer.add's arguments, strides included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch._dynamo  # noqa: F401  optimizers would import it later, which makes a temporary folder
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks import recorders
from benchmarks.policies import Policy
from benchmarks.replay import Recording

# The keys of infos that buffers read.
INFO_KEYS = ("TimeLimit.truncated", "terminal_observation")


class Spy(ReplayBuffer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []
        self.chosen: list[np.ndarray] = []

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        self.chosen.append(action.copy())
        self.seen.append(comparable(obs, next_obs, action, reward, done, infos))
        super().add(obs, next_obs, action, reward, done, infos)


def comparable(*transition: Any) -> list[Any]:
    """Return everything by which a buffer could distinguish two transitions."""
    *arrays, infos = transition
    kept = [{key: info[key] for key in INFO_KEYS if key in info} for info in infos]
    ends = [info.pop("terminal_observation", np.empty(0)) for info in kept]
    return [(a.dtype, a.shape, a.strides, a.tobytes()) for a in [*arrays, *ends]] + kept


class Film(gym.Env[np.ndarray, np.ndarray]):
    """Environment with RGB frames that contain the action, and episodes of at most 9 steps."""

    def __init__(self, *, channel_first: bool) -> None:
        shape = (3, 36, 40) if channel_first else (36, 40, 3)
        self.channel_first = channel_first
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Box(np.float32([-2, 0]), np.float32([2, 3]))

    def _frame(self) -> np.ndarray:
        frame = self.np_random.integers(1, 256, (36, 40, 3), np.uint8)
        return frame.transpose(2, 0, 1) if self.channel_first else frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._frame(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        frame = self._frame()
        frame.flat[:8] = np.frombuffer(action.tobytes(), np.uint8)
        return frame, float(action.sum()), self.np_random.random() < 0.05, self.t == 9, {}


@pytest.mark.parametrize("transposed_views", [True, False])
def test_rgb_replay_equals_what_sac_stores(transposed_views: bool) -> None:
    def make_films(*, channel_first: bool) -> Any:
        return make_vec_env(lambda: Film(channel_first=channel_first), n_envs=2, seed=3)

    venv = VecFrameStack(make_films(channel_first=not transposed_views), n_stack=3)
    model = SAC("CnnPolicy", venv, buffer_size=100, replay_buffer_class=Spy)
    model.set_logger(Logger(None, []))  # the default logger makes a temporary folder
    spy: Any = model.learn(100).replay_buffer
    actions = iter(spy.chosen)
    policy = Policy("actions of the model", lambda venv: next(actions))
    again = make_films(channel_first=not transposed_views)
    recording = recorders.record(again, name="again", policy=policy, n_stack=3, steps=len(spy.chosen))
    if not transposed_views:  # frames of recordings are channel-last
        recording.frames = np.moveaxis(recording.frames, -3, -1)
        recording.terminal_frames = {k: np.moveaxis(f, -3, -1) for k, f in recording.terminal_frames.items()}
    assert recording.truncated.any()
    assert (recording.dones & ~recording.truncated).any()
    assert recording.observation_space == spy.observation_space
    assert recording.action_space == spy.action_space
    replay = recording.transitions(transposed_views=transposed_views)
    for t, (replayed, seen) in enumerate(zip(replay, spy.seen, strict=True)):
        assert comparable(*replayed) == seen, f"step {t} differs"


def test_recording_round_trips_through_a_file(tmp_path: Path) -> None:
    venv = make_vec_env(lambda: Film(channel_first=False), n_envs=2, seed=3)
    policy = Policy("still", lambda venv: np.zeros((2, 2), np.float32))
    recording = recorders.record(venv, name="film", policy=policy, n_stack=3, steps=40)
    recording.save(tmp_path / "new" / "film.npz")
    loaded = Recording.load(tmp_path / "new" / "film.npz")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["film.npz"]
    assert (loaded.name, loaded.policy, loaded.scores) == ("film", "still", recording.scores)
    assert loaded.action_space == recording.action_space
    assert len(loaded.terminal_frames) == recording.dones.sum() > 0
    pairs = zip(loaded.transitions(), recording.transitions(), strict=True)
    assert all(comparable(*one) == comparable(*other) for one, other in pairs)
    np.savez(tmp_path / "old.npz", header=json.dumps({"format": 0}))
    with pytest.raises(ValueError, match=r"old\.npz is not in format .*: delete it"):
        Recording.load(tmp_path / "old.npz")
