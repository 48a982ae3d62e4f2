from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_ext_core.cli import main

MODULE = "tests.core.isolation.simulator"


@pytest.mark.slow
def test_verdict_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"{MODULE}:DrawsFromNumPy"]) == 0
    first = capsys.readouterr()
    assert first.err == ""
    assert first.out.startswith("shared-state   (by probe, in ")
    assert "Use one process per environment." in " ".join(first.out.split())
    assert "step    " in first.out


def test_deleted_working_directory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert main(["probe", "CartPole-v1"]) == 1
    assert "the working directory was deleted" in capsys.readouterr().err


def test_json_output_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "CartPole-v1", "--json", "--steps", "20"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["isolation"] == "independent"
    assert "in 20 steps" in verdict["explanation"]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "text"), [("FailsAtReset", "RuntimeError: no world"), ("exit_while_building", "SystemExit: no license")]
)
def test_status_is_1_without_a_verdict(
    name: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["probe", f"{MODULE}:{name}"]) == 1
    printed = capsys.readouterr()
    assert text in printed.out
    assert printed.err == ""
