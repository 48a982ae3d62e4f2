"""Waits that spin before they block, as on machines with a core for each process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from rl_ext_core import resources
from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import channel
from rl_ext_core.vector.channel import SpinWaiter, should_spin
from sb3_ext import SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import FAST, no_workers
from tests.sb3_ext.vec_test_envs import Counting, Failing

LONG_S = 1.0


@pytest.fixture
def long_spinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make waits spin for a second on any machine; forked workers inherit this."""
    monkeypatch.setattr(channel, "should_spin", lambda num_workers: True)
    for name in ("ANSWER_SECONDS", "COMMAND_SECONDS", "_PREEMPTED_SECONDS"):
        monkeypatch.setattr(SpinWaiter, name, LONG_S)
    yield
    assert no_workers()


def test_waiting_spins_only_if_each_process_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, num_workers, expected in ((3, 2, True), (2, 2, False), (2, 1, True), (1, 1, False)):
        monkeypatch.setattr(resources, "usable_cores", lambda cores=cores: cores)
        assert should_spin(num_workers) is expected


@pytest.mark.usefixtures("long_spinning")
def test_worker_death_is_detected_while_spinning() -> None:
    venv = SharedMemoryVecEnv([Counting, lambda: Failing("step", "os._exit", after=0)], FAST)
    venv.reset()
    with pytest.raises(WorkerError, match="environment 1 of 2, in step"):
        venv.step(np.zeros(2, np.int64))


@pytest.mark.usefixtures("long_spinning")
def test_unread_wake_bytes_do_not_block() -> None:
    venv = SharedMemoryVecEnv([Counting], FAST)
    venv.reset()
    (worker,) = venv._pool.workers
    for _ in range(70_000):  # more than a pipe holds
        worker.wake_worker()
    worker.interrupt_wait()
    assert [venv.step(np.zeros(1, np.int64))[0][0, 0] for _ in range(3)] == [1, 2, 3]
    time.sleep(LONG_S + 0.2)  # the worker blocks now
    assert venv.step(np.zeros(1, np.int64))[0][0, 0] == 4
    venv.close()
