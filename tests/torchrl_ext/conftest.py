from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (optimizers would import it later, which makes a folder while folders are watched)
from torchrl._utils import logger

from tests.environments import EVENT_LOG
from tests.leaks import ignore_running_processes, running_workers

with warnings.catch_warnings():
    # TorchRL's own classes inherit from a class that TorchRL deprecates.
    warnings.filterwarnings("ignore", "Creating .* which inherits from WeightUpdaterBase", DeprecationWarning)
    import torchrl.collectors  # noqa: F401


@pytest.fixture(autouse=True)
def torchrl_keeps_silent() -> Iterator[None]:
    """Hide TorchRL's log messages about successful checks."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def torchs_own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder for compiled kernels, which TorchRL creates, into a temporary folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


@pytest.fixture
def event_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the log file to which environments of a test write their events."""
    path = tmp_path / "event_log"
    path.touch()
    monkeypatch.setenv(EVENT_LOG, str(path))
    return path


@pytest.fixture
def no_workers_left() -> Iterator[None]:
    """Fail a test that leaves workers, after killing them."""
    ignore_running_processes()
    yield
    gc.collect()
    left = running_workers(grace_s=60)
    for process in left:
        process.kill()
    assert not left
