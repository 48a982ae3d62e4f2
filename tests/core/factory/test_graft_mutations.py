"""Nothing that is changed about an environment gets lost on the way into a copy without being noticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import wrappers

from benchmarks.mutations import try_changes
from tests.core.factory.grafting import act, made


def _pong() -> Any:
    import ale_py

    gym.register_envs(ale_py)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(made("ALE/Pong-v5", frameskip=1)), 4)


def _wrapped() -> Any:
    environment = wrappers.NormalizeReward(wrappers.NormalizeObservation(gym.make("Pendulum-v1")))
    return wrappers.TransformReward(wrappers.TimeAwareObservation(environment), lambda reward: reward * 2)


# How many changes a copy has to have at least, as a search that finds none would pass too.
WORLDS: dict[str, tuple[Callable[[], Any], int]] = {
    "classic": (lambda: gym.make("CartPole-v1"), 25),
    "wrapped": (_wrapped, 40),
    "toy_text": (lambda: gym.make("Blackjack-v1"), 10),
    "mujoco": (lambda: made("HalfCheetah-v5"), 100),
    "box2d": (lambda: made("LunarLander-v3"), 20),
    "vector": (lambda: gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"), 40),
    "atari": (_pong, 50),
}


@pytest.mark.sample(quick=3)
@pytest.mark.parametrize("name", WORLDS)
def test_a_copy_has_every_change(name: str) -> None:
    make, least = WORLDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment = make()
        environment.reset(seed=0)
        if name != "vector":
            act(environment, 3)
        outcome = try_changes(environment)
    assert outcome.silent == []
    assert outcome.carried >= least
    assert len(outcome.refused) <= outcome.carried / 20
    environment.close()
