"""Test files that need packages of .venv-jax, run in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.requirements import ROOT, run_in_jax_venv

# File, and options of pytest. Each file has its own session, because Triton's interpreter must be chosen before another
# file imports torch.
NOT_EXHAUSTIVE = ["-m", "not exhaustive"]
ROWS = ["-m", "", "-k", "(EnvPool or JAX or Brax)"]
SOME_ROWS = [
    *ROWS[:-1],
    f"{ROWS[-1]} and not masks and not finished and not infos and not limit and (rows_equal or rejected)",
]
FILES = [
    ("core/frames/test_gpu_decode.py", NOT_EXHAUSTIVE),
    ("torchrl_ext/test_jax_values.py", NOT_EXHAUSTIVE),
    ("test_stepper.py", SOME_ROWS),
    pytest.param("test_stepper.py", ROWS, marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "options"), FILES)
def test_file_passes_in_its_virtual_environment(file: str, options: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec("envpool") is not None:
        pytest.skip("this is .venv-jax")
    options = [*options, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    options += [f"--config-file={ROOT}/pyproject.toml", str(ROOT / "tests" / file)]
    summary = run_in_jax_venv(tmp_path, "-m", "pytest", *options).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
