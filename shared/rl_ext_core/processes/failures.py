"""Descriptions of worker failures, as data and as error messages."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.processes.report import ExceptionRecord, Progress, WorkerReport

_GUARD = """\
Each worker imports the main script, to find the functions that it defines, and this script starts workers when it is
imported. Move the code that starts them under a guard:

    def main():
        ...  # the script, except its imports, classes and functions

    if __name__ == "__main__":
        main()
"""
_SIGNAL_HINTS = {
    "SIGKILL": "The kernel's out-of-memory killer sends it: see dmesg, and free -h; fewer workers need less memory.",
    "SIGTERM": "Another process has sent it: a job scheduler, a supervisor, or a call to terminate().",
}

_DURING = {
    Progress.LAUNCHED: " before it ran your code",
    Progress.IMPORTING: " while it imported the main script",
    Progress.UNPICKLING: " while it unpickled its function and arguments",
    Progress.RUNNING: "",
}
# Programs choose exit codes up to this one. Crashes on Windows have larger codes, which are documented in hexadecimal.
_LARGEST_CHOSEN = 0xFFFF
# Frames of the standard library that wait for other processes. The frame that called them identifies the wait.
_WAITING_FRAME = re.compile(r"[/\\](selectors|socket|threading|multiprocessing[/\\]\w+)\.py\"")
# Frames outside the worker's function, which are the same in all workers.
_WORKER_FRAME = re.compile(
    r'^  File ".*[/\\]rl_ext_core[/\\]processes[/\\]worker\.py", line .*\n?(  .*\n?)*', re.MULTILINE
)


@dataclass(frozen=True)
class Failure:
    """First failure in a group of workers.

    The attributes that are not listed here are those of :class:`~rl_ext_core.errors.WorkerError`.

    :ivar what: clause of the message that says what happened, without subject and phase
    :ivar rest: end of the message, after the phase
    :ivar exception: exception that the worker raised; None if there is none or it cannot be unpickled
    """

    worker: int
    kind: str
    what: str
    rest: str = ""
    traceback: str = ""
    exception: BaseException | None = None
    exitcode: int | None = None


def describe_exception(worker: int, record: ExceptionRecord) -> Failure:
    """Describe an exception that a worker has reported."""
    return Failure(worker, "exception", f"raised {record.summary}", ":", record.traceback, record.to_exception())


def describe_exit(worker: int, report: WorkerReport, exitcode: int, unknown_reason: str) -> Failure:
    """Describe the end of a worker; ``unknown_reason`` says why its exit code is unknown."""
    progress, record, text = report.progress, report.exception_record, report.text()
    started, kind = progress is Progress.RUNNING, "exit"
    if record is not None:
        if not started and "bootstrapping phase" in record.traceback:
            return Failure(worker, "start", "cannot start", f". {_GUARD}", record.traceback, exitcode=exitcode)
        kind = "exit" if record.is_exit else "exception"
        text, what, rest = record.traceback, f"{'exited by' if record.is_exit else 'raised'} {record.summary}", ":"
    elif unknown_reason:
        what, rest = "ended", f"; its exit code is unknown: {unknown_reason}"
    elif exitcode < 0:
        name = _signal_name(-exitcode)
        hint = f". {_SIGNAL_HINTS[name]}" if name in _SIGNAL_HINTS else ""
        kind, what, rest = "signal", f"was killed by {name}", hint
    else:
        what = f"ended with exit code {exitcode if exitcode <= _LARGEST_CHOSEN else f'0x{exitcode:X}'}"
        kind = "exit" if exitcode <= _LARGEST_CHOSEN else "signal"
        rest = ": its function returned, or something called os._exit" if started else "; see what it has printed"
    if text and record is None:
        rest = "; its last Python frames:"
    exception = None if record is None else record.unpickle()
    kind, what = kind if started else "start", what + _DURING[progress]
    return Failure(worker, kind, what, rest, _WORKER_FRAME.sub("", text), exception, exitcode)


def describe_timeout(
    worker: int, report: WorkerReport, seconds: float, stack: str, others: Sequence[int] | None, label: str
) -> Failure:
    """Describe the failure of a worker that exceeds a time limit.

    :param stack: stack of the worker; empty if it does not react to signals
    :param others: numbers of other workers that do not answer; None if all workers wait for a command
    """
    also_late = f" (nor did {', '.join(map(str, others))})" if others else ""
    rest = f"{also_late}; it is in:"
    if others is None:
        rest = f", but no {label} hangs: all wait for a command, so the parent used the time; it is in:"
    elif not hasattr(signal, "SIGUSR1"):
        rest = " (or another one: Windows does not report where they are)" if others else ""
    elif not stack:
        state = "does not even react to signals" if report.progress else "is still being started"
        rest = f"{also_late}; it {state}"
    what = f"did not answer within {seconds:g} s"
    return Failure(worker, "timeout", what, rest, _WORKER_FRAME.sub("", stack))


def require_same_process(owner: int) -> None:
    """Reject calls from a process that was forked from the owner, whose answers it would read.

    :raises InvalidArgumentError: If this is another process.
    """
    if os.getpid() != owner:
        raise InvalidArgumentError(
            f"these environments belong to process {owner}, and process {os.getpid()} was forked from it: expected "
            "calls from the process that made them. Use environments that are made in this process"
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def is_idle(stack: str, idle_in: Sequence[str]) -> bool:
    """Return whether a worker waits for its next command.

    An environment may wait for its own process with the same calls of the standard library. Therefore the innermost
    frame outside the standard library decides.

    :param stack: stacks of the worker's threads, as faulthandler writes them
    :param idle_in: parts of the frame that waits for commands, such as its file or function
    """
    # faulthandler marks the thread that got its signal, which is the main thread.
    frames = stack.partition("Current thread")[2].splitlines()[1:]
    waiting = [*takewhile(_WAITING_FRAME.search, frames)]
    return any(part in frame for frame in frames[: len(waiting) + 1] for part in idle_in)
