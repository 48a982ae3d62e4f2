"""Runs experiments in trials: workers that are thrown away, of each of which is told what became of it.

Between the caller and the trials stands a supervisor, a worker that is a fresh interpreter: a process that has a
simulator's library loaded, and forks, shows something else than one that loads it itself. It imports what is known to
be harmless, and forks a worker for each trial, which imports the rest. It ends those that hang, and whatever they have
started, wherever that has hidden; and all of them, their files and itself, when the caller is gone, even if that was
killed. That is why it is no worker that dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_ext_core import processes
from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.factory import EnvFactory, _graft
from rl_ext_core.isolation import dependencies
from rl_ext_core.isolation.cures import Mirrored
from rl_ext_core.isolation.experiments import APART, GONE, RACE, Experiment, Operation, Task, Turns, follow, waited
from rl_ext_core.processes.failures import FailedWorker, ended, signal_name
from rl_ext_core.processes.report import PAGE
from rl_ext_core.processes.servers import preload_modules
from rl_ext_core.processes.worker import kill_own_family

_log = logging.getLogger("rl_ext_core.isolation")

# What one alone may take for anything, where nothing is known of it. It is not broken then: there is no verdict.
_ALONE_S = 300.0
# What it may take beside others: so many times what it took alone, and at least so long.
_TIMES, _LEAST_S = 20, 10.0
_KINDS = ("build", "reset", "step", "call", "close", "meet", "done")
_ENDING_S = 20.0
_REAP_S = 5.0
_TICK_MS = 2
_PRINTED_BYTES = 2000
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclasses.dataclass
class Trial:
    """What a process has done of its part of an experiment."""

    mode: str  # key of the script
    # what it recorded, in order: that it ("does", who, what, limit), ("waits",), ("tidies", limit), ("saw", who, digest
    # of what was returned), ("found", who, digests of what there is beside that), ("closed", who, complaint)
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    # more that it recorded, by name: "done" all that counts; what it "raised"; paths of files that it "opened" through
    # Python; of one that is alone, what it "declared", seconds in which it was "built", "globals" of the user's modules
    # as they were imported, and what was "measured"
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    exitcode: int | None = None  # of the process; None: it runs
    hung: bool = False  # whether it was ended for taking too long
    printed: bytes = b""  # the end of what it printed

    @property
    def done(self) -> bool:
        """Whether it did all that counts."""
        return "done" in self.facts

    @property
    def measured(self) -> dict[str, Any]:
        """What was measured of one that is alone."""
        measured: dict[str, Any] = self.facts.get("measured", {})
        return measured

    def trace(self, who: str) -> list[str]:
        """Return what an instance returned, a digest for each reset and step."""
        return [digest for one, digest in self._all("saw") if one == who]

    def found(self, who: str) -> dict[int, dict[str, str]]:
        """Return what callers find beside that before an instance's next turn, by the number of the latter."""
        found, turn = {}, 0
        for kind, *values in self.events:
            turn += kind == "saw" and values[0] == who
            if kind == "found" and values[0] == who:
                found[turn] = values[1]
        return found

    @property
    def instances(self) -> list[str]:
        """The instances that returned something here."""
        return list(dict.fromkeys(who for who, _ in self._all("saw")))

    @property
    def complaints(self) -> list[str]:
        """What closing instances has raised."""
        return [complaint for _, complaint in self._all("closed") if complaint is not None]

    @property
    def performed(self) -> list[Operation]:
        """What it did, in order; the last one may not have come to its end."""
        return [Operation(who, what) for who, what, _ in self._all("does")]

    @property
    def end(self) -> str:
        """Return how it ended, as the end of a sentence that begins with what failed."""
        if "raised" in self.facts:
            return f"raises {self.facts['raised']}"
        if self.hung:
            limits = [limit for *_, limit in self._all("does")]
            return f"hangs, or takes more than {limits[-1]:g} s" if limits else "hangs"
        assert self.exitcode is not None
        if self.exitcode < 0:
            return f"kills the process by {signal_name(-self.exitcode)}"
        return f"ends the process with exit code {self.exitcode}"

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        lines = self.printed.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _all(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


class TrialRunner:
    """Runs experiments on what factories build, in a ``with`` statement; nothing is left of them after it.

    :param timeout: seconds that any operation may take; None: what it took alone, many times, says it
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
            self._packed = _graft.dumps(parts)
        except Exception as error:
            raise InvalidTypeError(
                f"{factories[0]!r} cannot be packed for another process: {error}. Write as_factory(lambda: MyEnv())"
            ) from error
        self._preload = tuple(dict.fromkeys(name for factory in factories for name in factory.preload))
        decision = factories[0].decision
        self._variables = {} if decision is None else dict(decision.variables)
        self._timeout, self._longest = timeout, dict[str, float]()
        self.opened: set[str] = set()  # paths of files
        self.wrote = False  # whether there are files in the working directory that they wrote to and read
        self.globals: Mapping[str, Mapping[str, Any]] = {}  # by module, to be set before anything is built

    def __enter__(self) -> TrialRunner:
        context = processes.get_context(
            "spawn", environs=[self._variables], label="probe", dies_with_parent=False, own_session=True
        )
        self._caller, theirs = context.Pipe()
        self._scratch = tempfile.mkdtemp(prefix="rl-ext-probe-")
        path = [os.path.abspath(entry) for entry in sys.path]
        task = (theirs, path, self._preload, self._packed, self._scratch)
        self._process = context.Process(target=supervise, args=task)
        try:
            with theirs:
                self._process.start()
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def run(self, modes: Sequence[str], steps: int, *, patience: float = 1.0, **options: Any) -> list[Trial]:
        """Run the trials of an experiment at the same time.

        :param patience: by which times are multiplied that operations may take
        :raises WorkerError: the process that watches them has ended
        """
        limits = {kind: patience * self._limit(kind) for kind in _KINDS}
        with contextlib.suppress(OSError):
            self._caller.send(Experiment(tuple(modes), steps, limits, globals=self.globals, **options))
        trials: list[Trial]
        trials, opened, wrote = self._answer()
        self.opened |= opened
        self.wrote |= wrote
        for trial in trials:
            for kind, seconds in trial.measured.get("longest", {}).items():
                self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        return trials

    def _limit(self, kind: str) -> float:
        if self._timeout is not None:
            return self._timeout
        if not self._longest:
            return _ALONE_S
        return max(_LEAST_S, _TIMES * max(self._longest.get(kind, 0.0), self._longest["reset"]))

    def _answer(self) -> Any:
        popen = self._process.popen
        assert popen is not None
        popen.report.taken = True
        try:
            # However long that takes: trials have limits of their own, and imports are as slow as the disk is.
            return self._caller.recv()
        except (OSError, EOFError):
            self._process.join(_ENDING_S)
            failure = ended(FailedWorker(0, 1, "it", None, None), popen.report.read(), popen.poll(), lost=False)
            raise WorkerError(
                f"the process that probes the environment, which imports {list(self._preload)} first, ended without an "
                f"answer:\n{str(failure.error()).replace('it 0 of 1', 'it', 1)}"
            ) from failure.exception

    def _end(self) -> None:
        """Close the connection, which ends the supervisor and all that it has started."""
        self._caller.close()
        try:
            if self._process.popen is not None:
                self._process.join(_ENDING_S)
                if self._process.exitcode is None:
                    _log.warning("the process that probed an environment did not end by itself, and was killed")
        finally:
            if self._process.popen is not None:
                self._process.kill()
                self._process.join()
                self._process.close()
            shutil.rmtree(self._scratch, ignore_errors=True)


class _GoneError(Exception):
    """The caller has ended, or wants no more."""


def supervise(
    caller: Connection[Any, Any], path: Sequence[str], preload: Sequence[str], packed: bytes, scratch: str
) -> None:
    """Serve the caller until it hangs up: it gets a list of trials for each experiment."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        # So that descendants that lose their parents can be found.
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        sys.path[:] = path
        dependencies.remember()
        preload_modules(preload, {})
        supervisor = _Supervisor(caller, packed, scratch)
        caller.send("ready")
        while True:
            caller.send(supervisor.run(caller.recv()))
    except (_GoneError, EOFError, ConnectionError):
        pass
    finally:
        _end_all()
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)  # harmless modules need not be taken down


class _Supervisor:
    """Runs the trials of one caller, in a process of its own."""

    def __init__(self, caller: Connection[Any, Any], packed: bytes, scratch: str) -> None:
        self._packed, self._scratch, self._cwd = packed, scratch, os.getcwd()
        self._context = processes.get_context("fork", own_session=True)
        # Nothing is asked while an experiment runs: what can be read is the end.
        self._hung_up = select.poll()
        self._hung_up.register(caller.fileno(), select.POLLIN)
        self._mirrored = Mirrored(Path(self._cwd), Path(scratch, "folders"))
        # Folders of the user's to look at, for what is opened there.
        self._watched: set[str] = set()

    def run(self, experiment: Experiment) -> tuple[list[Trial], set[str], bool]:
        """Run trials; tell which of the user's files were opened, and whether some in the working directory were
        written to, and read.
        """
        preload_modules(experiment.preload, {})
        cwd = self._mirrored.path()
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        (scratch / "tmp").mkdir()
        folders = dependencies.FolderWatch([str(cwd), *self._watched])
        running = self._start(experiment, cwd, scratch)
        self._watch(running, folders)
        _end_all()
        folders.look()
        folders.close()
        for process in running:
            process.close()
        shutil.rmtree(scratch, ignore_errors=True)
        trials = [process.trial for process in running]
        self._watched.update(*(trial.measured.get("folders", ()) for trial in trials))
        stand_for = {str(cwd): self._cwd, self._scratch: "", **self._mirrored.parents}
        opened = folders.opened.union(*(trial.facts.get("opened", ()) for trial in trials))
        originals = {dependencies.original_of(path, stand_for) for path in opened}
        wrote = any(path.startswith(f"{cwd}/") for path in folders.modified & folders.read)
        return trials, {path for path in originals if path is not None}, wrote

    def _start(self, experiment: Experiment, cwd: Path, scratch: Path) -> list[_Running]:
        pairs = [pair for group in (APART, RACE) for pair in itertools.permutations(group, 2)]
        pipes = {pair: os.pipe() for pair in pairs if set(pair) <= set(experiment.modes)}
        running = []
        for number, mode in enumerate(experiment.modes):
            theirs = {one[-1]: reading for (one, other), (reading, _) in pipes.items() if other == mode}
            ours = [writing for (one, _), (_, writing) in pipes.items() if one == mode]
            printed, prints = os.pipe()
            task = Task(
                *(self._packed, experiment, mode),
                *(cwd, scratch / "tmp", scratch / f"own{number}"),
                *(prints, Turns(theirs, ours) if ours else None),
            )
            process = self._context.Process(target=follow, args=(task,))
            process.start()
            os.close(prints)
            running.append(_Running(process, Trial(mode), printed, ours, experiment.limits["build"]))
        for reading, _ in pipes.values():
            os.close(reading)
        return running

    def _watch(self, started: list[_Running], folders: dependencies.FolderWatch) -> None:
        """Wait for all of them, and end those that hang."""
        while running := [process for process in started if process.trial.exitcode is None]:
            if self._hung_up.poll(_TICK_MS):
                raise _GoneError
            folders.look()
            for process in running:
                process.look()
                if process.is_late():
                    process.trial.hung = True
                    process.worker.kill()


class _Running:
    """A trial that runs, or has run, and descriptors that others read from, who wait for this one."""

    def __init__(self, worker: Any, trial: Trial, printed: int, turns: Sequence[int], limit: float) -> None:
        self.worker, self.trial = worker, trial
        self._printed, self._turns, self._read = printed, turns, PAGE
        os.set_blocking(printed, False)
        self._give(limit)

    def look(self) -> None:
        """Read what there is, and look at the clock by it."""
        exitcode = self.worker.exitcode
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._printed, 1 << 16):
                self.trial.printed = (self.trial.printed + part)[-_PRINTED_BYTES:]
        _, records, self._read = self.worker.popen.report.since(self._read)
        for kind, *values in records:
            if kind == "fact":
                self.trial.facts[values[0]] = values[1]
                continue
            self.trial.events.append((kind, *values))
            if kind == "waits":
                self._limit = math.inf
            elif kind in ("does", "tidies"):
                self._give(values[-1])
        if exitcode is not None:
            self.trial.exitcode = exitcode
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker.pid, signal.SIGKILL)  # what one that ended well has left behind
            for descriptor in self._turns:
                with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
                    os.write(descriptor, GONE)
                os.close(descriptor)

    def _give(self, limit: float) -> None:
        """Give it so many seconds from now on."""
        self._limit, self._since, self._waited = limit, time.monotonic(), waited(self.worker.pid)

    def is_late(self) -> bool:
        """Whether its time is over. That which it spent waiting for a core does not count."""
        taken = time.monotonic() - self._since
        if self.trial.exitcode is not None or taken < self._limit:
            return False
        return taken - (waited(self.worker.pid) - self._waited) > self._limit

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._printed)
        self.worker.close()


def _end_all() -> None:
    """Kill whatever descends from here, and wait for it."""
    until = time.monotonic() + _REAP_S
    while time.monotonic() < until:
        kill_own_family()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
