"""Test that the check for leaks of a session can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A process that a child has left, one of this process, and a temporary file.
OFFENDER = """
import subprocess, sys, tempfile
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
LEAVE = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)"
def test_leak():
    tempfile.mkstemp(prefix="forgotten")
    subprocess.Popen(SLEEP)
    subprocess.run([sys.executable, "-c", LEAVE, *SLEEP], check=True)
"""


@pytest.mark.slow
def test_session_with_leaks_fails(tmp_path: Path) -> None:
    """Run a session with the project's conftest and a test that leaks."""
    conftest = Path(__file__).with_name("conftest.py")
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    (tmp_path / "test_offender.py").write_text(OFFENDER)
    options = ["-q", f"--confcutdir={tmp_path}", f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    options += [f"--basetemp={tmp_path / 'base'}", str(tmp_path / "test_offender.py")]
    root = str(conftest.parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); import pytest; sys.exit(pytest.main({options!r}))"
    # The leaks of the inner session are not those of the session that runs this test.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    # A set, because with CI set the summary repeats them.
    pids = {int(pid) for pid in re.findall(r"^process (\d+): .*time.sleep", done.stdout, re.MULTILINE)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1, done.stdout
    assert len(pids) == 2, done.stdout
    assert re.search("^temporary .*forgotten", done.stdout, re.MULTILINE)
