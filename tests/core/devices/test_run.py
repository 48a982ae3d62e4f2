from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from rl_ext_core.cli import main
from rl_ext_core.cli.run import plan_program
from rl_ext_core.devices import Inventory
from rl_ext_core.devices import verify as verify_module
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, RlExtError
from tests.core.devices import run_code
from tests.core.devices.doctor_cases import FakeNvml
from tests.core.devices.machines import gpus, machine, run_shell_line, uuid

MASK, INDEX, RANK, TASK = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "LOCAL_RANK", "SLURM_LOCALID"
FOUR = machine(4, order=(2, 3, 0, 1))
SLICE = "MIG-11111111-0000-4000-8000-000000000000"
CUT = machine(2, mig={1: [SLICE]})
NO_RENDERER = machine(4, without=("mujoco", "robosuite", "dm_control"))
PYTHON = ("python", "train.py")


@pytest.mark.parametrize(
    ("environ", "options", "mask", "index", "says"),
    [
        ({}, {}, None, "2", "if it computes on cuda:0"),
        ({}, {"gpu": "1"}, "1,-1,3", "3", "computes on nvidia-smi 1"),
        ({}, {"gpu": "auto"}, "0,-1,2", "2", "most free memory: 80.0 GiB"),
        ({}, {"gpu": "nvidia-smi:2"}, "2,-1,0", "0", "renders there"),
        ({MASK: "3,1"}, {"gpu": "0"}, "3,-1,1", "1", "computes on nvidia-smi 3"),
        ({MASK: "3,1"}, {"gpu": "0", "render": "1"}, "3", "3", "renders on nvidia-smi 1"),
        ({MASK: f"{uuid(3)},{uuid(1)}"}, {"gpu": "1"}, f"{uuid(1)},-1,3", "3", "nvidia-smi 1"),
        ({}, {"gpu": "1", "render": "none"}, "1", None, "no rendering device is set"),
        ({}, {"gpu": "1", "render": "cpu"}, "1,-1,4", "4", "renders on the CPU"),
        ({RANK: "2"}, {}, None, "0", "LOCAL_RANK='2' is this process's place"),
        ({RANK: "2", MASK: "0,1,2"}, {"per_rank": True}, None, "0", "computes on nvidia-smi 2"),
        ({RANK: "1", MASK: "2,0"}, {"gpu": "auto"}, None, "2", "computes on nvidia-smi 0"),
        ({TASK: "1", MASK: "2,1"}, {"per_rank": True}, "2,1,-1,3", "3", "SLURM_LOCALID='1'"),
    ],
)
def test_plan_narrows_only_without_a_rank(
    environ: dict[str, str], options: dict[str, Any], mask: str | None, index: str | None, says: str
) -> None:
    plan = plan_program(PYTHON, FOUR, environ, **options)
    assert plan.variables.get(MASK) == mask
    assert index is None or plan.variables[INDEX] == index
    assert says in plan.summary
    assert "\n" not in plan.summary
    after = plan.environment(environ)
    for line in plan.to_shell().splitlines():
        environ = run_shell_line(line, environ)
    assert environ == after


def test_plan_without_a_renderer_or_with_a_mig_slice() -> None:
    assert plan_program(PYTHON, NO_RENDERER, {}, gpu="1").variables == {MASK: "1"}
    assert plan_program(PYTHON, CUT, {}, gpu="0", render="none").variables == {MASK: SLICE}
    assert plan_program(PYTHON, machine(0), {}).variables[INDEX] == "0"  # Mesa
    with pytest.raises(InvalidArgumentError, match="has none"):
        plan_program(PYTHON, NO_RENDERER, {}, render="same")


@pytest.mark.parametrize(
    ("command", "environ", "options", "error", "says"),
    [
        (PYTHON, {RANK: "1"}, {"gpu": "2"}, InvalidArgumentError, "--gpu 2 contradicts LOCAL_RANK='1'"),
        (PYTHON, {}, {"per_rank": True}, InvalidArgumentError, "torchrun --no-python --nproc-per-node=4 rl-ext run"),
        (("/usr/bin/torchrun", "x.py"), {}, {}, InvalidArgumentError, "torchrun starts several processes"),
        (("python", "-m", "torch.distributed.run"), {}, {}, InvalidArgumentError, "torch.distributed.run starts"),
        (PYTHON, {}, {"gpu": "cpu"}, InvalidArgumentError, "--render cpu"),
        (PYTHON, {}, {"gpu": "7"}, DeviceUnavailableError, "cuda:7"),
    ],
)
def test_plan_refuses_contradictions(
    command: Sequence[str], environ: dict[str, str], options: dict[str, Any], error: type[RlExtError], says: str
) -> None:
    with pytest.raises(error) as caught:
        plan_program(command, FOUR, environ, **options)
    assert says in str(caught.value)


SHOW = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k[:5] in ('CUDA_', 'MUJOC')}))"


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rl_ext_core", "run", *arguments]
    environ = {**run_code.environment(**variables), "PYTHONPATH": str(run_code.ROOT / "shared")}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_program_gets_variables_arguments_status_and_signals() -> None:
    done = start("--", sys.executable, "-c", f"{SHOW}; import sys; sys.exit(7)", "--", "x")
    assert json.loads(done.stdout) == {"MUJOCO_GL": "egl", INDEX: "0"}
    assert done.returncode == 7
    assert done.stderr.startswith("rl-ext run: computes on the CPU, renders on the CPU through robosuite")
    assert done.stderr.count("\n") == 1
    code = "import os, signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.kill(os.getpid(), 11)"
    assert start("--render", "none", sys.executable, "-c", code).returncode == -11
    shell = start("--render", "none", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(shell.stdout.split()[1], 16) & 1 << 12 == 0  # SIGPIPE is not ignored


@pytest.mark.slow
@pytest.mark.parametrize("renderer", ["mujoco", "robosuite"])
def test_verify_renders_before_the_program_starts(renderer: str) -> None:
    done = start(
        "--renderer", renderer, "--verify", "--", sys.executable, "-c", "print('started')", CUDA_VISIBLE_DEVICES="3"
    )
    assert done.stdout == "started\n"
    assert "verify: llvmpipe" in done.stderr
    assert "as predicted" in done.stderr
    assert ("CUDA_VISIBLE_DEVICES=3,-1,0 -> robosuite asserts" in done.stderr) == (renderer == "robosuite")
    failing = start(
        "--verify", "--", sys.executable, "-c", "print('started')", LIBGL_DRIVERS_PATH="/none", GALLIUM_DRIVER="x"
    )
    assert (failing.stdout == "") == (failing.returncode == 1)


def test_dry_run_prints_lines_for_a_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in set(os.environ) - set(run_code.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    assert main(["run", "--gpu", "nvidia-smi:1", "--renderer", "robosuite", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    names = ("MUJOCO_GL=egl", "PYOPENGL_PLATFORM=egl", f"{INDEX}=3")
    assert printed.splitlines() == [f"export {text}" for text in (f"{MASK}=1,-1,3", *names)]
    shell = subprocess.run(["sh", "-c", f"{printed}\necho ${MASK}"], capture_output=True, text=True, check=True)
    assert shell.stdout == "1,-1,3\n"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_doctor_of_a_process_compares_its_gpus(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={MASK: "1", "HOME": "/x"}
    )
    try:
        nvml = FakeNvml(gpus(2), computing={child.pid: 0, 1: 0}, rendering={child.pid: int(elsewhere)})
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(Inventory, "current", lambda **_: machine(2))
        monkeypatch.setattr(verify_module, "_HOST_PIDS", os.readlink("/proc/self/ns/pid"))
        assert main(["doctor", "--pid", str(child.pid)]) == int(elsewhere)
        printed = capsys.readouterr().out
        assert f"{MASK}=1" in printed
        assert "HOME" not in printed
        assert "2 MiB" in printed
        assert (f"it renders on {uuid(1)}, but computes on {uuid(0)}" in printed) == elsewhere
        assert main(["doctor", "--pid", str(child.pid), "--json"]) == int(elsewhere)
        data = json.loads(capsys.readouterr().out)
        assert data["environ"] == {MASK: "1"}
        uses = [(uuid(0), "compute"), (uuid(int(elsewhere)), "graphics")]
        assert data["process"]["uses"] == [
            {"pid": child.pid, "uuid": gpu, "kind": kind, "memory": 2**21} for gpu, kind in sorted(uses)
        ]
        monkeypatch.setattr(verify_module, "_HOST_PIDS", "pid:[0]")
        assert main(["doctor", "--pid", str(child.pid)]) == 0
        assert "unknown in a container" in capsys.readouterr().out
    finally:
        child.communicate(b"\n")
    assert main(["doctor", "--pid", str(child.pid)]) == 2
    assert main(["doctor", "--pid", "1", "--verify"]) == 2
