"""Tests of LeRobot datasets, run in .venv-lerobot, which has LeRobot, PyAV and torchcodec."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.jax_venv import ROOT, run_in_jax_venv

VENV = ROOT / ".venv-lerobot"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="this is .venv-lerobot")
@pytest.mark.skipif(
    not (VENV / ".installed").exists(), reason=f"{VENV} is not there; make it with: scripts/make_lerobot_venv.sh"
)
def test_lerobot_datasets_in_lerobot_venv(tmp_path: Path) -> None:
    # Warnings are those of LeRobot and of its libraries.
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        f"--rootdir={ROOT}",
        f"--config-file={ROOT}/pyproject.toml",
    ]
    file = str(ROOT / "tests" / "test_lerobot_datasets.py")
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options, file, venv=VENV).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
