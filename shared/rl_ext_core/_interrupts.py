"""Ctrl-C between calls, not within them: what must not be left half done runs to its end first.

Python runs the handlers of signals between any two instructions of the main thread, and what they raise leaves a
function wherever that was. Ctrl-C is the usual one; others are the alarm of a time limit, and the notice of a cluster
that a job is about to end, in whose handler people save what they have.

Here handlers wait. They are put aside for the time of a call and called behind it, as if the signal had come then.
Signals without a handler in Python do what they always do.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

from rl_ext_core._system import after_fork

_F = TypeVar("_F", bound=Callable[..., Any])

# Those that people handle. What comes first is checked, and put back, first.
_NAMES = ("SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


# The functions of :mod:`signal` below their conversion of numbers to enumerations, which takes ten times as long.
_c_signal = sys.modules.get("_signal", signal)
_get_handler, _set_handler = _c_signal.getsignal, _c_signal.signal

_main_thread_id = threading.main_thread().ident
_active = False  # whether handlers are put aside; only the main thread changes it
_last_handlers: list[Any] = []  # the handlers of the last call, which are hardly ever others
_deferred: list[tuple[int, Any]] = []  # those among them that are functions
_pending: list[int] = []  # signals that came meanwhile


def _after_fork() -> None:
    global _main_thread_id, _active
    _main_thread_id = get_ident()
    if _active:  # the call that put them aside goes on in the parent
        _pending.clear()
        _active = False
        _restore_handlers(_deferred)


after_fork(_after_fork)


def _record_signal(number: int, frame: FrameType | None) -> None:
    if number not in _pending:
        _pending.append(number)


def _restore_handlers(handlers: list[tuple[int, Any]]) -> None:
    try:
        _set_handler(*handlers[0])
    finally:  # it may raise what came in this moment
        if len(handlers) > 1:
            _restore_handlers(handlers[1:])


def run_pending_handlers() -> None:
    """Call the handlers of the signals that came, from a place where it does no harm if they raise."""
    if not _pending:
        return
    number = _pending.pop(0)
    handler = dict(_deferred).get(number)
    try:
        if handler is not None:  # else another handler took it away meanwhile, and Python would not call it either
            handler(number, sys._getframe(1))
    finally:
        run_pending_handlers()


def defer_signals(function: _F) -> _F:
    """Have the handlers of signals wait until the function returns or raises.

    It costs a microsecond or two, and nothing where such a function calls another one. What takes long and may be
    given up calls :func:`run_pending_handlers` now and then; what takes seconds only once, as compiling does, comes before.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _active, _last_handlers, _deferred
        if _active or get_ident() != _main_thread_id:
            return function(*args, **kwargs)
        handlers = [*map(_get_handler, _NUMBERS)]
        if handlers != _last_handlers:
            _deferred = [pair for pair in zip(_NUMBERS, handlers, strict=True) if callable(pair[1])]
            _last_handlers = handlers
        if not _deferred:
            return function(*args, **kwargs)
        deferred = _deferred
        try:
            for pair in deferred:
                _set_handler(pair[0], _record_signal)
            _active = True
            return function(*args, **kwargs)
        finally:
            _active = False
            _restore_handlers(deferred)
            if _pending:
                run_pending_handlers()

    return call  # type: ignore[return-value]
