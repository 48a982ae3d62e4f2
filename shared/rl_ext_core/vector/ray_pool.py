"""Workers that are Ray actors, on this machine or others: the counterpart of :class:`~rl_ext_core.vector.pool.Pool`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_ext_core.errors import WorkerError, missing_dependency
from rl_ext_core.factory import _byvalue
from rl_ext_core.vector import _messages
from rl_ext_core.vector._actor import Actor, ActorFailure
from rl_ext_core.vector._failures import failed, failed_to_close, warn_of_late
from rl_ext_core.vector._layout import Layout, Progress, common_spaces
from rl_ext_core.vector._rounds import call_in_rounds, shares
from rl_ext_core.vector._worker import PHASES
from rl_ext_core.vector.pool import INTERRUPTED_SECONDS

if TYPE_CHECKING:
    import numpy as np

    from rl_ext_core.factory import EnvFactory

__all__ = ["RayPool"]

_PHASES_OF = {"build": "constructor", "map": "start"}


class _Seat:
    """One actor.

    :ivar said: its last answer
    """

    def __init__(self, number: int, first: int, last: int, actor: Any) -> None:
        self.number, self.first, self.last, self.actor = number, first, last, actor
        self.pending: Any = None
        self.at = ""
        self.said: Any = None

    def ask(self, method: str, *arguments: Any, at: str = "") -> None:
        self.at = at or (arguments[0] if method == "do" else method)
        self.pending = getattr(self.actor, method).remote(*arguments)


class RayPool:
    """Actors that hold environments.

    :param factories: build the environments, one each
    :param num_workers: how many actors share them, in order and as evenly as that goes
    :param actor_options: of each actor, as ``ray.remote`` takes them
    :param start_timeout: seconds until all environments must be built
    :param step_timeout: seconds until actors must have answered any later command
    :param close_timeout: seconds until they must have closed their environments
    :raises MissingDependencyError: Ray is not installed
    :raises WorkerError: an environment cannot be built
    :raises EnvironmentOutputError: their spaces differ
    :raises InvalidArgumentError: their observations are not arrays of fixed shape

    :ivar seats: the actors
    :ivar of_env: the seat of each environment
    :ivar spaces: observation and action space
    :ivar layout: of the arrays
    :ivar arrays: what the actors have answered last, and the next actions
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory[Any]],
        *,
        num_workers: int,
        actor_options: Mapping[str, Any],
        start_timeout: float | None = None,
        step_timeout: float | None = None,
        close_timeout: float | None = None,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise missing_dependency("ray", "ray", "RayVecEnv") from None
        self._ray, self._step_timeout, self._close_timeout = ray, step_timeout, close_timeout
        self._failure: WorkerError | None = None
        self._ended = self._interrupted = False
        new = ray.remote(Actor).options(**actor_options).remote
        self.seats = [_Seat(number, *ends, new()) for number, ends in enumerate(shares(len(factories), num_workers))]
        self.of_env = [seat for seat in self.seats for _ in range(seat.first, seat.last)]
        self.seeds: list[int | None] = [None] * len(factories)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        try:
            self._start(factories, start_timeout)
        except BaseException:
            self.end()
            raise

    def _start(self, factories: Sequence[EnvFactory[Any]], timeout: float | None) -> None:
        for seat in self.seats:
            seat.ask("build", list(factories[seat.first : seat.last]))
        self.wait(timeout)
        self.spaces = common_spaces([spaces for seat in self.seats for spaces in seat.said])
        self.layout = Layout.of(len(self.of_env), *self.spaces, after=0)
        self.arrays = self.layout.arrays(bytearray(self.layout.size))
        for seat in self.seats:
            seat.ask("map", Layout.of(seat.last - seat.first, *self.spaces, after=Progress.size(1)))
        self.wait(timeout)

    def step(self) -> None:
        """Have all step with the actions in the arrays."""
        actions = self.arrays["action"]
        for seat in self.seats:
            seat.ask("do", "step", actions[seat.first : seat.last])

    def send(self, seat: Any, name: str, data: Any) -> None:
        """Give an actor a command."""
        seat.ask("told", _byvalue.dumps((name, data), message=True), at=name)

    def reset(self, seat: Any, asked: Sequence[tuple[int | None, dict[str, Any]]]) -> None:
        """Have an actor's environments reset, each with a seed and options."""
        self.seeds[seat.first : seat.last] = [seed for seed, _ in asked]
        seat.ask("do", "reset", list(asked))

    def wait_for_step(self) -> None:
        """Wait for all answers that actors owe, as long as a step may take."""
        self.wait(self._step_timeout)

    wait_for_answers = wait_for_step

    def wait(self, timeout: float | None) -> None:
        """Wait for all answers that actors owe.

        :param timeout: seconds; None: forever
        :raises WorkerError: an actor has failed; all are gone then
        """
        asked = [seat for seat in self.seats if seat.pending is not None]
        try:
            # It raises as soon as one has failed, however long others take.
            answers = self._ray.get([seat.pending for seat in asked], timeout=timeout)
        except (self._ray.exceptions.RayError, ActorFailure) as error:
            failure, cause = self._described(asked, error, timeout)
            self.end(failure)
            raise failure from cause
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        for seat, (kind, data, arrays) in zip(asked, answers, strict=True):
            for name, array in arrays.items():
                self.arrays[name][seat.first : seat.last] = array
            # Not awaited any more once it was understood: Ctrl-C may come in between.
            seat.said = _messages.answer(kind, data)
            seat.pending = None

    def _described(
        self, asked: Sequence[_Seat], error: Exception, timeout: float | None
    ) -> tuple[WorkerError, BaseException | None]:
        ray = self._ray
        if isinstance(error, ray.exceptions.GetTimeoutError):
            done = set(ray.wait([seat.pending for seat in asked], num_returns=len(asked), timeout=0)[0])
            seat = next((seat for seat in asked if seat.pending not in done), asked[0])
            return self._failed(seat, seat.first, seat.at, f"did not answer within {timeout:g} s", kind="timeout"), None
        seat = next(seat for seat in asked if _has_failed(ray, seat))
        raised = getattr(error, "cause", error)
        if not isinstance(raised, ActorFailure):
            which = "" if seat.last - seat.first == 1 else f", with environments {seat.first} to {seat.last - 1},"
            what = f"its actor{which} has died: {error}"
            return self._failed(seat, seat.first, seat.at, what, kind="exit"), None
        number, phase, message = raised.args
        found = _messages.answer(_messages.RAISED, message).error
        text = str(found.__cause__.args[0])
        what = f"raised {found!r}:"
        failure = self._failed(seat, seat.first + number, PHASES[phase], what, kind="exception", traceback=text)
        return failure, found

    def _failed(self, seat: _Seat, environment: int, at: str, what: str, *, kind: str, traceback: str = "") -> Any:
        phase = _PHASES_OF.get(at, at)
        return failed(environment, phase, what, self.seeds, worker=seat.number, kind=kind, traceback=traceback)

    def settle(self) -> None:
        """Get ready for a command: drop answers that were not read because the reading was interrupted.

        :raises WorkerError: the actors were ended because of it
        """
        self.raise_failure()
        if any(seat.pending is not None for seat in self.seats):
            self.wait_for_step()
        self._interrupted = False

    def raise_failure(self) -> None:
        """Raise what has ended the actors.

        :raises WorkerError: that
        """
        if self._failure is not None:
            raise self._failure

    def call(self, numbers: Sequence[int], name: str, data: Any) -> list[Any]:
        """Have something done with environments: see :meth:`rl_ext_core.vector.pool.Pool.call`."""
        return call_in_rounds(self, numbers, name, data)

    def close(self) -> None:
        """Have the environments closed, and end the actors.

        :raises WorkerError: one of them fails in ``close``; all actors are gone all the same
        """
        failures: list[WorkerError] = []
        try:
            if not self._ended:
                failures = self._close_environments()
        finally:
            self.end()
        if failures:
            raise failures[0]

    def _close_environments(self) -> list[WorkerError]:
        ray, begin, limit = self._ray, time.monotonic(), self._close_timeout
        if self._interrupted and limit is None:
            limit = INTERRUPTED_SECONDS
        for seat in self.seats:
            seat.ask("do", "close", None)  # when it has done what it is at
        ready = set(ray.wait([seat.pending for seat in self.seats], num_returns=len(self.seats), timeout=limit)[0])
        failures = []
        for seat in self.seats:
            if seat.pending in ready:
                try:
                    kind, data, _ = ray.get(seat.pending)
                    seat.said = _messages.answer(kind, data)
                    found = failed_to_close(seat, self.seeds)
                except (ray.exceptions.RayError, ActorFailure) as error:
                    found, cause = self._described([seat], error, limit)
                    found.__cause__ = cause
                # What has happened before concerns nobody any more.
                failures += [found] if found is not None and found.phase == "close" else []
        late = [seat for seat in self.seats if seat.pending not in ready]
        if late:
            warn_of_late(late[0].first, len(self.of_env), "in close", time.monotonic() - begin)
        return failures

    def end(self, failure: WorkerError | None = None) -> None:
        """End the actors without further ado; done again if it was interrupted.

        :param failure: why: raised by whatever is called later
        """
        self._ended, self._failure = True, self._failure or failure
        for seat in self.seats:
            # Ray may have been shut down before.
            with contextlib.suppress(self._ray.exceptions.RaySystemError, ValueError):
                self._ray.kill(seat.actor)


def _has_failed(ray: Any, seat: _Seat) -> bool:
    try:
        ray.get(seat.pending, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return False
    except (ray.exceptions.RayError, ActorFailure):
        return True
    return False
