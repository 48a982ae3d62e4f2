"""Workers of a pool in Ray actors, which may run on several machines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import _missing_dependency_error
from rl_ext_core.processes.failures import Failure, describe_exception
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.vector import channel
from rl_ext_core.vector.channel import Cell, WorkerHandle
from rl_ext_core.vector.pool import Pool
from rl_ext_core.vector.worker import PHASES, WorkerEnvironments

_PHASE_OF_COMMAND = {"build": "constructor", "map": "start"}

# A pickled message, or an empty one, and the rows that were written to each array.
ActorAnswer = tuple[bytes, dict[str, Any]]


class ActorFailure(Exception):  # noqa: N818 - the driver turns it into a WorkerError
    """Environment, phase and exception record of a failure, for the driver."""


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
                first, factories = data
                self._rows = slice(first, first + len(factories))
                self._envs = WorkerEnvironments(self._messages.append, bytearray, self._cells, first, factories)
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
        return self._messages.pop(), {key: array[self._rows] for key, array in arrays.items() if key != "action"}


class ActorHandle(WorkerHandle):
    """The driver's handle of an actor.

    :ivar pending: Ray's reference to the answer of the last command
    """

    watch: ActorWatch | None  # type: ignore[assignment]
    pending: Any = None

    def launch(self, watch: ActorWatch, actor: Any, pool: Pool) -> None:  # type: ignore[override]
        """Build the environments in an actor, whose results are written to the memory of the pool."""
        self.watch, self._actor, self._memory = watch, actor, pool.memory
        self.send("build", (self.first, list(pool.factories[self.first : self.last])))

    @defer_signals  # Ctrl-C must not come between the command and the number by which its answer is awaited
    def send(self, name: str, data: Any) -> None:
        """Send a command. After ``ray.shutdown()``, this fails: Ray would start again."""
        assert self.watch is not None
        if name == "map":
            self._arrays = data.arrays(self._memory.map(data.size))
        elif name == "step" and data is None:
            data = channel.pack((name, self._arrays["action"][self.first : self.last]))
        self.cells[Cell.ENVIRONMENT], self.cells[Cell.PHASE] = 0, PHASES.index(_PHASE_OF_COMMAND.get(name, name))
        if self.watch.is_connected():
            message = data if name == "step" else channel.pack_by_value((name, data))
            self.pending = self._actor.execute.remote(message)
            self.cells[Cell.COMMAND] += 1
        elif name != "close":
            self.watch.failure = self.watch.failure or Failure(self.number, "exit", "ray.shutdown() has ended it")

    def receive(self) -> None:
        """Wait for the answers of all actors, if one is awaited.

        :raises EOFError: If an actor has failed.
        """
        if self.watch is not None and (self.awaits_answer() or self.watch.failure is not None):
            self.watch.receive(self)

    @defer_signals
    def store(self, answer: ActorAnswer) -> None:
        """Store an answer, and copy its rows to the memory of the pool."""
        message, arrays = answer
        for name, rows in arrays.items():
            self._arrays[name][self.first : self.last] = rows
        self.answer = channel.unpack(message) if message else None
        self.discard_answer()

    def wake_worker(self) -> None:
        """Do nothing, because Ray does not lose commands."""

    def is_done(self) -> bool:
        """Return whether the answer has arrived or an actor has failed."""
        watch = self.watch
        return watch is None or watch.failure is not None or not self.awaits_answer() or watch.has_answered(self)

    def is_busy(self) -> bool:
        """Return whether the actor executes a command."""
        return not self.is_done()

    is_alive = is_busy  # an actor does not end by itself

    def end(self) -> None:
        """Kill the actor, unless Ray has been shut down."""
        watch, self.watch = self.watch, None
        if watch is not None and watch.is_connected():
            watch.kill(self._actor)


class ActorWatch:
    """Watch over the actors of a pool, with the methods of :class:`~rl_ext_core.processes.Watch` that a pool calls.

    :ivar failure: first failure; None if there is none
    :ivar is_killed: False, because the actors run until Ray or the pool ends them
    """

    failure: Failure | None = None
    is_killed = False
    _timeout: float | None = None
    _is_closing = False

    def __init__(self, ray: Any, workers: Sequence[ActorHandle]) -> None:
        self._ray, self._workers, self._job = ray, workers, ray.get_runtime_context().get_job_id()
        self._errors = ray.exceptions.RayError, ActorFailure

    def is_connected(self) -> bool:
        """Return whether Ray still runs the job in which the actors were started."""
        ray = self._ray
        return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job)

    @contextlib.contextmanager
    def operation(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Limit the time of waits in the ``with`` block."""
        self._timeout = timeout
        try:
            yield
        finally:
            self._timeout = None

    def expect_exit(self) -> None:
        """Receive the answer of each actor alone from now on."""
        self._is_closing = True

    def kill(self, actor: Any) -> None:
        """Kill an actor."""
        with contextlib.suppress(self._ray.exceptions.RaySystemError, ValueError):  # Ray was shut down meanwhile
            self._ray.kill(actor)

    def has_answered(self, worker: ActorHandle) -> bool:
        """Return whether the answer of a worker, or its failure, has arrived."""
        return not self.is_connected() or bool(self._ray.wait([worker.pending], timeout=0)[0])

    def receive(self, worker: ActorHandle) -> None:
        """Wait for the answers of all actors, or for that of one while the pool is closed.

        :raises EOFError: If an actor has failed, without waiting for the others.
        """
        awaited = [worker] if self._is_closing else [other for other in self._workers if other.awaits_answer()]
        if self.failure is None:
            try:
                answers = self._ray.get([other.pending for other in awaited], timeout=self._timeout)
            except self._errors as error:
                self.failure = self._describe_failure(awaited, error)
        if self.failure is not None:
            raise EOFError("an actor has failed")
        for other, answer in zip(awaited, answers, strict=True):
            other.store(answer)

    def _describe_failure(self, awaited: Sequence[ActorHandle], error: Exception) -> Failure:
        if isinstance(error, self._ray.exceptions.GetTimeoutError):
            late = next((worker for worker in awaited if not self.has_answered(worker)), awaited[0])
            return Failure(late.number, "timeout", f"did not answer within {self._timeout:g} s")
        worker = next(worker for worker in awaited if self.has_answered(worker) and self._has_raised(worker))
        raised = getattr(error, "cause", error)
        if isinstance(raised, ActorFailure):
            worker.cells[Cell.ENVIRONMENT], worker.cells[Cell.PHASE], record = raised.args
            return describe_exception(worker.number, record)
        several = worker.last - worker.first > 1
        which = f", with environments {worker.first} to {worker.last - 1}," if several else ""
        return Failure(worker.number, "exit", f"its actor{which} has died: {error}")

    def _has_raised(self, worker: ActorHandle) -> bool:
        try:
            self._ray.get(worker.pending)
        except self._errors:
            return True
        return False


def launch_actors(pool: Pool, workers: Sequence[Any], *, actor_options: Mapping[str, Any]) -> None:
    """Start the workers of a pool in Ray actors with these options.

    :raises MissingDependencyError: If Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise _missing_dependency_error("ray", "ray", "RayVecEnv") from None
    new_actor = ray.remote(Actor).options(**actor_options).remote
    actors = [new_actor() for _ in workers]  # this starts Ray if necessary
    watch = ActorWatch(ray, workers)
    for worker, actor in zip(workers, actors, strict=True):
        worker.launch(watch, actor, pool)
