"""What keeps processes apart that collide: a worker applies it before it imports its environment."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import math
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError

# A lock or a log beside the program is copied, so that nobody else's is touched; a file of data is read where it is.
_SMALL_BYTES = 1 << 20
_COPIED_BYTES = 16 << 20
_COPIED_ENTRIES = 1000
_PARENTS = 2
# Of audit events, see https://docs.python.org/3/library/audit_events.html
_WRITING = {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.truncate", "os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")


def apply_cure(name: str, scratch: Path) -> None:
    """Give this process something of its own, for as long as it lives.

    :param name: ``"working directory"``: a folder with the same contents, small files copied and the rest linked, and
        copied when it is written to;
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
    """Make a folder with the contents of another: what is small is copied, as far as it is not much; the rest linked.

    What Python writes to by a link is copied first, in processes that have called :func:`write_to_copies`. What is
    written from C to a big file that is there already goes to that file. What cannot be read is left out.
    """
    bytes_left, entries_left = _COPIED_BYTES, _COPIED_ENTRIES
    itself = {target.absolute(), *target.absolute().parents}
    target.mkdir(parents=True, exist_ok=True)
    waiting = collections.deque([(Path(source).absolute(), target)])
    while waiting:
        one, other = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(one) as scanned:
            entries, device = sorted(scanned, key=lambda entry: entry.name), os.stat(one).st_dev
            if other != target:
                if entries_left <= len(entries):
                    _link(one, other)
                    continue
                entries_left -= 1
                other.mkdir()
            for entry in entries:
                # Sockets and the like, and what disappears meanwhile.
                with contextlib.suppress(OSError, shutil.Error):
                    if Path(entry.path) in itself:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if os.stat(entry.path).st_dev != device:  # such as /proc below /
                            _link(Path(entry.path), other / entry.name)
                            continue
                        waiting.append((Path(entry.path), other / entry.name))
                        continue
                    size = entry.stat().st_size if entry.is_file() and entries_left else math.inf
                    if size <= min(bytes_left, _SMALL_BYTES):
                        bytes_left, entries_left = bytes_left - int(size), entries_left - 1
                        _copy(entry.path, other / entry.name)
                    else:
                        _link(Path(entry.path), other / entry.name)


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
            if original.stat().st_mode & stat.S_IWRITE:
                with contextlib.suppress(OSError):  # another volume
                    return os.link(original, path)
            _copy(original, path)


def _copy(original: str | Path, path: str | Path) -> None:
    if os.stat(original).st_size:
        shutil.copyfile(original, path)  # not copy2(), which calls what Wine lacks
    else:  # reading /proc/kmsg, which says so of itself, has no end
        Path(path).touch()
    shutil.copystat(original, path)
    if os.name == "nt":  # which deletes nothing that is read-only, as git's objects are; a link is so with its original
        os.chmod(path, stat.S_IWRITE)


class Mirrored:
    """A folder like the caller's, made anew when something was written there."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self._source, self._scratch = source, scratch
        self._made = 0
        self._state: Any = None
        self._path = scratch
        self.parents: dict[str, str] = {}  # for the folders above it what they stand for

    def path(self) -> Path:
        """Return the folder."""
        if self._state is None or self._state != _state_of(self._path):
            shutil.rmtree(self._scratch / str(self._made), ignore_errors=True)
            self._made += 1
            self._path = self._with_parents(self._scratch / str(self._made))
            mirror(self._source, self._path)
            self._state = _state_of(self._path)
        return self._path

    def _with_parents(self, target: Path) -> Path:
        """Make folders above it in which "../data" is found."""
        above = [parent for parent in self._source.parents if parent.name][:_PARENTS]
        children = [self._source, *above]
        self.parents = {}
        for parent, child in reversed(list(zip(above, children, strict=False))):
            target = target / parent.name
            target.mkdir(parents=True)
            self.parents[str(target)] = str(parent)
            with contextlib.suppress(OSError), os.scandir(parent) as entries:
                for entry in itertools.islice(entries, _COPIED_ENTRIES):
                    if entry.name != child.name and Path(entry.path) not in self._scratch.parents:
                        with contextlib.suppress(OSError):
                            _link(Path(entry.path), target / entry.name)
        return target / self._source.name if self._source.name else target / "root"


def _state_of(folder: Path) -> Any:
    """Describe all files by which a change of one shows."""
    found = []
    for path, _, names in os.walk(folder):
        for name in names:
            state = os.lstat(os.path.join(path, name))
            found.append((path, name, state.st_ino, state.st_mtime_ns, state.st_size))
        found.append((path, "", 0, 0, 0))
    return sorted(found)


def write_to_copies(folder: Path) -> None:
    """Have links below a folder replaced by copies before this process writes to them through Python.

    That never ends: in processes that live for this folder.
    """
    start, root = f"{folder}{os.sep}", str(folder)
    busy = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or event not in _WRITING or not args or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        busy = True
        try:
            for path in args[:2] if event == "os.rename" else args[:1]:
                place = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))
                if place.startswith(start):
                    _copy_links(root, place[len(start) :].split(os.sep), itself=event in ("open", "os.truncate"))
        except (OSError, ValueError, TypeError):  # what is wrong with it shows when it is done
            pass
        finally:
            busy = False

    sys.addaudithook(hook)


def _copy_links(folder: str, names: list[str], *, itself: bool) -> None:
    path = folder
    for index, name in enumerate(names):
        path = os.path.join(path, name)
        if not os.path.islink(path) or not (itself or index < len(names) - 1):
            continue
        original = os.path.realpath(path)
        if os.path.isdir(original):
            os.unlink(path)
            os.mkdir(path)
            for entry in os.scandir(original):
                os.symlink(entry.path, os.path.join(path, entry.name))
        elif os.path.isfile(original):
            os.unlink(path)
            _copy(original, path)


def _working_directory(scratch: Path) -> None:
    mirror(Path.cwd(), scratch / "cwd")
    write_to_copies(scratch / "cwd")
    os.chdir(scratch / "cwd")
    os.environ["PWD"] = str(scratch / "cwd")


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
    """Copy a library with all that lies beside it, and give the copy's path; names without a path stay as they are."""
    if not isinstance(name, (str, os.PathLike)) or not os.path.dirname(os.fspath(name)):
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
        _copy(library, copy)
    return str(copy)


CURES = {"working directory": _working_directory, "TMPDIR": _temporary_directory, "library copy": _library_copy}
