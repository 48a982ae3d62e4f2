"""What keeps processes apart that collide: a worker applies it before it imports its environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError

# A lock or a log next to a library is copied, so that each process has its own; bigger files are only linked.
_SMALL_BYTES = 1 << 20
_COPIED_ENTRIES = 1000
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")


def apply_cure(name: str, scratch: Path) -> None:
    """Give this process temporary files or libraries of its own, for as long as it lives.

    :param name: ``"TMPDIR"``: an empty folder for temporary files; ``"library copy"``: what is loaded through
        :mod:`ctypes` is copied into a folder with the same contents and loaded from there
    :param scratch: a folder that no other process uses; the caller removes it when the process has ended
    :raises InvalidArgumentError: If ``name`` is not one of these.
    """
    if name not in CURES:
        raise InvalidArgumentError(
            f"cure={name!r} is not known; expected one of {', '.join(CURES)}. Write apply_cure(verdict.cure, scratch)"
        )
    CURES[name](Path(scratch).absolute())


def enter_directory(folder: str | os.PathLike[str]) -> None:
    """Make a folder the working directory of this process; it is made if it does not exist."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    os.environ["PWD"] = str(folder)


def _temporary_directory(scratch: Path) -> None:
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    use_for_temporary_files(scratch / "tmp")


def use_for_temporary_files(folder: Path) -> None:
    """Have this process put its temporary files into a folder."""
    for name in ("TMPDIR",) if os.name == "posix" else ("TMPDIR", "TEMP", "TMP"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None  # asked for already, perhaps


def _library_copy(scratch: Path) -> None:
    original = ctypes.CDLL.__init__
    folders: dict[Path, Path] = {}

    def init(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        original(self, _copied(name, scratch / "libraries", folders), *args, **kwargs)

    ctypes.CDLL.__init__ = init  # type: ignore[method-assign]


def _copied(name: Any, scratch: Path, folders: dict[Path, Path]) -> Any:
    """Copy a library with the files next to it, and return the copy's path; return names without a path unchanged."""
    if not isinstance(name, (str, os.PathLike)) or not os.path.dirname(os.fspath(name)):
        return name
    library = Path(name).resolve()
    if not library.is_file() or str(library).startswith((*_SYSTEM, sysconfig.get_path("stdlib") + os.sep + "lib-")):
        return name
    if library.parent not in folders:
        folders[library.parent] = scratch / str(len(folders))
        _copy_small_files(library.parent, folders[library.parent])
    copy = folders[library.parent] / library.name
    if copy.is_symlink() or not copy.exists():
        copy.unlink(missing_ok=True)
        _copy(library, copy)
    return str(copy)


def _copy_small_files(source: Path, target: Path) -> None:
    """Make a folder with the contents of another: small files are copied, the rest is linked."""
    target.mkdir(parents=True)
    for index, entry in enumerate(sorted(os.scandir(source), key=lambda entry: entry.name)):
        with contextlib.suppress(OSError, shutil.Error):  # sockets and the like, and what disappears meanwhile
            small = index < _COPIED_ENTRIES and entry.is_file() and entry.stat().st_size <= _SMALL_BYTES
            (_copy if small else _link)(Path(entry.path), target / entry.name)


def _link(original: Path, path: Path) -> None:
    """Have a path mean what another one means; on Windows symbolic links take a privilege."""
    try:
        path.symlink_to(original, target_is_directory=original.is_dir())
    except OSError:
        if os.name != "nt":
            raise
        if original.is_dir():
            import _winapi

            _winapi.CreateJunction(str(original), str(path))  # type: ignore[attr-defined]
        else:
            _copy(original, path)


def _copy(original: Path, path: Path) -> None:
    shutil.copyfile(original, path)  # not copy2(), which calls what Wine lacks
    shutil.copystat(original, path)
    if os.name == "nt":  # which deletes nothing that is read-only
        os.chmod(path, stat.S_IWRITE)


CURES = {"TMPDIR": _temporary_directory, "library copy": _library_copy}
