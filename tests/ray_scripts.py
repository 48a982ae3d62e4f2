"""Runs scripts that start a Ray cluster, whose processes are not children of the script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "RL_EXT_TEST_RUN"


def run_ray_script(arguments: list[str], root: Path, *, limit_s: float) -> str:
    """Run a script, check that it leaves no process or file, and return its output.

    :param arguments: arguments of the Python interpreter
    :param root: empty folder for the files of the script. Its path must be short, because paths of sockets may have
        107 characters
    :param limit_s: time limit in seconds
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
    assert script.returncode == 0, output + error_text
    assert processes == []
    assert "leaked" not in error_text
    assert os.listdir(folders["TMPDIR"]) == []
    return output


def wait_for_marked_processes(mark: str) -> list[psutil.Process]:
    """Wait up to 120 s for the end of a script's processes, and return the running ones.

    :param mark: value of the environment variable that marks these processes
    """
    deadline = time.monotonic() + 120
    while True:
        running = [process for process in psutil.process_iter() if has_mark(process, mark)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


def has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.Error:
        return False
