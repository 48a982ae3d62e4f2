"""The project's exceptions are the builtins that callers expect."""

from __future__ import annotations

import pickle

import pytest

from rl_ext_core import errors


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
def test_each_error_is_the_projects_and_a_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.RlExtError)
    assert issubclass(error, builtin)
    copy = pickle.loads(pickle.dumps(error("text")))  # errors travel from worker processes
    assert type(copy) is error
    assert str(copy) == "text"


def test_a_missing_dependency_names_the_package_and_the_line_that_installs_it() -> None:
    error = errors.missing_dependency("numba", "frames", 'The codec "patch"')
    assert "The codec \"patch\" needs the package 'numba'" in str(error)
    assert '    pip install "rl-ext[frames]"' in str(error).splitlines()
    assert error.name == "numba"
