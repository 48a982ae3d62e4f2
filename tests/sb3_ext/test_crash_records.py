from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.capsule import read_capsule
from rl_ext_core.vector.replay import play
from sb3_ext import AutoVecEnv, make_vec_env


class Failing(gymnasium.Wrapper):
    """CartPole that raises an exception at a pole angle, or at each reset if ``fails_at_reset`` is set."""

    def __init__(self, env: gymnasium.Env, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__(env)
        self.error, self.repeat, self.max_angle = error, 1, 0.1
        self.fails_at_reset = False

    def reset(self, **options: Any) -> Any:
        if self.fails_at_reset:
            raise self.error("in reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if abs(result[0][2]) > self.max_angle:
            raise self.error("in step")
        return result

    def set_limit(self, angle: float) -> float:
        self.max_angle = angle
        return angle


def build(folder: Any, **options: Any) -> Any:
    return make_vec_env("CartPole-v1", 2, 3, wrapper_class=Failing, isolation="in-process", recorder=folder, **options)


def step_until_failure(env: Any, *, reset: bool = True) -> None:
    if reset:
        env.reset()
    for _ in range(100):
        env.step(np.ones(env.num_envs, int))


def test_exception_in_step_writes_a_capsule_that_is_reproduced(tmp_path: Path) -> None:
    env = build(tmp_path / "new" / "crashes")
    env.set_attr("repeat", 4)
    env.reset()
    env.step(np.ones(2, int))
    assert env.env_method("set_limit", 0.15) == [0.15, 0.15]
    with pytest.raises(ZeroDivisionError, match="in step") as caught:
        step_until_failure(env, reset=False)
    (path,) = (tmp_path / "new" / "crashes").glob("crash-*.rlx")
    capsule = read_capsule(path)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"The episode is recorded. To repeat the failure, run: rl-ext replay {path}"]
    failure = capsule.failure
    assert (failure.kind, failure.phase, failure.exception) == ("exception", "step", "ZeroDivisionError")
    result = play(capsule, None)
    assert result.is_like(capsule.failure)
    assert (result.step, result.first_difference) == (capsule.step, None)


def test_exception_in_reset_writes_a_capsule(tmp_path: Path) -> None:
    env = build(tmp_path)
    env.reset()
    env.set_attr("fails_at_reset", True, indices=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in reset"):
            env.reset()
    first, second = map(read_capsule, sorted(tmp_path.glob("crash-*.rlx")))
    assert first.environment == second.environment == 1
    assert first.failure.phase == second.failure.phase == "reset"
    assert play(second, None).is_like(second.failure)


@pytest.mark.parametrize(("recorder", "error"), [(True, KeyboardInterrupt), (False, ZeroDivisionError)])
def test_interrupts_and_unrecorded_failures_write_nothing(recorder: bool, error: Any, crash_folder: Path) -> None:
    before = set(crash_folder.iterdir())
    env = make_vec_env("CartPole-v1", wrapper_class=Failing, wrapper_kwargs={"error": error}, recorder=recorder)
    with pytest.raises(error):
        step_until_failure(env)
    assert set(crash_folder.iterdir()) == before
    assert isinstance(env.envs[0], EpisodeRecorder) == recorder


def test_environment_that_cannot_be_copied_is_recorded_without_its_factory(tmp_path: Path) -> None:
    lock = threading.Lock()
    envs = [lambda: Failing(gymnasium.make("CartPole-v1", render_mode=None if lock else "human"))] * 2
    with pytest.raises(ZeroDivisionError):
        step_until_failure(AutoVecEnv(envs, isolation="in-process", recorder=tmp_path))
    (path,) = tmp_path.glob("crash-*.rlx")
    assert read_capsule(path).factory_pickle is None


def test_recorder_is_not_visible_through_the_vec_env(tmp_path: Path) -> None:
    recorded, plain = build(tmp_path), build(False)
    assert type(recorded) is type(plain)
    assert isinstance(recorded, DummyVecEnv)
    for env in (recorded, plain):
        env.set_attr("max_angle", 10.0)
        assert env.env_is_wrapped(Monitor) == [True, True]
        assert env.envs[0].max_angle == 10.0
        assert type(env.envs[0].unwrapped) is type(env.get_attr("unwrapped")[0]) is CartPoleEnv
        assert env.get_attr("repeat") == [1, 1]
        assert not env.has_attr("_calls")
        assert not env.has_attr("episode_log")
        with pytest.raises(AttributeError):
            env.env_method("missing")
    model = PPO("MlpPolicy", plain, seed=0, policy_kwargs={"net_arch": [4]})
    recorded.seed(1)
    plain.seed(1)
    assert evaluate_policy(model, recorded, 4) == evaluate_policy(model, plain, 4)
    for env in (recorded, plain):
        env.seed(2)
        env.reset()
        env.env_method("reset", seed=5)
    for one, other in zip(recorded.step(np.ones(2, int)), plain.step(np.ones(2, int)), strict=True):
        np.testing.assert_array_equal(one, other)
