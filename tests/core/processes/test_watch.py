from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.processes import Watch, get_context
from tests.core.processes.worker_groups import LIMIT_S, group

# Spawned workers behave like those of the fork server in these tests.
pytestmark = pytest.mark.sample(ci=2)


def wait_for_failure(watch: Watch) -> None:
    end = time.monotonic() + LIMIT_S
    while watch.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.failure is not None


def test_workers_that_return_after_expect_exit_are_not_failures(method: str) -> None:
    with group(method) as workers:
        with workers.watch.operation("step"):
            assert workers.ask(1, "pid") == workers.workers[1].pid
        workers.close()
        workers.watch.stop()
        assert workers.watch.failure is None
        assert [worker.exitcode for worker in workers.workers] == [0, 0, 0]


def test_first_failure_kills_the_other_workers_without_leaks(method: str, tmp_path: Path) -> None:
    handler = (tmp_path / "ran").touch
    atexit.register(handler)  # a failing worker must not run this handler of its parent
    try:
        with group(method) as workers:
            pids = [worker.pid for worker in workers.workers]
            workers.ask(2, "pid")  # it has started
            workers.pipes[2].send("hang_in_c")
            workers.fail("raise_bad_level")
            workers.watch.stop()
            assert [worker.exitcode for worker in workers.workers] == [-signal.SIGKILL, 1, -signal.SIGKILL]
            assert not any(map(psutil.pid_exists, [pid for pid in pids if pid]))
            assert not set(workers.workers) & set(multiprocessing.active_children())
    finally:
        atexit.unregister(handler)
    assert list(tmp_path.iterdir()) == []


def test_failure_while_the_parent_is_idle_is_raised_by_the_next_operation() -> None:
    with group("forkserver") as workers:
        workers.pipes[1].send("raise_bad_level")
        wait_for_failure(workers.watch)
        begun = False
        for _ in range(2):
            failed = pytest.raises(WorkerError, match=r"raised ValueError\('bad level'\):\n")
            with failed, workers.watch.operation("reset"):
                begun = True
        assert not begun


def test_earliest_of_several_exceptions_is_reported() -> None:
    context = get_context("fork")
    barriers = [context.Event() for _ in range(3)]
    processes = [context.Process(target=_raise_after, args=(barriers, worker)) for worker in range(3)]
    for process in processes:
        process.start()
    barriers[2].set()
    for process in processes:
        process.join()
    watch = Watch(processes)
    wait_for_failure(watch)
    watch.stop()
    assert "ValueError('2')" in watch.failure.what


def _raise_after(barriers: Any, worker: int) -> None:
    barriers[worker].wait()
    try:
        raise ValueError(str(worker))
    finally:
        time.sleep(0.05)
        if worker:
            barriers[worker - 1].set()


def test_nonzero_exit_code_after_expect_exit_is_a_failure() -> None:
    with group("forkserver") as workers:
        workers.watch.expect_exit()
        workers.pipes[0].send("os_exit")
        workers.workers[0].join(LIMIT_S)
        assert workers.watch.failure is None
        with pytest.raises(WorkerError, match="worker 1 of 3 raised ValueError"), workers.watch.operation("close"):
            workers.ask(1, "raise_bad_level")


LATE = r"^worker 1 of 3 did not answer within 0.3 s in step"


@pytest.mark.parametrize(
    ("commands", "idle_in", "pattern"),
    [
        ({1: "hang"}, None, LATE + r"; it is in:\n.*\n.* in hang\n"),
        ({1: "hang_in_c"}, None, LATE + r"; it is in:\n.*\n.* in hang_in_c\n"),
        ({1: "stop"}, None, LATE + "; it does not even react to signals$"),
        ({2: "hang", 1: "hang"}, None, LATE + r" \(nor did 2\); it is in:"),
        ({1: "wait_for_a_simulator"}, ["in serve"], LATE),
        ({}, None, r"but no worker hangs: all wait .*\n(.*\n)*.* in serve"),
    ],
)
def test_time_limit_reports_the_worker_that_hangs(
    commands: dict[int, str], idle_in: list[str] | None, pattern: str
) -> None:
    with group("fork", watch={"idle_in": idle_in} if idle_in else None) as workers:
        assert [workers.ask(worker, "pid") for worker in range(3)]  # after this, they wait for a command
        for worker, command in commands.items():
            workers.pipes[worker].send(command)
        with pytest.raises(WorkerError, match=pattern) as caught, workers.watch.operation("step", timeout=0.3):
            workers.pipes[0].recv()
        assert caught.value.kind == "timeout"


def test_outermost_operation_sets_phase_and_time_limit() -> None:
    with group("fork") as workers:
        failed = pytest.raises(WorkerError, match="in reset:")
        with failed as caught, workers.watch.operation("reset"), workers.watch.operation("step", timeout=0.01):
            time.sleep(0.2)
            workers.ask(1, "raise_bad_level")
        assert caught.value.kind == "exception"


def test_keyboard_interrupt_is_not_replaced_by_a_failure() -> None:
    with group("fork") as workers, pytest.raises(KeyboardInterrupt), workers.watch.operation("step"):  # noqa: PT012
        workers.pipes[1].send("raise_bad_level")
        wait_for_failure(workers.watch)
        raise KeyboardInterrupt


def test_on_failure_wakes_a_thread_that_waits_for_an_event() -> None:
    event = threading.Event()
    with group("forkserver", watch={"on_failure": event.set}) as workers:
        workers.pipes[1].send("kill")
        assert event.wait(LIMIT_S)
        assert workers.workers[0].exitcode == -signal.SIGKILL


@pytest.mark.sample(quick=0, ci=1)
def test_repeated_kill_and_stop_leak_no_descriptors(method: str) -> None:
    counts = []
    for _ in range(3):
        with group(method) as workers:
            for _ in range(2):
                workers.watch.kill()
                workers.watch.stop()
            assert workers.watch.failure is None
            # A worker that had just started gets the request to end.
            assert {worker.exitcode for worker in workers.workers} <= {-signal.SIGKILL, 1}
        for worker in workers.workers:
            worker.close()
        gc.collect()  # objects of earlier tests
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


@pytest.mark.parametrize("process", [multiprocessing.Process(), get_context("fork").Process()])
def test_watch_rejects_foreign_or_unstarted_processes(process: Any) -> None:
    with pytest.raises(InvalidTypeError, match="is not a started worker of this package"):
        Watch([process])
