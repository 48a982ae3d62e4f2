"""The other methods of a VecEnv, wrappers around it, and training with it: as with SubprocVecEnv."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from rl_ext_core.vector.environments import EpisodeMonitor
from sb3_ext.vec_env import SharedMemoryVecEnv, VecEnvTimings
from tests.sb3_ext.toys import Sprite, silenced
from tests.sb3_ext.vec_checks import FAST, action_of, assert_equal, both, rollout
from tests.sb3_ext.vec_worlds import Drawn


class Marked(gym.Wrapper[Any, Any, Any, Any]):
    mark = 3


def wrapped() -> gym.Env[Any, Any]:
    return Marked(gym.wrappers.TimeLimit(Monitor(Drawn()), 7))


def called(venv: VecEnv) -> list[Any]:
    """Call all of them."""
    venv.set_attr("label", "one", indices=1)
    venv.set_attr("level", [1, 2])
    venv.seed(1)
    venv.reset()
    return [
        venv.get_attr("label"),
        venv.get_attr("level", indices=[2, 0]),
        venv.get_attr("label", indices=-1),
        venv.get_attr("mark", indices=range(2)),
        [venv.has_attr(name) for name in ("label", "given", "nothing")],
        venv.env_method("double", 4, plus=1),
        venv.env_method("double", 4, indices=[2, 2, 1, -3]),
        venv.env_method("double", 4, indices=[]),
        venv.get_attr("action_space"),
        [venv.env_is_wrapped(kind) for kind in (Monitor, Marked, gym.wrappers.TimeLimit, gym.Wrapper, Drawn)],
        venv.env_is_wrapped(Marked, indices=0),
        venv.get_images(),
        venv.render(),
        venv.render("rgb_array"),
        venv.render_mode,
        venv.metadata,
        venv.num_envs,
        venv.unwrapped is venv,
    ]


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_methods(n_workers: int) -> None:
    with both([wrapped] * 3, n_workers=n_workers) as (ours, theirs):
        assert_equal(called(ours), called(theirs))


def test_environments_that_do_not_render() -> None:
    with both([functools.partial(Drawn, render_mode=None)] * 2) as (ours, theirs):
        assert ours.render_mode is theirs.render_mode is None
        for venv in (ours, theirs):
            with pytest.warns(UserWarning, match="The render mode is None"):
                assert venv.get_images() == [None, None]


def test_answers_larger_than_a_pipe() -> None:
    venv = SharedMemoryVecEnv([Drawn] * 4, FAST, n_workers=2)
    venv.set_attr("label", "x" * 300_000)
    assert [len(label) for label in venv.get_attr("label")] == [300_000] * 4
    venv.close()


def test_classes_count_as_wrapped_that_stand_for_another() -> None:
    venv = SharedMemoryVecEnv([lambda: EpisodeMonitor(Drawn())], FAST)
    assert venv.env_is_wrapped(Monitor) == [True]
    assert venv.env_is_wrapped(Marked) == [False]
    venv.close()


IMAGES = functools.partial(Sprite, 3)
WRAPPERS: dict[str, tuple[Any, Any]] = {
    "VecNormalize": (Drawn, VecNormalize),
    "images": (IMAGES, lambda venv: VecTransposeImage(VecFrameStack(venv, n_stack=3))),
    "several": (functools.partial(Drawn, "Dict"), lambda venv: VecNormalize(VecMonitor(venv), norm_obs_keys=["z"])),
}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_wrappers_of_vectorised_environments(name: str) -> None:
    build, wrap = WRAPPERS[name]
    build().action_space.seed(0)
    with both([build] * 3, n_workers=2) as (ours, theirs):
        actions = [action_of(ours.action_space, 3) for _ in range(30)]
        seen, expected = rollout(wrap(ours), actions), rollout(wrap(theirs), actions)
        for step in (*seen[2:], *expected[2:]):
            for info in step[3]:
                info.get("episode", {}).pop("t", None)
        assert_equal(seen, expected)


def cart_pole() -> gym.Env[Any, Any]:
    return Monitor(gym.make("CartPole-v1"))


ALGORITHMS: dict[str, Any] = {
    "PPO": functools.partial(PPO, n_steps=64, batch_size=64, n_epochs=2),
    "A2C": A2C,
    "DQN": functools.partial(DQN, learning_starts=50, buffer_size=1000),
}


def weights(algorithm: str, venv: VecEnv) -> list[Any]:
    torch.manual_seed(0)
    model: BaseAlgorithm = silenced(ALGORITHMS[algorithm]("MlpPolicy", venv, seed=1, device="cpu"))
    model.learn(400)
    venv.seed(2)
    score = evaluate_policy(model, venv, n_eval_episodes=4)
    return [*(value.detach().numpy() for value in model.get_parameters()["policy"].values()), list(score)]


@pytest.mark.sample
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_training_gives_the_same_weights(algorithm: str) -> None:
    with both([cart_pole] * 3, n_workers=2) as (ours, theirs):
        mine, other = weights(algorithm, ours), weights(algorithm, theirs)
    assert_equal(mine, other)
    assert len(mine) > 4


class Written(KVWriter):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        self.seen.append(dict(key_values))


def logged(venv: VecEnv, callback: BaseCallback) -> list[dict[str, Any]]:
    writer = Written()
    model = PPO("MlpPolicy", venv, n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    model.set_logger(Logger(None, [writer]))
    model.learn(16 * 3 * 3, callback=callback)
    return writer.seen


def test_timings_are_logged() -> None:
    venv = SharedMemoryVecEnv([cart_pole] * 3, FAST)
    seen = logged(VecNormalize(venv), VecEnvTimings())
    timings = venv.timings
    venv.close()
    assert [entry["time/env_restarts"] for entry in seen] == [0, 0, 0]
    assert all(0 < entry["time/env_step"] < 1 for entry in seen)
    assert {entry["time/env_start"] for entry in seen} == {timings.start_seconds}
    assert timings.steps == 48
    assert timings.step_seconds == pytest.approx(np.mean([entry["time/env_step"] for entry in seen]))


@pytest.mark.sample
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_load_neither_torch_nor_stable_baselines3(start_method: str) -> None:
    venv = SharedMemoryVecEnv([functools.partial(gym.make, "CartPole-v1")] * 2, start_method, n_workers=1)
    loaded = venv.get_attr("spec")
    assert loaded[0].id == "CartPole-v1"
    venv.close()
    venv = SharedMemoryVecEnv([functools.partial(Drawn)] * 2, start_method)
    assert venv.env_method("loaded", ["torch", "stable_baselines3", "sb3_ext", "gymnasium"]) == [["gymnasium"]] * 2
    venv.close()
