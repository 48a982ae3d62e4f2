"""A lock between processes that the system frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context
from typing import Any

import numpy as np

from rl_ext_core.errors import NotCopyableError, StorageError
from rl_ext_core.frames._region import Region

_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


class ProcessLock:
    """Like :func:`multiprocessing.RLock`, but whoever comes next is not blocked for ever by a holder that was killed.

    Locks of the kernel belong to an open file description: each process opens one file in memory anew, and the kernel
    frees the lock with the description. What the holder had changed may be half done then; :attr:`recover` is called
    with its number before anything else is done under the lock.

    A process that was forked must not use it, since it has its parent's description.
    """

    def __init__(self) -> None:
        self._open(Region(np.dtype(np.int64).itemsize))

    def _open(self, region: Region) -> None:
        self.recover: Callable[[int], None] | None = None
        self._region = region
        self._holder = region.array(0, (1,), np.int64).data
        self._threads = threading.RLock()
        self._depth = 0
        self._pid = os.getpid()
        path = f"/proc/self/fd/{region.descriptor}"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"cannot open {path}: {error.strerror}; processes share memory by way of /proc"
            ) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # threads may use it until the very end
        _locks.add(self)

    def __enter__(self) -> None:
        self.check_process()
        self._threads.acquire()
        try:
            if self._depth == 0:
                self._take()
            self._depth += 1
        except BaseException:
            if self._depth == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._threads.release()
            raise

    def _take(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        if (dead := self._holder[0]) and self.recover is not None:
            self._depth += 1  # it may use the lock
            try:
                self.recover(dead)
            finally:
                self._depth -= 1
        self._holder[0] = self._pid

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder[0] = 0
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def check_process(self) -> None:
        """
        :raises NotCopyableError: in a process that was forked from the one that made it.
        """
        if self._pid != os.getpid():
            raise NotCopyableError(
                "this storage came along with a fork, which copies one part of it and shares the other; start the "
                'process with multiprocessing.get_context("spawn") and pass it the buffer as an argument'
            )

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return _sent, (self._region,)


def _sent(region: Region) -> ProcessLock:
    lock = ProcessLock.__new__(ProcessLock)
    lock._open(region)
    return lock


def _close_in_child() -> None:
    # Otherwise a child that was forked keeps the lock that its parent holds when that one dies.
    for lock in list(_locks):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)
