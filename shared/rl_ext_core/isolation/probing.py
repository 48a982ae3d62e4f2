"""``probe``: read declarations, or let a :class:`Judge` run trials."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.isolation.judge import Judge
from rl_ext_core.isolation.verdict import MIN_STEPS, Isolation, Verdict, conclude, declared_by_source

__all__ = ["probe"]

_log = logging.getLogger("rl_ext_core.isolation")
_MAX_SOURCES = 8


def probe(source: Any, *, steps: int = 100, timeout: float | None = None) -> Verdict:
    """Test whether several instances of an environment can share a process.

    Instances are built in temporary processes, never in this one.

    A declaration takes precedence: ``metadata = {"isolation": "process"}`` in the environment's class, or the flag
    ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description. Otherwise three trials run in temporary
    processes, with the same seeds and actions and an empty working directory:

    - a single instance,
    - two instances in two processes,
    - two instances in one process, built in both orders. One of them is closed half-way.

    Observations, rewards, flags, infos and ``action_masks()`` are compared bit for bit. Effects of a third instance, of
    more steps, or of ``reset`` options are not detected.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: An environment, a function or class that builds one, a gymnasium id or specification, or the result
        of :func:`~rl_ext_core.factory.as_factory`. A list contains sources that share a process. The first eight
        different ones are tested.
    :param steps: Number of steps to compare, at least 10. Fewer are compared if steps are slow.
    :param timeout: Seconds that building an environment, a reset or a step may take. The default is 300 for the first
        instance. For others it is 20 times the longest time measured there, at least 20.
    :return: The verdict. Its ``isolation`` is ``UNKNOWN`` if the environment cannot be tested in another process.
    :raises InvalidArgumentError: If the declared value is unknown, or ``steps`` or ``timeout`` is out of range.
    :raises WorkerError: If Python cannot be started.
    """
    start = time.monotonic()
    if steps < MIN_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is too small: expected at least {MIN_STEPS}. Use steps=100")
    if not (timeout is None or timeout > 0):
        raise InvalidArgumentError(
            f"timeout={timeout!r} is not valid: expected seconds above 0, or None for the default. Use timeout=60"
        )
    sources = list(source) if isinstance(source, (list, tuple)) else [source, source]
    if not sources:
        raise InvalidArgumentError("source=[] is empty: expected at least one factory. Use probe([make] * 4)")
    try:
        made = {key: as_factory(one, verify=False) for key, one in {id(one): one for one in sources}.items()}
    except NotCopyableError as error:
        return conclude(Isolation.UNKNOWN, f"It could not be tested: {str(error).rstrip('.')}.")
    verdict = _strictest_declaration([*made.values()])
    if verdict is None:
        # A source that occurs several times is built twice. There are at least two instances in all.
        times = {key: min(2, sum(id(one) == key for one in sources)) for key in [*made][:_MAX_SOURCES]}
        trial_factories = [made[key] for key, count in times.items() for _ in range(count if len(made) > 1 else 2)]
        what = f"{len(trial_factories) + 1} instances of {trial_factories[0].to_source()}"
        _log.info('testing %s in temporary processes. To skip this, write isolation="process"', what)
        verdict = Judge(trial_factories, steps, timeout).verdict()
        if len(made) > _MAX_SOURCES:
            text = f"{verdict.explanation} Sources after the first {_MAX_SOURCES} different ones were not tested."
            verdict = dataclasses.replace(verdict, explanation=text)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - start, 3))


def _strictest_declaration(factories: Sequence[EnvFactory[Any]]) -> Verdict | None:
    """Return the strictest declared verdict.

    None if a source without a declaration could be stricter.
    """
    declarations = [declared_by_source(factory) for factory in factories]
    verdicts = [declaration.verdict() for declaration in declarations if declaration is not None]
    strict = [verdict for verdict in verdicts if not verdict.in_process]
    return strict[0] if strict else verdicts[0] if verdicts and None not in declarations else None
