"""Buffers and workers on imitations of Windows and macOS, which lack features of Linux.

``stand_in/sitecustomize.py`` hides these features in the tests' process and its children. The tests are the scripts
``buffers.py`` and ``dll.py``. ``scripts/windows_under_wine.sh`` runs them with a Windows Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import compile_library

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
# Other systems than Linux are tested without an imitation.
SYSTEMS = ("windows", "macos") if sys.platform == "linux" else ("",)


def run(system: str, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(STAND_IN), str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "RL_EXT_STAND_IN": system, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environ = {name: value for name, value in environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_buffers(system: str) -> None:
    """Run ``buffers.py``, which also tests processes that share memory or are killed."""
    done = run(system, "tests/platforms/buffers.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "not run: sb3_ext" not in done.stdout
    assert "doctor" in done.stdout


# On an imitation, probes and spawned workers take minutes, so one system runs a feature that both lack.
ONE_PROCESS, DEATHS = "test_make_vec_env_starts_one_process_per_instance", "test_error_names_how_a_worker_died"
IMITATED: dict[str, tuple[str, ...]] = {"windows": (ONE_PROCESS,), "macos": (ONE_PROCESS, DEATHS)}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_library_with_one_instance_per_process(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *options = ("simulator.dll", "-static") if sys.platform == "win32" else ("lib.so", "-fPIC", "-pthread")
    compile_library(Path(__file__).with_name("simulator.c"), tmp_path / name, *options)
    monkeypatch.setenv("RL_EXT_TEST_LIBRARY", str(tmp_path / name))
    names = IMITATED.get(system, ())
    done = run(system, "tests/platforms/dll.py", *names)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert all(f"ok     {name}" in done.stdout for name in names or [DEATHS])
