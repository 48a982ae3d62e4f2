"""What a verdict depends on, by which a change is noticed.

Those are the shared objects and modules that an environment brings into its process, plain globals of the user's
modules, and the files that it opens: through Python, and in some folders through anything else, such as C.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import zipimport
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_ext_core._import_path import package_folders, standard_folders
from rl_ext_core.processes import SUPPORTED

_OWN_PACKAGE = "rl_ext_core"
_BIG = {"jax", "matplotlib", "numba", "numpy", "pandas", "scipy", "sklearn", "sympy", "tensordict", "torch", "torchrl"}
_SYSTEM = ("/lib/", "/lib64/", "/usr/")
_ours: frozenset[str] = frozenset()


def remember() -> None:
    """Take what is loaded now for our own, in this process and those that it forks."""
    global _ours
    import numpy.random  # noqa: F401 NumPy loads it when it is first used

    _ours = frozenset(_mapped())


def libraries() -> list[str]:
    """List the paths of shared objects that are loaded, without Python's own and ours."""
    standard = tuple(f"{folder}lib-dynload" for folder in standard_folders())
    return sorted(path for path in _mapped() - _ours if not path.startswith(standard))


def sources() -> list[str]:
    """List files by which a change of the environment's code shows.

    Each module has its own, but for Python's and ours, and for big packages of which a process may load a thousand: of
    those it is the one that is written whenever the package is. For what lies in an archive it is the archive.
    """
    found = set()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if not isinstance(path, str) or top == _OWN_PACKAGE:
            continue
        if top in _BIG:
            path = getattr(sys.modules.get(top), "__file__", None)
        elif _is_pythons(top, path):
            continue
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if isinstance(path, str):
            found.add(loader.archive if isinstance(loader, zipimport.zipimporter) else path)
    return sorted(found)


def folders() -> list[str]:
    """List the folders of the user's own modules and libraries: what lies there may be opened from C."""
    fixed = (*package_folders(), *standard_folders(), *_SYSTEM)
    own = [module.__file__ for module in _users_modules()]
    return sorted({os.path.dirname(path) for path in [*own, *libraries()] if not path.startswith(fixed)})


def globals_of_users() -> dict[str, dict[str, str]]:
    """Return plain values among the globals of the user's own modules, and among attributes of the classes there."""
    return {module.__name__: {key: repr(value) for key, value in _plain_globals(module)} for module in _users_modules()}


def changed_globals(fresh: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Return plain globals of modules that are not what :func:`globals_of_users` gave in another process."""
    changed: dict[str, dict[str, Any]] = {}
    for name, values in fresh.items():
        module = sys.modules.get(name)
        for key, value in () if module is None else _plain_globals(module):
            if values.get(key) != repr(value):
                changed.setdefault(name, {})[key] = value
    return changed


def set_globals(changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what :func:`changed_globals` gave in another process."""
    for name, values in changed.items():
        for key, value in values.items():
            path, _, attribute = key.rpartition(".")
            with contextlib.suppress(KeyError, AttributeError, TypeError):
                holder = sys.modules[name]
                setattr(getattr(holder, path) if path else holder, attribute, value)


def _plain_globals(module: Any) -> list[tuple[str, Any]]:
    """Return the plain values among a module's globals, and among attributes of classes that it defines."""
    found = []
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            members = [(key, part) for key, part in list(vars(value).items()) if key[:2] != "__"]
            found += [(f"{name}.{key}", part) for key, part in members if _is_plain(part)]
        elif name[:2] != "__" and _is_plain(value):
            found.append((name, value))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, complex, str, bytes, bool, type(None))


def _users_modules() -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if (top := name.partition(".")[0]) not in ("__main__", "__mp_main__", _OWN_PACKAGE)
        and isinstance(path := getattr(module, "__file__", None), str)
        and not path.startswith(package_folders())
        and not _is_pythons(top, path)
    ]


def _is_pythons(top: str, path: str) -> bool:
    """Whether a module is one of Python's own, by the first part of its name and its path."""
    if path.startswith(package_folders()):
        return False
    # On Windows its extension modules lie outside the folder of the others, which may be an archive.
    in_python = top in sys.stdlib_module_names and path.startswith(sys.base_prefix + os.sep)
    return in_python or path.startswith(standard_folders())


def _mapped() -> set[str]:
    if not SUPPORTED:
        return set()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (line.split(None, 5)[5] for line in lines if line.count(" ") >= 5 and "/" in line)
    return {path for path in paths if ".so" in os.path.basename(path) and not path.endswith(" (deleted)")}


_ACCESS, _MODIFY, _OPEN, _CREATE, _IS_FOLDER = 0x1, 0x2, 0x20, 0x100, 0x40000000  # linux/inotify.h
_NON_BLOCKING = 0o4000
_MOST_FOLDERS = 200
_NEVER = ("/proc/", "/sys/", "/dev/")


class OpenedHere:
    """Notes, from now on and unless it is paused, which files are opened through Python here to read them."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.paused = False
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "ctypes.dlopen" and isinstance(args[0], str) and os.path.dirname(args[0]):
            self.paths.add(os.path.abspath(args[0]))
        if event == "open" and not self.paused and isinstance(args[0], (str, bytes)):
            self.paused = True
            try:
                flags = args[2] if isinstance(args[2], int) else os.O_RDONLY
                path = os.fsdecode(args[0])
                if not flags & os.O_WRONLY and not path.endswith(".pyc") and not path.startswith(_NEVER):
                    self.paths.add(os.path.abspath(path))
            except (OSError, ValueError):  # no working directory any more, a path with a NUL
                pass
            finally:
                self.paused = False


def original_of(path: str, folders: Mapping[str, str]) -> str | None:
    """Return the path of the user's that a path means; None: it is nothing of the user's.

    :param folders: for folders that stand for one of the user's, that; for others that are not the user's, ""
    """
    for folder, original in folders.items():
        if path == folder or path.startswith(f"{folder}{os.sep}"):
            return f"{original}{path[len(folder) :]}" if original else None
    return path


class FolderWatch:
    """Notes which files in some folders, and below, are opened, read and modified, by whomever.

    Where that cannot be done, none is seen.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self.opened: set[str] = set()
        self.read: set[str] = set()
        self.modified: set[str] = set()
        self._names: dict[int, str] = {}
        self._descriptor = -1
        if SUPPORTED:
            self._library = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._library.inotify_init1(_NON_BLOCKING | os.O_CLOEXEC)
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
