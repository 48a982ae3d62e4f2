"""Settings of the tests that import TorchRL."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch._dynamo  # noqa: F401 (optimizers import it, which makes a folder: before folders are watched)
from torchrl._utils import logger

with warnings.catch_warnings():
    # TorchRL's own classes inherit from one that TorchRL deprecates.
    warnings.filterwarnings("ignore", "Creating .* which inherits from WeightUpdaterBase", DeprecationWarning)
    import torchrl.collectors  # noqa: F401


@pytest.fixture(autouse=True)
def torchrl_keeps_silent() -> Iterator[None]:
    """Leave out what TorchRL logs of successful checks."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def torchs_own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing TorchRL makes a folder for compiled kernels in each process; let it be one of the test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
