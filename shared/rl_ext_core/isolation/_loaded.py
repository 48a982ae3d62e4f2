"""What an environment has brought into its process: shared objects and modules, by which a change is noticed."""

from __future__ import annotations

import importlib.metadata
import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rl_ext_core.factory import _preload
from rl_ext_core.factory._overrides import layers

__all__ = ["distributions", "harmless", "libraries", "remember", "sources"]

_OWN_PACKAGE = "rl_ext_core"
_ours: frozenset[str] = frozenset()


def remember() -> None:
    """Take what is loaded now for our own, in this process and those that it forks."""
    global _ours
    import numpy.random  # noqa: F401 NumPy loads it when it is first used

    _ours = frozenset(_mapped())


def libraries() -> list[str]:
    """List the paths of shared objects that are loaded, without Python's own and ours."""
    standard = tuple(f"{folder}lib-dynload" for folder in _standard_folders())
    return sorted(path for path in _mapped() - _ours if not path.startswith(standard))


def sources() -> list[str]:
    """List files by which a change of the environment's code shows.

    Of installed packages this is the one that is written whenever the package is; of all other modules each has its
    own. Python's and ours are left out.
    """
    installed = _folders_of_packages()
    standard = _standard_folders()
    found = set()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        top = name.partition(".")[0]
        if not isinstance(path, str) or top == _OWN_PACKAGE:
            continue
        if path.startswith(installed):
            path = getattr(sys.modules.get(top), "__file__", None)
        elif path.startswith(standard):
            continue
        if isinstance(path, str):
            found.add(path)
    return sorted(found)


def harmless() -> list[str]:
    """List the loaded modules that may be imported before a process is forked."""
    return list(_preload.of_modules(list(sys.modules)))


def distributions(environment: Any) -> dict[str, str]:
    """Give the versions of the distributions that the classes of an environment's layers come from.

    Where a distribution is not called like its package, the files that :func:`sources` lists have to do.
    """
    found = {}
    for name in {type(layer).__module__.partition(".")[0] for layer in layers(environment)}:
        version = version_of(name)
        if version is not None:
            found[name] = version
    return found


def version_of(name: str) -> str | None:
    """Give the version of a distribution; None: there is none of this name."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _standard_folders() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def _folders_of_packages() -> tuple[str, ...]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    return tuple(folder + os.sep for folder in dict.fromkeys([*folders, *site.getsitepackages()]))


def _mapped() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return set()
    paths = (line.split(None, 5)[5] for line in lines if line.count(" ") >= 5 and "/" in line)
    return {path for path in paths if ".so" in Path(path).name and not path.endswith(" (deleted)")}
