"""The experiments: what is done with instances of an environment, in which order and in which of the processes.

A trial is one process's part in an experiment, and follows a script. Each instance has a life: resets and steps that
are the same wherever it takes place, so that what it returned can be compared. A life does not depend on how long it
is: a shorter one is the beginning of a longer one, but for its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rl_ext_core import resources
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import drivers, _graft, _parts, streams
from rl_ext_core.factory.drivers import plain
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.factory._rules import layers
from rl_ext_core.factory._sources import safe_to_preload
from rl_ext_core.isolation import cures, dependencies
from rl_ext_core.isolation.guard import Guard
from rl_ext_core.isolation.verdict import LEAST_STEPS, declared_by_instance

# Of a life that is short because resets or steps take seconds.
SHORT_STEPS = 6
# Operations after which one alone tells whether it has to be short: it is built, reset, and has taken three steps.
TOLD_AFTER = 5
# Instances that are alive at once, at most.
MOST_TOGETHER = 8
_CROWDED = 40
# Before the digest of what an instance returned: what it had returned before was changed by then.
OVERWRITTEN = "overwritten "
_SEEDS = {"A": 71, "B": 72}
# Stepping one alone goes on for so long, where that is not enough for all steps.
_STEPPING_S = 2.0
# An environment whose first reset and three steps take longer has a short life.
_SHORT_ABOVE_S = 2.0
# Steps over which the time of one is averaged; the least average counts, which others who use the machine spoil least.
_TIMED = 10
# Between two steps of a trial much is done, after which caches are cold. So it goes on in the end, for so many steps
# or seconds: where those do not do for an average, a step takes so long that caches do not matter.
_WARM_STEPS, _WARM_S = 100, 5e-3
# Of public arrays and entries of infos, so that the trial is not about them.
_LARGEST_BYTES, _MOST_ENTRIES = 1 << 16, 200
_STANDARD = {"reset", "step", "close", "render", "seed", "action_masks", "observation", "action", "reward"}
# Beyond that, what is returned is described path by path.
_DEEP = 50
_LIBRARIES = {"gymnasium", "builtins", "abc", "typing", "stable_baselines3", "rl_ext_core"}
ALONE, FIRST, SECOND, CROWD = "alone", "first", "second", "crowd"
APART = ("apart: A", "apart: B", "apart: C")
RACE = ("race: A", "race: B")
ASKED_ALONE, ASKED_BESIDE = "asked: alone", "asked: beside"
# In place of a cure: a working directory for each process.
OWN_DIRECTORY = "working directory"
# Files of a trial: what it records, and what it prints.
RECORDS, PRINTS = "records", "printed"
# What is read in place of a process that has ended.
GONE = b"x"


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something that is done with one instance."""

    # "A", which is compared; "B", which lives beside it; "C", which lives like A, later; "A0", "B1" and so on in a
    # crowd
    who: str
    # "build", "reset", "step", "call" (its setters), "close", "meet" (wait until the others are as far), or "done":
    # from here on failures do not count
    what: str
    seed: int | None = None  # of a reset
    optional: bool = False  # may be left out where steps take long
    options: bool = False  # whether a reset has options, where the environment names some

    @property
    def like(self) -> str:
        """Whose seeds and actions it has."""
        return "B" if self.who[0] == "B" else "A"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Trials that run at the same time."""

    modes: tuple[str, ...]  # keys of their scripts, one for each trial
    steps: int  # of instance A
    limits: Mapping[str, float]  # by kind of operation, seconds that it may take
    cure: str | None = None  # for each of them, or OWN_DIRECTORY; None: none
    # whether each instance is to find Python's, NumPy's and torch's generators as it left them
    generators: bool = False
    # whether optional steps are left out when the others have taken long, and a slow life is a short one
    shorten: bool = False
    preload: tuple[str, ...] = ()  # more harmless modules, for these processes and all later ones
    # by instance, which of the factories builds it; the first one where nothing is said
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    crowd: tuple[str, ...] = ()  # names of the instances, where the script is about many
    calls: tuple[str, ...] = ()  # names of the setters to call
    # by module, values to set before anything is built
    globals: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def _life(who: str, steps: int) -> list[Operation]:
    """Three short episodes with all kinds of beginnings, a long one, and two more that begin after B is gone."""
    base = 1000 if who[0] == "B" else 0
    step = Operation(who, "step")
    if steps < LEAST_STEPS:
        return [Operation(who, "reset", base + 1), *[step] * 3, Operation(who, "reset", base + 2), *[step] * 3]
    return [
        Operation(who, "reset", base + 1),
        *[step] * 3,
        Operation(who, "reset"),
        *[step] * 3,
        Operation(who, "reset", base + 2),
        *[step] * (LEAST_STEPS - 6),
        *[Operation(who, "step", optional=True)] * (steps - LEAST_STEPS),
        Operation(who, "reset"),
        *[step] * 2,
        Operation(who, "reset", base + 3),
        *[step] * 2,
    ]


def _together(one: list[Operation], other: list[Operation]) -> Iterator[Operation]:
    for left, right in zip(one, other, strict=True):
        yield left
        yield right


def _asked(who: str) -> list[Operation]:
    """A life in which setters are called, and resets have options."""
    base, step = 1000 if who == "B" else 0, Operation(who, "step")
    first, again = Operation(who, "reset", base + 1, options=True), Operation(who, "reset")
    return [first, step, Operation(who, "call"), *[step] * 3, again, *[step] * 2]


def _crowd(steps: int, names: tuple[str, ...]) -> list[Operation]:
    """All are built; each is a little further in its life than the next one, and closed while those go on."""
    lives = [[*_life(who, steps)[:_CROWDED], Operation(who, "close")] for who in names]
    lag = 2
    turns = [
        (turn + lag * index, index, operation)
        for index, life in enumerate(lives)
        for turn, operation in enumerate(life)
    ]
    order = [operation for *_, operation in sorted(turns, key=lambda entry: entry[:2])]
    return [*(Operation(who, "build") for who in names), *order[:-1], Operation(names[-1], "done"), order[-1]]


def operations(mode: str, steps: int, crowd: tuple[str, ...] = ()) -> list[Operation]:
    """Return a script; those of ``APART`` take turns, each with one of the instances.

    :param steps: of instance A: from ``LEAST_STEPS`` on, or ``SHORT_STEPS``
    """
    if mode == CROWD:
        return _crowd(steps, crowd)
    build, close = ({who: Operation(who, what) for who in "ABC"} for what in ("build", "close"))
    # Many a library crashes when the process is about to end, and nobody minds.
    end = {who: [Operation(who, "done"), close[who]] for who in "ABC"}
    if mode == ASKED_ALONE:
        return [build["A"], *_asked("A"), *end["A"]]
    if mode == ASKED_BESIDE:
        return [build["A"], build["B"], *_together(_asked("A"), _asked("B")), *end["A"], close["B"]]
    a, b, c = (_life(who, steps) for who in "ABC")
    half, most = len(a) // 2, max(2 * len(a) // 3, 5)
    if mode == ALONE:
        return [build["A"], *a, *end["A"]]
    if mode in RACE:
        # As one alone, but at the same time as another process does that, and not in turns.
        who = mode[-1]
        return [build[who], Operation(who, "meet"), *(a if who == "A" else b), *end[who]]
    if mode == FIRST:
        # A is built first. B is built, lives and is closed while A is at it.
        beside = _together(a[3:most], b[: most - 3])
        return [build["A"], *a[:3], build["B"], *beside, close["B"], *a[most:], *end["A"]]
    if mode == SECOND:
        # B is built first, and closed while A is at it. When both are closed, C lives like A did.
        ahead = min(6, len(b) - half)
        beside = _together(a[:half], b[ahead : half + ahead])
        until_closed = [build["B"], *b[:ahead], build["A"], *beside, close["B"], *a[half:], close["A"]]
        return [*until_closed, build["C"], *c, *end["C"]]
    # Each in its process: B is built and lives when A is there, and C, which is built after B, when B is.
    b, of_b = 2 * b if steps < LEAST_STEPS else _life("B", 2 * steps), len(a) - 3
    until_closed = [build["A"], *a[:3], build["B"], *_together(a[3:], b[:of_b]), close["A"]]
    beside = _together(c[:half], b[of_b : of_b + half])
    return [*until_closed, build["C"], *beside, close["B"], *c[half:], *end["C"]]


@dataclasses.dataclass(frozen=True)
class Turns:
    """The other processes of a script that takes several, which do what is not done here."""

    theirs: Mapping[str, Connection[Any, Any]]  # by instance, to read from: a byte for each operation done there
    ours: Sequence[Connection[Any, Any]]  # to write to
    # whose process has ended, which the supervisor says in its place
    gone: set[str] = dataclasses.field(default_factory=set)

    def wait(self, who: str) -> None:
        """Wait until another has done an operation, or has ended."""
        if who not in self.gone:
            record("waits")
            if self.theirs[who].recv_bytes() == GONE:
                self.gone.add(who)

    def hand_over(self) -> None:
        """Say that an operation is done here."""
        for pipe in self.ours:
            pipe.send_bytes(b".")


@dataclasses.dataclass(frozen=True)
class Task:
    """A trial, before it is made."""

    packed: bytes  # what builds the environments, by :func:`~rl_ext_core.factory._graft.dumps`
    experiment: Experiment  # that it is a part of
    mode: str  # key of the script
    cwd: Path  # the folder to work in, empty at first, which all trials of the experiment share
    users_cwd: str  # the user's, for which it stands
    temporary: Path  # for temporary files
    place: Path  # a folder that no other process uses, to be made
    turns: Turns | None  # None: nobody else takes part

    def make_files(self) -> None:
        """Make those that it writes, for whoever reads them."""
        self.place.mkdir()
        for name in (RECORDS, PRINTS):
            (self.place / name).touch()

    def enter(self) -> Guard:
        """Print where that is looked at, go to the folders, apply the cure, and limit what it writes."""
        descriptor = os.open(self.place / PRINTS, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
        with contextlib.suppress(ImportError):  # Windows
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        cure = self.experiment.cure
        directory = self.place / "cwd" if cure == OWN_DIRECTORY else self.cwd
        cures.enter_directory(directory)
        cures.use_for_temporary_files(self.temporary)
        if cure in cures.CURES:
            cures.apply_cure(cure, self.place)
        return Guard(str(directory), self.users_cwd, str(self.temporary), str(self.place))

    def is_ours(self, who: str) -> bool:
        """Whether an instance lives in this process: where a script is for several, each has one."""
        return ":" not in self.mode or self.mode.endswith(f": {who}") or self.mode.startswith("asked")


_records: Any = None  # this trial's file


def record(kind: str, *values: Any) -> None:
    """Append plain values to this trial's records, where the supervisor reads them as they come: this process may die
    of what it does next.
    """
    _records.write(pickle.dumps((kind, *values)))
    _records.flush()


def follow(task: Task) -> NoReturn:
    """Do a trial, and end the process; whatever goes wrong is recorded."""
    global _records
    _records = (task.place / RECORDS).open("ab")
    opened = dependencies.OpenedHere()
    executor = guard = None
    try:
        try:
            guard = task.enter()
            executor = _Executor(task)
            for operation in executor.operations():
                if task.is_ours(operation.who):
                    executor.perform(operation)
                elif task.turns is not None:
                    task.turns.wait(operation.who)
            record("fact", "done", True)
        except BaseException as error:
            record("fact", "raised", f"{type(error).__name__}: {_in_one_line(error)}")
        opened.paused = True
        record("fact", "opened", sorted(opened.paths))
        if guard is not None:
            record("fact", "refused", guard.refused)
            record("fact", "missing", guard.missing)
        if executor is not None:
            executor.close_all()
    finally:
        os._exit(0)


class _Executor:
    """Does operations with the instances of this process; one that is alone is measured."""

    def __init__(self, task: Task) -> None:
        self._task, self._experiment = task, task.experiment
        self._alone = task.mode == ALONE
        self._instances: dict[str, _Instance] = {}
        self._factories: Sequence[Any] | None = None
        self._generators: dict[str, Any] = {}
        self._times: dict[str, list[float]] = {}
        self._step_s: list[float] = []
        self._steps = task.experiment.steps
        self._had_torch = "torch" in sys.modules
        self._over = False

    def operations(self) -> Iterator[Operation]:
        """Return what is to be done."""
        script = operations(self._task.mode, self._experiment.steps, self._experiment.crowd)
        index = 0
        while index < len(script):
            yield script[index]
            index += 1
            taken = sum(sum(self._times.get(what, ())) for what in ("reset", "step"))
            if self._experiment.shorten and index == TOLD_AFTER and taken > _SHORT_ABOVE_S:
                self._steps = SHORT_STEPS
                script = operations(self._task.mode, SHORT_STEPS)

    def perform(self, operation: Operation) -> None:
        """Do something with an instance, having said so."""
        if operation.optional and self._experiment.shorten and sum(self._times.get("step", ())) > _STEPPING_S:
            self._steps -= 1
            return
        turns = self._task.turns
        if operation.what == "meet" and turns is not None:
            turns.hand_over()
            for who in turns.theirs:
                turns.wait(who)
            return
        # What there is to see of it, since others have had their turns. When all is done, it may have stepped on.
        instance = None if self._over else self._instances.get(operation.who)
        if instance is not None and (seen := instance.look()):
            record("found", operation.who, seen)
        record("does", operation.who, operation.what, self._experiment.limits[operation.what])
        if self._experiment.generators and operation.who in self._generators:
            _set_generators(self._generators[operation.who])
        begin = time.perf_counter()
        getattr(self, f"_{operation.what}")(operation)
        self._times.setdefault(operation.what, []).append(time.perf_counter() - begin)
        if self._experiment.generators:
            self._generators[operation.who] = _get_generators()
        if turns is not None and self._task.mode in APART:
            turns.hand_over()

    def close_all(self) -> None:
        """Close what a failure has left open: a lock of it would keep others from starting."""
        for who, instance in list(self._instances.items()):
            if not instance.closed:
                record("tidies", self._experiment.limits["close"])
                with contextlib.suppress(BaseException):
                    self._close(Operation(who, "close"))

    def _build(self, operation: Operation) -> None:
        # What constructors draw is no sign of anything shared; what resets and steps draw is.
        streams.seed_process(streams.sequence(_SEEDS[operation.like], 0))
        begin = time.perf_counter()
        if self._factories is None:
            # Once: a class or function of the caller's script has its globals in common with itself.
            self._factories = _unpacked(self._task.packed)
            if self._alone:
                record("fact", "globals", dependencies.globals_of_users())
            dependencies.set_globals(self._experiment.globals)
        environment = self._factories[self._experiment.sources.get(operation.who, 0)]()
        taken = time.perf_counter() - begin
        self._instances[operation.who] = _Instance(environment, _SEEDS[operation.like])
        if self._alone:
            record("fact", "built", taken)
            record("fact", "declared", declared_by_instance(environment))

    def _step(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        kept = instance.kept()
        if operation.what == "step":
            before = waited() if self._alone else 0.0
            returned, seconds = instance.step()
            others_had = waited() - before if self._alone else 0.0
            self._step_s.append(seconds - others_had if others_had < seconds else seconds)
        else:
            returned = instance.reset(operation)
        record("saw", operation.who, kept + instance.saw(returned))

    _reset = _step

    def _call(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        for name in self._experiment.calls:
            record("saw", operation.who, instance.call(name, 1 if operation.like == "A" else 2))

    def _close(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        instance.closed = True
        complaint = None
        try:
            getattr(instance.environment, "close", lambda: None)()
        except Exception as error:
            complaint = f"{type(error).__name__}: {_in_one_line(error)}"
        record("closed", operation.who, complaint)

    def _done(self, operation: Operation) -> None:
        if self._alone:
            instance = self._instances[operation.who]
            step_s = _least_average(self._step_s[1:])  # the first one fills caches
            measured = {
                "step_seconds": step_s,
                "private_bytes": resources.private_memory(),
                "steps": self._steps,
                "longest": {what: max(times) for what, times in self._times.items()},
                "libraries": dependencies.libraries(),
                "sources": dependencies.sources(),
                "folders": dependencies.folders(),
                "harmless": list(safe_to_preload(list(sys.modules))),
                "imports_torch": "torch" in sys.modules and not self._had_torch,
                "methods": instance.methods(),
                "options": len(instance.options()),
                "infos": isinstance(instance.driver, drivers._Gymnasium),
            }
            record("fact", "measured", measured)
        record("fact", "done", True)
        self._over = True
        if self._alone and step_s * _TIMED < _WARM_S:
            record("fact", "measured", {**measured, "step_seconds": min(step_s, _warm_average(instance))})


class _Instance:
    """An environment and what steps it: a driver, which gives copies of what it returns."""

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self.driver = environment, _driver_of(environment, seed)
        self.closed = False
        self._inner = getattr(environment, "unwrapped", environment)
        self._holders = [getattr(self._inner, "__dict__", {}), *map(vars, _classes(self._inner))]
        self._recorder = _Recorder(environment)
        self._last: Any = None
        self._masks = _attribute(environment, "action_masks")
        if isinstance(self.driver, drivers._Gymnasium):
            self.driver._env = self._recorder

    def saw(self, returned: Any) -> str:
        """Return a digest of what was returned."""
        self._last = _snapshot(self._recorder.last)
        return _digest(returned)

    def kept(self) -> str:
        """Return a mark if what was returned last is not any more what it was, though nothing was done with it."""
        return "" if self._last in (None, _snapshot(self._recorder.last)) else OVERWRITTEN

    def look(self) -> dict[str, str]:
        """Return digests of what callers look at beside what is returned: infos, masks and public arrays."""
        if self.closed:
            return {}
        seen: dict[str, str] = {}
        infos, self._recorder.infos = self._recorder.infos, []
        if any(infos):
            tokens = fingerprint(plain(infos)).tokens
            if len(tokens) > _MOST_ENTRIES:
                tokens = {"": sorted(tokens.items())}
            seen = {f"info{path[3:]}": _short(token) for path, token in tokens.items()}
        if self._last is not None and callable(self._masks):
            try:
                seen["action_masks()"] = _digest(self._masks())
            except Exception as error:
                seen["action_masks()"] = type(error).__name__
        for name, value in (pair for holder in self._holders for pair in list(holder.items())):
            known = isinstance(value, np.ndarray) and not value.dtype.hasobject
            if known and name[0] != "_" and value.nbytes <= _LARGEST_BYTES:
                seen[name] = _digest(value)
        return seen

    def options(self) -> list[Any]:
        """Return the options of a reset that the environment names."""
        metadata = getattr(self._inner, "metadata", None)
        named = metadata.get("reset_options") if isinstance(metadata, Mapping) else None
        return list(named) if isinstance(named, (list, tuple)) else []

    def step(self) -> tuple[Any, float]:
        """Step it; give what it returned, and the seconds that it took: without ours, where calls of it are seen."""
        before, begin = self._recorder.seconds, time.perf_counter()
        returned = self.driver.step()
        taken = time.perf_counter() - begin
        return returned, self._recorder.seconds - before or taken

    def reset(self, operation: Operation) -> Any:
        """Reset it: those like A with the first options that it names, those like B with the last ones."""
        named = self.options() if operation.options else []
        if not named:
            return self.driver.reset(operation.seed)
        options = named[0 if operation.like == "A" else -1]
        return plain(self._recorder.reset(seed=operation.seed, options=options)[0])

    def methods(self) -> list[list[Any]]:
        """List public methods that are the environment's own, each with whether it is a setter of one value."""
        found: dict[str, bool] = {}
        for layer in layers(self.environment) if isinstance(self.driver, drivers._Gymnasium) else ():
            for base in _classes(layer):
                for name, value in vars(base).items():
                    if isinstance(value, types.FunctionType) and name[0] != "_" and name not in _STANDARD:
                        code = value.__code__
                        required = code.co_argcount - len(value.__defaults__ or ()) + code.co_kwonlyargcount
                        found.setdefault(name, name.startswith("set") and required == code.co_argcount == 2)
        return sorted([name, setter] for name, setter in found.items())

    def call(self, name: str, value: int) -> str:
        """Call a setter with a number, and give a digest of what that does."""
        method = _attribute(self.environment, name)
        for number in (float(value), value):
            try:
                return _digest(plain(method(number)))
            except Exception as error:
                failure = f"{type(error).__name__}"
        return failure


class _Recorder:
    """Stands for an environment, and keeps what it returned last: the very arrays, not copies of them."""

    def __init__(self, environment: Any) -> None:
        self._environment, self.last = environment, None
        self.infos: list[Any] = []
        self.seconds = 0.0  # that all its resets and steps have taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **kwargs: Any) -> Any:
        return self._recorded(self._environment.reset, **kwargs)

    def step(self, action: Any) -> Any:
        return self._recorded(self._environment.step, action)

    def _recorded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds += time.perf_counter() - begin
        self.last = result[:-1]
        self.infos.append(result[-1])
        return result


def waited(pid: int | str = "self") -> float:
    """Return seconds for which a process was ready to run and others had the cores; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):  # not Linux, or it has ended
        return 0.0


def _unpacked(packed: bytes) -> list[Any]:
    factories = []
    for factory, called, adapters in _graft.loads(packed):
        if called is not None:
            object.__setattr__(factory._recipe, "called", called)
        factory._adapters = adapters
        factories.append(factory)
    _leave_monitors_files()
    return factories


def _leave_monitors_files() -> None:
    """Have Stable Baselines3's monitors write no files: what they append to is the record of the user's run."""
    monitor: Any = sys.modules.get("stable_baselines3.common.monitor")
    if monitor is None:
        return

    written = monitor.Monitor.__init__

    def unwritten(self: Any, env: Any, filename: str | None = None, *args: Any, **kwargs: Any) -> None:
        written(self, env, None, *args, **kwargs)

    monitor.Monitor.__init__ = unwritten


def _attribute(environment: Any, name: str) -> Any:
    """Return an attribute of one of an environment's layers."""
    for layer in layers(environment):
        if hasattr(type(layer), name) or name in getattr(layer, "__dict__", ()):
            return getattr(layer, name)
    return None


def _classes(environment: Any) -> list[type]:
    """Return the classes of an environment that are not a library's."""
    return [base for base in type(environment).__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES]


def _least_average(times: list[float]) -> float:
    sums = np.cumsum([0.0, *times])
    width = min(_TIMED, len(times))
    return float((sums[width:] - sums[:-width]).min() / width)


def _warm_average(instance: _Instance) -> float:
    times: list[float] = []
    until = time.perf_counter() + _WARM_S
    while len(times) < _TIMED or (len(times) < _WARM_STEPS and time.perf_counter() < until):
        times.append(instance.step()[1])
    return _least_average(times)


def _snapshot(value: Any) -> Any:
    """Return what tells the same objects, when looked at again, from what they are now; digests take longer."""
    if type(value) is tuple:
        return tuple(map(_snapshot, value))
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.tobytes()
    return repr(value) if type(value) in (bool, int, float) else _digest(value)


def _digest(returned: Any) -> str:
    # Not its pickle: that depends on which of equal texts are the same object.
    token = _parts.plain(returned, _DEEP)
    return _short(sorted(fingerprint(returned).tokens.items()) if token is None else token)


def _short(token: Any) -> str:
    return hashlib.blake2b(repr(token).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _get_generators() -> Any:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


def _set_generators(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is not None:
        sys.modules["torch"].set_rng_state(states[2])


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000].rstrip(".")


def _driver_of(environment: Any, seed: int) -> Any:
    driver = drivers.driver_for(environment, seed=seed)
    if driver is None and callable(getattr(environment, "reset", None)) and hasattr(environment, "action_space"):
        driver = drivers._Gymnasium(environment, np.random.default_rng(seed))
    if driver is None:
        raise InvalidTypeError(
            f"how a {type(environment).__module__}.{type(environment).__qualname__} is stepped is not known here; "
            "expected an environment of gymnasium, PettingZoo, dm_env, robosuite, TorchRL or Stable Baselines3"
        )
    return driver
