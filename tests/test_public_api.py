"""``__all__`` is exactly the public names, each of them is documented, and the example of a class comes out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import rl_ext_core

PACKAGES = [
    "rl_ext_core",
    "rl_ext_core.devices",
    "rl_ext_core.errors",
    "rl_ext_core.factory",
    "rl_ext_core.frames",
    "rl_ext_core.isolation",
    "rl_ext_core.processes",
    "rl_ext_core.resources",
    "rl_ext_core.testing",
    "rl_ext_core.vector",
    "torchrl_ext",
    "sb3_ext",
    "sb3_ext.contrib",
]
ADAPTERS = ("torchrl_ext", "sb3_ext")
PACKAGE_ROOTS = ("rl_ext_core", *ADAPTERS)


def public_names(module: ModuleType) -> set[str]:
    """Name what ``module`` offers: neither private, nor a module, nor made elsewhere."""
    # The adapters offer parts of the core as well; a part of the core offers only what it holds.
    origins = PACKAGE_ROOTS if module.__name__ in ADAPTERS else (module.__name__,)
    names = {name for name in dir(module) if not name.startswith("_") and name != "TYPE_CHECKING"}
    return {name for name in names if _is_defined_in(getattr(module, name), origins)}


def _is_defined_in(value: object, origins: tuple[str, ...]) -> bool:
    if inspect.ismodule(value):
        return False
    # Plain constants do not say where they come from: a public one counts.
    origin = str(getattr(value, "__module__", origins[0]))
    return any(f"{origin}.".startswith(f"{package}.") for package in origins)


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_exactly_the_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) - {"__version__"} == public_names(module)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            # Its own, not an inherited one, nor the signature that dataclasses write.
            doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert doc, f"{name}.{public} has no docstring"
            assert not doc.startswith(f"{public}("), f"{name}.{public} has no docstring of its own"


def test_the_check_of_names_can_fail() -> None:
    module = ModuleType("offender")
    exec("import os\nfrom pathlib import Path\nLIMIT = 3\n_private = 1\ndef forgotten(): ...", vars(module))
    module.forgotten.__module__ = "offender._part"
    assert public_names(module) == {"forgotten", "LIMIT"}


@pytest.mark.parametrize("name", PACKAGE_ROOTS)
def test_type_information_is_shipped(name: str) -> None:
    assert (Path(str(importlib.import_module(name).__file__)).parent / "py.typed").is_file()


def test_the_version_is_that_of_the_distribution() -> None:
    assert version("rl-ext") == rl_ext_core.__version__


CLASSES = {
    f"{package}.{name}": getattr(importlib.import_module(package), name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if inspect.isclass(getattr(importlib.import_module(package), name))
}
# They are raised here, and made by nobody else.
DOCUMENTED_CLASSES = {name: cls for name, cls in CLASSES.items() if not issubclass(cls, Exception)}


# PettingZoo has begun to make its environments otherwise.
@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED_CLASSES)
def test_the_example_of_a_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "frames" not in name and "Buffer" not in name and "Storage" not in name:  # numba's cache is below it too
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # verdicts of the probe
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs of Stable Baselines3
    monkeypatch.setattr(tempfile, "tempdir", None)
    examples = doctest.DocTestFinder(recurse=False).find(DOCUMENTED_CLASSES[name], name, globs={})
    assert examples, f"{name} has no example"
    for example in examples:
        printed: list[str] = []
        failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append).failed
        assert not failed, "".join(printed)
