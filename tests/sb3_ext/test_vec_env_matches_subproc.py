from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.environments import ACTIONS, OBSERVATIONS, REWARDS, RandomEnv, Returning
from tests.sb3_ext.vec_checks import FAST, action_of, assert_equal, open_vec_env_pair, rollout
from tests.worker_servers import cold_server


class MarkWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper with the attribute ``mark``."""

    mark = 3


def make_wrapped_env(*arguments: Any, **options: Any) -> gym.Env[Any, Any]:
    """Make a RandomEnv with wrappers; Monitor refuses rewards that are arrays."""
    env: gym.Env[Any, Any] = RandomEnv(*arguments, **options)
    return MarkWrapper(gym.wrappers.TimeLimit(env if "array" in arguments else Monitor(env), 7))


def draw_call(rng: np.random.Generator, space: spaces.Space[Any], n_envs: int) -> Callable[[VecEnv], Any]:
    """Draw a call of a VecEnv with random arguments."""
    number = int(rng.integers(99))
    indices: Any = [None, int(rng.integers(-n_envs, n_envs)), range(n_envs), rng.integers(0, n_envs, 4).tolist(), []][
        rng.integers(5)
    ]
    options = [{"level": number}, [{"level": index} for index in range(n_envs)]][rng.integers(2)]
    values = ("one", [1, number])[rng.integers(2)]
    kind = (Monitor, MarkWrapper, gym.wrappers.TimeLimit, gym.Wrapper, RandomEnv)[rng.integers(5)]
    name = ("label", "mark", "action_space", "render_mode")[rng.integers(4)]
    calls: list[Callable[[VecEnv], Any]] = [
        lambda venv: (venv.seed(number), venv.reset(), venv.reset_infos),
        lambda venv: (venv.set_options(options), venv.reset(), venv.reset_infos, venv.reset(), venv.reset_infos),
        lambda venv: venv.set_attr("label", values, indices=indices),
        lambda venv: venv.get_attr(name, indices=indices),
        lambda venv: venv.env_method("twice", number, plus=1, indices=indices),
        lambda venv: venv.env_is_wrapped(kind, indices=indices),
        lambda venv: [
            venv.has_attr(each) for each in ("label", "given", "nothing") if hasattr(SubprocVecEnv, "has_attr")
        ],
        lambda venv: (venv.get_images(), venv.render(), venv.render("rgb_array"), venv.render_mode, venv.metadata),
        lambda venv: (venv.num_envs, venv.unwrapped is venv, venv.observation_space, venv.action_space),
    ]
    if rng.random() < 0.3:
        return calls[rng.integers(len(calls))]
    action = action_of(space, n_envs)
    return lambda venv: [*venv.step(copy.deepcopy(action)), venv.reset_infos]


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


@pytest.mark.sample(quick=4, ci=14)
@pytest.mark.parametrize(("observations", "actions", "rewards", "infos", "n_workers"), CASES)
def test_random_calls_equal_those_of_subproc_vec_env(
    observations: str, actions: str, rewards: str, infos: bool, n_workers: int | None
) -> None:
    """Results do not change later, and environments receive the same actions."""
    build = functools.partial(make_wrapped_env, observations, actions, rewards, infos=infos)
    rng, space = np.random.default_rng(0), build().action_space
    space.seed(0)
    calls = [lambda venv: (venv.seed(5), venv.reset(), venv.reset_infos)]
    calls += [draw_call(rng, space, 3) for _ in range(60)]
    with open_vec_env_pair([build] * 3, n_workers=n_workers) as (ours, theirs):
        kept = [call(ours) for call in calls]
        copies = copy.deepcopy(kept)
        for number, (found, call) in enumerate(zip(kept, calls, strict=True)):
            assert_equal(without_times(found), without_times(call(theirs)), f"call {number}")
        assert_equal(kept, copies, "what the caller keeps")
        assert_equal(ours.env_method("all_given"), theirs.env_method("all_given"), "what the environments keep")
    steps = [found for found in kept if isinstance(found, list) and len(found) == 5]
    assert 0 < np.sum([step[2] for step in steps]) < 3 * len(steps)
    assert {info["TimeLimit.truncated"] for step in steps for info in step[3]} == {True, False}


def without_times(value: Any) -> Any:
    """Return a result without the times of the episodes."""
    if isinstance(value, (list, tuple)):
        return [without_times(part) for part in value]
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key != "t"}
    return value


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
        first, n_warned = ours.reset(), len(caught)
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
    assert n_warned == len(caught)  # in the reset


def test_workers_import_neither_torch_nor_stable_baselines3() -> None:
    with cold_server(), closing(SharedMemoryVecEnv([RandomEnv] * 2)) as venv:
        venv.reset()
        venv.step(np.zeros(2, np.int64))
        assert venv.env_method("loaded", ["torch", "stable_baselines3", "sb3_ext", "gymnasium"]) == [["gymnasium"]] * 2
