"""The import path for new processes, and the modules that a new process does not find by it."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from typing import Any

__all__ = ["import_path", "is_importable_elsewhere", "package_folders", "standard_folders", "call_when_imported"]

_SCRIPTS = ("__main__", "__mp_main__")


def _absolute_path(entry: str) -> str | None:
    try:
        return os.path.abspath(entry)
    except FileNotFoundError:  # the working directory was deleted
        return None


# What relative entries of sys.path meant when this package was imported: a program may change its directory later.
_initial_entries = {entry: _absolute_path(entry) for entry in map(str, sys.path) if not os.path.isabs(entry)}


def import_path() -> list[str]:
    """Return ``sys.path`` for a new process: absolute, with the folders of all modules that were loaded from others.

    A relative entry stands for the working directory at the import of this package, and for the present one.
    """
    path: dict[str | None, None] = {}
    for entry in sys.path:
        if isinstance(entry, str):  # imports skip others
            # multiprocessing notes the directory earlier, if it was imported earlier.
            noted = getattr(sys.modules.get("multiprocessing.process"), "ORIGINAL_DIR", None) if entry == "" else None
            path |= dict.fromkeys([_initial_entries.get(entry), noted, _absolute_path(entry)])
    path.pop(None, None)
    found = [entry for entry in path if entry is not None]
    for name, module in list(sys.modules.items()):
        folder = None if "." in name or name in _SCRIPTS else _import_folder(module)
        if folder is None or folder in path:
            continue
        # An entry was taken off, or was relative to another working directory.
        if not _finds_module(name, module, found) and _finds_module(name, module, [folder]):
            found.append(folder)
            path[folder] = None
    return found


def is_importable_elsewhere(name: str) -> bool:
    """Whether a new process with :func:`import_path` imports the module that this process has under a name.

    It does not if the module was made without a file, its file was deleted, an import hook of the program has loaded
    it, or another module of that name comes first. Decided for whole top-level packages.
    """
    top = name.partition(".")[0]
    module = sys.modules.get(top)
    if module is None or top in _SCRIPTS or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    if isinstance(file := getattr(module, "__file__", None), str) and file.startswith(_installed_folders()):
        return True
    return _finds_module(top, module, import_path()) or _finds_by_hook(top, module)


def _import_folder(module: Any) -> str | None:
    """Return the folder from which a top-level module of the user's was imported; None if there is none."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and os.path.isabs(file):
        if file.startswith(_installed_folders()):
            return None
        folder = os.path.dirname(file)
        return os.path.dirname(folder) if os.path.basename(file).startswith("__init__.") else folder
    if file is None and (places := list(getattr(module, "__path__", None) or ())):  # a package without __init__.py
        return os.path.dirname(str(places[0]))
    return None


def _finds_module(name: str, module: Any, path: list[str]) -> bool:
    """Whether a search of folders finds this very module."""
    try:
        return _is_spec_of(PathFinder.find_spec(name, path), module)
    except Exception:  # a damaged archive, for example
        return False


def _finds_by_hook(name: str, module: Any) -> bool:
    """Whether an import hook of an installed package finds this very module, as those of editable installs do."""
    for finder in list(sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        home = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if isinstance(home, str) and home.startswith(_installed_folders()):
            with contextlib.suppress(Exception):
                if _is_spec_of(finder.find_spec(name, None), module):
                    return True
    return False


def _is_spec_of(spec: Any, module: Any) -> bool:
    if spec is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return spec.origin is None and hasattr(module, "__path__")
    return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def call_when_imported(names: Collection[str], function: Callable[[Any], object]) -> None:
    """Call a function with each module of these names: now, or once it has been imported.

    :param function: another call with the same function replaces what the first one waits for
    """
    sys.meta_path[:] = [one for one in sys.meta_path if getattr(one, "function", None) is not function]
    sys.meta_path.insert(0, _ImportHook(frozenset(names), function))
    for name in names:
        if name in sys.modules:
            function(sys.modules[name])


class _ImportHook:
    """Finds modules as the finders behind it do, and calls a function after they were executed."""

    def __init__(self, names: Collection[str], function: Callable[[Any], object]) -> None:
        self.names, self.function = names, function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Do what a finder does; many callers ask only whether a module is installed."""
        if name not in self.names:
            return None
        behind = [one for one in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(one, "find_spec")]
        found = next(filter(None, (one.find_spec(name, path, target) for one in behind)), None)
        if found is not None and hasattr(found.loader, "exec_module"):
            loader: Any = found.loader
            loader.exec_module = functools.partial(self._execute, loader.exec_module)
        return found

    def _execute(self, exec_module: Callable[[Any], None], module: Any) -> None:
        exec_module(module)
        self.function(module)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    return standard_folders() + package_folders()


@functools.cache
def standard_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules, each with a separator at its end."""
    import sysconfig

    return tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


@functools.cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, each with a separator at its end."""
    import sysconfig

    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    # On Windows Python's own folder is among them, in which its library lies.
    others = [folder for folder in site.getsitepackages() if folder != sys.prefix]
    return tuple(folder + os.sep for folder in dict.fromkeys([*folders, *others]))
