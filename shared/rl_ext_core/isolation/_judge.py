"""From what was seen to a verdict, in as few rounds as it takes to rule the other explanations out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl_ext_core.isolation import _declared
from rl_ext_core.isolation._child import OVERWRITTEN
from rl_ext_core.isolation._runs import Laboratory, Run
from rl_ext_core.isolation._script import ALONE, APART, FIRST, SECOND
from rl_ext_core.isolation.cures import CURES
from rl_ext_core.isolation.verdict import Isolation

__all__ = ["Finding", "judge", "what_follows"]

_PRIVATE = {
    "working directory": "a working directory of its own",
    "TMPDIR": "a TMPDIR of its own",
    "library copy": "its own copy of the library",
}


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


def judge(laboratory: Laboratory, steps: int) -> Finding:
    """Find out what instances may share.

    :param laboratory: has them run
    :param steps: how many to compare
    """
    (alone,) = laboratory.run([ALONE], steps, thrifty=True)
    real = False
    if not alone.done and not alone.hung:
        # It may read what lies beside the working directory.
        (elsewhere,) = laboratory.run([ALONE], steps, thrifty=True, real=True)
        if elsewhere.done:
            alone, real = elsewhere, True
    if not alone.done:
        return _does_not_work(laboratory, alone, steps)
    said = alone.built[1] if alone.built is not None else None
    if said is not None:
        isolation = _declared.isolation_of(said)
        return Finding(isolation, declaration(said), alone, isolation is Isolation.INDEPENDENT, None, "environment")
    steps -= alone.measured["skipped"]
    preload = tuple(alone.measured["harmless"])
    reference = alone
    if alone.measured["imports_torch"]:
        # That seeds its generator from the clock; where it is there before, everything can be seeded.
        (reference,) = laboratory.run([ALONE], steps, real=real, preload=preload)
    return dataclasses.replace(_Case(laboratory, reference, steps, real, preload).finding(), alone=alone)


def declaration(said: tuple[str, str]) -> str:
    """Say what an environment has said."""
    value, where = said
    return f'{where[0].upper()}{where[1:]} says "{value}".'


def what_follows(isolation: Isolation, cure: str | None, in_process: bool) -> str:
    """Say what a verdict means for whoever starts several."""
    if isolation is Isolation.INDEPENDENT:
        return "Any number may share a process."
    if isolation is Isolation.BROKEN:
        return "Mend that first."
    if isolation is not Isolation.PROCESSES_COLLIDE:
        return "Use one process per environment."
    if cure is not None:
        return f'Use one process per environment, and call apply_cure("{cure}", its_own_folder) first in each.'
    return "Keep all of them in one process." if in_process else "Only one can run at a time."


def _does_not_work(laboratory: Laboratory, alone: Run, steps: int) -> Finding:
    broken = f"One alone does not work: {_clause(alone)}."
    for cure in () if alone.hung else CURES:
        # Something that runs already, in the calling process perhaps, may hold what it wants.
        (cured,) = laboratory.run([ALONE], steps, thrifty=True, cure=cure)
        if cured.done:
            case = _Case(laboratory, cured, steps - cured.measured["skipped"])
            if case.apart(cure=cure) is None:
                seen = f"One alone fails here, where another may run: {_clause(alone)}. With {_PRIVATE[cure]} it works"
                return Finding(Isolation.PROCESSES_COLLIDE, f"{seen}, and so do two.", cured, False, cure)
    return Finding(Isolation.BROKEN, broken, None)


@dataclasses.dataclass
class _Case:
    """One environment that works alone.

    :ivar alone: what one alone does
    :ivar steps: how many are compared
    :ivar real: whether it needs the caller's own working directory
    :ivar preload: harmless modules that it imports
    """

    laboratory: Laboratory
    alone: Run
    steps: int
    real: bool = False
    preload: tuple[str, ...] = ()

    def finding(self) -> Finding:
        modes = [FIRST, SECOND, *APART]
        first, second, *others = self.laboratory.run(modes, self.steps, real=self.real, preload=self.preload)
        together, apart = self.problem([first, second, others[1]]), self.problem(others)
        if apart is not None:
            return self._unclear(apart)
        if together is not None:
            return self._not_together(together)
        if self._blind(first):
            return self._finding(
                Isolation.NON_DETERMINISTIC,
                f"Within {self.steps} steps nothing that it returned depended on seeds or actions, so that nothing "
                "that is shared could have shown. More steps may tell: probe(source, steps=...).",
            )
        seen = (
            f"Two in one process return bit for bit what one returns alone, in {self.steps} steps and several resets, "
            "whichever is built first, and also after one is closed; so do two in processes of their own."
        )
        return self._finding(Isolation.INDEPENDENT, seen, in_process=True)

    def together(self, *, generators: bool = False) -> _Problem | None:
        """Look for a problem of two in one process, with nothing else running."""
        asked = [
            self.laboratory.run([mode], self.steps, real=self.real, generators=generators) for mode in (FIRST, SECOND)
        ]
        return self.problem([run for runs in asked for run in runs])

    def apart(self, cure: str | None = None) -> _Problem | None:
        """Look for a problem of two processes, with nothing else running."""
        return self.problem(self.laboratory.run(APART, self.steps, cure=cure, real=self.real))

    def problem(self, runs: Sequence[Run]) -> _Problem | None:
        """Find what is different from one alone; failures weigh more."""
        for run in sorted(runs, key=lambda run: run.waited):
            if not run.done:
                return _Problem(True, _clause(run))
            if run.complaints and not self.alone.complaints:
                return _Problem(True, f"closing one raises {run.complaints[0]}")
        for run in runs:
            for who in "AC":
                trace = run.trace(who)
                if trace and trace != self.alone.trace("A"):
                    return _Problem(False, _difference(run, who, trace, self.alone.trace("A")))
        return self._problem_of_others([run for run in runs if run.trace("B")])

    def _problem_of_others(self, runs: Sequence[Run]) -> _Problem | None:
        """Compare with each other what B did in several runs: there is none in which it was alone."""
        if not runs:
            return None
        longest = max((run.trace("B") for run in runs), key=len)
        for run in runs:
            trace = run.trace("B")
            if trace != longest[: len(trace)]:
                return _Problem(False, _difference(run, "B", trace, longest))
        return None

    def _blind(self, first: Run) -> bool:
        """Tell whether B, with other seeds and actions, returned the same as A."""
        others = first.trace("B")
        return others == self.alone.trace("A")[: len(others)]

    def _not_together(self, together: _Problem) -> Finding:
        if together.fails:
            seen = f"One alone works, and so do two in processes of their own; but in one process {together.text}."
            return self._finding(Isolation.SINGLE_INSTANCE, seen)
        seen = (
            f"With a second one in the same process, {together.text}, compared with one alone with the same seed and "
            "actions; with a second one in another process it does not. They share state."
        )
        if self.together(generators=True) is None:
            seen += (
                " It is the random generators of Python, NumPy or torch that they share: one that draws from a "
                "generator of its own, such as self.np_random, would not."
            )
        return self._finding(Isolation.SHARED_STATE, seen)

    def _unclear(self, apart: _Problem) -> Finding:
        """Tell processes that disturb each other from an environment that never does the same twice."""
        (again,) = self.laboratory.run([ALONE], self.steps, real=self.real)
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
        return self._finding(Isolation.NON_DETERMINISTIC, f"{seen}: what a second one changes cannot be told.")

    def _collide(self, apart: _Problem) -> Finding:
        verb, compared = ("fail", "") if apart.fails else ("disturb each other", ", compared with one alone")
        seen = f"Even two in processes of their own {verb}: {apart.text}{compared}."
        cure = next((cure for cure in self._cures() if self.apart(cure) is None), None)
        if cure is not None:
            seen += f" When each has {_PRIVATE[cure]}, they do not."
        else:
            seen += " Neither a working directory, nor a TMPDIR, nor a copy of the library of its own helps."
        together = self.together()
        if together is None:
            seen += " In one process they are independent."
        return self._finding(Isolation.PROCESSES_COLLIDE, seen, in_process=together is None, cure=cure)

    def _cures(self) -> list[str]:
        return [cure for cure in CURES if not (self.real and cure == "working directory")]

    def _finding(
        self, isolation: Isolation, seen: str, *, in_process: bool = False, cure: str | None = None
    ) -> Finding:
        return Finding(isolation, seen, self.alone, in_process, cure)


_NAMES = {
    ALONE: {"A": "it"},
    FIRST: {"A": "the first", "B": "the second"},
    SECOND: {"B": "the first", "A": "the second", "C": "a third, when both are closed,"},
    **{mode: {"A": "the first", "B": "the second", "C": "the third"} for mode in APART},
}
_DOING = {"build": "building", "reset": "resetting", "close": "closing"}


def _clause(run: Run) -> str:
    """Say in which operation a run ended, and how."""
    performed = run.performed
    if not performed:
        return f"preparing it {run.end}"
    last = performed[-1]
    who = _NAMES[run.mode][last.who]
    doing = f"{_DOING[last.what]} {who}" if last.what in _DOING else f"step {performed.count(last)} of {who}"
    closed = [one for one in performed[:-1] if one.what == "close" and last.who == "A"]
    after = f", after {_NAMES[run.mode][closed[0].who]} was closed," if closed else ""
    words = f" (it printed: {run.last_words!r})" if run.last_words and "raises" not in run.end else ""
    return f"{doing}{after} {run.end}{words}"


def _difference(run: Run, who: str, trace: Sequence[str], reference: Sequence[str]) -> str:
    """Say from where on an instance returned something else."""
    pairs = enumerate(zip(trace, reference, strict=False))
    index = next((index for index, (one, other) in pairs if one != other), min(len(trace), len(reference)) - 1)
    events = [one for one in run.operations if one.who == who and one.what in ("reset", "step")]
    what = events[index].what
    number = sum(one.what == what for one in events[: index + 1])
    if trace[index].startswith(OVERWRITTEN):
        return f"what {_NAMES[run.mode][who]} has returned is overwritten before its {what} {number}"
    return f"{_NAMES[run.mode][who]} returns something else from its {what} {number} on"
