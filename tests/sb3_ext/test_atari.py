"""The same on a real Atari game, with its wrappers."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium as gym
import pytest
import torch._dynamo  # optimizers do it otherwise, which makes a folder in the tests' temporary one
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import assert_same, silenced

gym.register_envs(ale_py)


def trained(replay_buffer_class: Any) -> DQN:
    venv = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=2, seed=0), n_stack=4)
    model = DQN(
        "CnnPolicy",
        venv,
        replay_buffer_class=replay_buffer_class,
        buffer_size=240,
        learning_starts=40,
        batch_size=8,
        train_freq=8,
        target_update_interval=100,
        seed=0,
        device="cpu",
    )
    silenced(model).learn(400)
    venv.close()
    return model


@pytest.mark.slow
def test_pong() -> None:
    ours, theirs = (trained(cls) for cls in (CompressedReplayBuffer, ReplayBuffer))
    weights = theirs.policy.state_dict()
    for name, left in ours.policy.state_dict().items():
        assert torch.equal(left, weights[name]), name
    buffer = ours.replay_buffer
    assert isinstance(buffer, CompressedReplayBuffer)
    assert_same(buffer, theirs.replay_buffer)
    assert buffer.full
    assert (buffer.n_stack, buffer.codec) == (4, "patch")
    assert buffer.stored_nbytes < theirs.replay_buffer.observations.nbytes / 10
