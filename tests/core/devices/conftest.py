from __future__ import annotations

import pytest

from tests.core.devices.fakes import build


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> build.Drivers:
    folder = tmp_path_factory.mktemp("drivers")
    build.compile_drivers(folder)
    return build.Drivers(folder)
