"""Where numba cannot keep what it compiles, everything works, and one sentence says why it takes longer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

COPY = """
import logging
import numpy as np

logging.basicConfig(format="LOG %(levelname)s %(message)s")
from rl_ext_core.frames.machine import sum_rows

source, sums = np.arange(99, dtype=np.uint8), np.zeros(1, np.uint32)
sum_rows(np.array([source.ctypes.data], np.uint64), np.array([99]), np.zeros(1, np.int64), sums)
assert sums[0] > 0
from rl_ext_core.frames import decode  # others: nothing is said again
print("works")
"""
NO_FOLDER = "from numba.core.caching import FunctionCache\nFunctionCache._impl_class._locator_classes = []\n"
FULL_DISK = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
STORE = """
import numpy as np
from rl_ext_core.frames import FrameStore, StackLayout
store = FrameStore(8, 1, StackLayout((4, 20, 20), np.dtype(np.uint8), 4, 0))
stack = np.arange(1600, dtype=np.uint8).reshape(1, 4, 20, 20)
store.append(stack, stack)
found = np.empty_like(stack)
store.get(np.zeros(1, np.int64), np.zeros(1, np.int64), found)
assert (found == stack).all()
print("works")
"""


def _run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PATH": os.environ["PATH"], **environ}
    return subprocess.run(
        [sys.executable, "-B", "-c", code], env=environ, capture_output=True, text=True, timeout=600, check=False
    )


INTERRUPTED = """
import signal
import numpy as np
from rl_ext_core.frames import FrameStore, StackLayout

signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does
rng = np.random.default_rng(0)
frames = [rng.integers(1, 255, (20, 20), dtype=np.uint8) for _ in range(64)]
stacks = [np.stack(frames[start : start + 4])[None] for start in range(60)]
store, added, times = None, 0, [0.3, 1.5, 3.0, 0.1, 0.0]
while added < 59:
    try:
        if times:
            signal.setitimer(signal.ITIMER_REAL, times.pop(0))
        store = store or FrameStore(100, 1, StackLayout((4, 20, 20), np.dtype(np.uint8), 4, 0))
        while added < 59:
            store.append(stacks[added], stacks[added + 1])
            added = store.size
    except KeyboardInterrupt:
        added = 0 if store is None else store.size
found, nexts = np.empty((2, 59, 4, 20, 20), np.uint8)
store.get(np.arange(59), np.zeros(59, np.int64), found, nexts)
assert (found == np.concatenate(stacks[:59])).all() and (nexts == np.concatenate(stacks[1:])).all()
print("works")
"""


@pytest.mark.slow
def test_who_interrupts_the_compiling_and_goes_on_loses_nothing(tmp_path: Path) -> None:
    done = _run(INTERRUPTED, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.returncode) == ("works\n", 0), done.stderr


@pytest.mark.sample
@pytest.mark.parametrize("trouble", [NO_FOLDER, FULL_DISK], ids=["no folder", "a full disk"])
def test_without_a_cache_it_compiles_and_says_so_once(trouble: str, tmp_path: Path) -> None:
    done = _run(trouble + COPY, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.returncode) == ("works\n", 0), done.stderr
    assert done.stderr.count("LOG WARNING") == 1
    assert "numba cannot keep what it compiles" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr


@pytest.mark.slow
def test_a_cache_that_is_damaged_is_no_reason_to_fail(tmp_path: Path) -> None:
    """Its index is where a folder is: it cannot be read, nor written."""
    assert _run(COPY, NUMBA_CACHE_DIR=str(tmp_path)).returncode == 0
    for index in tmp_path.rglob("*.nbi"):
        index.unlink()
        index.mkdir()
    done = _run(COPY, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.returncode) == ("works\n", 0), done.stderr
    assert done.stderr.count("LOG WARNING") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("setpriv") is None or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="needs root and setpriv, to become a user without a home",
)
def test_a_user_without_a_home_in_a_container_can_use_a_store() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, "-B", "-c", STORE],
        env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "HOME": "/nonexistent"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("works\n", 0), done.stderr
    assert "numba cannot keep what it compiles" in done.stderr
