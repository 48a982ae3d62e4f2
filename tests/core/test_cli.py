from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rl_ext_core
from rl_ext_core.cli import doctor, main
from rl_ext_core.devices import Inventory
from tests.core.devices.doctor_cases import CASES, EGL
from tests.core.devices.machines import machine
from tests.core.devices.run_code import environment

Out = pytest.CaptureFixture[str]
Put = Callable[[Inventory, dict[str, str]], None]
SIMULATOR = "tests.core.isolation.simulator"


@pytest.fixture
def install_machine(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Return a function that fakes this machine and its environment variables."""

    def install_machine(inventory: Inventory, environ: dict[str, str]) -> None:
        for name in set(os.environ) - set(environment()):
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Inventory, "current", classmethod(lambda cls, **options: inventory))

    return install_machine


def read_stdout(out: Out) -> str:
    printed = out.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--version", f"rl-ext {rl_ext_core.__version__}\n"),
        ("--help", "doctor"),
        *((f"{command} --help", f"examples:\n  rl-ext {command}") for command in ("doctor", "plan", "probe", "replay")),
    ],
)
def test_version_and_help_are_printed(arguments: str, text: str, capsys: Out) -> None:
    assert status_of(arguments.split()) == 0
    assert text in read_stdout(capsys)


@pytest.mark.parametrize(("case", "status"), [("all is well", 0), ("wrong mask", 1), ("no GPU", 1)])
def test_doctor_exits_with_1_for_an_error_or_a_failing_renderer(
    case: str, status: int, install_machine: Put, capsys: Out
) -> None:
    install_machine(*CASES[case])
    assert main(["doctor"]) == status
    text = read_stdout(capsys)
    assert ("error" in text.split("findings")[1]) == (case == "wrong mask")
    assert ("FAILS" in text) == (case == "no GPU")  # a failing renderer is not listed as a finding


NO_ROBOSUITE = machine(2, without=["robosuite"]), {**EGL, "CUDA_VISIBLE_DEVICES": "0", "MUJOCO_EGL_DEVICE_ID": "0"}
# robosuite's import rejects the index 1 under the mask "2".
DECISION = ["compute  cuda:0 = NVIDIA H100", "set      MUJOCO_EGL_DEVICE_ID=1"]
DECISION += ["\nexport MUJOCO_EGL_DEVICE_ID=1 CUDA_VISIBLE_DEVICES=2,-1,1\n"]
REFUSAL = ["refused  device='cuda:7' is not visible: expected cuda:0, because this process sees 1 GPU"]


@pytest.mark.parametrize(
    ("case", "options", "texts"),
    [
        (CASES["other order"], "--renderer robosuite", DECISION),
        (CASES["all is well"], "--device cuda:7", REFUSAL),
        (NO_ROBOSUITE, "--renderer robosuite", ["refused", "robosuite"]),
    ],
    ids=["decision", "device", "renderer"],
)
def test_doctor_explains_a_decision_or_refusal(
    case: Any, options: str, texts: list[str], install_machine: Put, capsys: Out
) -> None:
    install_machine(*case)
    assert main(["doctor", *options.split()]) == 1
    printed = read_stdout(capsys)
    assert all(text in printed for text in texts)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("doctors",),
        ("doctor", "--nonsense"),
        ("doctor", "--renderer", "unreal"),
        ("doctor", "--device", "gpu"),
        ("doctor", "--render", "egl:x"),
        ("doctor", "--verify", "--render", "none"),
        ("probe",),
        ("probe", "CartPole-v1", "--steps", "3"),
        ("probe", "CartPole-v1", "--timeout", "soon"),
        ("probe", f"{SIMULATOR}:SaysNonsense"),
    ],
)
def test_wrong_usage_prints_one_line_and_exits_with_2(arguments: Sequence[str], capsys: Out) -> None:
    assert status_of(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rl-ext")
    assert printed.err.count("\n") == 1


def status_of(arguments: Sequence[str]) -> Any:
    """Run the command in this process, and return its exit status."""
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse exits by itself
        return ended.code


def test_verify_reports_a_renderer_that_fails_as_an_error() -> None:
    command = [sys.executable, "-m", "rl_ext_core", "doctor", "--verify", "--renderer", "mujoco"]
    options = {"env": environment(), "capture_output": True, "text": True, "check": False, "timeout": 120}
    done = subprocess.run(command, **options)
    assert re.search(r"^mujoco .*llvmpipe.* as predicted", done.stdout, re.M)
    assert done.returncode in (0, 1)  # other renderers fail on a machine without a display
    assert done.stderr == ""
    done = subprocess.run([*command, "--device", "cuda:0", "--json"], **options)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert [entry["name"] for entry in data["verified"]] == ["mujoco"]
    (finding,) = (finding for finding in data["findings"] if finding["variable"] == "mujoco")
    assert finding["effect"].startswith("the test with --verify failed: device='cuda:0' is not available")
    assert finding["fix"] == "rl-ext doctor --renderer mujoco"


def test_ctrl_c_exits_with_130_and_prints_nothing(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_create_report", interrupted)
    assert main(["doctor"]) == 130
    assert read_stdout(capsys) == ""


def test_closed_pipe_prints_no_error() -> None:
    command = f"{sys.executable} -m rl_ext_core doctor | true"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_closed_stdout_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plan", "--shape", "84,84,4", "--size", "1000"]) == 0
    sys.stdout.close()


def test_full_disk_is_reported_in_one_line() -> None:
    code = "import sys; from rl_ext_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "plan", "--shape", "84,84,4", "--size", "1000"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rl-ext plan: the output cannot be written: No space left on device\n")


# -- probe


@pytest.mark.slow
def test_verdict_is_printed(capsys: Out) -> None:
    assert main(["probe", f"{SIMULATOR}:DrawsFromNumPy"]) == 0
    text = read_stdout(capsys)
    assert text.startswith("shared-state   (by probe, in ")
    assert "Use one process per environment." in " ".join(text.split())
    assert "step    " in text


def test_deleted_working_directory_is_reported(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert main(["probe", "CartPole-v1"]) == 1
    assert "the working directory was deleted" in capsys.readouterr().err


def test_json_output_is_the_verdict(capsys: Out) -> None:
    assert main(["probe", "CartPole-v1", "--json", "--steps", "20"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["isolation"] == "independent"
    assert "in 20 steps" in verdict["explanation"]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "text"), [("FailsAtReset", "RuntimeError: no world"), ("exit_while_building", "SystemExit: no license")]
)
def test_status_is_1_without_a_verdict(name: str, text: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["probe", f"{SIMULATOR}:{name}"]) == 1
    assert text in read_stdout(capsys)
