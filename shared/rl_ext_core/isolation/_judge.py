"""From what was seen to a verdict, in as few rounds as it takes to rule the other explanations out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from rl_ext_core.isolation import _declared
from rl_ext_core.isolation._child import OVERWRITTEN
from rl_ext_core.isolation._runs import Laboratory, Run
from rl_ext_core.isolation._script import (
    ALONE,
    APART,
    ASKED_ALONE,
    ASKED_BESIDE,
    CROWD,
    FIRST,
    LEAST_STEPS,
    MOST_TOGETHER,
    RACE,
    SECOND,
    Operation,
    operations,
)
from rl_ext_core.isolation.cures import CURES
from rl_ext_core.isolation.verdict import Isolation

__all__ = ["Finding", "judge", "what_follows"]

_PRIVATE = {
    "working directory": "a working directory of its own",
    "TMPDIR": "a TMPDIR of its own",
    "library copy": "its own copy of the library",
}
_FILES = "It reads and writes files in the working directory, as another process might at the same time."
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Finding:
    """What experiments have shown.

    :ivar seen: what was seen, in sentences
    :ivar alone: the run of one alone; None: there was none that worked
    """

    isolation: Isolation
    seen: str
    alone: Run | None
    in_process: bool = False
    cure: str | None = None
    declared_by: str = "probe"


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Something that instances do not do beside each other, and one alone does.

    :ivar fails: whether one failed; else one returned something else
    :ivar text: a clause
    """

    fails: bool
    text: str


def judge(laboratory: Laboratory, steps: int, who: Sequence[int]) -> Finding:
    """Find out what instances may share.

    :param laboratory: has them run
    :param steps: how many to compare
    :param who: for each environment that is to share a process, which of the laboratory's factories builds it
    """
    (alone,) = laboratory.run([ALONE], steps, thrifty=True)
    if not alone.done:
        return _does_not_work(laboratory, alone, steps)
    said = alone.built[1] if alone.built is not None else None
    if said is not None and len(set(who)) == 1:
        isolation = _declared.isolation_of(said)
        return Finding(isolation, declaration(said), alone, isolation is Isolation.INDEPENDENT, None, "environment")
    steps = alone.measured["steps"]
    preload = tuple(alone.measured["harmless"])
    reference = alone
    if alone.measured["imports_torch"]:
        # That seeds its generator from the clock; where it is there before, everything can be seeded.
        (reference,) = laboratory.run([ALONE], steps, preload=preload)
    references = {0: reference}
    for source in sorted(set(who) - {0}):
        (other,) = laboratory.run([ALONE], steps, preload=preload, sources={"A": source})
        if not other.done:
            return _does_not_work(laboratory, other, steps, f"Of the functions, number {source + 1} ")
        references[source] = other
    case = _Case(laboratory, references, steps, tuple(who), preload)
    return dataclasses.replace(case.finding(), alone=alone)


def declaration(said: tuple[str, str]) -> str:
    """Say what an environment has said."""
    value, where = said
    return f'{where[0].upper()}{where[1:]} says "{value}".'


def what_follows(isolation: Isolation, cure: str | None, in_process: bool) -> str:
    """Say what a verdict means for whoever starts several."""
    if isolation is Isolation.INDEPENDENT:
        own = f'; where there are several, call apply_cure("{cure}", its_own_folder) first in each'
        return f"They may share a process{own if cure else ''}."
    if isolation is Isolation.BROKEN:
        return 'Mend that first; isolation="process" starts them without a try.'
    if isolation is Isolation.UNKNOWN:
        return (
            "Use one process per environment; or wait longer, with probe(source, timeout=...) or make_vec_env(..., "
            'probe_timeout=...); isolation="process" does without a try.'
        )
    if cure is not None:
        return f'Use one process per environment, and call apply_cure("{cure}", its_own_folder) first in each.'
    if isolation is not Isolation.PROCESSES_COLLIDE:
        return "Use one process per environment."
    return "Keep all of them in one process." if in_process else "Only one can run at a time."


def _does_not_work(laboratory: Laboratory, alone: Run, steps: int, which: str = "One alone ") -> Finding:
    if alone.hung:
        seen = f"{which}could not be tried: {_clause(alone)}."
        return Finding(Isolation.UNKNOWN, seen, None)
    broken = f"{which}does not work: {_clause(alone)}."
    for cure in CURES if which == "One alone " else ():
        # Something that runs already, in the calling process perhaps, may hold what it wants.
        (cured,) = laboratory.run([ALONE], steps, thrifty=True, cure=cure)
        if cured.done:
            case = _Case(laboratory, {0: cured}, cured.measured["steps"], (0, 0))
            if case.apart(cure=cure) is None:
                seen = f"One alone fails here, where another may run: {_clause(alone)}. With {_PRIVATE[cure]} it works"
                return Finding(Isolation.PROCESSES_COLLIDE, f"{seen}, and so do two.", cured, False, cure)
    return Finding(Isolation.BROKEN, broken, None)


@dataclasses.dataclass
class _Case:
    """Environments that work alone.

    :ivar references: by factory, what one alone does
    :ivar steps: how many are compared
    :ivar who: for each environment, which factory builds it
    :ivar preload: harmless modules that they import
    :ivar varies: what callers find beside what is returned, and is something else every time
    """

    laboratory: Laboratory
    references: dict[int, Run]
    steps: int
    who: tuple[int, ...]
    preload: tuple[str, ...] = ()
    varies: set[str] = dataclasses.field(default_factory=set)

    @property
    def alone(self) -> Run:
        return self.references[0]

    def finding(self) -> Finding:
        names, sources = self._crowd(0)
        modes = [FIRST, SECOND, *APART, *RACE, *([CROWD] if names else [])]
        options: dict[str, Any] = {"preload": self.preload, "sources": sources, "crowd": names}
        runs = self.laboratory.run(modes, self.steps, **options)
        for first in range(MOST_TOGETHER, len(self.who), MOST_TOGETHER):
            names, sources = self._crowd(first)
            runs += self.laboratory.run([CROWD], self.steps, crowd=names, sources=sources) if names else []
        apart = [run for run in runs if ":" in run.mode]
        for run in apart:
            for who in run.instances:
                self.varies |= self._other_findings(run, who)
        problem = self.problem(apart)
        if problem is not None:
            return self._unclear(problem)
        together = self.together([run for run in runs if run not in apart], [run for run in apart if run.trace("B")])
        if together is not None:
            return self._not_together(together)
        if self._blind(runs[0]):
            return self._cannot_tell(
                f"Within {self.steps} steps nothing that it returned depended on seeds or actions, so that nothing "
                "that is shared could have shown. More steps may tell: probe(source, steps=...).",
            )
        if (problem := self._asked()) is not None:
            return self._not_together(problem)
        count = max(2, min(len(self.who), MOST_TOGETHER))
        seen = (
            f"{'Two' if count == 2 else f'Up to {count}'} in one process return bit for bit what one returns alone, in "
            f"{self.steps} steps and several resets, whichever is built first, and also after one is closed; so do two "
            f"in processes of their own. Not tried: more than {count} at once, {self._not_tried()}."
        )
        cure = None
        if self.laboratory.wrote:
            # Whether two processes meet there is chance.
            seen, cure = f"{seen} {_FILES}", "working directory"
        return Finding(Isolation.INDEPENDENT, seen, self.alone, True, cure)

    def _crowd(self, first: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """Name the instances of a crowd, and say which factory builds each, and which builds B elsewhere."""
        group = self.who[first : first + MOST_TOGETHER]
        same = len(set(self.who)) == 1
        sources = {"B": next((source for source in self.who if source != 0), 0)}
        if (same and first) or (len(group) < 3 and same):
            return (), sources
        # Where all are alike, every other one has the life that B has.
        names = tuple(f"{'B' if same and index % 2 else 'A'}{index}" for index in range(len(group)))
        return names, {**sources, **dict(zip(names, group, strict=True))}

    def together(
        self, runs: Sequence[Run] | None = None, beside: Sequence[Run] = (), **options: Any
    ) -> _Problem | None:
        """Look for a problem of several in one process.

        :param runs: what was tried; None: try it anew, with nothing else running
        :param beside: runs whose B is compared with that of these
        """
        names, sources = self._crowd(0)
        options = {"sources": sources, "crowd": names, **options}
        if runs is None:
            modes = [FIRST, SECOND, *([CROWD] if names else [])]
            runs = [run for mode in modes for run in self.laboratory.run([mode], self.steps, **options)]
        else:
            # Another time, with all the machine: no verdict is to rest on one time limit.
            runs = [
                self.laboratory.run([run.mode], self.steps, patience=2.0, **options)[0] if run.hung else run
                for run in runs
            ]
        problem = self.problem([*runs, *beside])
        if problem is None and (found := self._found(runs)) is not None:
            (again,) = self.laboratory.run([ALONE], self.steps)
            self.varies |= self._other_findings(again, "A")
            found = self._found(runs)
            return found
        return problem

    def apart(self, cure: str | None = None) -> _Problem | None:
        """Look for a problem of two processes, with nothing else running."""
        sources = self._crowd(0)[1]
        runs = self.laboratory.run([*APART, *RACE], self.steps, patience=2.0, cure=cure, sources=sources)
        return self.problem(runs)

    def problem(self, runs: Sequence[Run]) -> _Problem | None:
        """Find what is different from one alone; failures weigh more."""
        for run in sorted(runs, key=lambda run: run.waited):
            if not run.done:
                return _Problem(True, _clause(run))
            if run.complaints and not self.alone.complaints:
                return _Problem(True, f"closing one raises {run.complaints[0]}")
        for run in runs:
            for who in run.instances:
                trace, reference = run.trace(who), self._reference(who).trace("A")
                if who[0] != "B" and trace != reference[: len(trace)]:
                    return _Problem(False, _difference(run, who, self.steps, trace, reference))
        return self._problem_of_others(runs)

    def _reference(self, who: str) -> Run:
        return self.references[self._crowd(0)[1].get(who, 0) if who[0] == "B" or len(who) > 1 else 0]

    def _problem_of_others(self, runs: Sequence[Run]) -> _Problem | None:
        """Compare with each other what B did in several runs: there is none in which it was alone."""
        # So much of a life is the same however long it is.
        same = self.steps + 3 if self.steps >= LEAST_STEPS else len(self.alone.trace("A"))
        lives = [(run, who, run.trace(who)[:same]) for run in runs for who in run.instances if who[0] == "B"]
        if not lives:
            return None
        longest = max((trace for _, _, trace in lives), key=len)
        for run, who, trace in lives:
            if trace != longest[: len(trace)]:
                return _Problem(False, _difference(run, who, self.steps, trace, longest))
        return None

    def _other_findings(self, run: Run, who: str) -> set[str]:
        """Name what callers find beside what is returned, where it is something else than it was alone."""
        if who[0] == "B":
            return set()
        expected = self._reference(who).found("A")
        turns = [(expected[turn], found) for turn, found in run.found(who).items() if turn in expected]
        return {
            path for one, other in turns for path in {**one, **other} if one.get(path) != other.get(path)
        } - self.varies

    def _found(self, runs: Sequence[Run]) -> _Problem | None:
        for run in runs:
            for who in run.instances:
                if paths := self._other_findings(run, who):
                    name = min(paths, key=lambda path: (path.startswith("info"), path))
                    return _Problem(False, f"{_name(run.mode, who)} has something else in its {name}")
        return None

    def _blind(self, first: Run) -> bool:
        """Tell whether B, with other seeds and actions, returned the same as A."""
        others = first.trace("B")
        return others == self._reference("B").trace("A")[: len(others)]

    def _not_together(self, together: _Problem) -> Finding:
        if together.fails:
            seen = f"One alone works, and so do two in processes of their own; but in one process {together.text}."
            return self._finding(Isolation.SINGLE_INSTANCE, seen)
        seen = (
            f"With a second one in the same process, {together.text}, compared with one alone with the same seed and "
            "actions; with a second one in another process it does not. They share state."
        )
        if self.together(generators=True) is None and self._asked(generators=True) is None:
            seen += (
                " It is the random generators of Python, NumPy or torch that they share: one that draws from a "
                "generator of its own, such as self.np_random, would not."
            )
        return self._finding(Isolation.SHARED_STATE, seen)

    def _unclear(self, apart: _Problem) -> Finding:
        """Tell processes that disturb each other from an environment that never does the same twice."""
        (again,) = self.laboratory.run([ALONE], self.steps, patience=2.0)
        if again.hung:
            return _does_not_work(self.laboratory, again, self.steps)
        if not again.done:
            return Finding(Isolation.BROKEN, f"One alone works at times, and at times not: {_clause(again)}.", None)
        repeats = again.trace("A") == self.alone.trace("A")
        confirmed = self.apart()
        if confirmed is not None and (repeats or confirmed.fails):
            return self._collide(confirmed)
        together = self.together()
        if together is not None and together.fails:
            return self._not_together(together)
        if repeats:
            seen = "Two in processes of their own do not always do the same as one alone, and not always something else"
        else:
            seen = "One alone, with the same seed and the same actions, does not return the same twice"
        return self._cannot_tell(f"{seen}: what a second one changes cannot be told.")

    def _cannot_tell(self, seen: str) -> Finding:
        if not self.laboratory.wrote:
            return self._finding(Isolation.NON_DETERMINISTIC, seen)
        return self._finding(Isolation.NON_DETERMINISTIC, f"{seen} {_FILES}", cure="working directory")

    def _asked(self, **options: Any) -> _Problem | None:
        """Look for a problem when setters are called, and when the options that the environment names are varied."""
        if not self._setters and not self.alone.measured["options"]:
            return None
        options = {"calls": tuple(self._setters), **options}
        first, again = (self.laboratory.run([ASKED_ALONE], self.steps, **options)[0] for _ in range(2))
        if not first.done or first.trace("A") != again.trace("A"):
            self._setters.clear()
            return None
        case = dataclasses.replace(self, references={0: first}, who=(0, 0))
        return case.problem(self.laboratory.run([ASKED_BESIDE], self.steps, **options))

    @functools.cached_property
    def _setters(self) -> list[str]:
        return [name for name, setter in self.alone.measured["methods"] if setter]

    def _not_tried(self) -> str:
        methods = [name for name, _ in self.alone.measured["methods"] if name not in self._setters]
        named = ", ".join(f"{name}()" for name in methods[:_NAMED]) + (" and more" if len(methods) > _NAMED else "")
        left = [
            "" if self.alone.measured["options"] else "options of reset()",
            "set_attr()",
            f"its {named}" if methods else "",
            "" if self.alone.measured["infos"] else "infos",
        ]
        # What monitors write there is a time.
        varies = sorted(path for path in self.varies if not path.endswith("['episode']['t']"))
        if varies:
            left.append(f"{', '.join(varies[:_NAMED])} (never twice the same)")
        return ", ".join(filter(None, left))

    def _collide(self, apart: _Problem) -> Finding:
        verb, compared = ("fail", "") if apart.fails else ("disturb each other", ", compared with one alone")
        seen = f"Even two in processes of their own {verb}: {apart.text}{compared}."
        cure = next((cure for cure in CURES if self.apart(cure) is None), None)
        if cure is not None:
            seen += f" When each has {_PRIVATE[cure]}, they do not."
        else:
            seen += " Neither a working directory, nor a TMPDIR, nor a copy of the library of its own helps."
        together = self.together()
        if together is None:
            seen += " In one process they are independent."
        return self._finding(Isolation.PROCESSES_COLLIDE, seen, in_process=together is None, cure=cure)

    def _finding(
        self, isolation: Isolation, seen: str, *, in_process: bool = False, cure: str | None = None
    ) -> Finding:
        return Finding(isolation, seen, self.alone, in_process, cure)


_PAIR = {"A": "the first", "B": "the second", "C": "the third"}
_NAMES = {
    ALONE: {"A": "it"},
    ASKED_ALONE: {"A": "it"},
    SECOND: {"B": "the first", "A": "the second", "C": "a third, when both are closed,"},
}
_DOING = {"build": "building", "reset": "resetting", "close": "closing", "call": "calling setters of"}


def _name(mode: str, who: str) -> str:
    return f"number {int(who[1:]) + 1}" if who[1:] else _NAMES.get(mode, _PAIR)[who]


def _clause(run: Run) -> str:
    """Say in which operation a run ended, and how."""
    performed = run.performed
    if not performed:
        return f"preparing it {run.end}"
    last = performed[-1]
    who = _name(run.mode, last.who)
    doing = f"{_DOING[last.what]} {who}" if last.what in _DOING else f"step {performed.count(last)} of {who}"
    closed = [one for one in performed[:-1] if one.what == "close" and last.who == "A"]
    after = f", after {_name(run.mode, closed[0].who)} was closed," if closed else ""
    words = f" (it printed: {run.last_words!r})" if run.last_words and "raises" not in run.end else ""
    return f"{doing}{after} {run.end}{words}"


def _difference(run: Run, who: str, steps: int, trace: Sequence[str], reference: Sequence[str]) -> str:
    """Say from where on an instance returned something else."""
    pairs = enumerate(zip(trace, reference, strict=False))
    index = next((index for index, (one, other) in pairs if one != other), min(len(trace), len(reference)) - 1)
    crowd = tuple(run.instances) if run.mode == CROWD else ()
    script = [*operations(run.mode, steps, crowd), *[Operation(who, "step")] * len(trace)]
    events = [one for one in script if one.who == who and one.what in ("reset", "step")]
    what = events[index].what
    number = sum(one.what == what for one in events[: index + 1])
    name = _name(run.mode, who)
    if trace[index].startswith(OVERWRITTEN):
        return f"what {name} has returned is overwritten before its {what} {number}"
    return f"{name} returns something else from its {what} {number} on"
