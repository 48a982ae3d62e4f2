"""Every environment that gymnasium can make here, copied in the middle of an episode."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest

from rl_ext_core.factory import _graft
from tests.core.factory.grafting import assert_faithful, copied, different, equal, made

if importlib.util.find_spec("ale_py") is not None:
    import ale_py

    gym.register_envs(ale_py)

QUICK = [
    "CartPole-v1",
    "Acrobot-v1",
    "Blackjack-v1",
    "FrozenLake-v1",
    "HalfCheetah-v5",
    "LunarLander-v3",
    "ALE/Pong-v5",
]


# ALE reads two of this game's counters into the wrong variables when it restores a state: the copy is refused.
WRONG_IN_ALE = "ALE/MiniatureGolf-v5"


def _others() -> Iterator[Any]:
    newest: dict[str, str] = {}
    for name, spec in gym.registry.items():
        if spec.namespace == "ALE" or (spec.namespace is None and str(spec.entry_point).startswith("gymnasium.envs")):
            newest[f"{spec.namespace}/{spec.name}"] = name
    for name in sorted(set(newest.values()) - set(QUICK)):
        wrong = [pytest.mark.xfail(raises=AssertionError)] if name == WRONG_IN_ALE else []
        yield pytest.param(name, marks=wrong)


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.mark.parametrize("name", QUICK)
def test_a_copy_is_the_original_and_does_the_same(name: str) -> None:
    environment = made(name)
    copy = assert_faithful(environment)
    environment.close()
    copy.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(_others()))
def test_so_is_that_of_every_other_environment(name: str) -> None:
    test_a_copy_is_the_original_and_does_the_same(name)


def test_a_copy_of_a_vectorised_environment_does_the_same() -> None:
    environment = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    environment.reset(seed=0)
    environment.step(environment.action_space.sample())
    copy = copied(environment)
    assert different(environment, copy) == []
    environment.reset(seed=1)
    copy.reset(seed=1)
    for _ in range(20):
        action = environment.action_space.sample()
        assert equal(environment.step(action)[:4], copy.step(action)[:4])


def test_emulators_in_one_library_are_made_anew_by_their_specification() -> None:
    environment = gym.make_vec("ALE/Pong-v5", num_envs=2)
    copy = copied(environment)
    assert equal(environment.reset(seed=1)[0], copy.reset(seed=1)[0])
    for _ in range(20):
        action = environment.action_space.sample()
        assert equal(environment.step(action)[:4], copy.step(action)[:4])


def test_environments_in_other_processes_are_refused_by_name() -> None:
    environment = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")
    try:
        with pytest.raises(_graft.Refused, match=r"processes share|another process"):
            _graft.dumps(environment)
    finally:
        environment.close()
