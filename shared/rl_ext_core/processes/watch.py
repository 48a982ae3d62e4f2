"""A thread in the parent process that waits for the ends of workers and reports failures.

The parent waits for answers in code that cannot check for failures, such as a read of a pipe. So a thread does it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from textwrap import indent
from typing import NamedTuple

from rl_ext_core import _system
from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.processes.context import Worker, kill_workers
from rl_ext_core.processes.failures import Failure, describe_exit, describe_timeout, is_idle
from rl_ext_core.processes.process_groups import kill_group
from rl_ext_core.processes.report import END_REQUESTED, NEEDS_CLOSE, RAISED, Progress
from rl_ext_core.processes.worker import CLOSE_S, END_SIGNAL

_log = logging.getLogger("rl_ext_core.processes")

# Maximum wait for the failure, once the main thread has seen a closed pipe or a report. Exit callbacks of workers take
# time on a busy machine.
_REPORT_TIMEOUT_S = 30.0
# Maximum wait for a killed worker, whose memory the kernel has to free.
_REAP_S = 10.0
# Maximum wait until a worker begins to write its stacks, and the wait until it has written them.
_STACKS_S = 3.0
_WRITING_S = 0.2
# Interval in which the thread checks time limits and requests to stop. The end of a worker wakes it at once.
_TICK_S = 0.05
# Errors that a dying worker causes in the parent. After others, the parent waits only if a worker is about to end.
_PIPE_ERRORS = (EOFError, ConnectionError)
# The finalizer has to run before multiprocessing joins its children, which would wait for them forever.
_EXIT_PRIORITY = 100


class _Operation(NamedTuple):
    name: str
    timeout: float | None
    deadline: float | None


class Watch:
    """Watch over workers, in a thread, that raises their failure in the main thread.

    A worker fails if it ends before :meth:`expect_exit` was called, or later with an exit code other than 0. Then the
    Watch kills the other workers, so that calls that wait for them return. Processes that a worker has started are
    killed when it ends, unless they have their own session.

    The thread starts with the Watch. Create it after all workers have started, because forking with threads is unsafe.
    A Watch that is open when the interpreter exits kills its workers.

    :param processes: started processes of a context from :func:`get_context`
    :param on_failure: function called in the watching thread after the workers were killed. It can wake threads that
        wait for something other than a pipe
    :param label: name of a worker in error messages
    :param idle_in: parts of a stack frame, such as file or function, in which a worker waits for a command. Workers in
        such a frame do not hang
    :raises InvalidTypeError: If a process is not a started worker of this package.

    :ivar failure: first failure; None if there is none
    :ivar is_closing: whether the workers are expected to end
    :ivar is_killed: whether :meth:`kill` was called, as it is when the interpreter exits
    :ivar owner: process number of the process that created the Watch

    >>> from rl_ext_core.processes import Watch, get_context
    >>> process = get_context().Process(target=sum, args=([1, 2],))
    >>> process.start()
    >>> watch = Watch([process])
    >>> watch.expect_exit()
    >>> process.join()
    >>> watch.stop()
    """

    @defer_signals
    def __init__(
        self,
        processes: Sequence[BaseProcess],
        *,
        on_failure: Callable[[], None] | None = None,
        label: str = "worker",
        idle_in: Sequence[str] = ("/multiprocessing/connection.py",),
    ) -> None:
        self.failure: Failure | None = None
        self._workers: list[Worker] = []
        for process in processes:
            if not isinstance(process, Worker) or process.popen is None:
                raise InvalidTypeError(
                    f"{process!r} is not a started worker of this package: expected rl_ext_core.processes' own. Use "
                    "process = rl_ext_core.processes.get_context().Process(target=...), and process.start()"
                )
            self._workers.append(process)
        self._on_failure, self._label, self._idle_in = on_failure, label, tuple(idle_in)
        self._current_operation: _Operation | None = None
        self._failed_operation: _Operation | None = None
        self.is_closing = self.is_killed = self._stopping = False
        self.owner = os.getpid()
        self._workers_ended = threading.Event()
        self._exit_finalizer = util.Finalize(None, self._end_at_exit, exitpriority=_EXIT_PRIORITY)
        self._thread = threading.Thread(target=self._watch, name="rl_ext_core-watch", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._exit_finalizer.cancel()
            raise

    @contextmanager
    def operation(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Return a context manager for a call that waits for workers.

        If a worker has failed before, the ``with`` block does not run. If the block raises an Exception and a worker
        has failed, the failure is raised instead. Within another operation, the context manager has no effect.

        :param name: name of the operation for error messages, for example ``"step"``
        :param timeout: time limit in seconds, after which the stacks of the workers are reported and the workers are
            killed; default: none
        :return: the context manager
        :raises WorkerError: If a worker has failed.
        """
        self._raise_failure()
        if self._current_operation is not None:
            yield
            return
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            self._current_operation = _Operation(name, timeout, deadline)
            yield
        except Exception as error:
            self._raise_if_failed(error)
            raise
        finally:
            self._current_operation = None

    def expect_exit(self) -> None:
        """Expect the workers to end with exit code 0 from now on, which is not a failure."""
        self.is_closing = True

    def kill(self) -> None:
        """End the workers that still run. Their ends are not failures.

        They have three seconds for the callbacks of :func:`~rl_ext_core.processes.on_abnormal_exit`. Then they and the
        processes that they have started are killed. Ctrl-C ends only the wait.
        """
        if os.getpid() != self.owner or threading.current_thread() is self._thread:
            return
        self.is_closing = self.is_killed = self._stopping = True
        self._thread.join()
        self._end_workers()  # if the thread had ended before

    def stop(self) -> None:
        """End the thread. Workers that still run continue without it."""
        if os.getpid() != self.owner:
            return
        self._stopping = True
        # on_failure, which runs in the thread, may call this method.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._exit_finalizer.cancel()

    def _end_at_exit(self) -> None:
        self.kill()
        # Later in the interpreter's exit, the thread does not run and cannot be joined.
        self.stop()

    def _watch(self) -> None:
        """Watch over the workers until they have ended; run by the thread."""
        try:
            waiting = self._wait_for_deaths()
            if self.is_killed:
                self._end_workers()
            _kill_groups(worker for worker in waiting.values() if worker.exitcode is not None)
        finally:
            self._workers_ended.set()

    def _wait_for_deaths(self) -> dict[int, Worker]:
        """Wait for ends of workers until the first failure, and return the workers that still run."""
        waiting = dict(enumerate(self._workers))
        while waiting and not self._stopping and self.failure is None:
            # Windows can wait for 63 handles. The other workers are checked after each tick.
            sentinels = [worker.sentinel for worker in waiting.values()][: 60 if _system.WINDOWS else None]
            connection.wait(sentinels, _TICK_S)
            dead = {number: worker for number, worker in waiting.items() if worker.exitcode is not None}
            waiting = {number: worker for number, worker in waiting.items() if number not in dead}
            _kill_groups(dead.values())
            if not self._stopping:
                self._report_ended(dead)
                self._check_time_limit()
        return waiting

    def _report_ended(self, dead: Mapping[int, Worker]) -> None:
        """Set the failure if one of the workers that ended should not have ended."""
        unexpected = {number: worker for number, worker in dead.items() if not self._ended_normally(worker)}
        if not unexpected:
            return
        kill_workers([*unexpected.values()])
        number = min(unexpected, key=lambda number: (*_rank(unexpected[number]), number))
        report, popen = unexpected[number].report, unexpected[number].popen
        self._set_failure(describe_exit(number, report, popen.returncode, popen.unknown_reason))

    def _ended_normally(self, worker: Worker) -> bool:
        """Return whether a worker ended because it was expected to."""
        # A worker whose exit code is unknown may have returned.
        return self.is_closing and (worker.exitcode == 0 or bool(worker.popen.unknown_reason))

    def _check_time_limit(self) -> None:
        operation = self._current_operation
        if operation is None or operation.deadline is None or time.monotonic() < operation.deadline:
            return
        stacks = self._request_stacks()
        if self._current_operation is not operation or not stacks:
            return  # the operation has ended after its time limit
        busy = [worker for worker, stack in stacks.items() if not is_idle(stack, self._idle_in)]
        number, *others = busy or stacks
        report, late = self._workers[number].report, others if busy else None
        self._set_failure(describe_timeout(number, report, operation.timeout or 0.0, stacks[number], late, self._label))

    def _request_stacks(self) -> dict[int, str]:
        """Return the stacks of workers, after all have written them or a time limit."""
        sizes = {number: worker.report.size() for number, worker in enumerate(self._workers) if _is_alive(worker)}
        if not hasattr(signal, "SIGUSR1"):
            return dict.fromkeys(sizes, "")
        # The signal would kill a worker that has not installed its handler yet.
        asked = [number for number in sizes if self._workers[number].report.progress > Progress.LAUNCHED]
        for number in asked:
            self._workers[number].send_signal(signal.SIGUSR1)
        end = time.monotonic() + _STACKS_S
        while time.monotonic() < end and any(self._workers[number].report.size() <= sizes[number] for number in asked):
            time.sleep(_TICK_S)
        time.sleep(_WRITING_S)
        return {number: self._workers[number].report.text(since) for number, since in sizes.items()}

    def _set_failure(self, failure: Failure) -> None:
        self._failed_operation = self._current_operation
        self.failure = failure
        self._end_workers()
        self._workers_ended.set()
        if self._on_failure is not None:
            try:
                self._on_failure()
            except Exception:
                _log.exception("on_failure of the watch over %ss raised", self._label)

    def _end_workers(self) -> None:
        """Let running workers call their exit callbacks, then kill them and their child processes."""
        living = [worker for worker in self._workers if _is_alive(worker)]
        if not living:
            return
        closing = []
        for worker in living if END_SIGNAL is not None else ():
            worker.report.page[END_REQUESTED] = 1
            if worker.report.page[NEEDS_CLOSE]:
                worker.send_signal(END_SIGNAL)
                closing.append(worker)
        _wait_until_ended(closing, CLOSE_S)
        kill_workers(living)
        _wait_until_ended(living, _REAP_S)

    def _raise_if_failed(self, error: Exception) -> None:
        """Raise the workers' failure if it may have caused this exception."""
        if isinstance(error, WorkerError):
            return
        if self.failure is None and (isinstance(error, _PIPE_ERRORS) or any(map(self._is_failing, self._workers))):
            self._workers_ended.wait(_REPORT_TIMEOUT_S)
        self._raise_failure()

    def _is_failing(self, worker: Worker) -> bool:
        return bool(worker.report.page[RAISED]) or (worker.exitcode is not None and not self._ended_normally(worker))

    def _raise_failure(self) -> None:
        failure, operation = self.failure, self._failed_operation
        if failure is None:
            return
        phase = None if operation is None else operation.name
        self._workers_ended.wait()  # after the error, no worker runs
        when = f" in {phase}" if phase and failure.kind != "start" else ""
        text = f"{self._label} {failure.worker} of {len(self._workers)} {failure.what}{when}{failure.rest}"
        if failure.traceback:
            text += "\n" + indent(failure.traceback.rstrip("\n"), "    ")
        worker, kind, code, traceback = failure.worker, failure.kind, failure.exitcode, failure.traceback
        error = WorkerError(text, worker=worker, kind=kind, phase=phase, exitcode=code, traceback=traceback)
        raise error from failure.exception


def _rank(worker: Worker) -> tuple[int, float]:
    """Return a sort key for workers that ended at the same time; the first is the cause.

    Crashes come first, then exceptions by time, then terminated workers, which are usually a consequence.
    """
    exception_record = worker.report.exception_record
    if exception_record is not None:
        return 1, exception_record.time
    return (2 if worker.exitcode in (0, -signal.SIGTERM) else 0), 0.0


def _kill_groups(dead: Iterable[Worker]) -> None:
    for worker in dead:
        kill_group(worker.pid or 0)


def _is_alive(worker: Worker) -> bool:
    """Return whether a worker runs; False if its process object is closed."""
    # is_alive() also removes a process that has ended from multiprocessing's list.
    try:
        return worker.is_alive()
    except ValueError:  # the process object is closed, so the process has ended
        return False


def _wait_until_ended(workers: Sequence[Worker], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(map(_is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.002)
