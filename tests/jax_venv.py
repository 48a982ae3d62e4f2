"""Virtual environments of packages that conflict with those of other tests.

.venv-jax has JAX, SBX, rl-zoo3, EnvPool and Brax. .venv-meltingpot has Melting Pot.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.core.devices.fakes.build import skip_or_fail
from tests.core.devices.run_code import environment

ROOT = Path(__file__).resolve().parents[1]


def find_python(name: str) -> Path:
    """Return the interpreter of a virtual environment, or skip the test.

    If CI is set, only the reason that the setup script recorded skips the test.
    """
    venv = ROOT / f".venv-{name}"
    if (venv / ".installed").exists():
        return venv / "bin" / "python"
    if (venv / ".skipped").exists():
        pytest.skip((venv / ".skipped").read_text().strip())
    skip_or_fail(f"{venv} does not exist. Run scripts/make_{name}_venv.sh")


def run_in_jax_venv(folder: Path, *arguments: str) -> str:
    """Run Python in .venv-jax, and return its output.

    :param folder: working directory of the program, and its folder for temporary files
    :param arguments: arguments of the Python interpreter
    """
    # JAX and torch would use all CPU cores, which other tests need too.
    variables = environment(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TMPDIR=str(folder))
    program = [str(find_python("jax")), *arguments]
    done = subprocess.run(program, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
