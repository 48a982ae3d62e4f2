"""Interface to the operating system: forks, memory, files, locks, variables.

Other systems are adapted to Linux. macOS and similar systems lack files in memory and preallocation of disk space.
Windows (see ``_windows``) does not fork, and can neither replace nor truncate a mapped file.
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
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

__all__ = [
    "IMPORT_TIME_VARIABLES",
    "PAGE",
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
    "unlock",
    "write_at",
]

PAGE = mmap.ALLOCATIONGRANULARITY
# Renderers read these variables once, when they are imported, so later changes have no effect in the process.
IMPORT_TIME_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM")
WINDOWS = importlib.util.find_spec("fcntl") is None
_windows: Any = importlib.import_module("rl_ext_core._windows") if WINDOWS else None
_fcntl: Any = None if WINDOWS else importlib.import_module("fcntl")

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
    _forking.acquire()
    while (busy := next((lock for lock in _live_locks() if not _acquire(lock, blocking=False)), None)) is not None:
        # Release all locks before waiting, because the thread that holds this one may wait for another.
        _release_acquired()
        _acquire(busy, blocking=True)


def _live_locks() -> list[Any]:
    references = _locks.data.copy()  # type: ignore[attr-defined]  # atomic, since other threads create locks
    return [lock for reference in references if (lock := reference()) is not None]


def _acquire(lock: Any, *, blocking: bool) -> bool:
    """Acquire a lock and list it in ``_acquired``; return False if another thread holds it."""
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
    """Set environment variables, and unset those whose value is None."""
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


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


def map_whole_file(descriptor: int, n_bytes: int, offset: int = 0) -> Any:
    """Map a file, or a part that begins at a page, to memory that is shared with it.

    Python's ``mmap`` would keep a descriptor open per mapping, and a log has thousands of files.

    :return: Object with the buffer protocol, which keeps the file mapped while it is referenced
    :raises OSError: If the system refuses
    """
    if WINDOWS:
        return mmap.mmap(descriptor, n_bytes, offset=offset)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    start: int | None = _libc().mmap(None, n_bytes, protection, flags, descriptor, offset)
    if start is None or start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * n_bytes).from_address(start)
    # Arrays refer to the memory, and may outlive the caller.
    weakref.finalize(memory, _libc().munmap, start, n_bytes).atexit = False
    return memory


def unload_pages(address: int, n_bytes: int) -> None:
    """Take pages of a mapped file out of this process's memory, where the system can. The next access loads them."""
    if not WINDOWS:
        _libc().madvise(address, n_bytes, mmap.MADV_DONTNEED)


def discard_pages(address: int, n_bytes: int) -> None:
    """Free the memory of whole pages of a file in memory, which is mapped at an address, where the system can."""
    if hasattr(mmap, "MADV_REMOVE"):
        _libc().madvise(address, n_bytes // PAGE * PAGE, mmap.MADV_REMOVE)


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
    global _identity
    _identity = uuid.uuid4()


after_fork(_renew_identity)


def process_identity() -> uuid.UUID:
    """Return an id of this process that is unique across machines, and differs in its forks."""
    return _identity
