"""Interface to the operating system: forks, memory, files, locks, variables.

Other systems are adapted to Linux. macOS and similar systems lack files in memory and preallocation of disk space.
Windows (see ``_windows``) does not fork, requires memory to be committed, and can neither replace nor truncate a mapped
file.
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
    "IMPORT_TIME_VARIABLES",
    "PAGE",
    "Addresses",
    "TemporaryFolder",
    "after_fork",
    "allocate_file_space",
    "discard_pages",
    "lock",
    "make_fork_safe_lock",
    "map_whole_file",
    "new_memory_file",
    "open_exclusive",
    "open_file",
    "picklable_descriptor",
    "process_identity",
    "read_at",
    "remove_file",
    "reopen_for_locking",
    "set_variables",
    "truncate_file",
    "unlock",
    "write_at",
]

PAGE = mmap.ALLOCATIONGRANULARITY
# Renderers read these variables once, when they are imported, so later changes have no effect in the process.
IMPORT_TIME_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM")
WINDOWS = importlib.util.find_spec("fcntl") is None
# Whether reserved memory can be used without committing it, and reads as zeros.
COMMITS_LAZILY = not WINDOWS
_windows: Any = importlib.import_module("rl_ext_core._windows") if WINDOWS else None
_fcntl: Any = None if WINDOWS else importlib.import_module("fcntl")

_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_CHUNK_BYTES = 1 << 20  # bytes per read or write
# Windows does not let other processes read locked bytes, so this one is behind the contents. Offsets have 31 bits.
_LOCK_OFFSET = 1 << 30
_POLL_S = 0.0005


def after_fork(function: Callable[[], object]) -> None:
    """Register a function to run in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_acquired: list[Any] = []
_forking = threading.RLock()


def make_fork_safe_lock() -> Any:
    """Create an ``RLock``; a fork waits until no thread holds it.

    A child does not have the thread that holds the lock, so it would find that thread's work incomplete.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _acquire_all_locks() -> None:
    """Acquire all fork-safe locks before a fork."""
    _forking.acquire()
    while (busy := next((lock for lock in _live_locks() if not _acquire(lock, blocking=False)), None)) is not None:
        # Release all locks before waiting, because the thread that holds this one may wait for another.
        _release_acquired()
        _acquire(busy, blocking=True)


def _live_locks() -> list[Any]:
    """Return the fork-safe locks that still exist."""
    references = _locks.data.copy()  # type: ignore[attr-defined]  # atomic, since other threads create locks
    return [lock for reference in references if (lock := reference()) is not None]


def _acquire(lock: Any, *, blocking: bool) -> bool:
    """Acquire a lock and list it in ``_acquired``; return False if another thread holds it."""
    held: bool = lock.acquire(blocking=blocking)
    if held:
        _acquired.append(lock)
    return held


def _release_acquired() -> None:
    """Release the locks in ``_acquired``."""
    while _acquired:
        _acquired.pop().release()


def _release_all_locks() -> None:
    """Release all fork-safe locks after a fork, in the parent and in the child."""
    _release_acquired()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_acquire_all_locks, after_in_parent=_release_all_locks, after_in_child=_release_all_locks
    )


def set_variables(variables: Mapping[str, str | None], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables, and unset those whose value is None."""
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


class _PosixAddresses:
    """Range of addresses that memory and parts of files are mapped to.

    :param n_bytes: Size of the range
    :param writable: Whether unmapped parts can be written to; otherwise a write there kills the process
    :ivar memory: Object with the buffer protocol, which keeps the range mapped while it is referenced
    :raises OSError: If the system refuses a range of that size
    """

    def __init__(self, n_bytes: int, *, writable: bool) -> None:
        self._n_bytes, self._protection = n_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._start = self._map_unbacked(None, n_bytes)
        if writable and hasattr(mmap, "MADV_NOHUGEPAGE"):
            _libc().madvise(self._start, n_bytes, mmap.MADV_NOHUGEPAGE)  # most arrays are much smaller than a huge page
        self.memory = (ctypes.c_char * n_bytes).from_address(self._start)
        # Arrays refer to the memory, and may outlive this object.
        weakref.finalize(self.memory, _libc().munmap, self._start, n_bytes).atexit = False

    def _map_unbacked(self, address: int | None, n_bytes: int) -> int:
        """Map zeros without a file at an address, or at any free one; return the address."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return _map_memory(address, n_bytes, self._protection, flags, -1, 0)

    def commit(self, offset: int, n_bytes: int) -> None:
        """Do nothing, because reserved memory can be used at once here."""

    def map(self, offset: int, n_bytes: int, descriptor: int, at: int) -> None:
        """Map ``n_bytes`` of a file, from position ``at``, to an offset in the range."""
        _map_memory(self._start + offset, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, at)

    def empty(self) -> None:
        """Unmap everything, but keep the range reserved."""
        self._map_unbacked(self._start, self._n_bytes)

    def discard(self, offset: int, n_bytes: int) -> None:
        """Free whole pages of memory, which read as zeros afterwards."""
        if _DONTNEED_ZEROES:
            discard_pages(self._start + offset, n_bytes)
        else:
            self._map_unbacked(self._start + offset, n_bytes)

    def page_out(self, offset: int, n_bytes: int) -> None:
        """Remove a part of a file from this process's resident memory.

        The system may still cache it.
        """
        discard_pages(self._start + offset, n_bytes)


class _WindowsAddresses:
    """Range of addresses on Windows, where unmapped parts can be neither read nor written.

    Windows cannot map a file to reserved addresses. So they are released, mapped, and the rest is reserved again. If
    another thread takes the addresses in between, mapping fails, but no data is lost.
    """

    def __init__(self, n_bytes: int, *, writable: bool) -> None:
        self._n_bytes = n_bytes
        self._start: int = _windows.reserve(None, n_bytes)
        self._gaps = {self._start: n_bytes}  # sizes of reserved parts, by their first address
        self._views: dict[int, int] = {}
        self._used: list[tuple[int, int]] = []
        self.memory = (ctypes.c_char * n_bytes).from_address(self._start)
        weakref.finalize(self.memory, _release_addresses, self._gaps, self._views).atexit = False

    def commit(self, offset: int, n_bytes: int) -> None:
        """Make memory of a part usable; it reads as zeros."""
        _windows.commit(self._start + offset, n_bytes)
        self._used.append((offset, offset + n_bytes))

    def map(self, offset: int, n_bytes: int, descriptor: int, at: int) -> None:
        """Map ``n_bytes`` of a file, from position ``at``, to an offset in the range."""
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
        """Unmap everything, but keep the range reserved."""
        _release_addresses(self._gaps, self._views)
        _windows.reserve(self._start, self._n_bytes)
        self._gaps[self._start] = self._n_bytes

    def discard(self, offset: int, n_bytes: int) -> None:
        """Free whole pages of memory, which read as zeros afterwards."""
        for start, stop in self._used:
            first, last = max(start, offset), min(stop, offset + n_bytes)
            if first < last:
                _windows.decommit(self._start + first, last - first)
                _windows.commit(self._start + first, last - first)

    def page_out(self, offset: int, n_bytes: int) -> None:
        """Do nothing, because Windows trims unused pages itself."""


Addresses: Any = _WindowsAddresses if WINDOWS else _PosixAddresses


def _release_addresses(gaps: dict[int, int], views: dict[int, int]) -> None:
    """Release the reserved gaps of an address range, and unmap its files (Windows)."""
    for start in gaps:
        _windows.release(start)
    for start in views:
        _windows.unmap(start)
    gaps.clear()
    views.clear()


@functools.cache
def _libc() -> Any:
    """Return the C library, with the signatures of the functions that map memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    return libc


def _map_memory(address: int | None, n_bytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    """Call ``mmap``, at an address or at any free one.

    :return: First address of the mapping
    :raises OSError: If the system refuses
    """
    if address is not None:
        flags |= _MAP_FIXED
    found: int | None = _libc().mmap(address, n_bytes, protection, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def map_whole_file(descriptor: int, n_bytes: int, offset: int = 0) -> Any:
    """Map a file, or a part that begins at a page, to memory that is shared with it.

    Python's ``mmap`` would keep a descriptor open per mapping, and a log has thousands of files.

    :return: Object with the buffer protocol, which keeps the file mapped while it is referenced
    :raises OSError: If the system refuses
    """
    if WINDOWS:
        return mmap.mmap(descriptor, n_bytes, offset=offset)
    start = _map_memory(None, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    memory = (ctypes.c_char * n_bytes).from_address(start)
    # Arrays refer to the memory, and may outlive the caller.
    weakref.finalize(memory, _libc().munmap, start, n_bytes).atexit = False
    return memory


# On other systems than Linux, MADV_DONTNEED is only a hint, and the old contents may stay.
_DONTNEED_ZEROES = hasattr(mmap, "MADV_REMOVE")


def advise(address: int, n_bytes: int, advice: int) -> None:
    """Call ``madvise``."""
    _libc().madvise(address, n_bytes, advice)


def discard_pages(address: int, n_bytes: int) -> None:
    """Discard whole pages. Pages of files are read again when needed; other contents are lost."""
    if not WINDOWS:
        _libc().madvise(address, n_bytes, mmap.MADV_DONTNEED)


# Files


def open_file(path: Path) -> int:
    """Open a file for reading and writing, and create it if it does not exist.

    Symbolic links are not followed.
    """
    flags = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY", "O_NOINHERIT"))
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)


def new_memory_file(name: str) -> tuple[int, Path | None]:
    """Create a file in memory, which is deleted once no process has it open.

    Systems without such files use the temporary folder.

    :param name: Name for debugging
    :return: Its descriptor, and its path on systems where the file must have one
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
    """Folder that is deleted with this object or at exit, but never by a forked process.

    A forked process that exits would delete Python's ``TemporaryDirectory``.

    :ivar name: Path of the folder
    :ivar cleanup: Function that deletes the folder
    """

    def __init__(self) -> None:
        import tempfile
        from multiprocessing import util

        self.name = tempfile.mkdtemp(prefix="rl-ext-")
        # The priority makes it run after the workers have ended.
        self.cleanup = util.Finalize(self, shutil.rmtree, (self.name, True), exitpriority=-20)


def read_at(descriptor: int, n_bytes: int, offset: int) -> bytes:
    """Read bytes at an offset in a file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, n_bytes, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, n_bytes)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes at an offset in a file."""
    if hasattr(os, "pwrite"):
        os.pwrite(descriptor, data, offset)
        return
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, data)


def allocate_file_space(descriptor: int, offset: int, n_bytes: int) -> None:
    """Allocate disk space for a part of a file.

    Without space, a write to a mapping would kill the process.

    Existing contents stay, and bytes behind the old end are zero.

    :raises OSError: If the disk is full
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, n_bytes)
        return
    end = min(os.fstat(descriptor).st_size, offset + n_bytes)
    for at in range(offset, offset + n_bytes, _CHUNK_BYTES):
        part = min(_CHUNK_BYTES, offset + n_bytes - at)
        write_at(descriptor, read_at(descriptor, min(part, max(end - at, 0)), at).ljust(part, b"\0"), at)


def truncate_file(descriptor: int, n_bytes: int) -> None:
    """Truncate a file to ``n_bytes``.

    On Windows, the rest is filled with zeros instead if the file is mapped.
    """
    try:
        os.ftruncate(descriptor, n_bytes)
    except OSError:
        if not WINDOWS:
            raise
        for at in range(n_bytes, os.fstat(descriptor).st_size, _CHUNK_BYTES):
            write_at(descriptor, bytes(min(_CHUNK_BYTES, os.fstat(descriptor).st_size - at)), at)


def remove_file(path: Path) -> None:
    """Delete a file that is not needed any more. Windows keeps a file that a process has open."""
    with contextlib.suppress(*([PermissionError] if WINDOWS else [])):
        path.unlink(missing_ok=True)


def picklable_descriptor(descriptor: int) -> Any:
    """Wrap a descriptor to send it to a child process.

    The child calls ``detach()`` to get its own descriptor.
    """
    from multiprocessing import reduction

    return _windows.SentFile(descriptor) if WINDOWS else reduction.DupFd(descriptor)


# Locks, which the system releases when the process that holds them ends


def open_exclusive(path: Path) -> int:
    """Open and lock a file.

    The lock lasts until this process, and all children that the descriptor was sent to, have closed the file.

    :raises BlockingIOError: If another process has locked it
    :raises OSError: If it cannot be opened, or the file system does not support locks
    """
    if WINDOWS:
        descriptor: int = _windows.open_unshared(path)
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
    """Return a descriptor of the same file that can be locked for this process alone.

    :raises OSError: If Linux denies this process access to ``/proc/self/fd``
    """
    if hasattr(os, "memfd_create"):
        # Locks belong to an open file description, so each process that shares a file in memory needs its own.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return os.dup(descriptor)


def lock(descriptor: int) -> None:
    """Lock the file, and wait while another process has locked it.

    :param descriptor: Descriptor from :func:`reopen_for_locking`
    """
    if hasattr(os, "memfd_create"):
        _fcntl.flock(descriptor, _fcntl.LOCK_EX)
        return
    # Descriptors sent to a child share one open file description, so these locks belong to processes instead. They are
    # polled, because the system reports a false deadlock if threads of two processes wait for each other's locks.
    while True:
        try:
            return _lock_at_once(descriptor)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
        time.sleep(_POLL_S)


def _lock_at_once(descriptor: int) -> None:
    """Lock a file without waiting; raise ``OSError`` if another process has locked it."""
    if WINDOWS:
        _windows.lock_byte(descriptor, _LOCK_OFFSET)
    else:
        _fcntl.lockf(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Unlock the file."""
    if hasattr(os, "memfd_create"):
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)
    elif WINDOWS:
        _windows.unlock_byte(descriptor, _LOCK_OFFSET)
    else:
        _fcntl.lockf(descriptor, _fcntl.LOCK_UN)


_identity = uuid.uuid4()


def _renew_identity() -> None:
    """Give this process a new id, after a fork."""
    global _identity
    _identity = uuid.uuid4()


after_fork(_renew_identity)


def process_identity() -> uuid.UUID:
    """Return an id of this process that is unique across machines, and differs in its forks."""
    return _identity
