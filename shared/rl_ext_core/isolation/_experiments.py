"""The experiments: what is done with instances of an environment, in which order and in which of the processes.

A trial is one process's part in an experiment, and follows a script. Each instance has a life: resets and steps that
are the same wherever it takes place, so that what it returned can be compared. A life does not depend on how long it
is: a shorter one is the beginning of a longer one, but for its end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LEAST_STEPS = 10
# Of a life that is short because resets or steps take seconds.
SHORT_STEPS = 6
# Operations after which one alone tells whether it has to be short: it is built, reset, and has taken three steps.
TOLD_AFTER = 5
# Instances that are alive at once, at most.
MOST_TOGETHER = 8
_CROWDED = 40
ALONE, FIRST, SECOND, CROWD = "alone", "first", "second", "crowd"
APART = ("apart: A", "apart: B", "apart: C")
RACE = ("race: A", "race: B")
ASKED_ALONE, ASKED_BESIDE = "asked: alone", "asked: beside"


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something that is done with one instance.

    :ivar who: "A", which is compared; "B", which lives beside it; "C", which lives like A, later; "A0", "B1" and so on
        in a crowd
    :ivar what: "build", "reset", "step", "call" (its setters), "close", "meet" (wait until the others are as far), or
        "done": from here on failures do not count
    :ivar seed: of a reset
    :ivar optional: may be left out where steps take long
    :ivar options: whether a reset has options, where the environment names some
    """

    who: str
    what: str
    seed: int | None = None
    optional: bool = False
    options: bool = False

    @property
    def like(self) -> str:
        """Whose seeds and actions it has."""
        return "B" if self.who[0] == "B" else "A"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Trials that run at the same time.

    :ivar modes: keys of their scripts, one for each trial
    :ivar steps: of instance A
    :ivar limits: by kind of operation, seconds that it may take
    :ivar cure: for each of them; None: none
    :ivar generators: whether each instance is to find Python's, NumPy's and torch's generators as it left them
    :ivar shorten: whether optional steps are left out when the others have taken long, and a slow life is a short one
    :ivar preload: more harmless modules, for these processes and all later ones
    :ivar sources: by instance, which of the factories builds it; the first one where nothing is said
    :ivar crowd: names of the instances, where the script is about many
    :ivar calls: names of the setters to call
    :ivar globals: by module, values to set before anything is built
    """

    modes: tuple[str, ...]
    steps: int
    limits: Mapping[str, float]
    cure: str | None = None
    generators: bool = False
    shorten: bool = False
    preload: tuple[str, ...] = ()
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    crowd: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
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


def _end(who: str) -> list[Operation]:
    # Many a library crashes when the process is about to end, and nobody minds.
    return [Operation(who, "done"), Operation(who, "close")]


def _alone(steps: int) -> list[Operation]:
    return [Operation("A", "build"), *_life("A", steps), *_end("A")]


def _first(steps: int) -> list[Operation]:
    """A is built first. B is built, lives and is closed while A is at it."""
    a, b = _life("A", steps), _life("B", steps)
    shared = max(2 * len(a) // 3, 5)
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
    shared, ahead = len(a) // 2, min(6, len(b) - len(a) // 2)
    return [
        Operation("B", "build"),
        *b[:ahead],
        Operation("A", "build"),
        *_together(a[:shared], b[ahead : shared + ahead]),
        Operation("B", "close"),
        *a[shared:],
        Operation("A", "close"),
        Operation("C", "build"),
        *_life("C", steps),
        *_end("C"),
    ]


def _apart(steps: int) -> list[Operation]:
    """Each in its process: B is built and lives when A is there, and C, which is built after B, when B is."""
    a, c = _life("A", steps), _life("C", steps)
    b = 2 * _life("B", steps) if steps < LEAST_STEPS else _life("B", 2 * steps)
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


def _race(who: str, steps: int) -> list[Operation]:
    """As one alone, but at the same time as another process does that, and not in turns."""
    return [Operation(who, "build"), Operation(who, "meet"), *_life(who, steps), *_end(who)]


def _asked(who: str) -> list[Operation]:
    base, step = 1000 if who == "B" else 0, Operation(who, "step")
    return [
        Operation(who, "reset", base + 1, options=True),
        step,
        Operation(who, "call"),
        *[step] * 3,
        Operation(who, "reset"),
        *[step] * 2,
    ]


def _asked_beside() -> list[Operation]:
    return [
        Operation("A", "build"),
        Operation("B", "build"),
        *_together(_asked("A"), _asked("B")),
        *_end("A"),
        Operation("B", "close"),
    ]


_SCRIPTS: dict[str, Callable[[int], list[Operation]]] = {
    ALONE: _alone,
    FIRST: _first,
    SECOND: _second,
    **dict.fromkeys(APART, _apart),
    **{mode: functools.partial(_race, mode[-1]) for mode in RACE},
    ASKED_ALONE: lambda steps: [Operation("A", "build"), *_asked("A"), *_end("A")],
    ASKED_BESIDE: lambda steps: _asked_beside(),
}


def operations(mode: str, steps: int, crowd: tuple[str, ...] = ()) -> list[Operation]:
    """Give a script.

    :param mode: "alone", "crowd" and so on; those of ``APART`` take turns, each with one of the instances
    :param steps: of instance A: from ``LEAST_STEPS`` on, or ``SHORT_STEPS``
    :param crowd: names of the instances of ``CROWD``
    """
    return _crowd(steps, crowd) if mode == CROWD else _SCRIPTS[mode](steps)
