"""Models trained from compressed rollouts have the weights that they have with Stable Baselines3's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch._dynamo  # noqa: F401 - optimizers do it otherwise, which makes a folder in the tests' temporary one
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from sb3_ext import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_ext.contrib import (
    CompressedMaskableDictRolloutBuffer,
    CompressedMaskableRolloutBuffer,
    CompressedRecurrentDictRolloutBuffer,
    CompressedRecurrentRolloutBuffer,
)
from tests.sb3_ext.toys import check_equal_weights, dict_env, image_env

CLASSES = {
    "plain": (CompressedRolloutBuffer, RolloutBuffer),
    "dict": (CompressedDictRolloutBuffer, DictRolloutBuffer),
}
POLICIES = {"plain": "CnnPolicy", "dict": "MultiInputPolicy"}


def env_of(kind: str) -> VecEnv:
    return image_env() if kind == "plain" else dict_env()


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["plain", "dict"])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (PPO, {"n_steps": 32, "batch_size": 16, "n_epochs": 2}),
        (A2C, {"n_steps": 5}),
        (TRPO, {"n_steps": 32, "batch_size": 16}),
    ],
)
def test_same_weights(kind: str, algorithm: Any, options: dict[str, Any]) -> None:
    def make(rollout_buffer_class: Any) -> Any:
        small = {"net_arch": [8]}
        policy, env = POLICIES[kind], env_of(kind)
        known = {} if algorithm is TRPO else {"rollout_buffer_class": rollout_buffer_class}
        model = algorithm(policy, env, **known, **options, policy_kwargs=small, seed=1, device="cpu")
        if algorithm is TRPO:  # has no such argument
            theirs = model.rollout_buffer
            arguments = (theirs.buffer_size, theirs.observation_space, theirs.action_space, theirs.device)
            model.rollout_buffer = rollout_buffer_class(*arguments, theirs.gae_lambda, theirs.gamma, theirs.n_envs)
        return model

    check_equal_weights(make, *CLASSES[kind], 128)


def test_same_weights_from_normalized_observations() -> None:
    def make(rollout_buffer_class: Any) -> Any:
        venv = VecNormalize(dict_env(), norm_obs_keys=["place"])
        return PPO(
            "MultiInputPolicy",
            venv,
            rollout_buffer_class=rollout_buffer_class,
            n_steps=32,
            batch_size=16,
            n_epochs=2,
            seed=1,
            device="cpu",
        )

    check_equal_weights(make, *CLASSES["dict"], 128)


def test_options_reach_the_buffer() -> None:
    options = {"codec": "patch+lz4", "n_stack": 2, "block_length": 4, "num_threads": 1}
    model = PPO("CnnPolicy", image_env(), rollout_buffer_class=CompressedRolloutBuffer, rollout_buffer_kwargs=options)
    buffer: Any = model.rollout_buffer
    assert {name: getattr(buffer, name) for name in options} == options


class Masked(VecEnvWrapper):
    """Forbids an action, another one at each step."""

    def reset(self) -> Any:
        self._steps = 0
        return self.venv.reset()

    def step_wait(self) -> Any:
        self._steps += 1
        return self.venv.step_wait()

    def has_attr(self, name: str) -> bool:
        return name == "action_masks" or super().has_attr(name)

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        if name == "action_masks":
            return [np.arange(3) != (self._steps + env) % 3 for env in range(self.num_envs)]
        return super().env_method(name, *args, indices=indices, **kwargs)


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("plain", (CompressedMaskableRolloutBuffer, MaskableRolloutBuffer)),
        ("dict", (CompressedMaskableDictRolloutBuffer, MaskableDictRolloutBuffer)),
    ],
)
def test_maskable_ppo(kind: str, classes: Any) -> None:
    def make(rollout_buffer_class: Any) -> Any:
        return MaskablePPO(
            POLICIES[kind],
            Masked(env_of(kind)),
            rollout_buffer_class=rollout_buffer_class,
            n_steps=32,
            batch_size=16,
            n_epochs=2,
            policy_kwargs={"net_arch": [8]},
            seed=1,
            device="cpu",
        )

    model = check_equal_weights(make, *classes, 128)
    assert (model.rollout_buffer.action_masks == 0).any()


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("plain", (CompressedRecurrentRolloutBuffer, RecurrentRolloutBuffer)),
        ("dict", (CompressedRecurrentDictRolloutBuffer, RecurrentDictRolloutBuffer)),
    ],
)
def test_recurrent_ppo(kind: str, classes: Any) -> None:
    def make(rollout_buffer_class: Any) -> Any:
        model = RecurrentPPO(
            "CnnLstmPolicy" if kind == "plain" else "MultiInputLstmPolicy",
            env_of(kind),
            n_steps=16,
            batch_size=16,
            n_epochs=2,
            policy_kwargs={"net_arch": [8], "lstm_hidden_size": 8},
            seed=1,
            device="cpu",
        )
        if rollout_buffer_class is classes[0]:
            model.rollout_buffer = rollout_buffer_class.like(model.rollout_buffer)
        return model

    check_equal_weights(make, *classes, 64)
