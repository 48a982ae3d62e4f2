"""Compressed n-step buffers use the number of steps and the discount of their algorithm."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from typing import Any

import pytest
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

import sb3_ext
from rl_ext_core.errors import InvalidArgumentError
from sb3_ext import CompressedNStepReplayBuffer
from tests.sb3_ext.buffer_envs import image_env, without_logger

ACTIONS = spaces.Discrete(3)


def make_dqn(replay_buffer_class: Any = CompressedNStepReplayBuffer, **options: Any) -> DQN:
    """Return a DQN with a replay buffer class; None selects SB3's default."""
    defaults = {"buffer_size": 260, "learning_starts": 60, "batch_size": 16, "train_freq": 8, "seed": 1}
    return without_logger(
        DQN(
            "CnnPolicy",
            image_env(),
            replay_buffer_class=replay_buffer_class,
            target_update_interval=100,
            device="cpu",
            **{**defaults, **options},
        )
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"n_steps": 3, "replay_buffer_kwargs": {"n_steps": 5}},
            "n_steps=5 of the replay buffer differs from n_steps=3 of the algorithm",
        ),
        (
            {"gamma": 0.9, "replay_buffer_kwargs": {"gamma": 0.99}},
            "gamma=0.99 of the replay buffer differs from gamma=0.9 of the algorithm",
        ),
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
            self.made = CompressedNStepReplayBuffer(
                10, self.training_env.observation_space, ACTIONS, n_steps=2, gamma=0.5
            )
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
