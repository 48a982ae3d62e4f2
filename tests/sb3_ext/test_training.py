from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from typing import Any

import ale_py
import gymnasium as gym
import pytest
import torch._dynamo  # noqa: F401 - else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

import sb3_ext
from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import CompressedNStepReplayBuffer
from tests.sb3_ext.buffer_envs import (
    REPLAY,
    ROLLOUT,
    check_equal_weights,
    dict_env,
    image_env,
    make_reach_vec_env,
    without_logger,
)


def make_pong() -> VecEnv:
    """Return two Pong environments with SB3's Atari wrappers and stacked frames."""
    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=2, seed=0), n_stack=4)


def make_pendulum() -> VecEnv:
    return VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0))


def make_masked() -> VecEnv:
    return make_vec_env(InvalidActionEnvDiscrete, 2, seed=0, env_kwargs={"dim": 5, "n_invalid_actions": 2})


CASES: dict[str, tuple[Any, str, Any, Any]] = {
    "PPO of a dictionary": (PPO, "MultiInputPolicy", dict_env, ROLLOUT["dict"]),
    "MaskablePPO": (MaskablePPO, "MlpPolicy", make_masked, ROLLOUT["maskable"]),
    "DQN of Pong": (DQN, "CnnPolicy", make_pong, REPLAY["plain"]),
    "DQN with n-step returns": (DQN, "CnnPolicy", image_env, REPLAY["n-step"]),
    "SAC with hindsight": (SAC, "MultiInputPolicy", lambda: make_reach_vec_env(size=36), REPLAY["hindsight"]),
    "TD3 of normalized vectors": (TD3, "MlpPolicy", make_pendulum, REPLAY["plain"]),
    "PPO of RGB, channels last": (PPO, "CnnPolicy", lambda: image_env(3, 2, first=False), ROLLOUT["plain"]),
    "RecurrentPPO": (RecurrentPPO, "CnnLstmPolicy", image_env, ROLLOUT["recurrent"]),
    "RecurrentPPO of a dictionary": (RecurrentPPO, "MultiInputLstmPolicy", dict_env, ROLLOUT["recurrent dict"]),
}
OFF_POLICY = {"buffer_size": 180, "learning_starts": 60, "batch_size": 16, "train_freq": 8}


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_with_sb3s_buffers(case: str) -> None:
    algorithm, policy, env, (ours, theirs) = CASES[case]
    small: dict[str, Any] = {"policy_kwargs": {"net_arch": [8]}, "seed": 1, "device": "cpu"}
    if algorithm is RecurrentPPO:
        small["policy_kwargs"]["lstm_hidden_size"] = 8

    def make(buffer_class: Any) -> Any:
        if issubclass(algorithm, OffPolicyAlgorithm):
            return algorithm(policy, env(), replay_buffer_class=buffer_class, **OFF_POLICY, **small)
        options = {"n_steps": 16, "batch_size": 16, "n_epochs": 2}
        if algorithm is not RecurrentPPO:
            return algorithm(policy, env(), rollout_buffer_class=buffer_class, **options, **small)
        model = algorithm(policy, env(), **options, **small)  # has no rollout_buffer_class
        if buffer_class is ours:
            model.rollout_buffer = buffer_class.like(model.rollout_buffer)
        return model

    model = check_equal_weights(make, ours, theirs, 200 if issubclass(algorithm, OffPolicyAlgorithm) else 64)
    assert algorithm is not MaskablePPO or (model.rollout_buffer.action_masks == 0).any()
    if env is make_pong:
        assert (model.replay_buffer.n_stack, model.replay_buffer.codec) == (4, "patch")


# -- compressed n-step buffers use the number of steps and the discount of their algorithm

ACTIONS = spaces.Discrete(3)


def make_dqn(replay_buffer_class: Any = CompressedNStepReplayBuffer, **options: Any) -> DQN:
    """Return a DQN with a replay buffer class; None selects SB3's default."""
    defaults = {"buffer_size": 260, "learning_starts": 60, "batch_size": 16, "train_freq": 8, "seed": 1}
    defaults |= {"replay_buffer_class": replay_buffer_class, "target_update_interval": 100, "device": "cpu"}
    return without_logger(DQN("CnnPolicy", image_env(), **{**defaults, **options}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_steps": 3, "replay_buffer_kwargs": {"n_steps": 5}}, "n_steps=5 of .* differs from n_steps=3 of the alg"),
        ({"gamma": 0.9, "replay_buffer_kwargs": {"gamma": 0.99}}, "gamma=0.99 of .* differs from gamma=0.9 of the alg"),
        ({"replay_buffer_kwargs": {"n_steps": 0}}, "n_steps=0 must be at least 1"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`n_steps=3` is ignored")
def test_options_that_differ_from_algorithm_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make_dqn(**options)


@pytest.mark.filterwarnings("ignore:`n_steps=3` is ignored")
def test_subclass_uses_gamma_of_algorithm(caplog: pytest.LogCaptureFixture) -> None:
    class OwnConstructor(CompressedNStepReplayBuffer):
        """Subclass whose constructor has the signature ``*args, **kwargs``."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    with caplog.at_level(logging.WARNING, "sb3_ext"):
        buffer: Any = make_dqn(OwnConstructor, n_steps=3, gamma=0.9, replay_buffer_kwargs={"n_steps": 3}).replay_buffer
    assert (buffer.n_steps, buffer.gamma) == (3, 0.9)
    assert "n_steps=3 of the algorithm is used" in caplog.text


def test_buffer_created_during_training_ignores_algorithm() -> None:
    class BufferMaker(BaseCallback):
        """Callback that creates a buffer in the first step, and ends the training."""

        def _on_step(self) -> bool:
            space = self.training_env.observation_space
            self.made = CompressedNStepReplayBuffer(10, space, ACTIONS, n_steps=2, gamma=0.5)
            return False

    callback = BufferMaker()
    make_dqn(None, gamma=0.9).learn(10, callback)
    assert (callback.made.n_steps, callback.made.gamma) == (2, 0.5)


_EARLIER = """
import sys
from stable_baselines3.common import buffers
del buffers.NStepReplayBuffer
sys.modules["sb3_contrib"] = None
import sb3_ext
sb3_ext.CompressedReplayBuffer
for use in (lambda: sb3_ext.CompressedNStepReplayBuffer, lambda: __import__("sb3_ext.contrib")):
    try: use()
    except ImportError as error: print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_missing_dependencies_are_named_on_use() -> None:
    said = subprocess.run([sys.executable, "-c", _EARLIER], capture_output=True, text=True, check=True).stdout
    assert said.startswith("MissingDependencyError CompressedNStepReplayBuffer needs Stable Baselines3 2.7"), said
    assert "MissingDependencyError sb3_ext.contrib needs the package 'sb3_contrib'" in said
    assert 'rl-ext[contrib]"' in said
    with pytest.raises(AttributeError, match="has no attribute 'Another'"):
        sb3_ext.Another  # noqa: B018


def test_buffer_is_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        buffer = weakref.ref(CompressedNStepReplayBuffer(10, spaces.Box(0, 255, (4, 12, 11), "u1"), ACTIONS))
        assert buffer() is None
    finally:
        gc.enable()
