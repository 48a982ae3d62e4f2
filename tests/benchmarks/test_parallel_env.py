"""Tests of the helpers of benchmarks.parallel_env."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from benchmarks import parallel_env, processes

POPEN = subprocess.Popen
MIB = 64
SLEEPS = "import time; time.sleep(600)"
FORKED = f"""
import os, sys
from benchmarks.processes import private_mib, proportional_mib
before = private_mib()
filled = b"x" * ({MIB} << 20)
alone = private_mib() - before
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
print(alone, private_mib() - before, proportional_mib())
"""


def test_memory_shared_with_a_fork_is_not_private_and_counts_half() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], check=True, stdout=subprocess.PIPE, text=True)
    alone, shared, proportional = map(float, done.stdout.split())
    assert alone == pytest.approx(MIB, abs=2)
    assert shared < 2
    assert MIB / 2 < proportional < MIB


def test_cpu_s_includes_ended_children_and_own_cpu_s_does_not() -> None:
    before, own = processes.cpu_s(), processes.own_cpu_s()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert 0.4 < processes.cpu_s() - before < 2
    assert processes.own_cpu_s() - own < 0.3


def test_run_once_kills_left_processes_and_reports_hangs_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {SLEEPS!r}]).pid)"
    replace_program(monkeypatch, program)
    pid = parallel_env.run_once("start")
    deadline = time.monotonic() + 120
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)
    replace_program(monkeypatch, SLEEPS)
    with pytest.raises(parallel_env.HangError):
        parallel_env.run_once("start", limit_s=0.5)
    replace_program(monkeypatch, "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match="no such thing"):
        parallel_env.run_once("start")


def is_alive(pid: int) -> bool:
    """Return whether a process runs; zombies count as ended."""
    # The parent of orphans may be slow to collect them, so a zombie counts as ended.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def replace_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Make each measurement run this Python code instead of the benchmark."""

    def start_program(command: list[str], **options: Any) -> Any:
        """Start the Python code, and ignore the command."""
        return POPEN([sys.executable, "-c", program], **options)

    monkeypatch.setattr("benchmarks.parallel_env.subprocess.Popen", start_program)
