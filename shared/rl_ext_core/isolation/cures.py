"""What keeps processes apart that collide: a worker applies it before it imports its environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["CURES", "apply_cure", "mirror"]

# A lock or a log beside the program is copied, so that nobody else's is touched; a file of data is read where it is.
_COPIED_BYTES = 1 << 20
_COPIED_FILES = 2000
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")


def apply_cure(name: str, scratch: Path) -> None:
    """Give this process something of its own, for as long as it lives.

    :param name: ``"working directory"``: a folder with the same contents, small files copied and the rest linked;
        ``"TMPDIR"``: an empty folder for temporary files; ``"library copy"``: what is loaded through :mod:`ctypes` is
        copied into a folder with the same contents and loaded from there
    :param scratch: a folder that no other process uses; whoever made it removes it when the process has ended
    :raises InvalidArgumentError: there is no such cure
    """
    if name not in CURES:
        raise InvalidArgumentError(
            f"cure={name!r} is not known; expected one of {', '.join(CURES)}. Write apply_cure(verdict.cure, scratch)"
        )
    CURES[name](Path(scratch).absolute())


def mirror(source: Path, target: Path) -> None:
    """Make a folder with the contents of another: small files are copied, big ones and folders are linked.

    :param source: what it is like; entries that cannot be read are left out
    :param target: the folder to make
    """
    target.mkdir(parents=True, exist_ok=True)
    copies = 0
    with contextlib.suppress(OSError), os.scandir(source) as entries:
        for entry in entries:
            # Sockets and the like, and what disappears meanwhile.
            with contextlib.suppress(OSError, shutil.Error):
                small = entry.is_file() and entry.stat().st_size <= _COPIED_BYTES and copies < _COPIED_FILES
                if small:
                    shutil.copy2(entry.path, target / entry.name)
                    copies += 1
                else:
                    (target / entry.name).symlink_to(Path(entry.path).absolute())


def _working_directory(scratch: Path) -> None:
    mirror(Path.cwd(), scratch / "cwd")
    os.chdir(scratch / "cwd")
    os.environ["PWD"] = str(scratch / "cwd")


def _temporary_directory(scratch: Path) -> None:
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(scratch / "tmp")
    tempfile.tempdir = None  # asked for already, perhaps


def _library_copy(scratch: Path) -> None:
    original = ctypes.CDLL.__init__
    folders: dict[Path, Path] = {}

    def init(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        original(self, _copied(name, scratch / "libraries", folders), *args, **kwargs)

    ctypes.CDLL.__init__ = init  # type: ignore[method-assign]


def _copied(name: Any, scratch: Path, folders: dict[Path, Path]) -> Any:
    """Copy a library with all that lies beside it, and give the copy's path; names without a path stay as they are."""
    if not isinstance(name, (str, os.PathLike)) or os.sep not in os.fspath(name):
        return name
    library = Path(name).resolve()
    if not library.is_file() or str(library).startswith((*_SYSTEM, sysconfig.get_path("stdlib") + os.sep + "lib-")):
        return name
    if library.parent not in folders:
        folders[library.parent] = scratch / str(len(folders))
        mirror(library.parent, folders[library.parent])
    copy = folders[library.parent] / library.name
    if copy.is_symlink():
        copy.unlink()
        shutil.copy2(library, copy)
    return str(copy)


CURES = {"working directory": _working_directory, "TMPDIR": _temporary_directory, "library copy": _library_copy}
