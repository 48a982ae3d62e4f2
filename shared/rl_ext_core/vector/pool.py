"""Workers that step environments, seen from the parent: start, commands, answers, failures, end."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import processes, resources
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.processes.failures import require_process
from rl_ext_core.vector import channel
from rl_ext_core.vector.arguments import Options, check_env_fns, factories_of
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, Memory, Raised, WorkerHandle
from rl_ext_core.vector.layout import Layout, common_spaces
from rl_ext_core.vector.worker import CHANGED, IDLE_IN, PHASES, Entry, main

__all__ = ["UNFINISHED_SECONDS", "Pool", "Resets", "Timings", "WorkerPool"]

# How long close() waits for a step that was begun and whose result was not taken, as after Ctrl-C: it may never end.
UNFINISHED_SECONDS = 5.0

# What a worker needs whatever its environment is.
_PRELOAD = ("numpy", "gymnasium.wrappers", "rl_ext_core.factory", "rl_ext_core.vector.worker")
_WHEN = {"start": "at its start", "idle": "between two calls", "constructor": "in its constructor"}

# A seed and options for each environment that is to be reset; None for those that are left as they are.
Resets = Sequence[tuple[int | None, dict[str, Any] | None] | None]


@dataclasses.dataclass
class Timings:
    """What a pool's environments have taken.

    :ivar start_seconds: until all environments were built
    :ivar steps: number of steps, each of all environments
    :ivar total_step_seconds: of all steps, from the actions to what is returned
    :ivar restarts: number of workers that have replaced others
    """

    start_seconds: float = 0.0
    steps: int = 0
    total_step_seconds: float = 0.0
    restarts: int = 0

    @property
    def step_seconds(self) -> float:
        """The mean of a step; 0 before the first."""
        return self.total_step_seconds / self.steps if self.steps else 0.0

    def add_step(self, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.total_step_seconds += seconds


class WorkerPool:
    """Base class of pools of processes and of Ray's actors: commands, answers and errors.

    A command is begun for all workers and then waited for. Whatever comes in between, such as Ctrl-C, the next command
    first waits for the answers that are still owed, and drops them.

    :param env_fns: build the environments
    :param new_worker: makes a worker of its number, that of its first environment and the one past that of its last,
        which it has as ``number``, ``first`` and ``last``, next to its last ``answer``
    :raises WorkerError: If an environment cannot be built.
    :raises EnvironmentOutputError: If their spaces differ.
    :raises InvalidArgumentError: If their observations are not arrays of fixed shape.

    :ivar worker_of: the worker of each environment
    :ivar seeds: of each environment's last reset
    :ivar spaces: observation and action space
    :ivar layout: of the arrays
    :ivar arrays: what environments have answered last, and the next actions
    :ivar began: when the last step did
    :ivar timings: how long the start and the steps have taken
    :ivar working_directory: folder of the workers' own working directories; None: they have that of this process
    """

    spaces: Any
    layout: Layout
    arrays: dict[str, np.ndarray[Any, Any]]
    working_directory: str | None = None

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], options: Options, new_worker: Callable[[int, int, int], Any]
    ) -> None:
        check_env_fns(env_fns)
        self._factories, self._options, self._close_timeout = factories_of(env_fns), options, options.close_timeout
        self._begin = time.perf_counter()
        parts = shares(len(env_fns), options.n_workers)
        self.workers = [new_worker(number, *part) for number, part in enumerate(parts)]
        self.worker_of = [worker for worker in self.workers for _ in range(worker.first, worker.last)]
        self.seeds: list[int | None] = [None] * len(self.worker_of)
        self.timings = Timings()
        self.began = 0.0
        self._call: tuple[Sequence[int], str, Sequence[Any]] = ((), "", ())
        self._failure: WorkerError | None = None
        self._owner = os.getpid()
        self._ended = self._changes_reported = False
        self._unsettled = False  # whether answers may be owed

    def _start(self) -> None:
        """Have the environments built, and agree on the places of arrays."""
        limit = self._options.start_timeout
        try:
            self._build()
            self.wait(limit, failing=True)
            self.spaces = common_spaces([spaces for worker in self.workers for spaces in worker.answer])
            self.layout = Layout.of(len(self.worker_of), *self.spaces)
            arrays = self.arrays = self.layout.arrays(self._block())
            # What every step needs is looked up once.
            self._actions = arrays.get("action")
            self._observations = [arrays[f"observation {index}"] for index in range(len(self.layout.paths))]
            self._flags, self._kinds = arrays["flags"].data, arrays["reward kind"].data
            self._zeros = bytes(len(self.worker_of))
            for worker in self.workers:
                self.send(worker, "map", self._layout_of(worker))
            self.wait(limit, failing=True)
        except BaseException:
            self.end()
            raise
        self.timings.start_seconds = time.perf_counter() - self._begin

    # -- what differs between kinds of workers

    def _build(self) -> None:
        """Have workers begin to build their environments."""
        raise NotImplementedError

    def _block(self) -> Any:
        """Return the memory for the arrays."""
        raise NotImplementedError

    def _layout_of(self, worker: Any) -> Layout:
        """Return the layout of the arrays in a worker."""
        return self.layout

    def step(self) -> None:
        """Have all step with the actions in the arrays."""
        raise NotImplementedError

    def _receive(self, timeout: float | None) -> None:
        """Receive all answers that workers owe."""
        raise NotImplementedError

    def _close_environments(self, patience: float | None) -> list[WorkerError]:
        """Have workers close their environments, and return what fails in that.

        :param patience: seconds to wait for what they are at
        """
        raise NotImplementedError

    def _end_workers(self) -> None:
        raise NotImplementedError

    def answer_of(self, worker: Any, *, to_reset: bool = False) -> Any:
        """Return a worker's answer to a step or a reset: entries, or None; if it has failed, that of its successor.

        :param to_reset: which of the two
        :raises WorkerError: If it has failed, and is not replaced.
        """
        return worker.answer

    def remember(self) -> None:
        """Store the observations that are returned, should a worker fail and be replaced."""

    def _note_results(self, results: Sequence[Any]) -> None:
        """Record the results of the call that was begun last, for workers that replace others."""

    # -- commands

    def send(self, worker: Any, name: str, data: Any) -> None:
        """Give a worker a command; that it is gone shows where its answer is waited for.

        :raises Exception: the data cannot be pickled
        """
        self._unsettled = True
        worker.send(name, data)

    def begin_step(self, actions: Any, each: Callable[[Any], Sequence[Any]] = list) -> None:
        """Have all environments begin a step.

        :param each: makes a list of actions, one for each environment, of what is not of the shape of the array
        :raises InvalidArgumentError: If there are fewer or more.
        """
        self.settle()
        self.began = time.perf_counter()
        shared = self._actions
        if (
            shared is not None
            and type(actions) is type(shared)
            and actions.dtype == shared.dtype
            and actions.shape == shared.shape
        ):
            shared[...] = actions
            self.step()
            return
        # One by one, as upstream's send them: a conversion could change their bits.
        rows = each(actions)
        if len(rows) != len(self.worker_of):
            raise InvalidArgumentError(
                f"there are {len(rows)} actions for {len(self.worker_of)} environments; expected an action for each"
            )
        for worker in self.workers:
            self.send(worker, "step", rows[worker.first : worker.last])

    def begin_reset(self, asked: Resets) -> None:
        """Have environments begin to reset, each with a seed and options."""
        self.settle()
        for worker in self.workers:
            self.reset(worker, asked[worker.first : worker.last])

    def reset(self, worker: Any, asked: Resets) -> None:
        """Have a worker's environments begin to reset."""
        for number, how in enumerate(asked, worker.first):
            if how is not None:
                self.seeds[number] = how[0]
        self.send(worker, "reset", list(asked))

    def call(self, environments: Sequence[int], name: str, data: Any) -> list[Any]:
        """Do the same with environments, and return the results: see :meth:`begin_call` and :meth:`results`."""
        self.begin_call(environments, name, [data] * len(environments))
        return self.results()

    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Have environments begin a call: see ``CALLS`` of :mod:`rl_ext_core.vector.environments`.

        :param environments: their numbers
        :param arguments: one for each
        """
        self.settle()
        asked: dict[int, list[tuple[int, Any]]] = {}
        for number, argument in zip(environments, arguments, strict=True):
            worker = self.worker_of[number]
            asked.setdefault(worker.number, []).append((number - worker.first, argument))
        self._call = environments, name, arguments
        for number, calls in asked.items():
            self.send(self.workers[number], name, calls)

    # -- answers

    def wait(self, timeout: float | None, *, failing: bool = False) -> None:
        """Wait for all answers that workers owe.

        Where workers fail apart from each other, the answer of one that has failed is a :class:`WorkerError`.

        :param timeout: seconds; None: forever
        :param failing: raise such an answer
        :raises WorkerError: If a worker has failed.
        """
        self.require_owner()
        self._receive(timeout)
        self._unsettled = False
        if failing:
            for worker in self.workers:
                if isinstance(worker.answer, WorkerError):
                    raise worker.answer

    def wait_for_step(self, *, failing: bool = False) -> None:
        """Wait for all answers, as long as a step may take: see :meth:`wait`."""
        self.wait(self._options.step_timeout, failing=failing)

    def settle(self) -> None:
        """Get ready for a command: wait for answers that were not read because that was interrupted, and drop them.

        :raises WorkerError: If the workers were ended.
        """
        self.raise_failure()
        if self._unsettled:
            for worker in self.workers:
                worker.remind()
            self.wait_for_step()

    def is_quiet(self) -> bool:
        """Return whether a step has ended no episode, there are no infos, and rewards are plain: as of most."""
        # By comparing bytes, a tenth of what NumPy takes.
        return self._flags == self._kinds == self._zeros and all(worker.answer is None for worker in self.workers)

    def entries(self, *, to_reset: bool = False) -> list[tuple[int, Entry]]:
        """Return what workers have answered to a step or a reset, by the numbers of environments that have something.

        :raises WorkerError: see :meth:`answer_of`
        """
        answers = [(worker.first, self.answer_of(worker, to_reset=to_reset) or ()) for worker in self.workers]
        return [(n, entry) for first, answer in answers for n, entry in enumerate(answer, first) if entry is not None]

    def observations(self, *, copy: bool = True) -> Any:
        """Return the observations: copies, or the arrays that the next step writes into."""
        self.remember()
        return self.layout.joined([array.copy() for array in self._observations] if copy else self._observations)

    def results(self) -> list[Any]:
        """Return the results of a call.

        :raises Exception: what an environment raised, when all have answered; it lives on
        :raises WorkerError: If a worker has failed.
        """
        self.wait_for_step(failing=True)
        answers: dict[int, Any] = {}
        results = []
        for number in self._call[0]:
            worker = self.worker_of[number]
            results.append(channel.unpack(next(answers.setdefault(worker.number, iter(worker.answer)))))
        self._note_results(results)
        for result in results:
            if isinstance(result, Raised):
                raise result.with_traceback()
        return results

    def report_changes(self, upstream: str) -> None:
        """Warn, once, that observations did not fit their space."""
        changed = self.arrays["flags"] & CHANGED
        if self._changes_reported or not changed.any():
            return
        self._changes_reported = True
        warnings.warn(
            f"environment {int(changed.argmax())} returns observations with values that the dtype of its observation "
            f"space, {self.spaces[0]}, cannot hold: they are changed to such that it can, as {upstream} does. Give the "
            "space the dtype of what reset and step return",
            stacklevel=4,
        )

    # -- failures and the end

    def raise_failure(self) -> None:
        """Raise the failure that has ended the workers.

        :raises WorkerError: that
        :raises InvalidArgumentError: If the workers are another process's.
        """
        self.require_owner()
        if self._failure is not None:
            raise self._failure

    def require_owner(self) -> None:
        """Refuse calls from a forked process.

        :raises InvalidArgumentError: If the workers are another process's.
        """
        require_process(self._owner)

    def close(self, timeout: float | None = None) -> None:
        """Close the environments, and end the workers. Ctrl-C makes that short.

        In a forked process it does nothing: the workers are those of the process that started them.

        :param timeout: seconds that may take; None: ``close_timeout``
        :raises WorkerError: If one of them fails in ``close``; all workers are gone all the same.
        """
        failures: list[WorkerError] = []
        if os.getpid() != self._owner:
            return
        limit = self._close_timeout = self._close_timeout if timeout is None else timeout
        try:
            if not self._ended:
                failures = self._close_environments(UNFINISHED_SECONDS if self._unsettled and limit is None else limit)
        finally:
            self.end()
        if failures:
            raise failures[0]

    def end(self, failure: WorkerError | None = None) -> None:
        """End the workers at once; done again if it was interrupted. In a forked process it does nothing."""
        if os.getpid() == self._owner:
            self._ended, self._failure = True, self._failure or failure
            self._end_workers()

    def _failed(self, worker: Any, environment: int, phase: str, what: str, **more: Any) -> WorkerError:
        """Make the exception that says what has happened to an environment."""
        environment += worker.first
        count, seed = len(self.seeds), self.seeds[environment]
        who = f"environment {environment} of {count}" + ("" if seed is None else f" (seed {seed})")
        lines = [f"{who}, {_WHEN.get(phase, f'in {phase}')}: {what}"]
        lines += [f"    {line}" for line in more.get("traceback", "").strip("\n").splitlines()]
        if self.working_directory is not None:
            lines.append(f"Its working directory is {os.path.join(self.working_directory, str(worker.number))}")
        elif phase == "constructor" and count > 1 and more["kind"] != "timeout":
            lines.append(
                "If the library allows fewer of them at a time, use fewer environments, for example n_envs=1; if they "
                'collide over files, give each worker its own working directory: cwd="own"'
            )
        notes = {**more.pop("notes", {}), "environment": environment}
        return WorkerError("\n".join(lines), worker=worker.number, phase=phase, seed=seed, notes=notes, **more)

    def _failed_to_close(self, worker: Any) -> WorkerError | None:
        """Make the exception for what an environment has raised in ``close``, if its worker's answer says so."""
        if worker.answer is None:
            return None
        environment, raised = worker.answer
        return self._raised(worker, environment, "close", raised)

    def _raised(self, worker: Any, environment: int, phase: str, raised: Raised) -> WorkerError:
        what = f"raised {raised.summary}:"
        error = self._failed(worker, environment, phase, what, kind="exception", traceback=raised.traceback)
        error.__cause__ = raised.with_traceback()
        return error

    def _warn_of_late(self, environment: int, where: str, begin: float) -> None:
        """Warn that the time to close environments was up."""
        warnings.warn(
            f"environment {environment} of {len(self.seeds)} was still {where} after {time.monotonic() - begin:.3g} s "
            "of closing, and its worker was ended: what it writes may be incomplete. Write close_timeout=None to wait "
            "as long as it takes, or more",
            stacklevel=5,
        )


class Pool(WorkerPool):
    """Processes that hold environments and share one block of memory with this one; if one fails, all end.

    :param env_fns: build the environments
    :param autoreset: when environments are reset whose episodes have ended
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], options: Options, *, autoreset: Autoreset = Autoreset.SAME_STEP
    ) -> None:
        super().__init__(env_fns, options, WorkerHandle)
        resources.check_descriptors(len(self.workers), "n_workers={}")
        self._autoreset, self._last_first = autoreset, self.workers[::-1]
        self._spins = channel.worth_spinning(len(self.workers))
        self._memory = Memory()
        # What environments write there is kept.
        self.working_directory = None if options.cwd is None else tempfile.mkdtemp(prefix="rl-ext-cwd-")
        # Not by a method: whoever drops this object ends the workers.
        self._end = weakref.finalize(self, _end, self._owner, self.workers, self._memory, self.working_directory)
        self._end.atexit = False
        self._start()

    def _build(self) -> None:
        self._launch(self.workers)

    def _block(self) -> Any:
        self._memory.resize(self.layout.size)
        return self._memory.map(self.layout.size)

    @uninterrupted
    def _launch(self, workers: Sequence[WorkerHandle]) -> None:
        """Start processes; if that fails, there is none."""
        preload = dict.fromkeys([*_PRELOAD, *(name for factory in self._factories for name in factory.preload)])
        decisions = [self._factories[worker.first].decision for worker in workers]
        environs: list[Mapping[str, str | None]] = [
            {} if decision is None else decision.variables for decision in decisions
        ]
        context = processes.get_context(self._options.start_method, preload=tuple(preload), environs=environs)
        try:
            for worker in workers:
                factories = [factory.again(worker.attempt) for factory in self._factories[worker.first : worker.last]]
                arguments = self._memory, worker.first, factories, self._directory_of(worker), self._autoreset
                worker.launch(context, main, arguments, spins=self._spins)
        except BaseException:
            for worker in workers:
                worker.end()
            raise
        self._watch(workers)

    def _directory_of(self, worker: WorkerHandle) -> tuple[Path, Path | None] | None:
        """Return a worker's own working directory, and the folder that it is a copy of, if any."""
        if self.working_directory is None:
            return None
        cwd = self._options.cwd
        return Path(self.working_directory, str(worker.number)), None if cwd in (None, "own") else Path(cwd).absolute()

    def _watch(self, workers: Sequence[WorkerHandle]) -> None:
        """Have this process woken when one of these ends."""
        started = [worker.process for worker in workers]
        watch = processes.Watch(started, idle_in=IDLE_IN, on_failure=functools.partial(_wake, workers))
        for worker in workers:
            worker.watch = watch

    def step(self) -> None:
        """Have all step with the actions in shared memory."""
        self._unsettled = True
        for worker in self.workers:
            worker.step()

    def _receive(self, timeout: float | None) -> None:
        watch = self.workers[0].watch
        try:
            with contextlib.nullcontext() if timeout is None or watch is None else watch.operation("", timeout):
                # The last to be asked is the last to answer: it alone is waited for, where others' turns come.
                for worker in self._last_first:
                    worker.receive()
        except (EOFError, WorkerError):
            if watch is None or watch.failure is None:
                raise
            error = self._described(self.workers)
            self.end(error)
            raise error from error.__cause__

    def _described(self, workers: Sequence[WorkerHandle]) -> WorkerError:
        """Make the exception for the failure that the watch over these has seen."""
        watch = workers[0].watch
        assert watch is not None
        assert watch.failure is not None
        with contextlib.suppress(WorkerError), watch.operation(""):
            pass  # waits until the workers are gone
        failure = watch.failure
        worker = workers[failure.worker]
        error = self._failed(
            worker,
            worker.cells[Cell.ENVIRONMENT],
            PHASES[worker.cells[Cell.PHASE]],
            failure.summary.removeprefix(f"worker {failure.worker} of {len(workers)} "),
            kind=failure.kind,
            exitcode=failure.exitcode,
            traceback=failure.traceback,
            notes=failure.notes,
        )
        error.__cause__ = failure.exception
        return error

    def is_ready(self, timeout: float) -> bool:
        """Return whether all answers that workers owe are there within a time, in seconds."""
        self.require_owner()
        return not _wait_while(self.workers, lambda worker: not worker.is_over(), time.monotonic(), timeout)

    def _close_environments(self, patience: float | None) -> list[WorkerError]:
        begin, limit = time.monotonic(), self._close_timeout
        for worker in self.workers:
            if worker.watch is not None:
                worker.watch.closing()
            worker.remind()
        late = _wait_while(self.workers, WorkerHandle.is_busy, begin, patience)
        closing = [worker for worker in self.workers if worker not in late]
        for worker in closing:
            if not worker.has_failed():
                worker.await_nothing()
                self.send(worker, "close", None)
        late += _wait_while(closing, WorkerHandle.is_busy, begin, limit)
        failures = [found for worker in self.workers if worker.is_over() and (found := self._failure_to_close(worker))]
        late += _wait_while([worker for worker in closing if worker not in late], WorkerHandle.is_alive, begin, limit)
        if late:
            number, at = late[0].cells[Cell.ENVIRONMENT], PHASES[late[0].cells[Cell.PHASE]]
            where = "in threads that go on after its close" if at == "idle" else f"in {at}"
            self._warn_of_late(late[0].first + number, where, begin)
        return failures

    def _failure_to_close(self, worker: WorkerHandle) -> WorkerError | None:
        """Return an environment's failure in ``close``; what has happened before does not matter any more."""
        if worker.watch is None or not worker.is_awaited():
            return None
        if worker.watch.failure is None:
            worker.receive()
            return self._failed_to_close(worker)
        error = self._described([other for other in self.workers if other.watch is worker.watch])
        return error if error.phase == "close" else None

    def _end_workers(self) -> None:
        _end(self._owner, self.workers, self._memory, self.working_directory)
        self._end.detach()


def _wait_while(
    workers: Sequence[WorkerHandle], condition: Callable[[WorkerHandle], bool], begin: float, limit: float | None
) -> list[WorkerHandle]:
    """Wait as long as something is true of workers, and return those of which it is still true after a time."""
    pause = 0.0005
    while waiting := [worker for worker in workers if condition(worker)]:
        if limit is not None and time.monotonic() - begin > limit:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return waiting


def _wake(workers: Sequence[WorkerHandle]) -> None:
    for worker in workers:
        worker.wake()


def _end(owner: int, workers: Sequence[WorkerHandle], memory: Memory, working_directory: str | None) -> None:
    """End workers, in the process that started them; done again if it was interrupted."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.end()
    memory.close()
    if working_directory is not None:
        # Empty ones are of no use.
        for folder in [*(os.path.join(working_directory, str(worker.number)) for worker in workers), working_directory]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def shares(num_envs: int, num_workers: int | None) -> list[tuple[int, int]]:
    """Return the first environment of each worker and the one past its last: in order, as evenly as possible."""
    count = min(num_workers or num_envs, num_envs)
    return list(itertools.pairwise(round(worker * num_envs / count) for worker in range(count + 1)))
