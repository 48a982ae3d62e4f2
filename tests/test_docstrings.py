"""Every public class has an example in its docstring, and what it says comes out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import tempfile
from pathlib import Path

import pytest

from tests.test_public_api import PACKAGES

CLASSES = {
    f"{package}.{name}": getattr(importlib.import_module(package), name)
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if inspect.isclass(getattr(importlib.import_module(package), name))
}
# They are raised here, and made by nobody else.
SHOWN = {name: cls for name, cls in CLASSES.items() if not issubclass(cls, Exception)}


# PettingZoo has begun to make its environments otherwise.
@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_the_example_of_a_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "frames" not in name and "Buffer" not in name and "Storage" not in name:  # numba's cache is below it too
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # verdicts of the probe
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs of Stable Baselines3
    monkeypatch.setattr(tempfile, "tempdir", None)
    examples = doctest.DocTestFinder(recurse=False).find(SHOWN[name], name, globs={})
    assert examples, f"{name} has no example"
    for example in examples:
        said: list[str] = []
        failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed
        assert not failed, "".join(said)
