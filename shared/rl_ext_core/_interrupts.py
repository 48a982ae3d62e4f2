"""Deferral of signal handlers, Ctrl-C included, until a call has finished.

Python runs signal handlers between any two instructions of the main thread. If a handler raises, the interrupted
function ends there. Besides Ctrl-C, common signals are the alarm of a time limit, and a cluster's notice that a job is
about to end.

During a deferred call, handlers are replaced by one that records the signal. The original handlers run after the call.
Signals without a Python handler are not deferred.
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

# Signals that users handle, in the order in which their handlers are restored.
_NAMES = ("SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGINT")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


# The C functions behind :mod:`signal`. Its own functions convert numbers to enums, which takes ten times as long.
_c_signal = sys.modules.get("_signal", signal)
_get_handler, _set_handler = _c_signal.getsignal, _c_signal.signal

_main_thread_id = threading.main_thread().ident
_active = False  # whether handlers are deferred; only the main thread changes it
_last_handlers: list[Any] = []  # handlers at the last call, to detect changes quickly
_deferred: list[tuple[int, Any]] = []  # those of them that are Python functions, by signal number
_pending: list[int] = []  # signals that arrived during the call


def _after_fork() -> None:
    """Restore the signal handlers in a forked child, and drop the recorded signals."""
    global _main_thread_id, _active
    _main_thread_id = get_ident()
    if _active:  # the deferred call continues in the parent only
        _pending.clear()
        _active = False
        _restore_handlers(_deferred)


after_fork(_after_fork)


def _record_signal(number: int, frame: FrameType | None) -> None:
    """Record a signal, whose own handler runs later."""
    if number not in _pending:
        _pending.append(number)


def _restore_handlers(handlers: list[tuple[int, Any]]) -> None:
    try:
        _set_handler(*handlers[0])
    finally:  # a signal may arrive right here, and its restored handler may raise
        if len(handlers) > 1:
            _restore_handlers(handlers[1:])


def run_pending_handlers() -> None:
    """Run the handlers of deferred signals now. Call it where an exception does no harm."""
    if not _pending:
        return
    number = _pending.pop(0)
    handler = dict(_deferred).get(number)
    try:
        if handler is not None:  # None if another handler has removed it, and Python would not call it either
            handler(number, sys._getframe(1))
    finally:
        run_pending_handlers()


def defer_signals(function: _F) -> _F:
    """Decorate a function to defer signal handlers until it returns or raises.

    It takes 1 to 2 µs per call, and nothing if the caller is decorated too. A long function that may be aborted should
    call :func:`run_pending_handlers` regularly. Work that takes seconds only once, such as compilation, should be done
    before the call.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the function, then run the handlers of signals that arrived meanwhile."""
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
