"""robosuite with and without a decision: failures of plain robosuite, and the patches that prevent them."""

from __future__ import annotations

import re

import pytest

from tests.core.devices.fakes.build import require_osmesa
from tests.core.devices.run_code import IN_CHILD, run

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
LOGGED = """
logged = []
class Collect(logging.Handler):
    def emit(self, record): logged.append(record.getMessage())
logging.getLogger("rl_ext_core.devices").addHandler(Collect())
"""
LIFT = """
def lift(steps=3, **options):
    import numpy, robosuite
    env = robosuite.make(
        "Lift", robots="Panda", has_renderer=False, use_camera_obs=True, camera_heights=84, camera_widths=84, **options
    )
    env.reset()
    for _ in range(steps):
        image = env.step(numpy.zeros(env.action_spec[0].shape))[0]["agentview_image"]
    return float(image.std())
"""
ON_MESA = "resolve('cpu', render='same', renderer='robosuite')"
WITH_OSMESA = "resolve('cpu', render='cpu', renderer='robosuite', inventory=machine(0, software=False), environ={})"
# GPU 2 is EGL device 1, which does not exist on the machine that runs the tests.
ON_A_GPU = "resolve('cuda:2', render='same', renderer='robosuite', inventory=machine(order=[3, 2, 1, 0]), environ={})"
APPLY_LINES = (f"{ON_MESA}.apply()\nimport robosuite", f"import_robosuite({ON_MESA})", "import_robosuite()")
NOISE = re.compile(r"Exception ignored|no attribute|Traceback")

# Variables, render_gpu_device_id, and the error of robosuite 1.5.
UPSTREAM_FAILURES = [
    ({"CUDA_VISIBLE_DEVICES": "1"}, -1, r"RuntimeError: The MUJOCO_EGL_DEVICE_ID .* between 0 and 0 .* got 1"),
    ({"CUDA_VISIBLE_DEVICES": "1,0"}, -1, r"RuntimeError: The MUJOCO_EGL_DEVICE_ID .* between 0 and 0 .* got 1"),
    ({"CUDA_VISIBLE_DEVICES": ""}, -1, r"ValueError: invalid literal for int\(\) with base 10: ''"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-3f2a"}, -1, r"ValueError: invalid literal for int\(\) .* 'GPU-3f2a'"),
    ({"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "0"}, -1, r"AssertionError: MUJOCO_EGL_DEVICE_ID needs"),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, r"AssertionError: specified device id is not made visible"),
    ({}, 1, r"ImportError: Cannot initialize a EGL device display\. .* PLATFORM_DEVICE"),
    ({"MUJOCO_GL": "glx"}, -1, r"FatalError: gladLoadGL error"),
    ({"PYOPENGL_PLATFORM": "osmesa"}, -1, r"ImportError: Cannot use EGL rendering platform"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("variables", "device_id", "error"), UPSTREAM_FAILURES)
def test_plain_robosuite_fails_with_known_errors(variables: dict[str, str], device_id: int, error: str) -> None:
    ended = run(DRAW, f"import robosuite\nanswer = draw({device_id})", **variables)
    assert ended.answer is None, "robosuite no longer fails in this case: its patch can be removed"
    assert re.search(error, ended.error), ended.stderr
    refused_at_import = "needs to be set to one of" in ended.error
    assert ("object has no attribute 'con'" in ended.stderr) is not refused_at_import


@pytest.mark.sample
@pytest.mark.parametrize("case", range(len(UPSTREAM_FAILURES)))
def test_decision_renders_where_plain_robosuite_fails(case: int) -> None:
    (variables, device_id, _), lines = UPSTREAM_FAILURES[case], APPLY_LINES[case % 3]
    ended = run(LOGGED, DRAW, lines, f"answer = [draw({device_id}), variables(), logged]", **variables)
    assert ended.error == ""
    context, settings, logged = ended.answer
    assert context == "EGLGLContext"
    assert settings == ["egl", "0", "egl"]
    assert [line.split(" is ")[0] for line in logged] == [f"render_gpu_device_id={device_id}"] * (device_id > 0)
    assert not NOISE.search(ended.stderr)


def test_decision_for_osmesa_renders() -> None:
    require_osmesa()
    ended = run(DRAW, f"{WITH_OSMESA}.apply()\nanswer = [draw(7), variables()]", CUDA_VISIBLE_DEVICES="GPU-3f2a")
    assert ended.answer == ["OSMesaGLContext", ["osmesa", None, "osmesa"]]
    assert not NOISE.search(ended.stderr)


@pytest.mark.slow
def test_other_device_id_is_ignored_with_one_warning() -> None:
    drawing = "answer = [draw(0), draw(5), draw(5), draw(), logged]"
    *contexts, logged = run(LOGGED, DRAW, f"{ON_MESA}.apply()", drawing).answer
    assert set(contexts) == {"EGLGLContext"}
    assert logged == [
        "render_gpu_device_id=5 is ignored: this process renders on EGL device 0, as decided. Use resolve(..., "
        "render=...) to choose a GPU"
    ]


def test_failing_device_raises_with_cause_and_allows_another_decision() -> None:
    ended = run(
        DRAW,
        f"""
        import traceback
        {ON_A_GPU}.apply()
        try:
            draw()
        except RuntimeError as error:
            traceback.print_exc()
            {ON_MESA}.apply()
            answer = [f"{{type(error).__name__}}: {{error}}", type(error.__cause__).__name__, draw()]
        """,
    )
    error, cause, drawn = ended.answer
    assert (cause, drawn) == ("RuntimeError", "EGLGLContext")
    assert re.search(r"DeviceUnavailableError: .* EGL device 1 \(GPU-bbbb2222\S+\): .* got 1\. .*rl-ext doctor", error)
    assert "RuntimeError: The MUJOCO_EGL_DEVICE_ID" in ended.stderr.split("The above exception was the direct cause")[0]
    assert "no attribute" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


# Lines that make a function of OpenGL fail, and a part of the error text.
OPENGL_FAILURES = [
    ("context.create_initialized_egl_device_display = lambda device_id: context.EGL.EGL_NO_DISPLAY", "PLATFORM_DEVICE"),
    ("context.EGL.eglCreateContext = lambda *_: None", "Cannot create an EGL context"),
    ("context.EGL.eglMakeCurrent = lambda *_: 0", "Failed to make the EGL context current"),
    ("mujoco.MjrContext = fail", "gladLoadGL error. Use"),
    ("context.EGL.eglCreateContext = fail_long", "GLError( err = 12289, description = "),
]


@pytest.mark.sample
@pytest.mark.parametrize(("breaking", "quoted"), OPENGL_FAILURES)
def test_failure_of_opengl_names_the_device_each_time(breaking: str, quoted: str) -> None:
    ended = run(
        DRAW,
        f"""
        {ON_MESA}.apply()
        import mujoco, robosuite, robosuite.renderers.context.egl_context as context
        from OpenGL.error import GLError
        def fail(*_): raise mujoco.FatalError("gladLoadGL error")
        def fail_long(*_): raise GLError(12289, description="not initialized")
        {breaking}
        answer = []
        for attempt in range(2):
            try:
                draw()
            except RuntimeError as error:
                answer.append(repr(error))
        """,
    )
    first, second = ended.answer
    assert first == second
    assert first.startswith("DeviceUnavailableError(")
    assert "robosuite cannot render on EGL device 0: " in first
    assert quoted in first
    assert not NOISE.search(ended.stderr)


def test_failure_of_opengl_under_osmesa_names_osmesa() -> None:
    require_osmesa()
    ended = run(
        DRAW,
        f"""
        {WITH_OSMESA}.apply()
        import mujoco
        def fail(*_): raise mujoco.FatalError("gladLoadGL error")
        mujoco.MjrContext = fail
        draw()
        """,
    )
    assert "DeviceUnavailableError: robosuite cannot render on the CPU (OSMesa): gladLoadGL error. Use" in ended.error


@pytest.mark.parametrize(
    ("change", "when"),
    [
        ("['MUJOCO_EGL_DEVICE_ID'] = '1'", "before"),
        (".pop('MUJOCO_EGL_DEVICE_ID')", "after"),
        ("['MUJOCO_GL'] = 'glx'", "before"),  # not tested after the import, when robosuite has already read it
    ],
)
def test_variable_changed_after_apply_raises(change: str, when: str) -> None:
    imports = [f"os.environ{change}", "import robosuite"]
    ended = run(DRAW, f"{ON_MESA}.apply()", *(imports if when == "before" else imports[::-1]), "draw()")
    name, decided = ("MUJOCO_GL", "egl") if "MUJOCO_GL'" in change else ("MUJOCO_EGL_DEVICE_ID", "0")
    says = f"DeviceConflictError: {name}=.* expected '{decided}', but something changed it after apply"
    assert re.search(says, ended.error)
    assert "Exception ignored" not in ended.stderr


def test_failed_import_succeeds_after_apply() -> None:
    ended = run(
        DRAW,
        f"""
        try:
            import robosuite
        except AssertionError:
            {ON_MESA}.apply()
            import robosuite
            answer = draw()
        """,
        CUDA_VISIBLE_DEVICES="3",
        MUJOCO_EGL_DEVICE_ID="0",
    )
    assert ended.answer == "EGLGLContext"


def test_apply_patches_robosuite_that_already_renders() -> None:
    ended = run(LOGGED, DRAW, f"draw()\n{ON_MESA}.apply()\nanswer = [draw(9), len(logged)]")
    assert ended.answer == ["EGLGLContext", 1]


def test_patched_modules_support_inspect_copy_and_reload() -> None:
    ended = run(
        DRAW,
        f"""
        import copy, importlib, inspect, sys
        {ON_MESA}.apply()
        kept = sys.modules.get("mujoco")
        sys.modules["mujoco"] = None
        try:
            import robosuite
        except ImportError:
            answer = [variables()]  # they are set again, although the import failed
        del sys.modules["mujoco"]
        import robosuite, robosuite.macros as other, robosuite.utils.binding_utils as binding
        source = inspect.getsource(binding.MjRenderContext.render)
        copy.copy(binding.__loader__)
        importlib.reload(binding)
        answer += [source.strip().splitlines()[0], binding.MjRenderContext.__del__.__name__, draw()]
        answer.append(type(other.__loader__).__name__)
        """,
    )
    assert ended.answer == [
        ["egl", "0", "egl"],
        "def render(self, width, height, camera_id=None, segmentation=False):",
        *("__del__", "EGLGLContext", "SourceFileLoader"),
    ]
    assert not NOISE.search(ended.stderr)


def test_fork_keeps_decision_and_raises_after_parents_display() -> None:
    ended = run(
        *(IN_CHILD, DRAW, f"{ON_MESA}.apply()\nimport robosuite"),
        "answer = in_child(draw)\ndraw()\nanswer = [answer, in_child(draw)]",
        CUDA_VISIBLE_DEVICES="",
    )
    drawn, refused = ended.answer
    assert drawn == "EGLGLContext"
    assert "DeviceConflictError('robosuite.renderers.context.egl_context had created its display before" in refused


def test_import_robosuite_names_missing_package_and_install_line() -> None:
    ended = run("import sys\nsys.modules['termcolor'] = None\nimport_robosuite()", CUDA_VISIBLE_DEVICES="")
    assert "import_robosuite() needs the package 'termcolor', which is not installed. Install it with" in ended.error
    assert 'rl-ext[robosuite]"' in ended.stderr


def test_import_robosuite_rejects_decision_for_another_renderer() -> None:
    ended = run(
        """
        try:
            import_robosuite(resolve("cpu", render="same", renderer="mujoco"))
        except ValueError as error:
            answer = [repr(error), import_robosuite(resolve("cpu")).__name__]
        """
    )
    error, name = ended.answer
    assert re.search(r"InvalidArgumentError\(.this decision is for mujoco \S+:.*renderer=\"robosuite\"", error)
    assert name == "robosuite"


@pytest.mark.slow
def test_environments_with_cameras_render_under_default_decision() -> None:
    drawing = "answer = [lift(render_gpu_device_id=1), lift(render_gpu_device_id=2), len(logged)]"
    ended = run(LOGGED, LIFT, APPLY_LINES[2], drawing, CUDA_VISIBLE_DEVICES="1,0")
    first, second, logged = ended.answer
    assert min(first, second) > 10, "the images are blank"
    assert logged == 2
    assert not NOISE.search(ended.stderr)
