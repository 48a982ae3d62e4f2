from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rl_ext_core
from rl_ext_core.cli import doctor, main
from rl_ext_core.devices import Inventory
from rl_ext_core.frames import planning
from tests.core.devices.doctor_cases import CASES, EGL
from tests.core.devices.machines import machine
from tests.core.devices.run_code import environment

Out = pytest.CaptureFixture[str]
Put = Callable[[Inventory, dict[str, str]], None]
SIMULATOR = "tests.core.isolation.simulator"
PLAN = ("plan", "--shape", "100,100,9", "--size", "1000000")

MODULE = """
import os
import gymnasium
from tests.environments import RandomEnv

class Pixels(RandomEnv):
    def __init__(self):
        super().__init__(gymnasium.spaces.Box(0, 255, (12, 12), "u1"), infos=False)

    def reset(self, **options):
        import my_module_nearby

        return super().reset(**options)

    @classmethod
    def make(cls):
        return cls()

class Loud(Pixels):
    def reset(self, **options):
        print("it starts", flush=True)
        os.write(1, b"it says in C")
        return super().reset(**options)

class Quits(Pixels):
    def step(self, action):
        raise SystemExit(0)

def gives_a_class():
    return Loud

gymnasium.register("MyPixels-v0", Pixels, disable_env_checker=True)
number = 3
"""


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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_environments.py").write_text(MODULE)
    (tmp_path / "my_module_nearby.py").touch()
    (tmp_path / "my_broken_module.py").write_text("raise ValueError('one\\ntwo')")
    return "my_environments"


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


WRONG_NAMES = [
    ("my_broken_module:make", "'my_broken_module' cannot be imported (ValueError: one two)"),
    ("my_environments:Pixels.nothing", "'my_environments' has no 'Pixels.nothing'"),
    ("my_environments:number", "is 3, which cannot build an environment"),
]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", ""),
        ("doctors", ""),
        ("doctor --nonsense", ""),
        ("doctor --renderer unreal", ""),
        ("doctor --device gpu", ""),
        ("doctor --render egl:x", ""),
        ("doctor --verify --render none", ""),
        ("probe", ""),
        ("probe CartPole-v1 --steps 3", ""),
        ("probe CartPole-v1 --timeout soon", ""),
        (f"probe {SIMULATOR}:SaysNonsense", ""),
        ("plan --size 10", "pass --shape, for example --shape 100,100,9, or an environment with --env"),
        ("plan --size 10 --env Nope-v0", "gymnasium does not know the id 'Nope-v0'"),
        ("plan --size 10 --env CartPole-v1 --dtype int8", "--dtype int8 cannot be used with --env"),
        ("plan --size 10 --shape 9,9 --steps 300", "--steps needs --env"),
        ("plan --size 10 --shape 9,9 --dtype O", "dtype=object is not numeric"),
        ("plan --size 10 --env my_environments:gives_a_class", "env() returned <class 'my_environments.Loud'>, exp"),
        ("plan --size 10 --shape 7,7 --env CartPole-v1", "neither observations of shape (7, 7) nor frames"),
        ("plan --size 10 --shape 9,9 --max-bytes many", "'many' is not a size"),
        ("plan --size 10 --shape 9,9 --dtype pixels", "--dtype 'pixels' is not a NumPy dtype"),
        *(
            (f"plan --shape 9,9 --size={size}", "for example 1000000")
            for size in ("1.5", "nan", "1e15", "0", "٣", "1e6x")
        ),
        ("run", "needs a program"),
        ("run --gpu 1 -- false", "Use --gpu auto"),
        ("run --renderer x -- false", "--renderer x is not known"),
        *((f"run {option} '' -- false", f"{option} is empty") for option in ("--gpu", "--render", "--renderer")),
        *(
            (f"{command} {name}", f"{text}...Expected module:function, module:Class.method, or a gymnasium id")
            for command in ("plan --size 9 --env", "probe")
            for name, text in WRONG_NAMES
        ),
    ],
)
@pytest.mark.usefixtures("module")
def test_wrong_usage_prints_one_line(line: str, text: str, install_machine: Put, capsys: Out) -> None:
    install_machine(machine(0), {})
    assert status_of(shlex.split(line)) == (1 if "--gpu 1" in line else 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rl-ext")
    assert printed.err.count("\n") == 1
    assert all(part in printed.err for part in text.split("..."))


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
    assert main([*PLAN, "--max-bytes", "1TB"]) == 0
    sys.stdout.close()


def test_full_disk_is_reported_in_one_line() -> None:
    code = "import sys; from rl_ext_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *PLAN]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rl-ext plan: the output cannot be written: No space left on device\n")


# -- plan


def test_estimates_are_printed_as_a_table_or_json(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 24_000_000_000)
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    for part in ("1,000,000 transitions of 100x100x9 uint8; n_stack 3, n_envs 1", "ESTIMATES", "free memory: 24 GB"):
        assert part in text
    assert main([*PLAN, "--max-bytes", "1MB"]) == 1
    assert "max_bytes: 1 MB" in capsys.readouterr().out
    assert main([*PLAN, "--json", "--stack", "3", "--envs", "8"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["n_stack"], found["n_envs"], found["measured"]) == (3, 8, False)
    assert found["rows"][0]["name"] == "SB3 ReplayBuffer"


def test_output_of_the_environment_goes_to_stderr(capfd: Out, module: str) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:Loud", "--steps", "150", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["measured"]
    assert "it starts" in printed.err
    assert "it says in C" in printed.err


def test_environment_that_fails_in_a_step_exits_with_1(capsys: Out, module: str) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:Quits"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--env '{module}:Quits' raised SystemExit: 0 while it was created or stepped" in printed.err


@pytest.mark.parametrize("size", ["1_000_000", "1,000,000", "1e6"])
def test_sizes_have_usual_forms(size: str, capsys: Out) -> None:
    assert main(["plan", "--shape", "84,84,4", "--size", size]) == 0
    assert "1,000,000" in capsys.readouterr().out


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


# -- names of environments


def test_id_of_a_module_that_is_not_imported_gets_its_line() -> None:
    """The id is unknown in a new process only."""
    for command in (["plan", "--size", "10", "--env", "ALE/Pong-v5"], ["probe", "ALE/Pong-v5"]):
        program = [sys.executable, "-m", "rl_ext_core", *command]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "se --env ale_py:ALE/Pong-v5" in done.stderr or 'use "ale_py:ALE/Pong-v5"' in done.stderr


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("name", ["Pixels", "Pixels.make", "MyPixels-v0"])
def test_commands_accept_the_same_environment_names(
    capsys: Out, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:{name}", "--steps", "150", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [12, 12]
    assert main(["probe", f"{module}:{name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isolation"] == "independent"
