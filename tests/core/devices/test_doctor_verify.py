"""Every renderer is tried for real, and whatever fails becomes a row."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from rl_ext_core.devices import _verify
from rl_ext_core.devices._verify import Verified, verify
from rl_ext_core.devices.doctor import examine
from tests.core.devices.machines import machine, uuid
from tests.core.devices.patients import EGL, fake_nvml, shown
from tests.core.devices.processes import environment

RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
MESA = {name: value for name, value in environment().items() if name.startswith("__EGL")}


@pytest.fixture(autouse=True)
def steered_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what decides on devices here, and leave Mesa's EGL."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    for name, value in MESA.items():
        monkeypatch.setenv(name, value)


@pytest.mark.sample
@pytest.mark.parametrize("name", RENDERERS)
def test_a_renderer_renders_on_mesa_as_predicted(name: str) -> None:
    seen = verify(name)
    assert seen.problem is None, seen
    assert "llvmpipe" in seen.gl_renderer
    assert seen.gl_vendor
    assert (seen.decided, seen.predicted, seen.egl) == ("cpu", 0, 0)


@pytest.mark.sample
@pytest.mark.parametrize("name", RENDERERS)
def test_a_renderer_renders_with_osmesa_where_egl_lists_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", os.devnull)
    seen = verify(name)
    assert seen.problem is None, seen
    assert seen.gl_renderer
    assert (seen.decided, seen.predicted, seen.egl) == ("cpu", None, None)
    assert "OSMesa" in shown(examine(machine(0, software=False), verified=[seen]))


def test_a_device_that_is_not_there_is_a_refusal() -> None:
    seen = verify("mujoco", "cuda:0")
    assert 'Write device="cpu"' in (seen.problem or "")
    assert seen.gl_renderer == ""


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("gymnasium", "imageio", "gymnasium[mujoco]"), ("robosuite", "PIL", "rl-ext[robosuite]")],
)
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = verify(name)
    assert package in (seen.problem or "")
    assert seen.missing
    report = examine(machine(0), {"MUJOCO_GL": "egl"}, verified=[seen])
    assert f'pip install "{extra}"' in shown(report).splitlines()


def test_a_renderer_that_hangs_is_ended() -> None:
    began = time.monotonic()
    seen = verify("mujoco", limit_s=0.05)
    assert seen.problem == "it did not end within 0 s"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the process ended by SIGSEGV: it said nothing"),
        ("import os; os.kill(os.getpid(), 40)", "the process ended by signal 40: it said nothing"),
        ("import sys; sys.exit('no\\ndriver')", "the process ended with exit status 1: driver"),
        ("pass", "the process ended with exit status 0: it said nothing"),
    ],
)
def test_a_process_that_says_nothing_is_told_by_how_it_ended(code: str, failure: str) -> None:
    assert _verify._run([sys.executable, "-c", code], 20) == {"failure": failure}


@pytest.mark.parametrize(
    ("ending", "failure"), [("os.abort()", "by SIGABRT"), ("time.sleep(60)", "did not end within 1 s")]
)
def test_what_was_decided_is_known_where_the_driver_ends_the_process(ending: str, failure: str) -> None:
    line = _verify._MARK + json.dumps({"decided": "gpu"})
    code = f"import os, time; print({line!r}, flush=True); {ending}"
    told = _verify._run([sys.executable, "-c", code], 1)
    assert told["decided"] == "gpu"
    assert failure in told["failure"]


def test_an_interpreter_that_does_not_start_is_a_failure() -> None:
    assert "could not be started" in _verify._run(["/nowhere/python"], 20)["failure"]


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (Verified("mujoco", "cpu", None, 1, 1, "llvmpipe"), None),
        (Verified("mujoco", "cpu", None, None, None, "llvmpipe"), None),
        (Verified("mujoco", "gpu", "GPU-1", 0, 0, "NVIDIA H100/PCIe/SSE2", nvml=("GPU-1",)), None),
        (Verified("mujoco", "gpu", "GPU-1", 0, 0, "llvmpipe (LLVM 15)"), "the CPU rendered (llvmpipe (LLVM 15))"),
        (Verified("mujoco", "gpu", "GPU-1", 0, 2, "NVIDIA H100"), "EGL device 0 was decided on, and EGL device 2"),
        (
            Verified("mujoco", "gpu", "GPU-1", 0, None, "NVIDIA H100", nvml=("GPU-2",)),
            "NVML lists the process on GPU-2",
        ),
        (Verified("mujoco", "gpu", "GPU-1", 0, failure="it did not end"), "it did not end"),
    ],
)
def test_what_was_tried_is_compared_with_the_decision(seen: Verified, problem: str | None) -> None:
    report = examine(machine(1), {**EGL, "CUDA_VISIBLE_DEVICES": "0", "MUJOCO_EGL_DEVICE_ID": "0"}, verified=[seen])
    assert report.healthy == (problem is None)
    assert (problem or "as predicted") in shown(report, width=200)


def test_nvml_tells_which_gpus_this_process_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    for pid, gpus in ((7, (uuid(0),)), (9, (uuid(0),)), (1, ())):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        assert _verify._gpus_of_this_process() == gpus
