from __future__ import annotations

import re
from typing import Any

import pytest

from rl_ext_core.devices import decision, resolve
from rl_ext_core.errors import DeviceConflictError
from tests.core.devices.fakes.build import require_osmesa
from tests.core.devices.machines import machine
from tests.core.devices.run_code import run
from tests.requirements import find_python

RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")

# Draws with a renderer. EGL device 0 is Mesa's, llvmpipe, on a machine without a GPU.
DRAW = """
from rl_ext_core.devices import _probe
def is_drawn_by_mesa(renderer="mujoco"): return "llvmpipe" in _probe._create_context(renderer)[0]
"""
ON_MESA = "resolve('cpu', render='same', renderer={renderer!r})"
# A machine with four GPUs that EGL lists in reverse order: cuda:2 is EGL device 1.
ON_GPU_2 = (
    "resolve('cuda:2', render='same', renderer={renderer!r}, inventory=machine(order=[3, 2, 1, 0]), environ={{}})"
)
WITH_OSMESA = "resolve('cpu', render='cpu', renderer={renderer!r}, inventory=machine(0, software=False), environ={{}})"


@pytest.mark.parametrize("renderer", ["mujoco", "robosuite"])
def test_apply_sets_only_the_decisions_variables_for_process_and_children(renderer: str) -> None:
    ended = run(
        f"""
        import subprocess, sys
        before = dict(os.environ)
        decision = {ON_GPU_2.format(renderer=renderer)}
        after_resolving = dict(os.environ)
        decision.apply()
        changed = {{n: v for n, v in os.environ.items() if before.get(n) != v}}
        gone = sorted(set(before) - set(os.environ))
        environ = dict(os.environ)
        decision.apply()  # which changes nothing
        again = environ == dict(os.environ)
        code = "import os; print(os.environ['MUJOCO_EGL_DEVICE_ID'])"
        inherited = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True).stdout.strip()
        answer = [before == after_resolving, changed, changed == decision.variables, gone, again, inherited]
        """
    )
    expected = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "1"}
    assert ended.answer == [True, expected, True, [], True, "1"]


def test_last_decision_applies_if_no_library_has_read_variables() -> None:
    """A wrong variable is unset. A decision without rendering sets nothing."""
    ended = run(
        DRAW,
        f"""
        answer = []
        for decision in (
            resolve("cpu"), {WITH_OSMESA.format(renderer="robosuite")}, {ON_GPU_2.format(renderer="mujoco")},
            {WITH_OSMESA.format(renderer="mujoco")}, {ON_MESA.format(renderer="mujoco")}, resolve("cpu"),
        ):
            decision.apply()
            answer.append(variables())
        answer.append(is_drawn_by_mesa())
        """,
        MUJOCO_EGL_DEVICE_ID="3",
        MUJOCO_GL="glfw",
    )
    osmesa, gpu, mesa = ["osmesa", None, "osmesa"], ["egl", "1", "egl"], ["egl", "0", "egl"]
    assert ended.answer == [["glfw", "3", None], osmesa, gpu, osmesa, mesa, mesa, True]


# The imported module, MUJOCO_GL at that time, the decision's renderer, and a pattern of the error, or "" for none.
IMPORT_CASES = [
    ("mujoco", None, "mujoco", r"mujoco\.\S*gl_context read MUJOCO_GL='' .* needs 'egl': .* above `import mujoco`"),
    ("mujoco", "osmesa", "gymnasium", r"PyOpenGL was imported for osmesa, .* above the first import of mujoco"),
    ("robosuite", "osmesa", "robosuite", r"binding_utils read MUJOCO_GL='osmesa' .* above `import robosuite`"),
    ("dm_control._render", "osmesa", "dm_control", r"_render read MUJOCO_GL='osmesa' .* `import dm_control`"),
    ("OpenGL.GL", None, "gymnasium", r"PyOpenGL was imported for glx, but this decision needs egl"),
    ("mujoco.egl", None, "gymnasium", r"PyOpenGL was imported for egl, but this decision needs osmesa"),
    ("mujoco", "egl", "mujoco", ""),
    ("mujoco", " EGL ", "mujoco", ""),
    ("mujoco", None, "gymnasium", ""),  # reads the variable when it renders first
    ("robosuite", None, "robosuite", ""),  # uses EGL by default
    ("dm_control._render", "egl", "dm_control", ""),
]


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize(("imported", "backend", "renderer", "says"), IMPORT_CASES)
def test_apply_after_import_raises_and_names_module(
    imported: str, backend: str | None, renderer: str, says: str
) -> None:
    """A library that has read the same value is not a conflict."""
    if backend == "osmesa" or "osmesa" in imported:
        require_osmesa()
    ended = run(
        f"""
        import sys, {imported}
        environ = dict(os.environ)
        try:
            {(WITH_OSMESA if says.endswith("osmesa") else ON_MESA).format(renderer=renderer)}.apply()
            answer = variables()
        except RuntimeError as error:
            from rl_ext_core.devices.decision import _applied
            unchanged = [environ == dict(os.environ), _applied is None]
            answer = [repr(error), *unchanged]
        """,
        **({} if backend is None else {"MUJOCO_GL": backend}),
    )
    if says:
        text, *unchanged = ended.answer
        assert unchanged == [True, True]
        assert re.match(f"DeviceConflictError.*{says}", text), text
    else:
        assert ended.answer == ["egl", "0", "egl"]


# Lines that create each renderer's display.
CREATE_DISPLAY = {
    "mujoco": "import mujoco; context = mujoco.GLContext(8, 8)",
    "gymnasium": "import mujoco.egl; context = mujoco.egl.GLContext(8, 8)",
    "dm_control": "import dm_control._render",
    "robosuite": "from robosuite.renderers.context.egl_context import EGLGLContext; context = EGLGLContext(8, 8)",
}


@pytest.mark.sample
@pytest.mark.parametrize("renderer", RENDERERS)
def test_apply_accepts_display_on_same_device_and_rejects_another(renderer: str) -> None:
    # EGL itself reports that Mesa's device, whose display is created here, has index 0.
    ended = run(
        f"""
        {CREATE_DISPLAY[renderer]}
        {ON_MESA.format(renderer=renderer)}.apply()
        environ = dict(os.environ)
        answer = []
        for decision in ({ON_GPU_2.format(renderer=renderer)}, {WITH_OSMESA.format(renderer=renderer)}):
            try:
                decision.apply()
            except RuntimeError as error:
                answer.append([repr(error), environ == dict(os.environ)])
        """,
        MUJOCO_GL="egl",
    )
    (other, kept), (osmesa, kept_too) = ended.answer
    assert [kept, kept_too] == [True, True]
    assert "already renders on EGL device 0" in other
    assert "this decision needs EGL device 1: call resolve(...).apply() above the first environment" in other
    assert "this decision needs OSMesa" in osmesa


def test_apply_after_a_failed_display_raises() -> None:
    ended = run(
        f"""
        import mujoco.egl as egl
        egl.create_initialized_egl_device_display = lambda: egl.EGL.EGL_NO_DISPLAY
        try:
            egl.GLContext(8, 8)
        except ImportError:
            {ON_MESA.format(renderer="mujoco")}.apply()
        """,
        MUJOCO_GL="egl",
    )
    assert "DeviceConflictError: mujoco.egl already renders on no device, because it failed" in ended.error


@pytest.mark.parametrize("renderer", ["gymnasium", "robosuite"])
def test_apply_in_fork_after_parents_display_raises_instead_of_hanging(renderer: str) -> None:
    ended = run(
        f"""
        {CREATE_DISPLAY["mujoco"]}
        decision = {ON_MESA.format(renderer=renderer)}
        decision.apply()
        from tests.forks import result_in_fork
        answer = result_in_fork(decision.apply)
        """,
        MUJOCO_GL="egl",
    )
    assert "DeviceConflictError: mujoco.egl had created its display before this process was forked" in ended.answer
    assert 'start_method="forkserver"' in ended.answer


def test_apply_in_fork_before_any_display_accepts_another_decision() -> None:
    ended = run(
        DRAW,
        f"""
        import mujoco
        {ON_GPU_2.format(renderer="mujoco")}.apply()
        def other():
            from rl_ext_core.devices.decision import _applied
            assert _applied is None
            {ON_MESA.format(renderer="mujoco")}.apply()
            return variables(), is_drawn_by_mesa()
        from tests.forks import result_in_fork
        answer = [result_in_fork(other), variables()]
        """,
        MUJOCO_GL="egl",
    )
    assert ended.answer == [str((["egl", "0", "egl"], True)), ["egl", "1", "egl"]]


@pytest.mark.slow
def test_mujoco_4_stores_backend_and_display_in_expected_modules() -> None:
    python = find_python("mujoco4")
    late = run(f"import mujoco\n{ON_MESA.format(renderer='mujoco')}.apply()", python=python)
    assert "gl_context read MUJOCO_GL='' when it was imported" in late.error
    rendering = run(
        DRAW,
        f"""
        import mujoco
        {ON_MESA.format(renderer="mujoco")}.apply()
        from rl_ext_core.devices.decision import display_of, egl_index_of
        answer = [is_drawn_by_mesa(), egl_index_of(display_of("mujoco"))]
        """,
        python=python,
        MUJOCO_GL="egl",
    )
    assert rendering.answer == [True, 0]


# Variables with which plain robosuite 1.5 fails.
UPSTREAM_FAILURES = [
    {"CUDA_VISIBLE_DEVICES": "1"},  # RuntimeError: The MUJOCO_EGL_DEVICE_ID ... between 0 and 0 ... got 1
    {"CUDA_VISIBLE_DEVICES": ""},  # ValueError: invalid literal for int()
    {"CUDA_VISIBLE_DEVICES": "GPU-3f2a"},
    {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "0"},  # AssertionError at import
    {"MUJOCO_GL": "glx"},  # FatalError: gladLoadGL error
    {"PYOPENGL_PLATFORM": "osmesa"},  # ImportError: Cannot use EGL rendering platform
]


@pytest.mark.sample
@pytest.mark.parametrize("variables", UPSTREAM_FAILURES, ids=str)
def test_decision_renders_where_plain_robosuite_fails(variables: dict[str, str]) -> None:
    robosuite = ON_MESA.format(renderer="robosuite")
    ended = run(DRAW, f"{robosuite}.apply()\nanswer = [is_drawn_by_mesa('robosuite'), variables()]", **variables)
    assert ended.error == ""
    assert ended.answer == [True, ["egl", "0", "egl"]]
    assert not re.search(r"Exception ignored|no attribute|Traceback", ended.stderr)


def test_decision_of_the_creator_stays_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"render": "same", "renderer": "mujoco", "inventory": machine(2), "environ": {}}
    one, other = (resolve(f"cuda:{number}", **options) for number in range(2))
    monkeypatch.setattr(decision, "_applied", one)
    monkeypatch.setattr(decision, "_has_warned", False)
    for _ in range(2):
        decision.apply_in_worker(other, is_creator=True)
    assert "built in the parent process" in caplog.text
    assert len(caplog.records) == 1
    with pytest.raises(DeviceConflictError, match="came with another"):
        decision.apply_in_worker(other, is_creator=False)
