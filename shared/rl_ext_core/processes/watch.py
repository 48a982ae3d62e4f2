"""The parent's side: waiting for workers beside the main thread, and saying what they died of."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from types import TracebackType

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, WorkerError
from rl_ext_core.processes.contexts import Worker, WorkerPopen
from rl_ext_core.processes.failures import FailedWorker, Failure, ended, is_idle, main_stack, timed_out
from rl_ext_core.processes.report import Contents, Progress
from rl_ext_core.processes.worker import CLOSE_S, kill_families

__all__ = ["Watch"]

_log = logging.getLogger("rl_ext_core.processes")

# How long the end of a worker may take, once the main thread has seen its pipe closed or its report written: what it
# closes itself, on a busy machine.
_PATIENCE_S = 30.0
# And that of one that was killed: the kernel has to free its memory.
_REAP_S = 10.0
# How long a worker may take to say where it is, and how long it is silent when it has.
_STACKS_S = 3.0
_SILENCE_S = 0.1
_LONGEST_TICK_S = 0.25
# Errors by which a worker's end shows before it is over. Others may be the parent's own, and are not held up.
_OF_PIPES = (EOFError, ConnectionError)
# Before multiprocessing joins its children, which would wait for them forever.
_EXIT_PRIORITY = 100


class Watch:
    """Waits for workers beside the main thread, and raises what they died of where the main thread uses them.

    When one of them ends before :meth:`closing` was called, or with an exit code other than 0 after it, that is the
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
    :ivar owner: number of the process that made it

    >>> import time
    >>> from rl_ext_core.processes import Watch, get_context
    >>> context = get_context("forkserver")
    >>> workers = [context.Process(target=time.sleep, args=(60,)) for _ in range(2)]
    >>> for worker in workers:
    ...     worker.start()
    >>> watch = Watch(workers)
    >>> with watch.operation("a step", timeout=5.0):  # raises a WorkerError if one of them ends in it
    ...     pass
    >>> watch.closing()
    >>> watch.kill()
    >>> watch.stop()
    """

    @uninterrupted
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
        self._popens = [_popen_of(process) for process in processes]
        self._processes = tuple(processes)
        if seeds is not None and len(seeds) != len(processes):
            raise InvalidArgumentError(
                f"there are {len(seeds)} seeds for {len(processes)} processes; write one for each, or seeds=None"
            )
        self._seeds, self._on_failure, self._label, self._idle_in = seeds, on_failure, label, tuple(idle_in)
        self._running: _Operation | None = None
        self._tick: float | None = None
        self._closing = self._killing = self._stopping = False
        self.owner = os.getpid()
        for popen in self._popens:
            popen.report.taken = popen.watched = True
        self._over = threading.Event()
        self._wake_r = self._wake_w = -1
        self._at_exit = util.Finalize(None, self._end_at_exit, exitpriority=_EXIT_PRIORITY)
        handles: dict[int, int] = {}
        self._thread = threading.Thread(target=self._watch, args=(handles,), name="rl_ext_core-watch", daemon=True)
        try:
            for worker, popen in enumerate(self._popens):
                handles[os.dup(popen.sentinel)] = worker  # of its own: a process may be closed meanwhile
            self._wake_r, self._wake_w = os.pipe()
            self._thread.start()
        except BaseException:
            util.close_fds(*handles)  # type: ignore[attr-defined]
            self._close_descriptors()
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

    def closing(self) -> None:
        """Expect the workers to end from now on, with exit code 0."""
        self._closing = True

    @property
    def is_closing(self) -> bool:
        """Whether the workers are expected to end."""
        return self._closing

    @property
    def ours(self) -> bool:
        """Whether it was made by this process, and not by one that this was forked from."""
        return os.getpid() == self.owner

    def kill(self) -> None:
        """End the workers that live; nothing is a failure any more.

        They may close what they have registered by :func:`~rl_ext_core.processes.at_end`, for three seconds; then they
        are killed, with all that they have started. Ctrl-C ends the waiting for that, not the killing.
        """
        if not self.ours or threading.current_thread() is self._thread:
            return
        self._closing = self._killing = self._stopping = True
        self._wake()
        self._thread.join()
        self._end_workers()  # where the thread had ended before

    def stop(self) -> None:
        """End the thread and close the descriptors; the workers that live go on, unwatched."""
        if not self.ours or self._wake_w < 0:
            return
        self._stopping = True
        self._wake()
        # on_failure may be at work there, or may have called this.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._close_descriptors()

    @uninterrupted
    def _close_descriptors(self) -> None:
        self._at_exit.cancel()
        wake_r, wake_w, self._wake_r, self._wake_w = self._wake_r, self._wake_w, -1, -1
        if wake_w >= 0:
            os.close(wake_r)
            os.close(wake_w)
        for popen in self._popens:
            # Nobody is left to say it: it is printed, as multiprocessing would.
            popen.report.taken = popen.returncode is not None

    def _end_at_exit(self) -> None:
        self.kill()
        # Later, when objects are deleted, the thread does not run any more and cannot be joined.
        self.stop()

    def _wake(self) -> None:
        if self._wake_w >= 0:
            os.write(self._wake_w, b"\0")

    def _watch(self, handles: Mapping[int, int]) -> None:
        waiting = dict(handles)
        try:
            while waiting and not self._stopping and self.failure is None:
                ready = connection.wait([*waiting, self._wake_r], self._tick)
                if self._wake_r in ready:
                    os.read(self._wake_r, 1000)
                dead = [waiting.pop(handle) for handle in ready if isinstance(handle, int) and handle in waiting]
                if not self._stopping:
                    self._find_ended(dead)
                    self._find_hanging()
            if self._killing:
                self._end_workers()
        finally:
            for handle in handles:
                os.close(handle)
            self._over.set()

    def _find_ended(self, dead: Sequence[int]) -> None:
        unexpected = [worker for worker in dead if not (self._closing and self._popens[worker].final_exitcode() == 0)]
        if not unexpected:
            return
        # It may have said that all is well, as os._exit(0) does.
        kill_families([], [self._popens[worker].pid for worker in unexpected])
        contents = {worker: self._popens[worker].report.read() for worker in unexpected}
        worker = min(unexpected, key=lambda worker: (*_rank(contents[worker], self._popens[worker]), worker))
        popen = self._popens[worker]
        code = popen.final_exitcode()
        known = None if popen.is_unreported else code
        self._fail(ended(self._describe(worker), contents[worker], known, server_end=popen.server_end))

    def _find_hanging(self) -> None:
        operation = self._running
        if operation is None or operation.deadline is None or time.monotonic() < operation.deadline:
            return
        stacks = self._ask_for_stacks()
        if self._running is not operation or not stacks:
            return  # it was late, and has ended meanwhile
        busy = [worker for worker, stack in stacks.items() if not is_idle(main_stack(stack), self._idle_in)]
        worker, *others = busy or stacks
        failed, contents = self._describe(worker), self._popens[worker].report.read()
        seconds = operation.timeout or 0.0
        self._fail(timed_out(failed, contents, seconds, stacks[worker], others if busy else None))

    def _ask_for_stacks(self) -> dict[int, str]:
        """Have the workers write where they are, and read it when all have done so or some will not."""
        sizes = {}
        asked = []
        for worker, popen in enumerate(self._popens):
            if popen.poll() is None:
                sizes[worker] = popen.report.size()
                # One that has only just been launched would die of the signal.
                if popen.report.read().progress > Progress.LAUNCHED:
                    popen._send_signal(signal.SIGUSR1)
                    asked.append(worker)
        before: dict[int, int] = {}
        end = time.monotonic() + _STACKS_S
        while time.monotonic() < end:
            time.sleep(_SILENCE_S)
            now = {worker: self._popens[worker].report.size() for worker in asked}
            if now == before and all(size > sizes[worker] for worker, size in now.items()):
                break
            before = now
        return {worker: self._popens[worker].report.text_since(since) for worker, since in sizes.items()}

    def _fail(self, failure: Failure) -> None:
        self.failure = failure
        self._end_workers()
        self._over.set()
        if self._on_failure is not None:
            try:
                self._on_failure()
            except Exception:
                _log.exception("on_failure of the watch over %ss raised", self._label)

    def _end_workers(self) -> None:
        """Let the workers that live close what they have, then kill them and what is left of them."""
        both = zip(self._processes, self._popens, strict=True)
        living = {process: popen for process, popen in both if _is_alive(process)}
        if not living:
            return
        _wait_for([process for process, popen in living.items() if popen.ask_to_end()], CLOSE_S)
        left = [popen.pid for process, popen in living.items() if _is_alive(process)]
        kill_families(left, [popen.pid for popen in living.values()])
        _wait_for([*living], _REAP_S)

    def _describe(self, worker: int) -> FailedWorker:
        operation = self._running
        seed = None if self._seeds is None else int(self._seeds[worker])
        return FailedWorker(worker, len(self._popens), self._label, seed, operation.name if operation else None)

    def _expect_within(self, timeout: float) -> None:
        """Look at the clock often enough for a time limit; costs something the first time only."""
        tick = min(timeout / 10, _LONGEST_TICK_S)
        if self._tick is None or tick < self._tick:
            self._tick = tick
            self._wake()

    def _explain(self, error: Exception) -> None:
        if isinstance(error, WorkerError):
            return
        if self.failure is None and (isinstance(error, _OF_PIPES) or any(map(self._is_failing, self._popens))):
            self._over.wait(_PATIENCE_S)
        self._raise_failure()

    def _is_failing(self, popen: WorkerPopen) -> bool:
        code = popen.poll()
        over = code is not None and not (self._closing and code == 0)
        return over or popen.report.read().raised is not None

    def _raise_failure(self) -> None:
        if self.failure is not None:
            # Whoever catches the error finds no worker alive.
            self._over.wait()
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
        if watch._running is None:
            if self.timeout is not None:
                self.deadline = time.monotonic() + self.timeout
                watch._expect_within(self.timeout)
            watch._running = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        watch = self._watch
        if watch._running is not self:
            return
        try:
            if isinstance(error, Exception):
                watch._explain(error)
        finally:
            watch._running = None


def _popen_of(process: BaseProcess) -> WorkerPopen:
    if not isinstance(process, Worker):
        raise InvalidTypeError(
            f"{process!r} is no worker of this package: it does not report. Make it by "
            "rl_ext_core.processes.get_context().Process(target=...)"
        )
    if process.popen is None:
        raise InvalidArgumentError(f"{process!r} has not started; call its start() before Watch(...)")
    return process.popen


def _rank(contents: Contents, popen: WorkerPopen) -> tuple[int, float]:
    """Order deaths that are found together: crashes are nobody's consequence, being terminated usually is."""
    if contents.raised is not None:
        return 1, contents.raised.time
    return (2 if popen.final_exitcode() in (0, -signal.SIGTERM) else 0), 0.0


def _is_alive(process: BaseProcess) -> bool:
    # Asking drops a process that has ended from multiprocessing's list as well.
    try:
        return process.is_alive()
    except ValueError:  # closed, and so dead
        return False


def _wait_for(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait for processes to end."""
    end = time.monotonic() + seconds
    pause = 0.001
    while [process for process in processes if _is_alive(process)] and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
