"""Ends processes, and whatever they have started, wherever it has hidden; and what they have waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from rl_ext_core._families import kill_own_family

__all__ = ["adopt_orphans", "die_with_parent", "end_all", "kill_group", "waited"]

_REAP_S = 5.0
# linux/prctl.h
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, so that they can be found."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a leader of a group and its group; one that has ended must not have been waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_all() -> None:
    """Kill whatever descends from here, and wait for it."""
    until = time.monotonic() + _REAP_S
    while time.monotonic() < until:
        kill_own_family()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def waited(pid: int | str = "self") -> float:
    """Give seconds for which a process was ready to run and others had the cores; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):  # not Linux, or it has ended
        return 0.0


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
