from __future__ import annotations

import faulthandler
import os
import pickle
import re
import sys
from pathlib import Path

import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.report import ExceptionRecord, WorkerReport
from tests.core.processes import worker_functions
from tests.core.processes.worker_groups import UNPICKLING_METHODS, group, pair_with_start_methods


def fail_worker(method: str, command: str) -> WorkerError:
    with group(method) as workers:
        error = workers.fail(command)
        assert [worker.exitcode is None for worker in workers.workers] == [False] * 3
        assert workers.watch.failure is not None
        assert error.exitcode == workers.workers[1].exitcode
    return error


CAUSES = {
    "raise_from_cause": ("exception", r"raised ValueError\('outer'\) in step:\n(.*\n)*    KeyError: 'inner'\n"),
    "raise_needs_arguments": ("exception", r"raised NeedsArgumentsError\('one and two'\) in step:\n    Trace"),
    "raise_when_unpickled": ("exception", r"raised RaisesWhenUnpickledError\('a trap'\) in step:\n    Trace"),
    "raise_hostile": ("exception", r"raised HostileError\(<its repr raises ValueError>\) in step:\n    Trace"),
    "raise_memory_error": ("exception", r"raised MemoryError\('too small'\) in step:"),
    "raise_interrupt": ("exception", r"raised KeyboardInterrupt\(\) in step:"),
    "raise_while_a_thread_runs": ("exception", r"raised ValueError\('with a thread'\) in step:"),
    "recurse": ("exception", r"raised RecursionError\('maximum recursion depth exceeded.*'\) in step:"),
    "exit_3": ("exit", r"exited by SystemExit\(3\) in step:\n(.*\n)*.* in exit_3"),
    "terminate": ("signal", r"was killed by SIGTERM in step. Another process has sent it"),
}


@pytest.mark.sample
@pytest.mark.parametrize(("command", "method"), pair_with_start_methods(*CAUSES))
def test_error_names_the_cause_of_a_worker_death(command: str, method: str) -> None:
    error = fail_worker(method, command)
    kind, pattern = CAUSES[command]
    assert re.match(r"worker 1 of 3 " + pattern, str(error)), str(error)
    assert (error.worker, error.kind, error.phase) == (1, kind, "step")
    assert "rl_ext_core/processes/worker.py" not in str(error)
    if command in ("raise_needs_arguments", "raise_when_unpickled"):
        assert error.__cause__ is None  # the exception cannot be unpickled
        assert error.__suppress_context__


def test_large_reports_are_shortened_in_the_middle() -> None:
    error = fail_worker("forkserver", "raise_huge")
    assert len(str(error)) < 250_000
    assert len(str(error).splitlines()[0]) < 500
    assert re.search(r"ValueError: start xxx.*characters cut.*xxx end$", error.traceback.rstrip())
    error = fail_worker("forkserver", "raise_holding_much")
    assert error.__cause__ is None
    assert "raised ValueError(b'xxx" in str(error)


def test_forked_worker_ends_although_pytest_dumps_tracebacks_later() -> None:
    faulthandler.dump_traceback_later(600)
    try:
        error = fail_worker("fork", "raise_bad_level")
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert error.kind == "exception"


@pytest.mark.parametrize("end", ["crashed", "raised"])
def test_death_of_a_grandchild_is_not_reported_as_the_workers(end: str) -> None:
    error = fail_worker("forkserver", f"kill_after_a_grandchild_{end}")
    assert "was killed by SIGKILL in step. The kernel's" in str(error)
    assert error.traceback == ""


def test_worker_error_survives_pickling() -> None:
    error = fail_worker("fork", "raise_bad_level")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is WorkerError
    assert isinstance(copy, RuntimeError)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("method", UNPICKLING_METHODS)
def test_unpickling_error_of_arguments_reaches_the_parent(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    with group(method, arguments=("", worker_functions.RaisesWhenUnpickledError())) as workers:
        with pytest.raises(WorkerError) as caught, workers.watch.operation("start"):
            workers.pipes[1].recv()
        text = str(caught.value)
        assert re.match(r"worker \d of 3 raised RuntimeError\('this does not unpickle'\) while it unpickled its", text)
        assert caught.value.kind == "start"
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert capfd.readouterr().err == ""


def test_reported_failures_are_not_printed(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("raise_bad_level", "exit_text", "segfault"):
        fail_worker(method, command)
    assert capfd.readouterr().err == ""


# -- the report that a worker writes


def test_truncated_exception_record_is_none() -> None:
    report = WorkerReport()
    assert WorkerReport(report.fd).write_exception(ValueError("whole"))
    os.ftruncate(report.fd, report.size() - 1)
    assert report.exception_record is None


def test_write_exception_returns_false_if_writing_fails() -> None:
    report = WorkerReport()
    writer = WorkerReport(report.fd)
    with open("/dev/full", "w") as full:
        writer.fd = full.fileno()
        assert not writer.write_exception(ValueError("lost"))


def test_unpickling_an_exception_does_not_import_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = WorkerReport()
    (tmp_path / "a_simulator.py").write_text("class SimulatorError(Exception): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = __import__("a_simulator").SimulatorError("fell over")
    assert WorkerReport(report.fd).write_exception(error)
    exception_record = report.exception_record
    assert type(exception_record.unpickle()) is type(error)
    del sys.modules["a_simulator"]
    assert exception_record.unpickle() is None
    stand_in = exception_record.to_exception()
    assert (type(stand_in), str(stand_in)) == (RuntimeError, "SimulatorError('fell over')")
    assert "a_simulator.SimulatorError: fell over" in str(stand_in.__cause__)
    assert "a_simulator" not in sys.modules


def test_exception_of_a_local_class_is_unpickled() -> None:
    class LocalError(Exception): ...

    assert type(ExceptionRecord.from_exception(LocalError("of a function")).unpickle()) is LocalError
