"""Runs programs in .venv-jax, which has JAX, SBX, rl-zoo3, EnvPool and Brax."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.core.devices.fakes.build import skip_or_fail
from tests.core.devices.run_code import environment

ROOT = Path(__file__).resolve().parents[1]


def run_in_jax_venv(folder: Path, *arguments: str) -> str:
    """Run Python in .venv-jax, and return its output. If it is missing, skip the test, or fail it in CI.

    :param folder: working directory of the program, and its folder for temporary files
    :param arguments: arguments of the Python interpreter
    """
    venv = ROOT / ".venv-jax"
    if not (venv / ".installed").exists():
        skip_or_fail(f"{venv} is not there; make it with: scripts/make_jax_venv.sh")
    # JAX and torch would use all CPU cores, which other tests need too.
    variables = environment(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TMPDIR=str(folder))
    program = [str(venv / "bin" / "python"), *arguments]
    done = subprocess.run(program, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
