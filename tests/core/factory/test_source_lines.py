from __future__ import annotations

import functools
from typing import Any

import gymnasium
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from rl_ext_core.factory import as_factory
from tests.core.factory import copying
from tests.core.factory.copying import Line, Scaled, try_rollout


class RecordsArguments(Scaled, gym.utils.RecordConstructorArgs):
    def __init__(self, env: gym.Env[Any, Any], scale: float = 2.0) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, scale=scale)
        Scaled.__init__(self, env, scale)


class Unrecorded(Line):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)


def double(action: Any) -> Any:
    return 2 * action


def _test_id(part: Any) -> str:
    return part if isinstance(part, str) else ""


INSTANCES = [
    (gym.make("copies/Line-v0", gain=3.0, length=4), "lambda: gymnasium.make('copies/Line-v0', gain=3.0, length=4)"),
    (
        gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=-1),
        "lambda: gymnasium.make('CartPole-v1', render_mode='rgb_array', max_episode_steps=-1)",
    ),
    (
        gym.wrappers.TimeLimit(RecordsArguments(gym.make("copies/Line-v0", gain=2.0)), 7),
        "lambda: TimeLimit(RecordsArguments(gymnasium.make('copies/Line-v0', gain=2.0)), 7)",
    ),
    (gym.wrappers.TransformReward(Line(), double), "lambda: TransformReward(Line(), double)"),
    (gym.wrappers.TransformReward(Line(), lambda r: r), "lambda: TransformReward(Line(), ...)"),
    (Scaled(Unrecorded(3.0)), "lambda: Scaled(Unrecorded(...))"),
    (Line(np.arange(100)), "lambda: Line(...)"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("env", "source"), INSTANCES, ids=_test_id)
def test_source_of_environments_builds_equal_environments_if_it_has_no_dots(env: Any, source: str) -> None:
    factory = as_factory(env, verify=False)
    assert factory.to_source() == source
    if "..." not in source:
        names = {
            **vars(copying),
            **vars(gym.wrappers),
            "gymnasium": gymnasium,
            "RecordsArguments": RecordsArguments,
            "double": double,
        }
        assert try_rollout(eval(source, names)()) == try_rollout(factory())


def test_source_of_an_environment_whose_id_is_no_longer_registered() -> None:
    gym.register("copies/Gone-v0", entry_point="tests.core.factory.copying:Line", max_episode_steps=5)
    env = gym.make("copies/Gone-v0", gain=2.0)
    del gym.registry["copies/Gone-v0"]
    factory = as_factory(env)
    assert factory.to_source() == "lambda: gymnasium.make('copies/Gone-v0', gain=2.0)"
    assert factory().unwrapped.gain == 2.0


# -- Modules that a fork server may import: the environment's packages, never the user's own.


def make(depth: int = 1) -> Any:
    """Make a CartPole. Its code names this recursive function itself."""
    return make(depth - 1) if depth else gym.make("CartPole-v1")


@pytest.mark.parametrize(
    "source",
    [
        *(gym.make("CartPole-v1"), gym.spec("CartPole-v1"), "CartPole-v1", CartPoleEnv, CartPoleEnv(), make),
        *(functools.partial(gym.make, "CartPole-v1"), functools.partial(Scaled, CartPoleEnv()), lambda: CartPoleEnv()),
    ],
)
def test_preload_contains_the_packages_of_the_environment(source: Any) -> None:
    assert as_factory(source, verify=False).preload == ("gymnasium",)


def test_preload_never_contains_the_users_own_modules() -> None:
    assert as_factory(lambda: (pytest, copying)).preload == ()
