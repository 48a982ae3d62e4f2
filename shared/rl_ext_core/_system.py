"""What operating systems do each in its own way, in one place: forks, ranges of addresses, files, and locks of files;
and variables of the environment.

Linux is what all else is measured against. macOS and others of its kind lack files in memory and room that is taken
ahead; Windows has no forks, gives memory only where it was asked for, and neither replaces nor shortens a file that is
mapped (``_windows``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import importlib.util
import mmap
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

__all__ = [
    "COMMITS_LAZILY",
    "PAGE",
    "Addresses",
    "TemporaryFolder",
    "after_fork",
    "discard_pages",
    "lock",
    "new_memory_file",
    "open_file",
    "open_exclusive",
    "reopen_for_locking",
    "process_identity",
    "read_at",
    "remove_file",
    "picklable_descriptor",
    "set_variables",
    "truncate_file",
    "allocate_file_space",
    "make_fork_safe_lock",
    "unlock",
    "write_at",
]

PAGE = mmap.ALLOCATIONGRANULARITY
WINDOWS = importlib.util.find_spec("fcntl") is None
# Whether memory may be used that was not asked for, and reads as zeros.
COMMITS_LAZILY = not WINDOWS
_windows: Any = importlib.import_module("rl_ext_core._windows") if WINDOWS else None
_fcntl: Any = None if WINDOWS else importlib.import_module("fcntl")

_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_CHUNK_BYTES = 1 << 20  # bytes at a time
_LOCK_OFFSET = 1 << 30  # of Windows' locks, which keep others from reading what they cover; it counts in 31 bits
_POLL_S = 0.0005


def after_fork(function: Callable[[], object]) -> None:
    """Have a function called in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_acquired: list[Any] = []
_forking = threading.RLock()


def make_fork_safe_lock() -> Any:
    """Return an ``RLock`` that forks wait for: no child has its holder, and what that one does would be half done."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _acquire_all_locks() -> None:
    _forking.acquire()
    while (busy := next((lock for lock in _live_locks() if not _acquire(lock, blocking=False)), None)) is not None:
        # Waiting with nothing in hand: its holder may be about to take another one.
        _release_acquired()
        _acquire(busy, blocking=True)


def _live_locks() -> list[Any]:
    references = _locks.data.copy()  # type: ignore[attr-defined]  # at once: other threads make locks meanwhile
    return [lock for reference in references if (lock := reference()) is not None]


def _acquire(lock: Any, *, blocking: bool) -> bool:
    held: bool = lock.acquire(blocking=blocking)
    if held:
        _acquired.append(lock)
    return held


def _release_acquired() -> None:
    while _acquired:
        _acquired.pop().release()


def _release_all_locks() -> None:
    _release_acquired()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_acquire_all_locks, after_in_parent=_release_all_locks, after_in_child=_release_all_locks
    )


def set_variables(variables: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables, and unset those that are None."""
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


class _PosixAddresses:
    """A range of addresses, where memory or parts of files lie.

    :param n_bytes: its size.
    :param writable: whether what is written where nothing was put stays there, instead of ending the process.
    :ivar memory: has the buffer protocol, and keeps what lies there mapped for as long as it is referred to.
    :raises OSError: where the system refuses so large a range.
    """

    def __init__(self, n_bytes: int, *, writable: bool) -> None:
        self._n_bytes, self._protection = n_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._start = self._map_unbacked(None, n_bytes)
        if writable and hasattr(mmap, "MADV_NOHUGEPAGE"):
            _libc().madvise(self._start, n_bytes, mmap.MADV_NOHUGEPAGE)  # most arrays are far shorter than such a page
        self.memory = (ctypes.c_char * n_bytes).from_address(self._start)
        # Arrays refer to it, and may outlive whoever asked for it.
        weakref.finalize(self.memory, _libc().munmap, self._start, n_bytes).atexit = False

    def _map_unbacked(self, address: int | None, n_bytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return _map_memory(address, n_bytes, self._protection, flags, -1, 0)

    def commit(self, offset: int, n_bytes: int) -> None:
        """Have memory lie in a part, zeros at first."""

    def map(self, offset: int, n_bytes: int, descriptor: int, at: int) -> None:
        """Have a part of a file lie there."""
        _map_memory(self._start + offset, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, at)

    def empty(self) -> None:
        """Have nothing lie there."""
        self._map_unbacked(self._start, self._n_bytes)

    def discard(self, offset: int, n_bytes: int) -> None:
        """Give whole pages of memory back, which are zero then."""
        if _DONTNEED_ZEROES:
            discard_pages(self._start + offset, n_bytes)
        else:
            self._map_unbacked(self._start + offset, n_bytes)

    def page_out(self, offset: int, n_bytes: int) -> None:
        """Have a part of a file count as resident no longer; it is the system's to keep it at hand."""
        discard_pages(self._start + offset, n_bytes)


class _WindowsAddresses:
    """Likewise. What nothing was put into can be neither read nor written.

    Windows maps nothing over addresses that are reserved: they are given up, mapped, and what is left of them is
    reserved again. Should another thread take them in between, mapping fails, and nothing is lost.
    """

    def __init__(self, n_bytes: int, *, writable: bool) -> None:
        self._n_bytes = n_bytes
        self._start: int = _windows.reserve(None, n_bytes)
        self._gaps = {self._start: n_bytes}  # reserved: from where, and how much
        self._views: dict[int, int] = {}
        self._used: list[tuple[int, int]] = []
        self.memory = (ctypes.c_char * n_bytes).from_address(self._start)
        weakref.finalize(self.memory, _release_addresses, self._gaps, self._views).atexit = False

    def commit(self, offset: int, n_bytes: int) -> None:
        """Have memory lie in a part, zeros at first."""
        _windows.commit(self._start + offset, n_bytes)
        self._used.append((offset, offset + n_bytes))

    def map(self, offset: int, n_bytes: int, descriptor: int, at: int) -> None:
        """Have a part of a file lie there."""
        first, end = self._start + offset, self._start + offset + n_bytes
        gap = next((start for start, n in self._gaps.items() if start <= first and end <= start + n), None)
        gap_end = 0
        if gap is not None:
            gap_end = gap + self._gaps.pop(gap)
            _windows.release(gap)
        try:
            _windows.map_file(descriptor, at, n_bytes, first)
            self._views[first] = n_bytes
        finally:
            if gap is not None:
                edges = ((gap, first), (end, gap_end)) if first in self._views else ((gap, gap_end),)
                for start, stop in edges:
                    if start < stop:
                        _windows.reserve(start, stop - start)
                        self._gaps[start] = stop - start

    def empty(self) -> None:
        """Have nothing lie there."""
        _release_addresses(self._gaps, self._views)
        _windows.reserve(self._start, self._n_bytes)
        self._gaps[self._start] = self._n_bytes

    def discard(self, offset: int, n_bytes: int) -> None:
        """Give whole pages of memory back, which are zero then."""
        for start, stop in self._used:
            first, last = max(start, offset), min(stop, offset + n_bytes)
            if first < last:
                _windows.decommit(self._start + first, last - first)
                _windows.commit(self._start + first, last - first)

    def page_out(self, offset: int, n_bytes: int) -> None:
        """Windows takes what is not used by itself."""


Addresses: Any = _WindowsAddresses if WINDOWS else _PosixAddresses


def _release_addresses(gaps: dict[int, int], views: dict[int, int]) -> None:
    for start in gaps:
        _windows.release(start)
    for start in views:
        _windows.unmap(start)
    gaps.clear()
    views.clear()


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    return libc


def _map_memory(address: int | None, n_bytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    """``mmap``, at an address or wherever there is room."""
    if address is not None:
        flags |= _MAP_FIXED
    found: int | None = _libc().mmap(address, n_bytes, protection, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


# Elsewhere it is advice, and what was there may still be there.
_DONTNEED_ZEROES = hasattr(mmap, "MADV_REMOVE")


def discard_pages(address: int, n_bytes: int) -> None:
    """Say that whole pages are not needed any more: of files they can be read again, all else is lost."""
    if not WINDOWS:
        _libc().madvise(address, n_bytes, mmap.MADV_DONTNEED)


# Files


def open_file(path: Path) -> int:
    """Open a file for reading and writing, and make it where there is none. Links are not followed."""
    flags = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY", "O_NOINHERIT"))
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)


def new_memory_file(name: str) -> tuple[int, Path | None]:
    """Open a file that is in memory, or in the folder of temporary files, and goes when nobody has it open.

    :return: its descriptor; and where it is, if it cannot be without a name.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name), None
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    if not WINDOWS:
        os.unlink(path)
        return descriptor, None
    os.close(descriptor)
    return _windows.open_temporary(path), Path(path)


class TemporaryFolder:
    """A folder that is deleted when this object is dropped, or at exit, and never by a forked process.

    Python's ``TemporaryDirectory`` is also deleted by a fork that exits.

    :ivar name: its path
    :ivar cleanup: deletes it
    """

    def __init__(self) -> None:
        import tempfile
        from multiprocessing import util

        self.name = tempfile.mkdtemp(prefix="rl-ext-")
        # After the workers have ended.
        self.cleanup = util.Finalize(self, shutil.rmtree, (self.name, True), exitpriority=-20)


def read_at(descriptor: int, n_bytes: int, offset: int) -> bytes:
    """Read from a place in a file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, n_bytes, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, n_bytes)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write to a place in a file."""
    if hasattr(os, "pwrite"):
        os.pwrite(descriptor, data, offset)
        return
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, data)


def allocate_file_space(descriptor: int, offset: int, n_bytes: int) -> None:
    """Take room on the disk for a part of a file: writing to a mapping where there is none kills.

    What was there stays as it was, and what lies behind the end is zero.

    :raises OSError: where there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, n_bytes)
        return
    end = min(os.fstat(descriptor).st_size, offset + n_bytes)
    for at in range(offset, offset + n_bytes, _CHUNK_BYTES):
        part = min(_CHUNK_BYTES, offset + n_bytes - at)
        write_at(descriptor, read_at(descriptor, min(part, max(end - at, 0)), at).ljust(part, b"\0"), at)


def truncate_file(descriptor: int, n_bytes: int) -> None:
    """Cut off what lies behind; where the system refuses that of a file that is mapped, fill it with zeros."""
    try:
        os.ftruncate(descriptor, n_bytes)
    except OSError:
        if not WINDOWS:
            raise
        for at in range(n_bytes, os.fstat(descriptor).st_size, _CHUNK_BYTES):
            write_at(descriptor, bytes(min(_CHUNK_BYTES, os.fstat(descriptor).st_size - at)), at)


def remove_file(path: Path) -> None:
    """Delete a file that nobody needs. Where somebody has it open, Windows keeps it: it is deleted another time."""
    with contextlib.suppress(*([PermissionError] if WINDOWS else [])):
        path.unlink(missing_ok=True)


def picklable_descriptor(descriptor: int) -> Any:
    """What a child process calls ``detach()`` of, to get a descriptor of the same file."""
    from multiprocessing import reduction

    return _windows.SentFile(descriptor) if WINDOWS else reduction.DupFd(descriptor)


# Locks, which the system frees when their holder ends


def open_exclusive(path: Path) -> int:
    """Open a file that no other process can open so, for as long as this one or a child that it was sent to has it.

    :raises BlockingIOError: if another process has it.
    :raises OSError: if it cannot be opened, or the file system has no locks.
    """
    if WINDOWS:
        descriptor: int = _windows.open_exclusive(path)
        return descriptor
    descriptor = open_file(path)
    try:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from error
        raise
    return descriptor


def reopen_for_locking(descriptor: int) -> int:
    """A descriptor of the same file that :func:`lock` can lock for this process alone.

    :raises OSError: where Linux does not let a process see its own.
    """
    if hasattr(os, "memfd_create"):
        # Kernels tie locks to what was opened, so that processes that share a file in memory open it anew.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return os.dup(descriptor)


def lock(descriptor: int) -> None:
    """Wait until no other process has locked the file, and lock it; ``descriptor`` is of :func:`own_description`."""
    if hasattr(os, "memfd_create"):
        _fcntl.flock(descriptor, _fcntl.LOCK_EX)
        return
    # Of a file that was sent along, only locks that belong to processes can be used; they are tried for in turns, since
    # the system takes what threads of two processes wait for crosswise for a deadlock.
    while True:
        try:
            return _lock_at_once(descriptor)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
        time.sleep(_POLL_S)


def _lock_at_once(descriptor: int) -> None:
    if WINDOWS:
        _windows.lock(descriptor, _LOCK_OFFSET)
    else:
        _fcntl.lockf(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Let others lock the file."""
    if hasattr(os, "memfd_create"):
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)
    elif WINDOWS:
        _windows.unlock(descriptor, _LOCK_OFFSET)
    else:
        _fcntl.lockf(descriptor, _fcntl.LOCK_UN)


_identity = uuid.uuid4()


def _renew_identity() -> None:
    global _identity
    _identity = uuid.uuid4()


after_fork(_renew_identity)


def process_identity() -> uuid.UUID:
    """Return what tells this process from every other, also from its forks and from those of other machines."""
    return _identity
