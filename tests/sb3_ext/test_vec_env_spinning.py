"""Waits that spin before they block, as they do where workers and their parent have a core each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rl_ext_core import resources
from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import channel
from rl_ext_core.vector.channel import Spin, cells_of, worth_spinning
from sb3_ext import SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import FAST, assert_equal, both, no_workers, rollout
from tests.sb3_ext.vec_worlds import Counting, Failing

LONG_S = 1.0


@pytest.fixture
def _spinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all wait like that, on whatever machine; forked workers inherit it."""
    monkeypatch.setattr(channel, "worth_spinning", lambda num_workers: True)
    yield
    assert no_workers()


@pytest.fixture
def _long(_spinning: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it so long that what happens in a wait happens while it spins."""
    monkeypatch.setattr(Spin, "FOR_ANSWERS", LONG_S)
    monkeypatch.setattr(Spin, "FOR_COMMANDS", LONG_S)
    monkeypatch.setattr(Spin, "_PUT_ASIDE_SECONDS", LONG_S)


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"), [(3, 2, True), (2, 2, False), (2, 1, True), (1, 1, False)]
)
def test_each_has_a_core(cores: int, num_workers: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    assert worth_spinning(num_workers) is expected


def test_waits_that_do_not_pay_are_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spin, "_PUT_ASIDE_SECONDS", 10.0)  # this machine may be a busy one
    cells, spin = cells_of(bytearray(channel.CELL_BYTES), 0), Spin(1e-4)
    cells[channel.Cell.ANSWERED] = 7

    def spins_in_vain() -> bool:
        began = time.perf_counter()
        assert not spin.sees(cells, channel.Cell.ANSWERED, 8)
        return time.perf_counter() - began >= 1e-4

    def sees(times: int) -> list[bool]:
        return [spin.sees(cells, channel.Cell.ANSWERED, 7) for _ in range(times)]

    assert all(sees(1))
    assert spins_in_vain()
    assert sees(6) == [*[False] * 4, True, True], "it blocks at once for a while, and tries again"
    assert spins_in_vain()
    assert sees(20) == [*[False] * 19, True]
    assert all(sees(250)), "those that pay are followed by others"
    assert spins_in_vain()
    assert sees(5) == [*[False] * 4, True], "and what was before is forgotten"


def test_where_others_want_the_core_it_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spin, "_PUT_ASIDE_SECONDS", 0.0)
    cells, spin = cells_of(bytearray(channel.CELL_BYTES), 0), Spin(10.0)
    assert [spin.sees(cells, channel.Cell.ANSWERED, 0) for _ in range(6)] == [True, *[False] * 4, True]
    began = time.monotonic()
    assert not Spin(600.0).sees(cells, channel.Cell.ANSWERED, 8)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("_spinning")
def test_the_same_is_returned() -> None:
    actions = [np.zeros(3, np.int64)] * 30
    with both([Counting] * 3, n_workers=2) as (ours, theirs):
        assert_equal(rollout(ours, actions), rollout(theirs, actions))
        assert_equal(ours.get_attr("action_space"), theirs.get_attr("action_space"))


@pytest.mark.usefixtures("_long")
def test_the_death_of_a_worker_is_noticed() -> None:
    venv = SharedMemoryVecEnv([Counting, lambda: Failing("step", "os._exit", after=0)], FAST)
    venv.reset()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="environment 1 of 2, in step"):
        venv.step(np.zeros(2, np.int64))
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("_long")
def test_ctrl_c_and_close_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spin, "FOR_ANSWERS", 600.0)
    monkeypatch.setattr(Spin, "_PUT_ASIDE_SECONDS", 600.0)
    venv = SharedMemoryVecEnv([lambda: Failing("step", "hang", after=0)], FAST)
    venv.reset()
    venv.step_async(np.zeros(1, np.int64))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        venv.step_wait()
    assert time.monotonic() - began < 60
    del venv  # as it does without spinning


@pytest.mark.usefixtures("_long")
def test_bytes_that_nobody_reads_while_it_spins_stop_nobody() -> None:
    venv = SharedMemoryVecEnv([Counting], FAST)
    venv.reset()
    (worker,) = venv._pool.workers
    for _ in range(70_000):  # more than a pipe holds
        channel.ring(worker._commands)
    worker.wake()
    assert [venv.step(np.zeros(1, np.int64))[0][0, 0] for _ in range(3)] == [1, 2, 3]
    time.sleep(LONG_S + 0.2)  # it blocks
    assert venv.step(np.zeros(1, np.int64))[0][0, 0] == 4
    venv.close()
