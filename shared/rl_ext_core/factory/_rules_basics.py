"""How those objects of the standard library and of NumPy are copied that pickle cannot copy, or would copy wrongly."""

from __future__ import annotations

import ast
import logging
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_ext_core.factory import _kinds
from rl_ext_core.factory._refused import NoCopy

__all__ = ["RULES"]

# Somebody else holds a lock for a moment only, as a rule.
_PATIENCE_S = 0.2


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _lock(lock: Any) -> tuple[Any, ...]:
    until = time.monotonic() + _PATIENCE_S
    while repr(lock).startswith("<locked"):
        if time.monotonic() > until:
            raise pickle.PicklingError("it is locked, and who holds it has no copy; release it first")
        time.sleep(0.001)
    return (threading.Lock if type(lock) is type(threading.Lock()) else threading.RLock), ()


def _lock_of_processes(lock: Any) -> tuple[Any, ...]:
    return _make_lock_of_processes, (type(lock).__name__,)


def _make_lock_of_processes(name: str) -> Any:
    import multiprocessing

    return getattr(multiprocessing, name)()


def _condition(condition: Any) -> tuple[Any, ...]:
    # Threads that wait for it do so anew in the copy.
    return _blank, (type(condition),), _condition_settings(condition), None, None, _set


def _condition_settings(condition: Any) -> dict[str, Any]:
    return {**_kinds.attributes(condition), "_waiters": deque[Any]()}


def _blank(cls: Any) -> Any:
    return object.__new__(cls)


def _set(copy: Any, state: dict[str, Any]) -> None:
    vars(copy).update(state)


def _local(local: Any) -> tuple[Any, ...]:
    if type(local).__init__ is not object.__init__:
        raise pickle.PicklingError("each thread calls its __init__ with arguments that cannot be read")
    return _make_local, (type(local),), dict(local.__dict__), None, None, _set


def _make_local(cls: Any) -> Any:
    return cls()


def _weakref(reference: Any) -> tuple[Any, ...]:
    target, callback = reference(), reference.__callback__
    if target is None:
        return _dead_weakref, ()
    return weakref.ref, (target,) if callback is None else (target, callback)


def _dead_weakref() -> Any:
    return weakref.ref(type("Gone", (), {})())


def _weak_method(reference: Any) -> tuple[Any, ...]:
    return (_dead_weakref, ()) if reference() is None else (weakref.WeakMethod, (reference(),))


def _weak_collection(collection: Any) -> tuple[Any, ...]:
    # As state: its parts may refer to it, and are not complete where arguments are.
    return type(collection), (), _strong(collection), None, None, _fill


def _strong(collection: Any) -> Any:
    return set(collection) if isinstance(collection, weakref.WeakSet) else dict(collection.items())


def _fill(collection: Any, items: Any) -> None:
    collection.update(items)


def _count(count: Any) -> tuple[Any, ...]:
    # Its text is all that tells where it is; its own way of pickling is gone from Python 3.14 on.
    text = repr(count).removeprefix("count(").removesuffix(")")
    try:
        return type(count), tuple(ast.literal_eval(f"({text},)"))
    except (ValueError, SyntaxError) as error:
        raise pickle.PicklingError(f"where {count!r} is cannot be read") from error


def _path(path: Any) -> tuple[Any, ...]:
    return type(path), tuple(path.__reduce__()[1])


def _path_settings(path: Any) -> dict[str, Any]:
    # Not its attributes: what it was asked for is kept in them.
    return {"parts": _path(path)[1]}


def _logger(logger: Any) -> tuple[Any, ...]:
    return logging.getLogger, (() if isinstance(logger, logging.RootLogger) else (logger.name,))


def _logger_settings(logger: Any) -> dict[str, Any]:
    return {"name": logger.name}


def _memmap(array: Any) -> tuple[Any, ...]:
    if array.mode != "r" or array.base is not array._mmap:
        raise pickle.PicklingError(
            'a copy would write to the same file, or is a part of one; map it with mode="r", as a whole'
        )
    return _map, (str(array.filename), array.dtype, array.offset, array.shape, bool(array.flags.f_contiguous))


def _map(path: str, dtype: Any, offset: int, shape: tuple[int, ...], fortran: bool) -> Any:
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _memmap_settings(array: Any) -> dict[str, Any]:
    return {"file": str(array.filename), "place": (array.offset, array.shape, array.dtype, array.mode)}


def _stream(file: Any) -> tuple[Any, ...]:
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(
        "an open file has a position, and several copies would write over one another; open it where it is used, or in "
        "the function that builds the environment"
    )


def _stream_settings(file: Any) -> dict[str, Any]:
    return {"file": (str(getattr(file, "name", "")), str(getattr(file, "mode", "")), file.closed)}


def _generator(_: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError(
        "how far a generator has come cannot be copied; keep a list and an index, or an object that has __next__"
    )


def _generator_settings(generator: Any) -> dict[str, Any]:
    frame = getattr(generator, "gi_frame", None)
    at = None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    return {"function": generator.__qualname__, "at": at}


def _factory(factory: Any) -> tuple[Any, ...]:
    return _blank, (type(factory),), factory.__getstate__()


def _factory_settings(factory: Any) -> dict[str, Any]:
    # What it has unpickled, and the instance that it was made from, are each process's own.
    state, worker = factory.__getstate__(), factory._worker
    own = worker and (worker.index, worker.entropy, worker.attempt, repr(worker.decision))
    return {"recipe": state["_recipe"].packed, "worker": own, "given": state["_given"]}


def _refuse(reason: str, error: type[Exception] = pickle.PicklingError) -> Callable[[Any], tuple[Any, ...]]:
    def rule(_: Any) -> tuple[Any, ...]:
        raise error(reason)

    return rule


_SHARED = "it is memory that processes share: a copy would change the original, or no longer share it"
_PROCESS = "it belongs to another process, which has no copy; start that in the function that builds the environment"
_FOLDER = "it deletes its file or folder, and a copy would delete the same; make it where the environment is built"
_LIBRARY = "what a library in C holds cannot be read; say how the class that uses it is made, with register_rebuilder"

# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any] | None]] = [
    ("rl_ext_core.factory.factory:EnvFactory", _factory, _factory_settings),
    ("_thread:lock", _lock, _nothing),
    ("_thread:RLock", _lock, _nothing),
    ("threading:Condition", _condition, _condition_settings),
    ("_thread:_local", _local, lambda local: dict(local.__dict__)),
    ("multiprocessing.synchronize:Lock", _lock_of_processes, _nothing),
    ("multiprocessing.synchronize:RLock", _lock_of_processes, _nothing),
    ("weakref:ReferenceType", _weakref, None),
    ("weakref:WeakValueDictionary", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("weakref:WeakKeyDictionary", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("_weakrefset:WeakSet", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("weakref:WeakMethod", _weak_method, lambda reference: {"target": reference()}),
    ("itertools:count", _count, None),
    ("pathlib:PurePath", _path, _path_settings),
    ("pathlib._local:PurePath", _path, _path_settings),  # Python 3.13
    ("logging:Logger", _logger, _logger_settings),
    ("numpy:memmap", _memmap, _memmap_settings),
    ("_io:TextIOWrapper", _stream, _stream_settings),
    ("_io:BufferedReader", _stream, _stream_settings),
    ("_io:BufferedWriter", _stream, _stream_settings),
    ("_io:BufferedRandom", _stream, _stream_settings),
    ("_io:FileIO", _stream, _stream_settings),
    ("builtins:generator", _generator, _generator_settings),
    ("ctypes:CDLL", _refuse(_LIBRARY), None),
    ("mmap:mmap", _refuse(_SHARED), None),
    ("multiprocessing.shared_memory:SharedMemory", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.sharedctypes:SynchronizedBase", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.synchronize:SemLock", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.synchronize:Condition", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.synchronize:Event", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.queues:Queue", _refuse(_SHARED, NoCopy), None),
    ("multiprocessing.connection:_ConnectionBase", _refuse(_PROCESS, NoCopy), None),
    ("multiprocessing.process:BaseProcess", _refuse(_PROCESS, NoCopy), None),
    ("multiprocessing.managers:BaseProxy", _refuse(_PROCESS, NoCopy), None),
    ("multiprocessing.pool:Pool", _refuse(_PROCESS, NoCopy), None),
    ("concurrent.futures.process:ProcessPoolExecutor", _refuse(_PROCESS, NoCopy), None),
    ("subprocess:Popen", _refuse(_PROCESS, NoCopy), None),
    ("socket:socket", _refuse("it is a connection, which a copy cannot use as well; connect in the copy"), None),
    ("tempfile:TemporaryDirectory", _refuse(_FOLDER), None),
    ("tempfile:_TemporaryFileWrapper", _refuse(_FOLDER), None),
    ("weakref:finalize", _refuse("what it does in the end would be done for every copy"), None),
]
