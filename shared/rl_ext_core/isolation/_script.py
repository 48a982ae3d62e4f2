"""What is done with instances of an environment, in which order and in which of the processes.

Each instance has a life: resets and steps that are the same wherever it takes place, so that what it returned can be
compared. A life does not depend on how long it is: a shorter one is the beginning of a longer one, but for its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

__all__ = ["ALONE", "APART", "FIRST", "LEAST_STEPS", "SCRIPTS", "SECOND", "Operation"]

LEAST_STEPS = 10
ALONE, FIRST, SECOND = "alone", "first", "second"
APART = ("apart: A", "apart: B", "apart: C")


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something that is done with one instance.

    :ivar who: "A", which is compared; "B", which lives beside it; "C", which lives like A, later
    :ivar what: "build", "reset", "step", "close", or "done": from here on failures do not count
    :ivar seed: of a reset
    :ivar optional: may be left out where steps take long
    """

    who: str
    what: str
    seed: int | None = None
    optional: bool = False

    @property
    def like(self) -> str:
        """Whose seeds and actions it has."""
        return "B" if self.who == "B" else "A"


def _life(who: str, steps: int) -> list[Operation]:
    """Three short episodes with all kinds of beginnings, a long one, and two more that begin after B is gone."""
    base = 1000 if who == "B" else 0
    step = Operation(who, "step")
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


def _end(who: str) -> list[Operation]:
    # Many a library crashes when the process is about to end, and nobody minds.
    return [Operation(who, "done"), Operation(who, "close")]


def _alone(steps: int) -> list[Operation]:
    return [Operation("A", "build"), *_life("A", steps), *_end("A")]


def _first(steps: int) -> list[Operation]:
    """A is built first. B is built, lives and is closed while A is at it."""
    a, b = _life("A", steps), _life("B", steps)
    shared = 2 * len(a) // 3
    return [
        Operation("A", "build"),
        *a[:3],
        Operation("B", "build"),
        *_together(a[3:shared], b[: shared - 3]),
        Operation("B", "close"),
        *a[shared:],
        *_end("A"),
    ]


def _second(steps: int) -> list[Operation]:
    """B is built first, and closed while A is at it. When both are closed, C lives like A did."""
    a, b = _life("A", steps), _life("B", steps)
    shared = len(a) // 2
    return [
        Operation("B", "build"),
        *b[:6],
        Operation("A", "build"),
        *_together(a[:shared], b[6 : shared + 6]),
        Operation("B", "close"),
        *a[shared:],
        Operation("A", "close"),
        Operation("C", "build"),
        *_life("C", steps),
        *_end("C"),
    ]


def _apart(steps: int) -> list[Operation]:
    """Each in its process: B is built and lives when A is there, and C, which is built after B, when B is."""
    a, b, c = _life("A", steps), _life("B", 2 * steps), _life("C", steps)
    return [
        Operation("A", "build"),
        *a[:3],
        Operation("B", "build"),
        *_together(a[3:], b[: len(a) - 3]),
        Operation("A", "close"),
        Operation("C", "build"),
        *_together(c[: len(c) // 2], b[len(a) - 3 : len(a) - 3 + len(c) // 2]),
        Operation("B", "close"),
        *c[len(c) // 2 :],
        *_end("C"),
    ]


# What a process does, and which instances are its own. Those of APART take turns.
SCRIPTS = {
    ALONE: (_alone, "A"),
    FIRST: (_first, "AB"),
    SECOND: (_second, "ABC"),
    **{mode: (_apart, mode[-1]) for mode in APART},
}
