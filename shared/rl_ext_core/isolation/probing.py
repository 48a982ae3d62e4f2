"""``probe``: whether instances of an environment may share a process."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import _declared, _judge
from rl_ext_core.isolation._cache import Cache
from rl_ext_core.isolation._runs import Laboratory
from rl_ext_core.isolation._script import LEAST_STEPS
from rl_ext_core.isolation.verdict import Isolation, Verdict

__all__ = ["probe"]


def probe(source: Any, *, cache: bool | str | os.PathLike[str] = True, steps: int = 100) -> Verdict:
    """Find out whether instances of an environment may share a process, without building any in this one.

    What the environment says itself comes first: ``metadata = {"isolation": "single-instance"}`` in its class, or the
    flag ``canBeInstantiatedOnlyOncePerProcess`` of an FMI model description that it holds. Otherwise some are built in
    processes that are thrown away: one alone; two in one process, interleaved, one reset and closed while the other
    goes on; two in processes of their own. What they return is compared bit for bit. What is shared but did not show
    in that many steps stays unknown.

    .. code-block:: python

        verdict = probe("CartPole-v1")
        if verdict.isolation is Isolation.INDEPENDENT:
            venv = DummyVecEnv(...)

    :param source: an environment, a function or class that builds one, gymnasium's id or specification, or what
        :func:`~rl_ext_core.factory.as_factory` made of one of these
    :param cache: True keeps verdicts in the user's cache folder, a path in another one; a kept verdict holds as long
        as the recipe, the libraries and the code that were loaded are the same. False neither reads nor writes
    :param steps: how many steps are compared; fewer where they take long
    :return: the verdict. It is BROKEN where one alone fails: that raises nothing
    :raises InvalidArgumentError: the environment's metadata say something else, or ``steps`` is too small
    :raises NotCopyableError: an instance cannot be copied
    :raises WorkerError: Python does not start
    """
    if steps < LEAST_STEPS:
        raise InvalidArgumentError(f"steps={steps!r} is not a number from {LEAST_STEPS} on. Write steps=100")
    began = time.monotonic()
    # Its verification would build a copy more, and says nothing of what instances share.
    factory = as_factory(source, verify=False)
    verdict = _declaration(factory)
    if verdict is None:
        kept = Cache.of(factory, cache, steps)
        verdict = kept.read() if kept is not None else None
        if verdict is None:
            verdict, measured = _found_out(factory, steps)
            if kept is not None:
                kept.write(verdict, measured)
    return dataclasses.replace(verdict, seconds=round(time.monotonic() - began, 3))


def _declaration(factory: Any) -> Verdict | None:
    said = _declared.unbuilt(factory)
    if said is None:
        return None
    isolation = _declared.isolation_of(said)
    together = isolation is Isolation.INDEPENDENT
    explanation = f"{_judge.declaration(said)} {_judge.what_follows(isolation, None, together)}"
    return Verdict(isolation, explanation, "environment", in_process=together)


def _found_out(factory: Any, steps: int) -> tuple[Verdict, dict[str, Any]]:
    """Probe; give what was measured besides."""
    with Laboratory(factory) as laboratory:
        finding = _judge.judge(laboratory, steps)
    alone = finding.alone
    measured = {} if alone is None else alone.measured
    built = None if alone is None else alone.built
    verdict = Verdict(
        finding.isolation,
        f"{finding.seen} {_judge.what_follows(finding.isolation, finding.cure, finding.in_process)}",
        finding.declared_by,
        in_process=finding.in_process,
        step_seconds=measured.get("step_seconds"),
        build_seconds=None if built is None else built[0],
        private_bytes=measured.get("private_bytes"),
        cure=finding.cure,
        libraries=tuple(measured.get("libraries", ())),
    )
    return verdict, measured
