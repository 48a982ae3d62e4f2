"""Interrupts of a call at every place where CPython may handle a signal."""

from __future__ import annotations

import dis
import gc
import inspect
import linecache
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# File, line and event of a place, and file and line of the caller. The event is a line, the return of a Python function
# (whose result is lost), or the return of a C function.
Place = tuple[str, int, str, str, int]
_NOT_INTERRUPTED = "not interrupted"


class _StepTracer:
    """Tracer that raises SIGINT at the first step for which a function returns True.

    :param should_interrupt: function of a place
    :param code_paths: parts of paths; only code in files with one of them counts
    :param number: number of another signal
    """

    def __init__(
        self, should_interrupt: Callable[[Place], bool], code_paths: tuple[str, ...], number: int = signal.SIGINT
    ) -> None:
        self.should_interrupt, self.code_paths, self.number = should_interrupt, code_paths, number
        self.where: str | None = None

    def run(self, call: Callable[[], Any]) -> str | None:
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
        """Handle Python's trace events: count lines and returns of the traced code."""
        if not self._is_traced(frame):
            return None
        # Python handles signals neither when a dropped generator ends, nor between a ``with`` block and its exit.
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if (event == "line" and not _leaves_with_block(frame)) or (event == "return" and not is_generator):
            self._step(frame, event)
        return self._trace

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handle Python's profile events: count returns from C functions."""
        if event == "c_return" and self._is_traced(frame):
            self._step(frame, f"{event} of {getattr(arg, '__qualname__', arg)}")

    def _is_traced(self, frame: FrameType) -> bool:
        # When a generator is closed, its ``with`` block ends before Python handles signals, but after this function.
        return frame.f_code.co_name != "_hold_lock" and any(
            part in frame.f_code.co_filename for part in self.code_paths
        )

    def _step(self, frame: FrameType, event: str) -> None:
        """Raise SIGINT if ``should_interrupt`` returns True for this place."""
        caller = frame.f_back or frame
        place = (frame.f_code.co_filename, frame.f_lineno, event, caller.f_code.co_filename, caller.f_lineno)
        if self.should_interrupt(place) and not _is_finalizing(frame):
            self.where = "{}:{} {}, called at {}:{}".format(*place)
            sys.settrace(None)
            sys.setprofile(None)
            signal.raise_signal(self.number)  # code that defers signals may do so here too


def _leaves_with_block(frame: FrameType) -> bool:
    """Return whether the next instruction is the exit of a ``with`` block, which is on the line of ``with``."""
    opname = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ") and not opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF"))


def _is_finalizing(frame: FrameType | None) -> bool:
    # Exceptions in __del__ are printed, and do not reach the caller.
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupt_at(
    call: Callable[[], Any], at: int, *, code_paths: tuple[str, ...], number: int = signal.SIGINT
) -> str | None:
    """Run a call, and interrupt it at one step.

    :param at: number of the step, from 1
    :param code_paths: parts of paths; only code in files with one of them counts
    :param number: number of another signal, such as SIGKILL
    :return: the place, as text; None if the call has fewer steps
    :raises Exception: If the call raises another exception than KeyboardInterrupt.
    """
    left = at

    def should_interrupt(place: Place) -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    return _StepTracer(should_interrupt, code_paths, number).run(call)


def interrupt_everywhere(
    prepare: Callable[[], Callable[[], Any]], *, code_paths: tuple[str, ...], every: int = 1
) -> Iterator[str]:
    """Run a call without an interrupt, then with an interrupt at each place in turn.

    A place is a line together with the line that called its function. Its first and its last visit are interrupted.
    After each run, the place of the interrupt is yielded, and the caller can check the state.

    :param prepare: function that creates a new state and returns the call
    :param code_paths: parts of paths; only code in files with one of them counts
    :param every: interrupt only each ``every``-th place, default 1
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
            gc.collect()  # cycles of tracebacks are large, but too few objects for an automatic collection
