"""SharedMemoryVecEnv returns the bits of SubprocVecEnv."""

from __future__ import annotations

import functools
import itertools
import warnings
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
)

from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import FAST, action_of, assert_equal, open_vec_env_pair, rollout
from tests.sb3_ext.vec_test_envs import ACTIONS, OBSERVATIONS, REWARDS, RandomEnv, Returning
from tests.worker_servers import cold_server


def compare_with_subproc(
    build: Any, steps: int = 25, n_envs: int = 3, n_workers: int | None = None, **options: Any
) -> list[Any]:
    """Check that a rollout equals that of SubprocVecEnv, and return its results."""
    space = build().action_space
    space.seed(0)
    actions = [action_of(space, n_envs) for _ in range(steps)]
    with open_vec_env_pair([build] * n_envs, n_workers=n_workers, **options) as (ours, theirs):
        assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
        seen = rollout(ours, actions)
        assert_equal(seen, rollout(theirs, actions))
        assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"), "what the environments keep")
    return seen


# Every kind of observation, action and reward; each reward with and without infos.
CASES = [
    (observations, actions, rewards, infos, n_workers)
    for observations, actions, (rewards, infos), n_workers in zip(
        itertools.cycle(OBSERVATIONS),
        itertools.cycle(ACTIONS),
        itertools.product(REWARDS, [True, False]),
        itertools.cycle([1, 2, None]),
        strict=False,
    )
]


@pytest.mark.sample(quick=3, ci=14)
@pytest.mark.parametrize(("observations", "actions", "rewards", "infos", "n_workers"), CASES)
def test_rollouts_equal_those_of_subproc_vec_env(
    observations: str, actions: str, rewards: str, infos: bool, n_workers: int | None
) -> None:
    seen = compare_with_subproc(
        functools.partial(RandomEnv, observations, actions, rewards, infos=infos), n_workers=n_workers
    )
    dones = np.array([step[2] for step in seen[2:]])
    assert 0 < dones.sum() < dones.size
    all_infos = [info for step in seen[2:] for info in step[3]]
    assert {info["TimeLimit.truncated"] for info in all_infos} == {True, False}
    assert any("terminal_observation" in info for info in all_infos)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        ("Discrete", [np.array([1, 2, 3], np.int32), (np.int64(1), 2.0, True), np.array([[1], [2], [3]])]),
        ("Box", [np.ones((3, 2), int), [[1, 2]] * 3, np.ones((2, 3), np.float32).T, np.array([None, "a", 3], object)]),
    ],
)
def test_actions_of_other_dtypes_and_shapes_arrive_unchanged(space: str, actions: list[Any]) -> None:
    with open_vec_env_pair([functools.partial(RandomEnv, actions=space)] * 3, n_workers=2) as (ours, theirs):
        assert_equal(rollout(ours, actions), rollout(theirs, actions))
        assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"))


def test_seeds_and_options_apply_to_next_reset_only() -> None:
    with open_vec_env_pair([RandomEnv] * 3, n_workers=2) as (ours, theirs):
        for venv in (ours, theirs):
            assert venv.seed(4) == [4, 5, 6]
            venv.set_options([{"level": 1}, {}, {"level": 3}])
        assert_equal(ours.reset(), theirs.reset())
        assert_equal(ours.reset_infos, theirs.reset_infos)
        assert ours.reset_infos[0] == {"seed": 4, "options": {"level": 1}}
        ours.reset()
        assert ours.reset_infos == [{"seed": None, "options": None}] * 3


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 200])),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0.5, 1.75], np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 300])),
        (spaces.Box(-9, 9, (2,), np.float32), np.array([1, 2])),
        (spaces.Dict(a=spaces.Box(0, 255, (1,), np.uint8)), {"a": np.array([-1])}),
    ],
)
def test_observations_of_other_dtypes_equal_those_of_dummy_vec_env(space: Any, observation: Any) -> None:
    build = functools.partial(Returning, space, observation)
    ours, theirs = SharedMemoryVecEnv([build] * 2, FAST), DummyVecEnv([build] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = ours.reset()
        rest = [ours.step(np.zeros(2, np.int64))[0] for _ in range(11)]
        ours.reset()
    ours.close()
    assert_equal([first, *rest], [theirs.reset(), *(theirs.step(np.zeros(2, np.int64))[0] for _ in range(11))])
    # Lossy casts warn exactly once.
    whole, kind = (observation["a"], np.uint8) if isinstance(observation, dict) else (observation, space.dtype)
    fits = kind == np.float32 or np.array_equal(np.asarray(whole).astype(kind), whole)
    said = [str(one.message).partition(", cannot hold")[0] for one in caught if one.category is UserWarning]
    text = f"environment 0 returns observations with values that the dtype of its observation space, {space}"
    assert said == ([] if fits else [text])


# -- other methods


class MarkWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper with the attribute ``mark``."""

    mark = 3


def make_wrapped_env() -> gym.Env[Any, Any]:
    """Make a RandomEnv with three wrappers."""
    return MarkWrapper(gym.wrappers.TimeLimit(Monitor(RandomEnv()), 7))


def call_methods(venv: VecEnv) -> list[Any]:
    """Call all other methods of a VecEnv, and return the results."""
    venv.set_attr("label", "one", indices=1)
    venv.set_attr("level", [1, 2])
    venv.seed(1)
    venv.reset()
    return [
        venv.get_attr("label"),
        venv.get_attr("level", indices=[2, 0]),
        venv.get_attr("label", indices=-1),
        venv.get_attr("mark", indices=range(2)),
        [venv.has_attr(name) for name in ("label", "given", "nothing") if hasattr(SubprocVecEnv, "has_attr")],
        venv.env_method("double", 4, plus=1),
        venv.env_method("double", 4, indices=[2, 2, 1, -3]),
        venv.env_method("double", 4, indices=[]),
        venv.get_attr("action_space"),
        [venv.env_is_wrapped(kind) for kind in (Monitor, MarkWrapper, gym.wrappers.TimeLimit, gym.Wrapper, RandomEnv)],
        venv.env_is_wrapped(MarkWrapper, indices=0),
        venv.get_images(),
        venv.render(),
        venv.render("rgb_array"),
        venv.render_mode,
        venv.metadata,
        venv.num_envs,
        venv.unwrapped is venv,
    ]


def test_methods_return_results_of_subproc_vec_env() -> None:
    with open_vec_env_pair([make_wrapped_env] * 3, n_workers=2) as (ours, theirs):
        assert_equal(call_methods(ours), call_methods(theirs))


def test_workers_import_neither_torch_nor_stable_baselines3() -> None:
    with cold_server(), closing(SharedMemoryVecEnv([RandomEnv] * 2)) as venv:
        venv.reset()
        venv.step(np.zeros(2, np.int64))
        assert venv.env_method("loaded", ["torch", "stable_baselines3", "sb3_ext", "gymnasium"]) == [["gymnasium"]] * 2
