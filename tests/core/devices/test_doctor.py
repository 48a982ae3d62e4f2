"""The doctor tells which GPU computes and which ones render, and what it says to type mends that."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from rl_ext_core.cli import main
from rl_ext_core.devices import Inventory
from rl_ext_core.devices.doctor import Question, Report, examine, replay
from rl_ext_core.devices.inventory import installed_versions
from tests.core.devices import processes
from tests.core.devices.fakes import build
from tests.core.devices.machines import egl, machine, uuid
from tests.core.devices.patients import CASES, EGL, NO_GPU, WITHOUT_EGL, report_of, shown

every_case = pytest.mark.parametrize("case", CASES)


def places(report: Report) -> dict[str, tuple[str, int | None, str | None, bool | None]]:
    return {found.name: (found.where, found.egl, found.uuid, found.with_compute) for found in report.renderers}


def test_a_machine_without_a_gpu_computes_on_the_cpu_and_says_why_and_how_it_renders() -> None:
    report = report_of("no GPU")
    assert report.decision is not None
    assert report.decision.device == "cpu"
    assert NO_GPU in report.decision.reason
    assert places(report)["robosuite"] == ("cpu", 0, None, True)
    assert "export MUJOCO_GL=egl PYOPENGL_PLATFORM=egl MUJOCO_EGL_DEVICE_ID=0" in lines_to_copy(report)


def test_where_nothing_renders_it_says_what_to_install() -> None:
    report = report_of("no GPU, nothing that renders")
    assert "apt-get install libegl1 libegl-mesa0" in lines_to_copy(report)
    assert {found.where for found in report.renderers} == {"fails"}
    assert not report.healthy


def test_renderers_that_fail_are_no_good_health(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A missing MUJOCO_GL is a warning; what it leads to is a failure, and the exit status says so."""
    report = report_of("no GPU")
    failing = {found.name for found in report.renderers if found.where == "fails"}
    assert failing == {"mujoco", "gymnasium", "dm_control"}
    assert all(finding.severity == "warning" for finding in report.findings)
    assert not report.healthy
    good = examine(machine(0), EGL)
    assert {found.where for found in good.renderers} == {"cpu"}
    assert good.healthy
    for known, status in ((report, 1), (good, 0)):
        (tmp_path / "report.json").write_text(known.to_json())
        assert main(["doctor", "--replay", str(tmp_path / "report.json")]) == status
    capsys.readouterr()


def test_osmesa_is_the_cpu_without_egl() -> None:
    assert places(report_of("no GPU, OSMesa")) == dict.fromkeys(
        ("mujoco", "gymnasium", "dm_control", "robosuite"), ("cpu", None, None, True)
    )


def test_a_wrong_mask_is_shown_with_every_name_of_the_gpus() -> None:
    report = report_of("wrong mask")
    rows = [line.split() for line in shown(report, 300).splitlines() if "NVIDIA H100" in line][:4]
    assert [row[-7:-5] for row in rows] == [["hidden", "2"], ["cuda:0", "3"], ["hidden", "0"], ["hidden", "1"]]
    assert report.decision is not None
    assert report.decision.gpu == report.inventory.gpus[1]
    # mujoco takes the first EGL device, robosuite the mask's first entry for an EGL index.
    assert places(report)["mujoco"] == ("gpu", 0, uuid(2), False)
    assert places(report)["robosuite"] == ("gpu", 1, uuid(3), False)
    assert not report.healthy
    assert "export CUDA_VISIBLE_DEVICES=1" in lines_to_copy(report)
    assert any("MUJOCO_EGL_DEVICE_ID=3" in line for line in lines_to_copy(report))


def test_a_machine_on_which_all_is_well_has_nothing_to_copy() -> None:
    report = report_of("all is well")
    assert report.healthy
    assert {found.with_compute for found in report.renderers} == {True}
    assert lines_to_copy(report) == []
    assert "nothing is wrong with the variables" in shown(report)


def test_a_torch_without_cuda_computes_on_the_cpu_beside_idle_gpus() -> None:
    report = report_of("CPU torch")
    assert report.decision is not None
    assert report.decision.device == "cpu"
    assert places(report)["mujoco"] == ("gpu", 0, uuid(0), False)
    assert any("pip install" in finding.fix for finding in report.findings)


def test_a_mig_slice_computes_and_its_gpu_does_not_render() -> None:
    report = report_of("MIG")
    assert report.decision is not None
    assert (report.decision.gpu, report.decision.mig) == (report.inventory.gpus[0], "MIG-22222222-0000")
    assert {found.where for found in report.renderers} == {"fails"}
    assert "cut into MIG slices: MIG-11111111-0000, MIG-22222222-0000" in shown(report)
    assert any('render="cpu"' in line for line in lines_to_copy(report))


def test_egl_that_is_missing_is_why_renderers_fail() -> None:
    report = report_of("no EGL")
    assert {(found.where, found.why) for found in report.renderers} == {("fails", WITHOUT_EGL.egl_error)}
    assert not report.healthy


def test_a_refused_decision_leaves_open_where_it_is_computed() -> None:
    report = report_of("a rank too many")
    assert report.decision is None
    assert "LOCAL_RANK='5'" in (report.refusal or "")
    assert {found.with_compute for found in report.renderers} == {None}
    assert not report.healthy


def test_ranks_of_a_launcher_are_told_python_and_not_one_line_of_the_shell() -> None:
    report = report_of("a launcher")
    assert report.decision is not None
    assert report.decision.device == "cuda:2"
    assert all(line.startswith(("from", "resolve")) for line in lines_to_copy(report))


@every_case
@pytest.mark.parametrize("width", [20, 80, 200])
def test_lines_to_copy_stand_whole_on_a_terminal_of_any_width(case: str, width: int) -> None:
    report = report_of(case, question=Question("auto", "same", "robosuite"))
    printed = [line.rstrip() for line in shown(report, width).splitlines()]
    for line in lines_to_copy(report):
        assert line in printed
    assert all("…" not in line for line in printed)


def lines_to_copy(report: Report) -> list[str]:
    return [line for finding in report.findings for line in finding.fix.splitlines()]


def typed(environ: Mapping[str, str], line: str) -> dict[str, str]:
    """Do what a shell does with such a line."""
    after = dict(environ)
    for command in line.split("; "):
        verb, *words = shlex.split(command)
        for name, _, value in (word.partition("=") for word in words if verb in ("export", "unset")):
            after.pop(name, None)
            if verb == "export":
                after[name] = value
    return after


@pytest.mark.parametrize("mask", [None, "", "0", "1", "3,1", "2, 9", "GPU-cccc", "all", "1,1", "[2]"])
@pytest.mark.parametrize("index", [None, "0", "3", "7", "x"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize("mujoco", ["3.9.0", "4.0.0"])
def test_typing_the_block_makes_every_renderer_that_it_names_render_where_it_is_computed(
    mask: str | None, index: str | None, order: tuple[int, ...], mujoco: str
) -> None:
    inventory = machine(4, order=order, versions={"mujoco": mujoco})
    given = {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": mask, "MUJOCO_EGL_DEVICE_ID": index}
    environ = {name: value for name, value in given.items() if value is not None}
    mended = environ
    alternatives = []
    for finding in examine(inventory, environ).findings:
        if finding.variable.startswith("CUDA"):
            mended = typed(mended, finding.fix)
        elif finding.fix.startswith("export"):
            alternatives.append(finding)
    for finding in alternatives:
        names = finding.effect.partition(": ")[0].split(", ")
        after = examine(inventory, typed(mended, finding.fix))
        named = [found for found in after.renderers if found.renderer in names]
        assert named
        assert all(found.with_compute for found in named), (finding, named)


def test_uuids_are_as_short_as_can_be_told_apart() -> None:
    text = shown(report_of("all is well"), 300)
    assert " GPU-aaaa0000 " in text
    assert uuid(2) not in text.split("resolve(")[0]


def test_the_drivers_of_four_gpus_are_examined(drivers: build.Drivers) -> None:
    settings = build.configuration(4, egl_order=[2, 3, 0, 1]) | EGL | {"CUDA_VISIBLE_DEVICES": "1"}
    report = replay(drivers.python("from rl_ext_core.cli import main; main(['doctor', '--json'])", settings))
    assert [device.uuid for device in report.inventory.egl or ()] == [uuid(n) for n in (2, 3, 0, 1)]
    assert places(report)["robosuite"][:3] == ("gpu", 1, uuid(3))


# Under which a plain import and a plain context are tried beside what is predicted for them.
ENVIRONS: list[dict[str, str]] = [
    {},
    EGL,
    {"MUJOCO_GL": "osmesa"},
    {"MUJOCO_GL": "glfw"},
    {"MUJOCO_GL": "glx"},
    {"MUJOCO_GL": "EGL"},
    {"MUJOCO_GL": "x11"},
    {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"},
    {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "OSMESA"},
    {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "EGL"},
    {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "egl"},
    {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "0"},
    {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "1"},
    {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "x"},
    {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": ""},
    {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": ""},
    {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "1"},
    {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "0,1", "MUJOCO_EGL_DEVICE_ID": "0"},
    {"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "1", "MUJOCO_EGL_DEVICE_ID": "0"},
]


@pytest.mark.sample(quick=0, ci=11)
@pytest.mark.parametrize("environ", ENVIRONS, ids=str)
@pytest.mark.parametrize("name", ["mujoco", "gymnasium", "dm_control", "robosuite"])
def test_what_is_predicted_is_what_happens(name: str, environ: dict[str, str]) -> None:
    draw = f"""
    import importlib
    from rl_ext_core.devices import _apply, _verify
    importlib.import_module("{name}")
    context = _verify._open("{name}", lambda: None)
    display = _apply.display_of("{name}")
    answer = None if display is None else _apply.index_of(display)
    sys.stdout.write(json.dumps(answer)); sys.stdout.flush(); os._exit(0)
    """
    ended = processes.run("import json, sys", draw, **environ)
    inventory = Inventory((), egl((), software=True), (), installed_versions(), True, NO_GPU)
    (predicted,) = (found for found in examine(inventory, environ).renderers if found.name == name)
    assert (ended.error != "") == (predicted.where == "fails"), (ended.error, predicted)
    if not ended.error:
        assert ended.answer == predicted.egl
