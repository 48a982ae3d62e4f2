"""The parent's side of a pool of workers: start, commands, answers, failures, end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_ext_core import processes, resources
from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, NotCopyableError, StorageError, WorkerError
from rl_ext_core.factory.compare import WORKER_MODULES
from rl_ext_core.processes.failures import Failure, describe_exception, require_same_process
from rl_ext_core.processes.report import ExceptionRecord
from rl_ext_core.recording.capsule import RecordedFailure, record_crash
from rl_ext_core.recording.episode_log import LOG_BYTES, EpisodeLog, LogMemory, Repetition
from rl_ext_core.recording.recorder import RECORDED_CALLS
from rl_ext_core.vector import channel
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, SharedMemory, WorkerHandle, pack
from rl_ext_core.vector.environments import PoolOptions, check_env_fns, make_factories
from rl_ext_core.vector.memory_layout import CONVERTED, SKIPPED, MemoryLayout
from rl_ext_core.vector.restarts import Restarts
from rl_ext_core.vector.worker import IDLE_FRAMES, PHASES, REPEAT_EPISODE, StepEntry, map_log, run_worker

# Time limit of close() for a step whose result was not read, as after Ctrl-C. The step may never end.
UNFINISHED_SECONDS = 5.0

_PHASE_TEXTS = {"start": "at its start", "idle": "between two calls", "constructor": "in its constructor"}
# Phases in which an environment executes a method that the caller names.
_NAMED_CALLS = ("call", "apply", "env_method")

# For each environment, (seed, options) to reset it, or None to leave it as it is.
ResetRequests = Sequence[tuple[int | None, dict[str, Any] | None] | None]


@dataclasses.dataclass
class Timings:
    """Durations of a pool's start and steps.

    :ivar start_seconds: seconds until all environments were built
    :ivar steps: number of steps of the pool; each steps all environments
    :ivar total_step_seconds: seconds of all steps, from receiving the actions to returning the results
    :ivar restarts: number of workers that were replaced
    """

    start_seconds: float = 0.0
    steps: int = 0
    total_step_seconds: float = 0.0
    restarts: int = 0

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step; 0 before the first step."""
        return self.total_step_seconds / self.steps if self.steps else 0.0

    def add_step(self, seconds: float) -> None:
        """Add a step of this duration."""
        self.steps += 1
        self.total_step_seconds += seconds


class Pool:
    """Pool of worker processes that step environments and share memory with this process.

    If a worker fails, all workers end, or :class:`~rl_ext_core.vector.restarts.Restarts` replaces it. Commands are sent
    to all workers, and their answers are read later. If the answers were not read, for example because of Ctrl-C, the
    next command waits for them and drops them.

    :param new_worker: function that creates the handle of a worker from the number of the worker, of its first
        environment, and of its last environment plus one
    :param launch: function that starts the workers of a pool; default: :func:`launch_processes`
    :raises WorkerError: If an environment cannot be built.
    :raises EnvironmentOutputError: If the spaces of environments differ.
    :raises InvalidArgumentError: If observations are not arrays of fixed shape.

    :ivar worker_by_env: the worker of each environment
    :ivar seeds: seeds of the last reset of each environment
    :ivar memory, log_memory: memory of the shared arrays, and of the episode logs; None if no episodes are recorded
    :ivar spins: whether waits poll before they block
    :ivar arrays: shared arrays by name: the last observations, rewards and flags, and the next actions
    :ivar step_start: time when the last step began, from ``time.perf_counter()``
    :ivar working_directory: folder that contains the workers' working directories; None if workers use that of this
        process
    """

    working_directory: str | None = None
    log_memory: SharedMemory | None = None
    _logs: Sequence[LogMemory] = ()

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        options: PoolOptions,
        *,
        autoreset: Autoreset = Autoreset.SAME_STEP,
        new_worker: Callable[[int, int, int], Any] = WorkerHandle,
        launch: Callable[[Pool, Sequence[Any]], None] | None = None,
    ) -> None:
        begin = time.perf_counter()
        check_env_fns(env_fns)
        self.factories, self.num_envs = make_factories(env_fns, options.start_timeout), len(env_fns)
        self.options, self.autoreset, self._launch = options, autoreset, launch or launch_processes
        self._restarts = None if options.restart is None else Restarts(self.num_envs)
        count = min(options.n_workers or self.num_envs, self.num_envs)
        # Workers get consecutive environments, as evenly as possible.
        firsts = [round(worker * self.num_envs / count) for worker in range(count + 1)]
        self.workers = [new_worker(number, *part) for number, part in enumerate(itertools.pairwise(firsts))]
        self.worker_by_env = [worker for worker in self.workers for _ in range(worker.first, worker.last)]
        self.seeds: list[int | None] = [None] * self.num_envs
        self.timings, self.step_start = Timings(), 0.0
        self._call: tuple[Sequence[int], str, Sequence[Any]] = ((), "", ())
        self._failure: WorkerError | None = None
        self._owner = os.getpid()
        self._ended = self._conversion_reported = False
        self._is_half_stepped = False  # True if the last step reached some environments only
        try:
            self._start_workers()
            self.wait(starting=True, raise_failures=True)
            found = [spaces for worker in self.workers for spaces in worker.answer]
            self.spaces = _require_same_spaces(options.spaces or found[0], found, options.caller.different_spaces)
            self.layout = MemoryLayout.from_spaces(self.num_envs, *self.spaces)
            self.memory.resize(self.layout.size)
            for worker in self.workers:
                worker.send("map", self.layout)
            arrays = self.arrays = self.layout.arrays(self.memory.map(self.layout.size))
            # These are looked up once, because every step uses them.
            actions = arrays.get("action")
            self._action_form = None if actions is None else (actions.shape, actions.dtype)
            self._observations = [arrays[f"observation {index}"] for index in range(len(self.layout.paths))]
            self._flags, self._kinds = arrays["flags"].data, arrays["reward kind"].data
            self._zeros = bytes(self.num_envs)
            if self.log_memory is not None:
                blocks = [map_log(self.log_memory, number) for number in range(self.num_envs)]
                self._logs = [LogMemory(self.spaces[1], block) for block in blocks]
            self.wait(starting=True, raise_failures=True)
        except BaseException:
            self.end()
            raise
        self.timings.start_seconds = time.perf_counter() - begin

    @staticmethod
    def copy_error(owner: str) -> NotCopyableError:
        """Return the error for copies of an object with a pool, which would share the workers."""
        return NotCopyableError(
            f"{owner} cannot be copied or pickled, because its environments are in worker processes: expected the "
            f"functions that build them. Use {owner}(env_fns), which starts new workers"
        )

    # -- processes

    def _start_workers(self) -> None:
        self.spins = channel.should_spin(len(self.workers))
        self.memory, self.log_memory = SharedMemory(), None
        if self.options.recorder is not False:
            with contextlib.suppress(StorageError):  # a limit of file sizes: nothing is recorded
                self.log_memory = SharedMemory(self.num_envs * LOG_BYTES)
        # Files that environments write there are not deleted.
        self.working_directory = None if self.options.cwd is None else tempfile.mkdtemp(prefix="rl-ext-cwd-")
        self._memories = [memory for memory in (self.memory, self.log_memory) if memory is not None]
        # A bound method would keep this object alive. The workers end when it is deleted.
        self._end = weakref.finalize(self, _end_pool, self._owner, self.workers, self._memories, self.working_directory)
        self._end.atexit = False
        self.launch(self.workers)

    @defer_signals
    def launch(self, workers: Sequence[Any]) -> None:
        """Start workers. If one cannot be started, end all of them."""
        try:
            self._launch(self, workers)
        except BaseException:
            for worker in workers:
                worker.end()
            raise

    def failure_groups(self, workers: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the workers in groups that fail together. With restarts, each worker fails alone."""
        return [workers] if self._restarts is None else [[worker] for worker in reversed(workers)]

    # -- commands

    def begin_step(
        self, actions: Any, each: Callable[[Any], Sequence[Any]] = list, environments: Sequence[int] | None = None
    ) -> None:
        """Begin a step of all environments, or of some, if each worker has one environment.

        :param actions: an action for each environment
        :param each: function that splits actions into a list, if they do not have the shape and dtype of the shared
            array; default: ``list``
        :param environments: numbers of the environments that are stepped; default: all
        :raises InvalidArgumentError: If the number of actions is not the number of environments, or the last step was
            interrupted when only some environments had got their action.
        """
        self.drain_answers()
        if self._is_half_stepped:
            raise InvalidArgumentError(
                "the last step was interrupted when only some environments had got their action: expected a reset of "
                "all. Use reset()"
            )
        self.step_start = time.perf_counter()
        workers = self.workers if environments is None else [self.workers[number] for number in environments]
        messages: list[bytes | None] = [None] * len(workers)
        if type(actions) is np.ndarray and (actions.shape, actions.dtype) == self._action_form:
            self.arrays["action"][...] = actions
        else:  # are sent one by one, as upstream does, because a conversion could change their values
            rows = each(actions)
            if len(rows) != self.num_envs:
                raise InvalidArgumentError(
                    f"number of actions: {len(rows)}, expected {self.num_envs}, one for each environment"
                )
            # What cannot be sent fails here, before any environment has its action.
            messages = [pack(("step", rows[worker.first : worker.last])) for worker in workers]
        if environments is not None:
            for worker in set(self.workers) - set(workers):
                worker.answer, self.arrays["flags"][worker.first] = None, SKIPPED
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.send("step", message)
        except BaseException:
            self._is_half_stepped = True
            raise

    def begin_reset(self, requests: ResetRequests) -> None:
        """Begin to reset environments."""
        self.drain_answers()
        self._is_half_stepped = self._is_half_stepped and None in requests
        for worker in self.workers:
            part = requests[worker.first : worker.last]
            # With restarts, the reset of a failed worker is what replaces it.
            if self._restarts is not None or any(part):
                self.send_reset(worker, part)
            else:
                worker.answer = None

    def send_reset(self, worker: Any, requests: ResetRequests) -> None:
        """Begin to reset the environments of one worker."""
        for number, request in enumerate(requests, worker.first):
            if request is not None:
                self.seeds[number] = request[0]
                if self._restarts is not None:
                    self._restarts.record_reset(number, request[1])
        worker.send("reset", list(requests))

    def call(self, environments: Sequence[int], name: str, data: Any) -> list[Any]:
        """Make the same call for some environments, and return the results."""
        self.begin_call(environments, name, [data] * len(environments))
        return self.results()

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Begin a call for some environments.

        :param name: name of the call, a key of ``CALLS``
        :param arguments: data of the call for each environment
        """
        self.drain_answers()
        calls_by_worker: dict[int, list[tuple[int, Any]]] = {}
        for number, argument in zip(environments, arguments, strict=True):
            worker = self.worker_by_env[number]
            calls_by_worker.setdefault(worker.number, []).append((number - worker.first, argument))
        self._call = environments, name, arguments
        if self._restarts is not None:
            self._restarts.record_call(*self._call)
        for number, calls in calls_by_worker.items():
            self.workers[number].send(name, calls)

    # -- answers

    def wait(self, *, starting: bool = False, raise_failures: bool = False) -> None:
        """Wait for all answers.

        :param starting: whether the time limit is ``start_timeout``; default: ``step_timeout``
        :param raise_failures: whether to raise answers that are a :class:`WorkerError`, as in pools with restarts
        :raises WorkerError: If a worker has failed, now or before.
        """
        self.raise_failure()
        self._receive(self.options.start_timeout if starting else self.options.step_timeout)
        if raise_failures:
            for worker in self.workers:
                if isinstance(worker.answer, WorkerError):
                    raise worker.answer

    def episode_logs(self) -> list[EpisodeLog | None]:
        """Return the log of each environment's episode; None for episodes that are not recorded."""
        self.drain_answers()
        return [log.read() for log in self._logs] or [None] * self.num_envs

    def repeat_episode(self, environment: int, log: EpisodeLog) -> Repetition:
        """Repeat a log whose last call has returned, in an unused environment."""
        (found,) = self.call([environment], REPEAT_EPISODE, log)
        return found  # type: ignore[no-any-return]

    def _receive(self, timeout: float | None, workers: Sequence[WorkerHandle] | None = None) -> None:
        """Receive the answers of workers. The timeout is that of each group of workers."""
        for group in self.failure_groups(self.workers if workers is None else workers):
            watch = group[0].watch
            # The time of a group begins here, so that it does not depend on the other groups.
            limited = timeout is not None and watch is not None and not all(worker.is_done() for worker in group)
            try:
                with watch.operation("", timeout) if limited else contextlib.nullcontext():
                    # The worker that got its command last usually answers last, so that the others need no wait.
                    for worker in reversed(group):
                        worker.receive()
            except (EOFError, WorkerError):
                if watch is None or watch.failure is None:
                    raise
                self._handle_failure(group)

    def _handle_failure(self, group: Sequence[WorkerHandle]) -> None:
        """End all workers, and raise the failure of a group. With restarts, store it as their answer."""
        if self._restarts is None:
            error = self._group_error(group)
            self.end(error)
            raise error from error.__cause__
        for worker in group:
            # A failure that a call has raised is stored until the worker is replaced, and recorded once.
            if not isinstance(worker.answer, WorkerError):
                worker.answer = self._group_error(group)
            worker.discard_answer()

    def drain_answers(self) -> None:
        """Wait for answers that were not read after an interrupt, and drop them."""
        self.raise_failure()
        if self._awaits_answers():
            for worker in self.workers:
                worker.wake_worker()
            self.wait()

    def _awaits_answers(self) -> bool:
        return any(worker.awaits_answer() for worker in self.workers)

    def is_ready(self, timeout: float) -> bool:
        """Return whether all answers arrive within a time limit in seconds."""
        require_same_process(self._owner)
        return not _wait_while(self.workers, lambda worker: not worker.is_done(), time.monotonic(), timeout)

    def is_plain_step(self) -> bool:
        """Return whether the last step had no infos, ended no episode, and had float rewards."""
        # This is true for most steps. Comparing bytes takes a tenth of the time that NumPy takes.
        return self._flags == self._kinds == self._zeros and all(worker.answer is None for worker in self.workers)

    def entries(self, *, to_reset: bool = False) -> list[tuple[int, StepEntry]]:
        """Return infos and last observations of the last step or reset, by environment number."""
        found: list[tuple[int, StepEntry | None]] = []
        for worker in self.workers:
            if isinstance(worker.answer, WorkerError):
                assert self._restarts is not None
                self._restarts.replace(self, worker, to_reset)
            found += enumerate(worker.answer or (), worker.first)
        return [(number, entry) for number, entry in found if entry is not None]

    def observations(self, *, copy: bool = True) -> Any:
        """Return the observations. Without ``copy``, the next step overwrites them."""
        if self._restarts is not None:
            self._restarts.last_observations = [array.copy() for array in self._observations]
        return self.layout.build_observation(
            [array.copy() for array in self._observations] if copy else self._observations
        )

    def results(self) -> list[Any]:
        """Return the results of a call, or raise the exception of an environment."""
        self.wait(raise_failures=True)
        answers: dict[int, Any] = {}
        results = []
        for number in self._call[0]:
            worker = self.worker_by_env[number]
            results.append(channel.unpack(next(answers.setdefault(worker.number, iter(worker.answer)))))
        if self._restarts is not None:
            self._restarts.record_results(results)
        for number, result in zip(self._call[0], results, strict=True):
            if isinstance(result, ExceptionRecord):
                if not self.options.caller.failed_calls_end:
                    raise result.to_exception()
                worker = self.worker_by_env[number]
                failure = describe_exception(worker.number, result)
                error = self._environment_error(worker, number - worker.first, self._call[1], failure)
                self.end(error)
                raise error from error.__cause__
        return results

    def warn_about_conversions(self, upstream: str) -> None:
        """Warn once if observations did not fit the dtype of their space."""
        converted_flags = self.arrays["flags"] & CONVERTED
        if self._conversion_reported or not converted_flags.any():
            return
        self._conversion_reported = True
        warnings.warn(
            f"environment {int(converted_flags.argmax())} returns observations with values that the dtype of its "
            f"observation space, {self.spaces[0]}, cannot hold: they are converted to it, as {upstream} does. Give the "
            "space the dtype that reset and step return",
            stacklevel=4,
        )

    # -- failures

    def raise_if_ended(self) -> None:
        """Raise the failure of a worker that has ended between two calls."""
        if self._owner == os.getpid() and not self._ended and not all(worker.is_alive() for worker in self.workers):
            watch = self.workers[0].watch
            with contextlib.suppress(WorkerError), watch.operation(""):
                raise EOFError  # the operation waits for the failure
            self._handle_failure(self.workers)

    def raise_failure(self) -> None:
        """Raise the failure of the workers, if any, and reject calls from a forked process."""
        require_same_process(self._owner)
        if self._failure is not None:
            raise self._failure

    def _group_error(self, group: Sequence[WorkerHandle]) -> WorkerError:
        """Return the exception for the failure that the watch of a group has detected."""
        watch = group[0].watch
        assert watch is not None
        assert watch.failure is not None
        with contextlib.suppress(WorkerError), watch.operation(""):
            pass  # the operation waits until the workers have ended
        worker = group[watch.failure.worker]
        cells = worker.cells
        return self._environment_error(worker, cells[Cell.ENVIRONMENT], PHASES[cells[Cell.PHASE]], watch.failure)

    def _environment_error(self, worker: Any, environment: int, phase: str, failure: Failure) -> WorkerError:
        """Record the episode of an environment, and return the exception for its failure."""
        environment += worker.first
        seeds = self.options.worker_seeds or self.seeds
        count, seed = self.num_envs, seeds[environment]
        subject = f"{self.options.caller.label} {environment} of {count}" + ("" if seed is None else f" (seed {seed})")
        method = self._call[2][0][0] if phase in _NAMED_CALLS and self._call[2] else phase
        where = _PHASE_TEXTS.get(phase, f"in {getattr(method, '__name__', method)}")
        lines = [f"{subject}, {where}: {failure.what}{failure.rest}"]
        lines += [f"    {line}" for line in failure.traceback.strip("\n").splitlines()]
        if self.working_directory is not None:
            lines.append(f"Its working directory is {os.path.join(self.working_directory, str(worker.number))}")
        elif phase == "constructor" and count > 1 and failure.kind != "timeout":
            lines.append(
                "If the library allows fewer of them at a time, use fewer environments, for example n_envs=1; if they "
                'collide over files, give each worker its own working directory: cwd="own"'
            )
        error = WorkerError(
            "\n".join(lines),
            worker=worker.number,
            kind=failure.kind,
            phase=phase,
            seed=seed,
            exitcode=failure.exitcode,
            traceback=failure.traceback,
            notes={"environment": environment},
        )
        error.__cause__ = failure.exception
        self._record_crash(error)
        return error

    def _record_crash(self, error: WorkerError) -> None:
        """Write a capsule of a failure, and add its path to the error text, if the episode is recorded."""
        environment = error.notes["environment"]
        try:
            log = self._logs[environment].read() if self._logs else None
        except Exception as unreadable:  # a worker that wrote to wrong addresses before it died
            error.args = (f"{error}\nIts episode cannot be replayed, because its log is damaged ({unreadable!r})",)
            return
        phase = PHASES[self.worker_by_env[environment].cells[Cell.PHASE]] if log is not None else ""
        if log is None or phase not in ("reset", "step", *RECORDED_CALLS):
            return
        text = record_crash(
            self.options.recorder,
            factory=self.factories[environment],
            log=log,
            failure=RecordedFailure.from_error(error, phase),
            environment=environment,
            step_timeout=self.options.step_timeout,
            encoded_actions=getattr(self.spaces[1], "is_encoded", False),
        )
        error.args = (f"{error}\n{text}",)

    # -- the end

    def close(self, timeout: float | None = None) -> None:
        """Close the environments, and end the workers. Ctrl-C ends the workers at once.

        In a forked process it does nothing, because the workers belong to the process that started them.

        :param timeout: time limit in seconds; default: ``close_timeout``
        :raises WorkerError: If an environment fails in ``close``. All workers have ended even then.
        """
        failure = None
        if os.getpid() != self._owner:
            return
        limit = self.options.close_timeout if timeout is None else timeout
        try:
            if not self._ended:
                patience = UNFINISHED_SECONDS if limit is None and self._awaits_answers() else limit
                failure = self._close_environments(patience, limit)
        finally:
            self.end()
        if failure is not None:
            raise failure

    def _close_environments(self, patience: float | None, limit: float | None) -> WorkerError | None:
        """Close environments, after waiting ``patience`` seconds for commands; return a failure."""
        begin = time.monotonic()
        for worker in self.workers:
            if worker.watch is not None:
                worker.watch.expect_exit()
            worker.wake_worker()
        late = _wait_while(self.workers, lambda worker: worker.is_busy(), begin, patience)
        closing = [worker for worker in self.workers if worker not in late]
        for worker in closing:
            if not worker.has_failed():
                worker.discard_answer()
                worker.send("close", None)
        late += _wait_while(closing, lambda worker: worker.is_busy() or worker.is_alive(), begin, limit)
        failures = [self._close_error(worker) for worker in self.workers if worker.is_done()]
        if late:
            number, at = late[0].cells[Cell.ENVIRONMENT], PHASES[late[0].cells[Cell.PHASE]]
            where = "in threads that go on after its close" if at == "idle" else f"in {at}"
            caller = self.options.caller
            warnings.warn(
                f"{caller.label} {late[0].first + number} of {self.num_envs} was still {where} after "
                f"{time.monotonic() - begin:.3g} s of closing, and its worker was ended: files that it writes may be "
                f"incomplete. Use {caller.close_argument}=None to wait without a limit, or a larger number",
                stacklevel=4,
            )
        return next(filter(None, failures), None)

    def _close_error(self, worker: WorkerHandle) -> WorkerError | None:
        """Return an environment's failure in ``close``; None for earlier failures."""
        if worker.watch is None or worker.watch.is_killed or not worker.awaits_answer():
            return None
        if worker.watch.failure is None:
            with contextlib.suppress(EOFError):  # an actor has failed
                worker.receive()
                if not worker.answer:
                    return None
                environment, raised = worker.answer
                return self._environment_error(worker, environment, "close", describe_exception(worker.number, raised))
        error = self._group_error([other for other in self.workers if other.watch is worker.watch])
        # The last two are those of a worker that was killed before it closed.
        return error if error.phase in ("close", "start", "idle") else None

    def end(self, failure: WorkerError | None = None) -> None:
        """End the workers at once; later calls raise ``failure``. After an interrupt, call it again."""
        if os.getpid() == self._owner:
            self._ended, self._failure = True, self._failure or failure
            if hasattr(self, "_end"):  # otherwise no worker was started
                _end_pool(self._owner, self.workers, self._memories, self.working_directory)
                self._end.detach()


def launch_processes(pool: Pool, workers: Sequence[WorkerHandle]) -> None:
    """Start the processes of workers, and watch over them."""
    options, autoreset = pool.options, pool.autoreset
    if not any(worker.attempt for worker in workers):
        resources.check_open_file_limit(len(workers), options.caller.workers_argument)
    preload = dict.fromkeys([*WORKER_MODULES, *(name for factory in pool.factories for name in factory.preload)])
    decisions = [pool.factories[worker.first].decision for worker in workers]
    environs = [{} if decision is None else decision.variables for decision in decisions]
    context = processes.get_context(options.start_method, preload=tuple(preload), environs=environs)
    original = None if options.cwd in (None, "own") else os.path.abspath(options.cwd)
    for worker in workers:
        factories = [factory.for_attempt(worker.attempt) for factory in pool.factories[worker.first : worker.last]]
        directory = None
        if pool.working_directory is not None:
            directory = os.path.join(pool.working_directory, str(worker.number)), original
        arguments = pool.memory, worker.first, factories, directory, autoreset, pool.log_memory, options.initializer
        worker.launch(context, run_worker, arguments, spins=pool.spins)
    for group in pool.failure_groups(workers):
        interrupt_wait = functools.partial(_interrupt_waits, group)
        watch = processes.Watch([worker.process for worker in group], idle_in=IDLE_FRAMES, on_failure=interrupt_wait)
        for worker in group:
            worker.watch = watch


def _require_same_spaces(expected: Any, found: Sequence[Any], advice: str) -> Any:
    for number, pair in enumerate(found):
        for name, one, other in zip(("observation_space", "action_space"), expected, pair, strict=True):
            if one != other:
                raise EnvironmentOutputError(
                    f"environment {number} has {name}={other}, expected {one}: environments that are stepped together "
                    f"have the same spaces. {advice}"
                )
    return expected


def _wait_while(
    workers: Sequence[WorkerHandle], condition: Callable[[WorkerHandle], bool], begin: float, limit: float | None
) -> list[WorkerHandle]:
    """Wait up to ``limit`` seconds while a condition holds for any worker; return those workers."""
    pause = 0.0005
    while waiting := [worker for worker in workers if condition(worker)]:
        if limit is not None and time.monotonic() - begin > limit:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return waiting


def _interrupt_waits(workers: Sequence[WorkerHandle]) -> None:
    for worker in workers:
        worker.interrupt_wait()


def _end_pool(
    owner: int, workers: Sequence[WorkerHandle], memories: Sequence[SharedMemory], working_directory: str | None
) -> None:
    """End workers, close their memory, and delete empty folders. After an interrupt, call it again."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.end()
    for memory in memories:
        memory.close()
    if working_directory is not None:
        for folder in [*(os.path.join(working_directory, str(worker.number)) for worker in workers), working_directory]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
