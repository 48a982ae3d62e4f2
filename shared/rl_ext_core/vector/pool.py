"""Workers that step environments, seen from the parent: start, commands, failures, restarts."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rl_ext_core import processes
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core.errors import WorkerError
from rl_ext_core.factory import _byvalue
from rl_ext_core.vector import _messages
from rl_ext_core.vector._failures import described, failed_to_close, warn_of_late
from rl_ext_core.vector._launcher import Launcher
from rl_ext_core.vector._layout import Layout, Memory, Progress, common_spaces
from rl_ext_core.vector._rounds import call_in_rounds, shares
from rl_ext_core.vector._seat import Seat
from rl_ext_core.vector._worker import IDLE_IN, PHASES

if TYPE_CHECKING:
    import numpy as np

    from rl_ext_core.factory import EnvFactory

__all__ = ["INTERRUPTED_SECONDS", "Pool"]

# How long a step that was interrupted may go on before its environment is closed.
INTERRUPTED_SECONDS = 5.0


class Pool:
    """Processes that hold environments and share one block of memory with this one.

    :param factories: build the environments, one each
    :param num_workers: how many processes share them, in order and as evenly as that goes
    :param start_method: of the processes
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until workers must have answered any later command
    :param close_timeout: seconds until workers must have closed their environments and ended
    :param apart: whether a worker's failure leaves the others alive
    :param cure: what keeps workers from disturbing each other, see :func:`rl_ext_core.isolation.apply_cure`
    :raises WorkerError: an environment cannot be built
    :raises EnvironmentOutputError: their spaces differ
    :raises InvalidArgumentError: their observations are not arrays of fixed shape

    :ivar seats: the workers; their answers are there after :meth:`wait`
    :ivar of_env: the seat of each environment
    :ivar seeds: of each environment's last reset
    :ivar spaces: observation and action space
    :ivar layout: of the shared memory
    :ivar arrays: that lie in it
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory[Any]],
        *,
        num_workers: int,
        start_method: str | None = None,
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        close_timeout: float | None = None,
        apart: bool = False,
        cure: str | None = None,
    ) -> None:
        self._start_timeout, self._step_timeout, self._apart = start_timeout, step_timeout, apart
        self._close_timeout = close_timeout
        self.seats = [Seat(number, *ends) for number, ends in enumerate(shares(len(factories), num_workers))]
        self._last_first = self.seats[::-1]
        self.of_env = [seat for seat in self.seats for _ in range(seat.first, seat.last)]
        self.seeds: list[int | None] = [None] * len(self.of_env)
        self._failure: WorkerError | None = None
        # Until all answers to what was begun were read; Ctrl-C leaves it so.
        self._unsettled = self._interrupted = False
        self._memory = Memory(Progress.size(num_workers))
        self._progress = Progress(self._memory.map(Progress.size(num_workers)), num_workers)
        self._launcher = Launcher(factories, self.seats, self._memory, self._progress, start_method, cure)
        # Not by a method: whoever drops this object ends the workers.
        self._end = weakref.finalize(self, _end, self.seats, self._memory, self._launcher)
        self._end.atexit = False
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.layout: Layout
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self._launch(self.seats)
        self.wait(self._start_timeout, failing=True)
        self.spaces = common_spaces([spaces for seat in self.seats for spaces in seat.said])
        self.layout = Layout.of(len(self.of_env), *self.spaces, after=Progress.size(len(self.seats)))
        self._memory.grow(self.layout.size)
        self.arrays = self.layout.arrays(self._memory.map(self.layout.size))
        for seat in self.seats:
            self.send(seat, "map", self.layout)
        self.wait(self._start_timeout, failing=True)

    @uninterrupted
    def _launch(self, seats: Sequence[Seat]) -> None:
        self._launcher.launch(seats)
        for together in [[seat] for seat in seats] if self._apart else [seats]:
            watch = processes.Watch(
                [seat.process for seat in together],
                idle_in=(IDLE_IN,),
                on_failure=functools.partial(_wake, together),
            )
            for seat in together:
                seat.watch = watch

    def send(self, seat: Seat, name: str, data: Any) -> None:
        """Give a worker a command; that it is gone shows where its answer is read.

        :raises Exception: the data cannot be pickled
        """
        self._unsettled = True
        # Actions are plain, and sent in every step.
        seat.send(_messages.packed((name, data)) if name == "step" else _byvalue.dumps((name, data), message=True))

    def step(self) -> None:
        """Have all step with the actions in shared memory."""
        self._unsettled = True
        for seat in self.seats:
            seat.step()

    def wait_for_step(self) -> None:
        """Wait for all answers that workers owe, as long as a step may take: see :meth:`wait`."""
        self.wait(self._step_timeout)

    def wait_for_answers(self) -> None:
        """Wait likewise, and raise what is no answer."""
        self.wait(self._step_timeout, failing=True)

    def wait(self, timeout: float | None, *, failing: bool = False) -> None:
        """Wait for all answers that workers owe.

        Where workers fail apart from each other, the answer of one that has failed is a :class:`WorkerError`.

        :param timeout: seconds; None: forever
        :param failing: raise such an answer
        :raises WorkerError: a worker has failed
        """
        try:
            if self._apart:
                self._wait_apart([seat for seat in self.seats if seat.owes], timeout)
            else:
                self._wait_together(timeout)
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        self._unsettled = False
        for seat in self.seats if failing else ():
            if isinstance(seat.said, WorkerError):
                raise seat.said

    def _wait_together(self, timeout: float | None) -> None:
        watch = self.seats[0].watch
        try:
            if timeout is None or watch is None:
                # The last to be asked is the last to answer: it alone is waited for, where others' turns come.
                for seat in self._last_first:
                    seat.read()
            else:
                with watch.operation("", timeout):
                    for seat in self._last_first:
                        seat.read()
        except (EOFError, WorkerError):
            if watch is None or watch.failure is None:
                raise
            error = self._described(watch, self.seats)
            self.end(error)
            raise error from error.__cause__

    def _wait_apart(self, seats: Sequence[Seat], timeout: float | None) -> None:
        if timeout is None:
            for seat in reversed(seats):
                self._read_apart(seat)
            return
        # Each has its own limit, which ends as soon as it answers, however long another takes.
        limits = {seat.replies: (seat, contextlib.ExitStack()) for seat in seats if not seat.is_over()}
        poll = select.poll()
        try:
            for descriptor, (seat, limit) in limits.items():
                assert seat.watch is not None
                poll.register(descriptor, select.POLLIN)
                with contextlib.suppress(WorkerError):  # it has failed just now: that is told where its answer is read
                    limit.enter_context(seat.watch.operation("", timeout))
            while limits:
                for descriptor, _ in poll.poll():
                    seat, limit = limits[descriptor]
                    if not seat.is_over():
                        os.read(descriptor, 4096)  # of before; the answer's own may be among it
                    if seat.is_over():
                        del limits[descriptor]
                        poll.unregister(descriptor)
                        limit.close()
        finally:
            for _, limit in limits.values():
                limit.close()
        for seat in seats:
            self._read_apart(seat)

    def _read_apart(self, seat: Seat) -> None:
        try:
            seat.read()
        except EOFError:
            watch = seat.watch
            if watch is not None and watch.failure is None:
                raise
            seat.said = seat.lost if watch is None else self._described(watch, [seat])
            seat.forgive()

    def _described(self, watch: processes.Watch, watched: Sequence[Seat]) -> WorkerError:
        assert watch.failure is not None
        with contextlib.suppress(WorkerError), watch.operation(""):
            pass  # waits until the workers are gone
        error = described(watch.failure, watched, self._progress, self.seeds)
        error.__cause__ = watch.failure.exception
        return error

    def settle(self) -> None:
        """Get ready for a command: drop answers that were not read because the reading was interrupted.

        :raises WorkerError: the workers were ended because of it
        """
        self.raise_failure()
        if self._unsettled:
            self._settle()

    def raise_failure(self) -> None:
        """Raise what has ended the workers.

        :raises WorkerError: that
        """
        if self._failure is not None:
            raise self._failure

    def _settle(self) -> None:
        for seat in self.seats:
            if seat.lost is not None:
                self._end_worker(seat)
            else:
                seat.settle()
        self.wait_for_step()
        self._interrupted = False

    def _end_worker(self, seat: Seat) -> None:
        if seat.watch is not None:
            seat.watch.kill()
            seat.watch.stop()
        seat.watch = None
        seat.give_up()

    def restart(self, seat: Seat, failure: WorkerError) -> Any:
        """Put a new worker in the place of one that has failed, and have its environments reset.

        :return: the informations of the resets
        :raises WorkerError: it fails in that
        """
        seat.lost, self._unsettled = failure, True
        self._end_worker(seat)
        seat.attempt += 1
        self._launch([seat])
        self._wait_for(seat, self._start_timeout)
        self.send(seat, "map", self.layout)
        self._wait_for(seat, self._start_timeout)
        self.reset(seat, [(None, {})] * (seat.last - seat.first))
        self._wait_for(seat, self._step_timeout)
        return seat.said

    def replaced(self, seat: Seat, answer: Any) -> None:
        """Take this for the answer of a worker that was restarted: all is well again."""
        seat.said, seat.lost = answer, None

    def reset(self, seat: Seat, asked: Sequence[tuple[int | None, dict[str, Any]]]) -> None:
        """Have a worker's environments reset, each with a seed and options."""
        self.seeds[seat.first : seat.last] = [seed for seed, _ in asked]
        self.send(seat, "reset", asked)

    def _wait_for(self, seat: Seat, timeout: float | None) -> None:
        self._wait_apart([seat], timeout)
        if isinstance(seat.said, WorkerError):
            raise seat.said

    def call(self, numbers: Sequence[int], name: str, data: Any) -> list[Any]:
        """Have something done with environments: see :func:`rl_ext_core.vector._calls.call`.

        :param numbers: of the environments
        :raises Exception: what an environment raised, when all have answered; it lives on
        :raises WorkerError: a worker has failed
        """
        return call_in_rounds(self, numbers, name, data)

    def close(self) -> None:
        """Have the environments closed, and end the workers. Ctrl-C makes that short.

        :raises WorkerError: one of them fails in ``close``; all workers are gone all the same
        """
        failures: list[WorkerError] = []
        try:
            if self._failure is None and self._end.alive:
                failures = self._close_environments()
        finally:
            self.end()
        if failures:
            raise failures[0]

    def _close_environments(self) -> list[WorkerError]:
        begin, limit = time.monotonic(), self._close_timeout
        for seat in self.seats:
            if seat.watch is not None:
                seat.watch.closing()
            seat.settle()
        # Nobody knows whether what was interrupted would ever have ended.
        patience = INTERRUPTED_SECONDS if self._interrupted and limit is None else limit
        late = _wait_while(self.seats, Seat.is_busy, begin, patience)
        for seat in self.seats:
            if seat.is_there() and seat not in late:
                seat.forgive()
                self.send(seat, "close", None)
        late += _wait_while([seat for seat in self.seats if seat not in late], Seat.is_busy, begin, limit)
        failures = [found for seat in self.seats if seat.is_over() and (found := self._failure_to_close(seat))]
        late += _wait_while([seat for seat in self.seats if seat not in late], Seat.lives, begin, limit)
        if late:
            number, at = self._progress.read(late[0].number)
            where = "in threads that go on after its close" if PHASES[at] == "idle" else f"in {PHASES[at]}"
            warn_of_late(late[0].first + number, len(self.of_env), where, time.monotonic() - begin)
        return failures

    def _failure_to_close(self, seat: Seat) -> WorkerError | None:
        """Give what an environment has failed of in ``close``; what has happened before concerns nobody any more."""
        if seat.watch is None or not seat.owes:
            return None
        if seat.watch.failure is None:
            seat.read()
            return failed_to_close(seat, self.seeds)
        error = self._described(seat.watch, [seat] if self._apart else self.seats)
        return error if error.phase == "close" else None

    def end(self, failure: WorkerError | None = None) -> None:
        """End the workers without further ado, and give everything back.

        :param failure: why: raised by whatever is called later
        """
        self._failure = self._failure or failure
        _end(self.seats, self._memory, self._launcher)
        self._end.detach()


def _wait_while(
    seats: Sequence[Seat], condition: Callable[[Seat], bool], begin: float, limit: float | None
) -> list[Seat]:
    """Wait as long as something is true of workers, and give those of which it is still true after a time."""
    pause = 0.0005
    while waiting := [seat for seat in seats if condition(seat)]:
        if limit is not None and time.monotonic() - begin > limit:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return waiting


def _wake(seats: Sequence[Seat]) -> None:
    for seat in seats:
        seat.wake()


def _end(seats: Sequence[Seat], memory: Memory, launcher: Launcher) -> None:
    """End workers; done again if it was interrupted."""
    for watch in {id(seat.watch): seat.watch for seat in seats}.values():
        if watch is not None:
            watch.kill()
            watch.stop()
    for seat in seats:
        seat.give_up()
    memory.close()
    launcher.close()
