"""Tests with private names missing in TorchRL: one warning, and the same results."""

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

SCRIPT = Path(__file__).with_name("renamed_torchrl.py")
NAMES = " ".join(
    [
        *(_compat._FAST_PATH_NAMES, _compat._TENSORDICT_NAMES, _compat._WRAPPER_NAMES),
        *(_compat._SLICE_SAMPLER_NAMES, _compat._TRACKED_STORAGE_NAMES),
    ]
).split()
# TensorDict composes _device from parts, so renamed sources do not work. Objects with _tensordict are sent from
# processes with unchanged sources.
CANDIDATES = sorted({name for name in NAMES if name[0] == "_"} - {"_device", "_tensordict"})


def outcome(name: str) -> dict[str, Any]:
    """Run the script with a name removed, and return its output."""
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
def test_missing_private_name_costs_only_speed(name: str) -> None:
    found = outcome(name)
    assert found["messages"], f"no warning names {name}"
    for text in found["messages"]:
        assert f"tensordict {tensordict.__version__} has no " in text
        assert name in text
    assert len(set(found["messages"])) == len(found["messages"])
    for ours, theirs in (found["single"], found["workers"]):
        assert ours == theirs


@pytest.mark.exhaustive
def test_no_warning_if_all_private_names_exist() -> None:
    found = outcome("a_name_that_nobody_has")
    assert found["messages"] == []
    for ours, theirs in (found["single"], found["workers"]):
        assert ours == theirs
