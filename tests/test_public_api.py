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

CORE = ("datasets", "devices", "errors", "factory", "frames", "isolation", "processes", "recording", "resources")
PACKAGES = ["rl_ext_core", *(f"rl_ext_core.{name}" for name in (*CORE, "vector")), "torchrl_ext"]
PACKAGES += ["sb3_ext", "sb3_ext.contrib", "sb3_ext.tensor"]
ADAPTERS = ("torchrl_ext", "sb3_ext")
EXPORTED = {
    "sb3_ext.tensor": ("sb3_ext._tensor_buffers", "sb3_ext._tensor_vec_env")
}  # private modules whose names a module exports
PACKAGE_ROOTS = ("rl_ext_core", *ADAPTERS)


def public_names(module: ModuleType) -> set[str]:
    """Return the names that a module defines, except private ones and modules."""
    # The adapters also export names of the core. A module of the core exports only its own names.
    origins = PACKAGE_ROOTS if module.__name__ in ADAPTERS else (module.__name__, *EXPORTED.get(module.__name__, ()))
    found = set()
    for name in {name for name in dir(module) if not name.startswith("_")} - {"TYPE_CHECKING"}:
        value = getattr(module, name)
        # Constants have no __module__, and count if they are public.
        origin = f"{getattr(value, '__module__', origins[0])}."
        if not inspect.ismodule(value) and any(origin.startswith(f"{package}.") for package in origins):
            found.add(name)
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_in_all_and_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) - {"__version__"} == public_names(module)
    assert module.__doc__
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            # Inherited docstrings, and signatures that dataclasses write, do not count.
            doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert doc, f"{name}.{public} has no docstring"
            assert not doc.startswith(f"{public}("), f"{name}.{public} has no docstring of its own"


def test_version_equals_the_distribution_version() -> None:
    assert version("rl-ext") == rl_ext_core.__version__


NAMES = {f"{package}.{name}": package for package in PACKAGES for name in importlib.import_module(package).__all__}
VALUES = {name: getattr(importlib.import_module(NAMES[name]), name.rpartition(".")[2]) for name in NAMES}
# Exceptions have no example.
CLASSES = {name: cls for name, cls in VALUES.items() if inspect.isclass(cls) and not issubclass(cls, Exception)}
FUNCTIONS = {name: value for name, value in VALUES.items() if inspect.isfunction(value) and ">>>" in str(value.__doc__)}


# PettingZoo has deprecated the way in which the example creates an environment.
@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_docstring_example_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs of Stable Baselines3
    monkeypatch.setattr(tempfile, "tempdir", None)
    examples = doctest.DocTestFinder(recurse=False).find(VALUES[name], name, globs={})
    assert examples, f"{name} has no example"
    for example in examples:
        printed: list[str] = []
        failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append).failed
        assert not failed, "".join(printed)
