"""Workers that step environments, seen from the parent: start, commands, failures, restarts."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_ext_core import processes
from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import _messages
from rl_ext_core.vector._failures import described
from rl_ext_core.vector._launcher import Launcher
from rl_ext_core.vector._layout import Layout, Memory, Progress, common_spaces
from rl_ext_core.vector._rounds import call_in_rounds, shares
from rl_ext_core.vector._seat import Seat
from rl_ext_core.vector._worker import IDLE_IN

if TYPE_CHECKING:
    import numpy as np

    from rl_ext_core.factory import EnvFactory

__all__ = ["Pool"]

_CLOSE_SECONDS = 5.0
# What a worker does when its environments are closed: exit handlers, and what it has printed goes out.
_EXIT_SECONDS = 0.5
# How long the death of a worker may take to reach the thread that watches it.
_PATIENCE_SECONDS = 1.0


class Pool:
    """Processes that hold environments and share one block of memory with this one.

    :param factories: build the environments, one each
    :param num_workers: how many processes share them, in order and as evenly as that goes
    :param start_method: of the processes
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until workers must have answered any later command
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
        apart: bool = False,
        cure: str | None = None,
    ) -> None:
        self._start_timeout, self._step_timeout, self._apart = start_timeout, step_timeout, apart
        self.seats = [Seat(number, *ends) for number, ends in enumerate(shares(len(factories), num_workers))]
        self.of_env = [seat for seat in self.seats for _ in range(seat.first, seat.last)]
        self.seeds: list[int | None] = [None] * len(self.of_env)
        self._watch: processes.Watch | None = None
        self._ended = False
        self._failure: WorkerError | None = None
        self._memory = Memory(Progress.size(num_workers))
        self._progress = Progress(self._memory.map(Progress.size(num_workers)), num_workers)
        self._launcher = Launcher(factories, self.seats, self._memory, start_method, cure)
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

    def _launch(self, seats: Sequence[Seat]) -> None:
        self._launcher.launch(seats)
        if self._apart:
            for seat in seats:
                seat.watch = processes.Watch([seat.process], idle_in=(IDLE_IN,))
        else:
            self._watch = processes.Watch([seat.process for seat in seats], idle_in=(IDLE_IN,))

    def send(self, seat: Seat, name: str, data: Any) -> None:
        """Give a worker a command; that it is gone shows where its answer is read."""
        seat.send(_messages.packed(_messages.CALL, (name, data)))

    def step(self) -> None:
        """Have all step with the actions in shared memory."""
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
        if self._watch is not None:
            try:
                with self._watch.operation("", timeout):
                    # The last to be asked is the last to answer: it alone is waited for, where others' turns come.
                    for seat in reversed(self.seats):
                        if seat.owes:
                            seat.read()
            except WorkerError as error:
                raise self._described(self._watch, self.seats) from error.__cause__
        else:
            self._wait_apart([seat for seat in self.seats if seat.owes], timeout)
            for seat in self.seats:
                if failing and isinstance(seat.said, WorkerError):
                    raise seat.said

    def _wait_apart(self, seats: Sequence[Seat], timeout: float | None) -> None:
        if timeout is None:
            for seat in reversed(seats):
                self._read_apart(seat)
            return
        # Each has its own limit, which ends as soon as it answers, however long another takes.
        limits = {seat.replies: (seat, contextlib.ExitStack()) for seat in seats}
        poll = select.poll()
        try:
            for descriptor, (seat, limit) in limits.items():
                assert seat.watch is not None
                poll.register(descriptor, select.POLLIN)
                with contextlib.suppress(WorkerError):  # it has failed before: that is told where its answer is read
                    limit.enter_context(seat.watch.operation("", timeout))
            while limits:
                for descriptor, _ in poll.poll():
                    seat, limit = limits.pop(descriptor)
                    limit.close()
                    poll.unregister(descriptor)
                    self._read_apart(seat)
        finally:
            for _, limit in limits.values():
                limit.close()

    def _read_apart(self, seat: Seat) -> None:
        try:
            seat.read()
        except (EOFError, OSError):
            watch = seat.watch
            assert watch is not None
            end = time.monotonic() + _PATIENCE_SECONDS
            while watch.failure is None and time.monotonic() < end:
                time.sleep(0.001)
            if watch.failure is None:
                raise
            error = self._described(watch, [seat])
            error.__cause__ = watch.failure.exception
            seat.said, seat.owes = error, False

    def _described(self, watch: processes.Watch, watched: Sequence[Seat]) -> WorkerError:
        assert watch.failure is not None
        return described(watch.failure, watched, self._progress, self.seeds)

    def settle(self) -> None:
        """Get ready for a command: drop answers that were not read because the reading was interrupted.

        :raises WorkerError: the workers were ended because of it
        """
        if self._failure is not None:
            raise self._failure
        for seat in self.seats:
            if seat.owes:
                return self.wait_for_step()

    def restart(self, seat: Seat) -> None:
        """Put a new worker in the place of one that has failed.

        :raises WorkerError: it fails while it builds its environments
        """
        assert seat.watch is not None
        seat.watch.kill()
        seat.watch.stop()
        seat.attempt += 1
        self._progress.write(seat.number, 0, 0)
        self._launch([seat])
        self._wait_for(seat, self._start_timeout)
        self.send(seat, "map", self.layout)
        self._wait_for(seat, self._start_timeout)

    def reset(self, seat: Seat, asked: Sequence[tuple[int | None, dict[str, Any]]]) -> None:
        """Have a worker's environments reset, each with a seed and options."""
        self.seeds[seat.first : seat.last] = [seed for seed, _ in asked]
        self.send(seat, "reset", asked)

    def reset_alone(self, seat: Seat) -> Any:
        """Have the environments of a worker reset that was started anew, and wait for it.

        :return: their informations
        :raises WorkerError: it fails
        """
        self.reset(seat, [(None, {})] * (seat.last - seat.first))
        self._wait_for(seat, self._step_timeout)
        return seat.said

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
        """Have the environments closed, and end the workers.

        :raises WorkerError: one of them fails in ``close``; all workers are gone all the same
        """
        try:
            if not self._ended and not any(seat.torn for seat in self.seats):
                self._close_environments(min(self._step_timeout or _CLOSE_SECONDS, _CLOSE_SECONDS))
        except WorkerError as error:
            # What has happened before concerns nobody any more.
            if error.phase == "close":
                raise
        finally:
            self.end()

    def _close_environments(self, limit: float) -> None:
        self.wait(limit)
        for watch in self._watches():
            watch.closing()
        for seat in self.seats:
            self.send(seat, "close", None)
        self.wait(limit)
        end = time.monotonic() + _EXIT_SECONDS
        for seat in self.seats:
            seat.process.join(max(0.0, end - time.monotonic()))
        for seat in self.seats:
            if isinstance(seat.said, WorkerError) and seat.said.phase == "close":
                raise seat.said

    def end(self, failure: WorkerError | None = None) -> None:
        """End the workers without further ado, and give everything back.

        :param failure: why: raised by whatever is called later
        """
        self._ended, self._failure = True, failure
        for watch in self._watches():
            watch.kill()
            watch.stop()
        for seat in self.seats:
            seat.give_up()
        self._memory.close()
        self._launcher.close()

    def _watches(self) -> list[processes.Watch]:
        watches = [self._watch, *(seat.watch for seat in self.seats)]
        return [watch for watch in watches if watch is not None]
