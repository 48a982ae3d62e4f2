"""Runs scripts that start a cluster: Ray's processes are no children of what started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "RL_EXT_TEST_RUN"


def run_ray_script(arguments: list[str], root: Path, *, limit_s: float) -> str:
    """Run a script, check that it leaves nothing behind, and give what it prints.

    :param arguments: of the interpreter
    :param root: an empty folder with a short path, for all that it writes: those of sockets may have 107 characters
    """
    folders = {name: root / name.lower() for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "RAY")}
    for folder in folders.values():
        folder.mkdir()
    own = {**{name: str(folder) for name, folder in folders.items()}, "RAY_USAGE_STATS_ENABLED": "0", MARK: str(root)}
    with Path(root, "errors").open("w+") as errors:
        script = subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with script:
            try:
                output, _ = script.communicate(timeout=limit_s)
            finally:
                script.kill()
                processes = wait_for_marked_processes(str(root))
                for process in processes:
                    process.kill()
                psutil.wait_procs(processes)
        errors.seek(0)
        error_text = errors.read()
    assert script.returncode == 0, error_text
    assert processes == []
    assert "leaked" not in error_text
    assert os.listdir(folders["TMPDIR"]) == []
    return output


def wait_for_marked_processes(mark: str) -> list[psutil.Process]:
    """List what still runs of those that were given this variable; servers end just after what they served."""
    deadline = time.monotonic() + 120
    while True:
        running = [process for process in psutil.process_iter() if has_mark(process, mark)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


def has_mark(process: psutil.Process, mark: str) -> bool:
    """Whether a process was given this variable."""
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.Error:
        return False
