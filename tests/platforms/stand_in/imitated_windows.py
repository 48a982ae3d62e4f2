"""Imitation of ``rl_ext_core._windows`` by Linux calls.

It must be imported before ``sitecustomize`` hides anything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

_open, _flock, _lockf, _unlink = os.open, fcntl.flock, fcntl.lockf, os.unlink
_kill, _kill_group, _KILL = os.kill, os.killpg, signal.SIGKILL
_lock, _at_once, _free = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN


def open_temporary(path: str) -> int:
    """Open a file that is deleted when it is closed."""
    descriptor = _open(path, os.O_RDWR)
    _unlink(path)
    return descriptor


def open_unshared(path: Path) -> int:
    """Create or open a file that no other process can open at the same time."""
    descriptor = _open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _flock(descriptor, _lock | _at_once)
    except OSError as error:
        os.close(descriptor)
        raise BlockingIOError(errno.EWOULDBLOCK, "in use", str(path)) from error
    return descriptor


def lock_byte(descriptor: int, at: int) -> None:
    """Lock a byte of a file, or raise OSError if another process has locked it."""
    _lockf(descriptor, _lock | _at_once, 1, at)


def unlock_byte(descriptor: int, at: int) -> None:
    _lockf(descriptor, _free, 1, at)


def SentFile(descriptor: int) -> Any:  # noqa: N802 (a class there)
    """Return an object that sends a file descriptor to another process."""
    from multiprocessing import reduction

    return reduction.DupFd(descriptor)


class Job:
    """Process group that ``sitecustomize`` creates for a spawned process.

    Unlike a job object, it does not end with this process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def end(self) -> None:
        for kill in (_kill_group, _kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, _KILL)
