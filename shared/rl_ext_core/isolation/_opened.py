"""Which files an environment opens: through Python, and in some folders through anything else, such as C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Folders", "Noted", "note", "within"]

_ACCESS, _MODIFY, _OPEN, _CREATE, _IS_FOLDER = 0x1, 0x2, 0x20, 0x100, 0x40000000  # linux/inotify.h
_NON_BLOCKING = 0o4000
_MOST_FOLDERS = 200
_NEVER = ("/proc/", "/sys/", "/dev/")


class Noted:
    """What has been opened through Python in this process since :func:`note`.

    :ivar read: absolute paths
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.busy = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Be an audit hook."""
        if event == "open" and not self.busy and isinstance(args[0], (str, bytes)):
            self.busy = True
            try:
                flags = args[2] if isinstance(args[2], int) else os.O_RDONLY
                path = os.fsdecode(args[0])
                if flags & os.O_ACCMODE != os.O_WRONLY and not path.endswith(".pyc") and not path.startswith(_NEVER):
                    self.read.add(os.path.abspath(path))
            except (OSError, ValueError):  # no working directory any more, a path with a NUL
                pass
            finally:
                self.busy = False


def note() -> Noted:
    """Begin to note; that never ends."""
    noted = Noted()
    sys.addaudithook(noted.hook)
    return noted


def within(path: str, folders: Mapping[str, str]) -> str | None:
    """Give the path of the user's that a path means.

    :param folders: for folders that stand for one of the user's, that; for others that are not the user's, ""
    :return: None: it is nothing of the user's
    """
    for folder, original in folders.items():
        if path == folder or path.startswith(f"{folder}/"):
            return f"{original}{path[len(folder) :]}" if original else None
    return path


class Folders:
    """Looks which files in some folders are opened, read and modified, by whomever.

    Where that cannot be done, none is seen.

    :param folders: with all that are in them, as far as there are not too many
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self.opened: set[str] = set()
        self.read: set[str] = set()
        self.modified: set[str] = set()
        self._library = ctypes.CDLL(None, use_errno=True)
        self._names: dict[int, str] = {}
        try:
            self._descriptor = self._library.inotify_init1(_NON_BLOCKING | os.O_CLOEXEC)
        except AttributeError:  # not Linux
            self._descriptor = -1
        waiting = deque(folders)
        while waiting and self._descriptor >= 0 and len(self._names) < _MOST_FOLDERS:
            waiting.extend(self._add(waiting.popleft()))

    def _add(self, folder: str) -> list[str]:
        number = self._library.inotify_add_watch(
            self._descriptor, os.fsencode(folder), _ACCESS | _MODIFY | _OPEN | _CREATE
        )
        if number < 0 or number in self._names:
            return []
        self._names[number] = folder
        with contextlib.suppress(OSError):
            return [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        return []

    def look(self) -> None:
        """Take note of what has happened."""
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # nothing more
                return
            while data:
                number, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0")
                data = data[16 + length :]
                path = os.path.join(self._names.get(number, ""), os.fsdecode(name))
                if mask & _CREATE and mask & _IS_FOLDER and len(self._names) < _MOST_FOLDERS:
                    self._add(path)
                if name and not mask & _IS_FOLDER:
                    (self.modified if mask & _MODIFY else self.read if mask & _ACCESS else self.opened).add(path)

    def close(self) -> None:
        """Look no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
