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

from benchmarks.mutations import try_changes
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
def test_an_environment_is_copied_as_it_is_and_does_the_same() -> None:
    # Without hard_reset, the model is not compiled anew by resets: what was changed in it lasts.
    environment = made(hard_reset=False, horizon=6)
    body = environment.sim.model.body_name2id("cube_main")
    environment.sim.model.body_mass[body] = 4.5
    environment.reward_scale, environment.note = 3.0, {"mine": [1, 2]}
    wrapper = GymWrapper(environment)
    copy = assert_copied(wrapper, steps=8).env
    assert copy.sim is not environment.sim
    assert copy.sim.data._data.model is copy.sim.model._model
    assert copy.sim.model.body_mass[body] == copy.sim.model._model.body_mass[body] == 4.5
    assert (copy.reward_scale, copy.note) == (3.0, {"mine": [1, 2]})
    assert np.may_share_memory(copy.robots[0].base_pos, copy.sim.data.xpos)
    copy.hard_reset = True
    copy.reset()
    assert copy.sim.model.body_mass[body] < 4.5


VARIATIONS = [
    *({"name": name} for name in sorted(set(REGISTERED_ENVS) - {"Lift"})),
    *({"robots": robot} for robot in ("IIWA", "UR5e", "Kinova3", "Jaco", "PandaOmron", "Tiago", "SpotWithArm")),
    *({"controller": controller} for controller in ("BASIC", "HYBRID_MOBILE_BASE", "WHOLE_BODY_IK")),
    *({"wrapper": wrapper} for wrapper in (DomainRandomizationWrapper, VisualizationWrapper)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", VARIATIONS, ids=str)
def test_so_is_every_other(options: dict[str, Any]) -> None:
    from robosuite.controllers import load_composite_controller_config

    wrapper, controller = options.pop("wrapper", None), options.pop("controller", None)
    if controller:
        options["controller_configs"] = load_composite_controller_config(controller=controller)
    environment = made(**options)
    if wrapper:
        colours = {"randomize_color": False} if wrapper is DomainRandomizationWrapper else {}
        environment = wrapper(environment, **colours)
    assert type(assert_copied(environment, steps=10)) is type(environment)


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
from tests.core.factory.grafting import begin, copied, equal
env = robosuite.make(
    "Lift", robots="Panda", has_renderer=False, use_camera_obs=True, camera_heights=48, camera_widths=64, horizon=9,
    camera_depths=True, hard_reset=False,
)
"""


@pytest.mark.slow
def test_cameras_are_copied_with_what_draws_them_as_it_is_set() -> None:
    ended = run(
        CAMERAS,
        """
        begin(env, 1)
        context = env.sim._render_context_offscreen
        context.vopt.geomgroup[1] = 0
        context.scn.flags[0] = 0
        def draw(env): return env.sim.render(width=64, height=48, camera_name="agentview").tolist()
        before, copy = draw(env), copied(env)
        theirs = copy.sim._render_context_offscreen
        answer = [before == draw(copy), int(theirs.vopt.geomgroup[1]), type(theirs.gl_ctx).__name__]
        mine, seen = env.step([0] * env.action_dim), copy.step([0] * env.action_dim)
        image = seen[0]["agentview_image"]
        answer += [equal(mine, seen), list(image.shape), float(image.std())]
        """,
    )
    assert ended.error == "", ended.stderr
    *same, spread = ended.answer
    assert same in ([True, 0, context, True, [48, 64, 3]] for context in ("EGLGLContext", "OSMesaGLContext"))
    assert spread > 10
