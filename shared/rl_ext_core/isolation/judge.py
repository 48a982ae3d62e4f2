"""From what was seen in trials to a verdict, in as few experiments as it takes to rule the other explanations out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from rl_ext_core.isolation.cures import CURES
from rl_ext_core.isolation.experiments import (
    ALONE,
    APART,
    ASKED_ALONE,
    ASKED_BESIDE,
    CROWD,
    FIRST,
    MOST_TOGETHER,
    OVERWRITTEN,
    OWN_DIRECTORY,
    RACE,
    SECOND,
    Operation,
    operations,
)
from rl_ext_core.isolation.trials import Trial, TrialRunner, UntriedError
from rl_ext_core.isolation.verdict import LEAST_STEPS, Declaration, Isolation, Verdict

# What was observed, the verdict, and the sentences on it; "how" is a clause on the trial that shows it.
_SENTENCES = {
    "one alone could not be tried": (Isolation.UNKNOWN, "{which} could not be tried: {how}."),
    "one alone fails": (Isolation.BROKEN, "{which} does not work: {how}."),
    "one alone fails at times": (Isolation.BROKEN, "One alone works at times, and at times not: {how}."),
    "one alone works when cured, and so do two": (
        Isolation.PROCESSES_COLLIDE,
        "One alone fails here, where another may run: {how}. With {private} it works, and so do two.",
    ),
    "one in each process fails": (Isolation.PROCESSES_COLLIDE, "Even two in processes of their own fail: {how}."),
    "one in each process differs": (
        Isolation.PROCESSES_COLLIDE,
        "Even two in processes of their own disturb each other: {how}, compared with one alone.",
    ),
    "one alone differs from itself": (
        Isolation.NON_DETERMINISTIC,
        "One alone, with the same seed and the same actions, does not return the same twice: what a second one changes "
        "cannot be told.",
    ),
    "one in each process differs at times": (
        Isolation.NON_DETERMINISTIC,
        "Two in processes of their own do not always do the same as one alone, and not always something else: what a "
        "second one changes cannot be told.",
    ),
    "all return the same": (
        Isolation.NON_DETERMINISTIC,
        "Within {steps} steps nothing that it returned depended on seeds or actions, so that nothing that is shared "
        "could have shown. More steps may tell: probe(source, steps=...).",
    ),
    "several in a process fail": (
        Isolation.SINGLE_INSTANCE,
        "One alone works, and so do two in processes of their own; but in one process {how}.",
    ),
    "several in a process differ": (
        Isolation.SHARED_STATE,
        "With a second one in the same process, {how}, compared with one alone with the same seed and actions; with a "
        "second one in another process it does not. They share state.",
    ),
    "nothing differs": (
        Isolation.INDEPENDENT,
        "{several} in one process return bit for bit what one returns alone, in {steps} steps and several resets, "
        "whichever is built first, and also after one is closed; so do two in processes of their own. Not tried: more "
        "than {count} at once, {not_tried}.",
    ),
}
_PRIVATE = {
    "TMPDIR": "a TMPDIR of its own",
    "library copy": "its own copy of the library",
}
_OWN_DIRECTORY = (
    ' When each has an empty working directory of its own, they do not: write make_vec_env(..., cwd="own").'
)
_FILES = (
    " It reads and writes files in the working directory, and all processes share that. For a directory of its own for "
    'each process, write make_vec_env(..., cwd="own").'
)
_LONGER = " To wait longer, write probe(source, timeout=...) or make_vec_env(..., probe_timeout=...)."
_GENERATORS = (
    " It is the random generators of Python, NumPy or torch that they share: one that draws from a generator of its "
    "own, such as self.np_random, would not."
)
_NO_CURE = " Neither a working directory, nor a TMPDIR, nor a copy of the library of its own helps."
_NAMED = 5
# Exceptions of what looks for files.
_MISSING = ("FileNotFoundError", "NotADirectoryError")


def _verdict(
    observed: str, *, in_process: bool = False, cure: str | None = None, more: str = "", **words: Any
) -> Verdict:
    """Look up what follows from an observation; sentences may be added to the table's."""
    isolation, sentence = _SENTENCES[observed]
    explanation = f"{sentence.format(**words)}{more} {_what_follows(isolation, in_process, cure)}"
    return Verdict(isolation, explanation, "probe", in_process=in_process, cure=cure)


def _what_follows(isolation: Isolation, in_process: bool = False, cure: str | None = None) -> str:
    """Return what it means for whoever starts several."""
    if isolation is Isolation.INDEPENDENT:
        return "They may share a process."
    if isolation is Isolation.BROKEN:
        return 'Fix the environment first. To skip the trials, write isolation="process".'
    if isolation is Isolation.UNKNOWN:
        return 'For one process per environment without a trial, write isolation="process".'
    if cure is not None:
        return f'Use one process per environment, and call apply_cure("{cure}", its_own_folder) first in each.'
    if isolation is not Isolation.PROCESSES_COLLIDE:
        return "Use one process per environment."
    return "Keep all of them in one process." if in_process else "Only one can run at a time."


def declared(said: Declaration) -> Verdict:
    """Return the verdict that an environment says itself."""
    isolation = said.isolation
    seen = f'{said.where[0].upper()}{said.where[1:]} says "{said.value}".'
    in_process = isolation is Isolation.INDEPENDENT
    return Verdict(isolation, f"{seen} {_what_follows(isolation)}", "environment", in_process=in_process)


def _measured(verdict: Verdict, alone: Trial) -> tuple[Verdict, Trial]:
    """Complete a verdict by what was measured of one alone."""
    names = ("step_seconds", "private_bytes", "libraries")
    found = {name: alone.measured[name] for name in names} | {"build_seconds": alone.facts["built"]}
    return dataclasses.replace(verdict, **{**found, "libraries": tuple(found["libraries"])}), alone


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What instances do beside each other and one alone does not: fail, or else return something else."""

    fails: bool
    text: str


def judge(runner: TrialRunner, steps: int, who: Sequence[int]) -> tuple[Verdict, Trial | None]:
    """Find out what instances may share: for each, ``who`` says which of the runner's factories builds it.

    :return: the trial of one alone, too; None: it does not work
    """
    try:
        return _judge(runner, steps, who)
    except UntriedError as error:
        return _verdict("one alone could not be tried", which="One alone", how=error), None


def _judge(runner: TrialRunner, steps: int, who: Sequence[int]) -> tuple[Verdict, Trial | None]:
    (alone,) = runner.run([ALONE], steps, shorten=True)
    if alone.facts.get("declared") is not None and len(set(who)) == 1:
        verdict = declared(alone.facts["declared"])
        return _measured(verdict, alone) if alone.done else (verdict, None)
    if not alone.done:
        return _does_not_work(runner, alone, steps)
    steps = alone.measured["steps"]
    preload = tuple(alone.measured["harmless"])
    reference = alone
    if alone.measured["imports_torch"]:
        # That seeds its generator from the clock; where it is there before, everything can be seeded.
        (reference,) = runner.run([ALONE], steps, preload=preload)
    references = {0: reference}
    for source in sorted(set(who) - {0}):
        (other,) = runner.run([ALONE], steps, preload=preload, sources={"A": source})
        if not other.done:
            return _does_not_work(runner, other, steps, f"Of the functions, number {source + 1}")
        references[source] = other
    comparison = _Comparison(runner, references, steps, tuple(who), preload)
    return _measured(comparison.verdict(), alone)


def _does_not_work(
    runner: TrialRunner, alone: Trial, steps: int, which: str = "One alone"
) -> tuple[Verdict, Trial | None]:
    how = _clause(alone)
    if alone.hung:
        return _verdict("one alone could not be tried", which=which, how=how, more=_LONGER), None
    for cure in CURES if which == "One alone" else ():
        # Something that runs already, in the calling process perhaps, may hold what it wants.
        (cured,) = runner.run([ALONE], steps, shorten=True, cure=cure)
        if cured.done:
            comparison = _Comparison(runner, {0: cured}, cured.measured["steps"], (0, 0))
            if comparison.apart(cure) is None:
                observed, private = "one alone works when cured, and so do two", _PRIVATE[cure]
                return _measured(_verdict(observed, cure=cure, private=private, how=how), cured)
    # An exception of a constructor may be due to the trial: it has other files than the user's process.
    untried = "raised" in alone.facts and (not alone.was_built or alone.facts["raised"].startswith(_MISSING))
    return _verdict("one alone could not be tried" if untried else "one alone fails", which=which, how=how), None


@dataclasses.dataclass
class _Comparison:
    """Compares what environments that work alone do beside each other."""

    runner: TrialRunner
    references: dict[int, Trial]  # by factory, what one alone does
    steps: int  # how many are compared
    who: tuple[int, ...]  # for each environment, which factory builds it
    preload: tuple[str, ...] = ()  # harmless modules that they import
    # what callers find beside what is returned, and is something else every time
    varies: set[str] = dataclasses.field(default_factory=set)

    @property
    def alone(self) -> Trial:
        return self.references[0]

    def verdict(self) -> Verdict:
        """Find out what they may share."""
        crowd = self._crowd()
        modes = [FIRST, SECOND, *APART, *RACE, *([CROWD] if crowd["crowd"] else [])]
        trials = self.runner.run(modes, self.steps, preload=self.preload, **crowd)
        for first in range(MOST_TOGETHER, len(self.who), MOST_TOGETHER):
            crowd = self._crowd(first)
            trials += self.runner.run([CROWD], self.steps, **crowd) if crowd["crowd"] else []
        apart = [trial for trial in trials if ":" in trial.mode]
        for trial in apart:
            for who in trial.instances:
                self.varies |= self._other_findings(trial, who)
        problem = self.problem(apart)
        if problem is not None:
            return self._unclear(problem)
        together = [trial for trial in trials if trial not in apart]
        problem = self.together(together, [trial for trial in apart if trial.trace("B")])
        if problem is not None:
            return self._not_together(problem)
        if self._blind(trials[0]):
            return self._unless_files_meet("all return the same", steps=self.steps)
        problem = self._asked()
        return self._independent() if problem is None else self._not_together(problem)

    def _independent(self) -> Verdict:
        count = max(2, min(len(self.who), MOST_TOGETHER))
        several, not_tried = "Two" if count == 2 else f"Up to {count}", self._not_tried()
        words: dict[str, Any] = {"steps": self.steps, "count": count, "several": several, "not_tried": not_tried}
        return self._unless_files_meet("nothing differs", in_process=True, **words)

    def _crowd(self, first: int = 0) -> dict[str, Any]:
        """Name the instances of a crowd, and say which factory builds each, and which builds B elsewhere."""
        group = self.who[first : first + MOST_TOGETHER]
        same = len(set(self.who)) == 1
        sources = {"B": next((source for source in self.who if source != 0), 0)}
        if (same and first) or (len(group) < 3 and same):
            return {"crowd": (), "sources": sources}
        # Where all are alike, every other one has the life that B has.
        names = tuple(f"{'B' if same and index % 2 else 'A'}{index}" for index in range(len(group)))
        return {"crowd": names, "sources": {**sources, **dict(zip(names, group, strict=True))}}

    def together(
        self, trials: Sequence[Trial] | None = None, beside: Sequence[Trial] = (), **options: Any
    ) -> _Problem | None:
        """Look for a problem of several in one process: in trials of that, or, with nothing else running, in new ones.

        :param beside: trials whose B is compared with that of these
        """
        options = {**self._crowd(), **options}
        if trials is None:
            modes = [FIRST, SECOND, *([CROWD] if options["crowd"] else [])]
            trials = [trial for mode in modes for trial in self.runner.run([mode], self.steps, **options)]
        else:
            # Another time, with all the machine: no verdict is to rest on one time limit.
            trials = [
                self.runner.run([trial.mode], self.steps, patience=2.0, **options)[0] if trial.hung else trial
                for trial in trials
            ]
        problem = self.problem([*trials, *beside])
        if problem is None and self._found(trials) is not None:
            (again,) = self.runner.run([ALONE], self.steps)
            self.varies |= self._other_findings(again, "A")
            return self._found(trials)
        return problem

    def apart(self, cure: str | None = None) -> _Problem | None:
        """Look for a problem of two processes, with nothing else running."""
        sources = self._crowd()["sources"]
        return self.problem(self.runner.run([*APART, *RACE], self.steps, patience=2.0, cure=cure, sources=sources))

    def problem(self, trials: Sequence[Trial]) -> _Problem | None:
        """Find what is different from one alone; failures weigh more."""
        for trial in trials:
            if not trial.done:
                return _Problem(True, _clause(trial))
            if trial.complaints and not self.alone.complaints:
                return _Problem(True, f"closing one raises {trial.complaints[0]}")
        for trial in trials:
            for who in trial.instances:
                trace, reference = trial.trace(who), self._reference(who).trace("A")
                if who[0] != "B" and trace != reference[: len(trace)]:
                    return _Problem(False, _difference(trial, who, self.steps, trace, reference))
        return self._problem_of_others(trials)

    def _reference(self, who: str) -> Trial:
        return self.references[self._crowd()["sources"].get(who, 0) if who[0] == "B" or len(who) > 1 else 0]

    def _problem_of_others(self, trials: Sequence[Trial]) -> _Problem | None:
        """Compare with each other what B did in several trials: there is none in which it was alone."""
        # So much of a life is the same however long it is.
        same = self.steps + 3 if self.steps >= LEAST_STEPS else len(self.alone.trace("A"))
        lives = [(trial, who, trial.trace(who)[:same]) for trial in trials for who in trial.instances if who[0] == "B"]
        if not lives:
            return None
        longest = max((trace for _, _, trace in lives), key=len)
        for trial, who, trace in lives:
            if trace != longest[: len(trace)]:
                return _Problem(False, _difference(trial, who, self.steps, trace, longest))
        return None

    def _other_findings(self, trial: Trial, who: str) -> set[str]:
        """Name what callers find beside what is returned, where it is something else than it was alone."""
        if who[0] == "B":
            return set()
        expected = self._reference(who).found("A")
        turns = [(expected[turn], found) for turn, found in trial.found(who).items() if turn in expected]
        return {
            path for one, other in turns for path in {**one, **other} if one.get(path) != other.get(path)
        } - self.varies

    def _found(self, trials: Sequence[Trial]) -> _Problem | None:
        for trial in trials:
            for who in trial.instances:
                if paths := self._other_findings(trial, who):
                    name = min(paths, key=lambda path: (path.startswith("info"), path))
                    return _Problem(False, f"{_name(trial.mode, who)} has something else in its {name}")
        return None

    def _blind(self, first: Trial) -> bool:
        """Return whether B, with other seeds and actions, returned the same as A."""
        others = first.trace("B")
        return others == self._reference("B").trace("A")[: len(others)]

    def _not_together(self, together: _Problem) -> Verdict:
        if together.fails:
            return _verdict("several in a process fail", how=together.text)
        own = self.together(generators=True) is None and self._asked(generators=True) is None
        more = _GENERATORS if own else ""
        return self._unless_files_meet("several in a process differ", how=together.text, more=more)

    def _unclear(self, apart: _Problem) -> Verdict:
        """Tell processes that disturb each other from an environment that never does the same twice."""
        (again,) = self.runner.run([ALONE], self.steps, patience=2.0)
        if again.hung:
            return _verdict("one alone could not be tried", which="One alone", how=_clause(again), more=_LONGER)
        if not again.done:
            return _verdict("one alone fails at times", how=_clause(again))
        repeats = again.trace("A") == self.alone.trace("A")
        confirmed = self.apart()
        if confirmed is not None and (repeats or confirmed.fails):
            return self._collide(confirmed)
        together = self.together()
        if together is not None and together.fails:
            return self._not_together(together)
        return self._unless_files_meet(
            "one in each process differs at times" if repeats else "one alone differs from itself"
        )

    def _collide(self, apart: _Problem) -> Verdict:
        cure = None
        if self.apart(OWN_DIRECTORY) is None:
            more = _OWN_DIRECTORY
        else:
            cure = next((cure for cure in CURES if self.apart(cure) is None), None)
            more = _NO_CURE if cure is None else f" When each has {_PRIVATE[cure]}, they do not."
        in_process = self.together() is None
        if in_process:
            more += " In one process they are independent."
        observed = "one in each process fails" if apart.fails else "one in each process differs"
        return _verdict(observed, how=apart.text, more=more, in_process=in_process, cure=cure)

    def _unless_files_meet(self, observed: str, more: str = "", **words: Any) -> Verdict:
        if self.runner.wrote:
            more += _FILES  # whether two processes meet there is chance
        return _verdict(observed, more=more, **words)

    def _asked(self, **options: Any) -> _Problem | None:
        """Look for a problem when setters are called, and when the options that the environment names are varied."""
        if not self._setters and not self.alone.measured["options"]:
            return None
        options = {"calls": tuple(self._setters), **options}
        first, again = (self.runner.run([ASKED_ALONE], self.steps, **options)[0] for _ in range(2))
        if not first.done or first.trace("A") != again.trace("A"):
            self._setters.clear()
            return None
        comparison = dataclasses.replace(self, references={0: first}, who=(0, 0))
        return comparison.problem(self.runner.run([ASKED_BESIDE], self.steps, **options))

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


_PAIR = {"A": "the first", "B": "the second", "C": "the third"}
_NAMES = {
    ALONE: {"A": "it"},
    ASKED_ALONE: {"A": "it"},
    SECOND: {"B": "the first", "A": "the second", "C": "a third, when both are closed,"},
}
_DOING = {"build": "building", "reset": "resetting", "close": "closing", "call": "calling setters of"}


def _name(mode: str, who: str) -> str:
    return f"number {int(who[1:]) + 1}" if who[1:] else _NAMES.get(mode, _PAIR)[who]


def _clause(trial: Trial) -> str:
    """Say in which operation a trial ended, and how."""
    performed = trial.performed
    if not performed:
        return f"preparing it {trial.end}"
    last = performed[-1]
    who = _name(trial.mode, last.who)
    doing = f"{_DOING[last.what]} {who}" if last.what in _DOING else f"step {performed.count(last)} of {who}"
    closed = [one for one in performed[:-1] if one.what == "close" and last.who == "A"]
    after = f", after {_name(trial.mode, closed[0].who)} was closed," if closed else ""
    words = f" (it printed: {trial.last_words!r})" if trial.last_words and "raises" not in trial.end else ""
    return f"{doing}{after} {trial.end}{words}"


def _difference(trial: Trial, who: str, steps: int, trace: Sequence[str], reference: Sequence[str]) -> str:
    """Say from where on an instance returned something else."""
    pairs = enumerate(zip(trace, reference, strict=False))
    index = next((index for index, (one, other) in pairs if one != other), min(len(trace), len(reference)) - 1)
    crowd = tuple(trial.instances) if trial.mode == CROWD else ()
    script = [*operations(trial.mode, steps, crowd), *[Operation(who, "step")] * len(trace)]
    events = [one for one in script if one.who == who and one.what in ("reset", "step")]
    what = events[index].what
    number = sum(one.what == what for one in events[: index + 1])
    name = _name(trial.mode, who)
    if trace[index].startswith(OVERWRITTEN):
        return f"what {name} has returned is overwritten before its {what} {number}"
    return f"{name} returns something else from its {what} {number} on"
