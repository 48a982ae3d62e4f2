"""A copy does what its original does, whatever was changed since that was made; and the original is left alone."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory import worlds
from tests.core.factory.worlds import rollout

Env = Any


def _fresh(env: Env) -> None:
    """Leave it as it was made."""


def _reset(env: Env) -> None:
    env.reset(seed=5)


def _midway(env: Env) -> None:
    env.reset(seed=5)
    env.action_space.seed(1)
    for _ in range(5):
        env.step(env.action_space.sample())


def _ended(env: Env) -> None:
    _midway(env)
    while True:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return


def _again(env: Env) -> None:
    _ended(env)
    env.reset()


STAGES = [_fresh, _reset, _midway, _ended, _again]


@pytest.mark.sample(ci=8)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "InvertedPendulum-v5"])
def test_an_instance_in_any_stage_is_copied(env_id: str, stage: Callable[[Env], None]) -> None:
    env = gym.make(env_id, max_episode_steps=30)
    stage(env)
    copy = as_factory(env)()
    assert rollout(copy) == rollout(env)
    copy.close()
    env.close()


def _push_harder(self: Env, action: Any) -> float:
    return float(self.gain) * 7 * (int(action) - 1)


CHANGES: dict[str, Callable[[Env], object]] = {
    "a wrapper": lambda env: _time_limit(env).__setattr__("_max_episode_steps", 13),
    "the innermost": lambda env: setattr(env.unwrapped, "gain", 3.5),
    "nested": lambda env: setattr(env.unwrapped.rewards, "bonus", 11.0),
    "an array in place": lambda env: env.unwrapped.weights.__setitem__(1, -2.0),
    "a function": lambda env: setattr(env.unwrapped, "push", lambda action: 0.5 * action),
    "a bound method": lambda env: setattr(env.unwrapped, "push", types.MethodType(_push_harder, env.unwrapped)),
    "a space": lambda env: setattr(env.unwrapped, "action_space", gym.spaces.Discrete(2)),
    "a counter": lambda env: setattr(env.unwrapped, "ticks", 1_000),
}


def _time_limit(env: Env) -> Env:
    while not isinstance(env, gym.wrappers.TimeLimit):
        env = env.env
    return env


def _make_line() -> Env:
    return gym.make("worlds/Line-v0", max_episode_steps=20)


MAKERS: dict[str, Callable[[], Env]] = {
    "made": _make_line,
    "with a pickle of its own": lambda: gym.make("worlds/EzLine-v0", max_episode_steps=20),
    "over what cannot be copied": lambda: gym.make("worlds/Sealed-v0", max_episode_steps=20),
    "under a wrapper that tells": lambda: gym.make(worlds.Told(_make_line(), 3.0).spec, max_episode_steps=20),
    "under one that does not": lambda: gym.wrappers.TimeLimit(worlds.Scaled(_make_line(), 3.0), 20),
    "constructed": lambda: gym.wrappers.TimeLimit(worlds.EzLine(), 20),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_each_change_shows(change: Callable[[Env], object]) -> None:
    env = _make_line()
    _midway(env)
    change(env)
    assert rollout(env) != rollout(_make_line())


@pytest.mark.sample(quick=2, ci=12)
@pytest.mark.parametrize("without", ["a bound method", "a function"])  # each is in the place of the other
@pytest.mark.parametrize("stage", [_midway, _fresh])
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_what_was_changed_since_is_in_the_copy(
    make: Callable[[], Env], stage: Callable[[Env], None], without: str
) -> None:
    env = make()
    stage(env)
    for name, change in CHANGES.items():
        if name != without:
            change(env)
    assert rollout(as_factory(env)()) == rollout(env)


def test_a_generator_that_no_reset_seeds_draws_differently_in_each_copy() -> None:
    env = worlds.Noisy(_make_line())
    state = env.noise.bit_generator.state
    factory = as_factory(env)
    assert factory.origin == "graft"
    one, other = factory(), factory()
    assert rollout(one) != rollout(other)
    assert env.noise.bit_generator.state == state
    again = [make() for make in factory.for_workers(2, seed=1)]
    assert rollout(again[0]) != rollout(again[1])
    assert rollout(factory.for_workers(2, seed=1)[1]()) == rollout(factory.for_workers(3, seed=1)[1]())


def test_running_statistics_are_carried() -> None:
    env = gym.wrappers.NormalizeObservation(_make_line())
    rollout(env, steps=60)
    copy = as_factory(env)()
    np.testing.assert_array_equal(copy.obs_rms.mean, env.obs_rms.mean)
    assert rollout(copy) == rollout(env)


def test_masses_of_mujoco_are_kept() -> None:
    env = gym.make("HalfCheetah-v5", max_episode_steps=20)
    env.unwrapped.model.body_mass[1] *= 3
    env.unwrapped.model.opt.gravity[2] = -3.0
    copy = as_factory(env)()
    its = rollout(copy)
    assert its == rollout(env)
    assert its != rollout(gym.make("HalfCheetah-v5", max_episode_steps=20))


@pytest.mark.sample(ci=10)
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
@pytest.mark.parametrize("stage", STAGES)
def test_the_instance_is_only_read(make: Callable[[], Env], stage: Callable[[Env], None]) -> None:
    env = make()
    stage(env)
    twin = make()
    stage(twin)
    assert env.spec is None or env.spec  # the specification is kept from here on
    before = fingerprint(env)
    held = {name: id(value) for name, value in vars(env.unwrapped).items()}
    worlds.EVENTS.clear()
    as_factory(env)
    assert worlds.EVENTS == []
    assert fingerprint(env).differences(before) == []
    assert {name: id(value) for name, value in vars(env.unwrapped).items()} == held
    if stage is not _fresh:
        assert env.unwrapped.np_random.bit_generator.state == twin.unwrapped.np_random.bit_generator.state
    if stage in (_reset, _midway, _again):
        assert env.step(1)[0].tolist() == twin.step(1)[0].tolist()


def test_asking_for_a_factory_leaves_no_trace_of_having_asked() -> None:
    env = _make_line()
    as_factory(env)
    layer = env
    while layer is not env.unwrapped:
        assert layer._cached_spec is None
        layer = layer.env
    assert env.unwrapped._np_random is None


def test_one_that_raises_when_it_is_stepped_is_copied_and_raises_likewise() -> None:
    env = gym.make("worlds/Raising-v0")
    factory = as_factory(env)
    assert factory.examination is not None
    assert factory.examination.step_seconds is None
    copy = factory()
    copy.reset()
    with pytest.raises(ArithmeticError, match="no move 1 here"):
        copy.step(1)
    env.unwrapped.gain = 4.0
    assert as_factory(env)().unwrapped.gain == 4.0


def test_one_that_nobody_knows_how_to_step_is_compared_as_it_stands() -> None:
    env = worlds.Turned()
    env.angle = 0.5
    factory = as_factory(env)
    assert factory.origin == "graft"
    assert factory.examination is not None
    assert factory.examination.step_seconds is None
    assert factory().angle == 0.5


def test_without_verification_the_instance_is_grafted() -> None:
    env = _make_line()
    env.unwrapped.gain = 3.0
    factory = as_factory(env, verify=False)
    assert (factory.origin, factory.examination) == ("graft", None)
    assert rollout(factory()) == rollout(env)


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_every_way_to_start_the_process_finds_the_same(start_method: str) -> None:
    env = _make_line()
    env.unwrapped.gain = 3.0
    assert as_factory(env, start_method=start_method)().unwrapped.gain == 3.0


class _Gone:
    """What a weak proxy stood for."""


class HoldsProxy(gym.Wrapper[Any, Any, Any, Any]):
    held = weakref.proxy(_Gone())

    def reset(self, **options: Any) -> Any:
        _ = GONE
        return self.env.reset(**options)


GONE = HoldsProxy.held


def test_classes_and_modules_may_hold_dead_weak_proxies() -> None:
    env = HoldsProxy(gym.make("CartPole-v1"))
    assert rollout(as_factory(env)()) == rollout(env)
