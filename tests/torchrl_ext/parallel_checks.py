"""Fixtures and helpers of the tests of ``ParallelEnv`` that concern processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.leaks import running_workers
from tests.torchrl_ext.parallel_environments import EVENT_LOG

ROOT = Path(__file__).resolve().parents[2]


_earlier_workers: set[psutil.Process] = set()


def workers_left(*, grace_s: float = 60.0) -> list[psutil.Process]:
    """Return new workers that still run after a grace period, without ending them."""
    gc.collect()
    end = time.monotonic() + grace_s
    while (left := new_workers()) and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.fixture
def event_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the log file to which environments of a test write their events."""
    path = tmp_path / "event_log"
    path.touch()
    monkeypatch.setenv(EVENT_LOG, str(path))
    return path


def new_workers() -> list[psutil.Process]:
    """Return the workers that this test has started, without those of earlier tests."""
    return [worker for worker in running_workers() if worker not in _earlier_workers]


@pytest.fixture(autouse=True)
def no_workers_left() -> Iterator[None]:
    """Fail a test that leaves workers, after killing them."""
    _earlier_workers.clear()
    # An earlier test may have left an environment to the garbage collector.
    _earlier_workers.update(workers_left(grace_s=1) if running_workers() else ())
    yield
    left = workers_left()
    for process in left:
        process.kill()
    assert not left
