"""Every environment of robosuite, copied in the middle of an episode; those with cameras in a process of their own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("robosuite")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from rl_ext_core.devices import import_robosuite, resolve

    robosuite = import_robosuite(resolve("cpu"))
    from robosuite.environments.base import REGISTERED_ENVS
    from robosuite.wrappers import DomainRandomizationWrapper, GymWrapper, VisualizationWrapper

from benchmarks.mutations import copied, try_changes
from tests.core.devices.processes import run
from tests.core.factory.grafting import assert_copied, begin


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def made(name: str = "Lift", **options: Any) -> Any:
    robots = ["Panda", "Panda"] if name.startswith("TwoArm") else "Panda"
    settings = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "horizon": 20}
    return robosuite.make(name, **{"robots": robots, **settings, **options})


@pytest.mark.slow
def test_an_environment_is_copied_and_does_the_same() -> None:
    environment = made()
    copy = assert_copied(environment, steps=15)
    assert copy.sim is not environment.sim
    assert copy.sim.data._data.model is copy.sim.model._model


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(REGISTERED_ENVS) - {"Lift"}))
def test_so_is_every_other(name: str) -> None:
    assert_copied(made(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("robot", ["IIWA", "UR5e", "Kinova3", "Jaco", "PandaOmron", "Tiago", "SpotWithArm"])
def test_so_are_those_with_other_robots(robot: str) -> None:
    assert_copied(made(robots=robot), steps=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("controller", ["BASIC", "HYBRID_MOBILE_BASE", "WHOLE_BODY_IK"])
def test_so_are_those_with_other_controllers(controller: str) -> None:
    from robosuite.controllers import load_composite_controller_config

    environment = made(controller_configs=load_composite_controller_config(controller=controller))
    assert_copied(environment, steps=10)


@pytest.mark.slow
@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("wrapper", [DomainRandomizationWrapper, GymWrapper, VisualizationWrapper])
def test_so_are_those_in_robosuites_wrappers(wrapper: Any) -> None:
    options = {"randomize_color": False} if wrapper is DomainRandomizationWrapper else {}
    copy = assert_copied(wrapper(made(hard_reset=False), **options), steps=10)
    assert type(copy) is wrapper


@pytest.mark.slow
def test_what_was_changed_since_it_was_made_is_in_the_copy() -> None:
    environment = made(hard_reset=False)
    begin(environment)
    body = environment.sim.model.body_name2id("cube_main")
    environment.sim.model.body_mass[body] = 4.5
    environment.reward_scale, environment.note = 3.0, {"mine": [1, 2]}
    environment.robots[0].composite_controller.part_controllers["right"].kp = np.full(6, 33.0)
    copy = copied(environment)
    assert copy.sim.model.body_mass[body] == 4.5
    assert copy.sim.model._model.body_mass[body] == 4.5
    assert (copy.reward_scale, copy.note) == (3.0, {"mine": [1, 2]})
    assert copy.robots[0].composite_controller.part_controllers["right"].kp.tolist() == [33.0] * 6
    copy.reset()
    assert copy.sim.model.body_mass[body] == 4.5  # without hard_reset, it lasts


@pytest.mark.slow
def test_a_robots_view_of_the_simulators_memory_is_one_in_the_copy() -> None:
    environment = made()
    begin(environment)
    copy = copied(environment)
    assert np.may_share_memory(copy.robots[0].base_pos, copy.sim.data.xpos)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "least"), [("Lift", 1600), ("Wipe", 1600), ("TwoArmHandover", 2500)])
def test_no_change_is_lost_in_silence(name: str, least: int) -> None:
    environment = made(name)
    begin(environment)
    outcome = try_changes(environment)
    assert outcome.silent == []
    assert outcome.carried >= least
    assert len(outcome.refused) + outcome.elsewhere <= outcome.carried / 20


CAMERAS = """
import_robosuite(resolve("cpu", render="cpu", renderer="robosuite"))
import warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import robosuite
from tests.core.factory.grafting import assert_copied, begin, life
from benchmarks.mutations import copied
env = robosuite.make(
    "Lift", robots="Panda", has_renderer=False, use_camera_obs=True, camera_heights=48, camera_widths=64, horizon=9,
    camera_depths=True, hard_reset=False,
)
"""


@pytest.mark.slow
def test_cameras_are_copied_with_what_draws_them() -> None:
    ended = run(
        CAMERAS,
        """
        copy = assert_copied(env, steps=6)
        image = copy.step([0] * copy.action_dim)[0]["agentview_image"]
        answer = [list(image.shape), float(image.std()), type(copy.sim._render_context_offscreen.gl_ctx).__name__]
        """,
    )
    assert ended.error == "", ended.stderr
    shape, spread, context = ended.answer
    assert shape == [48, 64, 3]
    assert spread > 10
    assert context in ("EGLGLContext", "OSMesaGLContext")


@pytest.mark.slow
def test_what_is_drawn_is_set_in_the_copy_as_in_the_original() -> None:
    ended = run(
        CAMERAS,
        """
        begin(env)
        context = env.sim._render_context_offscreen
        context.vopt.geomgroup[1] = 0
        context.scn.flags[0] = 0
        def draw(env): return env.sim.render(width=64, height=48, camera_name="agentview").tolist()
        before = draw(env)
        other = copied(env)
        answer = [before == draw(other), int(other.sim._render_context_offscreen.vopt.geomgroup[1])]
        """,
    )
    assert ended.error == "", ended.stderr
    assert ended.answer == [True, 0]
