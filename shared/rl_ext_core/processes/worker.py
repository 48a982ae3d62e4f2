"""What happens in a worker before and around its function, and how it ends with all that it has started."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import spawn
from typing import Any, NoReturn

from rl_ext_core._system import after_fork
from rl_ext_core.processes.families import kill_group, kill_descendants, create_process_group
from rl_ext_core.processes.report import Progress, ReportWriter
from rl_ext_core.processes.server import reset_signals

__all__ = [
    "CLOSE_S",
    "END_SIGNAL",
    "WorkerStart",
    "on_abnormal_exit",
    "abort_worker",
    "import_main",
    "finish_worker",
    "set_status",
]

# How long a worker that ends early may take to close what it has.
CLOSE_S = 3.0
# And then for its exit handlers, and the threads that it waits for.
_EXIT_GRACE_S = 0.25
# By which the parent asks a worker to end; Windows has none.
END_SIGNAL: Any = getattr(signal, "SIGUSR2", None)
_STACK_SIGNAL: Any = getattr(signal, "SIGUSR1", None)

_writer: ReportWriter | None = None
_notes: dict[str, Any] = {}
# For as long as the parent's main module was not imported: where it is.
_main: dict[str, Any] = {}
_is_ending = _has_returned = False
_exit_callbacks: list[Callable[[], object]] = []


class _EndRequestedError(SystemExit):
    """The parent wants this worker to end."""


class _AbortWorker(BaseException):
    """The cause ends this worker, whatever catches exceptions between here and its function."""


def abort_worker(error: Exception) -> NoReturn:
    """End this worker as if its function had raised an exception; outside of workers, raise it.

    :param error: the exception
    """
    if _writer is None:
        raise error
    raise _AbortWorker from error


def on_abnormal_exit(close: Callable[[], object]) -> None:
    """Call a function if this worker ends early: by an exception, or because its parent ends it.

    It may take three seconds, together with all others. When the worker's function returns, it is not called. What it
    raises is dropped, because the reason for the end is known already. Outside of workers nothing happens. Windows ends
    workers without this.

    :param close: closes what would stay behind otherwise, such as an environment's simulator
    """
    if _writer is not None:
        _exit_callbacks.append(close)
        _writer.mark_needs_close()


def set_status(**values: Any) -> None:
    """Record what this worker is doing, for the message if it dies.

    It takes about two microseconds. ``seed`` and ``phase`` have places of their own in the message. Outside of
    workers nothing happens.

    :param values: numbers, strings and lists of these; anything else arrives as its ``repr``
    """
    _notes.update(values)
    if _writer is not None:
        _writer.write_notes(_notes)


def import_main() -> bool:
    """Import the parent's main module into this worker, if that was not needed to start it.

    :return: whether that has just been done: what it registers is there now
    """
    data = dict(_main)
    _main.clear()
    if not data:
        return False
    current: Any = multiprocessing.current_process()
    # As while multiprocessing imports it: a script without a guard would start workers in here, and these theirs.
    current._inheriting = True
    try:
        spawn.prepare(data)
    finally:
        del current._inheriting
    return True


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is given by its parent.

    :ivar report: descriptor of its report
    :ivar lifeline: reading end of a pipe that the parent never writes to and alone holds open; None on Windows
    :ivar environ: all of its environment variables
    :ivar function: with its arguments: pickled, or as it is where the worker is forked
    :ivar needs_main: whether that refers to the main module; if not, this is left to :func:`import_main`
    :ivar main: where the main module is, in multiprocessing's preparation data
    """

    report: Any
    lifeline: Any
    environ: dict[str, str]
    function: Any = None
    needs_main: bool = False
    main: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Run the function, with all that a worker is around it."""
        global _has_returned
        self._set_up()
        assert _writer is not None
        try:
            _main.update(self.main)
            if self.needs_main:
                import_main()
            _writer.set_progress(Progress.UNPICKLING)
            packed = self.function
            function, args, kwargs = pickle.loads(packed) if isinstance(packed, bytes) else packed
            _writer.set_progress(Progress.RUNNING)
            if function is not None:
                function(*args, **kwargs)
            _has_returned = True  # it need not be asked to end any more
        except BaseException as error:
            _end_with_error(error)

    def _set_up(self) -> None:
        """Set the process up, before anything is imported that is not the standard library's or this package's."""
        global _writer
        create_process_group()
        _writer = None
        reset_signals()
        if END_SIGNAL is not None:
            signal.signal(END_SIGNAL, _end_if_requested)
        os.environ.clear()
        os.environ.update(self.environ)
        os.set_inheritable(self.report, False)
        _notes.clear()
        _exit_callbacks.clear()
        _writer = ReportWriter(self.report)
        # Straight to the descriptor, from C: fatal signals, and stacks when the parent asks.
        faulthandler.enable(file=self.report, all_threads=True)
        if _STACK_SIGNAL is not None:
            faulthandler.register(_STACK_SIGNAL, file=self.report, all_threads=True)
        if self.lifeline is not None:
            os.set_inheritable(self.lifeline, False)
            _die_with_parent(self.lifeline)
        _writer.set_progress(Progress.IMPORTING)
        _end_if_requested()  # before it could be told


def _end_with_error(error: BaseException) -> NoReturn:
    """End the worker: quietly if the parent knows why, else by the exception, which multiprocessing prints."""
    global _is_ending
    if isinstance(error, _AbortWorker) and error.__cause__ is not None:
        error = error.__cause__
    asked = isinstance(error, _EndRequestedError)
    # There is no report in a process that the worker has forked, and that runs out of the same function.
    if _writer is None or not (asked or _writer.write_exception(error)):
        raise error
    _is_ending = True
    # The parent waits for the end of this process. Where it has asked for that, it looks at the clock itself.
    if not asked:
        faulthandler.dump_traceback_later(CLOSE_S, exit=True, file=_writer.fd)
    while _exit_callbacks:
        # An environment that has failed may well fail again when it is closed.
        with suppress(BaseException):
            _exit_callbacks.pop()()
    kill_descendants()
    faulthandler.dump_traceback_later(_EXIT_GRACE_S, exit=True, file=_writer.fd)
    code = error.code if isinstance(error, SystemExit) else 1
    raise SystemExit(code if code is None or isinstance(code, int) else 1) from None


def finish_worker(code: int, *, spawned: bool) -> int:
    """End a worker that has reported a failure, without the end of the interpreter, which may take a large library
    half a second, and which forked workers do not have; else return its exit code.
    """
    if _is_ending:
        if spawned:  # exit handlers of a forked worker are those of the process that it was forked from
            atexit._run_exitfuncs()
        os._exit(code)
    return code


def _end_if_requested(number: int = 0, frame: object = None) -> None:
    if _writer is not None and not (_is_ending or _has_returned) and _writer.is_end_requested():
        raise _EndRequestedError(1)


def _die_with_parent(lifeline: int) -> None:
    """Have this process and its group killed when its parent is gone: on Linux by the kernel, even if it hangs in C."""
    # PR_SET_PDEATHSIG would not do: it tells of the thread that has forked, and a worker's parent is the fork server.
    if not hasattr(os, "memfd_create"):
        threading.Thread(target=_wait_for_parent_end, args=(lifeline,), daemon=True).start()
        return
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The signal is for what happens from now on.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):
        kill_group(0)


def _wait_for_parent_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    kill_group(0)


def _reset_after_fork() -> None:
    """In a process that a worker forks: its crashes are not the worker's."""
    global _writer
    if _writer is not None:
        _writer = None
        _exit_callbacks.clear()
        if END_SIGNAL is not None:
            signal.signal(END_SIGNAL, signal.SIG_DFL)
            faulthandler.unregister(_STACK_SIGNAL)
        faulthandler.enable(file=sys.__stderr__) if sys.__stderr__ is not None else faulthandler.disable()


after_fork(_reset_after_fork)
