"""Windows calls that ``_system`` uses: locked files and jobs.

See CreateFileW, _locking and CreateJobObjectW in Microsoft's documentation.
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

_GENERIC_READ, _GENERIC_WRITE = 0x80000000, 0x40000000
_SHARE_READ, _OPEN_ALWAYS, _NORMAL = 1, 4, 0x80
_SHARING_VIOLATION = 32
_TERMINATE, _SET_QUOTA = 0x01, 0x100
_EXTENDED_LIMIT_INFORMATION, _KILL_ON_JOB_CLOSE, _BREAKAWAY_OK = 9, 0x2000, 0x800
_TERMINATED = 0x10000  # multiprocessing's exit code for a process that was terminated
_INVALID = ctypes.c_void_p(-1).value

_kernel = ctypes.WinDLL("kernel32", use_last_error=True)
_pointer, _word = ctypes.c_void_p, ctypes.c_ulong
for _name, _result, _arguments in (
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
