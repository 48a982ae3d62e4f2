"""The trials of a probe, and the verdict that follows from them.

One instance alone gives the reference. Then two run in two processes, and two in one process: first one is built
first, then the other, and the second one is closed half-way. This process chooses all operations, so that their order
is the same in each trial, and so that it knows which one fails, hangs or ends its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.factory import EnvFactory
from rl_ext_core.isolation import trial
from rl_ext_core.isolation.trial import RETURNED, STILL_RETURNED, Operation
from rl_ext_core.isolation.verdict import MIN_STEPS, Isolation, Verdict, conclude
from rl_ext_core.processes import get_context

# Seconds for an operation: of an instance alone; of others that many times as long, and at least so long.
_FIRST_LIMIT_S, _LIMIT_FACTOR, _MIN_LIMIT_S = 300.0, 20, 20.0
_CLOSE_TIMEOUT_S = 3.0
# Seconds of steps that are compared; an environment whose first reset and three steps take longer gets a short life.
_STEPPING_S, _SHORT_STEPS = 2.0, 6
_AVERAGED = 10
_ORDINALS = ("the first", "the second", "the third", "the fourth")
_DOING = {"load": "unpickling", "build": "building", "reset": "resetting", "close": "closing", "measure": "measuring"}
_MISSING = ("raises FileNotFoundError", "raises NotADirectoryError")
_SAME_TEXT = (
    "Two in one process return bit for bit what one returns alone, in {steps} steps and several resets, whichever is "
    "built first, and also after one is closed; so do two in processes of their own."
)
_FAILURE_TEXT = "One alone works, and so do two in processes of their own; but in one process {how}."
_DIFFERENCE_TEXT = (
    "With a second one in the same process, {how}, compared with one alone with the same seed and actions; with a "
    "second one in another process it does not. They share state."
)
_VARYING_TEXT = (
    "One alone, with the same seed and the same actions, does not return the same twice: whether a second one changes "
    "it cannot be detected."
)
_NO_DEPENDENCE_TEXT = (
    "Within {steps} steps nothing that it returned depended on seeds or actions, so that nothing that is shared could "
    "show. More steps may show it: probe(source, steps=...)."
)
_COLLISION_TEXT = "Even two in processes of their own disturb each other: {how}, unlike one alone."
_OWN_CWD_ADVICE = ' With a working directory for each process they do not: write make_vec_env(..., cwd="own").'
_ONE_PROCESS_ADVICE = " In one process they are independent."
_NO_SOLUTION_TEXT = ' A working directory for each process, cwd="own", does not help: only one can run at a time.'
_TIMEOUT_ADVICE = " To wait longer, write probe(source, timeout=...) or make_vec_env(..., probe_timeout=...)."


def _resets_and_steps(source: int, order: int, steps: int) -> list[Operation]:
    """Return the resets and steps of an instance: some short episodes, and ``steps`` steps in the first three."""
    step, unseeded = Operation(source, order, "step"), Operation(source, order, "reset")
    first, second = (Operation(source, order, "reset", 1000 * source + seed) for seed in (1, 2))
    if steps < MIN_STEPS:
        return [first, step, step, step, second, *[step] * (steps - 3)]
    episodes = [first, step, step, step, unseeded, step, step, step, second, *[step] * (steps - 6)]
    return [*episodes, unseeded, step, step]


def _interleave(sources: Iterable[int], order: int, steps: int, *, ahead: int, part: float) -> list[Operation]:
    """Return the operations of instances that take turns, each some operations ahead of the next one.

    All but that of source 0 are closed after a part of their life.
    """
    turns = []
    for place, source in enumerate(sources):
        life = _resets_and_steps(source, order, steps)
        life = life if source == 0 else life[: int(part * len(life))]
        whole = [Operation(source, order, "build"), *life, Operation(source, order, "close")]
        turns += [(place * ahead + turn, place, operation) for turn, operation in enumerate(whole)]
    return [operation for *_, operation in sorted(turns, key=lambda turn: turn[:2])]


class _FailedError(Exception):
    """An operation failed; the text ends a sentence that begins with the operation."""


class _Process:
    """A temporary process, as its parent sees it. Its first answer is that it has loaded the factories."""

    def __init__(self, context: Any, packed: bytes, folder: Path, cwd: Path) -> None:
        for new in (folder, cwd):
            new.mkdir(exist_ok=True)
        self._output_file = folder / trial.OUTPUT_FILE
        self._output_file.touch()
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=trial.serve, args=(theirs, packed, str(folder), str(cwd)))
            self._process.start()

    def send(self, operations: Sequence[Operation] | None) -> None:
        """Send operations to do in this order; None ends the process."""
        with contextlib.suppress(OSError):  # The process has ended, which shows when its answer is read.
            self._connection.send(operations)

    def answer(self, limit: float) -> dict[str, Any]:
        """Return the answer to the next operation.

        :raises _FailedError: If it raises an exception, takes longer than the limit, or ends the process.
        """
        if not connection.wait([self._connection, self._process.sentinel], limit):
            self._process.kill()
            raise _FailedError(f"hangs, or takes more than {limit:g} s{self._last_printed_line()}")
        answer: dict[str, Any] | None = None
        with contextlib.suppress(EOFError, OSError):
            # A child of the process may hold the other end open.
            answer = self._connection.recv() if self._connection.poll() else None
        if answer is None:
            raise _FailedError(f"{self._describe_exit()}{self._last_printed_line()}")
        if "raises" in answer:
            raise _FailedError(f"raises {answer['raises']}")
        return answer

    def _describe_exit(self) -> str:
        self._process.join(_CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"kills the process by {signal.Signals(-code).name}"
        return "ends the process" if code is None else f"ends the process with exit code {code}"

    def _last_printed_line(self) -> str:
        lines = self._output_file.read_text(encoding="utf-8", errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" (it printed: {line[-200:]!r})" if line else ""

    def close(self) -> None:
        """Let it close its environments, and end it with all that it has started."""
        self.send(None)
        ends = [self._connection, self._process.sentinel]
        with contextlib.suppress(EOFError, OSError):
            while (
                connection.wait(ends, _CLOSE_TIMEOUT_S)
                and self._connection.poll()
                and self._connection.recv() is not None
            ):
                pass
        self._process.kill()
        self._process.join()
        self._connection.close()


@dataclasses.dataclass
class _TrialLog:
    """What was done in a trial, and which operation failed."""

    performed: list[tuple[Operation, dict[str, Any]]] = dataclasses.field(default_factory=list)  # with the answers
    failed: Operation | None = None  # after which nothing was done
    how: str = ""  # it failed: the end of a sentence that begins with the operation

    def instances(self) -> list[tuple[int, int]]:
        """Return the source and order of all instances, in the order in which they were built."""
        return [done[:2] for done, _ in self.performed if done.kind == "build"]

    def answers_of(self, instance: tuple[int, int]) -> list[tuple[str, dict[str, Any]]]:
        """Return what an instance did, with the answers."""
        return [(done.kind, seen) for done, seen in self.performed if done[:2] == instance and RETURNED in seen]

    def digests_of(self, source: int) -> list[str]:
        """Return digests of what the first instance of a source returned."""
        return [seen[RETURNED] for _, seen in self.answers_of((source, 0))]

    def seconds(self, *kinds: str) -> list[float]:
        """Return the seconds that operations took."""
        return [seen["seconds"] for done, seen in self.performed if done.kind in kinds]

    def get(self, name: str) -> Any:
        """Return the first entry of this name in the answers; None if there is none."""
        return next((seen[name] for _, seen in self.performed if seen.get(name) is not None), None)

    def name(self, instance: tuple[int, int]) -> str:
        """Return how a sentence calls an instance."""
        place = [*self.instances(), instance].index(instance)
        return _ORDINALS[place] if place < len(_ORDINALS) else f"number {place + 1}"

    def failure(self, name: str = "") -> str:
        """Return a clause on the operation that failed, and how it did."""
        assert self.failed is not None
        name = name or self.name(self.failed[:2])
        doing = f"{_DOING.get(self.failed.kind)} {name}"
        if self.failed.kind == "step":
            doing = f"step {sum(kind == 'step' for kind, _ in self.answers_of(self.failed[:2])) + 1} of {name}"
        closed = [self.name(done[:2]) for done, _ in self.performed if done.kind == "close"]
        return f"{doing}{f', after {closed[-1]} was closed,' if closed else ''} {self.how}"

    def failure_together(self, alone: _TrialLog) -> str | None:
        """Return a clause on a failure that one alone does not have; None if there is none."""
        complaint = self.get("complaint")
        if self.failed is None and (not complaint or alone.get("complaint")):
            return None
        return f"closing one raises {complaint}" if self.failed is None else self.failure()


class Judge:
    """Runs the trials of some factories, at least two, and compares them; see :func:`~rl_ext_core.isolation.probe`.

    :ivar loaded_files: paths of the modules and shared libraries that an instance has loaded
    """

    def __init__(self, factories: Sequence[EnvFactory[Any]], steps: int, timeout: float | None) -> None:
        self._factories, self._steps, self._timeout = list(factories), steps, timeout
        self._limit = _FIRST_LIMIT_S if timeout is None else timeout
        self._is_one_factory = all(factory is factories[0] for factory in factories)
        self._varying: set[str] = set()  # names of observations that are not the same twice
        self.loaded_files: list[str] = []

    def verdict(self) -> Verdict:
        """Run the trials and return the verdict."""
        try:
            self._packed = trial.pack_factories(self._factories)
        except Exception as error:
            why = f"it does not pickle: {str(error).rstrip('.')}"
            return conclude(Isolation.UNKNOWN, f"It could not be tried, because {why}.")
        alone = self._run_alone(shorten=True)
        declared = alone.get("declared") if self._is_one_factory else None
        if alone.failed is not None:
            return self._verdict_on_failure(alone) if declared is None else declared.verdict()
        longest = max(alone.seconds("build", "reset", "step"))
        self._limit = max(_MIN_LIMIT_S, _LIMIT_FACTOR * longest) if self._timeout is None else self._timeout
        self.loaded_files = [*alone.get("modules"), *(alone.get("libraries") if declared is None else ())]
        times = [*alone.seconds("step")[1:], *alone.get("times")]
        width = min(_AVERAGED, len(times))
        return dataclasses.replace(
            self._compare(alone) if declared is None else declared.verdict(),
            # The least average over several steps: other programs disturb it least.
            step_seconds=float(np.convolve(times, np.full(width, 1 / width), "valid").min()),
            build_seconds=alone.seconds("build")[0],
            private_bytes=alone.get("private_bytes"),
            libraries=tuple(alone.get("libraries")),
        )

    # -- trials

    def _run_alone(self, source: int = 0, *, shorten: bool = False) -> _TrialLog:
        run = _TrialLog()
        return self._run(self._batches_alone(source, run, shorten), run)

    def _batches_alone(self, source: int, run: _TrialLog, shorten: bool) -> Iterator[list[Operation]]:
        """Yield batches of operations of one instance, which are fewer if the first ones take long."""
        beginning = _resets_and_steps(source, 0, self._steps)[:4]
        yield [Operation(source, 0, "build"), *beginning]
        if shorten and sum(run.seconds("reset", "step")) > _STEPPING_S:
            self._steps = _SHORT_STEPS
        elif shorten:
            affordable = _STEPPING_S / max(min(run.seconds("step")), 1e-9)
            self._steps = max(MIN_STEPS, int(min(self._steps, affordable)))
        ending = [Operation(source, 0, "measure"), Operation(source, 0, "close", counts=False)]
        yield [*_resets_and_steps(source, 0, self._steps)[4:], *ending]

    def _run_apart(self, *, own_cwd: bool = False) -> _TrialLog:
        script = _interleave(range(len(self._factories)), 0, self._steps, ahead=3, part=2 / 3)
        counting = (operation._replace(counts=operation.kind != "close") for operation in script)
        turns = itertools.groupby(counting, key=lambda operation: operation.source)
        return self._run((list(operations) for _, operations in turns), _TrialLog(), apart=True, own_cwd=own_cwd)

    def _run_together(self) -> _TrialLog:
        sources = range(len(self._factories))
        script = _interleave(sources, 0, self._steps, ahead=3, part=2 / 3)
        script += _interleave(sources[::-1], 1, self._steps, ahead=6, part=1 / 2)
        # Many libraries crash when the process is about to end, which harms nobody.
        return self._run([[*script[:-1], script[-1]._replace(counts=False)]], _TrialLog())

    def _run(
        self, batches: Iterable[list[Operation]], run: _TrialLog, *, apart: bool = False, own_cwd: bool = False
    ) -> _TrialLog:
        """Perform operations in new processes: all in one, or each source apart, perhaps in its own directory."""
        operation = Operation(0, 0, "load")
        with tempfile.TemporaryDirectory(prefix="rl-ext-", ignore_cleanup_errors=True) as name:
            processes: list[_Process] = []
            try:
                self._start(processes, Path(name).resolve(), len(self._factories) if apart else 1, own_cwd)
                for process in processes:
                    process.answer(
                        max(_FIRST_LIMIT_S, self._timeout or 0.0)
                    )  # it imports, which has no limit of the user's
                for batch in batches:
                    process = processes[batch[0].source if apart else 0]
                    process.send(batch)
                    try:
                        for operation in batch:
                            run.performed.append((operation, process.answer(self._limit)))
                    except _FailedError:
                        if operation.counts:
                            raise
            except _FailedError as failure:
                run.failed, run.how = operation, str(failure)
            finally:
                for process in processes:
                    process.close()
        return run

    def _start(self, processes: list[_Process], folder: Path, count: int, own_cwd: bool) -> None:
        """Start processes, which share a folder for temporary files, and also the working directory if not ``own_cwd``."""
        temporary = folder / "tmp"
        temporary.mkdir()
        decision = self._factories[0].decision
        variables = {} if decision is None else dict(decision.variables)
        variables |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
        preload = dict.fromkeys([trial.__name__, *(name for factory in self._factories for name in factory.preload)])
        context = get_context(preload=tuple(preload), environs=[variables] * count, label="trial")
        for number in range(count):
            cwd = folder / (f"cwd{number}" if own_cwd else "cwd")
            processes.append(_Process(context, self._packed, folder / str(number), cwd))

    # -- comparisons

    def _compare(self, alone: _TrialLog) -> Verdict:
        """Compare several instances with one alone."""
        apart = self._run_apart()
        if self._problem_apart(apart, alone) is not None:
            return self._judge_processes(apart, alone)
        one = self._run_together()
        if (failure := one.failure_together(alone)) is not None:
            return conclude(Isolation.SINGLE_INSTANCE, _FAILURE_TEXT.format(how=failure))
        if self._difference(one, apart) is not None:
            again = self._run_apart()
            if self._problem_apart(again, alone) or self._difference(again, apart, vary=True):
                return conclude(Isolation.NON_DETERMINISTIC, _VARYING_TEXT)
            if (difference := self._difference(one, apart)) is not None:
                return conclude(Isolation.SHARED_STATE, _DIFFERENCE_TEXT.format(how=difference))
        if self._is_one_factory and apart.digests_of(1) == alone.digests_of(0)[: len(apart.digests_of(1))]:
            return conclude(Isolation.NON_DETERMINISTIC, _NO_DEPENDENCE_TEXT.format(steps=self._steps))
        # Stable Baselines3's monitors write a time.
        varying = sorted(name for name in self._varying if not name.endswith("['episode']"))
        left = f" Not compared, because they differ each time: {', '.join(varying)}." if varying else ""
        return conclude(Isolation.INDEPENDENT, _SAME_TEXT.format(steps=self._steps) + left)

    def _problem_apart(self, apart: _TrialLog, alone: _TrialLog) -> str | None:
        """Return what instances in separate processes do that one alone does not; None if they do the same."""
        return apart.failure() if apart.failed is not None else self._difference(apart, alone, vary=True)

    def _judge_processes(self, apart: _TrialLog, alone: _TrialLog) -> Verdict:
        """Tell processes that disturb each other from environments that fail or vary by themselves."""
        source = 0 if apart.failed is None else apart.failed.source
        again = self._run_alone(source)
        if again.failed is not None:
            number = list(dict.fromkeys(self._factories)).index(self._factories[source]) + 1
            return self._verdict_on_failure(again, f"Number {number} of the sources" if number > 1 else "A single one")
        one = self._run_together()
        failure, confirmed = one.failure_together(alone), self._problem_apart(self._run_apart(), alone)
        if confirmed is None or (source == 0 and again.digests_of(0) != alone.digests_of(0)):
            if failure is not None:
                return conclude(Isolation.SINGLE_INSTANCE, _FAILURE_TEXT.format(how=failure))
            return conclude(Isolation.NON_DETERMINISTIC, _VARYING_TEXT)
        helps = self._problem_apart(self._run_apart(own_cwd=True), alone) is None
        in_process = failure is None and self._difference(one, alone) is None
        ways = (_OWN_CWD_ADVICE if helps else "") + (_ONE_PROCESS_ADVICE if in_process else "")
        text = _COLLISION_TEXT.format(how=confirmed) + (ways or _NO_SOLUTION_TEXT)
        return conclude(Isolation.PROCESSES_COLLIDE, text, in_process=in_process)

    def _verdict_on_failure(self, run: _TrialLog, which: str = "A single one") -> Verdict:
        assert run.failed is not None
        more = _TIMEOUT_ADVICE if run.how.startswith("hangs") else ""
        more = " Trials have an empty working directory." if run.how.startswith(_MISSING) else more
        # An exception of a constructor may be due to the trial.
        early = run.failed.kind == "load" or (run.failed.kind == "build" and run.how.startswith("raises"))
        if more or early:
            return conclude(Isolation.UNKNOWN, f"{which} could not be tried: {run.failure('it')}.{more}")
        return conclude(Isolation.BROKEN, f"{which} does not work: {run.failure('it')}.")

    def _difference(self, run: _TrialLog, reference: _TrialLog, *, vary: bool = False) -> str | None:
        """Return a clause on the first observation that differs from the reference; None if all are the same.

        :param vary: whether to remember different infos and masks, and to ignore them from now on
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
                name, when = run.name(instance), f"{kind} {counts[kind]}"
                if RETURNED in different:
                    return f"{name} returns something else from its {when} on"
                if STILL_RETURNED in different:
                    return f"what {name} has returned is overwritten before its {when}"
                return f"{name} has something else in its {min(different)}"
        return None
