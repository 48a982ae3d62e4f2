"""Every task of dm_control's suite, and of its composer, copied in the middle of an episode."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("dm_control")

from benchmarks.mutations import try_changes
from rl_ext_core.factory import _graft
from tests.core.devices.processes import run
from tests.core.factory.grafting import assert_copied, begin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from dm_control import composer, manipulation, suite
    from dm_control.suite.wrappers import action_noise, action_scale

QUICK = [("cartpole", "balance"), ("humanoid", "run"), ("quadruped", "fetch"), ("fish", "swim")]
CMU = ("run_walls", "run_gaps", "go_to_target", "heterogeneous_forage")
RODENT = ("escape_bowl", "run_gaps", "two_touch")
# These draw what they observe, or their terrain: in processes of their own, which have a decision on the renderer.
LOCOMOTION = [
    *(f"basic_cmu_2019.cmu_humanoid_{name}(np.random.RandomState(0))" for name in CMU),
    *(f"basic_rodent_2020.rodent_{name}(np.random.RandomState(0))" for name in RODENT),
    "soccer.load(team_size=2, random_state=0, walker_type=soccer.WalkerType.BOXHEAD)",
    "suite.load('quadruped', 'escape', task_kwargs={'random': 0})",
    "pixels.Wrapper(suite.load('cartpole', 'balance', task_kwargs={'random': 0}), pixels_only=False)",
    "manipulation.load('reach_site_vision', seed=0)",
]
MAZES = [
    "basic_cmu_2019.cmu_humanoid_maze_forage(np.random.RandomState(0))",
    "basic_rodent_2020.rodent_maze_forage(np.random.RandomState(0))",
]
DRAWN = """
resolve("cpu", render="cpu", renderer="dm_control").apply()
import logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import numpy as np
from dm_control import manipulation, suite
from dm_control.locomotion import soccer
from dm_control.locomotion.examples import basic_cmu_2019, basic_rodent_2020
from dm_control.suite.wrappers import pixels
from rl_ext_core.factory import _graft
from tests.core.devices.processes import run
from tests.core.factory.grafting import assert_copied, begin
"""
# Those with images take seconds a step where the CPU renders.
QUICKEST = "reach_site_features"
FEATURES = [name for name in manipulation.ALL if name.endswith("_features")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def task(domain: str, name: str) -> Any:
    return suite.load(domain, name, task_kwargs={"random": 0})


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize(("domain", "name"), QUICK)
def test_a_task_of_the_suite_is_copied_and_does_the_same(domain: str, name: str) -> None:
    environment = task(domain, name)
    copy = assert_copied(environment)
    assert copy.physics.data.ptr.model is copy.physics.model.ptr
    copy.physics.named.data.qpos[0] = 0.25
    assert copy.physics.data.qpos[0] == 0.25 != environment.physics.data.qpos[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("domain", "name"), [pair for pair in suite.ALL_TASKS if pair not in QUICK and pair[1] != "escape"]
)
def test_so_is_every_other_task(domain: str, name: str) -> None:
    assert_copied(task(domain, name))


def test_wrappers_are_copied_too() -> None:
    environment = action_scale.Wrapper(
        action_noise.Wrapper(task("reacher", "easy"), scale=0.1), minimum=-2.0, maximum=2.0
    )
    assert_copied(environment)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == QUICKEST else pytest.mark.exhaustive) for n in FEATURES]
)
def test_a_task_of_the_composer_is_copied_and_does_the_same(name: str) -> None:
    copy = assert_copied(manipulation.load(name, seed=0), steps=4)
    assert isinstance(copy, composer.Environment)


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", LOCOMOTION)
def test_so_is_what_draws_what_it_observes(line: str) -> None:
    ended = run(DRAWN, f"assert_copied({line}, steps=8)\nanswer = 'copied'")
    assert ended.answer == "copied", ended.stderr


def test_a_maze_is_refused_by_name() -> None:
    labmaze = pytest.importorskip("labmaze")
    with pytest.raises(_graft.Refused, match=r"_native_maze .*RandomMaze"):
        _graft.dumps([labmaze.RandomMaze(height=11, width=11)])


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("labmaze") is None, reason="needs labmaze")
@pytest.mark.parametrize("line", MAZES)
def test_mazes_are_refused_for_a_generator_of_theirs_that_cannot_be_read(line: str) -> None:
    ended = run(DRAWN, f"environment = {line}\nbegin(environment)\n_graft.dumps(environment)")
    assert re.search(r"Refused: \S*_maze\._native_maze .*RandomMaze", ended.error), ended.stderr


CHANGED: dict[str, tuple[Callable[[], Any], int]] = {
    "reach_site": (lambda: manipulation.load("reach_site_features", seed=0), 20_000),
    # Tasks of one domain differ in how they reward.
    **{domain: (lambda d=domain, n=name: task(d, n), 150) for domain, name in reversed(suite.ALL_TASKS[2:])},
}


def nothing_is_lost(make: Callable[[], Any], least: int) -> None:
    environment = make()
    begin(environment)
    outcome = try_changes(environment)
    assert outcome.silent == []
    assert outcome.carried >= least
    assert len(outcome.refused) + outcome.elsewhere <= outcome.carried / 20


def test_each_of_two_hundred_changes_is_in_the_copy() -> None:
    nothing_is_lost(lambda: task("acrobot", "swingup"), 190)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGED)
def test_no_change_is_lost_in_silence(name: str) -> None:
    nothing_is_lost(*CHANGED[name])
