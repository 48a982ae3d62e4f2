"""What a process does that is thrown away: it follows a script and says what it is at, before it does it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core import resources
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import _drivers, _streams
from rl_ext_core.factory._fingerprint import fingerprint
from rl_ext_core.isolation import _declared, _loaded, cures
from rl_ext_core.isolation._script import ALONE, SCRIPTS, Operation

__all__ = ["OVERWRITTEN", "Place", "Report", "Task", "Turns", "follow"]

# Before the digest of what an instance returned: what it had returned before was changed by then.
OVERWRITTEN = "overwritten "
_SEEDS = {"A": 71, "B": 72}
# Stepping one alone goes on for so long, where that is not enough for all steps.
_STEPPING_S = 2.0


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


@dataclass(frozen=True)
class Task:
    """A process's part of a script.

    :ivar packed: pickle of what builds the environment
    :ivar mode: key of the script
    :ivar steps: of instance A
    :ivar place: where to work
    :ivar limits: seconds that the first construction may take, and at least any other operation
    :ivar generators: whether each instance is to find Python's, NumPy's and torch's generators as it left them
    :ivar thrifty: whether optional steps are left out when the others have taken long
    """

    packed: bytes
    mode: str
    steps: int
    place: Place
    limits: tuple[float, float]
    generators: bool = False
    thrifty: bool = False


def follow(task: Task, turns: Turns | None, report: Report) -> None:
    """Do a process's part of a script; whatever goes wrong is said.

    :param task: what to do
    :param turns: None: nobody else takes part
    """
    script, own = SCRIPTS[task.mode]
    try:
        task.place.enter()
        stage = _Stage(task, report)
        for index, operation in enumerate(script(task.steps)):
            if operation.who in own:
                stage.perform(index, operation)
                if turns is not None:
                    turns.hand_over()
            elif turns is not None:
                report.say("waits", index)
                turns.wait(operation.who)
        report.say("done")
    except BaseException as error:
        report.say("raised", f"{type(error).__name__}: {_in_one_line(error)}")


class _Stage:
    """The instances of this process; one that is alone is measured."""

    def __init__(self, task: Task, report: Report) -> None:
        self._task, self._report = task, report
        self._alone = task.mode == ALONE
        self._limit, self._least_limit = task.limits
        self._subjects: dict[str, _Subject] = {}
        self._generators: dict[str, Any] = {}
        self._step_s: list[float] = []
        self._skipped = 0
        self._had_torch = "torch" in sys.modules

    def perform(self, index: int, operation: Operation) -> None:
        """Do something with an instance, having said so."""
        if operation.optional and self._task.thrifty and sum(self._step_s) > _STEPPING_S:
            self._skipped += 1
            return
        self._report.say("does", index, self._limit)
        if self._task.generators and operation.who in self._generators:
            _set_generators(self._generators[operation.who])
        getattr(self, f"_{operation.what}")(operation)
        if self._task.generators:
            self._generators[operation.who] = _get_generators()

    def _build(self, operation: Operation) -> None:
        # What constructors draw is no sign of anything shared; what resets and steps draw is.
        _streams.seed_process(_streams.sequence(_SEEDS[operation.like], 0))
        begin = time.perf_counter()
        environment = pickle.loads(self._task.packed)()
        taken = time.perf_counter() - begin
        if not self._subjects:
            self._limit = max(self._least_limit, 5 * taken)
        self._subjects[operation.who] = _Subject(environment, _SEEDS[operation.like])
        if self._alone:
            self._report.say("built", taken, _declared.by_instance(environment))

    def _reset(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        self._report.say("saw", operation.who, subject.kept() + subject.saw(subject.driver.reset(operation.seed)))

    def _step(self, operation: Operation) -> None:
        subject = self._subjects[operation.who]
        kept = subject.kept()
        begin = time.perf_counter()
        returned = subject.driver.step()
        self._step_s.append(time.perf_counter() - begin)
        self._report.say("saw", operation.who, kept + subject.saw(returned))

    def _close(self, operation: Operation) -> None:
        close = getattr(self._subjects[operation.who].environment, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            self._report.say("closed", operation.who, f"{type(error).__name__}: {_in_one_line(error)}")
        else:
            self._report.say("closed", operation.who, None)

    def _done(self, operation: Operation) -> None:
        if self._alone:
            times = self._step_s[1:]  # the first one fills caches
            measured = {
                "step_seconds": sum(times) / len(times),
                "private_bytes": resources.private_memory(),
                "skipped": self._skipped,
                "libraries": _loaded.libraries(),
                "sources": _loaded.sources(),
                "harmless": _loaded.harmless(),
                "imports_torch": "torch" in sys.modules and not self._had_torch,
                "distributions": _loaded.distributions(self._subjects[operation.who].environment),
            }
            self._report.say("measured", measured)
        self._report.say("done")


class _Subject:
    """An environment and what steps it.

    :param seed: of the actions
    :ivar driver: gives copies of what the environment returns
    """

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self.driver = environment, _driver_of(environment, seed)
        self._original = _Original(environment)
        self._digest = ""
        if isinstance(self.driver, _drivers._Gymnasium):
            self.driver._env = self._original

    def saw(self, returned: Any) -> str:
        """Give a digest of what was returned."""
        self._digest = _digest(self._original.last)
        return _digest(returned)

    def kept(self) -> str:
        """Give a mark if what was returned last is not any more what it was, though nothing was done with this one."""
        return OVERWRITTEN if self._digest and _digest(self._original.last) != self._digest else ""


class _Original:
    """Stands for an environment, and keeps what it returned last: the very arrays, not copies of them."""

    def __init__(self, environment: Any) -> None:
        self._environment, self.last = environment, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **kwargs: Any) -> Any:
        result = self._environment.reset(**kwargs)
        self.last = result[0]
        return result

    def step(self, action: Any) -> Any:
        result = self._environment.step(action)
        self.last = result[:-1]
        return result


def _digest(returned: Any) -> str:
    # Not its pickle: that depends on which of equal texts are the same object.
    text = repr(sorted(fingerprint(returned).tokens.items())).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


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
