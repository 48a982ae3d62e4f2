from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_ext_core.processes import get_context
from tests.core.processes.worker_functions import send_helper_pids
from tests.core.processes.worker_groups import group, pair_with_start_methods
from tests.leaks import is_running, wait_until_ended


@pytest.mark.sample
@pytest.mark.parametrize(
    ("command", "method"),
    pair_with_start_methods("raise_bad_level", "kill", "os_exit", "segfault", "exit_3", "hang", "hang_in_c", "stop"),
)
def test_child_processes_end_when_a_worker_fails_or_hangs(command: str, method: str) -> None:
    with group(method, 2) as workers:
        helpers = [workers.ask(worker, "start_helpers") for worker in (0, 1)]
        workers.fail(command, timeout=0.3 if command in ("hang", "hang_in_c", "stop") else None)
        # A program with its own session is found only through the worker, while that lives.
        dead_at_once = command in ("kill", "os_exit", "segfault")
        wait_until_ended([*helpers[0], *helpers[1][: 2 if dead_at_once else 3]])
        if dead_at_once:
            os.kill(helpers[1][2], signal.SIGKILL)


def test_child_processes_of_returned_workers_end_only_under_a_watch() -> None:
    with group("forkserver", 1) as workers:
        program, forked, own_session = workers.ask(0, "start_helpers")
        workers.close()
        assert workers.workers[0].exitcode == 0
        wait_until_ended([program, forked])
    context = get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=send_helper_pids, args=(writer,))
    process.start()
    pids = [own_session, *reader.recv()]
    process.join()
    time.sleep(0.2)  # a kill would happen in this time
    assert all(map(is_running, pids))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_nested_workers_and_their_children_end_with_a_failure(method: str) -> None:
    with group(method, 2) as workers:
        program, own_session = workers.ask(0, "start_nested_worker")
        workers.fail("kill")
        wait_until_ended([program])
        with contextlib.suppress(ProcessLookupError):
            os.kill(own_session, signal.SIGKILL)


@pytest.mark.parametrize("end", ["returns", "fails", "is killed"])
def test_exit_callbacks_run_only_on_abnormal_exit(end: str) -> None:
    with group("forkserver", 2) as workers:
        closed, other = map(Path, workers.ask(1, "register_file_cleanup"))
        if end == "returns":  # the function itself has to clean up
            workers.close()
        elif end == "fails":
            workers.fail("raise_bad_level")
        workers.watch.kill()
    assert closed.exists() == (end == "returns")
    closed.unlink(missing_ok=True)
    other.unlink()


@pytest.mark.slow
def test_spawned_worker_runs_atexit_handlers_after_a_failure() -> None:
    with group("spawn", 2) as workers:  # forked workers run no atexit handlers, as in multiprocessing
        file = Path(workers.ask(1, "remove_file_at_exit"))
        workers.fail("raise_bad_level")
        assert not file.exists()


@pytest.mark.slow
def test_exit_callbacks_have_a_time_limit() -> None:
    with group("forkserver", 2) as workers:
        helpers = [workers.ask(worker, "start_helpers") for worker in (0, 1)]
        for worker in (0, 1):
            workers.ask(worker, "close_slowly")
        assert "bad level" in str(workers.fail("raise_bad_level"))
        wait_until_ended([*helpers[0], *helpers[1][:2]])
        os.kill(helpers[1][2], signal.SIGKILL)


PARENT = """
import signal, sys, time
from tests.core.processes.worker_groups import group
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    with group(sys.argv[1], 2) as workers:
        (*first, apart_1), (*second, apart_2) = [workers.ask(worker, "start_helpers") for worker in (0, 1)]
        nested, apart_3 = workers.ask(0, "start_nested_worker")
        workers.pipes[1].send("hang_in_c")
        pids = [worker.pid for worker in workers.workers]
        print(apart_1, apart_2, apart_3, *first, *second, nested, *pids, flush=True)
        time.sleep(100)
"""


@pytest.mark.sample
@pytest.mark.parametrize(("number", "method"), pair_with_start_methods(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP))
def test_workers_and_their_children_end_with_the_parent(number: signal.Signals, method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True)
    *own_session, _, _, _, _, _, _, _ = pids = list(map(int, parent.stdout.readline().split()))
    parent.send_signal(number)
    wait_until_ended(pids[len(own_session) :])
    for pid in own_session:
        os.kill(pid, signal.SIGKILL)
    parent.communicate()
