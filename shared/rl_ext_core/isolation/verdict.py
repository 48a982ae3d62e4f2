"""What is known about an environment: by its own declaration, by a probe, or by a cached probe."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory, walk

__all__ = ["Isolation", "Verdict"]

# The FMI standard's name of its flag; FMPy's model descriptions have an attribute of that name.
_FMI = "canBeInstantiatedOnlyOncePerProcess"
_KEY = "isolation"
_MAX_OBJECTS = 20_000
# Minimum number of steps that probe() compares.
MIN_STEPS = 10


class Isolation(str, enum.Enum):
    """What instances of an environment share.

    ``INDEPENDENT``: nothing; several may instance in one process. ``SINGLE_INSTANCE``: a second one in the same process
    fails, or makes the first one fail. ``SHARED_STATE``: a second one changes what the first one returns.
    ``PROCESSES_COLLIDE``: even two processes disturb each other. ``NON_DETERMINISTIC``: a single one does not return
    the same twice, or returns nothing that depends on seeds and actions, so that sharing cannot be detected.
    ``BROKEN``: a single one was built and fails. ``UNKNOWN``: none could be tried in a temporary process.

    >>> from rl_ext_core.isolation import Isolation
    >>> Isolation("single-instance") is Isolation.SINGLE_INSTANCE
    True
    """

    INDEPENDENT = "independent"
    SINGLE_INSTANCE = "single-instance"
    SHARED_STATE = "shared-state"
    PROCESSES_COLLIDE = "processes-collide"
    NON_DETERMINISTIC = "non-deterministic"
    BROKEN = "broken"
    UNKNOWN = "unknown"


_DECLARED = {
    **{kind.value: kind for kind in (Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE, Isolation.SHARED_STATE)},
    # The values of make_vec_env's option.
    "process": Isolation.SINGLE_INSTANCE,
    "in-process": Isolation.INDEPENDENT,
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far instances of an environment must be kept apart, and how that is known.

    :ivar isolation: the verdict
    :ivar explanation: sentences: what was observed, and what follows
    :ivar declared_by: ``"user"``, ``"environment"`` (its metadata or FMI flag), ``"probe"`` or ``"cache"``
    :ivar in_process: whether several may live in one process
    :ivar step_seconds: seconds of the fastest steps of a single instance; for environments that are not gymnasium's,
        drawing the action included. None: not measured
    :ivar build_seconds: seconds to build an instance in a new process, imports included
    :ivar private_bytes: bytes of memory that a process with one instance does not share with others
    :ivar libraries: paths of the shared objects that it has loaded, without Python's own
    :ivar seconds: seconds that this answer took

    >>> from rl_ext_core.isolation import probe
    >>> probe("CartPole-v1").isolation
    <Isolation.INDEPENDENT: 'independent'>
    """

    isolation: Isolation
    explanation: str
    declared_by: str
    in_process: bool = False
    step_seconds: float | None = None
    build_seconds: float | None = None
    private_bytes: int | None = None
    libraries: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> str:
        """Write the verdict as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


_CONSEQUENCES = {
    Isolation.INDEPENDENT: "They may share a process.",
    Isolation.BROKEN: 'Fix the environment first. To skip the trials, write isolation="process".',
    Isolation.UNKNOWN: 'For one process per environment without a trial, write isolation="process".',
    Isolation.PROCESSES_COLLIDE: "",
}


def conclude(isolation: Isolation, text: str, by: str = "probe", *, in_process: bool = False) -> Verdict:
    """Return a verdict whose explanation ends with what follows from it."""
    follows = _CONSEQUENCES.get(isolation, "Use one process per environment.")
    # What cannot be tried runs as with Stable Baselines3.
    in_process = in_process or isolation in (Isolation.INDEPENDENT, Isolation.UNKNOWN)
    return Verdict(isolation, f"{text} {follows}".rstrip(), by, in_process=in_process)


class Declaration(NamedTuple):
    """A value by which an environment declares its isolation, and the subject of the sentence on it."""

    value: str
    subject: str

    def verdict(self) -> Verdict:
        """Return the declared verdict.

        :raises InvalidArgumentError: If the value is unknown.
        """
        isolation = _DECLARED.get(self.value.lower().replace("_", "-"))
        if isolation is None:
            raise InvalidArgumentError(
                f"{self.subject} is {self.value!r}; expected one of {', '.join(map(repr, _DECLARED))}. Write "
                f'metadata = {{..., "{_KEY}": "{Isolation.SINGLE_INSTANCE.value}"}} in the environment\'s class'
            )
        return conclude(isolation, f'{self.subject[0].upper()}{self.subject[1:]} says "{self.value}".', "environment")


def declared_by_instance(environment: Any) -> Declaration | None:
    """Read what an instance declares; None if it declares nothing."""
    return _in_metadata(environment) or _fmi_flag(environment)


def declared_by_source(factory: EnvFactory[Any]) -> Declaration | None:
    """Read what is declared by a factory's instance or class, without building one; None if that is unknown."""
    if factory.instance is not None:
        return declared_by_instance(factory.instance)
    if factory.origin == "pickle":
        return None
    with contextlib.suppress(Exception):  # Building it shows what is wrong.
        build, _ = factory._recipe.load()
        return _in_metadata(_class_of(build))
    return None


def _in_metadata(holder: Any) -> Declaration | None:
    metadata = getattr(holder, "metadata", None)
    if not isinstance(metadata, Mapping) or _KEY not in metadata:
        return None
    kind = holder if isinstance(holder, type) else type(getattr(holder, "unwrapped", holder))
    value = metadata[_KEY]
    value = value.value if isinstance(value, Isolation) else value
    return Declaration(value if isinstance(value, str) else repr(value), f'{kind.__qualname__}.metadata["{_KEY}"]')


def _class_of(build: Any) -> Any:
    """Find the class that a function builds, without importing anything."""
    if isinstance(build, functools.partial):
        if build.args and hasattr(build.args[0], "entry_point"):
            return _class_of(build.args[0].entry_point)
        return _class_of(build.func)
    if isinstance(build, str):
        module, _, name = build.partition(":")
        return getattr(sys.modules.get(module), name, None)
    return build if isinstance(build, type) else None


def _fmi_flag(environment: Any) -> Declaration | None:
    """Search attributes, mappings, lists and tuples for FMI's flag, breadth first, without calling ``__getattr__``."""
    waiting, seen = [environment], {id(environment)}
    for item in waiting:  # to which the loop adds
        held = walk.attributes(item)
        if held.get(_FMI) is True:
            return Declaration(Isolation.SINGLE_INSTANCE.value, f"the FMI model description, by its flag {_FMI},")
        parts = (
            item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else held.values()
        )
        for part in itertools.islice(parts, _MAX_OBJECTS - len(waiting)):
            if not isinstance(part, (str, bytes, int, float, type, types.ModuleType)) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return None
