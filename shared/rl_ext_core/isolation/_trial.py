"""What a trial process does: its part in an experiment, and before each operation it says so."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import resources
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import _drivers, _graft, _parts, _streams
from rl_ext_core.factory._drivers import plain
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.factory._rules import layers
from rl_ext_core.factory._sources import safe_to_preload
from rl_ext_core.isolation import _dependencies, cures
from rl_ext_core.isolation._experiments import ALONE, SHORT_STEPS, TOLD_AFTER, Experiment, Operation, operations
from rl_ext_core.isolation.verdict import declared_by_instance

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
# Beyond that, what is returned is described path by path.
_DEEP = 50
_LIBRARIES = {"gymnasium", "builtins", "abc", "typing", "stable_baselines3", "rl_ext_core"}


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
    """A trial, before it is made.

    :ivar packed: what builds the environments, by :func:`~rl_ext_core.factory._graft.dumps`
    :ivar experiment: that it is a part of
    :ivar mode: key of the script
    :ivar cwd: the folder to work in
    :ivar temporary: for temporary files
    :ivar own: a folder that no other process uses, to be made
    :ivar turns: None: nobody else takes part
    """

    packed: bytes
    experiment: Experiment
    mode: str
    cwd: Path
    temporary: Path
    own: Path
    turns: Turns | None

    def enter(self) -> None:
        """Go to the folders, and apply the cure."""
        cures.write_to_copies(self.cwd)
        os.chdir(self.cwd)
        os.environ.update(PWD=str(self.cwd), TMPDIR=str(self.temporary))
        tempfile.tempdir = None
        if self.experiment.cure is not None:
            self.own.mkdir()
            cures.apply_cure(self.experiment.cure, self.own)

    def is_ours(self, who: str) -> bool:
        """Whether an instance lives in this process: where a script is for several, each has one."""
        return ":" not in self.mode or self.mode.endswith(f": {who}") or self.mode.startswith("asked")


def follow(task: Task, report: int) -> None:
    """Do a trial; whatever goes wrong is said.

    :param task: what to do
    :param report: descriptor to write to what happens, to whoever started this process
    """

    def say(kind: str, *values: Any) -> None:
        # Each line at once: the process may die of what it does next.
        left = json.dumps([kind, *values]).encode() + b"\n"
        while left:
            left = left[os.write(report, left) :]

    opened = _dependencies.OpenedHere()
    executor = None
    try:
        task.enter()
        executor = _Executor(task, say)
        for operation in executor.operations():
            if task.is_ours(operation.who):
                executor.perform(operation)
                if task.turns is not None and task.mode.startswith("apart"):
                    task.turns.hand_over()
            elif task.turns is not None:
                say("waits")
                task.turns.wait(operation.who)
        say("done", True)
    except BaseException as error:
        say("raised", f"{type(error).__name__}: {_in_one_line(error)}")
    opened.paused = True
    say("opened", sorted(opened.paths))
    if executor is not None:
        executor.close_all()


class _Executor:
    """Does operations with the instances of this process; one that is alone is measured."""

    def __init__(self, task: Task, say: Callable[..., None]) -> None:
        self._task, self._experiment, self._say = task, task.experiment, say
        self._alone = task.mode == ALONE
        self._instances: dict[str, _Instance] = {}
        self._factories: Sequence[Any] | None = None
        self._generators: dict[str, Any] = {}
        self._times: dict[str, list[float]] = {}
        self._step_s: list[float] = []
        self._steps = task.experiment.steps
        self._had_torch = "torch" in sys.modules
        self._waited = waited()

    def operations(self) -> Iterator[Operation]:
        """Give what is to be done."""
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
        if operation.what == "meet":
            self._say("waits")
            assert self._task.turns is not None
            self._task.turns.meet()
            return
        self._look(operation.who)
        self._say("does", operation.who, operation.what, self._experiment.limits[operation.what])
        if self._experiment.generators and operation.who in self._generators:
            _set_generators(self._generators[operation.who])
        begin = time.perf_counter()
        getattr(self, f"_{operation.what}")(operation)
        self._times.setdefault(operation.what, []).append(time.perf_counter() - begin)
        if self._experiment.generators:
            self._generators[operation.who] = _get_generators()

    def close_all(self) -> None:
        """Close what a failure has left open: a lock of it would keep others from starting."""
        for who, instance in list(self._instances.items()):
            if not instance.closed:
                self._say("tidies", self._experiment.limits["close"])
                with contextlib.suppress(BaseException):
                    self._close(Operation(who, "close"))

    def _look(self, who: str) -> None:
        """Say what there is to see of an instance, since others have had their turns."""
        if who in self._instances and (seen := self._instances[who].look()):
            self._say("found", who, seen)

    def _build(self, operation: Operation) -> None:
        # What constructors draw is no sign of anything shared; what resets and steps draw is.
        _streams.seed_process(_streams.sequence(_SEEDS[operation.like], 0))
        begin = time.perf_counter()
        if self._factories is None:
            # Once: a class or function of the caller's script has its globals in common with itself.
            self._factories = _unpacked(self._task.packed)
            if self._alone:
                self._say("globals", _dependencies.globals_of_users())
            _dependencies.set_globals(self._experiment.globals)
        environment = self._factories[self._experiment.sources.get(operation.who, 0)]()
        taken = time.perf_counter() - begin
        self._instances[operation.who] = _Instance(environment, _SEEDS[operation.like])
        if self._alone:
            self._say("built", taken)
            self._say("declared", declared_by_instance(environment))

    def _reset(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        kept = instance.kept()
        self._say("saw", operation.who, kept + instance.saw(instance.reset(operation)))

    def _step(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        kept = instance.kept()
        begin = time.perf_counter()
        returned = instance.driver.step()
        self._step_s.append(time.perf_counter() - begin)
        self._say("saw", operation.who, kept + instance.saw(returned))

    def _call(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        for name in self._experiment.calls:
            self._say("saw", operation.who, instance.call(name, 1 if operation.like == "A" else 2))

    def _close(self, operation: Operation) -> None:
        instance = self._instances[operation.who]
        instance.closed = True
        complaint = None
        try:
            getattr(instance.environment, "close", lambda: None)()
        except Exception as error:
            complaint = f"{type(error).__name__}: {_in_one_line(error)}"
        self._say("closed", operation.who, complaint)

    def _done(self, operation: Operation) -> None:
        if self._alone:
            instance = self._instances[operation.who]
            measured = {
                "step_seconds": _least_average(self._step_s[1:]),  # the first one fills caches
                "undisturbed": waited() - self._waited < 0.1 * sum(self._times["step"]),
                "private_bytes": resources.private_memory(),
                "steps": self._steps,
                "longest": {what: max(times) for what, times in self._times.items()},
                "libraries": _dependencies.libraries(),
                "sources": _dependencies.sources(),
                "folders": _dependencies.folders(),
                "harmless": list(safe_to_preload(list(sys.modules))),
                "imports_torch": "torch" in sys.modules and not self._had_torch,
                "distributions": _dependencies.distributions(instance.environment),
                "methods": instance.methods(),
                "options": len(instance.options()),
                "infos": isinstance(instance.driver, _drivers._Gymnasium),
            }
            self._say("measured", measured)
        self._say("done", True)


class _Instance:
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
        self._recorder = _Recorder(environment)
        self._digest = ""
        self._masks = _attribute(environment, "action_masks")
        if isinstance(self.driver, _drivers._Gymnasium):
            self.driver._env = self._recorder

    def saw(self, returned: Any) -> str:
        """Give a digest of what was returned."""
        self._digest = _digest(self._recorder.last)
        return _digest(returned)

    def kept(self) -> str:
        """Give a mark if what was returned last is not any more what it was, though nothing was done with this one."""
        return OVERWRITTEN if self._digest and _digest(self._recorder.last) != self._digest else ""

    def look(self) -> dict[str, str]:
        """Give digests of what callers look at beside what is returned: infos, masks and public arrays."""
        if self.closed:
            return {}
        seen: dict[str, str] = {}
        infos, self._recorder.infos = self._recorder.infos, []
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
            seen[name] = _digest(array)
        return seen

    def options(self) -> list[Any]:
        """Give the options of a reset that the environment names."""
        metadata = getattr(self._inner, "metadata", None)
        named = metadata.get("reset_options") if isinstance(metadata, Mapping) else None
        return list(named) if isinstance(named, (list, tuple)) else []

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


class _Recorder:
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


def waited(pid: int | str = "self") -> float:
    """Give seconds for which a process was ready to run and others had the cores; 0 where that is not known."""
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
