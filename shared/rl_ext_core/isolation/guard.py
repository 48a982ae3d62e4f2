"""The limits of a trial: it writes no files of the user's, and what it misses in its working directory is recorded."""

from __future__ import annotations

import errno
import functools
import os
import sys
from typing import Any

_REFUSED = "a trial of rl-ext does not write files of yours"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events, and how many of their first arguments are paths: https://docs.python.org/3/library/audit_events.html
_READING = {"open": 1, "os.listdir": 1, "os.scandir": 1, "os.chdir": 1, "sqlite3.connect": 1}
_WRITING = dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree", "sqlite3.connect"), 1)
_WRITING |= {"open": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}


class Guard:
    """Limits what Python code of this process does with files, from now on and for good.

    It writes to its own folders, to caches and to devices. Code in C, and programs that are started, write where they
    like.

    :param directory: the working directory of this process
    :param users_directory: the working directory of the user, in place of which it is used
    :param own: more folders that it may write to
    :ivar refused: the first path outside of these that something would have written to; None: there is none
    :ivar missing: the first path that was looked for in the working directory and is in the user's; None: there is none
    """

    def __init__(self, directory: str, users_directory: str, *own: str) -> None:
        self.refused: str | None = None
        self.missing: str | None = None
        self._directory, self._users, self._busy = directory, users_directory, False
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folders = (directory, *own, cache, sys.prefix, "/dev", "/proc")
        self._allowed = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)
        sys.addaudithook(self._check)
        # Whether a file exists is asked without an audit event.
        for name in ("stat", "lstat", "access"):
            setattr(os, name, self._noting(getattr(os, name)))

    def _check(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or (event not in _READING and event not in _WRITING):
            return
        self._busy = True
        try:
            flags = args[2] if event == "open" and isinstance(args[2], int) else 0
            if event in _READING and not flags & os.O_CREAT:
                self._look(args[0])
            if event in _WRITING and (event != "open" or flags & _WRITES):
                refused = [path for path in args[: _WRITING[event]] if self._is_users(path)]
            else:
                refused = []
        finally:
            self._busy = False
        if refused:
            self.refused = self.refused or os.fsdecode(refused[0])
            raise PermissionError(errno.EACCES, _REFUSED, refused[0])

    def _is_users(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        try:
            real = os.path.realpath(os.fsdecode(path))
        except (OSError, ValueError):  # the operation says what is wrong with it
            return False
        return not os.path.join(real, "").startswith(self._allowed) and "__pycache__" not in real

    def _look(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or self.missing is not None:
            return
        try:
            name = os.fsdecode(path)
            place = os.path.abspath(name)
            # Source code is looked for by tracebacks.
            if name.endswith(".py") or (os.path.isabs(name) and not place.startswith(self._directory + os.sep)):
                return
            relative = os.path.relpath(place, self._directory)
            if not os.path.lexists(place) and os.path.lexists(os.path.join(self._users, relative)):
                self.missing = relative
        except (OSError, ValueError):
            pass

    def _noting(self, function: Any) -> Any:
        @functools.wraps(function)
        def noting(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._busy and self.missing is None:
                self._busy = True
                try:
                    self._look(path)
                finally:
                    self._busy = False
            return function(path, *args, **kwargs)

        return noting
