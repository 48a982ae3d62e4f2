"""Events of our contexts do what multiprocessing's do, also when a process dies at them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest

from rl_ext_core.processes import get_context
from tests.core.processes.groups import LIMIT_S


def set_and_clear(event: Any) -> None:
    while True:
        event.set()
        event.clear()


def test_it_does_what_multiprocessings_does() -> None:
    for event in (get_context("fork").Event(), multiprocessing.Event()):
        assert not event.is_set()
        assert not event.wait(0)
        assert not event.wait(0.01)
        event.set()
        event.set()
        assert event.is_set()
        assert event.wait()
        assert event.wait(-1)
        event.clear()
        event.clear()
        assert not event.wait(-1)
        threading.Timer(0.05, event.set).start()
        assert event.wait(LIMIT_S)


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize("turn", range(5))
def test_a_process_that_is_killed_at_it_leaves_it_usable(turn: int) -> None:
    """With multiprocessing's own event, this hangs in most turns."""
    context = get_context("fork")
    event = context.Event()
    workers = [context.Process(target=set_and_clear, args=(event,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.05 + 0.01 * turn)
    for worker in workers:
        worker.kill()
        worker.join()
    setter = threading.Thread(target=event.set, daemon=True)
    setter.start()
    setter.join(LIMIT_S)
    assert not setter.is_alive()
    assert event.wait(0)
    event.clear()
    assert not event.is_set()
