"""How threads are copied: what runs in the original is started again in the copy, once that is complete."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from rl_ext_core.factory import _graft

__all__ = ["RULES", "lost_by"]

# What it runs; Python deletes these when it has run.
_RUN = ("_target", "_args", "_kwargs")


def _thread(thread: threading.Thread) -> tuple[Any, ...]:
    if thread is threading.main_thread():
        return threading.main_thread, ()
    if isinstance(thread, threading._DummyThread):
        raise pickle.PicklingError("it is a thread that Python did not start, so it cannot be started again")
    return _make, (type(thread), thread.name, thread.daemon), _settings(thread), None, None, _fill


def _settings(thread: threading.Thread) -> dict[str, Any]:
    if thread is threading.main_thread():
        return {"name": "main"}
    own = vars(threading.Thread()).keys() - set(_RUN)
    held = {name: value for name, value in vars(thread).items() if name not in own}
    return {
        **held,
        "<started>": thread.ident is not None,
        "<ended>": thread.ident is not None and not thread.is_alive(),
    }


def _make(cls: type[threading.Thread], name: str, daemon: bool) -> threading.Thread:
    thread = cls.__new__(cls)
    threading.Thread.__init__(thread, name=name, daemon=daemon)
    return thread


def _fill(thread: threading.Thread, state: dict[str, Any]) -> None:
    started, ended = state.pop("<started>"), state.pop("<ended>")
    vars(thread).update(state)
    if ended:
        _graft.after_loading(lambda: _end(thread, state))
    elif started:
        _graft.after_loading(lambda: threading.Thread.start(thread))


def _end(thread: threading.Thread, state: dict[str, Any]) -> None:
    # A thread that has ended can be joined, and cannot be started.
    thread.run = lambda: None  # type: ignore[method-assign]
    threading.Thread.start(thread)
    thread.join()
    for name in ("run", *_RUN):
        vars(thread).pop(name, None)
    vars(thread).update(state)


def lost_by(thread: Any) -> str | None:
    """Say what a thread that is started again will not have: what its function keeps in variables of its own."""
    # By its type: a weak proxy is asked for the class of what it stands for, which may be gone.
    if not issubclass(type(thread), threading.Thread) or not thread.is_alive() or thread is threading.main_thread():
        return None
    ran = vars(thread).get("_target") or type(thread).run
    code = getattr(getattr(ran, "__func__", ran), "__code__", None)
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None or code is None or code is threading.Thread.run.__code__:
        return None
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = sorted(set(frame.f_locals) - set(given) - set(code.co_freevars))
    if not names:
        return None
    return (
        f"a copy starts the thread's function from its beginning, without what is in {', '.join(names)} now: keep that "
        "in attributes"
    )


def _executor(executor: Any) -> tuple[Any, ...]:
    if executor._work_queue.qsize():
        raise pickle.PicklingError("work is waiting in it that has not begun; wait until it is done")
    names = ("_max_workers", "_thread_name_prefix", "_initializer", "_initargs")
    return type(executor), tuple(getattr(executor, name) for name in names)


def _queue(queue: Any) -> tuple[Any, ...]:
    if not queue.empty():
        raise pickle.PicklingError("what is in it cannot be read without taking it out; empty it, or use queue.Queue")
    return type(queue), ()


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("threading:Thread", _thread, _settings),
    ("concurrent.futures.thread:ThreadPoolExecutor", _executor, lambda executor: {"made": _executor(executor)[1]}),
    ("_queue:SimpleQueue", _queue, lambda queue: {"empty": queue.empty()}),
]
