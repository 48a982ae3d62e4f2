from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.core.factory.copying import outcome


@pytest.fixture(scope="package")
def spawned_pool() -> Iterator[ProcessPoolExecutor]:
    """Return an executor with one spawned process, which has other imports and hash seed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", "random")
            patch.setenv("SDL_VIDEODRIVER", "dummy")
            pool.submit(int).result()
        yield pool


@pytest.fixture
def copy_outcome(
    spawned_pool: ProcessPoolExecutor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """Return a function that copies an environment and reports ``"copied"``, ``"refused"`` or ``"warned"``."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    caplog.set_level(logging.WARNING, "rl_ext_core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield functools.partial(outcome, spawned_pool, caplog)
