"""Classes and functions that travel by value, in the process that packed them: public behaviour of factories there."""

from __future__ import annotations

import pickle
import sqlite3
from typing import Any

import gymnasium as gym
import numpy as np

from rl_ext_core.factory import as_factory


def local_class() -> type[gym.Env[Any, Any]]:
    """Make a class that no other process can import."""

    class Base(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-100, 100, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)
        gain = 1.0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.array([self.gain]), {}

        def step(self, action: Any) -> Any:
            return np.array([self.gain]), 0.0, False, False, {}

    class Env(Base):
        pass

    return Env


def test_adapters_and_overrides_may_be_made_inside_of_functions() -> None:
    kind = local_class()

    class Doubled(gym.ObservationWrapper[Any, Any, Any]):
        def observation(self, observation: Any) -> Any:
            return observation * 2

    [factory] = as_factory(kind(), verify=False).then(Doubled).for_workers(1, overrides=[{"gain": 4.0}])
    assert pickle.loads(pickle.dumps(factory))().reset()[0] == [8.0]


def test_what_is_not_packed_for_another_process_is_not_asked_for() -> None:
    """An adapter that cannot be packed is no obstacle here."""
    kind = local_class()
    connection = sqlite3.connect(":memory:")
    factory = as_factory(kind).then(lambda env: (connection, env)[1])
    assert factory().reset()[0] == [1.0]


class Link:
    """One of a chain, as trees of XML have them."""

    next: Any = None


def test_a_chain_is_copied_however_long_it_is() -> None:
    """From Python 3.12 on, no setting lets pickle in C go so deep."""
    kind = local_class()
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
