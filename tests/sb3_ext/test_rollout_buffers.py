"""Compressed rollout buffers, also those for sb3-contrib, return the bits of the original buffers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # else optimizers import it during a test, which creates a temporary folder
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from tests.sb3_ext.buffer_envs import ROLLOUT, assert_same_batches, dict_env, image_env, sample_batch

ACTIONS = spaces.Discrete(3)


def make_rollout_buffers(
    kind: str, n_steps: int, space: Any, actions: Any = ACTIONS, n_envs: int = 2, **options: Any
) -> Any:
    """Return a compressed rollout buffer and SB3's, both empty."""
    hidden = [(n_steps, 1, n_envs, 5)] if "recurrent" in kind else []
    more = {"device": "cpu", "gae_lambda": 0.9, "gamma": 0.95, "n_envs": n_envs}
    ours, theirs = ROLLOUT[kind]
    return ours(n_steps, space, actions, *hidden, **more, **options), theirs(n_steps, space, actions, *hidden, **more)


def fill_rollouts(buffers: tuple[Any, Any], observations: list[Any], *, seed: int = 0) -> None:
    """Fill both buffers with one rollout, as ``OnPolicyAlgorithm.collect_rollouts`` does."""
    for buffer in buffers:
        rng, n_envs = np.random.default_rng(seed), buffer.n_envs
        buffer.reset()
        buffer.action_space.seed(seed)
        for number, obs in enumerate(observations):
            values, log_prob = (torch.from_numpy(rng.standard_normal(n_envs).astype(np.float32)) for _ in range(2))
            more: dict[str, Any] = {}
            if hasattr(buffer, "action_masks") and number % 3:
                more["action_masks"] = rng.random((n_envs, buffer.mask_dims)) < 0.5
            if hasattr(buffer, "hidden_states_pi"):
                state = torch.from_numpy(rng.standard_normal((4, 1, n_envs, 5)).astype(np.float32))
                more["lstm_states"] = RNNStates((state[0], state[1]), (state[2], state[3]))
            rest = rng.standard_normal(n_envs), rng.random(n_envs) < 0.2, values[:, None], log_prob
            buffer.add(obs, sample_batch(buffer.action_space, n_envs), *rest, **more)
        last = torch.from_numpy(rng.standard_normal((n_envs, 1)).astype(np.float32))
        buffer.compute_returns_and_advantage(last, rng.random(n_envs) < 0.5)


def collect_observations(venv: VecEnv, n_steps: int, *, seed: int = 0) -> list[Any]:
    """Return the observations of a rollout, as an algorithm passes them to a buffer."""
    rng = np.random.default_rng(seed)
    found = [venv.reset()]
    for _ in range(n_steps - 1):
        obs = venv.step(rng.integers(3, size=venv.num_envs))[0]
        found.append(
            {key: value.copy() for key, value in obs.items()} if isinstance(obs, dict) else obs.copy(order="K")
        )
    return found


def make_env(kind: str, n_envs: int = 2) -> VecEnv:
    """Return environments with the observations that a kind of buffer is for."""
    return dict_env(n_envs) if "dict" in kind else image_env(1, n_envs)


@pytest.mark.parametrize("kind", ROLLOUT)
def test_minibatches_of_every_size_equal_those_of_sb3(kind: str) -> None:
    n_envs = 1 if kind == "plain" else 3
    venv = make_env(kind, n_envs)
    buffers = make_rollout_buffers(kind, 24, venv.observation_space, n_envs=n_envs)
    for seed in range(2):
        fill_rollouts(buffers, collect_observations(venv, 24, seed=seed), seed=seed)
        for batch_size in (None, 1, 7, 10_000) if seed else (7, 7, 48):
            assert_same_batches(*buffers, batch_size)


@pytest.mark.parametrize("actions", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)], ids=str)
def test_masks_of_composite_action_spaces_equal_those_of_sb3(actions: Any) -> None:
    venv = image_env()
    buffers = make_rollout_buffers("maskable", 24, venv.observation_space, actions)
    fill_rollouts(buffers, collect_observations(venv, 24))
    assert_same_batches(*buffers, 7)


@pytest.mark.parametrize(("channels", "first", "codec"), [(1, True, "patch"), (3, False, "raw")])
def test_consecutive_rollouts_equal_those_of_sb3(channels: int, first: bool, codec: str) -> None:
    venv = image_env(channels, 2, first=first)
    buffers = make_rollout_buffers("plain", 40, venv.observation_space, codec=codec)
    for turn in range(3):
        fill_rollouts(buffers, collect_observations(venv, 40, seed=turn), seed=turn)
        assert_same_batches(*buffers, 16)
    assert buffers[0].n_stack == 4
    assert buffers[0].stored_nbytes < buffers[1].observations.nbytes / 2


@pytest.mark.parametrize("kind", ["plain", "dict"])
def test_attributes_equal_those_of_sb3s_buffer(kind: str) -> None:
    venv = make_env(kind)
    buffers = make_rollout_buffers(kind, 12, venv.observation_space)
    for turn in range(2):
        fill_rollouts(buffers, collect_observations(venv, 12))
        for _ in range(2):
            ours, theirs = (vars(buffer) for buffer in buffers)
            assert ours.keys() - {"_observations"} == theirs.keys()
            for name, value in theirs.items():
                if isinstance(value, np.ndarray) and name != "observations":
                    np.testing.assert_array_equal(ours[name], value, err_msg=name, strict=True)
            mine, other = ours["observations"], theirs["observations"]
            for key in other if kind == "dict" else [...]:
                left, right = (mine[key], other[key]) if kind == "dict" else (mine, other)
                np.testing.assert_array_equal(np.asarray(left), right, strict=True)
            list(buffers[0].get(5)), list(buffers[1].get(5))  # flattens the arrays
        assert turn == 0 or buffers[0].generator_ready


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("kind", ["plain", "dict"])
def test_copies_accept_another_rollout(copied: Callable[[Any], Any], kind: str) -> None:
    venv = make_env(kind)
    buffers = make_rollout_buffers(kind, 12, venv.observation_space)
    fill_rollouts(buffers, collect_observations(venv, 12))
    list(buffers[0].get(5)), list(buffers[1].get(5))
    ours = copied(buffers[0])
    assert_same_batches(ours, buffers[1], 5)
    fill_rollouts((ours, buffers[1]), collect_observations(venv, 12, seed=1))
    assert_same_batches(ours, buffers[1], 5)


def test_other_rows_than_the_next_one_are_refused() -> None:
    venv = make_env("plain")
    buffers = make_rollout_buffers("plain", 12, venv.observation_space)
    *steps, other = collect_observations(venv, 11)
    fill_rollouts(buffers, steps)
    with pytest.raises(InvalidArgumentError, match="step 2 cannot be stored, because the rollout has 10 of 12 steps"):
        buffers[0].observations[2] = other
    with pytest.raises(InvalidTypeError, match=r"assigned row by row, not by \(0, 1\)\. Use"):
        buffers[0].observations[0, 1] = other[1]
    np.testing.assert_array_equal(np.asarray(buffers[0].observations), buffers[1].observations)


def test_refused_step_leaves_rollout_usable() -> None:
    venv = image_env()
    buffers = make_rollout_buffers("plain", 8, venv.observation_space)
    observations = collect_observations(venv, 8)
    rest = np.zeros(2), np.zeros(2), np.zeros(2), torch.zeros(2, 1), torch.zeros(2)
    buffers[0].add(observations[0], *rest)
    with pytest.raises(InvalidArgumentError, match=r"obs has shape \(2, 4, 36, 35\), expected \(2, 4, 36, 36\)"):
        buffers[0].add(observations[0][..., 1:], *rest)
    with pytest.raises(InvalidTypeError, match="obs has dtype <U5"):
        buffers[0].add(np.full(observations[0].shape, "black"), *rest)
    with pytest.raises(ValueError, match="reshape"):
        buffers[0].add(observations[0], np.zeros(5), *rest[1:])
    assert buffers[0].pos == 1
    fill_rollouts(buffers, observations)
    with pytest.raises(InvalidArgumentError, match=r"the rollout has 8 of 8 steps: .* Call reset\(\)"):
        buffers[0].add(observations[0], *rest)
    assert_same_batches(*buffers, 5)


@pytest.mark.parametrize("kind", ["recurrent", "recurrent dict"])
def test_like_copies_settings_of_recurrent_buffer(kind: str) -> None:
    venv = make_env(kind)
    _, theirs = make_rollout_buffers(kind, 24, venv.observation_space)
    ours = ROLLOUT[kind][0].like(theirs, codec="raw")
    assert (ours.gae_lambda, ours.gamma) == (0.9, 0.95)
    assert (ours.codec["image"] if isinstance(ours.codec, dict) else ours.codec) == "raw"
    fill_rollouts((ours, theirs), collect_observations(venv, 24))
    assert_same_batches(ours, theirs, 10)
    if kind == "recurrent":
        plain = RolloutBuffer(24, venv.observation_space, ACTIONS)
        with pytest.raises(InvalidTypeError, match=r"buffer is a RolloutBuffer.*\.like\(model.rollout_buffer\)"):
            ROLLOUT[kind][0].like(plain)
        with pytest.raises(InvalidTypeError, match=r"expected a Dict\. Use CompressedRecurrentRolloutBuffer"):
            ROLLOUT["recurrent dict"][0].like(theirs)
