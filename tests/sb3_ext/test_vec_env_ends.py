"""Closing ends environments and the processes that they started, within the timeout, and frees descriptors."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector.pool import Pool
from sb3_ext import SharedMemoryVecEnv
from tests.environments import Counting, Failing, Gated, Writing
from tests.sb3_ext.vec_checks import FAST, no_workers, raise_interrupt_in

ACTIONS = np.zeros(3, np.int64)
PATIENCE_S = 60  # for conditions on a busy machine


class WithSimulator(Counting):
    """Environment with a child process, which ``close`` ends; a file per child contains its state.

    :param folder: folder of the files
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._simulator = subprocess.Popen(["sleep", "600"])
        self._file = Path(folder, str(self._simulator.pid))
        self._file.write_text("runs")

    def close(self) -> None:
        self._simulator.kill()
        self._simulator.wait()
        self._file.write_text("closed")


def running_simulators(folder: Path) -> list[int]:
    """Return the ids of the child processes that have a file and still run."""
    return [int(file.name) for file in folder.iterdir() if psutil.pid_exists(int(file.name))]


def count_closed(folder: Path) -> int:
    """Count the environments whose ``close`` has run."""
    return sum(file.read_text() == "closed" for file in folder.iterdir())


def wait_until(condition: Callable[[], Any]) -> bool:
    """Wait for a condition for at most a minute; return whether it is true."""
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


class WithFork(Failing):
    """Environment that forks a process, which inherits its worker's descriptors.

    :param dies: whether its worker dies in the third step
    """

    def __init__(self, dies: bool = False) -> None:
        super().__init__("step" if dies else "", "SIGKILL", after=2)
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)


@pytest.mark.parametrize("options", [{}, {"restart": "truncate"}])
def test_worker_death_is_detected_while_its_child_process_lives(options: dict[str, Any]) -> None:
    venv = SharedMemoryVecEnv([WithFork, functools.partial(WithFork, True)], FAST, **options)
    venv.reset()
    for _ in range(2):
        venv.step(ACTIONS[:2])
    if "restart" in options:
        assert venv.step(ACTIONS[:2])[2].tolist() == [False, True]
    else:
        with pytest.raises(WorkerError, match="environment 1 of 2"):
            venv.step(ACTIONS[:2])
    venv.close()
    assert no_workers()


@pytest.mark.slow
def test_dropped_vec_env_closes_environments_and_descriptors(tmp_path: Path) -> None:
    def use_and_drop(*, dropped: bool) -> int:
        """Use and delete a VecEnv, closed unless ``dropped``; count open descriptors."""
        venv = SharedMemoryVecEnv([functools.partial(WithSimulator, str(tmp_path))] * 2, FAST, restart="truncate")
        venv.reset()
        venv.step(ACTIONS[:2])
        if not dropped:
            venv.close()
        del venv
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, threads = use_and_drop(dropped=False), threading.active_count()
    assert [use_and_drop(dropped=True) for _ in range(3)] == [before] * 3
    assert threading.active_count() == threads
    assert no_workers()
    assert wait_until(lambda: not running_simulators(tmp_path))
    assert count_closed(tmp_path) == 8


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seconds"), [("close", 6.5), ("thread", 1.5)])
def test_close_waits_for_environments_by_default(how: str, seconds: float, tmp_path: Path) -> None:
    venv = SharedMemoryVecEnv([Counting, functools.partial(Writing, str(tmp_path / "video"), how, seconds)], FAST)
    venv.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        venv.close()
    assert (tmp_path / "video").exists()
    assert no_workers()


def test_error_in_close_does_not_interrupt_other_environments(tmp_path: Path) -> None:
    venv = SharedMemoryVecEnv(
        [functools.partial(Failing, "close"), functools.partial(Writing, str(tmp_path / "video"), "close", 1)], FAST
    )
    venv.reset()
    with pytest.raises(
        WorkerError, match=r"environment 0 of 2, in close: raised ValueError\('the rope has snapped'\)"
    ) as found:
        venv.close()
    assert repr(found.value.__cause__) == "ValueError('the rope has snapped')"
    assert (tmp_path / "video").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("close", "in close"), ("thread", "in threads that go on after its close")])
def test_exceeded_close_timeout_warns(how: str, said: str, tmp_path: Path) -> None:
    build = functools.partial(Writing, str(tmp_path / "video"), how, 1000)
    venv = SharedMemoryVecEnv([Counting, build], FAST, close_timeout=1)
    venv.reset()
    text = f"environment 1 of 2 was still {said} after [\\d.]+ s of closing.*Use close_timeout=None"
    with pytest.warns(UserWarning, match=text) as found:
        venv.close()
    assert found[0].filename == __file__
    assert no_workers()


def test_close_does_not_wait_for_interrupted_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rl_ext_core.vector.pool.UNFINISHED_SECONDS", 0.3)
    venv = SharedMemoryVecEnv([functools.partial(Gated, tmp_path / "never")] * 2, FAST)
    venv.reset()
    with raise_interrupt_in(Pool, "_receive"), pytest.raises(KeyboardInterrupt):
        venv.step(ACTIONS[:2])
    with pytest.warns(UserWarning, match="environment 0 of 2 was still in step after"):
        venv.close()
    assert no_workers()
