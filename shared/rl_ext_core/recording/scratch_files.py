"""Redirection of the files that Python code writes, so that a repeated episode changes no file of the user's."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["redirect_written_files"]

_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/", os.devnull)
# Audit events of changes, and how many of their arguments are paths.
_CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.rename": 2, "os.link": 2}


def redirect_written_files(folder: str) -> None:
    """Redirect files that this process opens for writing to copies in a folder, until the process ends.

    Later reads of such a file get the copy. Files are not deleted, and folders are created in the folder. Temporary
    files are created there, too. Changes that cannot be redirected raise PermissionError. Files that C libraries and
    other programs write by themselves are not noticed.

    :param folder: empty folder
    """
    files = _ScratchFiles(Path(folder).resolve())
    sys.dont_write_bytecode = True
    os.environ.update(TMPDIR=str(files.temporary), TEMP=str(files.temporary), TMP=str(files.temporary))
    tempfile.tempdir = str(files.temporary)
    files.install()
    sys.addaudithook(files.audit)
    _discard_videos()


def _discard_videos() -> None:
    """Make gymnasium's wrapper for videos drop its images, because another program would write them to a file."""
    import gymnasium.wrappers

    kind: Any = getattr(gymnasium.wrappers, "RecordVideo", None)
    if hasattr(kind, "stop_recording"):

        def stop_recording(self: Any) -> None:
            self.recorded_frames, self.recording = [], False

        kind.stop_recording = stop_recording


class _ScratchFiles:
    """Copies of the files that this process writes, in a folder.

    :param folder: empty folder
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.temporary = str(folder), folder / "temporary"
        self._copies = folder / "files"
        for path in (self._copies, self.temporary):
            path.mkdir()
        self._originals: dict[str, Callable[..., Any]] = {}

    def _is_private(self, path: str) -> bool:
        """Return whether a path is in the folder, or not a file of the user."""
        return path.startswith((self._folder, *_SYSTEM))

    def _copy_of(self, path: str) -> str:
        """Return the path of the copy of a file, which need not exist."""
        return str(self._copies / os.path.splitdrive(path)[1].lstrip("\\/"))

    def _for_reading(self, path: Any) -> Any:
        """Return the path of the copy of a file if there is one, else the path itself."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path  # a file descriptor
        name = os.path.abspath(os.fsdecode(path))
        if self._is_private(name):
            return path
        copy = self._copy_of(name)
        stat = self._originals["stat"]
        try:
            stat(copy)
            is_folder = (stat(name).st_mode & 0o170000) == 0o040000
        except OSError:
            return copy if self._exists(copy) else path
        return path if is_folder else copy

    def _exists(self, path: str) -> bool:
        try:
            self._originals["stat"](path)
        except OSError:
            return False
        return True

    def _for_writing(self, path: Any, *, copy_content: bool = True) -> Any:
        """Return the path of the copy of a file, and create the copy if the file exists."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path
        name = os.path.abspath(os.fsdecode(path))
        if self._is_private(name):
            return path
        copy, parent = Path(self._copy_of(name)), os.path.dirname(name)
        if not (self._exists(parent) or self._exists(str(copy.parent))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy_content and not self._exists(str(copy)) and os.path.isfile(name):
            shutil.copyfile(name, copy)
        return str(copy)

    def install(self) -> None:
        """Replace the functions that open and change files."""
        plain_open, plain_os_open = builtins.open, os.open

        @functools.wraps(plain_open)
        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            writes = not set("wax+").isdisjoint(mode)
            return plain_open((self._for_writing if writes else self._for_reading)(file), mode, *args, **options)

        def os_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if options.get("dir_fd") is None:
                path = (self._for_writing if flags & _WRITE else self._for_reading)(path)
            return plain_os_open(path, flags, *args, **options)

        changing = "remove", "unlink", "rmdir", "chmod", "utime"
        for name in ("stat", "lstat", "access", "mkdir", "rename", "replace", "truncate", *changing):
            self._originals[name] = getattr(os, name)
        builtins.open = io.open = open_file
        vars(shutil)["_use_fd_functions"] = False  # rmtree then deletes by path
        self._set("open", os_open)
        for name in ("stat", "lstat", "access"):
            self._set(name, functools.partial(self._read, name))
        for name in changing:
            self._set(name, functools.partial(self._change, name))
        for name in ("rename", "replace"):
            self._set(name, functools.partial(self._move, name))
        self._set("mkdir", self._mkdir)
        self._set("truncate", lambda path, n: self._originals["truncate"](self._for_writing(path), n))

    @staticmethod
    def _set(name: str, function: Callable[..., Any]) -> None:
        """Replace a function of ``os``, also in pathlib of Python 3.10, which has its own references."""
        setattr(os, name, function)
        accessor: Any = getattr(pathlib, "_NormalAccessor", None)
        if hasattr(accessor, name):
            setattr(accessor, name, staticmethod(function))
        if accessor is not None and name == "open":
            accessor.open = staticmethod(builtins.open)

    def _read(self, name: str, path: Any, *args: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None:
            path = self._for_reading(path)
        return self._originals[name](path, *args, **options)

    def _change(self, name: str, path: Any, *args: Any, **options: Any) -> None:
        """Delete or change the copy of a file, and leave a file without a copy as it is."""
        if options.get("dir_fd") is None and isinstance(path, (str, bytes, os.PathLike)):
            found = self._for_reading(path)
            if found is path and not self._is_private(os.path.abspath(os.fsdecode(path))):
                self._originals["lstat"](path)  # raises if there is no such file
                return
            path = found
        self._originals[name](path, *args, **options)

    def _mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        name = os.path.abspath(os.fsdecode(path))
        if options.get("dir_fd") is None and not self._is_private(name):
            if self._exists(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            path = self._for_writing(path)
        self._originals["mkdir"](path, *args, **options)

    def _move(self, name: str, source: Any, target: Any, **options: Any) -> None:
        found = self._for_reading(source)
        if found is source and not self._is_private(os.path.abspath(os.fsdecode(source))):
            found = self._for_writing(source)  # a copy is moved, and the file stays
        self._originals[name](found, self._for_writing(target, copy_content=False), **options)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise PermissionError if a file of the user would be changed in another way."""
        paths: tuple[Any, ...]
        if event == "open":
            path, _, flags = arguments
            paths = (path,) if isinstance(flags, int) and flags & _WRITE else ()
        elif count := _CHANGES.get(event, 0):
            paths = arguments[:count]
            if event != "os.truncate" and any(number != -1 for number in arguments[-count:]):
                raise PermissionError(errno.EACCES, "rl-ext replay changes no files relative to a descriptor", paths[0])
        else:
            return
        for path in paths:
            if isinstance(path, (str, bytes)) and not self._is_private(name := os.path.abspath(os.fsdecode(path))):
                raise PermissionError(errno.EACCES, "rl-ext replay changes no files", name)
