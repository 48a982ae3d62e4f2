"""Memory and a lock that processes share. The system frees both when the last process that uses them ends."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.errors import NotCopyableError, StorageError

_ALIGNMENT = 64  # bytes


class MemoryFile:
    """Memory of zeros that child processes share, to which this object is sent when they are started.

    :param n_bytes: Size in bytes. A page takes memory once it was written to.
    :param sent: Descriptor that another process has sent, or None to create the memory.
    :ivar descriptor: Descriptor of a file in memory.
    """

    def __init__(self, n_bytes: int, sent: Any = None) -> None:
        if sent is None:
            self.descriptor, _ = _system.new_memory_file("rl-ext-frames")
            os.ftruncate(self.descriptor, n_bytes)
        else:
            self.descriptor = sent.detach()
        self.n_bytes = n_bytes
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._close.atexit = False  # because threads may use it until the process ends

    def map(self, offset: int, n_bytes: int) -> Any:
        """Map a part, which begins at a page.

        :return: Object with the buffer protocol, which keeps the part mapped while it is referenced.
        """
        return _system.map_whole_file(self.descriptor, n_bytes, offset)

    def arrays(self, *forms: tuple[tuple[int, ...], npt.DTypeLike]) -> list[npt.NDArray[Any]]:
        """Return arrays of these shapes and dtypes, one behind the other."""
        memory = np.frombuffer(self.map(0, self.n_bytes), np.uint8)
        found, start = [], 0
        for shape, dtype in forms:
            size = count_bytes((shape, dtype))
            n = int(np.prod(shape)) * np.dtype(dtype).itemsize
            found.append(memory[start : start + n].view(dtype).reshape(shape))
            start += size
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return MemoryFile, (self.n_bytes, _system.picklable_descriptor(self.descriptor))


def count_bytes(*forms: tuple[tuple[int, ...], npt.DTypeLike]) -> int:
    """Return the size of a :class:`MemoryFile` for arrays of these shapes and dtypes."""
    sizes = (int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in forms)
    return sum(max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT for size in sizes)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


class ProcessLock:
    """Reentrant lock between processes, which the system frees if its holder is killed.

    Each process opens the same file in memory, and the kernel frees a lock together with its open file description.

    A forked process must not use the lock, because it shares the description of its parent.

    :param memory: Memory of the lock of another process, or None for a new lock.
    :ivar recover: Called with the process ID of a holder that was killed, whose data may be incomplete; or None.
    :ivar on_enter: Called after the lock was acquired, and after ``recover``; or None.
    :ivar on_exit: Called before the lock is released; or None.
    """

    def __init__(self, memory: MemoryFile | None = None) -> None:
        self.recover: Callable[[int], None] | None = None
        self.on_enter: Callable[[], None] | None = None
        self.on_exit: Callable[[], None] | None = None
        self._memory = MemoryFile(_system.PAGE) if memory is None else memory
        self._holder = self._memory.arrays(((1,), np.int64))[0].data
        self._threads = threading.RLock()
        self._depth = 0
        self._pid = os.getpid()
        try:
            self._descriptor = _system.reopen_for_locking(self._memory.descriptor)
        except OSError as error:
            raise StorageError(
                f"cannot open {error.filename}: {error.strerror}. Processes share memory through /proc: mount it"
            ) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # because threads may use the lock until the process ends
        _locks.add(self)

    def __enter__(self) -> None:
        self.check_process()
        self._threads.acquire()
        try:
            if self._depth == 0:
                _system.lock(self._descriptor)
                self._depth += 1  # because the functions may use the lock
                try:
                    if (dead := self._holder[0]) and self.recover is not None:
                        self.recover(dead)
                    if self.on_enter is not None:
                        self.on_enter()
                finally:
                    self._depth -= 1
                self._holder[0] = self._pid
            self._depth += 1
        except BaseException:
            if self._depth == 0:
                _system.unlock(self._descriptor)
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self.on_exit is not None:
                self.on_exit()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._holder[0] = 0
                _system.unlock(self._descriptor)
            self._threads.release()

    def check_process(self) -> None:
        """Check that this process was not forked from the one that created the lock.

        :raises NotCopyableError: If it was.
        """
        if self._pid != os.getpid():
            raise NotCopyableError(
                "this process was forked, which copies one part of the storage and shares the other. Start the process "
                'with multiprocessing.get_context("spawn"), and pass it the buffer as an argument'
            )

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return ProcessLock, (self._memory,)


def _close_in_child() -> None:
    """Close the files of all locks in a forked child, which must not share them."""
    # Otherwise a forked child would keep the lock if its parent dies as the holder.
    for lock in list(_locks):
        lock._close()


_system.after_fork(_close_in_child)
