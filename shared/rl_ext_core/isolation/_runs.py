"""Has parts of scripts followed in processes that are thrown away, and tells what became of each."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.factory import EnvFactory, _graft
from rl_ext_core.isolation import _opened, _supervisor
from rl_ext_core.isolation._script import Operation
from rl_ext_core.processes import _child, _popen
from rl_ext_core.processes.failures import signal_name

__all__ = ["Laboratory", "Run"]

_log = logging.getLogger("rl_ext_core.isolation")

# What one alone may take for anything, where nothing is known of it. It is not broken then: there is no verdict.
ALONE_S = 300.0
# What it may take beside others: so many times what it took alone, and at least so long.
_TIMES, LEAST_S = 20, 10.0
_KINDS = ("build", "reset", "step", "call", "close", "meet", "done")
_ENDING_S = 20.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from rl_ext_core.isolation import _supervisor; _supervisor.main()"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a process has done of its part of a script.

    :ivar mode: key of the script
    :ivar records: what it said
    :ivar status: how it ended, as ``os.waitpid`` has it
    :ivar hung: whether it was ended for taking too long
    :ivar said: the end of what it printed
    """

    mode: str
    records: list[list[Any]]
    status: int
    hung: bool
    said: str

    @property
    def done(self) -> bool:
        """Whether it did all that counts."""
        return self._last("done") is not None

    def trace(self, who: str) -> list[str]:
        """Give what an instance returned, a digest for each reset and step."""
        return [record[2] for record in self.records if record[0] == "saw" and record[1] == who]

    def found(self, who: str) -> dict[int, dict[str, str]]:
        """Give what callers find beside that before an instance's next turn, by the number of the latter."""
        found, turn = {}, 0
        for kind, *values in self.records:
            turn += kind == "saw" and values[0] == who
            if kind == "found" and values[0] == who:
                found[turn] = values[1]
        return found

    @property
    def instances(self) -> list[str]:
        """The instances that returned something here."""
        return list(dict.fromkeys(record[1] for record in self.records if record[0] == "saw"))

    @property
    def opened(self) -> list[str]:
        """Files that it opened through Python."""
        record = self._last("opened")
        return [] if record is None else record[1]

    @property
    def globals(self) -> dict[str, dict[str, str]]:
        """Plain globals of the user's modules, as they were imported."""
        record = self._last("globals")
        return {} if record is None else record[1]

    @property
    def built(self) -> tuple[float, tuple[str, str] | None] | None:
        """Seconds that building the first took, and what it says of itself; None: there was none, or nobody asked."""
        record = self._last("built")
        return None if record is None else (record[1], None if record[2] is None else tuple(record[2]))

    @property
    def measured(self) -> dict[str, Any]:
        """What was measured."""
        record = self._last("measured")
        return {} if record is None else record[1]

    @property
    def complaints(self) -> list[str]:
        """What closing instances has raised."""
        return [record[2] for record in self.records if record[0] == "closed" and record[2] is not None]

    @property
    def performed(self) -> list[Operation]:
        """What it did, in order; the last one may not have come to its end."""
        return [Operation(*record[1:3]) for record in self.records if record[0] == "does"]

    @property
    def limit(self) -> float:
        """Seconds that what it did last might take."""
        return next((record[3] for record in reversed(self.records) if record[0] == "does"), 0.0)

    @property
    def end(self) -> str:
        """Say how it ended, as the end of a sentence that begins with what failed."""
        raised = self._last("raised")
        if raised is not None:
            return f"raises {raised[1]}"
        if self.hung:
            return f"hangs, or takes more than {self.limit:g} s" if self.limit else "hangs"
        if os.WIFSIGNALED(self.status):
            return f"kills the process by {signal_name(os.WTERMSIG(self.status))}"
        return f"ends the process with exit code {os.waitstatus_to_exitcode(self.status)}"

    @property
    def waited(self) -> bool:
        """Whether it ended while it waited for another process, and because of that."""
        return self.hung and self.records[-1][0] == "waits"

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        return next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")

    def _last(self, kind: str) -> list[Any] | None:
        return next((record for record in reversed(self.records) if record[0] == kind), None)


class Laboratory:
    """Runs experiments on what factories build, in a ``with`` statement; nothing is left of them after it.

    :param factories: build the environments; the first one is what single instances are built by
    :param timeout: seconds that any operation may take; None: what it took alone, many times, says it
    :ivar opened: paths of files that the environments have opened
    :ivar wrote: whether they wrote to files in the working directory, and read them
    :ivar globals: by module, values to set before anything is built
    :raises InvalidTypeError: they cannot be packed
    :raises WorkerError: Python does not start, or what is known to be harmless cannot be imported
    """

    def __init__(self, factories: Sequence[EnvFactory[Any]], timeout: float | None = None) -> None:
        # All in one: what functions of the caller's script share, they share in other processes too.
        parts = [
            (factory, factory._recipe.unpacked() if factory._recipe.takes_arguments else None, factory._adapters)
            for factory in factories
        ]
        try:
            packed = _graft.dumps(parts)
        except Exception as error:
            raise InvalidTypeError(
                f"{factories[0]!r} cannot be packed for another process: {error}. Write as_factory(lambda: MyEnv())"
            ) from error
        self._packed = packed
        self._preload = tuple(dict.fromkeys(name for factory in factories for name in factory.preload))
        decisions = [factory.decision for factory in factories]
        self._variables = {} if decisions[0] is None else dict(decisions[0].variables)
        self._timeout, self._longest = timeout, dict[str, float]()
        self._watched: tuple[str, ...] = ()
        self.opened: set[str] = set()
        self.wrote = False
        self.globals: Mapping[str, Mapping[str, Any]] = {}

    def __enter__(self) -> Laboratory:
        self._scratch = tempfile.mkdtemp(prefix="rl-ext-probe-")
        self._errors = tempfile.TemporaryFile()
        program = _PROGRAM.format(path=[os.path.abspath(entry) for entry in sys.path])
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for this process, which ends the other
            )
        except BaseException:
            self._clean()
            raise
        try:
            job = _supervisor.Job(
                packed=self._packed,
                preload=self._preload,
                variables=self._variables,
                main=_main(),
                scratch=self._scratch,
                cwd=os.getcwd(),
            )
            self._ask(job)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def run(self, modes: Sequence[str], steps: int, *, patience: float = 1.0, **options: Any) -> list[Run]:
        """Run processes at the same time.

        :param modes: keys of their scripts
        :param steps: of instance A
        :param patience: by which times are multiplied that operations may take
        :param options: of a :class:`~rl_ext_core.isolation._supervisor.Round`
        :return: what became of each
        :raises WorkerError: the process that watches them has ended
        """
        limits = {kind: patience * self._limit(kind) for kind in _KINDS}
        options = {"watched": self._watched, "globals": self.globals, **options}
        answer = self._ask(_supervisor.Round(tuple(modes), steps, limits, **options))
        runs = [Run(mode, **each) for mode, each in zip(modes, answer["runs"], strict=True)]
        self._note(runs, answer)
        return runs

    def _limit(self, kind: str) -> float:
        if self._timeout is not None:
            return self._timeout
        if not self._longest:
            return ALONE_S
        return max(LEAST_S, _TIMES * max(self._longest.get(kind, 0.0), self._longest["reset"]))

    def _note(self, runs: Sequence[Run], answer: Mapping[str, Any]) -> None:
        self.opened.update(answer["opened"])
        self.wrote = answer["wrote"] or self.wrote
        for run in runs:
            paths = (_opened.within(path, answer["stand_for"]) for path in run.opened)
            self.opened.update(path for path in paths if path is not None)
            for kind, seconds in run.measured.get("longest", {}).items():
                self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
            self._watched = tuple(dict.fromkeys([*self._watched, *run.measured.get("folders", ())]))

    def _ask(self, message: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = None
        with contextlib.suppress(BrokenPipeError):
            _supervisor.write_message(self._process.stdin.fileno(), message)
            # However long that takes: rounds have limits of their own, and imports are as slow as the disk is.
            answer = _supervisor.read_message(self._process.stdout.fileno())
        if answer is None:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace").strip()
            raise WorkerError(
                f"the process that probes the environment, which imports {list(self._preload)} first, ended without an "
                f"answer:\n{text or 'it said nothing'}"
            )
        return answer

    def _end(self) -> None:
        """Close its input, which ends it and all that it has started."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            _log.warning("the process that probed an environment did not end by itself, and was killed")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            self._clean()

    def _clean(self) -> None:
        self._errors.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _main() -> dict[str, str]:
    prepared = _popen._preparation("probe")
    return {name: prepared[name] for name in _child._OF_MAIN if name in prepared}
