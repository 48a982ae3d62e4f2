"""Models trained from a compressed buffer have the weights that they have with Stable Baselines3's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch._dynamo  # noqa: F401 - optimizers do it otherwise, which makes a folder in the tests' temporary one
from sb3_contrib import QRDQN
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import check_equal_weights, image_env, silenced


@pytest.mark.sample
@pytest.mark.parametrize(("channels", "first"), [(1, True), (3, False)])
@pytest.mark.parametrize("algorithm", [DQN, QRDQN])
def test_images(algorithm: Any, channels: int, first: bool) -> None:
    def make(replay_buffer_class: Any) -> Any:
        return algorithm(
            "CnnPolicy",
            image_env(channels, 2, first=first),
            replay_buffer_class=replay_buffer_class,
            buffer_size=260,
            learning_starts=60,
            batch_size=16,
            train_freq=8,
            target_update_interval=100,
            seed=1,
            device="cpu",
        )

    model = check_equal_weights(make, CompressedReplayBuffer, ReplayBuffer, 400)
    assert model.replay_buffer.n_stack == 4
    assert model.replay_buffer.full


@pytest.mark.sample
@pytest.mark.parametrize("algorithm", [SAC, TD3])
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors(algorithm: Any, normalize: bool) -> None:
    def make(replay_buffer_class: Any) -> Any:
        venv = make_vec_env("Pendulum-v1", n_envs=2, seed=0)
        return algorithm(
            "MlpPolicy",
            VecNormalize(venv) if normalize else venv,
            replay_buffer_class=replay_buffer_class,
            buffer_size=300,
            learning_starts=60,
            batch_size=32,
            train_freq=4,
            policy_kwargs={"net_arch": [32, 32]},
            seed=1,
            device="cpu",
        )

    check_equal_weights(make, CompressedReplayBuffer, ReplayBuffer, 400)


def test_options_reach_the_buffer() -> None:
    model = DQN(
        "CnnPolicy",
        image_env(),
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"codec": "patch+lz4", "n_stack": 2, "block_length": 8, "num_threads": 1},
        optimize_memory_usage=True,
        buffer_size=1000,
        device="cpu",
    )
    silenced(model).learn(40)
    buffer = model.replay_buffer
    assert isinstance(buffer, CompressedReplayBuffer)
    assert (buffer.codec, buffer.n_stack, buffer.block_length, buffer.buffer_size) == ("patch+lz4", 2, 8, 500)
    assert (buffer.size(), buffer.handle_timeout_termination) == (20, True)


def test_the_stack_is_found_once_frames_differ() -> None:
    """A stack of images that stand still fits every layout; the first that move decide."""
    venv = image_env(1, 1)
    buffer = CompressedReplayBuffer(500, venv.observation_space, venv.action_space, "cpu")
    still = np.full((1, 4, 36, 36), 9, dtype=np.uint8)
    rest = (np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    for _ in range(10):
        buffer.add(still, still, *rest)
    assert buffer.n_stack == 1
    before = venv.reset()
    for _ in range(60):
        after = venv.step([2])[0].copy()
        buffer.add(before, after, *rest)
        before = after
    assert buffer.n_stack == 4
    assert (np.asarray(buffer.observations[:10]) == 9).all()
