"""Fixtures of the worker tests: start methods, and the end of the fork server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_ext_core.processes.server import stop_server
from tests.core.processes.worker_groups import METHODS


@pytest.fixture(autouse=True, scope="session")
def stop_fork_server() -> Iterator[None]:
    """Stop the fork server at the end of the session."""
    yield
    stop_server()


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Start method of worker processes."""
    return str(request.param)
