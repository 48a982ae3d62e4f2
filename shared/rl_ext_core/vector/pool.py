"""Workers that step environments, seen from the parent: start, commands, failures, restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import reprlib
import select
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from rl_ext_core import processes, resources
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import TemporaryFolder
from rl_ext_core.devices import READ_AT_IMPORT
from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.processes.failures import require_process
from rl_ext_core.vector import channel
from rl_ext_core.vector.arguments import Options, check_env_fns, factories_of
from rl_ext_core.vector.autoreset import Autoreset
from rl_ext_core.vector.channel import Cell, Memory, Raised, Spin, WorkerHandle
from rl_ext_core.vector.layout import Layout, common_spaces
from rl_ext_core.vector.worker import CHANGED, IDLE_IN, PHASES, TRUNCATED, Entry, main

__all__ = ["INTERRUPTED_SECONDS", "Pool", "Timings", "WorkerPool"]

_log = logging.getLogger("rl_ext_core.vector")

# How long a step that was interrupted may go on before its environment is closed.
INTERRUPTED_SECONDS = 5.0

# What a worker needs whatever its environment is.
_PRELOAD = ("numpy", "gymnasium.wrappers", "rl_ext_core.factory", "rl_ext_core.vector.worker")
# Calls that may change an environment, and how they are named to the caller.
_SET_ATTRIBUTE = {"set_attr": "set_attr({!r})", "set_wrapper_attr": "set_attr({!r})"}
_SETTING = {**_SET_ATTRIBUTE, "env_method": "env_method({!r})", "call": "call({!r})"}
_WHEN = {"start": "at its start", "idle": "between two calls", "constructor": "in its constructor"}


@dataclasses.dataclass
class Timings:
    """What a pool's environments have taken.

    :ivar start_seconds: until all environments were built
    :ivar steps: how many it has done, each of all environments
    :ivar total_step_seconds: of all of them, from the actions to what is returned
    :ivar restarts: workers that were put in the place of others
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
        """Count one."""
        self.steps += 1
        self.total_step_seconds += seconds


_T = TypeVar("_T", bound=Callable[..., Any])


def _noting_interrupts(method: _T) -> _T:
    """Decorate a pool's method so that the pool knows of a Ctrl-C in it: its workers may never end what they do."""

    @functools.wraps(method)
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    return cast(_T, noting)


class WorkerPool:
    """What pools of processes and of Ray's actors have in common.

    :param env_fns: build the environments
    :param new_worker: makes a worker of its number and those of its first environment and of the one behind its last,
        which it has as ``number``, ``first`` and ``last``, beside the ``answer`` that it has given
    :raises WorkerError: an environment cannot be built
    :raises EnvironmentOutputError: their spaces differ
    :raises InvalidArgumentError: their observations are not arrays of fixed shape

    :ivar worker_of: the worker of each environment
    :ivar seeds: of each environment's last reset
    :ivar spaces: observation and action space
    :ivar layout: of the arrays
    :ivar arrays: what environments have answered last, and the next actions
    :ivar began: when the last step did
    :ivar timings: how long the start and the steps have taken
    """

    spaces: Any
    layout: Layout

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        options: Options,
        new_worker: Callable[[int, int, int], Any],
    ) -> None:
        check_env_fns(env_fns)
        self._factories, self._options, self._close_timeout = factories_of(env_fns), options, options.close_timeout
        self._begin = time.perf_counter()
        self.workers = [
            new_worker(number, *ends) for number, ends in enumerate(shares(len(env_fns), options.n_workers))
        ]
        self.worker_of = [worker for worker in self.workers for _ in range(worker.first, worker.last)]
        self.seeds: list[int | None] = [None] * len(self.worker_of)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.timings = Timings()
        self.began = 0.0
        self._called: list[int] = []
        self._failure: WorkerError | None = None
        self._owner = os.getpid()
        self._interrupted = self._ended = self._changes_told = False
        self._unsettled = False  # until all answers to what was begun were read; Ctrl-C leaves it so

    def _start(self, *, after: int = 0) -> None:
        """Have the environments built, and agree on where arrays lie: so many bytes after the beginning of a block."""
        limit = self._options.start_timeout
        try:
            self._build()
            self.wait(limit, failing=True)
            self.spaces = common_spaces([spaces for worker in self.workers for spaces in worker.answer])
            self.layout = Layout.of(len(self.worker_of), *self.spaces, after=after)
            self._map(self.layout.arrays(self._block()))
            for worker in self.workers:
                self.send(worker, "map", self._layout_of(worker))
            self.wait(limit, failing=True)
        except BaseException:
            self.end()
            raise
        self.timings.start_seconds = time.perf_counter() - self._begin

    def _build(self) -> None:
        """Have workers begin to build their environments."""
        raise NotImplementedError

    def _block(self) -> Any:
        """Return the memory for the arrays."""
        raise NotImplementedError

    def _layout_of(self, worker: Any) -> Layout:
        """Return the layout that a worker has its arrays in."""
        return self.layout

    def send(self, worker: Any, name: str, data: Any) -> None:
        """Give a worker a command; that it is gone shows where its answer is waited for.

        :raises Exception: the data cannot be pickled
        """
        self._unsettled = True
        worker.send(name, data)

    def step(self) -> None:
        """Have all step with the actions in the arrays."""
        raise NotImplementedError

    def _map(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take the arrays, of which what every step needs is looked up once."""
        self.arrays, self._actions = arrays, arrays.get("action")
        self._observations = [arrays[f"observation {index}"] for index in range(len(self.layout.paths))]
        self._flags, self._kinds = arrays["flags"].data, arrays["reward kind"].data
        self._zeros = bytes(len(self.worker_of))

    @_noting_interrupts
    def begin_step(self, actions: Any, each: Callable[[Any], Sequence[Any]] = list) -> None:
        """Have all environments begin a step.

        :param each: makes a list of actions, one for each environment, of what is not of the shape of the array
        :raises InvalidArgumentError: there are fewer or more
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

    def is_quiet(self) -> bool:
        """Return whether a step has ended no episode, there are no informations, and rewards are plain: as of most."""
        # By comparing bytes, a tenth of what NumPy takes.
        return self._flags == self._kinds == self._zeros and all(worker.answer is None for worker in self.workers)

    @_noting_interrupts
    def begin_reset(self, asked: Sequence[tuple[int | None, dict[str, Any] | None] | None]) -> None:
        """Have environments begin to reset, each with a seed and options; None: that one is left as it is."""
        self.settle()
        for worker in self.workers:
            self.reset(worker, asked[worker.first : worker.last])

    def reset(self, worker: Any, asked: Sequence[tuple[int | None, dict[str, Any] | None] | None]) -> None:
        """Have a worker's environments reset, each with a seed and options; None: that one is left as it is."""
        for number, how in enumerate(asked, worker.first):
            if how is not None:
                self.seeds[number] = how[0]
        self.send(worker, "reset", list(asked))

    def answer_of(self, worker: Any, *, to_reset: bool = False) -> Any:
        """Return a worker's answer to a step or a reset: entries, or None; if it has failed, that of its successor.

        :param to_reset: which of the two
        :raises WorkerError: it has failed, and there is no other
        """
        return worker.answer

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

    def remember(self) -> None:
        """Keep what is returned, should a worker fail and be replaced."""

    def tell_of_changes(self, upstream: str) -> None:
        """Warn, once, that observations did not fit their space."""
        changed = self.arrays["flags"] & CHANGED
        if self._changes_told or not changed.any():
            return
        self._changes_told = True
        warnings.warn(
            f"environment {int(changed.argmax())} returns observations with values that the dtype of its observation "
            f"space, {self.spaces[0]}, cannot hold: they are changed to such that it can, as {upstream} does. Give the "
            "space the dtype of what reset and step return",
            stacklevel=4,
        )

    @_noting_interrupts
    def wait(self, timeout: float | None, *, failing: bool = False) -> None:
        """Wait for all answers that workers owe.

        Where workers fail apart from each other, the answer of one that has failed is a :class:`WorkerError`.

        :param timeout: seconds; None: forever
        :param failing: raise such an answer
        :raises WorkerError: a worker has failed
        """
        self.require_owner()
        self._receive(timeout)
        self._unsettled = False
        if failing:
            for worker in self.workers:
                if isinstance(worker.answer, WorkerError):
                    raise worker.answer

    def _receive(self, timeout: float | None) -> None:
        """Receive all answers that workers owe."""
        raise NotImplementedError

    def wait_for_step(self, *, failing: bool = False) -> None:
        """Wait for all answers, as long as a step may take: see :meth:`wait`."""
        self.wait(self._options.step_timeout, failing=failing)

    def settle(self) -> None:
        """Get ready for a command: drop answers that were not read because the reading was interrupted.

        :raises WorkerError: the workers were ended because of it
        """
        self.raise_failure()
        if self._unsettled:
            self._find_out()
            self.wait_for_step()
            self._interrupted = False

    def _find_out(self) -> None:
        """Find out what was done of commands that were interrupted."""

    def raise_failure(self) -> None:
        """Raise what has ended the workers.

        :raises WorkerError: that
        :raises InvalidArgumentError: If the workers are another process's.
        """
        self.require_owner()
        if self._failure is not None:
            raise self._failure

    @property
    def ours(self) -> bool:
        """Whether this process started the workers, and not one that it was forked from."""
        return os.getpid() == self._owner

    def require_owner(self) -> None:
        """Refuse calls from a forked process.

        :raises InvalidArgumentError: If the workers are another process's.
        """
        require_process(self._owner)

    def call(self, environments: Sequence[int], name: str, data: Any) -> list[Any]:
        """Have the same done with environments, and return what came of it: see :meth:`begin_call`."""
        self.begin_call(environments, name, [data] * len(environments))
        return self.results()

    @_noting_interrupts
    def begin_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Have something done with environments: see ``CALLS`` of :mod:`rl_ext_core.vector.environments`.

        :param environments: their numbers
        :param arguments: one for each
        """
        self.settle()
        asked: dict[int, list[tuple[int, Any]]] = {}
        for number, argument in zip(environments, arguments, strict=True):
            worker = self.worker_of[number]
            asked.setdefault(worker.number, []).append((number - worker.first, argument))
        self._called = [self.worker_of[number].number for number in environments]
        self._note_call(environments, name, arguments)
        for number, calls in asked.items():
            self.send(self.workers[number], name, calls)

    def _note_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        """Record a call that is begun, for workers that replace others."""

    def _note_results(self, results: Sequence[Any]) -> None:
        """Record what came of the call that was begun last."""

    def results(self) -> list[Any]:
        """Return what came of a call.

        :raises Exception: what an environment raised, when all have answered; it lives on
        :raises WorkerError: a worker has failed
        """
        self.wait_for_step(failing=True)
        answers = {number: iter(self.workers[number].answer) for number in self._called}
        results = [channel.unpack(next(answers[number])) for number in self._called]
        self._note_results(results)
        for result in results:
            if isinstance(result, Raised):
                raise result.with_traceback()
        return results

    def close(self, timeout: float | None = None) -> None:
        """Have the environments closed, and end the workers. Ctrl-C makes that short.

        In a forked process it does nothing: the workers are those of the process that started them.

        :param timeout: seconds that may take; None: ``close_timeout``
        :raises WorkerError: one of them fails in ``close``; all workers are gone all the same
        """
        failures: list[WorkerError] = []
        if not self.ours:
            return
        if timeout is not None:
            self._close_timeout = timeout
        try:
            if not self._ended:
                # Nobody knows whether what was interrupted would ever have ended.
                limit = self._close_timeout
                failures = self._close_environments(
                    INTERRUPTED_SECONDS if self._interrupted and limit is None else limit
                )
        finally:
            self.end()
        if failures:
            raise failures[0]

    def _close_environments(self, patience: float | None) -> list[WorkerError]:
        """Have workers close their environments, and return what fails in that."""
        raise NotImplementedError

    def end(self, failure: WorkerError | None = None) -> None:
        """End the workers without further ado; done again if it was interrupted. See :meth:`close` on forks."""
        if not self.ours:
            return
        self._ended, self._failure = True, self._failure or failure
        self._end_workers()

    def _end_workers(self) -> None:
        raise NotImplementedError

    def _failed(self, worker: Any, environment: int, phase: str, what: str, **more: Any) -> WorkerError:
        """Make the exception that says what has happened to an environment."""
        environment += worker.first
        seed = self.seeds[environment]
        who = f"environment {environment} of {len(self.seeds)}" + ("" if seed is None else f" (seed {seed})")
        lines = [f"{who}, {_WHEN.get(phase, f'in {phase}')}: {what}"]
        lines += [f"    {line}" for line in more.get("traceback", "").strip("\n").splitlines()]
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
        """Say that the time to close environments was up."""
        warnings.warn(
            f"environment {environment} of {len(self.seeds)} was still {where} after {time.monotonic() - begin:.3g} s "
            "of closing, and its worker was ended: what it writes may be incomplete. Write close_timeout=None to wait "
            "as long as it takes, or more",
            stacklevel=5,
        )


@dataclasses.dataclass
class Settings:
    """What the caller has set in an environment, for the one that replaces it.

    :ivar options: of the last reset, packed
    :ivar attributes: packed values by command and name, in the order in which they were set
    :ivar unrepeated: calls that the replacement does not get: methods, and attributes of which it is not known whether
        they were set
    """

    options: bytes | None = None
    attributes: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    unrepeated: dict[str, None] = dataclasses.field(default_factory=dict)


class Pool(WorkerPool):
    """Processes that hold environments and share one block of memory with this one: see :class:`WorkerPool`."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        options: Options,
        *,
        autoreset: Autoreset = Autoreset.SAME_STEP,
    ) -> None:
        super().__init__(env_fns, options, WorkerHandle)
        if processes.SUPPORTED:  # else it is refused below
            resources.check_descriptors(len(self.workers), "n_workers={}")
        self._autoreset, self._apart, self._last_first = autoreset, options.restart is not None, self.workers[::-1]
        self._last: list[np.ndarray[Any, Any]] = []  # observations that were returned, where workers are replaced
        self._settings = [Settings() for _ in self.worker_of]
        self._begun_call: tuple[Sequence[int], str, Sequence[Any]] | None = None
        self._spins = channel.worth_spinning(len(self.workers))
        cell_bytes = channel.CELL_BYTES * len(self.workers)
        self._memory = Memory(cell_bytes)
        self._cells = self._memory.map(cell_bytes)
        # The workers' own working directories. What environments write there is kept.
        self.working_directory = None if options.cwd is None else tempfile.mkdtemp(prefix="rl-ext-cwd-")
        # Folders of the workers' own.
        self._scratch = None if options.cure is None else TemporaryFolder()
        # Not by a method: whoever drops this object ends the workers.
        self._end = weakref.finalize(
            self, _end, self._owner, self.workers, self._memory, self._scratch, self.working_directory
        )
        self._end.atexit = False
        self._start(after=cell_bytes)

    def _build(self) -> None:
        self._launch(self.workers)

    def _block(self) -> Any:
        self._memory.grow(self.layout.size)
        return self._memory.map(self.layout.size)

    @uninterrupted
    def _launch(self, workers: Sequence[WorkerHandle]) -> None:
        """Start processes; if that fails, there is none."""
        preload = dict.fromkeys([*_PRELOAD, *(name for factory in self._factories for name in factory.preload)])
        decisions = [self._factories[worker.first].decision for worker in workers]
        environs: list[Mapping[str, str | None]] = [
            {} if decision is None else decision.variables for decision in decisions
        ]
        context = processes.get_context(
            self._options.start_method, preload=tuple(preload), environs=environs, import_time=READ_AT_IMPORT
        )
        started: list[Any] = []
        try:
            for worker in workers:
                started.append(self._launch_one(context, worker))
        except BaseException:
            for process in started:
                process.kill()
                process.join()
            for worker in workers:
                worker.disconnect()
            raise
        for together in [[worker] for worker in workers] if self._apart else [workers]:
            watch = processes.Watch(
                [worker.process for worker in together], idle_in=IDLE_IN, on_failure=functools.partial(_wake, together)
            )
            for worker in together:
                worker.watch = watch

    def _launch_one(self, context: Any, worker: WorkerHandle) -> Any:
        worker.disconnect()
        cells = channel.cells_of(self._cells, worker.number)
        for place in range(len(cells)):
            cells[place] = 0
        cells[Cell.TOLD] = 1  # to build its environments
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            command_reader, commands = context.Pipe(duplex=False)
            theirs.enter_context(command_reader)
            ours.enter_context(commands)
            replies, reply_writer = context.Pipe(duplex=False)
            ours.enter_context(reply_writer)
            ours.enter_context(replies)
            for ringing in (commands, reply_writer):
                os.set_blocking(ringing.fileno(), False)
            mail = Memory(0)
            forked = context.get_start_method() == "fork"
            foreign = [end for other in self.workers for end in other.ends] + [commands, replies] if forked else []
            factories = [factory.again(worker.attempt) for factory in self._factories[worker.first : worker.last]]
            cure = None
            if self._options.cure is not None and self._scratch is not None:
                cure = self._options.cure, Path(self._scratch.name, f"{worker.number}-{worker.attempt}")
                cure[1].mkdir()
            cwd = None if self.working_directory is None else Path(self.working_directory, str(worker.number))
            args = (command_reader, reply_writer, self._memory, mail, worker.number, worker.first, factories)
            process = context.Process(target=main, args=(*args, foreign, self._spins, cure, cwd, self._autoreset))
            process.start()
            spin = Spin(Spin.FOR_ANSWERS) if self._spins else None
            worker.connect(process, commands, replies, reply_writer, mail, cells, spin)
            ours.pop_all()
        return process

    def reset(self, worker: Any, asked: Sequence[tuple[int | None, dict[str, Any] | None] | None]) -> None:
        """Have a worker's environments reset: see :meth:`WorkerPool.reset`."""
        if self._apart:
            for settings, how in zip(self._settings[worker.first : worker.last], asked, strict=True):
                if how is not None:
                    settings.options = channel.pack_by_value(how[1]) if how[1] else None
        super().reset(worker, asked)

    def _note_call(self, environments: Sequence[int], name: str, arguments: Sequence[Any]) -> None:
        self._begun_call = None
        if not self._apart or name not in _SETTING:
            return
        self._begun_call = environments, name, arguments
        for number, argument in zip(environments, arguments, strict=True):
            self._settings[number].unrepeated[_SETTING[name].format(argument[0])] = None

    def _note_results(self, results: Sequence[Any]) -> None:
        begun, self._begun_call = self._begun_call, None
        if begun is None or begun[1] not in _SET_ATTRIBUTE:
            return
        # Packed now, as the worker got them: the caller may change them.
        packed = {id(argument): channel.pack_by_value(argument) for argument in begun[2]}
        for number, argument, result in zip(begun[0], begun[2], results, strict=True):
            settings, key = self._settings[number], (begun[1], argument[0])
            settings.unrepeated.pop(_SETTING[begun[1]].format(argument[0]), None)
            if not isinstance(result, Raised):
                settings.attributes.pop(key, None)
                settings.attributes[key] = packed[id(argument)]

    def step(self) -> None:
        """Have all step with the actions in shared memory."""
        self._unsettled = True
        for worker in self.workers:
            worker.step()

    def _receive(self, timeout: float | None) -> None:
        if timeout is not None and self._apart:
            self._wait_apart([worker for worker in self.workers if worker.is_awaited()], timeout)
        elif timeout is not None:
            self._wait_together(timeout)
            return
        # The last to be asked is the last to answer: it alone is waited for, where others' turns come.
        for worker in self._last_first:
            try:
                worker.receive()
            except EOFError:
                if not worker.has_failed():
                    raise
                self._fail(worker)

    def _fail(self, worker: WorkerHandle) -> None:
        """Take a worker's failure for its answer, or for the end of all."""
        if self._apart:
            worker.answer = worker.lost if worker.watch is None else self._described(worker)
            worker.await_nothing()
        else:
            error = self._described(worker)
            self.end(error)
            raise error from error.__cause__

    def _wait_together(self, timeout: float) -> None:
        watch = self.workers[0].watch
        try:
            with contextlib.nullcontext() if watch is None else watch.operation("", timeout):
                self._receive(None)
        except WorkerError:
            if self._failure is None:  # it has failed before it was waited for, which is told in a better way
                self._fail(self.workers[0])
            raise

    def _wait_apart(self, workers: Sequence[WorkerHandle], timeout: float) -> None:
        # Each has its own limit, which ends as soon as it answers, however long another takes.
        limits = {worker.replies: (worker, contextlib.ExitStack()) for worker in workers if not worker.is_over()}
        poll = select.poll()
        try:
            for descriptor, (worker, limit) in limits.items():
                assert worker.watch is not None
                poll.register(descriptor, select.POLLIN)
                with contextlib.suppress(WorkerError):  # it has failed just now: that is told where its answer is read
                    limit.enter_context(worker.watch.operation("", timeout))
            while limits:
                for descriptor, _ in poll.poll():
                    worker, limit = limits[descriptor]
                    if not worker.is_over():
                        os.read(descriptor, 4096)  # of before; the answer's own may be among it
                    if worker.is_over():
                        del limits[descriptor]
                        poll.unregister(descriptor)
                        limit.close()
        finally:
            for _, limit in limits.values():
                limit.close()

    def _described(self, worker: WorkerHandle) -> WorkerError:
        watch = worker.watch
        assert watch is not None
        assert watch.failure is not None
        with contextlib.suppress(WorkerError), watch.operation(""):
            pass  # waits until the workers are gone
        failure, watched = watch.failure, [worker] if self._apart else self.workers
        worker = watched[failure.worker]
        error = self._failed(
            worker,
            worker.cells[Cell.ENVIRONMENT],
            PHASES[worker.cells[Cell.PHASE]],
            failure.summary.removeprefix(f"worker {failure.worker} of {len(watched)} "),
            kind=failure.kind,
            exitcode=failure.exitcode,
            traceback=failure.traceback,
            notes=failure.notes,
        )
        error.__cause__ = failure.exception
        return error

    def _find_out(self) -> None:
        for worker in self.workers:
            if worker.lost is not None:
                worker.end()
            else:
                worker.settle()

    def answer_of(self, worker: WorkerHandle, *, to_reset: bool = False) -> Any:
        """Return a worker's answer, or its successor's: see :meth:`WorkerPool.answer_of`."""
        if isinstance(worker.answer, WorkerError):
            unseen = not to_reset and self._autoreset is not Autoreset.SAME_STEP
            return self._replaced(worker, worker.answer, to_reset=to_reset, unseen=unseen)
        return worker.answer

    def remember(self) -> None:
        """Keep what is returned: the last that anybody has seen of an episode, should its worker fail."""
        if self._apart:
            self._last = [array.copy() for array in self._observations]

    def is_ready(self, timeout: float) -> bool:
        """Return whether all answers that workers owe are there within a time, in seconds."""
        self.require_owner()
        return not _wait_while(self.workers, lambda worker: not worker.is_over(), time.monotonic(), timeout)

    def _replaced(self, worker: WorkerHandle, first: WorkerError, *, to_reset: bool, unseen: bool) -> list[Entry]:
        """Put a new process in the place of one that has failed, with its environments reset, and return its answer.

        :raises WorkerError: the limit is reached; the other workers are gone then as well
        """
        failure, timings, limit = first, self.timings, self._options.max_restarts
        while True:
            if timings.restarts >= limit:
                self.end(failure)
                raise failure
            timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, timings.restarts, limit)
            try:
                infos = self._restart(worker, first, same_seeds=to_reset and failure is first, unseen=unseen)
                break
            except WorkerError as again:
                failure = again
            finally:
                # Ctrl-C may come at any time: then all of this is done again.
                worker.answer = first
        rows = slice(worker.first, worker.last)
        self.arrays["reward"][rows], self.arrays["reward kind"][rows] = 0.0, 0
        self.arrays["flags"][rows] = TRUNCATED
        errors = [{"worker_error": self._worker_error(first, index)} for index in range(worker.first, worker.last)]
        answer: list[Entry] = [
            (dict(error), None if unseen else {**info, **error}, None, self._last_of(index))
            for index, ((_, info, _, _), error) in enumerate(zip(infos, errors, strict=True), worker.first)
        ]
        if unseen:
            for array, last in zip(self._observations, self._last, strict=True):
                array[rows] = last[rows]
        worker.answer, worker.lost = answer, None
        return answer

    def _worker_error(self, failure: WorkerError, number: int) -> str:
        """Return the text for infos of an environment that replaces another."""
        settings, seed = self._settings[number], self.seeds[number]
        options = None if settings.options is None else channel.unpack(settings.options)
        how = {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
        repeated = [_SETTING[command].format(name) for command, name in settings.attributes]
        if how:
            repeated.append(f"reset({', '.join(f'{name}={reprlib.repr(value)}' for name, value in how.items())})")
        lines = [str(failure)]
        if repeated:
            lines.append(f"The new environment got again: {', '.join(repeated)}.")
        if settings.unrepeated:
            lines.append(f"It did not get: {', '.join(settings.unrepeated)}. Call them again for environment {number}.")
        return "\n".join(lines)

    def _last_of(self, index: int) -> Any:
        # Nothing was returned yet where the first reset fails: then nobody reads this.
        return self.layout.joined([array[index].copy() for array in self._last]) if self._last else None

    def _restart(self, worker: WorkerHandle, failure: WorkerError, *, same_seeds: bool, unseen: bool) -> Any:
        """Replace a process once, and return what its environments told of their resets.

        :param same_seeds: whether they are reset with the seeds of the last reset, and not with others drawn from them:
            the same seeds repeat the same episodes, and often the same failure
        """
        worker.lost, self._unsettled = failure, True
        worker.end()
        worker.attempt += 1
        self._launch([worker])
        self._wait_for(worker, self._options.start_timeout)
        self.send(worker, "map", self.layout)
        self._wait_for(worker, self._options.start_timeout)
        self._set_attributes(worker)
        seeds = self.seeds[worker.first : worker.last]
        if not same_seeds:
            seeds = [None if seed is None else _next_seed(seed, worker.attempt) for seed in seeds]
        packed = [settings.options for settings in self._settings[worker.first : worker.last]]
        options = [None if one is None else channel.unpack(one) for one in packed]
        self.reset(worker, list(zip(seeds, options, strict=True)))
        self._wait_for(worker, self._options.step_timeout)
        infos = worker.answer
        if unseen and self._autoreset is Autoreset.NEXT_STEP:
            self.send(worker, "reset at next step", None)
            self._wait_for(worker, self._options.step_timeout)
        return infos

    def _set_attributes(self, worker: WorkerHandle) -> None:
        """Set in a new worker's environments the attributes that were set in those before."""
        calls: dict[str, list[tuple[int, Any]]] = {}
        for number, settings in enumerate(self._settings[worker.first : worker.last]):
            for (command, _), packed in settings.attributes.items():
                calls.setdefault(command, []).append((number, channel.unpack(packed)))
        for command, asked in calls.items():
            self.send(worker, command, asked)
            self._wait_for(worker, self._options.step_timeout)
            for (number, (name, _)), result in zip(asked, worker.answer, strict=True):
                if isinstance(channel.unpack(result), Raised):
                    settings = self._settings[worker.first + number]
                    settings.unrepeated[_SETTING[command].format(name)] = None
                    del settings.attributes[command, name]

    def _wait_for(self, worker: WorkerHandle, timeout: float | None) -> None:
        if timeout is not None:
            self._wait_apart([worker], timeout)
        self._receive(None)
        if isinstance(worker.answer, WorkerError):
            raise worker.answer

    def _close_environments(self, patience: float | None) -> list[WorkerError]:
        begin, limit = time.monotonic(), self._close_timeout
        for worker in self.workers:
            if worker.watch is not None:
                worker.watch.closing()
            worker.settle()
        late = _wait_while(self.workers, WorkerHandle.is_busy, begin, patience)
        for worker in self.workers:
            if worker not in late and worker.is_over() and not worker.has_failed():
                worker.await_nothing()
                self.send(worker, "close", None)
        late += _wait_while(
            [worker for worker in self.workers if worker not in late], WorkerHandle.is_busy, begin, limit
        )
        failures = [found for worker in self.workers if worker.is_over() and (found := self._failure_to_close(worker))]
        late += _wait_while(
            [worker for worker in self.workers if worker not in late], WorkerHandle.is_alive, begin, limit
        )
        if late:
            number, at = late[0].cells[Cell.ENVIRONMENT], PHASES[late[0].cells[Cell.PHASE]]
            where = "in threads that go on after its close" if at == "idle" else f"in {at}"
            self._warn_of_late(late[0].first + number, where, begin)
        return failures

    def _failure_to_close(self, worker: WorkerHandle) -> WorkerError | None:
        """Return what an environment has failed of in ``close``; what has happened before concerns nobody any more."""
        if worker.watch is None or not worker.is_awaited():
            return None
        if worker.watch.failure is None:
            worker.receive()
            return self._failed_to_close(worker)
        error = self._described(worker)
        return error if error.phase == "close" else None

    def _end_workers(self) -> None:
        _end(self._owner, self.workers, self._memory, self._scratch, self.working_directory)
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


def _next_seed(seed: int, attempt: int) -> int:
    """Draw a seed from another one, which fits into 31 bits as all environments take it."""
    return int(np.random.SeedSequence([int(seed), attempt]).generate_state(1)[0] >> 1)


def _wake(workers: Sequence[WorkerHandle]) -> None:
    for worker in workers:
        worker.wake()


def _end(
    owner: int, workers: Sequence[WorkerHandle], memory: Memory, scratch: Any, working_directory: str | None
) -> None:
    """End workers, in the process that started them; done again if it was interrupted."""
    if os.getpid() != owner:
        return
    for watch in {id(worker.watch): worker.watch for worker in workers}.values():
        if watch is not None:
            watch.kill()
            watch.stop()
    for worker in workers:
        worker.disconnect()
    memory.close()
    if scratch is not None:
        scratch.cleanup()
    if working_directory is not None:
        # Those that are empty are of no use to anybody.
        for folder in [*(os.path.join(working_directory, str(worker.number)) for worker in workers), working_directory]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def shares(num_envs: int, num_workers: int | None) -> list[tuple[int, int]]:
    """Return the first environment of each worker and the one behind its last: in order, as evenly as that goes."""
    count = min(num_workers or num_envs, num_envs)
    return list(itertools.pairwise(round(worker * num_envs / count) for worker in range(count + 1)))
