from __future__ import annotations

import shutil

import pytest

from tests.core.devices.fakes import build


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> build.Drivers:
    """Compile the fake driver libraries; skip the test if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        build.skip_or_fail("no C compiler (cc) for the fake driver libraries: apt-get install gcc libc6-dev")
    folder = tmp_path_factory.mktemp("drivers")
    build.compile_into(folder, compiler)
    return build.Drivers(folder)
