"""The compressed rollout buffers give the bits that Stable Baselines3's give."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # optimizers do it otherwise, which makes a folder in the tests' temporary one
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from sb3_ext import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from tests.sb3_ext.toys import assert_same_batches, dict_env, image_env, random_observations

ACTIONS = spaces.Discrete(3)
IMAGES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
PAIRS = {
    "plain": (CompressedRolloutBuffer, RolloutBuffer),
    "dict": (CompressedDictRolloutBuffer, DictRolloutBuffer),
}


def both(kind: str, n_steps: int, space: Any, action_space: Any, n_envs: int, **options: Any) -> tuple[Any, Any]:
    ours, theirs = PAIRS[kind]
    arguments = (n_steps, space, action_space, "cpu")
    return (
        ours(*arguments, gae_lambda=0.9, gamma=0.95, n_envs=n_envs, **options),
        theirs(*arguments, gae_lambda=0.9, gamma=0.95, n_envs=n_envs),
    )


def fill(buffers: tuple[Any, Any], observations: list[Any], *, seed: int = 0) -> None:
    """One rollout, as ``OnPolicyAlgorithm.collect_rollouts`` hands it to a buffer."""
    n_envs = buffers[0].n_envs
    action_space = buffers[0].action_space
    for buffer in buffers:
        rng = np.random.default_rng(seed)
        buffer.reset()
        action_space.seed(seed)
        for obs in observations[: buffer.buffer_size]:
            action = np.stack([np.asarray(action_space.sample()) for _ in range(n_envs)])
            values, log_prob = (torch.from_numpy(rng.standard_normal(n_envs).astype(np.float32)) for _ in range(2))
            buffer.add(obs, action, rng.standard_normal(n_envs), rng.random(n_envs) < 0.2, values[:, None], log_prob)
        last = torch.from_numpy(rng.standard_normal((n_envs, 1)).astype(np.float32))
        buffer.compute_returns_and_advantage(last, rng.random(n_envs) < 0.5)


def seen(venv: VecEnv, n_steps: int, *, seed: int = 0) -> list[Any]:
    """Observations as the algorithm has them: of an episode that follows, after one that ended."""
    rng = np.random.default_rng(seed)
    found = [venv.reset()]
    for _ in range(n_steps - 1):
        obs = venv.step(rng.integers(3, size=venv.num_envs))[0]
        found.append(
            {key: value.copy() for key, value in obs.items()} if isinstance(obs, dict) else obs.copy(order="K")
        )
    return found


@pytest.mark.parametrize("batch_size", [None, 1, 13, 64, 10_000])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_minibatches_of_every_size(batch_size: int | None, n_envs: int) -> None:
    buffers = both("plain", 37, IMAGES, ACTIONS, n_envs)
    fill(buffers, seen(image_env(1, n_envs), 37))
    for _ in range(2):  # epochs
        assert_same_batches(*buffers, batch_size)


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("codec", ["auto", "raw", "patch", "patch+lz4"])
def test_rollouts_that_follow_each_other(channels: int, first: bool, codec: str) -> None:
    venv = image_env(channels, 2, first=first)
    buffers = both("plain", 40, venv.observation_space, ACTIONS, 2, codec=codec)
    for turn in range(3):
        fill(buffers, seen(venv, 40, seed=turn), seed=turn)
        assert_same_batches(*buffers, 16)
        assert_same_batches(*buffers, 16)
    assert buffers[0].n_stack == 4
    assert buffers[0].stored_nbytes < buffers[1].observations.nbytes / 2


SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (7,), np.float32),
    spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    spaces.Box(0, 255, (5, 6, 3), np.uint8),
    spaces.Discrete(9),
    spaces.MultiDiscrete([3, 4, 2]),
    spaces.MultiBinary(5),
]


def test_all_spaces_at_once() -> None:
    space = spaces.Dict({str(number): part for number, part in enumerate(SPACES)})
    buffers = both("dict", 20, space, ACTIONS, 3)
    fill(buffers, random_observations(space, 3, 20))
    assert_same_batches(*buffers, 7)


@pytest.mark.parametrize("kind", ["plain", "dict"])
def test_it_has_the_attributes_of_the_original(kind: str) -> None:
    venv = image_env() if kind == "plain" else dict_env()
    buffers = both(kind, 12, venv.observation_space, ACTIONS, 2)
    for turn in range(2):
        fill(buffers, seen(venv, 12))
        for _ in range(2):
            ours, theirs = (vars(buffer) for buffer in buffers)
            assert ours.keys() - {"_observations"} == theirs.keys()
            for name, value in theirs.items():
                if isinstance(value, np.ndarray) and name != "observations":
                    assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
                    np.testing.assert_array_equal(ours[name], value, err_msg=name)
            mine, other = ours["observations"], theirs["observations"]
            for key in other if kind == "dict" else [...]:
                left, right = (mine[key], other[key]) if kind == "dict" else (mine, other)
                assert (left.shape, left.dtype) == (right.shape, right.dtype)
                np.testing.assert_array_equal(np.asarray(left), right)
            list(buffers[0].get(5)), list(buffers[1].get(5))  # flattens them
        assert turn == 0 or buffers[0].generator_ready


@pytest.mark.parametrize("index", [3, -1, slice(2, 9), slice(None, None, 3), [1, 5, 5], np.array([True, False] * 12)])
def test_the_flat_view_is_indexed_like_an_array(index: Any) -> None:
    buffers = both("plain", 12, IMAGES, ACTIONS, 2)
    fill(buffers, seen(image_env(), 12))
    for buffer in buffers:
        next(buffer.get())
    np.testing.assert_array_equal(buffers[0].observations[index], buffers[1].observations[index], strict=True)
    with pytest.raises(IndexError):
        buffers[0].observations[np.array([24])]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("kind", ["plain", "dict"])
def test_copies_go_on(copied: Any, kind: str) -> None:
    venv = image_env() if kind == "plain" else dict_env()
    buffers = both(kind, 12, venv.observation_space, ACTIONS, 2)
    fill(buffers, seen(venv, 12))
    list(buffers[0].get(5)), list(buffers[1].get(5))
    ours = copied(buffers[0])
    assert_same_batches(ours, buffers[1], 5)
    fill((ours, buffers[1]), seen(venv, 12, seed=1))
    assert_same_batches(ours, buffers[1], 5)


def test_what_does_not_fit_is_refused_and_replaced_by_what_does() -> None:
    venv = image_env()
    buffers = both("plain", 8, venv.observation_space, ACTIONS, 2)
    observations = seen(venv, 8)
    rest = np.zeros(2), np.zeros(2), np.zeros(2), torch.zeros(2, 1), torch.zeros(2)
    buffers[0].add(observations[0], *rest)
    with pytest.raises(InvalidArgumentError, match=r"obs has shape \(2, 4, 36, 35\), expected \(2, 4, 36, 36\)"):
        buffers[0].add(observations[0][..., 1:], *rest)
    with pytest.raises(InvalidTypeError, match="obs has dtype <U5"):
        buffers[0].add(np.full(observations[0].shape, "black"), *rest)
    with pytest.raises(ValueError, match="reshape"):
        buffers[0].add(observations[0], np.zeros(5), *rest[1:])
    assert buffers[0].pos == 1
    fill(buffers, observations)
    assert_same_batches(*buffers, 5)


def test_more_steps_than_a_rollout_has_are_refused() -> None:
    venv = image_env()
    buffer, _ = both("plain", 2, venv.observation_space, ACTIONS, 2)
    rest = np.zeros(2), np.zeros(2), np.zeros(2), torch.zeros(2, 1), torch.zeros(2)
    for _ in range(2):
        buffer.add(venv.reset(), *rest)
    with pytest.raises(InvalidArgumentError, match=r"the rollout is full with 2 steps; call reset\(\)"):
        buffer.add(venv.reset(), *rest)
