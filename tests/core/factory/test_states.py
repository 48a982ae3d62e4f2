"""Whatever an environment's steps depend on: a copy in another process has it, or it was named or refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import cloudpickle
import numpy as np
import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from tests.core.factory import states
from tests.core.factory.states import OWN_STREAM, REFUSED, SAME, STATES, WARNED

# Those that take a process of their own and are tried by `make test`: one of each kind of mechanism.
QUICK = ("SharedVariable", "ClassObject", "MethodReplaced", "ModuleGlobal", "SetOfTexts")


def cases() -> Iterator[Any]:
    """Give each state: whether a copy is faithful, without as_factory's own trial, and that the trial says so."""
    for number, (name, expected) in enumerate(STATES.items()):
        if expected != WARNED:
            yield pytest.param(name, False, id=name, marks=[pytest.mark.slow] if name in states.NEEDS else [])
        if expected != REFUSED:
            often = expected == WARNED or (number % 4 == 0 and name not in states.NEEDS)
            tier = [] if name in QUICK else [pytest.mark.slow if often else pytest.mark.exhaustive]
            yield pytest.param(name, True, id=f"{name}, tried", marks=tier)


def steps(environment: Any) -> list[Any]:
    return [round(float(environment.step(0)[0][0]), 9) for _ in range(3)]


def steps_of(packed: bytes) -> list[Any]:
    try:
        return steps(cloudpickle.loads(packed)())
    except Exception as error:  # such as the AttributeError of what is missing
        return [type(error).__name__]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", "random")  # so that sets have another order there
            pool.submit(int).result()
        yield pool


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    numpy_errors, handles = np.geterr(), states.HANDLES
    yield
    np.seterr(**numpy_errors)
    states.HANDLES = handles


@pytest.mark.parametrize(("name", "verify"), list(cases()))
def test_a_state_is_copied_or_named(
    name: str,
    verify: bool,
    elsewhere: ProcessPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if name in states.NEEDS:
        pytest.importorskip(states.NEEDS[name])
    expected = STATES[name]
    environment = getattr(states, name)()
    environment.reset(seed=1)
    environment.change(monkeypatch)
    caplog.set_level(logging.WARNING, "rl_ext_core")
    if expected == REFUSED:
        with pytest.raises(NotCopyableError):
            as_factory(environment)
        with contextlib.suppress(AttributeError):
            environment.f.close()
        return
    factory = as_factory(environment, verify=verify)
    theirs = elsewhere.submit(steps_of, cloudpickle.dumps(factory)).result()
    mine = steps(environment)
    said = [record.getMessage() for record in caplog.records]
    if expected in (SAME, OWN_STREAM):
        assert said == []
    if expected == SAME:
        assert theirs == mine
    if expected == OWN_STREAM:
        assert theirs != mine
    if expected == WARNED:
        # What is said is what is lost: one thing.
        assert theirs != mine
        assert len(said) == 1, said
