"""Has parts of scripts followed in processes that are thrown away, and tells what became of each."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import cloudpickle

from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.isolation import _supervisor
from rl_ext_core.isolation._script import SCRIPTS, Operation
from rl_ext_core.processes import _child, _popen
from rl_ext_core.processes.failures import signal_name

__all__ = ["Laboratory", "Run"]

_log = logging.getLogger("rl_ext_core.isolation")

# What the first construction may take, with all imports, and at least any other operation.
LIMITS_S = (120.0, 8.0)
_PREPARING_S = 120.0
_ENDING_S = 20.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from rl_ext_core.isolation import _supervisor; _supervisor.main()"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a process has done of its part of a script.

    :ivar mode: key of the script
    :ivar operations: of the script
    :ivar records: what it said
    :ivar status: how it ended, as ``os.waitpid`` has it
    :ivar hung: whether it was ended for taking too long
    :ivar said: the end of what it printed
    """

    mode: str
    operations: tuple[Operation, ...]
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
        return [self.operations[record[1]] for record in self.records if record[0] == "does"]

    @property
    def end(self) -> str:
        """Say how it ended, as the end of a sentence that begins with what failed."""
        raised = self._last("raised")
        if raised is not None:
            return f"raises {raised[1]}"
        if self.hung:
            return "hangs"
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
    """Runs experiments on what a factory builds, in a ``with`` statement; nothing is left of them after it.

    :param factory: builds the environment
    :raises InvalidTypeError: it cannot be packed
    :raises WorkerError: Python does not start, or what is known to be harmless cannot be imported
    """

    def __init__(self, factory: EnvFactory[Any]) -> None:
        try:
            packed = cloudpickle.dumps(factory)
        except Exception as error:
            raise InvalidTypeError(
                f"{factory!r} cannot be packed for another process: {error}. Write as_factory(lambda: MyEnv())"
            ) from error
        self._packed, self._preload = packed, factory.preload
        self._variables = {} if factory.decision is None else dict(factory.decision.variables)

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
                preload=tuple(self._preload),
                variables=self._variables,
                main=_main(),
                scratch=self._scratch,
                cwd=os.getcwd(),
                limits=LIMITS_S,
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

    def run(self, modes: Sequence[str], steps: int, **options: Any) -> list[Run]:
        """Run processes at the same time.

        :param modes: keys of their scripts
        :param steps: of instance A
        :param options: of a :class:`~rl_ext_core.isolation._supervisor.Round`
        :return: what became of each
        :raises WorkerError: the process that watches them has ended
        """
        answers = self._ask(_supervisor.Round(tuple(modes), steps, **options))
        return [
            Run(mode, tuple(SCRIPTS[mode][0](steps)), **answer) for mode, answer in zip(modes, answers, strict=True)
        ]

    def _ask(self, message: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer, answers = None, self._process.stdout.fileno()
        # Rounds have limits of their own.
        patience = _PREPARING_S if isinstance(message, _supervisor.Job) else None
        with contextlib.suppress(BrokenPipeError):
            _supervisor.write_message(self._process.stdin.fileno(), message)
            if select.select([answers], [], [], patience)[0]:
                answer = _supervisor.read_message(answers)
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
