"""Test files that need packages of another virtual environment, run in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.jax_venv import ROOT, run_in_jax_venv

# Per environment: a package that only it has, its test files, and more options. Warnings of LeRobot are not errors.
VENVS: dict[str, tuple[str, list[str], list[str]]] = {
    ".venv-jax": ("envpool", ["core/frames/test_gpu_decode.py", "torchrl_ext/test_jax_values.py"], []),
    ".venv-lerobot": ("lerobot", ["test_lerobot_datasets.py"], ["-W", "ignore"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("venv", VENVS)
def test_files_pass_in_another_virtual_environment(venv: str, tmp_path: Path) -> None:
    package, files, options = VENVS[venv]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"this is {venv}")
    options = [*options, "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", f"--rootdir={ROOT}"]
    options += [f"--config-file={ROOT}/pyproject.toml", *(f"{ROOT}/tests/{file}" for file in files)]
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options, venv=ROOT / venv).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
