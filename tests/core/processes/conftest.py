"""Ends the fork servers that these tests start; otherwise they are kept until the interpreter exits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_ext_core.processes.server import stop_server
from tests.core.processes.groups import METHODS


@pytest.fixture(autouse=True, scope="session")
def stop_fork_server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)
