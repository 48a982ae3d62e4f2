"""Keep the user's files unchanged in temporary processes that build and step environments."""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import os
import pathlib
import stat
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_ext_core.errors import RlExtError

__all__ = ["REFUSAL", "ProtectedFileError", "protect_files", "remove_created"]

REFUSAL = "a temporary process must not change the file"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# Audit events of operations on files. Among the arguments: places of a path and of its folder's descriptor, and whether
# the operation needs an existing file (True), a missing one (False), or neither (None).
_OPERATIONS: dict[str, tuple[tuple[int, int | None, bool | None], ...]] = {
    "os.remove": ((0, 1, True),),
    "os.rmdir": ((0, 1, True),),
    "os.truncate": ((0, None, True),),
    "os.chmod": ((0, 2, True),),
    "os.chown": ((0, 3, True),),
    "os.utime": ((0, 3, True),),
    "os.rename": ((0, 2, True), (1, 3, None)),
    "os.mkdir": ((0, 2, False),),
    "os.link": ((1, 3, False),),
    "os.symlink": ((1, 2, False),),
}


class ProtectedFileError(RlExtError, PermissionError):
    """Change of a protected file. Not the error that an environment raised by itself."""


def protect_files(folder: str, created: str | None = None) -> None:
    """Prevent Python code in this process from changing files outside a folder.

    ``open`` for writing returns a file in the folder, and readers still get the original. Other changes raise
    PermissionError. Caches and devices are exempt, and imports may create files. Gymnasium's wrapper records no videos.
    Files that C code opens are not protected, except those of ``torch.save``.

    :param folder: Folder in which files may change.
    :param created: File that receives the names of new files outside of the folder, for :func:`remove_created`.
        ``os.open`` of existing empty files is possible then, too, because environments lock them. None prevents both.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    writable = tuple(os.path.join(os.path.realpath(each), "") for each in (folder, cache, "/dev", "/proc"))

    def find_protected(path: Any, descriptor: int = -1, *, allow_empty: bool = False) -> str:
        """Return the full path if it must not change, else an empty string. Record it if it is new.

        :param descriptor: Descriptor of the folder that the path is in. -1 means the working directory.
        :param allow_empty: Whether empty files may change.
        """
        if isinstance(path, int):
            return ""
        name = os.fsdecode(path)
        if descriptor >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), name)
        real = os.path.realpath(name)
        if real.startswith(writable) or "__pycache__" in real or _is_device(real):
            return ""
        if created is None:
            return real
        mark = "new"
        if os.path.lexists(real):
            if ("new", real) in _read_created(Path(created)):
                return ""
            if not allow_empty or os.path.getsize(real) > 0:
                return real
            mark = "empty"
        with original_open(created, "ab") as file:
            file.write(os.fsencode(f"{mark} {real}\0"))
        return ""

    def check(event: str, args: tuple[Any, ...]) -> None:
        changed = ""
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITING and not isinstance(args[0], int):
            fails = args[2] & os.O_EXCL and os.path.lexists(args[0])  # Python raises FileExistsError.
            changed = "" if fails else find_protected(args[0], allow_empty=True)
        for place, at, needs_file in _OPERATIONS.get(event, ()):
            descriptor = -1 if at is None else args[at]
            # Python raises the usual error for a missing or an existing file.
            is_possible = not isinstance(args[place], int) and (
                descriptor >= 0 or needs_file in (None, os.path.lexists(args[place]))
            )
            if is_possible:
                changed = find_protected(args[place], descriptor) or changed
        if changed and (os.path.lexists(changed) or not _is_importing()):
            raise ProtectedFileError(
                f"{REFUSAL} {changed!r} ({event}); expected new files, or open() with mode 'w' or 'a', "
                "which discards the content"
            )
        if event == "import":
            _redirect_torch(redirect)

    def redirect(path: Any) -> Any:
        """Return the path, or that of a file in the folder which is written instead."""
        real = find_protected(path)
        if not real:
            return path
        # Processes that share the folder share the file, so that its locks work.
        name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
        return os.path.join(os.path.realpath(folder), f"discarded-{name}")

    original_open = io.open

    @functools.wraps(original_open)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        replaces = "+" not in mode or "w" in mode or "x" in mode
        exists = "x" in mode and not isinstance(file, int) and os.path.lexists(file)
        if set(mode) & set("wax") and replaces and not exists:
            file = redirect(file)
        return original_open(file, mode, *args, **kwargs)

    _disable_videos()
    _redirect_torch(redirect)
    sys.addaudithook(check)
    builtins.open = io.open = open
    accessor: Any = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has its own reference.
    if accessor is not None:
        accessor.open = staticmethod(open)
    tempfile.tempdir = None  # A preloaded module may have cached another folder than TMPDIR.


def remove_created(created: Path) -> None:
    """Remove the new files that a process with :func:`protect_files` has recorded, and truncate empty ones."""
    for mark, name in reversed(_read_created(created)):
        with contextlib.suppress(OSError):
            if mark == "new":
                (os.rmdir if os.path.isdir(name) and not os.path.islink(name) else os.unlink)(name)
            elif os.path.getsize(name):
                os.truncate(name, 0)


def _disable_videos() -> None:
    """Let gymnasium's wrapper record no videos, because another program, in C, would write them to files."""
    import gymnasium.wrappers

    def do_nothing(self: Any, *_: Any) -> None:
        self.recorded_frames, self.recording = [], False

    kind: Any = getattr(gymnasium.wrappers, "RecordVideo", None)
    if hasattr(kind, "stop_recording"):
        kind.start_recording = kind.stop_recording = do_nothing


def _redirect_torch(redirect: Callable[[Any], Any]) -> None:
    """Redirect ``torch.save``, which writes files in C++. Do nothing until torch has been imported."""
    kind: Any = getattr(sys.modules.get("torch.serialization"), "_open_zipfile_writer_file", None)
    if kind is None or hasattr(kind, "_is_redirected"):
        return
    original = kind.__init__

    def initialize(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        original(self, redirect(name), *args, **kwargs)

    kind.__init__, kind._is_redirected = initialize, True


def _read_created(created: Path) -> list[tuple[str, str]]:
    """Return the recorded names, each with ``"new"`` or ``"empty"``."""
    lines = os.fsdecode(created.read_bytes()).split("\0")[:-1]
    return [(mark, name) for mark, _, name in (line.partition(" ") for line in lines)]


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
