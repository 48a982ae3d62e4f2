"""What was found out about an environment, by a probe or by what it says of itself."""

from __future__ import annotations

import collections
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

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.factory import EnvFactory, _objects

__all__ = ["Isolation", "Verdict"]

_FORMAT = 1
# That are compared, at least.
LEAST_STEPS = 10
# The name that the FMI standard gives its flag; FMPy's model descriptions carry it under this name.
_FMI = "canBeInstantiatedOnlyOncePerProcess"
_KEY = "isolation"
_LOOKED_AT = 20_000
_KINDS: dict[str, Any] = {"explanation": str, "declared_by": str, "in_process": bool, "seconds": (int, float)}
_KINDS |= dict.fromkeys(("step_seconds", "build_seconds"), (float, int, type(None)))
_KINDS |= {"private_bytes": (int, type(None)), "cure": (str, type(None)), "libraries": (list, tuple)}


class Isolation(str, enum.Enum):
    """What instances of an environment may share.

    ``INDEPENDENT``: several may live in one process, and in several. ``SINGLE_INSTANCE``: a second one in the same
    process fails, or makes the first one fail. ``SHARED_STATE``: it works, and changes what the first one returns.
    ``PROCESSES_COLLIDE``: even two processes disturb each other, unless there is a cure. ``NON_DETERMINISTIC``: it
    cannot be told, because one alone does not do the same twice, or because nothing that it returns depends on what it
    is given. ``BROKEN``: one was built and fails. ``UNKNOWN``: one could not be tried, because it cannot be built in a
    process with an empty working directory, uses files of the user's, or takes longer than was waited for it.

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
    # As the option of make_vec_env says it.
    "process": Isolation.SINGLE_INSTANCE,
    "in-process": Isolation.INDEPENDENT,
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far instances of an environment have to be kept apart, and how that is known.

    :ivar isolation: the verdict
    :ivar explanation: a paragraph: what was seen, and what follows
    :ivar declared_by: ``"user"``, ``"environment"`` (its metadata says so), ``"probe"`` or ``"cache"`` (of a probe)
    :ivar in_process: whether several may live in one process; where processes collide, this may be the way out
    :ivar step_seconds: a step of one alone, at its fastest; drawing the action included, where it is none of
        gymnasium's; None: was not measured
    :ivar build_seconds: to build one in a new process, its imports included
    :ivar private_bytes: what a process that holds one shares with no other
    :ivar cure: what keeps processes from colliding: ``"TMPDIR"`` or ``"library copy"``, for
        :func:`~rl_ext_core.isolation.apply_cure` in each of them; None: none is needed, or none has helped
    :ivar libraries: shared objects that it has loaded, without Python's own
    :ivar seconds: what finding out has taken, now

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
    cure: str | None = None
    libraries: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Read what :meth:`to_json` wrote.

        :raises CorruptFileError: it did not write that, or another version of this package did
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise ValueError("another format")
            return cls.from_dict(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                f"{text[:60]!r} is no verdict ({error}); expected what Verdict.to_json() wrote. Write probe(source)"
            ) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Read what ``dataclasses.asdict`` gave.

        :raises Exception: it is none
        """
        for name, kinds in _KINDS.items():
            if not isinstance(data[name], kinds):
                raise ValueError(f"{name} is {data[name]!r}")
        if not all(isinstance(library, str) for library in data["libraries"]):
            raise ValueError("libraries are no texts")
        return cls(**{**data, "isolation": Isolation(data["isolation"]), "libraries": tuple(data["libraries"])})


class Declaration(NamedTuple):
    """What an environment says of itself."""

    value: str  # what it says
    where: str  # it says that

    @property
    def isolation(self) -> Isolation:
        """What is meant.

        :raises InvalidArgumentError: nothing that can be said
        """
        found = _DECLARED.get(self.value.lower().replace("_", "-"))
        if found is not None:
            return found
        raise InvalidArgumentError(
            f"{self.where} is {self.value!r}; expected one of {', '.join(map(repr, _DECLARED))}. Write "
            f'metadata = {{..., "{_KEY}": "{Isolation.SINGLE_INSTANCE.value}"}} in the environment\'s class'
        )


def declared_by_instance(environment: Any) -> Declaration | None:
    """Read what an instance says; None: nothing."""
    return _in_metadata(environment) or _fmi_flag(environment)


def declared_by_source(factory: EnvFactory[Any]) -> Declaration | None:
    """Read what is known without building: what the instance says that a factory was made from, or the class."""
    if factory.live is not None:
        return declared_by_instance(factory.live)
    if factory.origin == "graft":
        return None
    with contextlib.suppress(Exception):  # whatever is wrong with it will show when it is built
        build, _ = factory._recipe.unpacked()
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
    """Look for FMI's flag in what is held in attributes, mappings, lists and tuples, the nearest first.

    Nothing of the environment's own runs, such as a ``__getattr__``.
    """
    waiting, seen = collections.deque([environment]), {id(environment)}
    for _ in range(_LOOKED_AT):
        if not waiting:
            break
        item = waiting.popleft()
        held = _objects.attributes(item)
        if held.get(_FMI) is True:
            return Declaration(Isolation.SINGLE_INSTANCE.value, f"the FMI model description, by its flag {_FMI},")
        parts = (
            item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else held.values()
        )
        for part in itertools.islice(parts, _LOOKED_AT):
            if not isinstance(part, (str, bytes, int, float, type, types.ModuleType)) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return None
