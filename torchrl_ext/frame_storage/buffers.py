"""Changes to buffers that use a frame storage, for safety against kills and failed writes.

TorchRL shares counters and a lock through semaphores. If a process is killed while it holds a semaphore, the semaphore
is never released, and all other processes wait forever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import unwrap
from itertools import islice
from multiprocessing import sharedctypes
from traceback import walk_stack
from typing import Any

import torch
from torchrl.data import ReplayBuffer, RoundRobinWriter, TensorDictMaxValueWriter

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext.frame_storage.arguments import is_key

_STORAGE_COUNTERS = "_len_value", "_last_cursor_index_value", "_mutation_revision_value"
_WRITER_COUNTERS = "_cursor_value", "_write_count_value"
_SETITEM_CODE = unwrap(ReplayBuffer.__setitem__).__code__
# Number of calls between ReplayBuffer.__setitem__ and FrameStorage.get, decorators included.
_MAX_CALL_DEPTH = 8


class NoLock(nullcontext[None]):
    """Lock that never blocks, for a shared number that is read and written atomically."""

    def acquire(self) -> None:
        """Do nothing, because reads and writes are atomic."""

    def release(self) -> None:
        """Do nothing, because :meth:`acquire` takes no lock."""


class _WrappedMethod:
    """Wrapper of a buffer's method that defers Ctrl-C until it returns.

    Unlike a closure, it can be pickled.

    :param buffer: the buffer
    :param name: name of the method
    """

    def __init__(self, buffer: Any, name: str) -> None:
        self._buffer, self._name = buffer, name

    @defer_signals
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self._buffer), self._name)(self._buffer, *args, **kwargs)
        if self._name == "share" and self._buffer.shared:
            self._buffer._write_lock = self._buffer._storage.lock  # replaces a semaphore
        return result


def _replace_locks(owner: Any, names: tuple[str, ...]) -> None:
    """Replace the locks of an object's shared numbers by :class:`NoLock`."""
    for name in names:
        number = getattr(owner, name, None)
        if isinstance(number, sharedctypes.SynchronizedBase) and not isinstance(number.get_lock(), NoLock):
            lock: Any = NoLock()
            setattr(owner, name, sharedctypes.synchronized(number.get_obj(), lock))


def make_kill_safe(storage: Any) -> None:
    """Replace semaphores so that a killed process cannot deadlock the others."""
    _replace_locks(storage, _STORAGE_COUNTERS)
    for buffer in storage._attached_entities:
        _replace_locks(getattr(buffer, "_writer", None), _WRITER_COUNTERS)
        for name in ("add", "extend", "empty"):
            if callable(getattr(type(buffer), name, None)):
                setattr(buffer, name, _WrappedMethod(buffer, name))
        if hasattr(buffer, "_write_lock"):
            buffer.share = _WrappedMethod(buffer, "share")
            if buffer.shared:
                buffer._write_lock = storage.lock


def _iterate_writers(storage: Any) -> Iterator[Any]:
    return (getattr(buffer, "_writer", None) for buffer in storage._attached_entities)


def set_writer_cursor(storage: Any, place: int) -> None:
    """Set the place that the writers of a storage write to next, or the ranks of its elements."""
    for writer in _iterate_writers(storage):
        if isinstance(writer, RoundRobinWriter):
            writer._cursor = place
        elif isinstance(writer, TensorDictMaxValueWriter):
            _rank_elements(writer, storage)
            storage._resume_cursor = None  # the next place is that of the element with the lowest rank
        else:
            continue
        writer._write_count = max(writer._write_count, len(storage))


def _rank_elements(writer: TensorDictMaxValueWriter, storage: Any) -> None:
    """Let a writer record the ranks of the stored elements, and forget others."""
    writer._cursor, writer._current_top_values = 0, []
    for place in range(len(storage)):
        writer.get_insert_index(storage._storage[place])


def rewind_writer(storage: Any, cursor: Any) -> None:
    """Rewind the writer after a failed store, so that it uses the same places again.

    Writers advance before they store. Otherwise, the places of the failed store would count as elements later.
    """
    places = torch.as_tensor(cursor).reshape(-1).tolist() if isinstance(cursor, (int, torch.Tensor)) else []
    for writer in _iterate_writers(storage) if places else ():
        if isinstance(writer, TensorDictMaxValueWriter):
            _rank_elements(writer, storage)  # it has recorded the ranks of the failed elements
            writer._write_count -= len(places)
        elif isinstance(writer, RoundRobinWriter) and writer._cursor in (places[-1] + 1, 0):
            writer._cursor = places[0]
            writer._write_count -= len(places)


def refuse_setting_key() -> None:
    """Refuse ``buffer[key] = values``, which TorchRL would write to a temporary copy.

    :raises InvalidArgumentError: If ``ReplayBuffer.__setitem__`` is among the callers, with a key as its index.
    """
    callers = islice(walk_stack(sys._getframe(1)), _MAX_CALL_DEPTH)
    key = next((frame.f_locals.get("index") for frame, _ in callers if frame.f_code is _SETITEM_CODE), None)
    if is_key(key):
        raise InvalidArgumentError(
            f"buffer[{key!r}] = values would change a copy and not the stored elements. Use "
            f"buffer[torch.arange(len(buffer))] = TensorDict({{{key!r}: values}}, [len(buffer)])"
        )
