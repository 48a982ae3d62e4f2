"""Import path of new processes, and detection of modules that they cannot import."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from typing import Any

__all__ = [
    "call_when_imported",
    "hide_from_warnings",
    "import_path",
    "is_importable_elsewhere",
    "package_folders",
]

_SCRIPTS = ("__main__", "__mp_main__")


def import_path() -> list[str]:
    """Return ``sys.path`` for a new process, with absolute paths.

    It also includes the folders of loaded modules that ``sys.path`` does not contain any more.
    """
    found = list[str]()
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
            if isinstance(entry, str):  # imports ignore entries of other types
                found.append(os.path.abspath(entry))
    for name, module in list(sys.modules.items()):
        folder = None if "." in name or name in _SCRIPTS else _import_folder(module)
        if folder is None or folder in found:
            continue
        # The module's entry was removed, or was relative to another working directory.
        if not _finds_module(name, module, found) and _finds_module(name, module, [folder]):
            found.append(folder)
    return found


def is_importable_elsewhere(name: str) -> bool:
    """Return whether a new process would import the same module under this name.

    It would not if the module has no file or its file was deleted. It would not either if an import hook of the program
    has loaded it, or another module of that name comes first. Top-level packages are treated as a whole.
    """
    top = name.partition(".")[0]
    module = sys.modules.get(top)
    if module is None or top in _SCRIPTS or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    if isinstance(file := getattr(module, "__file__", None), str) and file.startswith(_installed_folders()):
        return True
    return _finds_module(top, module, import_path()) or _finds_by_hook(top, module)


def _import_folder(module: Any) -> str | None:
    """Return the folder that a user's top-level module was imported from, or None."""
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
    """Return whether an import that searches these folders would find the same module."""
    try:
        return _is_spec_of(PathFinder.find_spec(name, path), module)
    except Exception:  # a damaged archive, for example
        return False


def _finds_by_hook(name: str, module: Any) -> bool:
    """Return whether an installed import hook, such as an editable install, finds the module."""
    for finder in list(sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        home = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if isinstance(home, str) and home.startswith(_installed_folders()):
            with contextlib.suppress(Exception):
                if _is_spec_of(finder.find_spec(name, None), module):
                    return True
    return False


def _is_spec_of(spec: Any, module: Any) -> bool:
    """Return whether an import with this module spec would load the same file as a module has."""
    if spec is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return spec.origin is None and hasattr(module, "__path__")
    return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def hide_from_warnings(function: Any) -> Any:
    """Make warnings skip the frame of a wrapper, so that their stack levels count the frames of its callers.

    The ``warnings`` module skips frames of the import system, which it knows by the names of their files.
    """
    code = function.__code__
    function.__code__ = code.replace(co_filename=f"{code.co_filename} <importlib._bootstrap>")
    return function


def call_when_imported(names: Collection[str], function: Callable[[Any], object]) -> None:
    """Call a function with each module of these names, now or once it is imported.

    :param names: Full names of modules
    :param function: Function to call with the module. Another call with the same function replaces its names.
    """
    sys.meta_path[:] = [one for one in sys.meta_path if getattr(one, "function", None) is not function]
    sys.meta_path.insert(0, _ImportHook(frozenset(names), function))
    for name in names:
        if name in sys.modules:
            function(sys.modules[name])


class _ImportHook:
    """Finder that calls a function after a module was executed.

    It delegates to the finders behind it.
    """

    def __init__(self, names: Collection[str], function: Callable[[Any], object]) -> None:
        self.names, self.function = names, function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module as the other finders do, and wrap its loader."""
        if name not in self.names:
            return None
        behind = [one for one in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(one, "find_spec")]
        found = next(filter(None, (one.find_spec(name, path, target) for one in behind)), None)
        if found is not None and hasattr(found.loader, "exec_module"):
            loader: Any = found.loader
            loader.exec_module = functools.partial(self._execute, loader.exec_module)
        return found

    @hide_from_warnings
    def _execute(self, exec_module: Callable[[Any], None], module: Any) -> None:
        """Execute the module with its loader, then call ``function`` with it."""
        exec_module(module)
        self.function(module)


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages, each with a separator at its end."""
    import sysconfig

    return (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), *package_folders())


@functools.cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, each with a separator at its end."""
    import sysconfig

    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    # On Windows, they include Python's own folder, which contains the standard library.
    others = [folder for folder in site.getsitepackages() if folder != sys.prefix]
    # A virtual environment may include packages of another one, by --system-site-packages or a .pth file.
    others += [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    return tuple(folder + os.sep for folder in dict.fromkeys([*folders, *others]))
