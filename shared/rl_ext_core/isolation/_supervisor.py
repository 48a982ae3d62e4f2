"""The program between the caller and the processes that are thrown away.

It is a fresh interpreter: a process that has a simulator's library loaded, and forks, shows something else than one
that loads it itself. It imports what is known to be harmless, and forks a process for each part of a script, which
imports the rest. It ends those that hang, and whatever they have started; and all of them, and itself, when the
caller is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rl_ext_core.isolation import _loaded, _opened
from rl_ext_core.isolation import _reaping as reaping
from rl_ext_core.isolation._child import Place, Report, Task, Turns, follow
from rl_ext_core.isolation._script import APART, RACE
from rl_ext_core.isolation.cures import Mirrored
from rl_ext_core.processes import _child as _worker
from rl_ext_core.processes import _preload

__all__ = ["main", "read_message", "write_message"]

_TICK_MS = 2
_SAID_BYTES = 2000


class _GoneError(Exception):
    """The caller has ended, or wants no more."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a supervisor is told first.

    :ivar packed: what builds the environments
    :ivar preload: harmless modules
    :ivar variables: what they read at import; None unsets
    :ivar main: how the caller's script is imported, where an environment turns out to need it
    :ivar scratch: folder for everything
    :ivar cwd: the caller's
    """

    packed: bytes
    preload: tuple[str, ...]
    variables: Mapping[str, str | None]
    main: Mapping[str, str]
    scratch: str
    cwd: str


@dataclasses.dataclass(frozen=True)
class Round:
    """Processes that run at the same time.

    :ivar modes: keys of their scripts
    :ivar steps: of instance A
    :ivar limits: by kind of operation, seconds that it may take
    :ivar cure: for each of them; None: none
    :ivar generators: whether each instance is to find Python's, NumPy's and torch's generators as it left them
    :ivar thrifty: whether optional steps are left out when the others have taken long
    :ivar preload: more harmless modules, for these processes and all later ones
    :ivar sources: by instance, which of the factories builds it
    :ivar crowd: names of the instances of a script for many
    :ivar calls: names of setters to call
    :ivar globals: by module, values to set before anything is built
    :ivar watched: folders of the user's to look at, for what is opened there
    """

    modes: tuple[str, ...]
    steps: int
    limits: Mapping[str, float]
    cure: str | None = None
    generators: bool = False
    thrifty: bool = False
    preload: tuple[str, ...] = ()
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    crowd: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    globals: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    watched: tuple[str, ...] = ()


@dataclasses.dataclass
class _Child:
    """A process, as seen from here.

    :ivar records: what it has reported
    :ivar limit: seconds after which it is ended; None while it waits for another one
    :ivar since: when they began
    """

    pid: int
    report: int
    said_from: int
    limit: float | None
    since: float
    waited: float = 0.0
    records: list[list[Any]] = dataclasses.field(default_factory=list)
    rest: bytes = b""
    said: bytes = b""
    status: int | None = None
    hung: bool = False

    def read(self) -> None:
        """Read what there is, and look at the clock by it."""
        self.said = (self.said + _available(self.said_from))[-_SAID_BYTES:]
        *lines, self.rest = (self.rest + _available(self.report)).split(b"\n")
        for line in lines:
            record = json.loads(line)
            self.records.append(record)
            if record[0] in ("does", "tidies"):
                self.start(record[-1])
            elif record[0] == "waits":
                self.limit = None

    def start(self, limit: float) -> None:
        """Give it so many seconds from now on."""
        self.limit, self.since, self.waited = limit, time.monotonic(), reaping.waited(self.pid)

    def is_late(self) -> bool:
        """Whether its time is over. That which it spent waiting for a core does not count."""
        if self.limit is None or time.monotonic() - self.since < self.limit:
            return False
        return time.monotonic() - self.since - (reaping.waited(self.pid) - self.waited) > self.limit

    def answer(self) -> dict[str, Any]:
        """Give what the caller gets."""
        said = self.said.decode(errors="replace")
        return {"records": self.records, "status": self.status, "hung": self.hung, "said": said}


def main() -> None:
    """Serve the caller: a job, then rounds, through the standard input and output."""
    answers = os.dup(1)
    os.dup2(2, 1)
    job = read_message(0)
    try:
        if job is None:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reaping.adopt_orphans()
        _loaded.remember()
        _preload.run(job.preload, job.variables)
        _worker._postponed.update(job.main)
        write_message(answers, "ready")
        folders = Mirrored(Path(job.cwd), Path(job.scratch, "folders"))
        for number in range(1_000_000):
            asked = read_message(0)
            if asked is None:
                return
            write_message(answers, _run(job, asked, Path(job.scratch, str(number)), folders, answers))
    except (_GoneError, BrokenPipeError):
        return
    finally:
        reaping.end_all()
        if job is not None:
            shutil.rmtree(job.scratch, ignore_errors=True)


def read_message(descriptor: int) -> Any:
    """Read what :func:`write_message` wrote; None: the other end is closed."""
    header = _exactly(descriptor, 8)
    if header is None:
        return None
    body = _exactly(descriptor, *struct.unpack("Q", header))
    return None if body is None else pickle.loads(body)


def write_message(descriptor: int, message: object) -> None:
    """Write an object that pickle can write."""
    body = pickle.dumps(message)
    left = struct.pack("Q", len(body)) + body
    while left:
        left = left[os.write(descriptor, left) :]


def _exactly(descriptor: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            return None
        data += part
    return data


def _run(job: Job, asked: Round, scratch: Path, folders: Mirrored, answers: int) -> dict[str, Any]:
    _preload.run(asked.preload, {})
    scratch.mkdir(parents=True)
    cwd = folders.path()
    (scratch / "tmp").mkdir()
    children: list[_Child] = []
    turns = _turns(asked.modes)
    pipes = {descriptor for each in turns.values() for descriptor in (*each.theirs.values(), *each.ours)}
    watched = _opened.Folders([str(cwd), *asked.watched])
    try:
        for index, mode in enumerate(asked.modes):
            place = Place(str(cwd), str(scratch / "tmp"), asked.cure, str(scratch / f"own{index}"))
            task = Task(
                job.packed,
                mode,
                asked.steps,
                place,
                asked.limits,
                asked.sources,
                asked.crowd,
                asked.generators,
                asked.thrifty,
                asked.calls,
                asked.globals,
            )
            others = {descriptor for child in children for descriptor in (child.report, child.said_from)}
            children.append(_fork(task, turns.get(mode), {answers} | pipes | others))
    finally:
        for descriptor in pipes:
            os.close(descriptor)
    _watch(children, max(asked.limits.values()), watched)
    reaping.end_all()
    watched.look()
    watched.close()
    for child in children:
        os.close(child.report)
        os.close(child.said_from)
    shutil.rmtree(scratch, ignore_errors=True)
    stand_for = {str(cwd): job.cwd, job.scratch: "", **folders.parents}
    return {
        "runs": [child.answer() for child in children],
        "opened": sorted(filter(None, (_opened.within(path, stand_for) for path in watched.opened))),
        "wrote": any(path.startswith(f"{cwd}/") for path in watched.modified & watched.read),
        "stand_for": stand_for,
    }


def _turns(modes: tuple[str, ...]) -> dict[str, Turns]:
    """Connect each process of a script that takes several with each other one."""
    turns = {}
    for group in (APART, RACE):
        if not set(group) <= set(modes):
            continue
        pipes = {(one, other): os.pipe() for one, other in itertools.permutations(group, 2)}
        for mode in group:
            turns[mode] = Turns(
                {one[-1]: reading for (one, other), (reading, _) in pipes.items() if other == mode},
                [writing for (one, _), (_, writing) in pipes.items() if one == mode],
            )
    return turns


def _fork(task: Task, turns: Turns | None, known: set[int]) -> _Child:
    report, reports = os.pipe()
    said_from, says = os.pipe()
    for descriptor in (report, said_from):
        os.set_blocking(descriptor, False)
    with warnings.catch_warnings():
        # Of threads, which numerical libraries have and know how to live without.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        kept = set() if turns is None else {*turns.theirs.values(), *turns.ours}
        _become(task, turns, (reports, says), (known | {report, said_from}) - kept)
    os.close(reports)
    os.close(says)
    child = _Child(pid, report, said_from, None, 0.0)
    child.start(task.limits["build"])
    return child


def _become(task: Task, turns: Turns | None, mine: tuple[int, int], others: set[int]) -> NoReturn:
    """Live as a child, and end."""
    try:
        os.setsid()
        reaping.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        reports, says = mine
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (says, 1), (says, 2)):
            os.dup2(source, target)
        for descriptor in (*others, nothing, says):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        follow(task, turns, Report(reports))
    finally:
        os._exit(0)


def _watch(children: list[_Child], patience: float, watched: _opened.Folders) -> None:
    """Wait for all of them, and end those that hang."""
    caller = select.poll()
    caller.register(0, select.POLLIN)
    while running := [child for child in children if child.status is None]:
        if caller.poll(_TICK_MS):
            # Nothing is asked while a round runs: what can be read is the end.
            raise _GoneError
        watched.look()
        for child in running:
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            child.read()
            if ended:
                reaping.kill_group(child.pid)
                child.status = os.waitpid(child.pid, 0)[1]
            elif child.limit is None and len(running) < len(children):
                # It may wait for one that has ended, and whose own children hold on to its end of the pipe.
                child.start(patience)
            elif child.is_late():
                child.hung = True
                reaping.kill_group(child.pid)


def _available(descriptor: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            data += part
    return data
