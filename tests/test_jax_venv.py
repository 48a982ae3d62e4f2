"""Test files that need JAX or Triton, run in .venv-jax."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.jax_venv import ROOT, run_in_jax_venv

FILES = ["tests/core/frames/test_gpu_decode.py", "tests/torchrl_ext/test_jax_values.py"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("envpool") is not None, reason="this is .venv-jax")
@pytest.mark.parametrize("file", FILES)
def test_file_passes_in_jax_venv(file: str, tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not exhaustive", "--rootdir", str(ROOT)]
    options += ["-c", str(ROOT / "pyproject.toml")]
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options, str(ROOT / file)).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
