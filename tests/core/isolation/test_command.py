"""``rl-ext probe`` answers with a verdict and a status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.cli import main
from rl_ext_core.isolation import Verdict
from tests.boundaries import ROOT

MODULE = "tests.core.isolation.simulator"


def status_of(*arguments: str) -> object:
    try:
        return main(["probe", *arguments])
    except SystemExit as ended:  # argparse ends the program itself
        return ended.code


@pytest.mark.slow
def test_a_verdict_is_shown_and_kept(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    assert status_of(f"{MODULE}:DrawsFromNumPy") == 0
    first = capsys.readouterr()
    assert first.err == ""
    assert first.out.startswith("shared-state   (says the probe, in ")
    assert "Use one process per environment." in " ".join(first.out.split())
    assert "step    " in first.out
    assert len(list(own_cache.iterdir())) == 1
    assert status_of(f"{MODULE}:DrawsFromNumPy") == 0
    assert "(says the cache, in " in capsys.readouterr().out


def test_json_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("CartPole-v1", "--json", "--no-cache", "--steps", "20") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["isolation"] == "independent"
    assert "in 20 steps" in Verdict.from_json(text).explanation


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("simulator:exits", "building it raises SystemExit: no license"),
        ("test_what_is_tried:fails_at_reset", "resetting it raises RuntimeError: no world"),
    ],
)
def test_an_environment_that_is_broken_or_cannot_be_tried_is_status_one(
    name: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert status_of(f"tests.core.isolation.{name}", "--no-cache") == 1
    printed = capsys.readouterr()
    assert text in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text(f"from {MODULE} import Plain as make\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [Path(sys.executable).parent / "rl-ext", "probe", "own_module:make"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("independent ")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("nonsense:make",),
        (f"{MODULE}:nonsense",),
        (f"{MODULE}:",),
        ("os:sep",),
        ("CartPole-v1", "--steps", "3"),
        ("CartPole-v1", "--steps", "many"),
        ("CartPole-v1", "--nonsense"),
        (f"{MODULE}:SaysNonsense",),
    ],
)
def test_wrong_usage_is_answered_in_one_sentence(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rl-ext")
    assert printed.err.count("\n") == 1
