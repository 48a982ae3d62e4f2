from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.processes import get_context
from tests.core.processes import worker_functions
from tests.core.processes.worker_groups import LIMIT_S, UNPICKLING_METHODS, group, retry_with_more_descriptors


def test_context_has_the_interface_of_multiprocessing(method: str) -> None:
    context = get_context(method, label="Env")
    assert context.get_context() is context
    assert context.get_start_method() == method
    processes = [context.Process(target=worker_functions.pid) for _ in range(2)]
    assert [(process.worker, process.name, process.daemon) for process in processes] == [
        (0, "Env-0", False),
        (1, "Env-1", False),
    ]
    assert context.Process(target=worker_functions.pid, name="mine", daemon=True).daemon
    assert get_context().get_start_method() == "forkserver"
    with pytest.raises(InvalidArgumentError, match=r"'fork-server' does not start .*Use method=\"forkserver\""):
        get_context("fork-server")


def test_workers_get_environment_variables_of_their_start(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALE", "old")
    monkeypatch.setenv("GONE", "old")
    with group(method, 1):  # a fork server with these variables has started now
        monkeypatch.setenv("STALE", "new")
        monkeypatch.delenv("GONE")
        environs: list[dict[str, str | None]] = [{"MINE": "0"}, {"STALE": None, "MINE": "ü"}, {}]
        with group(method, environs=environs) as workers:
            seen = [workers.ask(worker, "environment") for worker in range(3)]
    assert [{name: one.get(name) for name in ("STALE", "GONE", "MINE")} for one in seen] == [
        {"STALE": "new", "GONE": None, "MINE": "0"},
        {"STALE": None, "GONE": None, "MINE": "ü"},
        {"STALE": "new", "GONE": None, "MINE": None},
    ]
    assert seen[2] == dict(os.environ)


@pytest.mark.parametrize("method", UNPICKLING_METHODS)
def test_variables_are_set_before_the_first_import_in_a_worker(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nSEEN = os.environ.get('DEVICE')\nclass Argument:\n    def check(self): assert SEEN == 'gpu7'\n"
    (tmp_path / "reads_at_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("reads_at_import")
    process = get_context(method, environs=[{"DEVICE": "gpu7"}]).Process(target=module.Argument().check)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.sample(ci=2)
def test_workers_and_their_children_inherit_no_signal_handlers_or_descriptors(method: str) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    try:
        with group(method, 1) as workers:
            assert workers.ask(0, "child_sigint_disposition") == 1
            for number in (signal.SIGINT, signal.SIGUSR2):  # SIGUSR2 from other processes does not end a worker
                os.kill(workers.workers[0].pid or 0, number)
                assert workers.ask(0, "pid") == workers.workers[0].pid
            files = workers.ask(0, "list_inherited_files")
            assert len(files) > 2
            assert not [file for file in files if "rl_ext_core-report" in file]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not handled


def test_unpicklable_target_fails_in_the_parent_without_leaks() -> None:
    resource_tracker.ensure_running()
    gc.collect()  # objects of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for method in ("spawn", "forkserver"):
        process = get_context(method).Process(target=lambda: None)
        with pytest.raises(Exception, match="pickle"):
            process.start()
        assert process.exitcode is None
        del process
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("method", UNPICKLING_METHODS)
def test_start_without_free_descriptors_has_no_side_effects(method: str) -> None:
    with group(method, 1) as workers:
        workers.ask(0, "pid")

        def start() -> BaseProcess:
            process = get_context(method).Process(target=worker_functions.pid)
            process.start()
            return process

        process = retry_with_more_descriptors(start)
        process.join(LIMIT_S)
        assert process.exitcode == 0
        assert workers.ask(0, "pid")  # this fails if the fork server has died


def _start_worker(method: str) -> None:
    """Start a worker in this daemonic process, and exit with its exit code."""
    worker = get_context(method).Process(target=worker_functions.pid)
    worker.start()
    worker.join(LIMIT_S)
    sys.exit(worker.exitcode or 7 * (not multiprocessing.current_process().daemon))


@pytest.mark.sample(ci=2)
def test_daemonic_process_can_start_workers(method: str) -> None:
    daemon = multiprocessing.get_context("fork").Process(target=_start_worker, args=(method,), daemon=True)
    daemon.start()
    daemon.join(LIMIT_S)
    assert daemon.exitcode == 0
