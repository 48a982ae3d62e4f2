"""Runs experiments in trials: processes that are thrown away, of each of which is told what became of it.

Between the caller and the trials stands a supervisor, a fresh interpreter that has not run the caller's script: a
process that has a simulator's library loaded, and forks, shows something else than one that loads it itself. It imports
what is known to be harmless, and forks a worker for each trial, which imports the rest; where there are no workers of
ours, it spawns a process for each. It ends those that hang, and what they have started; and all of them, their files
and itself, when the caller is gone, even if that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import connection, spawn, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_ext_core import processes
from rl_ext_core._import_path import import_path
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import set_variables
from rl_ext_core.errors import InvalidTypeError, WorkerError
from rl_ext_core.factory import EnvFactory, _graft
from rl_ext_core.isolation import dependencies
from rl_ext_core.isolation.experiments import (
    APART,
    GONE,
    PRINTS,
    RACE,
    RECORDS,
    Experiment,
    Operation,
    Task,
    Turns,
    follow,
    waited,
)
from rl_ext_core.processes.failures import exit_code_name, signal_name
from rl_ext_core.processes.servers import preload_modules
from rl_ext_core.processes.spawned import take_along
from rl_ext_core.processes.worker import (
    hides_exit_codes,
    kill_families,
    kill_group,
    kill_own_family,
    main_module,
    postpone_main,
)

_log = logging.getLogger("rl_ext_core.isolation")

# What one alone may take for anything, where nothing is known of it. It is not broken then: there is no verdict.
_ALONE_S = 300.0
# What it may take beside others: so many times what it took alone, and at least so long.
_TIMES, _LEAST_S = 20, 10.0
_KINDS = ("build", "reset", "step", "call", "close", "meet", "done")
_ENDING_S = 20.0
_REAP_S = 5.0
_TICK_S = 0.002
# Of what a trial prints: what is looked at, and how much its file may hold.
_PRINTED_BYTES, _PRINTED_LIMIT = 2000, 1 << 20
_SAID_BYTES = 10_000
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class UntriedError(Exception):
    """An environment cannot be tried without files of the user's; its text says which, as a clause."""


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

    @property
    def was_built(self) -> bool:
        """Whether an environment was built, or something of it was done later."""
        return any(operation.what != "build" for operation in self.performed)

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
    def why_untried(self) -> str | None:
        """Return which file of the user's it would have used, as a clause; None: it did not need any."""
        if self.facts.get("declared") is not None:
            return None
        if self.facts.get("missing") is not None:
            return f"it uses {self.facts['missing']!r} in the working directory, and a trial has an empty one"
        if self.facts.get("refused") is not None and not self.done:
            return f"it writes to {self.facts['refused']!r}, and a trial does not write files of yours"
        return None

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
        return f"ends the process with exit code {exit_code_name(self.exitcode)}"

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
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()
        self._caller, theirs = multiprocessing.Pipe()
        self._scratch = ""
        try:
            self._make_scratch()
            with theirs:
                self._start(theirs)
            with contextlib.suppress(OSError):  # it has ended
                self._caller.send((main_module(), self._preload, self._packed))
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    @uninterrupted
    def _make_scratch(self) -> None:
        # By the name that the processes will know it by: macOS has links there, Windows short names.
        self._scratch = os.path.realpath(tempfile.mkdtemp(prefix="rl-ext-probe-"))

    @uninterrupted
    def _start(self, theirs: Connection[Any, Any]) -> None:
        """Start the supervisor with its end of a connection, whose end is its own."""
        path, handle = import_path(), theirs.fileno()
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve({handle}, {self._scratch!r})"
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        environ = dict(os.environ)
        set_variables(self._variables, environ)
        # It takes no part in the terminal's Ctrl-C.
        options: dict[str, Any] = {"start_new_session": True, "pass_fds": [handle]}
        if sys.platform == "win32":
            os.set_handle_inheritable(handle, True)
            startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
            options = {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            self._process = subprocess.Popen(
                [spawn.get_executable(), *flags, "-c", code],
                **{"env": environ, "stdin": subprocess.DEVNULL, "stdout": self._said, "stderr": self._said, **options},
            )
        except OSError as error:
            raise WorkerError(f"the process that probes the environment cannot be started: {error}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def run(self, modes: Sequence[str], steps: int, *, patience: float = 1.0, **options: Any) -> list[Trial]:
        """Run the trials of an experiment at the same time.

        :param patience: by which times are multiplied that operations may take
        :raises WorkerError: the process that watches them has ended
        :raises UntriedError: a trial would use files of the user's
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
            if (reason := trial.why_untried) is not None:
                raise UntriedError(reason)
        return trials

    def _limit(self, kind: str) -> float:
        if self._timeout is not None:
            return self._timeout
        if not self._longest:
            return _ALONE_S
        return max(_LEAST_S, _TIMES * max(self._longest.get(kind, 0.0), self._longest["reset"]))

    def _answer(self) -> Any:
        try:
            # However long that takes: trials have limits of their own, and imports are as slow as the disk is.
            return self._caller.recv()
        except (OSError, EOFError):
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)
            self._said.seek(0)
            said = self._said.read()[-_SAID_BYTES:].decode(errors="replace").strip()
            code = self._process.returncode
            how = "hung up" if code is None else f"was killed by {signal_name(-code)}" if code < 0 else ""
            if code == 0 and hides_exit_codes():
                how = "has died; the system does not tell how, because this process ignores SIGCHLD"
            raise WorkerError(
                f"the process that probes the environment, which imports {list(self._preload)} first, ended without an "
                f"answer: it {how or f'ended with exit code {code}'}" + (f", and printed:\n{said}" if said else ""),
                kind="signal" if code is not None and code < 0 else "exit",
                exitcode=code,
            ) from None

    def _end(self) -> None:
        """Close the connection, which ends the supervisor and all that it has started."""
        self._caller.close()
        try:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDING_S)
                if self._process.returncode is None:
                    _log.warning("the process that probed an environment did not end by itself, and was killed")
        finally:
            if self._process is not None:
                pid, code = self._process.pid, self._process.poll()
                if code != 0 or hides_exit_codes():
                    kill_families([pid] if code is None else [], [pid])
                self._process.wait()
            self._said.close()
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)


class _GoneError(Exception):
    """The caller has ended, or wants no more."""


def serve(handle: int, scratch: str) -> None:
    """Serve the caller until it hangs up: it gets a list of trials for each experiment.

    :param handle: of this end of the connection
    :param scratch: the folder of all trials, which is deleted here should the caller not live to do it
    """
    caller = getattr(connection, "PipeConnection", connection.Connection)(handle)
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by the caller, it would hide how trials end
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
        cleanup.enter_context(contextlib.suppress(_GoneError, EOFError, ConnectionError))
        supervisor = _Supervisor(caller, scratch, *caller.recv())
        cleanup.callback(supervisor.end_all)
        caller.send("ready")
        while True:
            caller.send(supervisor.run(caller.recv()))
    os._exit(0)  # harmless modules need not be taken down


class _Supervisor:
    """Runs the trials of one caller, in a process of its own."""

    def __init__(
        self, caller: Connection[Any, Any], scratch: str, main: Mapping[str, Any], preload: Sequence[str], packed: bytes
    ) -> None:
        self._caller, self._main, self._preload = caller, main, tuple(preload)
        self._packed, self._scratch, self._cwd = packed, scratch, os.getcwd()
        self._context: Any = multiprocessing.get_context("spawn")
        if processes.SUPPORTED:
            # It is killed with all that has been started from here, and the next trials start another one.
            warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly")
            # So that descendants that lose their parents can be found.
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._context = processes.get_context("fork", own_session=True)
            prepare(main, preload)
        # Folders of the user's to look at, for what is opened there.
        self._watched: set[str] = set()
        self._running: list[_Running] = []

    def run(self, experiment: Experiment) -> tuple[list[Trial], set[str], bool]:
        """Run trials; tell which of the user's files were opened, and whether some in the working directory were
        written to, and read.
        """
        self._preload += experiment.preload
        if processes.SUPPORTED:
            preload_modules(experiment.preload, {})
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        cwd = scratch / "cwd"
        cwd.mkdir()
        (scratch / "tmp").mkdir()
        folders = dependencies.FolderWatch([str(cwd), *self._watched])
        pairs = [pair for group in (APART, RACE) for pair in itertools.permutations(group, 2)]
        pipes = {pair: self._context.Pipe(duplex=False) for pair in pairs if set(pair) <= set(experiment.modes)}
        self._running.clear()
        for number, mode in enumerate(experiment.modes):
            theirs = {one[-1]: reading for (one, other), (reading, _) in pipes.items() if other == mode}
            ours = [writing for (one, _), (_, writing) in pipes.items() if one == mode]
            turns, place = Turns(theirs, ours) if ours else None, scratch / str(number)
            task = Task(self._packed, experiment, mode, cwd, self._cwd, scratch / "tmp", place, turns)
            self._running.append(_Running(self._started(task), Trial(mode), place, ours))
        self._watch(folders)
        self.end_all()
        folders.look()
        folders.close()
        for process in self._running:
            process.worker.close()
        for pipe in pipes.values():
            for end in pipe:
                end.close()
        shutil.rmtree(scratch, ignore_errors=True)
        trials = [process.trial for process in self._running]
        self._watched.update(*(trial.measured.get("folders", ()) for trial in trials))
        stand_for = {str(cwd): self._cwd, self._scratch: ""}
        opened = folders.opened.union(*(trial.facts.get("opened", ()) for trial in trials))
        originals = {dependencies.original_of(path, stand_for) for path in opened}
        wrote = any(path.startswith(f"{cwd}{os.sep}") for path in folders.modified & folders.read)
        return trials, {path for path in originals if path is not None}, wrote

    def _started(self, task: Task) -> Any:
        task.make_files()
        if processes.SUPPORTED:
            process = self._context.Process(target=follow, args=(task,))
        else:
            process = self._context.Process(target=follow_anew, args=(task, self._main, self._preload))
        process.start()
        return process

    def _watch(self, folders: dependencies.FolderWatch) -> None:
        """Wait for all of them, and end those that hang."""
        while running := [process for process in self._running if process.trial.exitcode is None]:
            # Nothing is asked while an experiment runs: what can be read is the end.
            if self._caller.poll(_TICK_S):
                raise _GoneError
            folders.look()
            for process in running:
                process.look()
                if process.is_late():
                    process.trial.hung = True
                    kill_families([process.worker.pid])

    def end_all(self) -> None:
        """Kill whatever descends from here, as far as it is found, and wait for it."""
        if not processes.SUPPORTED:
            living = [process.worker for process in self._running if process.trial.exitcode is None]
            kill_families([worker.pid for worker in living], [process.pid for process in self._running])
            for worker in living:
                worker.join()
            return
        until = time.monotonic() + _REAP_S
        while time.monotonic() < until:
            kill_own_family()
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)


def prepare(main: Mapping[str, Any], preload: Sequence[str]) -> None:
    """Do in a fresh interpreter what all trials begin with, which is none of the environment's."""
    postpone_main(main)
    dependencies.remember()
    preload_modules(preload, {})


def follow_anew(task: Task, main: Mapping[str, Any], preload: Sequence[str]) -> None:
    """Do a trial in a process that was spawned for it."""
    if hasattr(os, "setsid"):
        os.setsid()
    take_along()
    prepare(main, preload)
    follow(task)


class _Running:
    """A trial that runs, or has run, with its files, and pipes that others read from, who wait for this one."""

    def __init__(self, worker: Any, trial: Trial, place: Path, turns: Sequence[Connection[Any, Any]]) -> None:
        self.worker, self.trial, self.pid = worker, trial, worker.pid
        self._records, self._prints, self._turns, self._read = place / RECORDS, place / PRINTS, turns, 0
        self._give(_ALONE_S)  # its interpreter may be as slow to start as the disk is

    def look(self) -> None:
        """Read what there is, and look at the clock by it."""
        exitcode = self.worker.exitcode
        if exitcode is not None or self._prints.stat().st_size > _PRINTED_LIMIT:
            self.trial.printed = (self.trial.printed + self._prints.read_bytes())[-_PRINTED_BYTES:]
            os.truncate(self._prints, 0)
        for kind, *values in self._new_records():
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
            kill_group(self.pid)  # what one that ended well has left behind
            for pipe in self._turns:
                with contextlib.suppress(OSError):  # nobody is left to read it
                    pipe.send_bytes(GONE)

    def _new_records(self) -> list[tuple[Any, ...]]:
        found = []
        if self._records.stat().st_size > self._read:
            with self._records.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
                file.seek(self._read)
                while True:  # until the end, or one that is not written yet, or never will be
                    found.append(pickle.load(file))
                    self._read = file.tell()
        return found

    def _give(self, limit: float) -> None:
        """Give it so many seconds from now on."""
        self._limit, self._since, self._waited = limit, time.monotonic(), waited(self.pid)

    def is_late(self) -> bool:
        """Whether its time is over. That which it spent waiting for a core does not count."""
        taken = time.monotonic() - self._since
        if self.trial.exitcode is not None or taken < self._limit:
            return False
        return taken - (waited(self.pid) - self._waited) > self._limit
