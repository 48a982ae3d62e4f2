"""``rl-ext plan``: tables, JSON and charts, and one line for wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.cli import main
from rl_ext_core.frames import planning

SHAPE = ("plan", "--shape", "100,100,9", "--size", "1000000")

FACTORY = """
import os

import gymnasium


def gives_a_class():
    return Loud


class Loud(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 1, (4,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        print("it starts", flush=True)
        os.write(1, b"it says in C")
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


class Quits(Loud):
    def step(self, action):
        raise SystemExit(0)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that defines an environment, and return its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_planned_env.py").write_text(FACTORY)
    (tmp_path / "my_broken_module.py").write_text("raise ValueError('one\\ntwo')")
    return "my_planned_env"


def test_estimates_are_printed_as_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 24_000_000_000)
    assert main(SHAPE) == 0
    text = capsys.readouterr().out
    assert "1,000,000 transitions of 100x100x9 uint8; n_stack 3, n_envs 1" in text
    assert "ESTIMATES" in text
    assert "free memory: 24 GB" in text
    assert "180 GB" in text


def test_json_option_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPE, "--json", "--stack", "3", "--envs", "8"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["n_stack"], found["n_envs"], found["measured"]) == (3, 8, False)
    assert found["rows"][0]["name"] == "SB3 ReplayBuffer"


def test_output_of_the_environment_goes_to_stderr(capfd: pytest.CaptureFixture[str], module: str) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:Loud", "--steps", "150", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["measured"]
    assert "it starts" in printed.err
    assert "it says in C" in printed.err


def test_environment_that_fails_in_a_step_exits_with_1(capsys: pytest.CaptureFixture[str], module: str) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:Quits"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--env '{module}:Quits' raised SystemExit: 0 while it was created or stepped" in printed.err


def test_plan_exits_with_1_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHAPE, "--max-bytes", "1MB"]) == 1
    assert "max_bytes: 1 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plan --size 10", "pass --shape, for example --shape 100,100,9, or an environment with --env"),
        ("plan --size 10 --env Nope-v0", "gymnasium does not know the id 'Nope-v0'"),
        ("plan --size 10 --env my_broken_module:make", "'my_broken_module' cannot be imported (ValueError: one two)"),
        ("plan --size 10 --env CartPole-v1 --dtype int8", "--dtype int8 cannot be used with --env"),
        ("plan --size 10 --shape 9,9 --steps 300", "--steps needs --env"),
        ("plan --size 10 --shape 9,9 --dtype O", "dtype=object is not numeric"),
        ("plan --size 10 --env {module}:gives_a_class", "env() returned <class 'my_planned_env.Loud'>, expected"),
        ("plan --size 10 --shape 7,7 --env CartPole-v1", "neither observations of shape (7, 7) nor frames"),
        ("plan --size 10 --shape 9,9 --max-bytes many", "'many' is not a size"),
        ("plan --size 10 --shape 9,9 --dtype pixels", "--dtype 'pixels' is not a NumPy dtype"),
    ],
)
def test_invalid_arguments_exit_with_2_and_an_error_text(
    capsys: pytest.CaptureFixture[str], module: str, line: str, text: str
) -> None:
    assert main(line.format(module=module).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert printed.err.startswith("rl-ext plan: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("size", ["1_000_000", "1,000,000", "1e6"])
def test_sizes_have_usual_forms(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "84,84,4", "--size", size]) == 0
    assert "1,000,000" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1.5", "nan", "1e15", "0", "²", "1e6x"])
def test_other_sizes_are_refused_with_an_example(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--shape", "84,84,4", f"--size={size}"])
    assert ended.value.code == 2
    assert "for example 1000000" in capsys.readouterr().err


def test_id_of_a_module_that_is_not_imported_gets_its_line() -> None:
    """The id is unknown in a new process only."""
    for command in (["plan", "--size", "10", "--env", "ALE/Pong-v5"], ["probe", "ALE/Pong-v5"]):
        program = [sys.executable, "-m", "rl_ext_core", *command]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "se --env ale_py:ALE/Pong-v5" in done.stderr or 'use "ale_py:ALE/Pong-v5"' in done.stderr
