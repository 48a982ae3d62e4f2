"""Windows calls that ``_system`` uses: address ranges, locked files and jobs.

See VirtualAlloc, MapViewOfFileEx, CreateFileW and _locking in Microsoft's documentation. Windows 1803 and newer can map
over reserved addresses (MapViewOfFile3). Older versions and Wine 8 cannot, so it is not used.
"""

from __future__ import annotations

import ctypes
import errno
import msvcrt
import os
import struct
import sys
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

assert sys.platform == "win32"  # otherwise mypy rejects names that only Windows has

_RESERVE, _COMMIT, _TOP_DOWN = 0x2000, 0x1000, 0x100000
_RELEASE, _DECOMMIT = 0x8000, 0x4000
_NOACCESS, _READWRITE = 0x01, 0x04
_MAP_READ_WRITE = 0x06
_GENERIC_READ, _GENERIC_WRITE = 0x80000000, 0x40000000
_SHARE_READ, _OPEN_ALWAYS, _NORMAL = 1, 4, 0x80
_SHARING_VIOLATION = 32
_TERMINATE, _SET_QUOTA = 0x01, 0x100
_EXTENDED_LIMIT_INFORMATION, _KILL_ON_JOB_CLOSE, _BREAKAWAY_OK = 9, 0x2000, 0x800
_TERMINATED = 0x10000  # multiprocessing's exit code for a process that was terminated
_INVALID = ctypes.c_void_p(-1).value

_kernel = ctypes.WinDLL("kernel32", use_last_error=True)
_pointer, _size, _word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong
for _name, _result, _arguments in (
    ("VirtualAlloc", _pointer, [_pointer, _size, _word, _word]),
    ("VirtualFree", ctypes.c_int, [_pointer, _size, _word]),
    ("CreateFileMappingW", _pointer, [_pointer, _pointer, _word, _word, _word, ctypes.c_wchar_p]),
    ("MapViewOfFileEx", _pointer, [_pointer, _word, _word, _word, _size, _pointer]),
    ("UnmapViewOfFile", ctypes.c_int, [_pointer]),
    ("CloseHandle", ctypes.c_int, [_pointer]),
    ("OpenProcess", _pointer, [_word, ctypes.c_int, _word]),
    ("TerminateProcess", ctypes.c_int, [_pointer, ctypes.c_uint]),
    ("CreateJobObjectW", _pointer, [_pointer, ctypes.c_wchar_p]),
    ("SetInformationJobObject", ctypes.c_int, [_pointer, ctypes.c_int, ctypes.c_char_p, _word]),
    ("AssignProcessToJobObject", ctypes.c_int, [_pointer, _pointer]),
    ("TerminateJobObject", ctypes.c_int, [_pointer, ctypes.c_uint]),
    ("CreateFileW", _pointer, [ctypes.c_wchar_p, _word, _word, _pointer, _word, _word, _pointer]),
):
    getattr(_kernel, _name).restype = _result
    getattr(_kernel, _name).argtypes = _arguments


def _check_result(result: Any) -> Any:
    """Return the result of a Windows call; raise ``OSError`` if the call failed."""
    if not result or result == _INVALID:
        raise ctypes.WinError(ctypes.get_last_error())
    return result


def reserve(address: int | None, n_bytes: int) -> int:
    """Reserve addresses, which cannot be used before memory is committed or a file is mapped.

    :param address: First address; None for the highest free addresses
    """
    where = 0 if address is not None else _TOP_DOWN
    start: int = _check_result(_kernel.VirtualAlloc(address, n_bytes, _RESERVE | where, _NOACCESS))
    return start


def release(address: int) -> None:
    """Release addresses that :func:`reserve` has reserved, and their memory."""
    _check_result(_kernel.VirtualFree(address, 0, _RELEASE))


def commit(address: int, n_bytes: int) -> None:
    """Commit memory at reserved addresses.

    Memory that is already committed keeps its contents.
    """
    _check_result(_kernel.VirtualAlloc(address, n_bytes, _COMMIT, _READWRITE))


def decommit(address: int, n_bytes: int) -> None:
    """Free the memory at addresses, which stay reserved."""
    _check_result(_kernel.VirtualFree(address, n_bytes, _DECOMMIT))


def map_file(descriptor: int, offset: int, n_bytes: int, address: int) -> None:
    """Map a part of a file to free addresses."""
    end = offset + n_bytes
    file = msvcrt.get_osfhandle(descriptor)
    section = _check_result(_kernel.CreateFileMappingW(file, None, _READWRITE, end >> 32, end & 0xFFFFFFFF, None))
    try:
        high, low = offset >> 32, offset & 0xFFFFFFFF
        _check_result(_kernel.MapViewOfFileEx(section, _MAP_READ_WRITE, high, low, n_bytes, address))
    finally:
        _kernel.CloseHandle(section)


def unmap(address: int) -> None:
    """Unmap a file that :func:`map_file` has mapped."""
    _check_result(_kernel.UnmapViewOfFile(address))


def open_temporary(path: str) -> int:
    """Open a file that is deleted once no process has it open.

    Windows keeps it in memory if possible.
    """
    return os.open(path, os.O_RDWR | os.O_BINARY | os.O_NOINHERIT | os.O_TEMPORARY | os.O_SHORT_LIVED)


def open_unshared(path: Path) -> int:
    """Open a file so that other processes can only read it.

    :raises BlockingIOError: If another process has opened it in the same way
    """
    access = _GENERIC_READ | _GENERIC_WRITE
    try:
        handle = _check_result(_kernel.CreateFileW(str(path), access, _SHARE_READ, None, _OPEN_ALWAYS, _NORMAL, None))
    except OSError as error:
        if error.winerror == _SHARING_VIOLATION:
            raise BlockingIOError(errno.EWOULDBLOCK, error.strerror) from error
        error.filename = str(path)
        raise
    return msvcrt.open_osfhandle(handle, os.O_RDWR | os.O_BINARY | os.O_NOINHERIT)


def lock_byte(descriptor: int, at: int) -> None:
    """Lock a byte of a file, without waiting.

    :raises OSError: If another process has locked it
    """
    os.lseek(descriptor, at, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)


def unlock_byte(descriptor: int, at: int) -> None:
    """Unlock a byte of a file."""
    os.lseek(descriptor, at, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)


class SentFile:
    """Picklable handle of a file, to send it to another process."""

    def __init__(self, descriptor: int) -> None:
        # The access mask for reading and writing.
        self._handle = reduction.DupHandle(msvcrt.get_osfhandle(descriptor), 0x0012019F)

    def detach(self) -> int:
        """Return a descriptor of the file in the process that received it."""
        return msvcrt.open_osfhandle(self._handle.detach(), os.O_RDWR | os.O_BINARY | os.O_NOINHERIT)


class Job:
    """Job object that ends a process and its descendants, at the latest with this one.

    Programs may leave the job if they request it. If Windows refuses the job, only the process itself is ended.

    :param pid: Process id
    """

    def __init__(self, pid: int) -> None:
        self._job = _check_result(_kernel.CreateJobObjectW(None, None))
        self._process = _kernel.OpenProcess(_SET_QUOTA | _TERMINATE, 0, pid)
        # This is a JOBOBJECT_EXTENDED_LIMIT_INFORMATION, all zeros except its LimitFlags.
        limits = struct.pack("@qqIPPIPII6Q4P", 0, 0, _KILL_ON_JOB_CLOSE | _BREAKAWAY_OK, *[0] * 16)
        _kernel.SetInformationJobObject(self._job, _EXTENDED_LIMIT_INFORMATION, limits, len(limits))
        _kernel.AssignProcessToJobObject(self._job, self._process)
        # Unlike __del__, it is not called after the interpreter has cleared the globals of modules.
        weakref.finalize(self, _close_handles, self._job, self._process).atexit = False

    def end(self) -> None:
        """End the process and its descendants."""
        _kernel.TerminateProcess(self._process, _TERMINATED)
        _kernel.TerminateJobObject(self._job, _TERMINATED)


def _close_handles(*handles: Any) -> None:
    """Close handles of Windows."""
    for handle in handles:
        _kernel.CloseHandle(handle)
