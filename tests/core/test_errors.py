from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from rl_ext_core import errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.InvalidTypeError, TypeError),
        (errors.MissingDependencyError, ImportError),
        (errors.DeviceUnavailableError, RuntimeError),
        (errors.CorruptFileError, ValueError),
        (errors.OutOfMemoryError, MemoryError),
    ],
)
def test_each_error_derives_from_a_builtin_and_can_be_pickled(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.RlExtError)
    assert issubclass(error, builtin)
    copy = pickle.loads(pickle.dumps(error("text")))  # worker processes send errors by pickle
    assert type(copy) is error
    assert str(copy) == "text"


def test_install_command_is_the_same_in_docs_and_errors() -> None:
    extras = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S)[1]
    known = set(re.findall(r"^([a-z0-9_-]+) = \[", extras, re.M))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    for page in pages:
        for line, names in re.findall(r'(pip install \\?"[^"\n]*rl-ext\[([^"\n]*)\]\\?")', page.read_text()):
            assert line.replace("\\", "") == errors.install_line(names), page
            assert known.issuperset(names.split(",")), page
    for package in ("shared/rl_ext_core", "sb3_ext", "torchrl_ext"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert "rl-ext[" not in text, path
            for extra in re.findall(r"_missing_dependency_error\([^,()]+, \"([^\"]+)\"", text):
                assert extra in known, path
