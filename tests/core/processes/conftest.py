from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.processes.worker_groups import METHODS
from tests.worker_servers import cold_server


@pytest.fixture(autouse=True, scope="module")
def servers_without_libraries() -> Iterator[None]:
    """Start servers without the tests' libraries. The workers do not need them, and some tests replace servers."""
    with cold_server():
        yield


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)
