"""A forked process that has inherited a vectorized environment: the workers are those of its parent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import numpy as np
import pytest

from sb3_ext.vec_env import SharedMemoryVecEnv
from tests.forks import result_in_fork
from tests.sb3_ext.vec_checks import no_workers
from tests.sb3_ext.vec_worlds import Counting

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ACTIONS = np.zeros(2, np.int64)
REFUSED: dict[str, Callable[[SharedMemoryVecEnv], Any]] = {
    "step": lambda venv: venv.step(ACTIONS),
    "step_async": lambda venv: venv.step_async(ACTIONS),
    "reset": lambda venv: venv.reset(),
    "get_attr": lambda venv: venv.get_attr("_count"),
    "set_attr": lambda venv: venv.set_attr("_count", 5),
    "has_attr": lambda venv: venv.has_attr("_count"),
    "env_method": lambda venv: venv.env_method("pid"),
    "env_is_wrapped": lambda venv: venv.env_is_wrapped(Counting),
}


@pytest.fixture(params=[{}, {"restart": "truncate", "step_timeout": 60.0}], ids=["plain", "restarting"])
def venv(request: pytest.FixtureRequest) -> Any:
    made = SharedMemoryVecEnv([Counting] * 2, "fork", **request.param)
    made.reset()
    yield made
    made.close()
    assert no_workers()


def counts(venv: SharedMemoryVecEnv) -> list[int]:
    return [int(count) for count in venv.step(ACTIONS)[0][:, 0]]


@pytest.mark.parametrize("call", REFUSED)
def test_call_in_forked_process_is_refused(call: str, venv: SharedMemoryVecEnv) -> None:
    text = result_in_fork(lambda: REFUSED[call](venv))
    assert text.startswith("InvalidArgumentError: these environments belong to process ")
    assert counts(venv) == [1, 1]


def test_close_drop_and_exit_of_forked_process_leave_the_workers_alone(venv: SharedMemoryVecEnv) -> None:
    def leave() -> str:
        venv.close()
        vars(venv).clear()  # as if it was dropped
        gc.collect()
        util._exit_function()  # type: ignore[attr-defined]  # by which multiprocessing ends children at exit
        return "left"

    assert result_in_fork(leave) == "'left'"
    assert counts(venv) == [1, 1]


def test_forked_process_may_make_its_own(venv: SharedMemoryVecEnv) -> None:
    def use() -> list[int]:
        own = SharedMemoryVecEnv([Counting] * 2, "fork")
        own.reset()
        own.step(ACTIONS)
        found = counts(own)
        own.close()
        return found

    assert result_in_fork(use) == "[2, 2]"
    assert counts(venv) == [1, 1]
