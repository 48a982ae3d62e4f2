"""Ctrl-C everywhere: a call is interrupted wherever CPython may look for signals, and the caller looks what is left."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# A line, the return of a function (whose result is lost then) or that of one in C, and the line that called it.
Place = tuple[str, int, str, str, int]
_NOT_INTERRUPTED = "not interrupted"


class _StepTracer:
    """Follows the steps of a call through code in the named files, and asks at each whether Ctrl-C comes there."""

    def __init__(self, should_interrupt: Callable[[Place], bool], code_paths: tuple[str, ...]) -> None:
        self.should_interrupt = should_interrupt
        self.code_paths = code_paths
        self.where: str | None = None

    def run(self, call: Callable[[], Any]) -> str | None:
        """Return where Ctrl-C came, or None."""
        before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
        return self.where

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_traced(frame):
            return None
        # A generator that is dropped ends without a look for signals.
        if event == "line" or (event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR):
            self._step(frame, event)
        return self._trace

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and self._is_traced(frame):
            self._step(frame, f"{event} of {getattr(arg, '__qualname__', arg)}")

    def _is_traced(self, frame: FrameType) -> bool:
        # Where a generator is closed, its ``with`` ends before Python looks for signals; a trace function comes before.
        return frame.f_code.co_name != "_holding" and any(part in frame.f_code.co_filename for part in self.code_paths)

    def _step(self, frame: FrameType, event: str) -> None:
        caller = frame.f_back or frame
        place = (frame.f_code.co_filename, frame.f_lineno, event, caller.f_code.co_filename, caller.f_lineno)
        if self.should_interrupt(place) and not _is_finalizing(frame):
            self.where = "{}:{} {}, called at {}:{}".format(*place)
            sys.settrace(None)
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)  # whoever defers signals may do so here too


def _is_finalizing(frame: FrameType | None) -> bool:
    # What is raised there is shown, and lost.
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupt_at(call: Callable[[], Any], at: int, *, code_paths: tuple[str, ...]) -> str | None:
    """Run ``call`` with Ctrl-C at its step number ``at``; return where that was, or None if the call has fewer steps.

    :param at: counts from 1.
    :param code_paths: parts of paths: only code in files with one of them counts.
    :raises Exception: what the call raises other than KeyboardInterrupt.
    """
    left = at

    def should_interrupt(place: Place) -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    return _StepTracer(should_interrupt, code_paths).run(call)


def interrupt_everywhere(
    prepare: Callable[[], Callable[[], Any]], *, code_paths: tuple[str, ...], every: int = 1
) -> Iterator[str]:
    """Run a call to its end once, then interrupt it at each place that it came by, the first time and the last.

    A place is a line together with the line that called its function: what a loop does a hundred times is
    interrupted twice. Where the call was interrupted is yielded after each run, for the caller to check what is left.

    :param prepare: makes everything anew and returns the call.
    :param every: 1 for each place, ``n`` for each ``n``-th.
    """
    visits: Counter[Place] = Counter()

    def count_visit(place: Place) -> bool:
        visits[place] += 1
        return False

    _StepTracer(count_visit, code_paths).run(prepare())
    yield _NOT_INTERRUPTED
    targets = [(place, visit) for place, times in visits.items() for visit in sorted({1, times})]
    for number, (target, visit) in enumerate(targets[::every]):
        left = visit

        def should_interrupt(place: Place, target: Place = target) -> bool:
            nonlocal left
            left -= place == target
            return left == 0

        yield _StepTracer(should_interrupt, code_paths).run(prepare()) or _NOT_INTERRUPTED
        if number % 64 == 63:
            gc.collect()  # what tracebacks hold in cycles is large, and too few objects for Python to look for it
