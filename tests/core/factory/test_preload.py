"""Which modules a fork server may import: the environment's packages, never the user's own."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from rl_ext_core.factory import as_factory
from rl_ext_core.factory.record import modules_of_callable, safe_to_preload
from tests.core.factory.copying import Line, Scaled


def make(depth: int = 1) -> Any:
    return make(depth - 1) if depth else gym.make("CartPole-v1")


@pytest.mark.parametrize(
    "source",
    [
        gym.make("CartPole-v1"),
        gym.spec("CartPole-v1"),
        "CartPole-v1",
        CartPoleEnv,
        CartPoleEnv(),
        make,
        functools.partial(gym.make, "CartPole-v1"),
        functools.partial(Scaled, CartPoleEnv()),
        lambda: CartPoleEnv(),
        Scaled(Line()),
    ],
)
def test_the_packages_of_an_environment_are_found(source: Any) -> None:
    assert as_factory(source, verify=False).preload == ("gymnasium",)


def test_the_users_own_modules_are_never_among_them() -> None:
    assert modules_of_callable(lambda: pytest.approx(1)) == ()
    assert safe_to_preload(["tests.core.factory.copying", "__main__", "matplotlib.pyplot", "gymnasium_robotics"]) == ()
