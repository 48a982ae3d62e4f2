from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.cli import main
from rl_ext_core.frames import planning

SHAPE = ("plan", "--shape", "100,100,9", "--size", "1000000")

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

class Suite:
    class Inner:
        build = Pixels.make

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
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_environments.py").write_text(MODULE)
    (tmp_path / "my_module_nearby.py").touch()
    (tmp_path / "my_broken_module.py").write_text("raise ValueError('one\\ntwo')")
    return "my_environments"


def test_estimates_are_printed_as_a_table_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 24_000_000_000)
    assert main(SHAPE) == 0
    text = capsys.readouterr().out
    for part in ("1,000,000 transitions of 100x100x9 uint8; n_stack 3, n_envs 1", "ESTIMATES", "free memory: 24 GB"):
        assert part in text
    assert main([*SHAPE, "--max-bytes", "1MB"]) == 1
    assert "max_bytes: 1 MB" in capsys.readouterr().out
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


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plan --size 10", "pass --shape, for example --shape 100,100,9, or an environment with --env"),
        ("plan --size 10 --env Nope-v0", "gymnasium does not know the id 'Nope-v0'"),
        ("plan --size 10 --env my_broken_module:make", "'my_broken_module' cannot be imported (ValueError: one two)"),
        ("plan --size 10 --env CartPole-v1 --dtype int8", "--dtype int8 cannot be used with --env"),
        ("plan --size 10 --shape 9,9 --steps 300", "--steps needs --env"),
        ("plan --size 10 --shape 9,9 --dtype O", "dtype=object is not numeric"),
        ("plan --size 10 --env {module}:gives_a_class", "env() returned <class 'my_environments.Loud'>, expected"),
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


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("name", ["Pixels", "Pixels.make", "Suite.Inner.build", "MyPixels-v0"])
def test_commands_accept_the_same_environment_names(
    capsys: pytest.CaptureFixture[str], module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "--size", "1000", "--env", f"{module}:{name}", "--steps", "150", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [12, 12]
    assert main(["probe", f"{module}:{name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isolation"] == "independent"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere:make", "'nowhere:make': 'nowhere' cannot be imported (ModuleNotFoundError: "),
        ("{}:nothing", "'my_environments' has no 'nothing'"),
        ("{}:Pixels.nothing", "'my_environments' has no 'Pixels.nothing'"),
        ("{}:number", "is 3, which cannot build an environment"),
        ("os:sep", "is '/', which cannot build an environment"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "--size", "9", "--env"], ["probe"]], ids=["plan", "probe"])
def test_commands_reject_invalid_environment_names(
    capsys: pytest.CaptureFixture[str], module: str, command: list[str], name: str, text: str
) -> None:
    assert main([*command, name.format(module)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert "Expected module:function, module:Class.method, or a gymnasium id" in printed.err
    assert printed.err.count("\n") == 1
