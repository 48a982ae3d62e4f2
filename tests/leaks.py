"""What a test session may not leave behind: processes and files."""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

# Files in these are made by running anything at all, or by benchmarks that may run beside the tests.
IGNORED_FOLDERS = {"__pycache__", "build", "dist", "data", "results", "out"}


def files_below(root: Path) -> set[Path]:
    """List the files below ``root``, without hidden ones (caches, virtual environment, editors' files)."""
    found: set[Path] = set()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in IGNORED_FOLDERS and name[0] != "."]
        found.update(Path(folder, name) for name in names if name[0] != ".")
    return found


def children_left(*, grace_s: float = 5.0) -> list[str]:
    """Describe the child processes that are still there after ``grace_s`` seconds."""
    children = psutil.Process().children(recursive=True)
    own = [child for child in children if child.pid not in _pids_of_multiprocessing()]
    _, alive = psutil.wait_procs(own, timeout=grace_s)
    return [_describe(child) for child in alive]


def _pids_of_multiprocessing() -> set[int | None]:
    """Processes that multiprocessing keeps until the interpreter ends, by design."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return {tracker, server}


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
