"""``Isolation`` and ``Verdict``, and the declarations that an environment may contain."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import sys
from collections.abc import Mapping
from typing import Any

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
    """Whether instances of an environment can share a process.

    - ``INDEPENDENT``: Instances do not affect each other. Several may run in one process.
    - ``SINGLE_INSTANCE``: A second instance in the same process fails, or makes the first one fail.
    - ``SHARED_STATE``: A second instance in the same process changes the results of the first one.
    - ``PROCESSES_COLLIDE``: Instances disturb each other even in separate processes.
    - ``NON_DETERMINISTIC``: Two runs of a single instance differ, or its results do not depend on seeds and actions.
      Sharing cannot be detected.
    - ``BROKEN``: A single instance crashes, or raises after its construction.
    - ``UNKNOWN``: The environment could not be tested in a temporary process. It cannot be pickled, its constructor
      raises, or an operation timed out.

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
    """Whether instances can share a process, and measurements of a single instance.

    :ivar isolation: The verdict.
    :ivar explanation: Sentences that describe the observations and their consequence.
    :ivar declared_by: Origin of the verdict: ``"environment"`` (its metadata or FMI flag) or ``"probe"``.
    :ivar in_process: Whether several instances may run in one process.
    :ivar step_seconds: Median seconds per step of a single instance, or None if not measured. Includes drawing the
        action for environments that are not gymnasium's.
    :ivar private_bytes: Memory in bytes that a process with one instance does not share. None if not measured.
    :ivar seconds: Seconds that the probe took.

    >>> from rl_ext_core.isolation import probe
    >>> probe("CartPole-v1").isolation
    <Isolation.INDEPENDENT: 'independent'>
    """

    isolation: Isolation
    explanation: str
    declared_by: str
    in_process: bool = False
    step_seconds: float | None = None
    private_bytes: int | None = None
    seconds: float = 0.0


_CONSEQUENCES = {
    Isolation.INDEPENDENT: "They may share a process.",
    Isolation.BROKEN: 'Fix the environment first. To skip the trials, use isolation="process".',
    Isolation.UNKNOWN: 'For one process per environment without a trial, use isolation="process".',
    Isolation.PROCESSES_COLLIDE: "",
}


def conclude(isolation: Isolation, text: str, by: str = "probe", *, in_process: bool = False) -> Verdict:
    """Create a verdict, and append what it implies to the explanation ``text``.

    :param in_process: Whether several may run in one process, although the verdict alone does not allow it.
    """
    follows = _CONSEQUENCES.get(isolation, "Use one process per environment.")
    # If nothing is known, use the layout of SB3's make_vec_env: one process.
    in_process = in_process or isolation in (Isolation.INDEPENDENT, Isolation.UNKNOWN)
    return Verdict(isolation, f"{text} {follows}".rstrip(), by, in_process=in_process)


# The isolation that an environment declares, and the subject of a sentence, such as `MyEnv.metadata["isolation"]`.
Declaration = tuple[str, str]


def declared_verdict(declaration: Declaration) -> Verdict:
    """Return the verdict that an environment declares.

    :raises InvalidArgumentError: If the declared value is unknown.
    """
    value, subject = declaration
    isolation = _DECLARED.get(value.lower().replace("_", "-"))
    if isolation is None:
        raise InvalidArgumentError(
            f"{subject} is {value!r}: expected one of {', '.join(map(repr, _DECLARED))}. Use "
            f'metadata = {{..., "{_KEY}": "{Isolation.SINGLE_INSTANCE.value}"}} in the environment\'s class'
        )
    return conclude(isolation, f'{subject[0].upper()}{subject[1:]} says "{value}".', "environment")


def declared_by_instance(environment: Any) -> Declaration | None:
    return _read_declaration(environment) or _fmi_flag(environment)


def declared_by_source(factory: EnvFactory[Any]) -> Declaration | None:
    """Return the declaration of a factory's instance or class, without building one; None if it is unknown."""
    if factory.instance is not None:
        return declared_by_instance(factory.instance)
    with contextlib.suppress(Exception):  # An error is reported when the environment is built.
        build, _ = factory._recipe.load()
        return _read_declaration(_class_of(build))
    return None


def _read_declaration(holder: Any) -> Declaration | None:
    """Return the declaration in the ``metadata`` of an environment or class, or None."""
    metadata = getattr(holder, "metadata", None)
    if not isinstance(metadata, Mapping) or _KEY not in metadata:
        return None
    kind = holder if isinstance(holder, type) else type(getattr(holder, "unwrapped", holder))
    value = metadata[_KEY]
    value = value.value if isinstance(value, Isolation) else value
    return value if isinstance(value, str) else repr(value), f'{kind.__qualname__}.metadata["{_KEY}"]'


def _class_of(build: Any) -> Any:
    """Return the class that a partial or entry point builds, without importing it; None if it is unknown."""
    if isinstance(build, functools.partial):
        if build.args and hasattr(build.args[0], "entry_point"):
            return _class_of(build.args[0].entry_point)
        return _class_of(build.func)
    if isinstance(build, str):
        module, _, name = build.partition(":")
        return getattr(sys.modules.get(module), name, None)
    return build if isinstance(build, type) else None


def _fmi_flag(environment: Any) -> Declaration | None:
    """Search attributes, mappings, lists and tuples for FMI's flag, without calling ``__getattr__``."""
    parts = itertools.islice(walk.reachable(environment), _MAX_OBJECTS)
    if any(walk.attributes(item).get(_FMI) is True for item in parts):
        return Isolation.SINGLE_INSTANCE.value, f"the flag {_FMI} of the FMI model description"
    return None
