"""Fixtures and helpers of the tests of ``ParallelEnv`` that concern processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.environments import EVENT_LOG
from tests.leaks import ignore_running_processes, running_workers

ROOT = Path(__file__).resolve().parents[2]


def workers_left() -> list[psutil.Process]:
    """Return workers of this test that still run after a grace period, without ending them."""
    gc.collect()
    return running_workers(grace_s=60)


@pytest.fixture
def event_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the log file to which environments of a test write their events."""
    path = tmp_path / "event_log"
    path.touch()
    monkeypatch.setenv(EVENT_LOG, str(path))
    return path


@pytest.fixture(autouse=True)
def no_workers_left() -> Iterator[None]:
    """Fail a test that leaves workers, after killing them."""
    ignore_running_processes()
    yield
    left = workers_left()
    for process in left:
        process.kill()
    assert not left
