"""What runs upstream's own tests with our classes: it replaces what exists, and tells what falls."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "upstream_tests", raising=False)
    return importlib.import_module("upstream_tests")


@pytest.mark.parametrize("suite", ["sb3", "sb3-contrib", "torchrl"])
def test_each_class_stands_in_for_the_one_that_it_extends(script: Any, suite: str) -> None:
    for old, new in script.SUITES[suite].replaced.items():
        theirs, ours = script._find(old), script._find(new)
        assert theirs is not ours
        assert callable(ours)


def test_a_test_that_fails_with_our_classes_only_is_told(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"a::passes": "passed", "a::falls[x]": "passed", "a::gone": "passed", "a::fails": "failed"}
    ours = {"a::passes": "passed", "a::falls[x]": "failed", "a::fails": "failed"}
    assert script._compare(theirs, ours, {"a::falls[x]": "It has to."}) == 1
    printed = capsys.readouterr().out
    assert "1 differ on purpose: a::falls[x]\n    It has to." in printed
    assert "passes there, missing here: a::gone" in printed
    assert "a::fails" not in printed
    assert script._compare({"a::passes": "passed"}, {"a::passes": "passed"}, {"a::falls*": "It had to."}) == 0
    assert "on purpose: a" not in capsys.readouterr().out
