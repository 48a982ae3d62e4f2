"""Pool of environments in Ray actors, which may run on several machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import WorkerError, _missing_dependency_error
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.vector import channel
from rl_ext_core.vector.channel import Cell
from rl_ext_core.vector.environments import PoolOptions
from rl_ext_core.vector.memory_layout import MemoryLayout
from rl_ext_core.vector.pool import Pool
from rl_ext_core.vector.worker import PHASES, WorkerEnvironments

__all__ = ["RayPool"]

_PHASE_OF_COMMAND = {"build": "constructor", "map": "start"}

# A pickled message, or an empty one, and the arrays that were written, (environments, ...) each.
ActorAnswer = tuple[bytes, dict[str, Any]]


class ActorFailure(Exception):  # noqa: N818 - the driver turns it into a WorkerError
    """Failure of an environment, which the actor sends to the driver."""

    def __init__(self, environment: int, phase: int, raised: ExceptionRecord) -> None:
        super().__init__(environment, phase, raised)


class Actor:
    """Ray actor that contains the environments of one worker."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._cells = channel.new_cells()
        self._envs: WorkerEnvironments | None = None

    def execute(self, command: bytes) -> ActorAnswer:
        """Execute a command, and return its answer."""
        name, data = channel.unpack(command)
        try:
            if name == "build":
                self._envs = WorkerEnvironments(self._messages.append, bytearray, self._cells, 0, data)
            elif self._envs is None:
                raise RuntimeError(
                    "Ray has started this actor again, without its environments; leave max_restarts and "
                    "max_task_retries out of actor_options"
                )
            else:
                self._envs.execute(name, data)
        except BaseException as error:  # Ray would end the actor on SystemExit
            place = self._cells[Cell.ENVIRONMENT], self._cells[Cell.PHASE]
            raise ActorFailure(*place, ExceptionRecord.from_exception(error)) from None
        arrays = self._envs.arrays if name in ("step", "reset") else {}
        return self._messages.pop(), {key: array for key, array in arrays.items() if key != "action"}


class ActorHandle:
    """The driver's handle of an actor.

    :param actor: Ray's handle
    :param number: number of the worker
    :param first: number of its first environment
    :param last: number of its last environment plus one

    :ivar last_command: name of the last command
    :ivar pending: Ray's reference to the answer; None if no answer is awaited
    :ivar answer: last answer
    """

    def __init__(self, actor: Any, number: int, first: int, last: int) -> None:
        self.number, self.first, self.last, self.actor = number, first, last, actor
        self.last_command = ""
        self.pending: Any = None
        self.answer: Any = None

    def send(self, name: str, data: Any) -> None:
        """Send a command."""
        message = (channel.pack if name == "step" else channel.pack_by_value)((name, data))
        self.last_command, self.pending = name, self.actor.execute.remote(message)

    def wake_worker(self) -> None:
        """Do nothing, because Ray does not lose commands."""

    def receive(self, answer: ActorAnswer) -> dict[str, Any]:
        """Store an answer, and return its arrays."""
        message, arrays = answer
        self.answer = channel.unpack(message) if message else None
        # The answer is awaited until it is unpacked, because Ctrl-C may come before.
        self.pending = None
        return arrays


class RayPool(Pool):
    """Pool of Ray actors; see :class:`~rl_ext_core.vector.pool.Pool`.

    :param env_fns: functions or factories that build the environments
    :param options: options of the pool
    :param actor_options: options of each actor, for ``ray.remote(...).options``
    :raises MissingDependencyError: If Ray is not installed.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], options: PoolOptions, *, actor_options: Mapping[str, Any]
    ) -> None:
        try:
            import ray
        except ImportError:
            raise _missing_dependency_error("ray", "ray", "RayVecEnv") from None
        self._ray = ray
        new = ray.remote(Actor).options(**actor_options).remote
        super().__init__(env_fns, options, new_worker=lambda *part: ActorHandle(new(), *part))

    def _start_workers(self) -> None:
        """Send the factories to the actors, which build the environments."""
        self._job = self._ray.get_runtime_context().get_job_id()
        for worker in self.workers:
            self.send(worker, "build", list(self._factories[worker.first : worker.last]))

    def _map_memory(self) -> Any:
        """Send the layout to the actors, and return memory for the arrays of the driver."""
        for worker in self.workers:
            self.send(worker, "map", MemoryLayout.from_spaces(worker.last - worker.first, *self.spaces))
        return bytearray(self.layout.size)

    def send(self, worker: ActorHandle, name: str, data: Any) -> None:
        """Send a command to an actor.

        :raises WorkerError: If Ray was shut down. Otherwise this call would start Ray again.
        """
        if not self._is_connected():
            failure = self._environment_error(
                worker, 0, _PHASE_OF_COMMAND.get(name, name), "ray.shutdown() has ended it", kind="exit"
            )
            self.end(failure)
            raise failure
        if name == "step" and data is None:
            data = self.arrays["action"][worker.first : worker.last]
        super().send(worker, name, data)

    def _is_connected(self) -> bool:
        """Return whether Ray still runs the job in which the actors were started."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job)

    def _receive(self, timeout: float | None, workers: Any = None) -> None:
        """Wait for all answers, and copy them to the arrays; raise the failure of an actor."""
        awaited_workers = [worker for worker in self.workers if worker.pending is not None]
        try:
            # ray.get raises as soon as one actor has failed, without waiting for the others.
            answers = self._ray.get([worker.pending for worker in awaited_workers], timeout=timeout)
        except (self._ray.exceptions.RayError, ActorFailure) as error:
            failure = self._find_failure(awaited_workers, error, timeout)
            self.end(failure)
            raise failure from failure.__cause__
        for worker, answer in zip(awaited_workers, answers, strict=True):
            self._store_answer(worker, answer)

    @defer_signals
    def _store_answer(self, worker: ActorHandle, answer: ActorAnswer) -> None:
        """Store an actor's answer, and copy its arrays to those of the pool."""
        for name, array in worker.receive(answer).items():
            self.arrays[name][worker.first : worker.last] = array

    def _find_failure(
        self, awaited_workers: Sequence[ActorHandle], error: Exception, timeout: float | None
    ) -> WorkerError:
        """Return the exception for an error of ``ray.get``.

        :param awaited_workers: actors whose answers were awaited
        :param error: the error
        :param timeout: time limit in seconds; None for no limit
        """
        ray, pending = self._ray, [worker.pending for worker in awaited_workers]
        done = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0])
        if isinstance(error, ray.exceptions.GetTimeoutError):
            worker = next((worker for worker in awaited_workers if worker.pending not in done), awaited_workers[0])
            kind, what = "timeout", f"did not answer within {timeout:g} s"
        else:
            worker = next(
                worker for worker in awaited_workers if worker.pending in done and self._has_failed(worker.pending)
            )
            raised = getattr(error, "cause", error)
            if isinstance(raised, ActorFailure):
                environment, phase, record = raised.args
                return self._exception_error(worker, environment, PHASES[phase], record)
            count = worker.last - worker.first
            which = "" if count == 1 else f", with environments {worker.first} to {worker.last - 1},"
            kind, what = "exit", f"its actor{which} has died: {error}"
        return self._environment_error(
            worker, 0, _PHASE_OF_COMMAND.get(worker.last_command, worker.last_command), what, kind=kind
        )

    def _has_failed(self, answer: Any) -> bool:
        """Return whether an answer that has arrived is an error."""
        try:
            self._ray.get(answer)
        except (self._ray.exceptions.RayError, ActorFailure):
            return True
        return False

    def _close_environments(self, patience: float | None, limit: float | None) -> list[WorkerError]:
        """Close the environments, and return the failures."""
        ray, begin = self._ray, time.monotonic()
        if not self._is_connected():
            return []
        for worker in self.workers:
            worker.send("close", None)  # executed after the current command
        pending = [worker.pending for worker in self.workers]
        ready = set(ray.wait(pending, num_returns=len(pending), timeout=patience)[0])
        failures = []
        for worker in self.workers:
            if worker.pending in ready:
                try:
                    worker.receive(ray.get(worker.pending))
                    if worker.answer is not None:
                        failures.append(self._exception_error(worker, worker.answer[0], "close", worker.answer[1]))
                except (ray.exceptions.RayError, ActorFailure) as error:
                    failures.append(self._find_failure([worker], error, patience))
        late = [worker for worker in self.workers if worker.pending is not None and worker.pending not in ready]
        if late:
            self._warn_of_slow_close(late[0].first, "in close", begin)
        return failures

    def _end_workers(self) -> None:
        """Kill the actors, unless Ray has been shut down."""
        for worker in self.workers if self._is_connected() else ():
            # Ray may have been shut down in the meantime.
            with contextlib.suppress(self._ray.exceptions.RaySystemError, ValueError):
                self._ray.kill(worker.actor)
