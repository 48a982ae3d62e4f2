"""Classes and functions that travel by value, in the process that packed them: public behaviour of factories there."""

from __future__ import annotations

import pickle
import sqlite3
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from rl_ext_core.factory import as_factory


def local_class() -> tuple[type[gym.Env[Any, Any]], dict[str, Any]]:
    """Make a class that no other process can import."""
    made: dict[str, Any] = {"count": 0, "subclasses": []}

    class Base(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-100, 100, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)
        gain = 1.0

        def __init_subclass__(cls) -> None:
            made["subclasses"].append(cls.__name__)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            made["count"] += 1
            return np.array([self.gain]), {}

        def step(self, action: Any) -> Any:
            return np.array([self.gain]), 0.0, False, False, {}

    class Env(Base):
        pass

    return Env, made


def test_a_class_is_not_filled_anew_where_it_is_defined() -> None:
    kind, made = local_class()
    methods = dict(vars(kind.__mro__[1]))
    factories = [as_factory(kind(), verify=False), as_factory(kind), as_factory(lambda: kind())]
    travelled = [pickle.loads(cloudpickle.dumps(factory)) for factory in factories]
    kind.gain = 9.0  # type: ignore[attr-defined]
    for factory in (*factories, *travelled):
        env = factory()
        assert type(env) is kind
        assert env.reset()[0] == [9.0]
    assert dict(vars(kind.__mro__[1])) == methods
    # Nor is another made in order to find it.
    assert made["subclasses"] == ["Env"]


def test_what_is_called_here_is_the_callers_own() -> None:
    kind, made = local_class()
    for build in (kind, lambda: kind()):
        made["count"] = 0
        as_factory(build)().reset()
        assert made["count"] == 1


def test_a_copy_has_variables_of_its_own() -> None:
    class Held:
        pass

    kind, _ = local_class()
    env = kind()
    n = None

    def count() -> int:
        nonlocal n
        n = (n or 0) + 1
        return n

    env.count, env.total = count, lambda: n  # type: ignore[attr-defined]
    factory: Any = as_factory(env, verify=False)
    copy = factory()
    assert (copy.total(), copy.count(), copy.count(), copy.total()) == (None, 1, 2, 2)
    assert n is None
    assert factory().count() == 1


def test_adapters_and_overrides_may_be_made_inside_of_functions() -> None:
    kind, _ = local_class()

    class Doubled(gym.ObservationWrapper[Any, Any, Any]):
        def observation(self, observation: Any) -> Any:
            return observation * 2

    [factory] = as_factory(kind(), verify=False).then(Doubled).for_workers(1, overrides=[{"gain": 4.0}])
    assert pickle.loads(pickle.dumps(factory))().reset()[0] == [8.0]


def test_what_is_not_packed_for_another_process_is_not_asked_for() -> None:
    """An adapter that cannot be packed is no obstacle here."""
    kind, _ = local_class()
    connection = sqlite3.connect(":memory:")
    factory = as_factory(kind).then(lambda env: (connection, env)[1])
    assert factory().reset()[0] == [1.0]


class Link:
    """One of a chain, as trees of XML have them."""

    next: Any = None


def test_a_chain_is_copied_however_long_it_is() -> None:
    """From Python 3.12 on, no setting lets pickle in C go so deep."""
    kind, _ = local_class()
    env: Any = kind()
    env.chain = link = Link()
    for _ in range(20_000):
        link.next = Link()
        link = link.next
    link.next = env
    copy: Any = as_factory(env, verify=False)()
    length, link = 0, copy.chain
    while link is not copy:
        length, link = length + 1, link.next
    assert length == 20_001
