from __future__ import annotations

import json
import os
from importlib import util
from pathlib import Path

import pytest

from rl_ext_core.cli.doctor import DoctorReport, examine
from rl_ext_core.devices import Inventory, _probe, inventory, resolve
from rl_ext_core.devices import verify as verify_module
from rl_ext_core.devices.inventory import installed_versions
from rl_ext_core.devices.verify import GpuUse, Verification, verify, verify_decision
from tests.core.devices import run_code
from tests.core.devices.doctor_cases import CASES, EGL, NO_GPU, WITHOUT_EGL, report_as_text, report_of
from tests.core.devices.fakes import build
from tests.core.devices.machines import egl, machine, uuid


def lines_to_copy(report: DoctorReport) -> list[str]:
    return [line for finding in report.findings for line in finding.fix.splitlines()]


@pytest.mark.parametrize(
    ("case", "device", "mujoco", "robosuite", "line"),
    [
        # The compute device; place and EGL index of two renderers; part of a line to copy.
        ("no GPU", "cpu", ("fails", None), ("cpu", 0), "=egl PYOPENGL_PLATFORM=egl MUJOCO_EGL_DEVICE_ID=0"),
        ("no GPU, nothing that renders", "cpu", ("fails", None), ("fails", None), "install libegl1 libegl-mesa0"),
        ("no GPU, OSMesa", "cpu", ("cpu", None), ("cpu", None), None),
        # mujoco uses the first EGL device, robosuite the mask's first entry as an EGL index.
        ("wrong mask", "cuda:0", ("gpu", 0), ("gpu", 1), "export CUDA_VISIBLE_DEVICES=1"),
        ("wrong mask", "cuda:0", ("gpu", 0), ("gpu", 1), "MUJOCO_EGL_DEVICE_ID=3"),
        ("all is well", "cuda:0", ("gpu", 0), ("gpu", 0), None),
        ("CPU torch", "cpu", ("gpu", 0), ("gpu", 0), None),
        ("MIG", "cuda:0", ("fails", None), ("fails", None), 'render="cpu"'),
        ("no EGL", "cuda:0", ("fails", None), ("fails", None), "apt-get install"),
        ("a launcher", "cuda:2", ("gpu", 0), ("gpu", 0), "resolve("),
        ("a rank too many", None, ("gpu", 0), ("gpu", 0), "torchrun"),
    ],
)
def test_report_has_devices_renderers_and_fixes(
    case: str, device: str | None, mujoco: tuple[str, int], robosuite: tuple[str, int], line: str | None
) -> None:
    report = report_of(case)
    assert (report.decision.device if report.decision else None) == device
    found = {entry.renderer.split(" ")[0]: (entry.where, entry.egl) for entry in report.renderers}
    assert (found["mujoco"], found["robosuite"]) == (mujoco, robosuite)
    assert any(line in each for each in lines_to_copy(report)) if line else lines_to_copy(report) == []
    assert report.healthy == (line is None)


def test_report_explains_devices_and_failures() -> None:
    assert NO_GPU in report_as_text(report_of("no GPU"), 300)
    rows = [
        line.split() for line in report_as_text(report_of("wrong mask"), 300).splitlines() if "NVIDIA H100" in line
    ][:4]
    assert [row[-7:-5] for row in rows] == [["hidden", "2"], ["cuda:0", "3"], ["hidden", "0"], ["hidden", "1"]]
    assert {(found.where, found.why) for found in report_of("no EGL").renderers} == {("fails", WITHOUT_EGL.egl_error)}
    refused = report_of("a rank too many")
    assert "LOCAL_RANK='5'" in (refused.refusal or "")
    assert {found.with_compute for found in refused.renderers} == {None}
    cut = report_of("MIG")
    assert (cut.decision.gpu, cut.decision.mig) == (cut.inventory.gpus[0], "MIG-22222222-0000")
    assert "cut into MIG slices: MIG-11111111-0000, MIG-22222222-0000" in report_as_text(cut)
    well = report_as_text(report_of("all is well"), 300)
    assert " GPU-aaaa0000 " in well  # the shortest unique prefix


@pytest.mark.parametrize("width", [20, 80, 200])
def test_lines_to_copy_are_not_wrapped_at_any_width(width: int) -> None:
    for case in CASES:
        report = report_of(case, question={"device": "auto", "render": "same", "renderer": "robosuite"})
        printed = [line.rstrip() for line in report_as_text(report, width).splitlines()]
        assert set(lines_to_copy(report)) <= set(printed), case
        assert all("…" not in line for line in printed), case


# Variables under which a plain import and a plain context are compared with the prediction.
ENVIRONS: list[dict[str, str]] = [
    {},
    EGL,
    *({"MUJOCO_GL": backend} for backend in ("osmesa", "glfw", "glx", "EGL", "x11")),
    *({"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": platform} for platform in ("osmesa", "EGL")),
    *({"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": index} for index in ("0", "1", "x", "")),
    *({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": mask} for mask in ("", "1")),
    *({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": mask, "MUJOCO_EGL_DEVICE_ID": "0"} for mask in ("0,1", "1")),
]


@pytest.mark.sample(quick=0, ci=11)
@pytest.mark.parametrize("environ", ENVIRONS, ids=str)
@pytest.mark.parametrize("name", ["mujoco", "gymnasium", "dm_control", "robosuite"])
def test_prediction_matches_real_rendering(name: str, environ: dict[str, str]) -> None:
    draw = f"""
    from rl_ext_core.devices import _probe
    _probe._create_context("{name}")
    from rl_ext_core.devices.decision import display_of
    display = display_of("{name}")
    answer = None if display is None else _probe.egl_index_of(display)
    sys.stdout.write(json.dumps(answer)); sys.stdout.flush(); os._exit(0)
    """
    ended = run_code.run("import json, sys", draw, **environ)
    inventory = Inventory((), egl((), software=True), (), installed_versions(), True, NO_GPU)
    (predicted,) = (found for found in examine(inventory, environ).renderers if found.renderer.split(" ")[0] == name)
    assert (ended.error != "") == (predicted.where == "fails"), (ended.error, predicted)
    if not ended.error:
        assert ended.answer == predicted.egl


def test_report_omits_secrets_paths_and_other_variables() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "/dev/nvidia0", "cuda_visible_devices": "1", "MUJOCO_GLL": "egl", "DISPLAY": ":1"}
    kept |= dict.fromkeys(("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_GPUS_PER_TASK", "WSL_DISTRO_NAME"), "1")
    private = ["NVIDIA_API_KEY", "CUDA_HOME", "MUJOCO_PY_MUJOCO_PATH", "HOME", "SLURM_JOB_USER", "AWS_SECRET"]
    report = examine(machine(2), {**kept, **dict.fromkeys(private, "/home/me")})
    assert json.loads(report.to_json())["environ"] == kept


# Tests of real renderers, in which failures become rows of the report.
@pytest.fixture
def without_device_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset the variables that select devices, and use Mesa's EGL."""
    for name in set(os.environ) - set(run_code.environment()):
        monkeypatch.delenv(name)
    for name, value in run_code.environment().items():
        if name.startswith("__EGL"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(inventory, "_cached_inventory", None)  # so that it is read under these variables
    return monkeypatch


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "EGL") for name in ("mujoco", "gymnasium", "dm_control", "robosuite")),
        *((name, "OSMesa") for name in ("dm_control", "robosuite")),
    ],
)
def test_verify_renders_on_cpu_as_predicted(
    name: str, where: str, without_device_variables: pytest.MonkeyPatch
) -> None:
    if util.find_spec(name) is None:
        pytest.skip("it is not installed")
    if where == "OSMesa":
        build.require_osmesa()
        without_device_variables.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", os.devnull)
    seen = verify(name)
    assert seen.problem is None, seen
    assert seen.gl_vendor if where == "OSMesa" else "llvmpipe" in seen.gl_renderer
    assert (seen.decided, seen.predicted, seen.egl) == ("cpu", *((None, None) if where == "OSMesa" else (0, 0)))
    assert seen.place == ("OSMesa" if where == "OSMesa" else "0")
    assert (where in report_as_text(examine(machine(0, software=False), verified=[seen]))) or where == "EGL"


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("gymnasium", "imageio", "gymnasium[mujoco]"), ("robosuite", "PIL", "rl-ext[robosuite]")],
)
def test_verify_names_missing_package_and_install_line(
    name: str, package: str, extra: str, without_device_variables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    without_device_variables.setenv("PYTHONPATH", str(tmp_path))
    seen = verify(name)
    assert package in (seen.problem or "")
    assert seen.missing
    report = examine(machine(0), {"MUJOCO_GL": "egl"}, verified=[seen])
    lines = [line for line in report_as_text(report).splitlines() if line.startswith("pip install")]
    assert lines[0].endswith(f'{extra}"')


def test_interpreter_that_cannot_be_started_is_reported() -> None:
    decision = resolve("cpu", render="cpu", renderer="mujoco", inventory=machine(1), environ={})
    assert "could not be started" in str(verify_decision(decision, python="/nowhere/python").problem)


H100 = "NVIDIA H100/PCIe/SSE2"


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (Verification("mujoco", "cpu", None, 1, 1, "llvmpipe"), None),
        (Verification("mujoco", "cpu", None, None, None, "llvmpipe"), None),
        (Verification("mujoco", "gpu", "GPU-1", 0, 0, H100, nvml=("GPU-1",)), None),
        (Verification("mujoco", "gpu", "GPU-1", 0, 0, "llvmpipe (LLVM 15)"), "the CPU rendered (llvmpipe (LLVM 15))"),
        (
            Verification("mujoco", "gpu", "GPU-1", 0, 2, H100),
            "expected EGL device 0 to render, but EGL device 2 rendered",
        ),
        (Verification("mujoco", "gpu", "GPU-1", 0, None, H100, nvml=("GPU-2",)), "NVML lists the process on GPU-2"),
        (Verification("mujoco", "gpu", "GPU-1", 0, failure="it did not end"), "it did not end"),
    ],
)
def test_verification_is_compared_with_decision(seen: Verification, problem: str | None) -> None:
    environ = {**EGL, "CUDA_VISIBLE_DEVICES": "0", "MUJOCO_EGL_DEVICE_ID": "0"}
    report = examine(machine(1), environ, verified=[seen])
    assert report.healthy == (problem is None)
    assert (problem or "as predicted") in report_as_text(report, width=200)


@pytest.mark.parametrize(("before", "listed"), [((), (uuid(0),)), ((GpuUse(1, uuid(0), "compute", 1),), None)])
def test_verification_lists_gpus_that_a_process_uses_after_its_start(
    before: tuple[GpuUse, ...], listed: tuple[str, ...] | None, without_device_variables: pytest.MonkeyPatch
) -> None:
    uses = iter((before, (GpuUse(1, uuid(0), "graphics", 1),)))
    without_device_variables.setattr(Inventory, "current", lambda **_: machine(1))
    without_device_variables.setattr(verify_module, "list_gpu_uses", lambda _: next(uses))
    without_device_variables.setattr(_probe, "run_program", lambda *given: dict(filter(given[-1], (1, 1))))
    assert verify("mujoco").nvml == listed
