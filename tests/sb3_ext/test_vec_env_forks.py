"""A forked process cannot use the workers of a vectorized environment that it inherited."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import numpy as np
import pytest

from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.forks import result_in_fork
from tests.sb3_ext.vec_checks import no_workers
from tests.sb3_ext.vec_test_envs import Counting

ACTIONS = np.zeros(2, np.int64)
REFUSED: list[Callable[[SharedMemoryVecEnv], Any]] = [
    lambda venv: venv.step(ACTIONS),
    lambda venv: venv.reset(),
    lambda venv: venv.get_attr("_count"),
    lambda venv: venv.env_is_wrapped(Counting),
]


def step_counts(venv: SharedMemoryVecEnv) -> list[int]:
    """Take a step, and return the step count of each environment."""
    return [int(count) for count in venv.step(ACTIONS)[0][:, 0]]


def close_and_drop(venv: SharedMemoryVecEnv) -> str:
    """Close and drop a VecEnv in a forked process, as at its exit."""
    venv.close()
    vars(venv).clear()  # as if the last reference was dropped
    gc.collect()
    util._exit_function()  # type: ignore[attr-defined]  # ends children at exit
    return "left"


def use_own_env() -> list[int]:
    """Create a VecEnv, take two steps, and return the step counts."""
    made = SharedMemoryVecEnv([Counting] * 2, "fork")
    made.reset()
    made.step(ACTIONS)
    found = step_counts(made)
    made.close()
    return found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_cannot_use_or_end_the_workers() -> None:
    multiprocessing.active_children()  # joins ended processes of other tests, which the exit below would wait for
    venv = SharedMemoryVecEnv([Counting] * 2, "fork", restart="truncate", step_timeout=60.0)
    venv.reset()
    for call in REFUSED:
        text = result_in_fork(lambda call=call: call(venv))
        assert text.startswith("InvalidArgumentError: these environments belong to process ")
    assert result_in_fork(lambda: close_and_drop(venv)) == "'left'"
    assert result_in_fork(use_own_env) == "[2, 2]"
    assert step_counts(venv) == [1, 1]
    venv.close()
    assert no_workers()
