"""n-step returns from the compressed buffer are those of Stable Baselines3's, and agree with the algorithm."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # optimizers do it otherwise, which makes a folder in the tests' temporary one
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import sb3_ext
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from sb3_ext import CompressedNStepReplayBuffer
from tests.sb3_ext.toys import Sprite, assert_same, collected, image_env, random_transitions, silenced

ACTIONS = spaces.Discrete(3)


def both(size: int, space: Any, n_envs: int, **options: Any) -> tuple[Any, Any]:
    arguments = (size, space, ACTIONS, "cpu", n_envs)
    return tuple(cls(*arguments, **options) for cls in (CompressedNStepReplayBuffer, NStepReplayBuffer))  # type: ignore[return-value]


@pytest.mark.sample(quick=7)
@pytest.mark.parametrize("n_steps", [1, 2, 3, 10, 40])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("handle", [True, False])
def test_returns_at_every_place_of_the_ring(n_steps: int, n_envs: int, handle: bool) -> None:
    """Across ends of episodes of both kinds, the newest transition, and the ring's end."""
    venv = image_env(1, n_envs)
    options = {"n_steps": n_steps, "gamma": 0.9, "handle_timeout_termination": handle}
    buffers = both(30 * n_envs, venv.observation_space, n_envs, **options)
    for step, transition in enumerate(collected(venv, 75)):
        for buffer in buffers:
            buffer.add(*transition)
        if step in (0, 3, 28, 29, 30, 31, 44, 59, 60, 74):
            assert_same(*buffers, 60)
    assert buffers[1].dones.any()
    assert buffers[1].timeouts.any() == handle


def test_samples_are_normalized() -> None:
    space = spaces.Box(-1, 1, (6,), np.float32)
    venv = VecNormalize(DummyVecEnv([Sprite]), norm_obs=False)
    venv.norm_obs, venv.observation_space, venv.obs_rms = True, space, type(venv.ret_rms)(shape=(6,))
    rng = np.random.default_rng(0)
    venv.obs_rms.update(rng.standard_normal((50, 6)))
    venv.ret_rms.update(3 * rng.standard_normal(50))
    buffers = both(50, space, 2, n_steps=3, gamma=0.9)
    for transition in random_transitions(space, ACTIONS, 2, 40):
        for buffer in buffers:
            buffer.add(*transition)
    assert_same(*buffers, env=venv)


def test_copies_keep_the_number_of_steps() -> None:
    venv = image_env()
    ours, theirs = both(50, venv.observation_space, 2, n_steps=5, gamma=0.8)
    for transition in collected(venv, 40):
        ours.add(*transition)
        theirs.add(*transition)
    ours = pickle.loads(pickle.dumps(ours))
    assert (ours.n_steps, ours.gamma) == (5, 0.8)
    assert_same(ours, theirs)


def dqn(replay_buffer_class: Any = CompressedNStepReplayBuffer, **options: Any) -> DQN:
    defaults = {"buffer_size": 260, "learning_starts": 60, "batch_size": 16, "train_freq": 8, "seed": 1}
    return silenced(
        DQN(
            "CnnPolicy",
            image_env(),
            replay_buffer_class=replay_buffer_class,
            target_update_interval=100,
            device="cpu",
            **{**defaults, **options},
        )
    )


@pytest.mark.sample
@pytest.mark.parametrize("gamma", [0.99, 0.9])
@pytest.mark.parametrize("through", ["algorithm", "kwargs", "both"])
def test_a_model_learns_what_it_learns_with_the_original(gamma: float, through: str, caplog: Any) -> None:
    theirs = dqn(None, n_steps=3, gamma=gamma)
    theirs.learn(400)
    assert type(theirs.replay_buffer) is NStepReplayBuffer
    options: dict[str, Any] = {"gamma": gamma}
    if through != "algorithm":
        options["replay_buffer_kwargs"] = {"n_steps": 3, "codec": "patch"}
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "sb3_ext"):
        if through != "kwargs":
            options["n_steps"] = 3
            warnings.filterwarnings("ignore", "`n_steps=3` is ignored")
        ours = dqn(**options)
    assert ("n_steps=3 of the algorithm is used" in caplog.text) == (through != "kwargs")
    ours.learn(400)
    assert type(ours.replay_buffer) is CompressedNStepReplayBuffer
    assert (ours.replay_buffer.n_steps, ours.replay_buffer.gamma) == (3, gamma)
    for name, right in theirs.policy.state_dict().items():
        assert torch.equal(ours.policy.state_dict()[name], right), name
    assert_same(ours.replay_buffer, theirs.replay_buffer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_steps": 3, "replay_buffer_kwargs": {"n_steps": 5}}, "given n_steps=5 and the algorithm n_steps=3"),
        ({"gamma": 0.9, "replay_buffer_kwargs": {"gamma": 0.99}}, "given gamma=0.99 and the algorithm gamma=0.9"),
        ({"replay_buffer_kwargs": {"n_steps": 0}}, "n_steps=0 must be at least 1"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`n_steps=3` is ignored")
def test_what_does_not_agree_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        dqn(**options)


def test_a_class_of_ones_own_agrees_too() -> None:
    class Own(CompressedNStepReplayBuffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert dqn(Own, gamma=0.9).replay_buffer.gamma == 0.9


def test_a_buffer_that_is_made_while_a_model_learns_is_not_the_models() -> None:
    class Makes(BaseCallback):
        def _on_step(self) -> bool:
            self.made = CompressedNStepReplayBuffer(
                10, self.training_env.observation_space, ACTIONS, n_steps=2, gamma=0.5
            )
            return False

    callback = Makes()
    dqn(None, gamma=0.9).learn(10, callback)
    assert (callback.made.n_steps, callback.made.gamma) == (2, 0.5)


def test_another_buffer_of_an_algorithm_is_not_its_replay_buffer() -> None:
    class Own(DQN):
        def make_another(self) -> CompressedNStepReplayBuffer:
            return CompressedNStepReplayBuffer(10, self.observation_space, ACTIONS, n_steps=2, gamma=0.5)

    another = Own("CnnPolicy", image_env(), buffer_size=10, gamma=0.9, device="cpu").make_another()
    assert (another.n_steps, another.gamma) == (2, 0.5)


def test_alone_it_has_the_defaults_of_the_original() -> None:
    space = spaces.Box(0, 255, (4, 30, 30), np.uint8)
    ours, theirs = both(10, space, 1)
    assert (ours.n_steps, ours.gamma) == (theirs.n_steps, theirs.gamma)
    with pytest.raises(InvalidTypeError, match=r"a Dict of \['camera'\].*n-step"):
        CompressedNStepReplayBuffer(10, spaces.Dict(camera=space), ACTIONS)


_EARLIER = """
from stable_baselines3.common import buffers
del buffers.NStepReplayBuffer
import sb3_ext
sb3_ext.CompressedReplayBuffer
try:
    sb3_ext.CompressedNStepReplayBuffer
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_earlier_versions_of_the_framework_are_told_what_they_lack() -> None:
    run = subprocess.run([sys.executable, "-c", _EARLIER], capture_output=True, text=True)
    assert run.stdout.startswith("MissingDependencyError CompressedNStepReplayBuffer needs Stable Baselines3 2.7"), run
    with pytest.raises(AttributeError, match="has no attribute 'Another'"):
        sb3_ext.Another  # noqa: B018
