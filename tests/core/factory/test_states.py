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

# One of each kind of mechanism; the others take as long again, each with a process of its own.
QUICK = ("SharedVariable", "Cache", "ClassObject", "MethodReplaced", "ModuleGlobal", "Thread", "Caught", "SetOfTexts")


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
        yield pool


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    numpy_errors, handles = np.geterr(), states.HANDLES
    yield
    np.seterr(**numpy_errors)
    states.HANDLES = handles


@pytest.mark.sample(quick=8, ci=29)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STATES]
)
def test_a_state_is_copied_or_named(
    name: str, elsewhere: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    factory = as_factory(environment)
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


def test_the_table_is_long() -> None:
    assert len(STATES) >= 70
