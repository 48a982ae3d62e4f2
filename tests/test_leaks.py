"""Tests that the check for leaks of a session can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.processes.server import stop_server
from tests.leaks import files_below, ignore_running_processes, remaining_children, running_workers
from tests.programs import stop_servers

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def no_servers() -> None:
    """Stop the servers of earlier tests, which run until the session ends."""
    stop_server()
    stop_servers()


def find_new(before: list[str]) -> list[str]:
    """Return the pids of remaining children that are not those of fixtures."""
    return [line.split(":")[0] for line in remaining_children(grace_s=0) if line not in before]


def test_running_child_is_reported() -> None:
    before = remaining_children(grace_s=0)
    with subprocess.Popen(SLEEP) as child:
        try:
            assert find_new(before) == [str(child.pid)]
        finally:
            child.kill()


def test_workers_of_a_test_exclude_processes_that_ran_before_it() -> None:
    with subprocess.Popen(SLEEP) as earlier:
        try:
            ignore_running_processes()
            assert running_workers(grace_s=60) == []
            with subprocess.Popen(SLEEP) as worker:
                try:
                    assert [process.pid for process in running_workers(grace_s=0.1)] == [worker.pid]
                finally:
                    worker.kill()
            assert earlier.poll() is None
            assert running_workers(grace_s=60) == []
        finally:
            earlier.kill()


def test_orphan_of_an_ended_child_is_reported() -> None:
    script = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    before = remaining_children(grace_s=0)
    left = subprocess.run([sys.executable, "-c", script, *SLEEP], stdout=subprocess.PIPE, text=True, check=True)
    try:
        assert find_new(before) == [left.stdout.strip()]
    finally:
        os.kill(int(left.stdout), signal.SIGKILL)


def test_new_files_are_reported_except_caches_and_hidden_files(tmp_path: Path) -> None:
    before = files_below(tmp_path)
    names = ("deep/er/left.bin", "__pycache__/a.pyc", ".cache/b", ".hidden", "out/plot.png")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert files_below(tmp_path) - before == {tmp_path / names[0]}


@pytest.mark.slow
def test_session_with_a_leak_fails(tmp_path: Path) -> None:
    """Run a session with the project's conftest and a test that leaks a temporary file."""
    conftest = Path(__file__).with_name("conftest.py")
    offender = tmp_path / "test_offender.py"
    offender.write_text("import tempfile\ndef test_leak():\n    tempfile.mkstemp(prefix='forgotten')\n")
    command = [sys.executable, "-m", "pytest", "-q", f"--confcutdir={tmp_path}", f"--rootdir={tmp_path}"]
    command += ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", str(offender)]
    # The leak of these inner sessions is not one of the session that runs this test.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert plain.returncode == 0, plain.stdout
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    env_root = str(conftest.parent.parent)
    code = f"import sys; sys.path.insert(0, {env_root!r}); import pytest; sys.exit(pytest.main({command[3:]!r}))"
    command = [sys.executable, "-c", code]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert checked.returncode == 1, checked.stdout
    assert "temporary" in checked.stdout
    assert "forgotten" in checked.stdout
