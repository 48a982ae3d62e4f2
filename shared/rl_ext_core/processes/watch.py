"""The parent's side: waiting for workers in a thread, and reporting what they died of.

A thread, because TorchRL's ``ParallelEnv`` waits for its workers in code of its own, which nothing else can leave: one
way to wait for deaths serves all.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from types import TracebackType

from rl_ext_core import _system
from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, WorkerError
from rl_ext_core.processes.context import Worker, kill_workers
from rl_ext_core.processes.failures import FailedWorker, Failure, is_idle
from rl_ext_core.processes.families import kill_group
from rl_ext_core.processes.report import Progress
from rl_ext_core.processes.worker import CLOSE_S, END_SIGNAL

__all__ = ["Watch"]

_log = logging.getLogger("rl_ext_core.processes")

# How long the end of a worker may take, once the main thread has seen its pipe closed or its report written: what it
# closes itself, on a busy machine.
_REPORT_TIMEOUT_S = 30.0
# And that of one that was killed: the kernel has to free its memory.
_REAP_S = 10.0
# How long a worker may take to begin to say where it is, and to write that.
_STACKS_S = 3.0
_WRITING_S = 0.2
# How often the thread looks at the clock, and whether it is to end; a death wakes it at once.
_TICK_S = 0.05
# Errors by which a worker's end shows before it is over. Others may be the parent's own, and are not held up.
_PIPE_ERRORS = (EOFError, ConnectionError)
# Before multiprocessing joins its children, which would wait for them forever.
_EXIT_PRIORITY = 100


class Watch:
    """Waits for workers beside the main thread, and raises what they died of where the main thread uses them.

    When one of them ends before :meth:`expect_exit` was called, or with an exit code other than 0 after it, that is the
    failure: the others are killed, so that no call that waits for them waits any longer. It has one thread, which
    starts with it: make it when all workers have started, because forking with threads is unsafe.

    What a worker has started ends with it, however that ends, but for sessions of their own.

    A Watch that is open when the interpreter exits kills its workers, which would be waited for otherwise.

    :param processes: started ones, of a context of :func:`get_context`
    :param seeds: of the workers' environments, for the message
    :param on_failure: called in the watching thread when the workers were killed, to wake who waits for them by other
        means than a pipe
    :param label: what a worker is called in messages
    :param idle_in: which workers wait for a command and do not hang: parts of the line that faulthandler writes for
        the frame that waits, such as a function's name
    :raises InvalidTypeError: a process comes from elsewhere
    :raises InvalidArgumentError: one has not started, or there are too few seeds

    :ivar failure: the first one; None while there is none
    :ivar is_closing: whether the workers are expected to end
    :ivar owner: number of the process that made it
    """

    @defer_signals
    def __init__(
        self,
        processes: Sequence[BaseProcess],
        *,
        seeds: Sequence[int] | None = None,
        on_failure: Callable[[], None] | None = None,
        label: str = "worker",
        idle_in: Sequence[str] = ("/multiprocessing/connection.py",),
    ) -> None:
        self.failure: Failure | None = None
        self._workers = [_require_started_worker(process) for process in processes]
        if seeds is not None and len(seeds) != len(processes):
            raise InvalidArgumentError(
                f"there are {len(seeds)} seeds for {len(processes)} processes; write one for each, or seeds=None"
            )
        self._seeds, self._on_failure, self._label, self._idle_in = seeds, on_failure, label, tuple(idle_in)
        self._current_operation: _Operation | None = None
        self.is_closing = self._killing = self._stopping = False
        self.owner = os.getpid()
        self._workers_ended = threading.Event()
        self._exit_finalizer = util.Finalize(None, self._end_at_exit, exitpriority=_EXIT_PRIORITY)
        self._thread = threading.Thread(target=self._watch, name="rl_ext_core-watch", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._exit_finalizer.cancel()
            raise

    def operation(self, name: str, timeout: float | None = None) -> _Operation:
        """Say what the main thread waits for, in a ``with`` statement around the call that waits.

        When the body raises and a worker has failed, that is raised instead; when one had failed before, the body is
        not begun. ``KeyboardInterrupt`` and its like pass. Within another operation it does nothing.

        :param name: of the operation, for the message: "step"
        :param timeout: seconds after which the workers are asked where they are, and killed
        :return: the context manager
        :raises WorkerError: a worker has failed
        """
        return _Operation(self, name, timeout)

    def expect_exit(self) -> None:
        """Expect the workers to end from now on, with exit code 0."""
        self.is_closing = True

    @property
    def is_owner(self) -> bool:
        """Whether it was made by this process, and not by one that this was forked from."""
        return os.getpid() == self.owner

    def kill(self) -> None:
        """End the workers that live; nothing is a failure any more.

        They may close what they have registered by :func:`~rl_ext_core.processes.on_abnormal_exit`, for three seconds; then they
        are killed, with all that they have started. Ctrl-C ends the waiting for that, not the killing.
        """
        if not self.is_owner or threading.current_thread() is self._thread:
            return
        self.is_closing = self._killing = self._stopping = True
        self._thread.join()
        self._end_workers()  # where the thread had ended before

    def stop(self) -> None:
        """End the thread; the workers that live go on, unwatched."""
        if not self.is_owner:
            return
        self._stopping = True
        # on_failure may be at work there, or may have called this.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._exit_finalizer.cancel()

    def _end_at_exit(self) -> None:
        self.kill()
        # Later, when objects are deleted, the thread does not run any more and cannot be joined.
        self.stop()

    def _watch(self) -> None:
        try:
            waiting = self._wait_for_deaths()
            if self._killing:
                self._end_workers()
            _kill_groups(worker for worker in waiting.values() if worker.exitcode is not None)
        finally:
            self._workers_ended.set()

    def _wait_for_deaths(self) -> dict[int, Worker]:
        """Wait for all deaths up to the first failure, and return the workers that were alive then."""
        waiting = dict(enumerate(self._workers))
        while waiting and not self._stopping and self.failure is None:
            # Windows waits for 63 at most: the clock tells when to look at the others.
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
        unexpected = {number: worker for number, worker in dead.items() if not self._ended_normally(worker)}
        if not unexpected:
            return
        kill_workers([*unexpected.values()])
        number = min(unexpected, key=lambda number: (*_rank(unexpected[number]), number))
        popen = unexpected[number].popen
        self._set_failure(self._failed_worker(number).describe_exit(popen.returncode, popen.unknown_reason))

    def _ended_normally(self, worker: Worker) -> bool:
        # One whose exit code is unknown may have ended well.
        return self.is_closing and (worker.exitcode == 0 or bool(worker.popen.unknown_reason))

    def _check_time_limit(self) -> None:
        operation = self._current_operation
        if operation is None or operation.deadline is None or time.monotonic() < operation.deadline:
            return
        stacks = self._request_stacks()
        if self._current_operation is not operation or not stacks:
            return  # it was late, and has ended meanwhile
        busy = [worker for worker, stack in stacks.items() if not is_idle(stack, self._idle_in)]
        worker, *others = busy or stacks
        seconds = operation.timeout or 0.0
        self._set_failure(
            self._failed_worker(worker).describe_timeout(seconds, stacks[worker], others if busy else None)
        )

    def _request_stacks(self) -> dict[int, str]:
        """Have the workers write where they are, and read it when all have done so or some will not."""
        sizes = {number: worker.report.size() for number, worker in enumerate(self._workers) if _is_alive(worker)}
        if not hasattr(signal, "SIGUSR1"):
            return dict.fromkeys(sizes, "")
        # One that has only just been launched would die of the signal.
        asked = [number for number in sizes if self._workers[number].report.progress > Progress.LAUNCHED]
        for number in asked:
            self._workers[number].send_signal(signal.SIGUSR1)
        end = time.monotonic() + _STACKS_S
        while time.monotonic() < end and any(self._workers[number].report.size() <= sizes[number] for number in asked):
            time.sleep(_TICK_S)
        time.sleep(_WRITING_S)
        return {number: self._workers[number].report.text(since) for number, since in sizes.items()}

    def _set_failure(self, failure: Failure) -> None:
        self.failure = failure
        self._end_workers()
        self._workers_ended.set()
        if self._on_failure is not None:
            try:
                self._on_failure()
            except Exception:
                _log.exception("on_failure of the watch over %ss raised", self._label)

    def _end_workers(self) -> None:
        """Let the workers that live close what they have, then kill them and what is left of them."""
        living = [worker for worker in self._workers if _is_alive(worker)]
        if not living:
            return
        asked = [worker for worker in living if worker.report.request_end()] if END_SIGNAL is not None else []
        for worker in asked:
            worker.send_signal(END_SIGNAL)
        _wait_until_ended(asked, CLOSE_S)
        kill_workers(living)
        _wait_until_ended(living, _REAP_S)

    def _failed_worker(self, number: int) -> FailedWorker:
        operation = self._current_operation
        seed = None if self._seeds is None else int(self._seeds[number])
        phase, report = operation.name if operation else None, self._workers[number].report
        return FailedWorker(number, len(self._workers), self._label, seed, phase, report)

    def _raise_if_failed(self, error: Exception) -> None:
        if isinstance(error, WorkerError):
            return
        if self.failure is None and (isinstance(error, _PIPE_ERRORS) or any(map(self._is_failing, self._workers))):
            self._workers_ended.wait(_REPORT_TIMEOUT_S)
        self._raise_failure()

    def _is_failing(self, worker: Worker) -> bool:
        return worker.report.has_raised or (worker.exitcode is not None and not self._ended_normally(worker))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            # Whoever catches the error finds no worker alive.
            self._workers_ended.wait()
            raise self.failure.error() from self.failure.exception


class _Operation:
    __slots__ = ("_watch", "deadline", "name", "timeout")

    def __init__(self, watch: Watch, name: str, timeout: float | None) -> None:
        self._watch = watch
        self.name = name
        self.timeout = timeout
        self.deadline: float | None = None

    def __enter__(self) -> None:
        watch = self._watch
        if watch.failure is not None:
            watch._raise_failure()
        if watch._current_operation is None:
            if self.timeout is not None:
                self.deadline = time.monotonic() + self.timeout
            watch._current_operation = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        watch = self._watch
        if watch._current_operation is not self:
            return
        try:
            if isinstance(error, Exception):
                watch._raise_if_failed(error)
        finally:
            watch._current_operation = None


def _require_started_worker(process: BaseProcess) -> Worker:
    if not isinstance(process, Worker):
        raise InvalidTypeError(
            f"{process!r} does not report; expected a worker of this package. Make it by "
            "rl_ext_core.processes.get_context().Process(target=...)"
        )
    if process.popen is None:
        raise InvalidArgumentError(f"{process!r} has not started; call its start() before Watch(...)")
    return process


def _rank(worker: Worker) -> tuple[int, float]:
    """Order deaths that are found together: a crash is not a consequence, being terminated usually is."""
    exception_record = worker.report.exception_record
    if exception_record is not None:
        return 1, exception_record.time
    return (2 if worker.exitcode in (0, -signal.SIGTERM) else 0), 0.0


def _kill_groups(dead: Iterable[Worker]) -> None:
    """Kill what workers have left that have ended in order."""
    for worker in dead:
        kill_group(worker.pid or 0)


def _is_alive(worker: Worker) -> bool:
    # Asking drops a process that has ended from multiprocessing's list as well.
    try:
        return worker.is_alive()
    except ValueError:  # closed, and so dead
        return False


def _wait_until_ended(workers: Sequence[Worker], seconds: float) -> None:
    """Wait for workers to end."""
    end = time.monotonic() + seconds
    while any(map(_is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.002)
