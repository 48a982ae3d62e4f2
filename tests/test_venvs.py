"""Test files that need packages of another virtual environment, run in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.jax_venv import ROOT, run_in_jax_venv

# File, its virtual environment, a package that only this has, and more options. Warnings of LeRobot are not errors.
# Each file has its own session, because Triton's interpreter must be chosen before another file imports torch.
NOT_EXHAUSTIVE = ["-m", "not exhaustive"]
SOME_ROWS = "not masks and not finished and not infos and (rows_equal or rejected)"
FILES = [
    ("core/frames/test_gpu_decode.py", ".venv-jax", "envpool", NOT_EXHAUSTIVE),
    ("torchrl_ext/test_jax_values.py", ".venv-jax", "envpool", NOT_EXHAUSTIVE),
    ("test_lerobot_datasets.py", ".venv-lerobot", "lerobot", [*NOT_EXHAUSTIVE, "-W", "ignore"]),
    *(
        pytest.param(
            *("test_stepper.py", ".venv-jax", "envpool"),
            ["-m", "", "-k", f"(EnvPool or JAX or Brax) and {rows}"],
            marks=[] if rows == SOME_ROWS else pytest.mark.exhaustive,
        )
        for rows in (SOME_ROWS, "not registered")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "venv", "package", "options"), FILES)
def test_file_passes_in_its_virtual_environment(
    file: str, venv: str, package: str, options: list[str], tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"this is {venv}")
    options = [*options, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    options += [f"--config-file={ROOT}/pyproject.toml", str(ROOT / "tests" / file)]
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options, venv=ROOT / venv).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
