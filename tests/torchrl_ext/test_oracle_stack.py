"""Under transforms, in batches of processes and in collectors: what upstream's wrappers give there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl import envs as upstream
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    FrameSkipTransform,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    check_env_specs,
)

from tests.torchrl_ext.comparing import assert_same, assert_same_rollouts, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Sampled, Walk
from tests.torchrl_ext.test_oracle_batched import STAGGERED, Bare
from torchrl_ext import GymEnv, GymWrapper


def both(build: Callable[[Any], Any]) -> tuple[Any, Any]:
    return build(GymWrapper), build(upstream.GymWrapper)


def cheetah(cls: Any) -> Any:
    env = cls(gymnasium.make("HalfCheetah-v5", max_episode_steps=40))
    return TransformedEnv(
        env,
        Compose(DoubleToFloat(), ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]), RewardScaling(0.1, 2.0)),
    )


def image(cls: Any) -> Any:
    env = cls(Sampled(gymnasium.spaces.Box(0, 255, (8, 8, 3)), gymnasium.spaces.Discrete(3)))
    return TransformedEnv(env, Compose(ToTensorImage(in_keys=["pixels"]), RewardSum(), StepCounter(4)))


def nested(cls: Any) -> Any:
    norm = ObservationNorm(loc=0.5, scale=2.0, in_keys=[("inner", "place")])
    return TransformedEnv(cls(DictWalk()), Compose(norm, RewardSum(), InitTracker(), StepCounter(6)))


def batched(cls: Any, mode: str, make: Any, transforms: Callable[[], Any]) -> Any:
    return cls(vector(make, 3, mode)).append_transform(transforms())


def bookkeeping() -> Any:
    return Compose(RewardSum(), InitTracker(), StepCounter())


def cut() -> Any:
    return Compose(RewardSum(), InitTracker(), StepCounter(5))


STACKS: dict[str, Callable[[Any], Any]] = {
    "HalfCheetah, normalised": cheetah,
    "image, cut": image,
    "nested Dict, cut": nested,
    "frame skip as a transform": lambda cls: TransformedEnv(cls(Walk(6, 20)), FrameSkipTransform(2)),
    "batch, SameStep": partial(batched, mode="SameStep", make=STAGGERED, transforms=bookkeeping),
    "batch, Disabled": partial(batched, mode="Disabled", make=Bare, transforms=bookkeeping),
    "batch, Disabled, cut": partial(batched, mode="Disabled", make=Bare, transforms=cut),
    "nested batch, Disabled, cut": partial(batched, mode="Disabled", make=DictWalk, transforms=cut),
    "serial": lambda cls: SerialEnv(2, partial(cls, Walk())),
    "serial, under transforms": lambda cls: TransformedEnv(SerialEnv(3, partial(cls, DictWalk())), cut()),
    "serial, of transforms": lambda cls: SerialEnv(2, partial(nested, cls)),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", STACKS)
def test_under_transforms_and_in_series(name: str) -> None:
    ours, theirs = both(STACKS[name])
    # None of STAGGERED ends with the 69th step: upstream's next reset were wrong then (test_upstream_defects.py).
    rollout = assert_same_rollouts(ours, theirs, 69)
    assert rollout["next", "done"].any()
    check_env_specs(ours)


@pytest.mark.parametrize("name", ["HalfCheetah, normalised", "nested Dict, cut", "batch, Disabled, cut"])
def test_under_transforms_until_the_first_is_done(name: str) -> None:
    assert_same_rollouts(*both(STACKS[name]), 70, break_when_any_done=True)


def walk(cls: Any) -> Any:
    return cls(Walk())


@pytest.mark.slow
def test_in_processes() -> None:
    ours, theirs = both(lambda cls: ParallelEnv(2, [partial(walk, cls)] * 2, mp_start_method="fork"))
    try:
        assert_same_rollouts(ours, theirs, 40)
    finally:
        ours.close(raise_if_closed=False)
        theirs.close(raise_if_closed=False)


@pytest.mark.slow
def test_in_spawned_processes() -> None:
    ours, theirs = both(lambda cls: ParallelEnv(2, partial(walk, cls), metadata_from_workers=True))
    try:
        assert_same_rollouts(ours, theirs, 40)
    finally:
        ours.close(raise_if_closed=False)
        theirs.close(raise_if_closed=False)


COLLECTED: dict[str, Callable[[Any], Any]] = {
    "CartPole": lambda cls: cls(gymnasium.make("CartPole-v1")),
    "nested Dict": lambda cls: cls(DictWalk()),
    **{name: STACKS[name] for name in ("HalfCheetah, normalised", "batch, SameStep", "batch, Disabled, cut", "serial")},
}


@pytest.mark.parametrize("name", COLLECTED)
def test_collectors(name: str) -> None:
    def collected(cls: Any) -> list[Any]:
        env = COLLECTED[name](cls)
        env.set_seed(2)
        torch.manual_seed(2)
        collector = Collector(env, None, frames_per_batch=48, total_frames=144)
        try:
            return [batch.clone() for batch in collector]
        finally:
            collector.shutdown()

    batches = collected(GymWrapper)
    assert len(batches) == 3
    for one, other in zip(batches, collected(upstream.GymWrapper), strict=True):
        assert_same(one, other)


def test_transforms_that_environments_make_themselves() -> None:
    ours, theirs = (
        cls("CartPole-v1").append_transform(StepCounter(9)).append_transform(RewardSum())
        for cls in (GymEnv, upstream.GymEnv)
    )
    assert_same_rollouts(ours, theirs, 50)


def extras(env: Any) -> dict[str, Any]:
    """What a policy may leave in a TensorDict: a hidden state, in containers too, and beside nested observations."""
    shape = env.batch_size
    state = TensorDict({"h": torch.ones(*shape, 3), "deeper": TensorDict({"c": torch.ones(*shape, 2)}, shape)}, shape)
    return {"hidden": state, "flag": torch.zeros(*shape, 1), "reward": torch.full((*shape, 1), 7.0)}


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "single": lambda cls: cls(Bare(3, 3)),
    "nested": lambda cls: cls(DictWalk(3, 3)),
    "SameStep": lambda cls: cls(vector([partial(Bare, n, n) for n in (3, 5)], 2, "SameStep")),
    "Disabled": lambda cls: cls(vector(Bare, 2, "Disabled")),
    "nested, Disabled": lambda cls: cls(vector(DictWalk, 2, "Disabled")),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_a_policy_leaves_is_carried_on(name: str) -> None:
    def played(cls: Any) -> list[Any]:
        env = BUILDERS[name](cls)
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

    for one, other in zip(played(GymWrapper), played(upstream.GymWrapper), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("steps", [1, 3], ids=["within an episode", "at its end"])
@pytest.mark.parametrize("name", BUILDERS)
def test_containers_stay_apart(name: str, steps: int) -> None:
    """Writing an entry into one of the TensorDicts shows in no other: as little as upstream, or less."""
    env = BUILDERS[name](GymWrapper)
    env.set_seed(0)
    data = env.reset().update(extras(env))
    for _ in range(steps):
        before, data = env.step_and_maybe_reset(env.rand_action(data))
    places = {"before": before.exclude("next"), "next": before["next"], "root": data}
    for here, place in places.items():
        kept = {key: other.clone() for key, other in places.items() if key != here}
        for container in [place, *(part for part in place.values(True) if isinstance(part, TensorDict))]:
            container["a new entry"] = torch.zeros(env.batch_size)
        for key, other in kept.items():
            assert_same(places[key], other)
        place.update(place.exclude("a new entry"))
        for container in [place, *(part for part in place.values(True) if isinstance(part, TensorDict))]:
            container.pop("a new entry")


@pytest.mark.parametrize("name", ["nested", "nested, Disabled"])
def test_containers_stay_apart_where_the_root_had_none(name: str) -> None:
    env = BUILDERS[name](GymWrapper)
    before, data = env.step_and_maybe_reset(env.rand_action(env.reset()).exclude("inner"))
    before["next", "inner"].set("a new entry", torch.zeros(env.batch_size))
    assert sorted(data["inner"].keys()) == ["kind", "place"]


def test_the_second_rollout_of_a_seed_is_the_first_again() -> None:
    env = GymWrapper(vector(Walk, 3, "NextStep"))
    assert_same(seeded_rollout(env, 50), seeded_rollout(env, 50))
