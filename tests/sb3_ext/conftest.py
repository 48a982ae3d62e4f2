from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.leaks import ignore_running_processes


@pytest.fixture(autouse=True)
def ignore_earlier_processes() -> None:
    """Let ``no_workers`` ignore processes that ran before the test, such as those of session fixtures."""
    ignore_running_processes()


@pytest.fixture
def start_vec_env() -> Iterator[Callable[..., Any]]:
    """Function that makes a SharedMemoryVecEnv with forked workers and resets it.

    After the test, it is closed, and no worker may be left.
    """
    from sb3_ext import SharedMemoryVecEnv
    from tests.sb3_ext.vec_checks import FAST, no_workers

    made: list[SharedMemoryVecEnv] = []

    def start(env_fns: Any, start_method: str = FAST, **options: Any) -> SharedMemoryVecEnv:
        made.append(SharedMemoryVecEnv(env_fns, start_method, **options))
        made[-1].reset()
        return made[-1]

    yield start
    for venv in made:
        venv.close()
    assert no_workers()
