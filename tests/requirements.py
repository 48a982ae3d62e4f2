"""Requirements of tests: a C compiler, and virtual environments of packages that conflict with others.

.venv-jax has JAX, SBX, rl-zoo3, EnvPool and Brax, .venv-meltingpot Melting Pot, and .venv-mujoco4 MuJoCo 4.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test that cannot run on this machine, or fail it if ``CI`` is set."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def compile_library(source: Path, library: Path, *options: str) -> None:
    """Compile a C library. Without a compiler, skip the test, or fail it if ``CI`` is set."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        skip_or_fail("no C compiler (cc) for the libraries of tests: apt-get install gcc libc6-dev")
    command = [compiler, "-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-o", str(library), str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source} does not compile:\n{done.stderr}"


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
    from tests.core.devices.run_code import environment  # here, because tests for any system import this file

    # JAX and torch would use all CPU cores, which other tests need too.
    variables = environment(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", TMPDIR=str(folder))
    program = [str(find_python("jax")), *arguments]
    done = subprocess.run(program, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
