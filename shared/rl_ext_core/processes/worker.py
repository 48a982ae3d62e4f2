"""Code that runs in a worker process: its set-up, its function, and its end."""

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
from rl_ext_core.processes.process_groups import create_process_group, kill_descendants, kill_group
from rl_ext_core.processes.report import END_REQUESTED, NEEDS_CLOSE, PROGRESS, Progress, WorkerReport
from rl_ext_core.processes.server import reset_signals

# Time limit in seconds of all exit callbacks together.
CLOSE_S = 3.0
# Time limit of the exit handlers and of the wait for threads, after the callbacks.
_EXIT_GRACE_S = 0.25
# The parent asks a worker to end by this signal. On Windows there is none, and the parent kills the worker.
END_SIGNAL: Any = getattr(signal, "SIGUSR2", None)
_STACK_SIGNAL: Any = getattr(signal, "SIGUSR1", None)

_writer: WorkerReport | None = None
# Location of the parent's main module; empty once the module is imported.
_main: dict[str, Any] = {}
_is_ending = _has_returned = False
_exit_callbacks: list[Callable[[], object]] = []


class _EndRequestedError(SystemExit):
    """Exit of the worker at its parent's request."""


def on_abnormal_exit(close: Callable[[], object]) -> None:
    """Register a callback for an abnormal exit: an exception, or termination by the parent.

    It is not called if the worker's function returns. All callbacks together have three seconds. Their exceptions are
    ignored. Outside of workers, and if the parent terminates a worker on Windows, callbacks are not called.

    :param close: function without parameters, for example one that closes an environment's simulator
    """
    if _writer is not None:
        _exit_callbacks.append(close)
        _writer.page[NEEDS_CLOSE] = 1


def import_main() -> bool:
    """Import the parent's main module into this worker; return False if that was done before."""
    data = dict(_main)
    _main.clear()
    if not data:
        return False
    current: Any = multiprocessing.current_process()
    # multiprocessing sets this during the import, so that a script without a guard cannot start workers in workers.
    current._inheriting = True
    try:
        spawn.prepare(data)
    finally:
        del current._inheriting
    return True


@dataclass(frozen=True)
class WorkerStart:
    """Start data of a worker, which its parent sends.

    :ivar report: file descriptor of the report
    :ivar lifeline: reading end of a pipe whose writing end only the parent has, so that it closes when the parent ends;
        None on Windows
    :ivar environ: all environment variables of the worker
    :ivar function: function, arguments and keyword arguments, pickled unless the worker is forked
    :ivar needs_main: whether ``function`` refers to the main module; otherwise :func:`import_main` may import it later
    :ivar main: location of the main module, in multiprocessing's preparation data
    """

    report: Any
    lifeline: Any
    environ: dict[str, str]
    function: Any = None
    needs_main: bool = False
    main: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Set this process up as a worker, and run the function."""
        global _has_returned
        self._set_up()
        assert _writer is not None
        try:
            _main.update(self.main)
            if self.needs_main:
                import_main()
            _writer.page[PROGRESS] = Progress.UNPICKLING
            packed = self.function
            function, args, kwargs = pickle.loads(packed) if isinstance(packed, bytes) else packed
            _writer.page[PROGRESS] = Progress.RUNNING
            if function is not None:
                function(*args, **kwargs)
            _has_returned = True  # later requests to end are ignored
        except BaseException as error:
            _end_with_error(error)

    def _set_up(self) -> None:
        """Set this process up, before it imports user code."""
        global _writer
        create_process_group()
        _writer = None
        reset_signals()
        if END_SIGNAL is not None:
            signal.signal(END_SIGNAL, _end_if_requested)
        os.environ.clear()
        os.environ.update(self.environ)
        os.set_inheritable(self.report, False)
        _exit_callbacks.clear()
        _writer = WorkerReport(self.report)
        # faulthandler writes fatal signals, and stacks on the parent's request, to the descriptor from C.
        faulthandler.enable(file=self.report, all_threads=True)
        if _STACK_SIGNAL is not None:
            faulthandler.register(_STACK_SIGNAL, file=self.report, all_threads=True)
        if self.lifeline is not None:
            os.set_inheritable(self.lifeline, False)
            _die_with_parent(self.lifeline)
        _writer.page[PROGRESS] = Progress.IMPORTING
        _end_if_requested()  # the request may have come before the signal was handled


def _end_with_error(error: BaseException) -> NoReturn:
    """End the worker after an exception.

    It ends silently if the parent knows the reason. Otherwise the exception is raised, and multiprocessing prints it.
    """
    global _is_ending
    is_requested = isinstance(error, _EndRequestedError)
    # A process that the worker forked may return from the same function. It has no report.
    if _writer is None or not (is_requested or _writer.write_exception(error)):
        raise error
    _is_ending = True
    # The parent waits for the end of this process, and enforces the time limit itself if it requested the end.
    if not is_requested:
        _limit_time(CLOSE_S, _writer.fd)
    while _exit_callbacks:
        # An environment that has failed may fail again when it is closed.
        with suppress(BaseException):
            _exit_callbacks.pop()()
    kill_descendants()
    _limit_time(_EXIT_GRACE_S, _writer.fd)
    code = error.code if isinstance(error, SystemExit) else 1
    raise SystemExit(code if code is None or isinstance(code, int) else 1) from None


def _limit_time(seconds: float, report: int) -> None:
    """End this process after some seconds, even in C code, and write its stacks to the report."""
    if sys.platform == "win32":
        faulthandler.dump_traceback_later(seconds, exit=True, file=report)
        return
    # dump_traceback_later() would wait forever in a fork of a process that has called it, as pytest does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=report, all_threads=True, chain=True)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def finish_worker(code: int, *, spawned: bool) -> int:
    """End a worker that has reported a failure; for other workers, return the exit code.

    It skips the interpreter's finalization, which may take half a second with large libraries.
    """
    if _is_ending:
        if spawned:  # a forked worker has the exit handlers of the process that it was forked from
            atexit._run_exitfuncs()
        os._exit(code)
    return code


def _end_if_requested(number: int = 0, frame: object = None) -> None:
    """Raise the exception that ends this worker, if the parent has asked for that."""
    # The signal alone is not enough, because other processes may send it.
    if _writer is not None and not (_is_ending or _has_returned) and _writer.page[END_REQUESTED]:
        raise _EndRequestedError(1)


def _die_with_parent(lifeline: int) -> None:
    """Kill this process and its group when the parent ends.

    On Linux the kernel kills it, even if it hangs in C code.
    """
    # PR_SET_PDEATHSIG would not work: it reports the end of the forking thread, and the fork server forks workers.
    if not hasattr(os, "memfd_create"):
        threading.Thread(target=_wait_for_parent_end, args=(lifeline,), daemon=True).start()
        return
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The signal is sent only for changes from now on.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):
        kill_group(0)


def _wait_for_parent_end(lifeline: int) -> None:
    """Wait until the parent ends, then kill this process and its group; run by a thread."""
    os.read(lifeline, 1)
    kill_group(0)


def _reset_after_fork() -> None:
    """Undo the worker's set-up in a process that it forks, whose crashes are not the worker's."""
    global _writer
    if _writer is not None:
        _writer = None
        _exit_callbacks.clear()
        if END_SIGNAL is not None:
            signal.signal(END_SIGNAL, signal.SIG_DFL)
            faulthandler.unregister(_STACK_SIGNAL)
        faulthandler.enable(file=sys.__stderr__) if sys.__stderr__ is not None else faulthandler.disable()


after_fork(_reset_after_fork)
