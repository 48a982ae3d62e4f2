"""The file between a worker and its parent, in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rl_ext_core.processes import report as report_module
from rl_ext_core.processes.failures import is_idle, main_stack, without_our_frames
from rl_ext_core.processes.report import Report, Writer

STACKS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/loader.py", line 7 in feed

Current thread 0x00007f0000000002 (most recent call first):
  File "/lib/python3.11/selectors.py", line 415 in select
  File "/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "/lib/python3.11/multiprocessing/connection.py", line 256 in poll
  File "/home/me/workers.py", line 12 in serve
  File "/lib/python3.11/multiprocessing/process.py", line 108 in run
  File "/site-packages/rl_ext_core/processes/worker.py", line 113 in run_and_report
  File "<string>", line 1 in <module>
"""


@pytest.fixture
def report() -> Report:
    return Report()


def test_a_record_that_was_cut_short_by_death_is_none(report: Report) -> None:
    assert Writer(report.fd).raised(ValueError("whole"))
    os.ftruncate(report.fd, report.size() - 1)
    assert report.read().raised is None


def test_a_report_that_cannot_be_written_says_so(report: Report) -> None:
    writer = Writer(report.fd)
    null = os.open("/dev/full", os.O_WRONLY)
    writer.fd = null
    assert not writer.raised(ValueError("lost"))
    os.close(null)


def test_notes_take_anything_and_stay_small(report: Report) -> None:
    writer = Writer(report.fd)
    writer.write_notes({"value": {1, 2}, "path": Path("a")})
    assert report.read().notes == {"value": "{1, 2}", "path": repr(Path("a"))}
    loop: list[object] = []
    loop.append(loop)
    for value in (loop, {(1, 2): 3}):
        writer.write_notes({"value": value})
        assert report.read().notes == {"value": str(value)}
    writer.write_notes({"seed": 5, "text": "x" * 10_000})
    notes = report.read().notes
    assert notes["seed"] == "5"
    assert "characters cut" in notes["text"]
    writer.write_notes({str(number): "ü" * 1000 for number in range(1000)})
    assert report.size() == report_module.PAGE


def test_an_exception_never_imports_a_module(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_simulator.py").write_text("class SimulatorError(Exception): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = __import__("a_simulator").SimulatorError("fell over")
    assert Writer(report.fd).raised(error)
    raised = report.read().raised
    assert raised is not None
    assert type(raised.exception()) is type(error)
    del sys.modules["a_simulator"]
    assert raised.exception() is None
    assert "a_simulator" not in sys.modules


def test_only_the_function_that_waits_tells_idleness() -> None:
    frames = main_stack(STACKS)
    assert frames[0].endswith("line 415 in select")
    assert len(frames) == 7
    assert is_idle(frames, ["in serve"])
    assert is_idle(frames, ["/multiprocessing/connection.py"])
    assert not is_idle(frames, ["in run_and_report", "in feed"])
    assert not is_idle(['File "/home/me/env.py", line 1 in step', *frames], ["in serve"])
    assert not is_idle([], ["in serve"])
    shown = without_our_frames(STACKS)
    assert shown.endswith("in serve")
    assert "in feed" in shown
