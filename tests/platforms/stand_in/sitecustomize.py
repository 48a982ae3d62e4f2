"""Startup code that hides features of Linux from a process and its children.

``RL_EXT_STAND_IN`` selects the imitated system, ``windows`` or ``macos``. ``sys.platform`` and ``os.name`` do not
change, because the standard library selects its own code by them. ``imitated_windows`` replaces the Windows calls.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib
import importlib.util
import io
import mmap
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SYSTEM = os.environ.get("RL_EXT_STAND_IN", "")
_OF_LINUX = {
    os: "memfd_create eventfd eventfd_read eventfd_write posix_fallocate posix_fadvise sched_getaffinity pidfd_open "
    "waitid",
    mmap: "MADV_REMOVE MADV_NOHUGEPAGE MADV_HUGEPAGE",
}
_OF_POSIX = {
    os: "register_at_fork fork forkpty killpg getpgrp getpgid setpgid setsid pread pwrite mkfifo O_NOFOLLOW O_CLOEXEC",
    signal: "SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGCHLD SIGBUS SIGSTOP pthread_sigmask setitimer sigwait",
    mmap: "MADV_DONTNEED MADV_FREE MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON MAP_NORESERVE PROT_READ PROT_WRITE",
}
_PROJECT_PACKAGES = ("rl_ext_core", "sb3_ext", "torchrl_ext", "__main__")
_hidden: dict[tuple[str, str], Any] = {}
_MODULES_OF_POSIX = ("fcntl", "resource", "termios", "pwd", "grp")


class _ModuleWithHiddenNames(types.ModuleType):
    """Module that hides some names from this project. Other libraries still find them."""

    def __getattr__(self, name: str) -> Any:
        try:
            if _root_package(sys._getframe(1)) not in _PROJECT_PACKAGES:
                return _hidden[self.__name__, name]
        except KeyError:
            pass
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def _hide(names: dict[Any, str]) -> None:
    """Remove names from modules, as seen by this project."""
    for module, words in names.items():
        module.__class__ = _ModuleWithHiddenNames
        for name in words.split():
            if name in vars(module):
                _hidden[module.__name__, name] = vars(module).pop(name)


def _hide_modules() -> None:
    """Make imports of POSIX modules by this project fail, as on Windows."""
    plain_import, plain_find = builtins.__import__, importlib.util.find_spec

    def import_one(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:
        if name in _MODULES_OF_POSIX and (globals or {}).get("__name__", "").partition(".")[0] in _PROJECT_PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, globals, *args, **kwargs)

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in _MODULES_OF_POSIX else plain_find(name, package)

    builtins.__import__, importlib.util.find_spec = import_one, find_spec


def _is_called_by_project() -> bool:
    """Return whether this project has called the wrapped function, also through pathlib."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _root_package(frame) in (
        "pathlib",
        "genericpath",
        "posixpath",
        "os",
        "contextlib",
    ):
        frame = frame.f_back
    return _root_package(frame) in _PROJECT_PACKAGES


def _root_package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _hide_proc() -> None:
    """Make ``/proc`` look missing to this project."""

    def refusing_proc(function: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc") and _is_called_by_project():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            return function(path, *args, **kwargs)

        return call

    for module, names in ((os, "open stat lstat listdir scandir readlink"), (io, "open")):
        for name in names.split():
            setattr(module, name, refusing_proc(getattr(module, name)))
    builtins.open = io.open


def _in_use(file: os.stat_result, *, mapped_only: bool = False, _open: Any = open, _listdir: Any = os.listdir) -> bool:
    """Return whether this process has the file open or mapped."""
    with _open("/proc/self/maps") as lines:
        mapped = [line.split()[3:5] for line in lines]
    if [f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)] in mapped:
        return True
    for name in () if mapped_only else _listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            opened = os.fstat(int(name))
            if (opened.st_ino, opened.st_dev) == (file.st_ino, file.st_dev):
                return True
    return False


def _protect_files_in_use() -> None:
    """Make calls that delete, replace or shorten a file in use fail, as on Windows."""

    def refusing_files_in_use(function: Any, which: tuple[int, ...]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _root_package(sys._getframe(1)) == "multiprocessing":  # it uses no such files on Windows
                return function(*args, **kwargs)
            for path in (args[i] for i in which if i < len(args)):
                try:
                    file = os.stat(path, dir_fd=kwargs.get("dir_fd"))
                except OSError:
                    continue
                if not os.path.isdir(path) and _in_use(file):
                    raise PermissionError(errno.EACCES, "the file is in use (as on Windows)", os.fspath(path))
            return function(*args, **kwargs)

        return call

    unlink = refusing_files_in_use(os.unlink, (0,))
    os.unlink, os.remove = unlink, unlink
    os.rename, plain = refusing_files_in_use(os.rename, (0, 1)), os.rename

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        os_rename(source, target, **kwargs)

    os_rename, os.rename = os.rename, rename
    os.replace = refusing_files_in_use(plain, (0, 1))
    ftruncate = os.ftruncate

    def ftruncate_unless_mapped(descriptor: int, length: int) -> None:
        file = os.fstat(descriptor)
        if length < file.st_size and _in_use(file, mapped_only=True):
            raise OSError(errno.EINVAL, "the file is mapped (as on Windows)")
        ftruncate(descriptor, length)

    os.ftruncate = ftruncate_unless_mapped


if _SYSTEM:
    sys.path.insert(0, str(HERE))
    if _SYSTEM == "windows":
        import imitated_windows

        if "--multiprocessing-fork" in sys.orig_argv:
            os.setpgid(0, 0)  # the process group replaces the job object
        # The module has already imported the names that are hidden below.
        sys.modules["rl_ext_core._windows"] = imitated_windows
        _hide_modules()
        _protect_files_in_use()
        _hide(_OF_POSIX)
    _hide(_OF_LINUX)
    _hide_proc()
    sys.path.remove(str(HERE))
