from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.frames.region import ProcessLock


def _count(lock: Any, number: Any, times: int) -> None:
    for _ in range(times):
        with lock, lock:  # it may be taken again
            number.value += 1


def _hold(lock: Any, held: Any) -> None:
    with lock:
        held.set()
        time.sleep(300)


def _killed_holder(context: Any, lock: ProcessLock) -> int:
    held = context.Event()
    holder = context.Process(target=_hold, args=(lock, held))
    holder.start()
    assert held.wait(60)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    return int(holder.pid)


def test_processes_and_threads_take_turns() -> None:
    context = multiprocessing.get_context("spawn")
    lock, number = ProcessLock(), context.RawValue("q", 0)
    workers: list[Any] = [context.Process(target=_count, args=(lock, number, 3000)) for _ in range(2)]
    workers += [threading.Thread(target=_count, args=(lock, number, 3000)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert number.value == 12_000


def test_who_comes_after_a_holder_that_was_killed_is_told_before_anything_else() -> None:
    context = multiprocessing.get_context("spawn")
    lock, told = ProcessLock(), []

    def recover(dead: int) -> None:
        with lock:
            told.append(dead)
        if len(told) == 1:
            raise ZeroDivisionError

    lock.recover = recover
    dead = _killed_holder(context, lock)
    with pytest.raises(ZeroDivisionError), lock:
        raise AssertionError("it was entered")
    for _ in range(2):
        with lock:
            assert told == [dead, dead], "until what it left is whole, each is told"
    assert _killed_holder(context, lock) != dead
    with lock:
        assert len(told) == 3


def _hold_and_fork(lock: Any, said: Any) -> None:
    with lock:
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        said.put(child)
        time.sleep(300)


def test_a_fork_of_the_holder_does_not_keep_the_lock() -> None:
    context = multiprocessing.get_context("spawn")
    lock, said, told = ProcessLock(), context.Queue(), []
    lock.recover = told.append
    holder = context.Process(target=_hold_and_fork, args=(lock, said))
    holder.start()
    child = said.get(timeout=60)
    try:
        os.kill(holder.pid or 0, signal.SIGKILL)
        holder.join()
        with lock:
            assert told == [holder.pid]
    finally:
        os.kill(child, signal.SIGKILL)


def _use(lock: Any, said: Any) -> None:
    try:
        with lock:
            said.put("entered")
    except NotCopyableError as error:
        said.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_does_not_use_the_lock() -> None:
    context = multiprocessing.get_context("fork")
    lock, said = ProcessLock(), context.Queue()
    worker = context.Process(target=_use, args=(lock, said))
    worker.start()
    assert "came along with a fork" in said.get(timeout=60)
    worker.join()
    with lock:
        pass
