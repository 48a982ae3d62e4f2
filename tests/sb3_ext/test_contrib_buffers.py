"""Compressed rollout buffers for sb3-contrib's algorithms."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # optimizers do it otherwise, which makes a folder in the tests' temporary one
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer

from rl_ext_core.errors import InvalidTypeError
from sb3_ext.contrib import (
    CompressedMaskableDictRolloutBuffer,
    CompressedMaskableRolloutBuffer,
    CompressedRecurrentDictRolloutBuffer,
    CompressedRecurrentRolloutBuffer,
)
from tests.sb3_ext.test_rollout_buffers import seen
from tests.sb3_ext.toys import assert_same_batches, dict_env, image_env

ACTIONS = spaces.Discrete(3)
MASKABLE = [
    (CompressedMaskableRolloutBuffer, MaskableRolloutBuffer),
    (CompressedMaskableDictRolloutBuffer, MaskableDictRolloutBuffer),
]
RECURRENT = [
    (CompressedRecurrentRolloutBuffer, RecurrentRolloutBuffer),
    (CompressedRecurrentDictRolloutBuffer, RecurrentDictRolloutBuffer),
]
N_STEPS, N_ENVS = 24, 2
HIDDEN = (N_STEPS, 1, N_ENVS, 5)


def steps(seed: int, n_steps: int = N_STEPS) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n_steps):
        value, log_prob = (torch.from_numpy(rng.standard_normal(N_ENVS).astype(np.float32)) for _ in range(2))
        action, starts = rng.integers(3, size=(N_ENVS, 1)), rng.random(N_ENVS) < 0.2
        found.append((action, rng.standard_normal(N_ENVS), starts, value[:, None], log_prob))
    return found


@pytest.mark.parametrize("pair", MASKABLE, ids=["plain", "dict"])
@pytest.mark.parametrize("actions", [ACTIONS, spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)], ids=str)
def test_masks(pair: Any, actions: Any) -> None:
    venv = image_env() if pair is MASKABLE[0] else dict_env()
    buffers = [cls(N_STEPS, venv.observation_space, actions, "cpu", n_envs=N_ENVS) for cls in pair]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        observations, rest = seen(venv, N_STEPS, seed=seed), steps(seed)
        masks = [rng.random((N_ENVS, buffers[1].mask_dims)) < 0.5 for _ in rest]
        for buffer in buffers:
            buffer.reset()
            actions.seed(seed)
            for number, (obs, (_, *others), mask) in enumerate(zip(observations, rest, masks, strict=True)):
                action = np.stack([np.asarray(actions.sample()) for _ in range(N_ENVS)])
                buffer.add(obs, action, *others, action_masks=mask if number % 3 else None)
            buffer.compute_returns_and_advantage(torch.ones(N_ENVS, 1), np.zeros(N_ENVS, dtype=bool))
        for batch_size in (None, 7, 7):
            assert_same_batches(*buffers, batch_size)


@pytest.mark.parametrize("pair", RECURRENT, ids=["plain", "dict"])
@pytest.mark.parametrize("batch_size", [None, 10, 48])
def test_sequences(pair: Any, batch_size: int | None) -> None:
    venv = image_env() if pair is RECURRENT[0] else dict_env()
    arguments = (N_STEPS, venv.observation_space, ACTIONS, HIDDEN, "cpu")
    original = pair[1](*arguments, gae_lambda=0.9, gamma=0.8, n_envs=N_ENVS)
    buffers = [pair[0].like(original, codec="patch+lz4"), original]
    assert (buffers[0].gae_lambda, buffers[0].gamma) == (0.9, 0.8)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        states = [torch.from_numpy(rng.standard_normal((4, 1, N_ENVS, 5)).astype(np.float32)) for _ in range(N_STEPS)]
        observations, rest = seen(venv, N_STEPS, seed=seed), steps(seed)
        for buffer in buffers:
            buffer.reset()
            for obs, step, state in zip(observations, rest, states, strict=True):
                buffer.add(obs, *step, lstm_states=RNNStates((state[0], state[1]), (state[2], state[3])))
            buffer.compute_returns_and_advantage(torch.ones(N_ENVS, 1), np.zeros(N_ENVS, dtype=bool))
        for _ in range(2):
            assert_same_batches(*buffers, batch_size)
    codec = buffers[0].codec
    assert (codec["image"] if isinstance(codec, dict) else codec) == "patch+lz4"


def test_like_takes_buffers_of_its_kind() -> None:
    venv = image_env()
    plain = RolloutBuffer(N_STEPS, venv.observation_space, ACTIONS)
    with pytest.raises(InvalidTypeError, match=r"buffer is a RolloutBuffer.*\.like\(model.rollout_buffer\)"):
        CompressedRecurrentRolloutBuffer.like(plain)  # type: ignore[arg-type]
    recurrent = RecurrentRolloutBuffer(N_STEPS, venv.observation_space, ACTIONS, HIDDEN, n_envs=N_ENVS)
    with pytest.raises(InvalidTypeError, match="expected a Dict; use CompressedRecurrentRolloutBuffer"):
        CompressedRecurrentDictRolloutBuffer.like(recurrent)


_WITHOUT = """
import sys
sys.modules["sb3_contrib"] = None
import sb3_ext
try:
    import sb3_ext.contrib
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_only_these_need_sb3_contrib() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("MissingDependencyError sb3_ext.contrib needs the package 'sb3_contrib'")
    assert 'pip install "rl-ext[contrib]"' in run.stdout
