"""Test files that need packages of another virtual environment, run in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.jax_venv import ROOT, run_in_jax_venv

# Per file: its virtual environment, a package that only this has, and more options.
# Each file has its own session, because Triton's interpreter must be chosen before another file imports torch.
FILES: dict[str, tuple[str, str, list[str]]] = {
    "core/frames/test_gpu_decode.py": (".venv-jax", "envpool", []),
    "torchrl_ext/test_jax_values.py": (".venv-jax", "envpool", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_file_passes_in_its_virtual_environment(file: str, tmp_path: Path) -> None:
    venv, package, options = FILES[file]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"this is {venv}")
    options = [*options, "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", f"--rootdir={ROOT}"]
    options += [f"--config-file={ROOT}/pyproject.toml", str(ROOT / "tests" / file)]
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options, venv=ROOT / venv).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
