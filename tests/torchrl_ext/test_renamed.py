"""Where TorchRL has renamed a private name that is used here, its public way is taken, and one warning says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensordict

from torchrl_ext import _compat

SCRIPT = Path(__file__).with_name("renamed.py")
NAMES = " ".join(
    [_compat._SUPERVISION_NAMES, _compat._FAST_PATH_NAMES, _compat._TENSORDICT_NAMES, _compat._WRAPPER_NAMES]
).split()
# TensorDict makes the first of pieces, so that a source without it does not work. Of the second, objects are sent from
# processes that read the sources as they are.
CANDIDATES = sorted({name for name in NAMES if name[0] == "_"} - {"_device", "_tensordict"})


def outcome(name: str) -> dict[str, Any]:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])},
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CANDIDATES)
def test_a_name_that_is_gone_costs_speed_and_nothing_else(name: str) -> None:
    found = outcome(name)
    assert found["messages"], f"nothing says that {name} is gone"
    for text in found["messages"]:
        assert f"tensordict {tensordict.__version__} has no " in text
        assert name in text
    assert len(set(found["messages"])) == len(found["messages"])
    for ours, theirs in (found["single"], found["workers"], found["serial"]):
        assert ours == theirs


@pytest.mark.exhaustive
def test_nothing_is_said_where_all_names_are_there() -> None:
    found = outcome("a_name_that_nobody_has")
    assert found["messages"] == []
    for ours, theirs in (found["single"], found["workers"], found["serial"]):
        assert ours == theirs
