"""Why a worker failed, as data and as the text that users read; of those that hang, by faulthandler's stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.processes.report import Contents, Progress, Raised

_GUARD = """\
Each worker imports the main script, to find the functions that it defines, and this script starts workers when it is
imported. Write what starts them under a guard:

    def main():
        ...  # the script as it is, but for imports, classes and functions

    if __name__ == "__main__":
        main()
"""
_HINTS = {
    "SIGKILL": "The kernel's out-of-memory killer sends it: see dmesg, and free -h; fewer workers need less memory.",
    "SIGTERM": "Another process has sent it: a job scheduler, a supervisor, or a call of terminate().",
}

# Of exit codes that a program chooses; those of crashes on Windows are larger.
LARGEST_CHOSEN = 0xFFFF
_MAIN = "Current thread"
# Where Python code waits for other processes. What matters is who called these.
_WAITING = (
    "/selectors.py",
    "/socket.py",
    "/threading.py",
    "/multiprocessing/connection.py",
    "/multiprocessing/queues.py",
    "/multiprocessing/synchronize.py",
)
# The last frame of ours before those of the user.
_OURS = '/rl_ext_core/processes/worker.py", line '


@dataclass(frozen=True)
class Failure:
    """The first failure of a group of workers.

    :ivar worker: its number in the group
    :ivar kind: "exception", "signal", "exit" or "timeout", and "start" if its function had not begun
    :ivar phase: what it was at: by its own note, else what the parent waited for
    :ivar summary: all of it in one line
    :ivar traceback: where it was, as the worker saw it; may be empty
    :ivar exception: what it raised, if that can be rebuilt here
    :ivar exitcode: of the process, negative for signals; None if it was still running
    :ivar seed: of the worker's environments
    :ivar notes: the worker's last ones, see :func:`note`

    >>> watch.failure  # doctest: +SKIP
    Failure(worker=3, kind='signal', phase='step', summary='worker 3 was ended by SIGSEGV in step', ...)
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
        return WorkerError(
            text,
            worker=self.worker,
            kind=self.kind,
            phase=self.phase,
            seed=self.seed,
            exitcode=self.exitcode,
            traceback=self.traceback,
            notes=self.notes,
        )


@dataclass(frozen=True)
class FailedWorker:
    """A worker whose failure is described: its number of so many, what it is called, and what the parent waits for."""

    worker: int
    count: int
    label: str
    seed: int | None
    phase: str | None

    def failure(self, kind: str, contents: Contents, what: str, rest: str = "", **more: Any) -> Failure:
        """Describe a failure: what the worker did, and the rest of that sentence after what it was at."""
        notes = dict(contents.notes)
        seed, phase = notes.get("seed", self.seed), notes.get("phase") or self.phase
        known = {"seed": seed, **{name: value for name, value in notes.items() if name not in ("seed", "phase")}}
        details = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        who = f"{self.label} {self.worker} of {self.count}" + (f" ({details})" if details else "")
        when = f" in {phase}" if phase and kind != "start" else ""
        return Failure(self.worker, kind, phase, f"{who} {what}{when}{rest}", seed=seed, notes=notes, **more)


def ended(worker: FailedWorker, contents: Contents, exitcode: int | None, *, is_lost: bool = False) -> Failure:
    """Describe the failure of a worker that has ended.

    :param exitcode: None: the system has not reported it to this process
    :param is_lost: whether its fork server has ended first
    """
    started = contents.progress is Progress.RUNNING
    while_it = {
        Progress.LAUNCHED: " before it ran anything of yours",
        Progress.IMPORTING: " while it imported the main script",
        Progress.UNPICKLING: " while it unpickled its function and arguments",
        Progress.RUNNING: "",
    }[contents.progress]
    if contents.raised is not None:
        kind = "exception" if started else "start"
        return _raised(worker, contents, contents.raised, kind, while_it, exitcode)
    if is_lost:
        what, kind = f"is lost{while_it}", "signal"
        rest = ": the fork server that started it was killed, and so it was ended too"
    elif exitcode is None:
        what, kind = f"ended{while_it}", "exit"
        rest = "; why is not known, because this process ignores SIGCHLD or another part of it has waited for the "
        rest += "worker. Write signal.signal(signal.SIGCHLD, signal.SIG_DFL) before the workers start"
    elif exitcode < 0:
        name = signal_name(-exitcode)
        what, kind = f"was killed by {name}{while_it}", "signal"
        rest = "; its last Python frames:" if contents.text else f". {_HINTS[name]}" if name in _HINTS else ""
    else:
        what, kind = f"ended with exit code {exit_code_name(exitcode)}{while_it}", "exit"
        if exitcode > LARGEST_CHOSEN:  # Windows' number of a crash
            kind = "signal"
        rest = ": its function returned, or something called os._exit" if started else "; see what it has printed"
        rest = "; its last Python frames:" if contents.text else rest
    kind = kind if started else "start"
    return worker.failure(kind, contents, what, rest, traceback=without_our_frames(contents.text), exitcode=exitcode)


def _raised(
    worker: FailedWorker, contents: Contents, raised: Raised, kind: str, while_it: str, exitcode: int | None
) -> Failure:
    more: dict[str, Any] = {"exitcode": exitcode, "traceback": raised.traceback}
    if raised.unguarded:
        return worker.failure("start", contents, "cannot start", f". {_GUARD}", **more)
    what = f"raised {raised.summary}{while_it}"
    if raised.exits:
        what, kind = f"exited by {raised.summary}{while_it}", "exit" if kind == "exception" else kind
    return worker.failure(kind, contents, what, ":", exception=raised.exception(), **more)


def timed_out(
    worker: FailedWorker, contents: Contents, seconds: float, stack: str, others: Sequence[int] | None
) -> Failure:
    """Describe the failure of a worker that does not answer within so many seconds, by its stack, which is empty if it
    does not even react to signals; ``others`` do not answer either, None: all wait for a command.
    """
    nor = f" (nor did {', '.join(map(str, others))})" if others else ""
    if others and not hasattr(signal, "SIGUSR1"):
        nor = " (or another one: Windows does not report where they are)"
    rest = f"{nor}; it is in:"
    if others is None:
        rest = f", but no {worker.label} hangs: all wait for a command, so the time went by in the parent; it is in:"
    if not stack:
        rest = f"{nor}; it does not even react to signals" if hasattr(signal, "SIGUSR1") else nor
        rest = rest if contents.progress else f"{nor}; it is still being started"
    return worker.failure(
        "timeout", contents, f"did not answer within {seconds:g} s", rest, traceback=without_our_frames(stack)
    )


def require_process(owner: int) -> None:
    """Refuse calls from a forked process: it would take the answers that workers give to the process that made them.

    :param owner: number of the process that started the workers
    :raises InvalidArgumentError: If this is another process.
    """
    if os.getpid() != owner:
        raise InvalidArgumentError(
            f"these environments belong to process {owner}, and process {os.getpid()} was forked from it: expected "
            "calls from the process that made them. Use environments that are made in this process"
        )


def signal_name(number: int) -> str:
    """Return a signal's name, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_name(code: int) -> str:
    """Return an exit code as people look it up: Windows has numbers for what signals are elsewhere, as 0xC0000005."""
    return f"0x{code:X}" if code > LARGEST_CHOSEN else str(code)


def without_our_frames(text: str) -> str:
    """Leave out the frames that are the same in all workers, from the function that they run outwards."""
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        skipping = line.startswith("  ") and (skipping or _OURS in line.replace(os.sep, "/"))
        if not skipping:
            lines.append(line)
    return "\n".join(lines)


def main_stack(text: str) -> list[str]:
    """List the frames of the thread that got faulthandler's signal, innermost first: the kernel picks the main one."""
    after = text.partition(_MAIN)[2].splitlines()[1:]
    frames = []
    for line in after:
        if not line.startswith("  "):
            break
        frames.append(line.strip())
    return frames


def is_idle(frames: Sequence[str], idle_in: Sequence[str]) -> bool:
    """Return whether a worker waits for its next command, by parts of lines that stand for that.

    An environment may wait for a process of its own with the same calls. So the frame counts that waits: the innermost
    one that is not the standard library's.
    """
    for frame in frames:
        if any(part in frame for part in idle_in):
            return True
        if not any(f'{file}"' in frame for file in _WAITING):
            return False
    return False
