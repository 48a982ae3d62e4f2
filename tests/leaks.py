"""Detection of processes and files that a test session leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

# Folders with files that every run creates, or that benchmarks create, which may run at the same time.
IGNORED_FOLDERS = {"__pycache__", "build", "dist", "data", "results", "out", "_build", "notebooks"}
# Parts of the command lines of processes that run as long as this one.
_LONG_LIVED = ("forkserver", "resource_tracker", "tests.programs")
# Processes of fixtures and of earlier tests, which a test must not count as its own.
_earlier_processes: set[psutil.Process] = set()


def files_below(root: Path) -> set[Path]:
    """Return the files under a folder, except hidden ones and those of ignored folders."""
    found: set[Path] = set()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in IGNORED_FOLDERS and name[0] != "."]
        found.update(Path(folder, name) for name in names if name[0] != ".")
    return found


def ignore_running_processes() -> None:
    """Exclude the processes that run now from ``running_workers``. Call it at the start of a test."""
    _earlier_processes.clear()
    _earlier_processes.update(psutil.Process().children(recursive=True))


def running_workers(*, grace_s: float = 0.0) -> list[psutil.Process]:
    """Return the processes that the current test has started and that still run after a grace period.

    These are descendants of this process, without fork servers, resource trackers and ignored processes.
    """
    end = time.monotonic() + grace_s
    while (found := _new_descendants()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _new_descendants() -> list[psutil.Process]:
    """Return the descendants of this process that may be workers of the current test."""
    found = []
    for process in set(psutil.Process().children(recursive=True)) - _earlier_processes:
        with contextlib.suppress(psutil.Error):
            kept = process.ppid() == os.getpid() and _is_long_lived(process)
            if not kept and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_long_lived(process: psutil.Process) -> bool:
    return any(mark in " ".join(process.cmdline()) for mark in _LONG_LIVED)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(pids: Iterable[int]) -> None:
    """Wait until processes that may be others' children have ended, and fail after two minutes."""
    end = time.monotonic() + 120
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def remaining_children() -> list[str]:
    """Describe descendants and orphans that still run after 5 seconds.

    Orphans are processes whose parent has ended. They have the ``TMPDIR`` of this process.
    """
    children = psutil.Process().children(recursive=True)
    # Fork servers must have ended, except multiprocessing's own, which run until the interpreter ends.
    kept = {getattr(resource_tracker._resource_tracker, "_pid", None)}
    kept.add(getattr(forkserver._forkserver, "_forkserver_pid", None))
    own = [child for child in children if child.pid not in kept]
    orphans = [process for process in psutil.process_iter() if process not in children and _is_orphan(process)]
    _, alive = psutil.wait_procs(own + orphans, timeout=5)
    found = []
    for process in alive:
        found.append(f"{process.pid}: ")
        with contextlib.suppress(psutil.Error):
            found[-1] += " ".join(process.cmdline())[:200]
    return found


def _is_orphan(process: psutil.Process) -> bool:
    """Return whether a process has this session's temporary folder and was left by a child."""
    with contextlib.suppress(psutil.Error):
        folder = os.environ.get("TMPDIR")
        is_server = _is_long_lived(process) and "tests.programs" not in process.cmdline()  # whose programs are left
        return folder is not None and not is_server and process.environ().get("TMPDIR") == folder
    return False
