"""What is said of memory and speed: once, and with figures."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable
from time import perf_counter

import pytest

from tests.torchrl_ext.parallel_checks import no_workers_left
from tests.torchrl_ext.parallel_environments import Well
from torchrl_ext import ParallelEnv, as_factory
from torchrl_ext.parallel.plan import SpeedCheck, warn_of_memory

__all__ = ["no_workers_left"]

GB = 10**9


Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    caplog.set_level(logging.WARNING, logger="torchrl_ext")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "torchrl_ext"]


@pytest.mark.slow
def test_workers_that_do_not_fit(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_ext_core.resources.available_memory", lambda: 10**6)
    env = ParallelEnv(2, as_factory(Well()))
    for _ in range(2):
        env.reset()
        env.close()
    (text,) = said()
    assert re.search(
        r"^2 workers need about 0\.\d+ GB \(\d+ MB each, measured\), and 0\.0 GB are available: use 1 or", text
    )


@pytest.mark.sample
@pytest.mark.parametrize(
    ("available", "text"),
    [
        (7 * GB, "4 workers need about 8.0 GB (2000 MB each, measured), and 7.0 GB are available: use 3 or fewer"),
        (1 * GB, "4 workers need about 8.0 GB (2000 MB each, measured), and 1.0 GB are available: use 1 or fewer"),
        (8 * GB, None),
        (None, None),
    ],
)
def test_the_largest_of_them_counts(
    available: int | None, text: str | None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_ext_core.resources.available_memory", lambda: available)
    warn_of_memory([GB, 2 * GB, None, GB], 4)
    assert said() == ([] if text is None else [text])


@pytest.mark.slow
def test_workers_that_cost_more_time_than_they_save(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, what the environment takes by itself may be measured as too much.
    monkeypatch.setattr(
        "torchrl_ext.parallel.plan.time", types.SimpleNamespace(perf_counter=lambda: 20 * perf_counter())
    )
    env = ParallelEnv(2, Well, use_buffers=False)
    env.rollout(60, break_when_any_done=False)
    (text,) = said()
    pattern = r"^these 2 workers take (\S+) ms for a step that takes about (\S+) ms in one process .*SerialEnv\(2, as_f"
    match = re.search(pattern, text)
    assert match is not None
    assert float(match[1]) > float(match[2])
    env.close()
    env.rollout(60, break_when_any_done=False)
    assert len(said()) == 1
    env.close()


@pytest.mark.sample
@pytest.mark.parametrize(
    ("serial", "parallel", "warns"),
    [([0.001, 0.001], 0.003, True), ([0.001, 0.001], 0.0022, False), ([0.001, None], 0.003, False), ([], 1.0, True)],
)
def test_the_median_of_some_steps_decides(
    serial: list[float | None], parallel: float, warns: bool, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    check = SpeedCheck(serial, 2)
    for number in range(60):
        with check:
            clock[0] += 10.0 if number < 9 else parallel
        assert not said() or number >= 49
    assert bool(said()) == warns
