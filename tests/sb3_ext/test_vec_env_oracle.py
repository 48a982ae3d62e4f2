"""What SubprocVecEnv returns, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ext.shared_memory_vec_env import SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import FAST, action_of, assert_equal, both, rollout
from tests.sb3_ext.vec_worlds import ACTIONS, OBSERVATIONS, REWARDS, Drawn, Returning, Reusing


def check(build: Any, steps: int = 25, n_envs: int = 3, n_workers: int | None = None, **options: Any) -> list[Any]:
    space = build().action_space
    space.seed(0)
    actions = [action_of(space, n_envs) for _ in range(steps)]
    with both([build] * n_envs, n_workers=n_workers, **options) as (ours, theirs):
        assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
        seen = rollout(ours, actions)
        assert_equal(seen, rollout(theirs, actions))
        assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"), "what the environments keep")
    return seen


@pytest.mark.parametrize("n_workers", [1, 2, None])
@pytest.mark.parametrize("observations", list(OBSERVATIONS))
def test_observations(observations: str, n_workers: int | None) -> None:
    seen = check(functools.partial(Drawn, observations), n_workers=n_workers)
    dones = np.array([step[2] for step in seen[2:]])
    assert 0 < dones.sum() < dones.size
    infos = [info for step in seen[2:] for info in step[3]]
    assert {info["TimeLimit.truncated"] for info in infos} == {True, False}
    assert any("terminal_observation" in info for info in infos)


@pytest.mark.parametrize("n_workers", [2, None])
@pytest.mark.parametrize("actions", list(ACTIONS))
def test_actions(actions: str, n_workers: int | None) -> None:
    check(functools.partial(Drawn, "Box", actions), n_workers=n_workers)


@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("rewards", list(REWARDS))
def test_rewards(rewards: str, infos: bool) -> None:
    check(functools.partial(Drawn, rewards=rewards, infos=infos), n_workers=2)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        ("Discrete", [np.array([1, 2, 3], np.int32), [1, 2, 3], (np.int64(1), 2.0, True), np.array([1.0, 2.0, 3.0])]),
        ("Discrete", [np.array([[1], [2], [3]]), np.array([1, 2, 3])[::-1], np.arange(6)[::2]]),
        ("Box", [np.ones((3, 2)), np.ones((3, 2), int), [[1, 2]] * 3, np.ones((2, 3), np.float32).T]),
        ("Box", [np.ones((3, 2), np.float16), np.ones((3, 1), np.float32), np.array([None, "a", 3], object)]),
    ],
)
def test_actions_of_other_dtypes_and_shapes_arrive_as_they_are(space: str, actions: list[Any]) -> None:
    with both([functools.partial(Drawn, actions=space)] * 3, n_workers=2) as (ours, theirs):
        assert_equal(rollout(ours, actions), rollout(theirs, actions))
        assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"))


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_every_start_method(start_method: str) -> None:
    check(functools.partial(Drawn, "Dict", "Box", "int"), n_workers=2, start_method=start_method)


def test_real_environments() -> None:
    def build() -> Any:
        return gym.make("CartPole-v1", max_episode_steps=15)

    with both([build] * 3, n_workers=2) as (ours, theirs):
        actions = np.random.default_rng(0).integers(2, size=(60, 3))
        assert_equal(rollout(ours, actions), rollout(theirs, actions))


def test_seeds_and_options_go_to_the_next_reset_only() -> None:
    with both([Drawn] * 3, n_workers=2) as (ours, theirs):
        for venv in (ours, theirs):
            assert venv.seed(4) == [4, 5, 6]
            venv.set_options([{"level": 1}, {}, {"level": 3}])
        assert_equal(ours.reset(), theirs.reset())
        assert_equal(ours.reset_infos, theirs.reset_infos)
        assert ours.reset_infos[0] == {"seed": 4, "options": {"level": 1}}
        ours.reset()
        assert ours.reset_infos == [{"seed": None, "options": None}] * 3


def test_the_last_observation_is_right_where_environments_write_to_one_place() -> None:
    """SB3's workers pickle it when the reset has overwritten it."""
    build = functools.partial(Reusing, "Box", infos=False)
    actions = [np.zeros(2, np.int64)] * 30
    ours = SharedMemoryVecEnv([build] * 2, FAST, n_workers=1)
    sane = SharedMemoryVecEnv([functools.partial(Drawn, infos=False)] * 2, FAST)
    try:
        seen = rollout(ours, actions)
        assert_equal(seen, rollout(sane, actions))
        assert any("terminal_observation" in info for step in seen[2:] for info in step[3])
    finally:
        ours.close()
        sane.close()


def test_floats_are_rounded_to_the_dtype_of_the_space_as_dummy_vec_env_does() -> None:
    build = functools.partial(Returning, spaces.Box(-1, 1, (2,), np.float32), np.array([1 / 3, 2 / 3]))
    ours, theirs = SharedMemoryVecEnv([build], FAST), DummyVecEnv([build])
    try:
        assert_equal(ours.reset(), theirs.reset())
    finally:
        ours.close()


dtypes = st.sampled_from([np.float32, np.float64, np.uint8, np.int16, np.int64])
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
boxes = st.builds(lambda shape, dtype: spaces.Box(0, 100, shape, dtype), shapes, dtypes)
discretes = st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 1000), st.integers(-500, 500))
multis = st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 300), min_size=1, max_size=4))
binaries = st.builds(spaces.MultiBinary, st.integers(1, 9))
flat = st.one_of(boxes, discretes, multis, binaries)
keys = st.text("abc_", min_size=1, max_size=3)
composed = st.one_of(
    flat,
    st.dictionaries(keys, flat, min_size=1, max_size=3).map(spaces.Dict),
    st.lists(flat, min_size=1, max_size=3).map(spaces.Tuple),
)


@settings(max_examples=12)
@given(observations=composed, actions=composed, rewards=st.sampled_from(list(REWARDS)), workers=st.integers(1, 3))
def test_random_spaces(observations: Any, actions: Any, rewards: str, workers: int) -> None:
    check(functools.partial(Drawn, observations, actions, rewards), steps=8, n_workers=workers)
