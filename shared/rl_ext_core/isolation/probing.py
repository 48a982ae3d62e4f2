"""``probe``: whether instances of an environment may share a process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.isolation import dependencies
from rl_ext_core.isolation.cache import Cache
from rl_ext_core.isolation.verdict import LEAST_STEPS, Isolation, Verdict, declared_by_source

__all__ = ["check_timeout", "probe", "probe_all"]

# How many are alive at once where nobody says how many there will be.
_TOGETHER = 4
_NAMED = 3


def probe(
    source: Any,
    *,
    cache: bool | str | os.PathLike[str] = True,
    steps: int = 100,
    timeout: float | None = None,
) -> Verdict:
    """Find out whether instances of an environment may share a process, without building any in this one.

    What the environment says itself comes first: ``metadata = {"isolation": "process"}`` in its class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description that it holds. Otherwise some are built in
    processes that are thrown away: one alone; two in one process, interleaved, one reset and closed while the other
    goes on; several at once; two in processes of their own, in turns and at the same time. What they return is compared
    bit for bit, and so are infos, ``action_masks()`` and public arrays; methods with names like ``set_task`` are called
    with numbers, and resets get the options that ``metadata["reset_options"]`` lists. What is shared but did not show
    stays unknown; the explanation says what was not tried.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: an environment, a function or class that builds one, gymnasium's id or specification, or what
        :func:`~rl_ext_core.factory.as_factory` made of one of these; of these a list for what is to share a process,
        of which up to eight at once are tried. By default that is four of them
    :param cache: True keeps verdicts in the user's cache folder, a path in another one; a kept verdict holds as long
        as the recipe, the environment variables, the libraries, the code that was loaded and the files that were
        opened are the same. A file that C opens outside of the folders of the code, of its libraries and of the working
        directory is not noticed. False neither reads nor writes
    :param steps: how many steps are compared; fewer where they take long
    :param timeout: seconds that building an environment, a reset or a step may take. By default one alone has 300, and
        others 20 times what that took, at least 10
    :return: the verdict. It is BROKEN where one alone fails: that raises nothing
    :raises InvalidArgumentError: the environment's metadata say something else, ``steps`` is too small, ``timeout`` no
        time
    :raises NotCopyableError: an instance cannot be copied, or a function that holds what cannot be
    :raises WorkerError: Python does not start
    """
    if steps < LEAST_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is not a number from {LEAST_STEPS} on. Write steps=100")
    check_timeout("timeout", timeout)
    sources = list(source) if isinstance(source, (list, tuple)) else [source] * _TOGETHER
    if not sources:
        raise InvalidArgumentError(
            "source is an empty list; expected what builds environments. Write probe([make] * 4)"
        )
    made: dict[int, EnvFactory[Any]] = {}
    for one in sources:
        if id(one) not in made:
            # Its verification would build a copy more, and says nothing of what instances share.
            made[id(one)] = as_factory(one, verify=False)
    return probe_all([made[id(one)] for one in sources], cache=cache, steps=steps, timeout=timeout)


def check_timeout(name: str, timeout: Any) -> None:
    """Check that it is a time.

    :raises InvalidArgumentError: it is none
    """
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise InvalidArgumentError(
            f"{name}={timeout!r} is no time; expected seconds above 0, or None for the default. Write {name}=60"
        )


def probe_all(
    factories: Sequence[EnvFactory[Any]],
    *,
    cache: bool | str | os.PathLike[str] = True,
    steps: int = 100,
    timeout: float | None = None,
    timed: bool = False,
) -> Verdict:
    """Do what :func:`probe` does, for the factories of environments that are to share a process.

    :param timed: whether a kept verdict that does not say how long a step takes is to be completed
    """
    began = time.monotonic()
    distinct = list({id(factory): factory for factory in factories}.values())
    who = [next(i for i, one in enumerate(distinct) if one is factory) for factory in factories]
    verdict = _declaration(distinct)
    if verdict is None:
        kept = Cache.of(distinct, who, cache, steps)
        verdict = kept.read() if kept is not None else None
        if verdict is None:
            verdict = _found_out(distinct, who, steps, timeout, kept)
        elif timed and verdict.step_seconds is None:
            verdict = _timed(distinct, timeout, verdict, kept)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - began, 3))


def _declaration(factories: Sequence[EnvFactory[Any]]) -> Verdict | None:
    """Give what they say by themselves; the strictest of it, if all of them say something."""
    said = [declared_by_source(factory) for factory in factories]
    if not any(said):
        return None
    from rl_ext_core.isolation import judge  # which a kept verdict does without, and without all that makes trials

    verdicts = [judge.declared(one).verdict() for one in said if one is not None]
    strict = [verdict for verdict in verdicts if not verdict.in_process]
    return strict[0] if strict else verdicts[0] if None not in said else None


def _found_out(
    factories: Sequence[EnvFactory[Any]], who: Sequence[int], steps: int, timeout: float | None, kept: Cache | None
) -> Verdict:
    """Probe, and keep what was found."""
    from rl_ext_core.isolation import judge
    from rl_ext_core.isolation.trials import TrialRunner

    with TrialRunner(factories, timeout) as runner:
        finding = judge.judge(runner, steps, who)
        fresh = {} if finding.alone is None else finding.alone.facts["globals"]
        runner.globals = changed = dependencies.changed_globals(fresh)
        if changed and finding.isolation is Isolation.INDEPENDENT:
            # As it is in the processes of workers; and in this one?
            finding = judge.judge(runner, steps, who)
    if changed:
        names = [f"{module}.{name}" for module, values in changed.items() for name in values]
        named = f"{', '.join(names[:_NAMED])}{' and more' if len(names) > _NAMED else ''}"
        return finding.verdict(f" {named}: not here what importing gives, as processes of their own do.")
    verdict = finding.verdict()
    if kept is not None and finding.alone is not None:
        kept.write(verdict, finding.alone.measured, runner.opened, fresh)
    return verdict


def _timed(
    factories: Sequence[EnvFactory[Any]], timeout: float | None, verdict: Verdict, kept: Cache | None
) -> Verdict:
    """Measure the step of one alone, which was not kept because others had the machine."""
    from rl_ext_core.isolation.experiments import ALONE
    from rl_ext_core.isolation.trials import TrialRunner

    with TrialRunner(factories, timeout) as runner:
        (alone,) = runner.run([ALONE], 100, shorten=True)
    if not alone.done:
        return verdict
    if kept is not None:
        kept.add_time(alone.measured)
    return dataclasses.replace(verdict, step_seconds=alone.measured["step_seconds"])
