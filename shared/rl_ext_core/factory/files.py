"""Keep the user's files unchanged in temporary processes that build and step environments."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import stat
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["REFUSAL", "protect_files", "remove_created"]

REFUSAL = "a temporary process must not change the file"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# Audit events of operations on files. Among the arguments: places of a path and of its folder's descriptor, and whether
# the operation needs an existing file (True), a missing one (False), or neither (None).
_OPERATIONS: dict[str, tuple[tuple[int, int | None, bool | None], ...]] = {
    "os.remove": ((0, 1, True),),
    "os.rmdir": ((0, 1, True),),
    "os.truncate": ((0, None, True),),
    "os.rename": ((0, 2, True), (1, 3, None)),
    "os.mkdir": ((0, 2, False),),
    "os.link": ((1, 3, False),),
    "os.symlink": ((1, 2, False),),
}


def protect_files(folder: str, created: str | None = None) -> None:
    """Prevent Python code in this process from changing files outside a folder.

    ``open`` for writing returns a file that discards its content. Other changes raise PermissionError. Imports, caches
    and devices are exempt. Files that C code opens are not protected.

    :param folder: Folder in which files may change.
    :param created: File that receives the names of new files outside of the folder, for :func:`remove_created`.
        Existing empty files may change then, too, because environments lock them. None prevents new files.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    writable = tuple(os.path.join(os.path.realpath(each), "") for each in (folder, cache, "/dev", "/proc"))

    def is_protected(path: Any, descriptor: int = -1) -> bool:
        """Return whether a path, in the folder of a descriptor, must not change. Record it if it is new."""
        if isinstance(path, int):
            return False
        name = os.fsdecode(path)
        if descriptor >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), name)
        real = os.path.realpath(name)
        if real.startswith(writable) or "__pycache__" in real or _is_device(real):
            return False
        if created is None:
            return True
        if os.path.lexists(real):
            return os.path.getsize(real) > 0 and real not in Path(created).read_text().splitlines()
        with original_open(created, "a") as file:
            file.write(f"{real}\n")
        return False

    def check(event: str, args: tuple[Any, ...]) -> None:
        changed = None
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING and is_protected(args[0]):
            changed = args[0]
        for place, at, needs_file in _OPERATIONS.get(event, ()):
            descriptor = -1 if at is None else args[at]
            # Python raises the usual error for a missing or an existing file.
            is_possible = not isinstance(args[place], int) and (
                descriptor >= 0 or needs_file in (None, os.path.lexists(args[place]))
            )
            if is_possible and is_protected(args[place], descriptor):
                changed = args[place]
        if changed is not None and not _is_importing():
            raise PermissionError(f"{REFUSAL} {os.fsdecode(changed)!r} ({event})")

    original_open = io.open
    sys.addaudithook(check)
    builtins.open = io.open = _discarding(original_open, is_protected)
    tempfile.tempdir = None  # A preloaded module may have cached another folder than TMPDIR.


def remove_created(created: Path) -> None:
    """Remove the new files that a process with :func:`protect_files` has recorded."""
    for name in reversed(created.read_text().splitlines()):
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(name) and not os.path.islink(name) else os.unlink)(name)


def _discarding(original: Any, is_protected: Callable[[Any], bool]) -> Any:
    """Return a version of ``open`` that discards what is written to protected files."""

    @functools.wraps(original)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax") and "+" not in mode and is_protected(file):
            file, mode = os.devnull, mode.replace("x", "w")
        return original(file, mode, *args, **kwargs)

    return open


def _is_device(path: str) -> bool:
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def _is_importing() -> bool:
    """Return whether a module is being imported, as it is in workers too."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
