"""How those objects of the standard library and its kin are copied that pickle cannot copy, or would copy wrongly."""

from __future__ import annotations

import ast
import functools
import gc
import logging
import operator
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.factory import _graft, _objects, _parts, _rules

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


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


# TorchRL's VecNorm has one. Of locks that several environments shared, each copy has its own.
def _lock_of_processes(lock: Any) -> tuple[Any, ...]:
    return _make_lock_of_processes, (type(lock).__name__,)


def _make_lock_of_processes(name: str) -> Any:
    import multiprocessing

    return getattr(multiprocessing, name)()


def _condition(condition: Any) -> tuple[Any, ...]:
    # Threads that wait for it do so anew in the copy.
    return _rules.new(type(condition), {**_objects.attributes(condition), "_waiters": deque[Any]()})


def _local(local: Any) -> tuple[Any, ...]:
    if type(local).__init__ is not object.__init__:
        raise pickle.PicklingError("each thread calls its __init__ with arguments that cannot be read")
    return type(local), (), dict(local.__dict__), None, None, _fill_local


def _fill_local(copy: Any, state: dict[str, Any]) -> None:
    vars(copy).update(state)


_THREAD = "what a thread is doing has no copy; make and start it in reset(), and hand the environment over before that"


def _thread(thread: threading.Thread) -> tuple[Any, ...]:
    if thread is threading.main_thread():
        return threading.main_thread, ()
    # Not by constructing what holds it either: its thread would wait for other locks than the copied ones.
    raise _graft.NoCopy(_THREAD)


def runs(item: Any) -> bool:
    """Whether this is a thread that runs: where it is, and what its function keeps in variables, cannot be read."""
    # By its type: a weak proxy is asked for the class of what it stands for, which may be gone.
    return issubclass(type(item), threading.Thread) and item.is_alive() and item is not threading.main_thread()


def _executor(executor: Any) -> tuple[Any, ...]:
    if executor._work_queue.qsize():
        raise pickle.PicklingError("work is waiting in it that has not begun; wait until it is done")
    names = ("_max_workers", "_thread_name_prefix", "_initializer", "_initargs")
    return type(executor), tuple(getattr(executor, name) for name in names)


class _Gone:
    """What is referred to for a moment."""


def _weakref(reference: Any) -> tuple[Any, ...]:
    target, callback = reference(), reference.__callback__
    if target is None:
        return _dead_weakref, ()
    return weakref.ref, (target,) if callback is None else (target, callback)


def _dead_weakref() -> Any:
    return weakref.ref(_Gone())


def _weak_method(reference: Any) -> tuple[Any, ...]:
    return (_dead_weakref, ()) if reference() is None else (weakref.WeakMethod, (reference(),))


def _weak_collection(collection: Any) -> tuple[Any, ...]:
    # As state: its parts may refer to it, and are not complete where arguments are.
    return type(collection), (), _strong(collection), None, None, _fill


def _strong(collection: Any) -> Any:
    return set(collection) if isinstance(collection, weakref.WeakSet) else dict(collection.items())


def _fill(collection: Any, items: Any) -> None:
    collection.update(items)


def _proxy(proxy: Any) -> tuple[Any, ...]:
    try:
        # Everything that is asked of a proxy is answered by its target; so is what a method is bound to.
        return weakref.proxy, (proxy.__reduce_ex__.__self__,)
    except ReferenceError as error:
        raise pickle.PicklingError("what it stands for is gone; leave it out, or put None in its place") from error


def _view(view: Any) -> tuple[Any, ...]:
    (viewed,) = gc.get_referents(view)
    return operator.methodcaller(type(view).__name__.rpartition("_")[2]), (viewed,)


def _count(count: Any) -> tuple[Any, ...]:
    # Its text is all that tells where it is; its own way of pickling is gone from Python 3.14 on.
    text = repr(count).removeprefix("count(").removesuffix(")")
    try:
        return type(count), tuple(ast.literal_eval(f"({text},)"))
    except (ValueError, SyntaxError) as error:
        raise pickle.PicklingError(f"where {count!r} is cannot be read") from error


def _path(path: Any) -> tuple[Any, ...]:
    # Not its attributes: what it was asked for is kept in them. As one text, files that a recipe names are recognized.
    return type(path), (str(path),)


def _logger(logger: Any) -> tuple[Any, ...]:
    return logging.getLogger, (() if isinstance(logger, logging.RootLogger) else (logger.name,))


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


def _factory_settings(factory: Any) -> dict[str, Any]:
    # What it has unpickled, and the instance that it was made from, are each process's own.
    state, worker = factory.__getstate__(), factory._worker
    own = worker and (worker.index, worker.entropy, worker.attempt, repr(worker.decision))
    return {"recipe": state["_recipe"].packed, "worker": own, "given": state["_given"]}


def _cache(cache: Any) -> tuple[Any, ...] | str:
    if _parts.is_global(cache):
        return str(cache.__qualname__)
    if cache.cache_info().currsize:
        raise pickle.PicklingError("what it keeps cannot be read; call its cache_clear() first")
    made = (cache.__wrapped__, cache.cache_parameters())
    return _make_cache, made, _cache_attributes(cache), None, None, _objects.set_state


def _make_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cache_attributes(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if name not in ("__wrapped__", "cache_parameters")}


def _cache_settings(cache: Any) -> dict[str, Any]:
    if _parts.is_global(cache):
        return {"name": (cache.__module__, cache.__qualname__)}
    own = {"wrapped": cache.__wrapped__, "parameters": cache.cache_parameters(), "kept": cache.cache_info().currsize}
    return {**own, **_cache_attributes(cache)}


def _table(table: Any) -> Any:
    # From pandas 3 on, tables share memory until one is written to; copies would not know of one another.
    return _rules.by_pickle(table.copy() if int(sys.modules["pandas"].__version__.partition(".")[0]) >= 3 else table)


def _values(column: Any) -> tuple[str, Any]:
    return str(column.dtype), np.array(column)  # not a view, for the same reason


def _index(index: Any) -> dict[str, Any]:
    return {"values": _values(index), "names": list(index.names)}


def _more(table: Any) -> dict[str, Any]:
    return {"attrs": table.attrs, "flags": table.flags.allows_duplicate_labels}


def _series(series: Any) -> dict[str, Any]:
    return {"index": _index(series.index), "name": series.name, "values": _values(series), **_more(series)}


def _frame(frame: Any) -> dict[str, Any]:
    columns = [_values(frame.iloc[:, number]) for number in range(frame.shape[1])]
    return {"index": _index(frame.index), "names": _index(frame.columns), "columns": columns, **_more(frame)}


def _picture(picture: Any) -> dict[str, Any]:
    what = {"mode": picture.mode, "size": picture.size, "palette": picture.getpalette() if picture.palette else None}
    return {**what, "info": picture.info, "pixels": picture.tobytes()}


_SHARED = "it is memory that processes share: a copy would change the original, or no longer share it"
_PROCESS = "it belongs to another process, which has no copy; start that in the function that builds the environment"
_FOLDER = "it deletes its file or folder, and a copy would delete the same; make it where the environment is built"
_LIBRARY = "what a library in C holds cannot be read; say how the class that uses it is made, with register_rebuilder"

_SHARED_KINDS = (
    "multiprocessing.shared_memory:SharedMemory",
    "multiprocessing.sharedctypes:SynchronizedBase",
    *(f"multiprocessing.synchronize:{name}" for name in ("SemLock", "Condition", "Event")),
    "multiprocessing.queues:Queue",
)
_PROCESS_KINDS = (
    "multiprocessing.connection:_ConnectionBase",
    "multiprocessing.process:BaseProcess",
    "multiprocessing.managers:BaseProxy",
    "multiprocessing.pool:Pool",
    "concurrent.futures.process:ProcessPoolExecutor",
    "subprocess:Popen",
)

# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("rl_ext_core.factory.factory:EnvFactory", _rules.by_pickle, _factory_settings),
    ("_thread:lock", _lock, _nothing),
    ("_thread:RLock", _lock, _nothing),
    ("threading:Condition", _condition, None),
    ("_thread:_local", _local, None),
    ("multiprocessing.synchronize:Lock", _lock_of_processes, _nothing),
    ("multiprocessing.synchronize:RLock", _lock_of_processes, _nothing),
    ("weakref:ReferenceType", _weakref, None),
    ("weakref:WeakValueDictionary", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("weakref:WeakKeyDictionary", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("_weakrefset:WeakSet", _weak_collection, lambda found: {"parts": _strong(found)}),
    ("weakref:WeakMethod", _weak_method, None),
    ("itertools:count", _count, None),
    ("pathlib:PurePath", _path, None),
    ("pathlib._local:PurePath", _path, None),  # Python 3.13
    ("logging:Logger", _logger, None),
    ("numpy:memmap", _memmap, _memmap_settings),
    *(
        (f"_io:{kind}", _stream, _stream_settings)
        for kind in ("TextIOWrapper", "BufferedReader", "BufferedWriter", "BufferedRandom", "FileIO")
    ),
    ("builtins:generator", _generator, _generator_settings),
    ("ctypes:CDLL", _rules.refusal(_LIBRARY), None),
    ("mmap:mmap", _rules.refusal(_SHARED), None),
    *((name, _rules.refusal(_SHARED, _graft.NoCopy), None) for name in _SHARED_KINDS),
    *((name, _rules.refusal(_PROCESS, _graft.NoCopy), None) for name in _PROCESS_KINDS),
    ("socket:socket", _rules.refusal("it is a connection, which a copy cannot use as well; connect in the copy"), None),
    ("tempfile:TemporaryDirectory", _rules.refusal(_FOLDER), None),
    ("tempfile:_TemporaryFileWrapper", _rules.refusal(_FOLDER), None),
    ("weakref:finalize", _rules.refusal("what it does in the end would be done for every copy"), None),
    ("weakref:ProxyType", _proxy, None),
    ("weakref:CallableProxyType", _proxy, None),
    *((f"builtins:{kind}dict_{name}", _view, None) for kind in ("", "o") for name in ("keys", "values", "items")),
    ("functools:_lru_cache_wrapper", _cache, _cache_settings),
    ("threading:Thread", _thread, lambda thread: {"<running>": thread.is_alive()}),
    ("concurrent.futures.thread:ThreadPoolExecutor", _executor, None),
    ("pandas:DataFrame", _table, _frame),
    ("pandas.core.frame:DataFrame", _table, _frame),
    ("pandas:Series", _table, _series),
    ("pandas.core.series:Series", _table, _series),
    ("pandas:Index", _rules.by_pickle, _index),
    ("pandas.core.indexes.base:Index", _rules.by_pickle, _index),
    ("PIL.Image:Image", _rules.by_pickle, _picture),
]

_rules.add(RULES)
