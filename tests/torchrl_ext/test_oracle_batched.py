"""Vectorised environments: rollouts that TorchRL's wrapper gives, where it gives right ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torchrl import envs as upstream
from torchrl.envs import check_env_specs

from rl_ext_core.vector import SharedMemoryVectorEnv
from tests.torchrl_ext.comparing import assert_same, assert_same_rollouts, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Sampled, VectorRewards, Walk, box
from torchrl_ext import GymEnv, GymWrapper

DEVICES = pytest.mark.parametrize("device", [None, "cpu"])
BOTH_WAYS = pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
# Upstream takes only these two; infos that it adds to the data by itself are left out of the comparison.
INFOS = ("age", "length")


class Bare(Walk):
    """Without infos: upstream writes all of them into the data of an environment that resets in the same step."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {}

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


# No two end at once before their 77th step: where all do, upstream resets them twice in SameStep mode.
STAGGERED: list[Any] = [partial(Bare, length, length) for length in (7, 11, 13)]


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=30)


CASES = {
    "CartPole, SameStep": (cartpole, "SameStep"),
    "CartPole, Disabled": (cartpole, "Disabled"),
    "Pendulum, Disabled": (pendulum, "Disabled"),
    "staggered, SameStep": (STAGGERED, "SameStep"),
    "staggered, Disabled": (STAGGERED, "Disabled"),
    "Walk, Disabled": (Bare, "Disabled"),
}


@pytest.mark.sample
@DEVICES
@pytest.mark.parametrize(("make", "mode"), CASES.values(), ids=CASES)
def test_rollouts_are_those_of_upstream(make: Any, mode: str, device: str | None) -> None:
    ours, theirs = (cls(vector(make, 3, mode), device=device) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs, 120)
    assert rollout["next", "done"].any()
    check_env_specs(ours)


@pytest.mark.parametrize(("count", "mode"), [(1, "Disabled"), (2, "SameStep"), (4, "Disabled")])
def test_batches_of_any_size_until_the_first_is_done(count: int, mode: str) -> None:
    ours, theirs = (cls(vector(STAGGERED, count, mode)) for cls in (GymWrapper, upstream.GymWrapper))
    found, expected = (seeded_rollout(env, 50, break_when_any_done=True) for env in (ours, theirs))
    assert_same(found, expected)
    if mode == "Disabled":  # upstream's next reset is wrong in the other one: test_upstream_defects.py
        assert_same_rollouts(ours, theirs, 50, break_when_any_done=True)


def test_until_all_are_done() -> None:
    ours, theirs = (cls(vector(STAGGERED, 3, "SameStep")) for cls in (GymWrapper, upstream.GymWrapper))
    found, expected = (seeded_rollout(env, 50, break_when_all_done=True) for env in (ours, theirs))
    assert found.shape == (3, 13)
    assert_same(found, expected)


@BOTH_WAYS
def test_worker_processes(mode: str) -> None:
    ours, theirs = (cls(vector(STAGGERED, 2, mode, asynchronous=True)) for cls in (GymWrapper, upstream.GymWrapper))
    try:
        assert_same_rollouts(ours, theirs, 40)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_workers_that_share_memory(mode: str) -> None:
    ours = GymWrapper(SharedMemoryVectorEnv([cartpole] * 3, n_workers=2, autoreset_mode=mode, context="fork"))
    theirs = GymWrapper(SyncVectorEnv([cartpole] * 3, autoreset_mode=mode))
    assert_same_rollouts(ours, theirs, 60)
    ours.close()


@pytest.mark.parametrize("copy", [True, False])
def test_the_copies_make_no_difference(copy: Any) -> None:
    ours, theirs = GymWrapper(vector(Bare, 3, "Disabled"), copy=copy), upstream.GymWrapper(vector(Bare, 3, "Disabled"))
    assert_same_rollouts(ours, theirs, 100)


def test_nested_observations_and_their_infos() -> None:
    ours, theirs = (cls(vector(DictWalk, 3, "Disabled")) for cls in (GymWrapper, upstream.GymWrapper))
    assert_same_rollouts(ours, theirs, 60)
    ours, theirs = (
        cls(vector(DictWalk, 3, "Disabled")).auto_register_info_dict() for cls in (GymWrapper, upstream.GymWrapper)
    )
    rollout = assert_same_rollouts(ours, theirs, 60)
    assert set(INFOS) <= set(rollout["next"].keys())


def test_upstream_adds_infos_that_were_not_asked_for() -> None:
    found = GymWrapper(vector(Walk, 3, "SameStep")).rollout(5, break_when_any_done=False)
    expected = upstream.GymWrapper(vector(Walk, 3, "SameStep")).rollout(5, break_when_any_done=False)
    assert set(expected.keys(True)) - set(found.keys(True)) == {*INFOS, *(("next", key) for key in INFOS)}


SPACES = {
    "scalar": box(),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "Discrete": spaces.Discrete(4),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiDiscrete, all the same": spaces.MultiDiscrete([3, 3]),
    "MultiDiscrete, a matrix": spaces.MultiDiscrete([[3, 3], [3, 3]]),
    "MultiBinary": spaces.MultiBinary(4),
    "MultiBinary, a matrix": spaces.MultiBinary((2, 3)),
    "Dict": spaces.Dict(a=box(2), b=spaces.Discrete(3), c=box()),
    "nested Dict": spaces.Dict(a=spaces.Dict(x=box(2), y=spaces.Dict(z=box(1))), b=box(3)),
    "state, renamed": spaces.Dict(state=box(2)),
    "underscored": spaces.Dict(_a=box(2), b=box(1)),
}


@pytest.mark.sample
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
@pytest.mark.parametrize("name", SPACES)
def test_specs_and_values_of_every_space(name: str, categorical: bool, count: int) -> None:
    dict_action = isinstance(SPACES[name], spaces.Dict)  # which upstream refuses in a batch
    action_space = spaces.Discrete(2) if dict_action else SPACES[name]

    def make() -> Any:
        return Sampled(SPACES[name], action_space)

    def wrapped(cls: Any) -> Any:
        return cls(vector(make, count, "Disabled"), categorical_action_encoding=categorical)

    ours, theirs = wrapped(GymWrapper), wrapped(upstream.GymWrapper)
    assert_same_rollouts(ours, theirs, 12)
    for one, other in zip(ours._env.envs, theirs._env.envs, strict=True):
        assert [np.asarray(action).tolist() for action in one.received] == [
            np.asarray(action).tolist() for action in other.received
        ]
    check_env_specs(ours)


@pytest.mark.parametrize("action", [[[0, 0], [2, 0]], [[1, 1], [0, 3]], [[0.4, 0.6], [1.0, 0.0]], [[False, True]] * 2])
def test_vectors_that_are_not_one_hot(action: Any) -> None:
    def received(cls: Any) -> list[int]:
        env = cls(vector(lambda: Sampled(box(2), spaces.Discrete(2)), 2, "Disabled"))
        env.step(env.reset().set("action", torch.tensor(action)))
        return [int(single.received[-1]) for single in env._env.envs]

    assert received(GymWrapper) == received(upstream.GymWrapper)


@pytest.mark.parametrize("space", [spaces.Dict(a=box(2), b=spaces.Discrete(3)), spaces.Dict(a=box(2))], ids=str)
def test_dict_actions_of_a_batch(space: Any) -> None:
    env = GymWrapper(vector(lambda: Sampled(box(2), space), 3, "Disabled"), categorical_action_encoding=True)
    check_env_specs(env)
    env._env.envs[1].received.clear()
    rollout = env.rollout(4)
    received = env._env.envs[1].received
    for key in space.spaces:
        expected = rollout[key][1].tolist()
        assert [np.asarray(action[key]).tolist() for action in received] == expected


def test_environments_by_their_id() -> None:
    env = GymEnv("CartPole-v1", num_envs=2)
    try:
        assert env.batch_size == (2,)
        rollout = seeded_rollout(env, 60)
        assert rollout["next", "done"].any()
        # Upstream takes the mode for another: the step after an episode's last one resets and moves nothing.
        assert (rollout["next", "reward"] == 1).all()
    finally:
        env.close()


def test_vector_rewards() -> None:
    ours, theirs = (cls(vector(VectorRewards, 3, "Disabled")) for cls in (GymWrapper, upstream.GymWrapper))
    for env in (ours, theirs):
        assert env.reward_spec.shape == (3, 1)  # gymnasium's own vectorisation knows no reward spaces
    batch: Any = vector(Walk, 3, "Disabled")
    batch.reward_space = spaces.Box(-np.inf, np.inf, (3, 2), np.float32)
    step = batch.step

    def with_two_rewards(action: Any) -> Any:
        observation, reward, *rest = step(action)
        return (observation, np.stack([reward, -reward], -1), *rest)

    batch.step = with_two_rewards
    env = GymWrapper(batch)
    check_env_specs(env)
    rollout = env.rollout(20, break_when_any_done=False)
    assert rollout["next", "reward"].shape == (3, 20, 2)
    assert torch.equal(rollout["next", "reward"][..., 0], -rollout["next", "reward"][..., 1])


def test_a_reset_of_some_by_hand() -> None:
    def played(cls: Any) -> Any:
        env = cls(vector(Bare, 3, "Disabled"))
        data = env.reset(seed=4)
        torch.manual_seed(1)
        data = env.step_mdp(env.step(env.rand_action(data)))
        return env.reset(data.set("_reset", torch.tensor([[True], [False], [True]])))

    assert_same(played(GymWrapper), played(upstream.GymWrapper))
