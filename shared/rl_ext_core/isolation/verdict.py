"""What was found out about an environment."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from rl_ext_core.errors import CorruptFileError

__all__ = ["Isolation", "Verdict"]

_FORMAT = 1
_NUMBERS = {"step_seconds": float, "build_seconds": float, "private_bytes": int}


class Isolation(str, enum.Enum):
    """What instances of an environment may share.

    ``INDEPENDENT``: several may live in one process, and in several. ``SINGLE_INSTANCE``: a second one in the same
    process fails, or makes the first one fail. ``SHARED_STATE``: it works, and changes what the first one returns.
    ``PROCESSES_COLLIDE``: even two processes disturb each other, unless there is a cure. ``NON_DETERMINISTIC``: it
    cannot be told, because one alone does not do the same twice, or because nothing that it returns depends on what it
    is given. ``BROKEN``: one alone fails. ``UNKNOWN``: one alone took longer than was waited for it. One process per
    environment is what remains where it cannot be told.
    """

    INDEPENDENT = "independent"
    SINGLE_INSTANCE = "single-instance"
    SHARED_STATE = "shared-state"
    PROCESSES_COLLIDE = "processes-collide"
    NON_DETERMINISTIC = "non-deterministic"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far instances of an environment have to be kept apart, and how that is known.

    :ivar isolation: the verdict
    :ivar explanation: a paragraph: what was seen, and what follows
    :ivar declared_by: ``"user"``, ``"environment"`` (its metadata says so), ``"probe"`` or ``"cache"`` (of a probe)
    :ivar in_process: whether several may live in one process; where processes collide, this may be the way out
    :ivar step_seconds: a step of one alone, drawing the action included, at its fastest; None: was not
        measured, or others had the machine then
    :ivar build_seconds: to build one in a new process, its imports included
    :ivar private_bytes: what a process that holds one shares with no other
    :ivar cure: what keeps processes from colliding: ``"working directory"``, ``"TMPDIR"`` or ``"library copy"``, for
        :func:`~rl_ext_core.isolation.apply_cure` in each of them; None: none is needed, or none has helped
    :ivar libraries: shared objects that it has loaded, without Python's own
    :ivar seconds: what finding out has taken, now
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
            return _checked(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                f"{text[:60]!r} is no verdict ({error}); expected what Verdict.to_json() wrote. Write probe(source)"
            ) from error


def _checked(data: dict[str, Any]) -> Verdict:
    data["isolation"] = Isolation(data["isolation"])
    data["libraries"] = tuple(data["libraries"])
    expected: dict[str, Any] = {"explanation": str, "declared_by": str, "in_process": bool, "seconds": (int, float)}
    expected |= {name: (kind, int, type(None)) for name, kind in _NUMBERS.items()} | {"cure": (str, type(None))}
    for name, kind in expected.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} is {data[name]!r}")
    if not all(isinstance(library, str) for library in data["libraries"]):
        raise ValueError("libraries are no texts")
    return Verdict(**data)
