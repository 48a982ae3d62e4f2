"""robosuite with and without a decision: failures of plain robosuite, and variables that prevent them."""

from __future__ import annotations

import re

import pytest

from tests.core.devices.run_code import run

# Draws a small model with robosuite's own context, within a millisecond.
DRAW = """
def draw(device_id=-1):
    from robosuite.utils.binding_utils import MjRenderContextOffscreen, MjSim
    sim = MjSim.from_xml_string(
        "<mujoco><worldbody><light pos='0 0 3'/><camera name='above' pos='0 0 2'/>"
        "<geom type='sphere' size='.3' rgba='1 0 0 1'/></worldbody></mujoco>"
    )
    context = MjRenderContextOffscreen(sim, device_id=device_id)
    assert sim.render(width=32, height=32, camera_name="above").std() > 10, "nothing was drawn"
    return type(context.gl_ctx).__name__
"""
ON_MESA = "resolve('cpu', render='same', renderer='robosuite')"
NOISE = re.compile(r"Exception ignored|no attribute|Traceback")

# Variables and render_gpu_device_id with which plain robosuite 1.5 fails.
UPSTREAM_FAILURES = [
    ({"CUDA_VISIBLE_DEVICES": "1"}, -1),  # RuntimeError: The MUJOCO_EGL_DEVICE_ID ... between 0 and 0 ... got 1
    ({"CUDA_VISIBLE_DEVICES": ""}, -1),  # ValueError: invalid literal for int()
    ({"CUDA_VISIBLE_DEVICES": "GPU-3f2a"}, -1),
    ({"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "0"}, -1),  # AssertionError at import
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),  # AssertionError: specified device id is not made visible
    ({}, 1),  # ImportError: Cannot initialize a EGL device display
    ({"MUJOCO_GL": "glx"}, -1),  # FatalError: gladLoadGL error
    ({"PYOPENGL_PLATFORM": "osmesa"}, -1),  # ImportError: Cannot use EGL rendering platform
]


@pytest.mark.sample
@pytest.mark.parametrize(("variables", "device_id"), UPSTREAM_FAILURES)
def test_decision_renders_where_plain_robosuite_fails(variables: dict[str, str], device_id: int) -> None:
    ended = run(DRAW, f"{ON_MESA}.apply()\nimport robosuite\nanswer = [draw({device_id}), variables()]", **variables)
    assert ended.error == ""
    assert ended.answer == ["EGLGLContext", ["egl", "0", "egl"]]
    assert not NOISE.search(ended.stderr)


def test_ignored_device_id_of_an_environment_is_a_finding() -> None:
    ended = run(
        f"""
        {ON_MESA}.apply()
        import robosuite
        from rl_ext_core.devices import check_environment
        options = dict(robots="Panda", has_renderer=False, has_offscreen_renderer=False, use_camera_obs=False)
        kept = [robosuite.make("Lift", render_gpu_device_id=number, **options) for number in (-1, 0, 2)]
        answer = [[found.variable, found.severity, found.effect] for found in check_environment()]
        """
    )
    (found,) = ended.answer
    assert found[:2] == ["MUJOCO_EGL_DEVICE_ID", "warning"]
    assert found[2] == "robosuite ignores render_gpu_device_id=2, because this variable is set"
