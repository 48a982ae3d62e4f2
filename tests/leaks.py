"""What a test session may not leave behind: processes and files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

# Files in these are made by running anything at all, or by benchmarks that may run beside the tests.
IGNORED_FOLDERS = {"__pycache__", "build", "dist", "data", "results", "out"}
# In the command lines of processes that live as long as this one.
_KEPT = ("forkserver", "resource_tracker", "tests.core.devices")


def files_below(root: Path) -> set[Path]:
    """List the files below ``root``, without hidden ones (caches, virtual environment, editors' files)."""
    found: set[Path] = set()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in IGNORED_FOLDERS and name[0] != "."]
        found.update(Path(folder, name) for name in names if name[0] != ".")
    return found


def workers() -> list[psutil.Process]:
    """Return the living processes below this one, but for those that it keeps on purpose: servers that others fork
    from, and multiprocessing's tracker of resources.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            kept = process.ppid() == os.getpid() and any(mark in " ".join(process.cmdline()) for mark in _KEPT)
            if not kept and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def children_left(*, grace_s: float = 5.0) -> list[str]:
    """Describe the processes below this one that are still there after ``grace_s`` seconds, and those that others have
    left, which have its ``TMPDIR``.
    """
    children = workers()
    orphans = [process for process in psutil.process_iter() if _is_ours(process) and process not in children]
    _, alive = psutil.wait_procs(children + orphans, timeout=grace_s)
    return [_describe(child) for child in alive]


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        folder = os.environ.get("TMPDIR")
        kept = any(mark in " ".join(process.cmdline()) for mark in _KEPT)
        return folder is not None and not kept and process.environ().get("TMPDIR") == folder
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
