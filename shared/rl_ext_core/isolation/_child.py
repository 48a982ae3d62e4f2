"""What a process does that is thrown away: it follows a script and says what it is at, before it does it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import resources
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import _drivers, _graft, _streams
from rl_ext_core.factory._drivers import plain
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.factory._rules import layers
from rl_ext_core.isolation import _declared, _loaded, _opened, cures
from rl_ext_core.isolation._reaping import waited
from rl_ext_core.isolation._script import ALONE, SHORT_STEPS, TOLD_AFTER, Operation, operations

__all__ = ["OVERWRITTEN", "Place", "Report", "Task", "Turns", "follow"]

# Before the digest of what an instance returned: what it had returned before was changed by then.
OVERWRITTEN = "overwritten "
_SEEDS = {"A": 71, "B": 72}
# Stepping one alone goes on for so long, where that is not enough for all steps.
_STEPPING_S = 2.0
# An environment whose first reset and three steps take longer has a short life.
_SHORT_ABOVE_S = 2.0
# Steps over which the time of one is averaged; the least average counts, which others who use the machine spoil least.
_TIMED = 10
# Of public arrays and entries of infos, so that the trial is not about them.
_LARGEST_BYTES, _MOST_ENTRIES = 1 << 16, 200
_STANDARD = {"reset", "step", "close", "render", "seed", "action_masks", "observation", "action", "reward"}
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_LIBRARIES = {"gymnasium", "builtins", "abc", "typing", "stable_baselines3", "rl_ext_core"}


@dataclass(frozen=True)
class Place:
    """Where a process works.

    :ivar cwd: the folder to work in
    :ivar temporary: for temporary files
    :ivar cure: to apply; None: none
    :ivar own: a folder that no other process uses
    """

    cwd: str
    temporary: str
    cure: str | None
    own: str

    def enter(self) -> None:
        """Go there."""
        cures.write_to_copies(Path(self.cwd))
        os.chdir(self.cwd)
        os.environ.update(PWD=self.cwd, TMPDIR=self.temporary)
        tempfile.tempdir = None
        if self.cure is not None:
            Path(self.own).mkdir()
            cures.apply_cure(self.cure, Path(self.own))


class Report:
    """Says what happens, line by line, to whoever started this process.

    :param descriptor: of a pipe
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, kind: str, *values: Any) -> None:
        """Write a line, at once: the process may die of what it does next."""
        left = json.dumps([kind, *values]).encode() + b"\n"
        while left:
            left = left[os.write(self._descriptor, left) :]


@dataclass(frozen=True)
class Turns:
    """The other processes of a script that takes several, which do what is not done here.

    :ivar theirs: by instance, descriptors to read from: a byte for each operation that is done there
    :ivar ours: descriptors to write to
    """

    theirs: Mapping[str, int]
    ours: Sequence[int]

    def wait(self, who: str) -> None:
        """Wait until another has done an operation, or has ended."""
        os.read(self.theirs[who], 1)

    def hand_over(self) -> None:
        """Say that an operation is done here."""
        for descriptor in self.ours:
            with contextlib.suppress(OSError):
                os.write(descriptor, b".")

    def meet(self) -> None:
        """Wait until all are here."""
        self.hand_over()
        for who in self.theirs:
            self.wait(who)


@dataclass(frozen=True)
class Task:
    """A process's part of a script.

    :ivar packed: what builds the environments, by :func:`~rl_ext_core.factory._graft.dumps`
    :ivar mode: key of the script
    :ivar steps: of instance A
    :ivar place: where to work
    :ivar limits: by kind of operation, seconds that it may take
    :ivar sources: by instance, which of the factories builds it; the first one where nothing is said
    :ivar crowd: names of the instances, where the script is about many
    :ivar generators: whether each instance is to find Python's, NumPy's and torch's generators as it left them
    :ivar thrifty: whether optional steps are left out when the others have taken long, and a slow life is a short one
    :ivar calls: names of the setters to call
    :ivar globals: by module, values to set before anything is built
    """

    packed: bytes
    mode: str
    steps: int
    place: Place
    limits: Mapping[str, float]
    sources: Mapping[str, int] = field(default_factory=dict)
    crowd: tuple[str, ...] = ()
    generators: bool = False
    thrifty: bool = False
    calls: tuple[str, ...] = ()
    globals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def is_ours(self, who: str) -> bool:
        """Whether an instance lives in this process: where a script is for several, each has one."""
        return ":" not in self.mode or self.mode.endswith(f": {who}") or self.mode.startswith("asked")


def follow(task: Task, turns: Turns | None, report: Report) -> None:
    """Do a process's part of a script; whatever goes wrong is said.

    :param task: what to do
    :param turns: None: nobody else takes part
    """
    noted = _opened.note()
    stage = None
    try:
        task.place.enter()
        stage = _Stage(task, report, turns)
        for index, operation in stage.operations():
            if task.is_ours(operation.who):
                stage.perform(index, operation)
                if turns is not None and task.mode.startswith("apart"):
                    turns.hand_over()
            elif turns is not None:
                report.say("waits", index)
                turns.wait(operation.who)
        report.say("done")
    except BaseException as error:
        report.say("raised", f"{type(error).__name__}: {_in_one_line(error)}")
    noted.busy = True
    report.say("opened", sorted(noted.read))
    if stage is not None:
        stage.close_all()


class _Stage:
    """The instances of this process; one that is alone is measured."""

    def __init__(self, task: Task, report: Report, turns: Turns | None) -> None:
        self._task, self._report, self._turns = task, report, turns
        self._alone = task.mode == ALONE
        self._subjects: dict[str, _Subject] = {}
        self._factories: Sequence[Any] | None = None
        self._generators: dict[str, Any] = {}
        self._times: dict[str, list[float]] = {}
        self._step_s: list[float] = []
        self._steps = task.steps
        self._had_torch = "torch" in sys.modules
        self._waited = waited()

    def operations(self) -> Iterator[tuple[int, Operation]]:
        """Give what is to be done, with its place in the script."""
        script = operations(self._task.mode, self._task.steps, self._task.crowd)
        index = 0
        while index < len(script):
            yield index, script[index]
            index += 1
            taken = sum(sum(self._times.get(what, ())) for what in ("reset", "step"))
            if self._task.thrifty and index == TOLD_AFTER and taken > _SHORT_ABOVE_S:
                self._steps = SHORT_STEPS
                script = operations(self._task.mode, SHORT_STEPS)

    def perform(self, index: int, operation: Operation) -> None:
        """Do something with an instance, having said so."""
        if operation.optional and self._task.thrifty and sum(self._times.get("step", ())) > _STEPPING_S:
            self._steps -= 1
            return
        if operation.what == "meet":
            self._report.say("waits", index)
            assert self._turns is not None
            self._turns.meet()
            return
        self._look(operation.who)
        self._report.say("does", operation.who, operation.what, self._task.limits[operation.what])
        if self._task.generators and operation.who in self._generators:
            _set_generators(self._generators[operation.who])
        begin = time.perf_counter()
        getattr(self, f"_{operation.what}")(operation)
        self._times.setdefault(operation.what, []).append(time.perf_counter() - begin)
        if self._task.generators:
            self._generators[operation.who] = _get_generators()

    def close_all(self) -> None:
        """Close what a failure has left open: a lock of it would keep others from starting."""
        for who, subject in list(self._subjects.items()):
            if not subject.closed:
                self._report.say("tidies", self._task.limits["close"])
                with contextlib.suppress(BaseException):
                    self._close(Operation(who, "close"))

    def _look(self, who: str) -> None:
        """Say what there is to see of an instance, since others have had their turns."""
        if who in self._subjects and (seen := self._subjects[who].look()):
            self._report.say("found", who, seen)

    def _build(self, operation: Operation) -> None:
        # What constructors draw is no sign of anything shared; what resets and steps draw is.
        _streams.seed_process(_streams.sequence(_SEEDS[operation.like], 0))
        begin = time.perf_counter()
        if self._factories is None:
            # Once: a class or function of the caller's script has its globals in common with itself.
            self._factories = _unpacked(self._task.packed)
            if self._alone:
                self._report.say("globals", _loaded.globals_of_users())
            _loaded.set_globals(self._task.globals)
        environment = self._factories[self._task.sources.get(operation.who, 0)]()
        taken = time.perf_counter() - begin
        self._subjects[operation.who] = _Subject(environment, _SEEDS[operation.like])
        if self._alone:
            self._report.say("built", taken, _declared.by_instance(environment))

    def _reset(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        options = subject.options(operation.like) if operation.options else None
        kept = subject.kept()
        returned = subject.driver.reset(operation.seed) if options is None else subject.reset(operation.seed, options)
        self._report.say("saw", operation.who, kept + subject.saw(returned))

    def _step(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        kept = subject.kept()
        begin = time.perf_counter()
        returned = subject.driver.step()
        self._step_s.append(time.perf_counter() - begin)
        self._report.say("saw", operation.who, kept + subject.saw(returned))

    def _call(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        for name in self._task.calls:
            self._report.say("saw", operation.who, subject.call(name, 1 if operation.like == "A" else 2))

    def _close(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        subject.closed = True
        close = getattr(subject.environment, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            self._report.say("closed", operation.who, f"{type(error).__name__}: {_in_one_line(error)}")
        else:
            self._report.say("closed", operation.who, None)

    def _done(self, operation: Operation) -> None:
        if self._alone:
            subject = self._subjects[operation.who]
            measured = {
                "step_seconds": _least_average(self._step_s[1:]),  # the first one fills caches
                "undisturbed": waited() - self._waited < 0.1 * sum(self._times["step"]),
                "private_bytes": resources.private_memory(),
                "steps": self._steps,
                "longest": {what: max(times) for what, times in self._times.items()},
                "libraries": _loaded.libraries(),
                "sources": _loaded.sources(),
                "folders": _loaded.folders(),
                "harmless": _loaded.harmless(),
                "imports_torch": "torch" in sys.modules and not self._had_torch,
                "distributions": _loaded.distributions(subject.environment),
                "methods": subject.methods(),
                "options": len(subject.all_options()),
                "infos": isinstance(subject.driver, _drivers._Gymnasium),
            }
            self._report.say("measured", measured)
        self._report.say("done")


class _Subject:
    """An environment and what steps it.

    :param seed: of the actions
    :ivar driver: gives copies of what the environment returns
    :ivar closed: whether it was
    """

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self.driver = environment, _driver_of(environment, seed)
        self.closed = False
        self._inner = getattr(environment, "unwrapped", environment)
        self._holders = [getattr(self._inner, "__dict__", {}), *map(vars, _classes(self._inner))]
        self._original = _Original(environment)
        self._digest = ""
        self._masks = _attribute(environment, "action_masks")
        if isinstance(self.driver, _drivers._Gymnasium):
            self.driver._env = self._original

    def saw(self, returned: Any) -> str:
        """Give a digest of what was returned."""
        self._digest = _digest(self._original.last)
        return _digest(returned)

    def kept(self) -> str:
        """Give a mark if what was returned last is not any more what it was, though nothing was done with this one."""
        return OVERWRITTEN if self._digest and _digest(self._original.last) != self._digest else ""

    def look(self) -> dict[str, str]:
        """Give digests of what callers look at beside what is returned: infos, masks and public arrays."""
        if self.closed:
            return {}
        seen: dict[str, str] = {}
        infos, self._original.infos = self._original.infos, []
        if any(infos):
            tokens = fingerprint(plain(infos)).tokens
            if len(tokens) > _MOST_ENTRIES:
                tokens = {"": sorted(tokens.items())}
            seen = {f"info{path[3:]}": _short(token) for path, token in tokens.items()}
        if self._digest and callable(self._masks):
            try:
                seen["action_masks()"] = _digest(self._masks())
            except Exception as error:
                seen["action_masks()"] = type(error).__name__
        for name, array in _arrays(self._holders):
            seen[name] = _short((str(array.dtype), array.shape, array.tobytes()))
        return seen

    def all_options(self) -> list[Any]:
        """Give the options of a reset that the environment names."""
        metadata = getattr(self._inner, "metadata", None)
        named = metadata.get("reset_options") if isinstance(metadata, Mapping) else None
        return list(named) if isinstance(named, (list, tuple)) else []

    def options(self, like: str) -> Any:
        """Give those that one like A, or like B, is reset with; None: the environment names none."""
        named = self.all_options()
        return None if not named else named[0 if like == "A" else len(named) - 1]

    def reset(self, seed: int | None, options: Any) -> Any:
        """Reset it with options."""
        return plain(self._original.reset(seed=seed, options=options)[0])

    def methods(self) -> list[list[Any]]:
        """List public methods that are the environment's own, each with whether it is a setter of one value."""
        found: dict[str, bool] = {}
        for layer in layers(self.environment) if isinstance(self.driver, _drivers._Gymnasium) else ():
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


class _Original:
    """Stands for an environment, and keeps what it returned last: the very arrays, not copies of them."""

    def __init__(self, environment: Any) -> None:
        self._environment, self.last = environment, None
        self.infos: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **kwargs: Any) -> Any:
        result = self._environment.reset(**kwargs)
        self.last = result[0]
        self.infos.append(result[1])
        return result

    def step(self, action: Any) -> Any:
        result = self._environment.step(action)
        self.last = result[:-1]
        self.infos.append(result[-1])
        return result


def _unpacked(packed: bytes) -> list[Any]:
    factories = []
    for factory, called, adapters in _graft.loads(packed):
        if called is not None:
            object.__setattr__(factory._recipe, "called", called)
        factory._adapters = adapters
        factories.append(factory)
    return factories


def _attribute(environment: Any, name: str) -> Any:
    """Give an attribute of one of an environment's layers."""
    for layer in layers(environment):
        if hasattr(type(layer), name) or name in getattr(layer, "__dict__", ()):
            return getattr(layer, name)
    return None


def _classes(environment: Any) -> list[type]:
    """Give the classes of an environment that are not a library's."""
    return [base for base in type(environment).__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES]


def _arrays(holders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    for holder in holders:
        for name, value in list(holder.items()):
            known = isinstance(value, np.ndarray) and not value.dtype.hasobject
            if known and name[0] != "_" and value.nbytes <= _LARGEST_BYTES:
                yield name, value


def _least_average(times: list[float]) -> float:
    sums = np.cumsum([0.0, *times])
    width = min(_TIMED, len(times))
    return float((sums[width:] - sums[:-width]).min() / width)


def _short(token: Any) -> str:
    return hashlib.blake2b(repr(token).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _digest(returned: Any) -> str:
    # Not its pickle: that depends on which of equal texts are the same object.
    digest = hashlib.blake2b(digest_size=8)
    _describe(returned, digest.update)
    return digest.hexdigest()


def _describe(value: Any, write: Callable[[bytes], Any]) -> None:
    kind = type(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        write(f"{value.dtype}{value.shape}".encode())
        write(value.tobytes())
    elif kind in _PLAIN or isinstance(value, np.generic):
        write(f"{kind.__name__} {value!r}".encode("utf-8", "surrogatepass"))
    elif kind is list or kind is tuple:
        write(f"{kind.__name__} {len(value)}".encode())
        for part in value:
            _describe(part, write)
    elif kind is dict and all(type(key) is str for key in value):
        write(f"dict {list(value)}".encode("utf-8", "surrogatepass"))
        for part in value.values():
            _describe(part, write)
    else:
        write(repr(sorted(fingerprint(value).tokens.items())).encode("utf-8", "surrogatepass"))


def _get_generators() -> Any:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


def _set_generators(states: Any) -> None:
    ours, numpys, torchs = states
    random.setstate(ours)
    np.random.set_state(numpys)
    if torchs is not None:
        sys.modules["torch"].set_rng_state(torchs)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000].rstrip(".")


def _driver_of(environment: Any, seed: int) -> Any:
    driver = _drivers.driver_for(environment, seed=seed)
    if driver is None and callable(getattr(environment, "reset", None)) and hasattr(environment, "action_space"):
        driver = _drivers._Gymnasium(environment, np.random.default_rng(seed))
    if driver is None:
        raise InvalidTypeError(
            f"how a {type(environment).__module__}.{type(environment).__qualname__} is stepped is not known here; "
            "expected an environment of gymnasium, PettingZoo, dm_env, robosuite, TorchRL or Stable Baselines3"
        )
    return driver
