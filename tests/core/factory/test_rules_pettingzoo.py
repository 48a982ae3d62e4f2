"""Every environment of PettingZoo that can be made here, one agent after the other and all at once."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pettingzoo")

from benchmarks.mutations import try_changes
from tests.core.factory.grafting import assert_copied, begin, copied

NAMES = [
    *("classic.connect_four_v3", "classic.rps_v2", "classic.chess_v6", "classic.go_v5", "classic.leduc_holdem_v4"),
    *("classic.texas_holdem_v4", "classic.texas_holdem_no_limit_v6", "classic.tictactoe_v3", "classic.hanabi_v5"),
    *("butterfly.cooperative_pong_v6", "butterfly.knights_archers_zombies_v11", "butterfly.pistonball_v6"),
    *("sisl.multiwalker_v9", "sisl.pursuit_v5"),
]
# What is left of contacts from one step to the next, the solvers of pymunk and Box2D do not show completely.
CONTACTS = ("butterfly.pistonball_v6", "sisl.multiwalker_v9")
PARALLEL = ["classic.rps_v2", *NAMES[-5:]]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(name: str, kind: str = "env", **options: Any) -> Any:
    try:
        environment = getattr(importlib.import_module(f"pettingzoo.{name}"), kind)(**options)
        environment.reset(seed=0)
    except ImportError as error:
        pytest.skip(str(error))
    return environment


@pytest.mark.sample(quick=0, ci=4)
@pytest.mark.parametrize("name", NAMES)
def test_agents_that_take_turns_do_the_same_in_a_copy(name: str) -> None:
    assert_copied(made(name), steps=60, at_once=name not in CONTACTS)


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("name", PARALLEL)
def test_so_do_those_that_act_together(name: str) -> None:
    assert_copied(made(name, "parallel_env"), steps=12, at_once=name not in CONTACTS)


@pytest.mark.slow
def test_conversions_and_wrappers_are_copied_too() -> None:
    from pettingzoo.utils import aec_to_parallel, parallel_to_aec, wrappers

    assert_copied(parallel_to_aec(made("classic.rps_v2", "parallel_env", max_cycles=9)), steps=12)
    assert_copied(aec_to_parallel(made("classic.rps_v2", max_cycles=9)), steps=12)
    assert_copied(
        wrappers.MultiEpisodeParallelEnv(made("classic.rps_v2", "parallel_env", max_cycles=9), num_episodes=3)
    )


def test_what_was_changed_since_it_was_made_is_in_the_copy() -> None:
    environment = made("butterfly.pistonball_v6", n_pistons=6)
    begin(environment)
    ball, space = environment.unwrapped.ball, environment.unwrapped.space
    ball.velocity, ball.mass, space.gravity = (3.0, -1.5), 0.5, (0.0, 300.0)
    environment.unwrapped.time_penalty = -9.0
    world = copied(environment).unwrapped
    assert (tuple(world.ball.velocity), world.ball.mass, tuple(world.space.gravity)) == ((3.0, -1.5), 0.5, (0.0, 300.0))
    assert world.time_penalty == -9.0
    assert world.ball in world.space.bodies
    assert world.ball is not ball


@pytest.mark.sample(ci=5)
@pytest.mark.parametrize("name", NAMES)
def test_no_change_is_lost_in_silence(name: str) -> None:
    environment = made(name)
    begin(environment, 20)
    outcome = try_changes(environment)
    assert outcome.silent == []
    assert outcome.carried > 25
    # Of pymunk, how the solver runs is set by the constructor alone.
    assert len(outcome.refused) <= (2 if name == "butterfly.pistonball_v6" else 0)
