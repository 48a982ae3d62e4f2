"""Hindsight from the compressed buffer is that of Stable Baselines3's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import SAC, HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_ext import CompressedHerReplayBuffer
from tests.sb3_ext.toys import add_all, assert_same, collected, silenced


class Reach(gym.Env[dict[str, np.ndarray], np.ndarray]):
    """A point that is to reach a goal, seen as an image, or as noise. The goal is a place, or an image of it."""

    def __init__(self, size: int = 12, *, image_goal: bool = False, still: bool = True, length: int = 9) -> None:
        image = spaces.Box(0, 255, (1, size, size), np.uint8)
        goal = image if image_goal else spaces.Box(0, size, (2,), np.float32)
        self.observation_space = spaces.Dict(observation=image, achieved_goal=goal, desired_goal=goal)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._size, self._image_goal, self._still, self._length = size, image_goal, still, length

    def _drawn(self, place: np.ndarray) -> np.ndarray:
        if not self._still:
            return self.np_random.integers(256, size=(1, self._size, self._size), dtype=np.uint8)
        image = np.zeros((1, self._size, self._size), np.uint8)
        row, column = place.astype(int)
        image[0, row : row + 2, column : column + 2] = 255
        return image

    def _seen(self) -> dict[str, np.ndarray]:
        goals = [self._drawn(place) if self._image_goal else place.copy() for place in (self._place, self._goal)]
        return {"observation": self._drawn(self._place), "achieved_goal": goals[0], "desired_goal": goals[1]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict]:
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.uniform(0, self._size - 2, (2, 2)).astype(np.float32)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict]:
        self._place = np.clip(self._place + action, 0, self._size - 2).astype(np.float32)
        self._steps += 1
        seen = self._seen()
        reward = float(self.compute_reward(seen["achieved_goal"][None], seen["desired_goal"][None], [{}])[0])
        ends = self._length < 10 and self.np_random.random() < 0.05
        return seen, reward, bool(ends), self._steps >= self._length, {"step": self._steps}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, infos: Any) -> np.ndarray:
        apart = np.abs(achieved.astype(float) - desired.astype(float)).reshape(len(achieved), -1).mean(axis=1)
        return -apart + sum(info.get("step", 0) for info in infos)


def reach(n_envs: int = 2, **options: Any) -> VecEnv:
    venv = DummyVecEnv([lambda: Reach(**options) for _ in range(n_envs)])
    venv.seed(0)
    return venv


def both(size: int, venv: VecEnv, **options: Any) -> tuple[Any, Any]:
    theirs = {name: options[name] for name in options if name not in ("codec", "n_stack", "num_threads")}
    arguments = (size, venv.observation_space, venv.action_space, venv, "cpu", venv.num_envs)
    return CompressedHerReplayBuffer(*arguments, **options), HerReplayBuffer(*arguments, **theirs)


def add(buffers: tuple[Any, Any], transitions: list[Any]) -> None:
    add_all(buffers, transitions)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("image_goal", [False, True])
def test_goals_of_every_strategy(strategy: str, n_envs: int, image_goal: bool) -> None:
    venv = reach(n_envs, image_goal=image_goal)
    buffers = both(40 * n_envs, venv, goal_selection_strategy=strategy, n_sampled_goal=2)
    transitions = collected(venv, 95)
    for start in (0, 20, 38, 45, 80):
        stop = {0: 20, 20: 38, 38: 45, 45: 80, 80: 95}[start]
        add(buffers, transitions[start:stop])
        assert_same(*buffers)
        for name in ("ep_start", "ep_length", "_current_ep_start"):
            np.testing.assert_array_equal(getattr(buffers[0], name), getattr(buffers[1], name))
    assert buffers[1].full


@pytest.mark.parametrize("copy_info_dict", [True, False])
def test_infos_are_kept_for_rewards_that_need_them(copy_info_dict: bool) -> None:
    venv = reach()
    buffers = both(60, venv, copy_info_dict=copy_info_dict)
    add(buffers, collected(venv, 50))
    assert_same(*buffers)
    assert len(buffers[0].infos) == 30 * copy_info_dict


def test_samples_are_normalized() -> None:
    venv = reach()
    normalized = VecNormalize(venv, norm_obs_keys=["achieved_goal", "desired_goal"])
    buffers = both(80, venv)
    add(buffers, collected(venv, 50))
    normalized.reset()
    for _ in range(30):
        normalized.step(np.full((2, 2), 0.5, np.float32))
    assert_same(*buffers, env=normalized)


@pytest.mark.parametrize("copy_info_dict", [True, False])
@pytest.mark.parametrize("n_steps", [25, 60])
@pytest.mark.parametrize("truncate", [True, False])
def test_a_model_saves_and_loads_it(tmp_path: Path, copy_info_dict: bool, n_steps: int, truncate: bool) -> None:
    loaded = []
    for cls in (CompressedHerReplayBuffer, HerReplayBuffer):
        model = silenced(
            SAC(
                "MultiInputPolicy",
                reach(size=36),
                buffer_size=80,
                learning_starts=10_000,
                replay_buffer_class=cls,
                replay_buffer_kwargs={"copy_info_dict": copy_info_dict},
                policy_kwargs={"net_arch": [4]},
                seed=0,
                device="cpu",
            )
        )
        model.learn(2 * n_steps)
        model.save_replay_buffer(tmp_path / cls.__name__)
        model.replay_buffer = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The last trajectory in the replay buffer will be truncated")
            model.load_replay_buffer(tmp_path / cls.__name__, truncate_last_traj=truncate)
        assert model.replay_buffer.env is model.env
        loaded.append(model.replay_buffer)
    assert_same(*loaded)
    add((loaded[0], loaded[1]), collected(reach(size=36), 50))
    assert_same(*loaded)
