"""Tests of ``resume`` with ``storage_dir``: files are unchanged if the environments or arguments do not fit."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import TimeAwareObservation, TransformObservation
from stable_baselines3 import DQN
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer, ResumeCallback, make_vec_env, resume
from tests.sb3_ext.buffer_envs import without_logger


def cart_pole(**options: Any) -> Any:
    return make_vec_env("CartPole-v1", 2, 0, isolation="in-process", **options)


def wider(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return an environment whose wrapper has the same class and other bounds."""
    space = gymnasium.spaces.Box(-9, 9, (4,))
    return TransformObservation(env, lambda observation: observation, space)


def same(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return TransformObservation(env, lambda observation: observation, None)


def other_cart_pole() -> gymnasium.Env[Any, Any]:
    """Build CartPole-v1 with another id."""
    spec = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    spec.id = "OtherPole-v1"
    return same(Monitor(gymnasium.make(spec)))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run")
    options = {"replay_buffer_class": CompressedReplayBuffer, "replay_buffer_kwargs": {"storage_dir": folder / "files"}}
    env = cart_pole(wrapper_class=same)
    model = without_logger(DQN("MlpPolicy", env, buffer_size=500, policy_kwargs={"net_arch": [8]}, **options))
    model.learn(100, callback=ResumeCallback(folder / "saves", 40)).replay_buffer.close()
    return folder


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (lambda: make_vec_env("Acrobot-v1", 2, 0, isolation="in-process", wrapper_class=same), {}, "Acrobot"),
        (lambda: cart_pole(), {}, "environment 0 is"),
        (lambda: cart_pole(wrapper_class=TimeAwareObservation), {}, "environment 0 is"),
        (lambda: cart_pole(wrapper_class=wider), {}, "Observation spaces do not match"),
        (
            lambda: cart_pole(env_kwargs={"max_episode_steps": 9}, wrapper_class=same),
            *({}, r"TimeLimit\(9\) .*: expected .*TimeLimit\(500\) .*DQN\.load\(.*model\.zip', env=env\)"),
        ),
        (
            lambda: cart_pole(env_kwargs={"sutton_barto_reward": True}, wrapper_class=same),
            *({}, r"CartPoleEnv \('CartPole-v1', sutton_barto_reward=True\): expected .*CartPoleEnv \('CartPole-v1'\)"),
        ),
        (lambda: DummyVecEnv([other_cart_pole] * 2), {}, r"\('OtherPole-v1'\): .*\('CartPole-v1'\)"),
        (lambda: DummyVecEnv([other_cart_pole]), {}, "env has 1 environments: expected 2"),
        (lambda: None, {}, "env is of type NoneType"),
        (lambda: VecFrameStack(cart_pole(wrapper_class=same), 1), {}, "env has the wrappers"),
        (lambda: cart_pole(wrapper_class=same), {"device": "nothing"}, "device"),
        (lambda: cart_pole(wrapper_class=same), {"custom_objects": {"replay_buffer_kwargs": {}}}, "not in storage_dir"),
    ],
)
def test_refused_resume_leaves_the_files_of_the_buffer(
    build: Callable[[], Any], arguments: dict[str, Any], message: str, saved_run: pathlib.Path
) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (saved_run / "files").rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        resume(saved_run / "saves", build(), **arguments)
    assert contents() == before


def test_copy_opened_by_load_replay_buffer_needs_its_folder_in_the_arguments(tmp_path: pathlib.Path) -> None:
    options = {"replay_buffer_class": CompressedReplayBuffer, "replay_buffer_kwargs": {"storage_dir": tmp_path / "a"}}
    model = without_logger(DQN("MlpPolicy", cart_pole(), buffer_size=500, policy_kwargs={"net_arch": [8]}, **options))
    model.learn(16).save_replay_buffer(tmp_path / "saved")
    model.learn(16, reset_num_timesteps=False).load_replay_buffer(tmp_path / "saved")
    assert model.replay_buffer.size() == 8
    with pytest.raises(InvalidArgumentError, match=r"is in '.*a-copy1', expected replay_buffer_kwargs") as caught:
        model.learn(16, reset_num_timesteps=False, callback=ResumeCallback(tmp_path / "saves", 8))
    exec(str(caught.value).partition("Use ")[2].removesuffix(" before learn()"), {"model": model})
    model.learn(16, reset_num_timesteps=False, callback=ResumeCallback(tmp_path / "saves", 8))
    model.replay_buffer.close()
    assert resume(tmp_path / "saves", cart_pole()).replay_buffer.size() == 12


def schedule(progress: float) -> float:
    return 0.25


def test_resume_restores_schedule_of_prioritized_buffer_in_a_folder(tmp_path: pathlib.Path) -> None:
    arguments = {"replay_buffer_class": CompressedPrioritizedReplayBuffer, "learning_starts": 8, "batch_size": 4}
    options = {"storage_dir": tmp_path / "a", "beta": schedule}
    model = DQN("MlpPolicy", cart_pole(), buffer_size=500, replay_buffer_kwargs=options, **arguments)
    without_logger(model).learn(16, callback=ResumeCallback(tmp_path / "saves", 8))
    model.replay_buffer.close()
    model = resume(tmp_path / "saves", cart_pole())
    assert model.replay_buffer.beta(1.0) == 0.25
    without_logger(model).learn(16, reset_num_timesteps=False)
