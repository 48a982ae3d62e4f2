from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rl_ext_core.processes.report import ExceptionRecord, WorkerReport


@pytest.fixture
def report() -> WorkerReport:
    return WorkerReport()


def test_truncated_exception_record_is_none(report: WorkerReport) -> None:
    assert WorkerReport(report.fd).write_exception(ValueError("whole"))
    os.ftruncate(report.fd, report.size() - 1)
    assert report.exception_record is None


def test_write_exception_returns_false_if_writing_fails(report: WorkerReport) -> None:
    writer = WorkerReport(report.fd)
    null = os.open("/dev/full", os.O_WRONLY)
    writer.fd = null
    assert not writer.write_exception(ValueError("lost"))
    os.close(null)


def test_unpickling_an_exception_does_not_import_its_module(
    report: WorkerReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
