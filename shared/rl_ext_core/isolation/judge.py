"""``probe``: read declarations, or run trials, compare their results, and conclude a verdict.

A trial with a single instance provides the reference. In the next trials, two instances run in two processes, then in
one process. They are built in both orders, and one is closed half-way. This process sends all operations. Their order
is therefore the same in each trial, and the operation that fails or hangs is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rl_ext_core import _file_guard
from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory.compare import WORKER_MODULES
from rl_ext_core.isolation import trial
from rl_ext_core.isolation.trial import RETURNED, STILL_RETURNED, Operation
from rl_ext_core.isolation.verdict import (
    MIN_STEPS,
    Isolation,
    Verdict,
    conclude,
    declared_by_source,
    declared_verdict,
)
from rl_ext_core.processes import get_context

__all__ = ["probe"]

_log = logging.getLogger("rl_ext_core.isolation")
_MAX_SOURCES = 8

# Time limits of an operation: of the first trial, then a multiple of the longest time measured there, and its minimum.
_FIRST_LIMIT_S, _LIMIT_FACTOR, _MIN_LIMIT_S = 300.0, 20, 20.0
_CLOSE_TIMEOUT_S = 3.0
# Seconds of steps to compare. If the first reset and three steps take longer, only _SHORT_STEPS steps are compared.
_STEPPING_S, _SHORT_STEPS = 2.0, 6
_ORDINALS = ("the first", "the second", "the third", "the fourth")
_DOING = {"load": "unpickling", "build": "building", "reset": "resetting", "close": "closing", "measure": "measuring"}
_MISSING = ("raises FileNotFoundError", "raises NotADirectoryError")
_FAILURE_TEXT = "A single instance works, and so do two in separate processes. In one process, {problem}."
_VARYING_TEXT = (
    "A single instance does not return the same twice with the same seed and actions, so the effect of a second one "
    "cannot be detected."
)


def probe(source: Any, *, steps: int = 100, timeout: float | None = None) -> Verdict:
    """Test whether several instances of an environment can share a process.

    Instances are built in temporary processes, never in this one.

    A declaration takes precedence: ``metadata = {"isolation": "process"}`` in the environment's class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description. Otherwise three trials run in temporary
    processes, with the same seeds and actions and an empty working directory:

    - a single instance,
    - two instances in two processes,
    - two instances in one process, built in both orders. One of them is closed half-way.

    Observations, rewards, flags, infos and ``action_masks()`` are compared bit for bit. Effects of a third instance, of
    more steps, or of ``reset`` options are not detected.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: An environment, a function or class that builds one, a gymnasium id or specification, or the result
        of :func:`~rl_ext_core.factory.as_factory`. A list contains sources that share a process. The first eight
        different ones are tested.
    :param steps: Number of steps to compare, at least 10. Fewer are compared if steps are slow.
    :param timeout: Seconds that building an environment, a reset or a step may take. The default is 300 for the first
        instance. For others it is 20 times the longest time measured there, at least 20.
    :return: The verdict. Its ``isolation`` is ``UNKNOWN`` if the environment cannot be tested in another process.
    :raises InvalidArgumentError: If the declared value is unknown, or ``steps`` or ``timeout`` is out of range.
    :raises WorkerError: If Python cannot be started.
    """
    start = time.monotonic()
    if steps < MIN_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is too small: expected at least {MIN_STEPS}. Use steps=100")
    if not (timeout is None or timeout > 0):
        raise InvalidArgumentError(
            f"timeout={timeout!r} is not valid: expected seconds above 0, or None for the default. Use timeout=60"
        )
    sources = list(source) if isinstance(source, (list, tuple)) else [source, source]
    if not sources:
        raise InvalidArgumentError("source=[] is empty: expected at least one factory. Use probe([make] * 4)")
    try:
        made = {key: as_factory(one, verify=False) for key, one in {id(one): one for one in sources}.items()}
    except NotCopyableError as error:
        return conclude(Isolation.UNKNOWN, f"It could not be tested: {str(error).rstrip('.')}.")
    declarations = [declared_by_source(factory) for factory in made.values()]
    declared = [declared_verdict(declaration) for declaration in declarations if declaration is not None]
    # The strictest declaration counts. A source without one could be stricter than a mild declaration.
    verdict = next((one for one in declared if not one.in_process), None)
    if verdict is None and declared and None not in declarations:
        verdict = declared[0]
    if verdict is None:
        # A source that occurs several times is built twice. There are at least two instances in all.
        times = {key: min(2, sum(id(one) == key for one in sources)) for key in [*made][:_MAX_SOURCES]}
        trial_factories = [made[key] for key, count in times.items() for _ in range(count if len(made) > 1 else 2)]
        what = f"{len(trial_factories) + 1} instances of {trial_factories[0].to_source()}"
        _log.info('testing %s in temporary processes. To skip this, write isolation="process"', what)
        verdict = Judge(trial_factories, steps, timeout).verdict()
        if len(made) > _MAX_SOURCES:
            text = f"{verdict.explanation} Sources after the first {_MAX_SOURCES} different ones were not tested."
            verdict = dataclasses.replace(verdict, explanation=text)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - start, 3))


def _resets_and_steps(source: int, order: int, steps: int) -> list[Operation]:
    """Return the operations that reset and step an instance, in order.

    There are short episodes with ``steps`` steps, then a reset and two more steps.
    """
    step, unseeded = Operation(source, order, "step"), Operation(source, order, "reset")
    first, second = (Operation(source, order, "reset", 1000 * source + seed) for seed in (1, 2))
    if steps < MIN_STEPS:
        return [first, step, step, step, second, *[step] * (steps - 3)]
    episodes = [first, step, step, step, unseeded, step, step, step, second, *[step] * (steps - 6)]
    return [*episodes, unseeded, step, step]


def _interleaved_operations(
    sources: Iterable[int], order: int, steps: int, *, ahead: int, part: float
) -> list[Operation]:
    """Return the operations of several instances, from build to close, interleaved.

    :param sources: Indices of the factories that build the instances.
    :param order: 0 for the first instance of each source, 1 for the second one.
    :param steps: Number of steps of an instance.
    :param ahead: Number of operations by which each instance is ahead of the next one.
    :param part: Fraction of the resets and steps after which all instances except that of source 0 are closed.
    """
    turns = []
    for place, source in enumerate(sources):
        episodes = _resets_and_steps(source, order, steps)
        episodes = episodes if source == 0 else episodes[: int(part * len(episodes))]
        operations = [Operation(source, order, "build"), *episodes, Operation(source, order, "close")]
        turns += [(place * ahead + turn, place, operation) for turn, operation in enumerate(operations)]
    return [operation for *_, operation in sorted(turns, key=lambda turn: turn[:2])]


class _FailedError(Exception):
    """Raised if an operation failed. The text ends a sentence that begins with the operation."""


class _Process:
    """The parent's handle of a trial process, whose first answer confirms that it loaded the factories."""

    def __init__(self, context: Any, packed: bytes, folder: Path, cwd: Path) -> None:
        for new in (folder, cwd):
            new.mkdir(exist_ok=True)
        self._output_file = folder / trial.OUTPUT_FILE
        self._output_file.touch()
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=trial.serve, args=(theirs, packed, str(folder), str(cwd)))
            self._process.start()

    def send(self, operation: Operation | None) -> None:
        """Send an operation to perform. None ends the process."""
        with contextlib.suppress(OSError):  # The process has ended. receive_answer() reports it.
            self._connection.send(operation)

    def receive_answer(self, limit: float) -> dict[str, Any]:
        """Wait up to ``limit`` seconds for the answer to the operation.

        :raises _FailedError: If the operation raises, takes longer than the limit, or ends the process.
        """
        if not connection.wait([self._connection, self._process.sentinel], limit):
            self._process.kill()
            raise _FailedError(f"hangs, or takes more than {limit:g} s{self._last_printed_line()}")
        answer: dict[str, Any] | None = None
        with contextlib.suppress(EOFError, OSError):
            # The pipe may stay open after the process ended, because a child of it may have inherited the other end.
            answer = self._connection.recv() if self._connection.poll() else None
        if answer is None:
            self._process.join(_CLOSE_TIMEOUT_S)
            code = self._process.exitcode
            text = "ends the process" if code is None else f"ends the process with exit code {code}"
            if code is not None and code < 0:
                text = f"kills the process by {signal.Signals(-code).name}"
            raise _FailedError(f"{text}{self._last_printed_line()}")
        if "raises" in answer:
            raise _FailedError(f"raises {answer['raises']}")
        return answer

    def _last_printed_line(self) -> str:
        """Return the last line that the process printed, for an error text; empty if none."""
        lines = self._output_file.read_text(encoding="utf-8", errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" (it printed: {line[-200:]!r})" if line else ""

    def close(self) -> None:
        """Let the process close its environments, then kill it and the processes that it started."""
        self.send(None)
        ends = [self._connection, self._process.sentinel]
        with contextlib.suppress(EOFError, OSError):
            while connection.wait(ends, _CLOSE_TIMEOUT_S) and self._connection.poll():
                if self._connection.recv() is None:
                    break
        self._process.kill()
        self._process.join()
        self._connection.close()


@dataclasses.dataclass
class _TrialLog:
    """Completed operations of a trial with their answers, and the operation that failed and ended it.

    :ivar failure_text: End of a sentence about the failure. The sentence begins with the operation.
    """

    performed: list[tuple[Operation, dict[str, Any]]] = dataclasses.field(default_factory=list)
    failed: Operation | None = None
    failure_text: str = ""

    def instances(self) -> list[tuple[int, int]]:
        """Return source and order of each instance, in the order in which they were built."""
        return [done[:2] for done, _ in self.performed if done.kind == "build"]

    def answers_of(self, instance: tuple[int, int]) -> list[tuple[str, dict[str, Any]]]:
        """Return the kinds of an instance's resets and steps, with the answers."""
        return [(done.kind, seen) for done, seen in self.performed if done[:2] == instance and RETURNED in seen]

    def digests_of(self, source: int) -> list[str]:
        """Return digests of the results of the first instance of a source."""
        return [seen[RETURNED] for _, seen in self.answers_of((source, 0))]

    def seconds(self, *kinds: str) -> list[float]:
        """Return the seconds that operations of some kinds took."""
        return [seen["seconds"] for done, seen in self.performed if done.kind in kinds]

    def find_entry(self, name: str) -> Any:
        """Return the first entry of this name in the answers, or None if there is none."""
        return next((seen[name] for _, seen in self.performed if seen.get(name) is not None), None)

    def name_of(self, instance: tuple[int, int]) -> str:
        """Return the name of an instance in sentences, such as "the second"."""
        place = [*self.instances(), instance].index(instance)
        return _ORDINALS[place] if place < len(_ORDINALS) else f"number {place + 1}"

    def describe_failure(self, name: str = "") -> str:
        """Return a clause about the operation that failed. The default name is the ordinal number of the instance."""
        assert self.failed is not None
        name = name or self.name_of(self.failed[:2])
        doing = f"{_DOING.get(self.failed.kind)} {name}"
        if self.failed.kind == "step":
            doing = f"step {sum(kind == 'step' for kind, _ in self.answers_of(self.failed[:2])) + 1} of {name}"
        closed = [self.name_of(done[:2]) for done, _ in self.performed if done.kind == "close"]
        return f"{doing}{f', after {closed[-1]} was closed,' if closed else ''} {self.failure_text}"

    def failure_together(self, alone: _TrialLog) -> str | None:
        """Return a clause about a failure that a single instance does not have, or None."""
        complaint = self.find_entry("complaint")
        if self.failed is None and (not complaint or alone.find_entry("complaint")):
            return None
        return f"closing one raises {complaint}" if self.failed is None else self.describe_failure()


class Judge:
    """Runs the trials of at least two factories, and compares them."""

    def __init__(self, factories: Sequence[EnvFactory[Any]], steps: int, timeout: float | None) -> None:
        self._factories, self._steps, self._timeout = list(factories), steps, timeout
        self._limit = _FIRST_LIMIT_S if timeout is None else timeout
        self._is_one_factory = all(factory is factories[0] for factory in factories)
        self._varying: set[str] = set()  # Names of infos and masks that differ in each run, so they are not compared.

    def verdict(self) -> Verdict:
        """Run the trials and return the verdict."""
        try:
            self._packed = trial.pack_factories(self._factories)
        except Exception as error:
            return conclude(Isolation.UNKNOWN, f"It could not be tested: pickling raises {str(error).rstrip('.')}.")
        alone = self._run_alone(shorten=True)
        declared = alone.find_entry("declared") if self._is_one_factory else None
        if alone.failed is not None:
            return self._verdict_on_failure(alone) if declared is None else declared_verdict(declared)
        longest = max(alone.seconds("build", "reset", "step"))
        self._limit = max(_MIN_LIMIT_S, _LIMIT_FACTOR * longest) if self._timeout is None else self._timeout
        return dataclasses.replace(
            self._compare(alone) if declared is None else declared_verdict(declared),
            step_seconds=alone.find_entry("step_seconds"),
            private_bytes=alone.find_entry("private_bytes"),
        )

    # -- trials

    def _run_alone(self, source: int = 0, *, shorten: bool = False) -> _TrialLog:
        """Run the trial with a single instance; ``shorten`` takes fewer steps from now on if the first are slow."""
        run = _TrialLog()

        def operations() -> Iterator[Operation]:
            yield from (Operation(source, 0, "build"), *_resets_and_steps(source, 0, self._steps)[:4])
            if shorten and sum(run.seconds("reset", "step")) > _STEPPING_S:
                self._steps = _SHORT_STEPS
            elif shorten:
                affordable = _STEPPING_S / max(min(run.seconds("step")), 1e-9)
                self._steps = max(MIN_STEPS, int(min(self._steps, affordable)))
            yield from _resets_and_steps(source, 0, self._steps)[4:]
            yield from (Operation(source, 0, "measure"), Operation(source, 0, "close", counts=False))

        return self._run(operations(), run)

    def _run_apart(self, *, own_cwd: bool = False) -> _TrialLog:
        """Run the trial with each instance in its own process."""
        script = _interleaved_operations(range(len(self._factories)), 0, self._steps, ahead=3, part=2 / 3)
        counting = (operation._replace(counts=operation.kind != "close") for operation in script)
        return self._run(counting, _TrialLog(), apart=True, own_cwd=own_cwd)

    def _run_together(self) -> _TrialLog:
        """Run the trial with two instances of each source in one process."""
        sources = range(len(self._factories))
        script = _interleaved_operations(sources, 0, self._steps, ahead=3, part=2 / 3)
        script += _interleaved_operations(sources[::-1], 1, self._steps, ahead=6, part=1 / 2)
        # A crash in the last close is ignored, because many libraries crash when their process ends.
        return self._run([*script[:-1], script[-1]._replace(counts=False)], _TrialLog())

    def _run(
        self, operations: Iterable[Operation], run: _TrialLog, *, apart: bool = False, own_cwd: bool = False
    ) -> _TrialLog:
        """Perform operations in new processes, which share a folder for temporary files, and log the answers.

        :param apart: Whether to use one process per source instead of one for all.
        :param own_cwd: Whether each process gets its own working directory.
        """
        operation, count = Operation(0, 0, "load"), len(self._factories) if apart else 1
        decision = self._factories[0].decision
        preload = dict.fromkeys([*WORKER_MODULES, *(name for factory in self._factories for name in factory.preload)])
        with tempfile.TemporaryDirectory(prefix="rl-ext-", ignore_cleanup_errors=True) as name:
            processes, folder = list[_Process](), Path(name).resolve()
            created = folder / trial.CREATED_FILE
            created.touch()
            temporary = folder / "tmp"
            temporary.mkdir()
            variables = {} if decision is None else dict(decision.variables)
            variables |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
            context = get_context(preload=tuple(preload), environs=[variables] * count, label="trial")
            try:
                for number in range(count):
                    cwd = folder / (f"cwd{number}" if own_cwd else "cwd")
                    processes.append(_Process(context, self._packed, folder / str(number), cwd))
                for process in processes:
                    # The user's timeout does not apply to imports.
                    process.receive_answer(max(_FIRST_LIMIT_S, self._timeout or 0.0))
                for operation in operations:
                    process = processes[operation.source if apart else 0]
                    process.send(operation)
                    try:
                        run.performed.append((operation, process.receive_answer(self._limit)))
                    except _FailedError:
                        if operation.counts:
                            raise
            except _FailedError as failure:
                run.failed, run.failure_text = operation, str(failure)
            finally:
                for process in processes:
                    process.close()
                _file_guard.remove_created(created)
        return run

    # -- comparisons

    def _compare(self, alone: _TrialLog) -> Verdict:
        apart = self._run_apart()
        if self._problem_apart(apart, alone) is not None:
            return self._judge_processes(apart, alone)
        together = self._run_together()
        if (failure := together.failure_together(alone)) is not None:
            return conclude(Isolation.SINGLE_INSTANCE, _FAILURE_TEXT.format(problem=failure))
        if self._difference(together, apart) is not None:
            again = self._run_apart()
            if self._problem_apart(again, alone) or self._difference(again, apart, vary=True):
                return conclude(Isolation.NON_DETERMINISTIC, _VARYING_TEXT)
            if (difference := self._difference(together, apart)) is not None:
                return conclude(
                    Isolation.SHARED_STATE,
                    f"With a second instance in the same process, {difference}, compared with a single one with the "
                    "same seed and actions. A second one in another process makes no difference. They share state.",
                )
        if self._is_one_factory and apart.digests_of(1) == alone.digests_of(0)[: len(apart.digests_of(1))]:
            return conclude(
                Isolation.NON_DETERMINISTIC,
                f"Within {self._steps} steps, nothing that it returned depended on seeds or actions, so shared state "
                "cannot be detected. To compare more steps, use probe(source, steps=...).",
            )
        # SB3's Monitor adds the time of day to the "episode" info, which therefore always differs.
        varying = sorted(name for name in self._varying if not name.endswith("['episode']"))
        left = f" Not compared, because it differs in each run: {', '.join(varying)}." if varying else ""
        return conclude(
            Isolation.INDEPENDENT,
            f"Two instances in one process return the same as a single one, bit for bit, in {self._steps} steps and "
            "several resets, and so do two in separate processes. The order of building them, and closing one, make no "
            f"difference.{left}",
        )

    def _problem_apart(self, apart: _TrialLog, alone: _TrialLog) -> str | None:
        """Return a clause on how instances in separate processes differ from one, or None."""
        return apart.describe_failure() if apart.failed is not None else self._difference(apart, alone, vary=True)

    def _judge_processes(self, apart: _TrialLog, alone: _TrialLog) -> Verdict:
        """Judge two processes that differ from one: they disturb each other, or the environment fails or varies."""
        source = 0 if apart.failed is None else apart.failed.source
        again = self._run_alone(source)
        if again.failed is not None:
            number = list(dict.fromkeys(self._factories)).index(self._factories[source]) + 1
            return self._verdict_on_failure(again, f"Source {number}" if number > 1 else "A single instance")
        together = self._run_together()
        failure, confirmed = together.failure_together(alone), self._problem_apart(self._run_apart(), alone)
        if confirmed is None or (source == 0 and again.digests_of(0) != alone.digests_of(0)):
            if failure is not None:
                return conclude(Isolation.SINGLE_INSTANCE, _FAILURE_TEXT.format(problem=failure))
            return conclude(Isolation.NON_DETERMINISTIC, _VARYING_TEXT)
        helps = self._problem_apart(self._run_apart(own_cwd=True), alone) is None
        in_process = failure is None and self._difference(together, alone) is None
        text = f"Even two instances in separate processes disturb each other: {confirmed}, unlike a single one."
        if helps:
            text += ' With separate working directories they do not: use make_vec_env(..., cwd="own").'
        if in_process:
            text += " In one process they are independent."
        elif not helps:
            text += ' Separate working directories (cwd="own") do not help, so only one instance can run at a time.'
        return conclude(Isolation.PROCESSES_COLLIDE, text, in_process=in_process)

    def _verdict_on_failure(self, run: _TrialLog, which: str = "A single instance") -> Verdict:
        """Return the verdict on a trial that failed: broken, or unknown if it could not start."""
        assert run.failed is not None
        text = run.failure_text
        more = " Trials have an empty working directory." if text.startswith(_MISSING) else ""
        if text.startswith("hangs"):
            more = " To wait longer, use probe(source, timeout=...) or make_vec_env(..., probe_timeout=...)."
        # An exception of a constructor may be due to the trial.
        early = run.failed.kind == "load" or (run.failed.kind == "build" and text.startswith("raises"))
        early = early or _file_guard.REFUSAL in text
        if more or early:
            return conclude(Isolation.UNKNOWN, f"{which} could not be tested: {run.describe_failure('it')}.{more}")
        return conclude(Isolation.BROKEN, f"{which} fails: {run.describe_failure('it')}.")

    def _difference(self, run: _TrialLog, reference: _TrialLog, *, vary: bool = False) -> str | None:
        """Return a clause about the first result that differs from the reference, or None.

        :param vary: Whether to ignore infos and masks that differ, now and in later comparisons.
        """
        for instance in run.instances():
            counts = {"reset": 0, "step": 0}
            pairs = zip(run.answers_of(instance), reference.answers_of((instance[0], 0)), strict=False)
            for (kind, seen), (_, expected) in pairs:
                counts[kind] += 1
                names = (seen.keys() | expected.keys()) - {"seconds"} - self._varying
                different = {name for name in names if seen.get(name) != expected.get(name)}
                if vary:
                    self._varying |= different - {RETURNED, STILL_RETURNED}
                    different &= {RETURNED, STILL_RETURNED}
                if not different:
                    continue
                name, when = run.name_of(instance), f"{kind} {counts[kind]}"
                if RETURNED in different:
                    return f"{name} returns something else from its {when} on"
                if STILL_RETURNED in different:
                    return f"a result of {name} is overwritten before its {when}"
                return f"{name} has a different {min(different)}"
        return None
