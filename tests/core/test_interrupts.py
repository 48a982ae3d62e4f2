from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from tests.forks import result_in_fork
from tests.interrupts import interrupt_at, interrupt_everywhere


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    """Restore the signal handlers, and assert that Python's SIGINT handler was unchanged."""
    numbers = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after[0] is before[0]


class _Counter:
    def __init__(self) -> None:
        self.first = self.second = 0

    @defer_signals
    def increment_both(self, during: Callable[[], Any] = lambda: None) -> str:
        """Increment both counters with signals deferred, and call ``during`` in between."""
        self.first += 1
        during()
        self.second += 1
        return "done"


def test_interrupted_call_is_complete_or_not_started() -> None:
    counters = []

    def prepare() -> Callable[[], Any]:
        counters.append(_Counter())
        return counters[-1].increment_both

    seen = set()
    for where in interrupt_everywhere(prepare, code_paths=("test_interrupts.py", "_interrupts.py")):
        seen.add((counters[-1].first, counters[-1].second))
        assert counters[-1].first == counters[-1].second, where
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
    assert seen == {(0, 0), (1, 1)}


def test_exception_of_a_call_is_the_context_of_keyboard_interrupt() -> None:
    @defer_signals
    def fails() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("ours")

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
def test_handlers_of_other_signals_are_deferred_too(number: signal.Signals) -> None:
    counter, seen = _Counter(), []
    signal.signal(number, lambda number, frame: seen.append((number, counter.second)))
    assert counter.increment_both(lambda: signal.raise_signal(number)) == "done"
    assert seen == [(number, 1)]


def raise_signals(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.raise_signal(number)


def test_second_signal_is_handled_if_the_first_handler_raises() -> None:
    def end(*_: object) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, end)
    with pytest.raises(SystemExit) as caught:
        _Counter().increment_both(lambda: raise_signals(signal.SIGINT, signal.SIGTERM))
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_handler_that_another_handler_removes_is_not_called() -> None:
    seen = []

    def remove_other_handler(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _Counter().increment_both()
        seen.append("first")

    signal.signal(signal.SIGTERM, remove_other_handler)
    signal.signal(signal.SIGALRM, lambda *_: seen.append("second"))
    assert _Counter().increment_both(lambda: raise_signals(signal.SIGTERM, signal.SIGALRM)) == "done"
    assert seen == ["first"]


def test_long_call_ends_where_it_runs_pending_handlers() -> None:
    steps = []

    @defer_signals
    def work() -> None:
        for step in range(10):
            if step == 3:
                signal.raise_signal(signal.SIGINT)
            steps.append(step)
            if step % 5 == 4:
                run_pending_handlers()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == [0, 1, 2, 3, 4]


def test_handlers_stay_deferred_after_a_nested_call() -> None:
    inner, outer = _Counter(), _Counter()
    with pytest.raises(KeyboardInterrupt):
        outer.increment_both(lambda: [signal.raise_signal(signal.SIGINT), inner.increment_both()])
    assert (inner.second, outer.second) == (1, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns of a fork in a process with threads
def test_process_forked_by_a_thread_defers_signals() -> None:
    def interrupt() -> tuple[Any, ...]:
        counter = _Counter()
        where = interrupt_at(counter.increment_both, 3, code_paths=("test_interrupts.py",))
        return where is not None, counter.first, counter.second

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(result_in_fork, interrupt).result() == "(True, 1, 1)"
