from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from tensordict import TensorDict
from torchrl import envs as upstream
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    FrameSkipTransform,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    ToTensorImage,
    check_env_specs,
    default_info_dict_reader,
)
from torchrl.envs import transforms as t

from tests.environments import change_results
from tests.torchrl_ext.comparison import INNER, assert_same, assert_same_rollouts, make_vector_env, seeded_rollout
from tests.torchrl_ext.environments import STAGGERED, DictWalk, SamplingEnv, VectorRewards, Walk, WalkWithoutInfos, box
from torchrl_ext import GymEnv, GymWrapper

gymnasium.register_envs(ale_py)
Build = Callable[[Any], Any]  # Builds an environment with one of the two classes.


def build_both(build: Build) -> tuple[Any, Any]:
    return build(GymWrapper), build(upstream.GymWrapper)


def wrapping(make: Callable[[], Any], **options: Any) -> Build:
    return lambda cls: cls(make(), **options)


def by_id(env_id: str, **options: Any) -> Build:
    return lambda cls: (GymEnv if cls is GymWrapper else upstream.GymEnv)(env_id, **options)


def batch(make: Any, mode: str, count: int = 3, **options: Any) -> Build:
    asynchronous = options.pop("asynchronous", False)
    return lambda cls: cls(make_vector_env(make, count, mode, asynchronous=asynchronous), **options)


def with_transforms(build: Build, *transforms: Callable[[], Any]) -> Build:
    return lambda cls: build(cls).append_transform(Compose(*(transform() for transform in transforms)))


def make_pong() -> Any:
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env, noop_max=5), 4)


pendulum = by_id("Pendulum-v1")
cartpole, cheetah = partial(gymnasium.make, "CartPole-v1"), partial(gymnasium.make, "HalfCheetah-v5")
short_cheetah = partial(cheetah, max_episode_steps=40)
norm = partial(ObservationNorm, loc=0.5, scale=2.0, in_keys=["observation"])
norm_place = partial(ObservationNorm, loc=0.5, scale=2.0, in_keys=[("inner", "place")])
AGE = [Unbounded((), dtype=torch.int64)]
cut = (RewardSum, InitTracker, partial(StepCounter, 5))
nested = with_transforms(wrapping(DictWalk), norm_place, *cut)

CASES: dict[str, Build] = {
    "CartPole": wrapping(cartpole),
    "Pendulum": wrapping(partial(gymnasium.make, "Pendulum-v1")),
    "HalfCheetah": wrapping(short_cheetah),
    "Pong": wrapping(make_pong),
    "Walk": wrapping(Walk),
    "nested": wrapping(DictWalk),
    "two rewards": wrapping(VectorRewards),
    "categorical": by_id("CartPole-v1", categorical_action_encoding=True),
    "Pendulum, frames skipped": by_id("Pendulum-v1", frame_skip=3),
    "pixels and more": by_id("CartPole-v1", from_pixels=True, pixels_only=False),
    "infos": lambda cls: cls(short_cheetah()).auto_register_info_dict(),
    "infos by name": lambda cls: cls(Walk()).set_info_dict_reader(default_info_dict_reader(["age"], spec=AGE)),
    **{
        f"infos by name, {info} at resets": lambda cls, info=info: cls(
            change_results(Walk(), lambda observation, _: (observation, info), "reset")
        ).set_info_dict_reader(default_info_dict_reader(["age"], spec=AGE))
        for info in (None, {})
    },
    "HalfCheetah, normalized": with_transforms(
        wrapping(short_cheetah), DoubleToFloat, norm, partial(RewardScaling, 0.1, 2.0)
    ),
    "image, cut": with_transforms(
        wrapping(partial(SamplingEnv, spaces.Box(0, 255, (8, 8, 3)), spaces.Discrete(3))),
        *(partial(ToTensorImage, in_keys=["pixels"]), RewardSum, partial(StepCounter, 4)),
    ),
    "nested, cut": nested,
    "frame skip as a transform": with_transforms(wrapping(partial(Walk, 6, 20)), partial(FrameSkipTransform, 2)),
    "text": wrapping(partial(SamplingEnv, spaces.Dict(place=box(4), mission=spaces.Text(9)), spaces.Discrete(3))),
    "texts alone": wrapping(partial(SamplingEnv, spaces.Text(5), spaces.Text(5))),
    "actions, discretized": with_transforms(pendulum, partial(t.ActionDiscretizer, 5)),
    "actions, scaled": with_transforms(pendulum, t.ActionScaling),
    "actions, several": with_transforms(pendulum, partial(t.MultiAction, stack_rewards=False)),
    # Upstream supports these two modes.
    "CartPole, SameStep": batch(cartpole, "SameStep"),
    "staggered, SameStep": batch(STAGGERED, "SameStep"),
    "staggered, Disabled": batch(STAGGERED, "Disabled"),
    "nested, Disabled": batch(DictWalk, "Disabled", device="cpu"),
    "nested, Disabled, infos": lambda cls: batch(DictWalk, "Disabled")(cls).auto_register_info_dict(),
    "processes, SameStep": batch(STAGGERED, "SameStep", 2, asynchronous=True),
    "SameStep, under transforms": with_transforms(batch(STAGGERED, "SameStep"), RewardSum, InitTracker, StepCounter),
    "Disabled, cut": with_transforms(batch(WalkWithoutInfos, "Disabled"), *cut),
    "nested, Disabled, cut": with_transforms(batch(DictWalk, "Disabled"), *cut),
    "serial": lambda cls: SerialEnv(2, partial(cls, Walk())),
    "serial, of transforms": lambda cls: SerialEnv(2, partial(nested, cls)),
}


def collect(env: Any) -> Any:
    env.set_seed(2)
    torch.manual_seed(2)
    collector = Collector(env, None, frames_per_batch=48, total_frames=144)
    found = torch.stack([data.clone() for data in collector])
    collector.shutdown()
    return found


@pytest.mark.sample(quick=10)
@pytest.mark.parametrize("name", CASES)
def test_rollouts_equal_upstream(name: str) -> None:
    ours, theirs = build_both(CASES[name])
    # No episode of STAGGERED ends with the 69th step. Otherwise upstream's next reset would return the observation of
    # the last step.
    rollout = assert_same_rollouts(ours, theirs, 69)
    assert rollout["next", "done"].any() or name.startswith(("Pendulum", "Pong", "action"))
    if name in ("categorical", "HalfCheetah, normalized", "nested, cut", "Disabled, cut"):
        assert_same_rollouts(ours, theirs, 70, break_when_any_done=True)
    assert (ours.device, ours.full_action_spec) == (theirs.device, theirs.full_action_spec)
    check_env_specs(ours)
    if name in ("CartPole", "nested, cut", "SameStep, under transforms", "Disabled, cut", "serial"):
        assert_same(collect(ours), collect(theirs))
    for env in (ours, theirs):
        env.close(raise_if_closed=False)


def test_sequence_observations_equal_upstream() -> None:
    space = spaces.Sequence(box(2), stack=True)
    ours, theirs = build_both(wrapping(partial(SamplingEnv, space, spaces.Discrete(3))))
    found, expected = (seeded_rollout(env, 12, return_contiguous=False) for env in (ours, theirs))
    for one, other in zip(found.unbind(0), expected.unbind(0), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("action", [[0, 0], [2, 0], [1, 1], [0.4, 0.6], [False, True]])
@pytest.mark.parametrize("count", [None, 2])
def test_vectors_that_are_not_one_hot_are_decoded_as_upstream(action: list[Any], count: int | None) -> None:
    def received_actions(env: Any) -> list[int]:
        given = torch.tensor(action if count is None else [action] * count)
        env.step(env.reset().set("action", given))
        return [int(single.received[-1]) for single in getattr(env._env, "envs", [env._env])]

    make = partial(SamplingEnv, box(2), spaces.Discrete(2))
    ours, theirs = build_both(wrapping(make) if count is None else batch(make, "Disabled", count))
    assert received_actions(ours) == received_actions(theirs)


def test_vector_rewards_of_a_batch_follow_its_reward_space() -> None:
    assert batch(VectorRewards, "Disabled")(GymWrapper).reward_spec.shape == (3, 1)  # gymnasium has none
    inner: Any = make_vector_env(Walk, 3, "Disabled")
    inner.reward_space = spaces.Box(-np.inf, np.inf, (3, 2), np.float32)
    env = GymWrapper(
        change_results(inner, lambda place, reward, *rest: (place, np.stack([reward, -reward], -1), *rest))
    )
    check_env_specs(env)
    reward = env.rollout(20, break_when_any_done=False)["next", "reward"]
    assert reward.shape == (3, 20, 2)
    assert torch.equal(reward[..., 0], -reward[..., 1])


# -- manual resets and seeds


def test_partial_reset_equals_upstream() -> None:
    def play(env: Any) -> Any:
        data = env.reset(seed=4)
        torch.manual_seed(1)
        data = env.step_mdp(env.step(env.rand_action(data)))
        return env.reset(data.set("_reset", torch.tensor([[True], [False], [True]])))

    assert_same(*map(play, build_both(batch(WalkWithoutInfos, "Disabled"))))
    for env in build_both(wrapping(Walk)):
        with pytest.raises(RuntimeError, match="Partial resets"):
            env.reset(env.reset().set("_reset", torch.zeros(1, dtype=torch.bool)))


def test_seeds_equal_upstream() -> None:
    ours, theirs = build_both(wrapping(Walk))
    assert ours.set_seed(5) == theirs.set_seed(5)
    assert ours.set_seed(5, static_seed=True) == 5
    assert_same(ours.reset(seed=7), theirs.reset(seed=7))
    assert_same(ours.reset(), theirs.reset())


def test_num_workers_builds_a_parallel_env_of_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(GymWrapper, "make_parallel", lambda *args: asked.append(args))
    GymWrapper(Walk(5, 5), num_workers=3, copy=False)
    ((count, make),) = asked
    assert count == 3
    assert type(make()) is GymWrapper
    assert make().rollout(3).shape == (3,)


# -- entries that a policy adds to the data


def extras(env: Any) -> dict[str, Any]:
    """Return entries of a policy: a hidden state in nested containers, a flag and a reward."""
    shape = env.batch_size
    state = TensorDict({"h": torch.ones(*shape, 3), "deeper": TensorDict({"c": torch.ones(*shape, 2)}, shape)}, shape)
    return {"hidden": state, "flag": torch.zeros(*shape, 1), "reward": torch.full((*shape, 1), 7.0)}


BUILDERS: dict[str, Build] = {
    name: wrapping(INNER[name]) for name in ("single", "nested", "SameStep", "nested, Disabled")
}
builders = pytest.mark.parametrize("name", BUILDERS)


@builders
def test_entries_written_by_a_policy_are_carried_on(name: str) -> None:
    def play(env: Any) -> list[Any]:
        env.set_seed(0)
        torch.manual_seed(0)
        data = env.reset().update(extras(env))
        if "inner" in data:
            data["inner", "memory"] = torch.full((*env.batch_size, 2), 4.0)
        seen = []
        for _ in range(8):
            before, data = env.step_and_maybe_reset(env.rand_action(data))
            seen += [before, data.copy()]
        return seen

    for one, other in zip(*map(play, build_both(BUILDERS[name])), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("steps", [1, 3], ids=["within an episode", "at its end"])
@builders
def test_entry_added_to_one_tensordict_is_not_visible_in_others(name: str, steps: int) -> None:
    """This holds for all pairs of TensorDicts, including those that upstream keeps apart."""
    env = BUILDERS[name](GymWrapper)
    env.set_seed(0)
    data = env.reset().update(extras(env))
    for _ in range(steps):
        before, data = env.step_and_maybe_reset(env.rand_action(data))
    places = {"before": before.exclude("next"), "next": before["next"], "root": data}
    for here, place in places.items():
        kept = {key: other.clone() for key, other in places.items() if key != here}
        containers = [place, *(part for part in place.values(True) if isinstance(part, TensorDict))]
        for container in containers:
            container["a new entry"] = torch.zeros(env.batch_size)
        for key, other in kept.items():
            assert_same(places[key], other)
        for container in containers:
            container.pop("a new entry")
