"""Tests of scripts/upstream_tests.py, which runs upstream's tests with our classes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import ``scripts/upstream_tests.py``, also if it was imported before."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "upstream_tests", raising=False)
    return importlib.import_module("upstream_tests")


def test_compare_reports_tests_that_fail_only_with_our_classes(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    upstream_results = {"a::passes": "passed", "a::falls[x]": "passed", "a::gone": "passed", "a::fails": "failed"}
    own_results = {"a::passes": "passed", "a::falls[x]": "failed", "a::fails": "failed"}
    assert script._compare(upstream_results, own_results, {"a::falls[x]": "It has to."}) == 1
    printed = capsys.readouterr().out
    assert "1 differ on purpose: a::falls[x]\n    It has to." in printed
    assert "passes there, missing here: a::gone" in printed
    assert "a::fails" not in printed
    assert script._compare({"a::passes": "passed"}, {"a::passes": "passed"}, {"a::falls*": "It had to."}) == 0
    assert "on purpose: a" not in capsys.readouterr().out
