"""Why a worker failed, as data and as the text that users read; of those that hang, by faulthandler's stacks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from textwrap import indent
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.processes.report import Progress, WorkerReport

_GUARD = """\
Each worker imports the main script, to find the functions that it defines, and this script starts workers when it is
imported. Write what starts them under a guard:

    def main():
        ...  # the script as it is, but for imports, classes and functions

    if __name__ == "__main__":
        main()
"""
_SIGNAL_HINTS = {
    "SIGKILL": "The kernel's out-of-memory killer sends it: see dmesg, and free -h; fewer workers need less memory.",
    "SIGTERM": "Another process has sent it: a job scheduler, a supervisor, or a call of terminate().",
}

_DURING = {
    Progress.LAUNCHED: " before it ran anything of yours",
    Progress.IMPORTING: " while it imported the main script",
    Progress.UNPICKLING: " while it unpickled its function and arguments",
    Progress.RUNNING: "",
}
# Exit codes that a program chooses; those of crashes on Windows are larger, and are looked up as 0xC0000005.
_LARGEST_CHOSEN = 0xFFFF
# Where Python code waits for other processes. What matters is who called these.
_WAITING_FRAME = re.compile(r"[/\\](selectors|socket|threading|multiprocessing[/\\]\w+)\.py\"")
# The frames that are the same in all workers, from the function that they run outwards.
_WORKER_FRAME = re.compile(
    r'^  File ".*[/\\]rl_ext_core[/\\]processes[/\\]worker\.py", line .*\n?(  .*\n?)*', re.MULTILINE
)


@dataclass(frozen=True)
class Failure:
    """The first failure of a group of workers; attributes not named here are :class:`WorkerError`'s.

    :ivar summary: all of it in one line
    :ivar exception: what it raised, if that can be rebuilt here
    """

    worker: int
    kind: str
    phase: str | None
    summary: str
    traceback: str = ""
    exception: BaseException | None = None
    exitcode: int | None = None
    seed: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def error(self) -> WorkerError:
        """Make the exception to raise, ``from`` :attr:`exception`."""
        text = self.summary + ("\n" + indent(self.traceback.rstrip("\n"), "    ") if self.traceback else "")
        names = ("worker", "kind", "phase", "seed", "exitcode", "traceback", "notes")
        return WorkerError(text, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class FailedWorker:
    """A worker whose failure is described: its number of so many, what it is called, and what the parent waits for."""

    worker: int
    count: int
    label: str
    seed: int | None
    phase: str | None
    report: WorkerReport

    def describe_exit(self, exitcode: int, unknown_reason: str = "") -> Failure:
        """Describe the failure of a worker that has ended.

        :param unknown_reason: why its exit code is not known; empty if it is
        """
        progress, exception_record, text = self.report.progress, self.report.exception_record, self.report.text()
        started, kind = progress is Progress.RUNNING, "exit"
        if exception_record is not None:
            if not started and "bootstrapping phase" in exception_record.traceback:
                return self._make_failure(
                    "start", "cannot start", f". {_GUARD}", exception_record.traceback, exitcode=exitcode
                )
            kind = "exit" if exception_record.is_exit else "exception"
            text, what, rest = (
                exception_record.traceback,
                f"{'exited by' if exception_record.is_exit else 'raised'} {exception_record.summary}",
                ":",
            )
        elif unknown_reason:
            what, rest = "ended", f"; why is not known: {unknown_reason}"
        elif exitcode < 0:
            name = _signal_name(-exitcode)
            kind, what, rest = (
                "signal",
                f"was killed by {name}",
                f". {_SIGNAL_HINTS[name]}" if name in _SIGNAL_HINTS else "",
            )
        else:
            what = f"ended with exit code {exitcode if exitcode <= _LARGEST_CHOSEN else f'0x{exitcode:X}'}"
            kind = "exit" if exitcode <= _LARGEST_CHOSEN else "signal"
            rest = ": its function returned, or something called os._exit" if started else "; see what it has printed"
        if text and exception_record is None:
            rest = "; its last Python frames:"
        more = {"exitcode": exitcode, "exception": None if exception_record is None else exception_record.exception()}
        return self._make_failure(
            kind if started else "start", what + _DURING[progress], rest, _WORKER_FRAME.sub("", text), **more
        )

    def describe_timeout(self, seconds: float, stack: str, others: Sequence[int] | None) -> Failure:
        """Describe the failure of a worker that does not answer within so many seconds.

        :param stack: where it is; empty if it does not even react to signals
        :param others: those that do not answer either; None: all wait for a command
        """
        nor = f" (nor did {', '.join(map(str, others))})" if others else ""
        rest = f"{nor}; it is in:"
        if others is None:
            rest = f", but no {self.label} hangs: all wait for a command, so the time went by in the parent; it is in:"
        elif not hasattr(signal, "SIGUSR1"):
            rest = " (or another one: Windows does not report where they are)" if others else ""
        elif not stack:
            it = "does not even react to signals" if self.report.progress else "is still being started"
            rest = f"{nor}; it {it}"
        return self._make_failure("timeout", f"did not answer within {seconds:g} s", rest, _WORKER_FRAME.sub("", stack))

    def _make_failure(self, kind: str, what: str, rest: str, traceback: str, **more: Any) -> Failure:
        notes = self.report.notes
        seed, phase = notes.get("seed", self.seed), notes.get("phase") or self.phase
        known = {"seed": seed, **{name: value for name, value in notes.items() if name not in ("seed", "phase")}}
        details = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        who = f"{self.label} {self.worker} of {self.count}" + (f" ({details})" if details else "")
        when = f" in {phase}" if phase and kind != "start" else ""
        summary = f"{who} {what}{when}{rest}"
        return Failure(self.worker, kind, phase, summary, traceback, seed=seed, notes=notes, **more)


def require_same_process(owner: int) -> None:
    """Refuse calls from a forked process: it would take the answers that workers give to the process that made them.

    :param owner: number of the process that started the workers
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
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def is_idle(stack: str, idle_in: Sequence[str]) -> bool:
    """Return whether a worker waits for its next command, by parts of the frames that stand for that.

    An environment may wait for a process of its own with the same calls. So the frame counts that waits: the innermost
    one that is not the standard library's. faulthandler marks the thread that got its signal, which is the main one.
    """
    frames = stack.partition("Current thread")[2].splitlines()[1:]
    waiting = [*takewhile(_WAITING_FRAME.search, frames)]
    return any(part in frame for frame in frames[: len(waiting) + 1] for part in idle_in)
