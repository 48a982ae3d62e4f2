"""The compressed buffer gives the bits that Stable Baselines3's gives."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.toys import Sprite, add_all, assert_same, both, collected, image_env, random_transitions

GREY = spaces.Box(0, 255, (4, 12, 11), np.uint8)
ACTIONS = spaces.Discrete(5)


@pytest.mark.sample(quick=8)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 2, 5])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("codec", ["auto", "patch+lz4"])
def test_stacked_images(channels: int, n_envs: int, first: bool, codec: str) -> None:
    venv = image_env(channels, n_envs, first=first)
    ours, theirs = both(131, venv.observation_space, venv.action_space, n_envs, codec=codec)
    for step, transition in enumerate(collected(venv, 160)):
        ours.add(*transition)
        theirs.add(*transition)
        if step in (0, 1, 20, 100, 159):
            assert_same(ours, theirs)
    assert theirs.full
    assert theirs.timeouts.any()
    assert (theirs.dones > theirs.timeouts).any()
    assert ours.n_stack == 4
    assert ours.codec == ("patch" if codec == "auto" else codec)
    assert ours.stored_nbytes < theirs.observations.nbytes / 3


SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (7,), np.float32),
    spaces.Box(-1, 1, (1,), np.float32),
    spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    spaces.Box(0, 255, (5, 6, 3), np.uint8),
    spaces.Discrete(9),
    spaces.MultiDiscrete([3, 4, 2]),
    spaces.MultiBinary(5),
]


@pytest.mark.sample(quick=24)
@pytest.mark.parametrize("observation_space", SPACES, ids=str)
@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Discrete(4),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([2, 3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_all_spaces(observation_space: Any, action_space: Any, n_envs: int) -> None:
    ours, theirs = both(50, observation_space, action_space, n_envs)
    add_all((ours, theirs), random_transitions(observation_space, action_space, n_envs, 70))
    assert_same(ours, theirs)
    assert (np.asarray(ours.observations) == theirs.observations).all()


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize(
    ("size", "n_envs"), [(1, 1), (1, 5), (4, 5), (10, 3), (11, 2), (100, 7), (np.int64(20), np.int64(3))]
)
def test_sizes_are_rounded_as_in_the_original(size: int, n_envs: int) -> None:
    ours, theirs = both(size, GREY, ACTIONS, n_envs)
    for transition in random_transitions(GREY, ACTIONS, n_envs, 23):
        ours.add(*transition)
        theirs.add(*transition)
        assert_same(ours, theirs, 9)


@pytest.mark.parametrize(("norm_obs", "norm_reward"), [(True, True), (False, True), (True, False)])
def test_samples_are_normalized(norm_obs: bool, norm_reward: bool) -> None:
    space = spaces.Box(-1, 1, (6,), np.float32)
    venv = VecNormalize(DummyVecEnv([Sprite]), norm_obs=False, norm_reward=norm_reward)
    venv.norm_obs, venv.observation_space = norm_obs, space
    venv.obs_rms = type(venv.ret_rms)(shape=(6,))
    rng = np.random.default_rng(0)
    venv.obs_rms.update(rng.standard_normal((50, 6)))
    venv.ret_rms.update(3 * rng.standard_normal(50))
    ours, theirs = both(50, space, ACTIONS, 2)
    add_all((ours, theirs), random_transitions(space, ACTIONS, 2, 30))
    assert_same(ours, theirs, env=venv)
    assert_same(ours, theirs)  # what is stored did not change


def test_reset_extend_and_size() -> None:
    steps = random_transitions(GREY, ACTIONS, 2, 40)
    ours, theirs = both(60, GREY, ACTIONS, 2)
    for count in (10, 40, 0, 7):
        for buffer in (ours, theirs):
            buffer.extend(*([step[part] for step in steps[:count]] for part in range(6)))
        assert_same(ours, theirs)
        for buffer in (ours, theirs):
            buffer.reset()
        assert ours.size() == theirs.size() == 0
        assert not np.asarray(ours.observations).any()
    ours.extend(*([step[part] for step in steps] for part in range(6)))
    assert ours.size() == 30


INDICES: list[Any] = [
    3,
    -1,
    np.int64(4),
    slice(2, 9),
    slice(None, None, -3),
    [1, 5, 5],
    np.array([7, 0]),
    (3, 1),
    (slice(None), 0),
    (slice(None), [1, 0]),
    ([1, 2], [0, 1]),
    (np.array([[1], [2]]), np.array([0, 1])),
    (np.array([4, 2]), np.array([1, 1]), slice(None)),
    (5, slice(None), slice(1, 3), slice(None), 2),
    (2, 1, -1),
    (..., 0),
    (0, ..., slice(2)),
    ...,
    (),
    np.arange(20) % 3 == 0,
    np.arange(40).reshape(20, 2) % 7 == 1,
    (np.arange(40).reshape(20, 2) % 7 == 1, slice(1, 2)),
    (np.array([4, 2]), ..., slice(3)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_views_are_indexed_like_arrays(index: Any) -> None:
    ours, theirs = both(40, GREY, ACTIONS, 2)
    add_all((ours, theirs), random_transitions(GREY, ACTIONS, 2, 15))
    for view, array in ((ours.observations, theirs.observations), (ours.next_observations, theirs.next_observations)):
        assert (view.shape, view.dtype, len(view)) == (array.shape, array.dtype, len(array))
        np.testing.assert_array_equal(view[index], array[index], strict=True)
        np.testing.assert_array_equal(np.asarray(view), array, strict=True)


@pytest.mark.parametrize(
    "index",
    [(0, slice(None), [1, 2]), ([0, 1], [0, 1], [2, 3]), (slice(None), [0], slice(None), 0), (None, 3)],
    ids=str,
)
def test_keys_that_arrays_read_in_another_way_are_refused(index: Any) -> None:
    ours, _ = both(40, GREY, ACTIONS, 2)
    with pytest.raises(ValueError, match="cannot index compressed observations"):
        ours.observations[index]


def test_it_is_accepted_where_a_replay_buffer_is() -> None:
    assert issubclass(CompressedReplayBuffer, ReplayBuffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # SB3's warns of memory that it allocates at once
        CompressedReplayBuffer(10_000_000, spaces.Box(0, 255, (4, 84, 84), np.uint8), ACTIONS)
