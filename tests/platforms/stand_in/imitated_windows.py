"""Imitation of ``rl_ext_core._windows`` by Linux calls.

As on Windows, reserved addresses cannot be read, and nothing can be mapped over them.

It must be imported before ``sitecustomize`` hides anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
from pathlib import Path
from typing import Any

_NONE, _BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_SHARED, _FIXED, _FIXED_NOREPLACE = mmap.MAP_SHARED, 0x10, 0x100000
_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_libc.mmap.restype = _pointer
_libc.mmap.argtypes = [_pointer, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [_pointer, _size]
_libc.mprotect.argtypes = [_pointer, _size, ctypes.c_int]
_open, _flock, _lockf, _unlink = os.open, fcntl.flock, fcntl.lockf, os.unlink
_kill, _kill_group, _KILL = os.kill, os.killpg, signal.SIGKILL
_lock, _at_once, _free = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN
_sizes: dict[int, int] = {}
_places = [1 << 44]


def _mmap(address: int | None, n_bytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    """Call ``mmap`` of the C library, and raise OSError if it fails."""
    found: int | None = _libc.mmap(address, n_bytes, protection, flags, descriptor, offset)
    if found is None or found == _pointer(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _check_granularity(*numbers: int) -> None:
    """Raise OSError if a number is not a multiple of the allocation granularity."""
    if any(number % mmap.ALLOCATIONGRANULARITY for number in numbers):
        raise OSError(errno.EINVAL, "not a multiple of the allocation granularity")


def reserve(address: int | None, n_bytes: int) -> int:
    """Reserve addresses without memory, and return the first one."""
    # As on Windows, reserved addresses are far from other memory, which could otherwise take them while they are free.
    if address is None:
        address = _places.pop()
        _places.append((address + n_bytes + (1 << 20)) >> 20 << 20)
    start = _mmap(address, n_bytes, _NONE, _ANONYMOUS | _FIXED_NOREPLACE, -1, 0)
    _sizes[start] = n_bytes
    return start


def release(address: int) -> None:
    """Free reserved or mapped addresses."""
    _libc.munmap(address, _sizes.pop(address))


def _check_reserved(address: int, n_bytes: int) -> None:
    """Raise OSError if the addresses are not reserved."""
    if not any(start <= address and address + n_bytes <= start + size for start, size in _sizes.items()):
        raise OSError(errno.EINVAL, "not reserved")


def commit(address: int, n_bytes: int) -> None:
    """Give memory to reserved addresses."""
    _check_reserved(address, n_bytes)
    _libc.mprotect(address, n_bytes, _BOTH)


def decommit(address: int, n_bytes: int) -> None:
    """Free the memory of reserved addresses, which stay reserved."""
    _check_reserved(address, n_bytes)
    _mmap(address, n_bytes, _NONE, _ANONYMOUS | _FIXED, -1, 0)


def map_file(descriptor: int, offset: int, n_bytes: int, address: int) -> None:
    """Map part of a file at an address."""
    _check_granularity(offset, address)
    if os.fstat(descriptor).st_size < offset + n_bytes:
        raise OSError(errno.EINVAL, "behind the end of the file")
    _sizes[_mmap(address, n_bytes, _BOTH, _SHARED | _FIXED_NOREPLACE, descriptor, offset)] = n_bytes


def unmap(address: int) -> None:
    """Remove the mapping of a file."""
    release(address)


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
    """Unlock a byte of a file."""
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
        """Kill all processes of the group."""
        for kill in (_kill_group, _kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, _KILL)
