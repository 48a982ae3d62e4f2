"""What a frame storage changes about the buffers that use it: so that processes can be killed while they share it,
Ctrl-C does not leave it between its writer and its sampler, and the oldest elements go where bytes are short.

TorchRL shares numbers and a lock by semaphores. Those stay taken for ever when their holder is killed.
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
from rl_ext_core.errors import InvalidArgumentError, OutOfMemoryError
from torchrl_ext.frame_storage.arguments import is_key

_STORAGE_COUNTERS = "_len_value", "_last_cursor_index_value", "_mutation_revision_value"
_WRITER_COUNTERS = "_cursor_value", "_write_count_value"
# Attributes of samplers that remember elements by their places, and what these attributes record.
_RECORDS_OF_PLACES = {
    "_sum_tree": "priorities",  # PrioritizedSampler
    "_sample_count": "how often elements were sampled",  # ConsumingSampler
    "_slot_versions": "which slices come next",  # StreamingSliceSampler
}
_SETITEM_CODE = unwrap(ReplayBuffer.__setitem__).__code__
_MAX_CALL_DEPTH = 8  # functions that it calls to get there: decorators, and methods of buffer and storage
_STREAM_SHARE = 0.25  # of what is held: so much may be what only elements to come need
_DROP_DIVISOR = 64  # at least one in so many elements go at a time, since those behind them have to be moved


class NoLock(nullcontext[None]):
    """In place of the lock of a shared number: each is read and written by one instruction."""

    def acquire(self) -> None:
        """Do nothing, as all others."""

    def release(self) -> None:
        """See :meth:`acquire`."""


class _WrappedMethod:
    """In place of a method of a buffer, which it calls. Unlike a closure, it goes to other processes.

    :param buffer: the buffer.
    :param name: of the method.
    """

    def __init__(self, buffer: Any, name: str) -> None:
        self._buffer, self._name = buffer, name

    @defer_signals
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self._buffer), self._name)(self._buffer, *args, **kwargs)
        if self._name == "share" and self._buffer.shared:
            self._buffer._write_lock = self._buffer._storage.lock  # in place of a semaphore
        return result


def _replace_locks(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        number = getattr(owner, name, None)
        if isinstance(number, sharedctypes.SynchronizedBase) and not isinstance(number.get_lock(), NoLock):
            lock: Any = NoLock()
            setattr(owner, name, sharedctypes.synchronized(number.get_obj(), lock))


def make_kill_safe(storage: Any) -> None:
    """Take the semaphores away from a storage and its buffers."""
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
    """Let the writers of a storage go on at a place."""
    for writer in _iterate_writers(storage):
        if isinstance(writer, RoundRobinWriter):
            writer._cursor = place
            writer._write_count = max(writer._write_count, len(storage))


def rewind_writer(storage: Any, cursor: Any) -> None:
    """Let the writer of elements that could not be stored begin with their places again.

    Writers move on first and store then; what they passed over would count as elements from the next ones on.
    """
    places = torch.as_tensor(cursor).reshape(-1).tolist() if isinstance(cursor, (int, torch.Tensor)) else []
    for writer in _iterate_writers(storage) if places else ():
        if isinstance(writer, TensorDictMaxValueWriter):
            # It has noted the ranks of what was not stored, in place of those that are there.
            writer._cursor, writer._current_top_values = 0, []
            for place in range(len(storage)):
                writer.get_insert_index(storage.get(place))
            writer._write_count -= len(places)
        elif isinstance(writer, RoundRobinWriter) and writer._cursor in (places[-1] + 1, 0):
            writer._cursor = places[0]
            writer._write_count -= len(places)


def refuse_setting_key() -> None:
    """Refuse ``buffer[key] = values``, for which TorchRL replaces a tensor of ``buffer[:]``: it would be a copy's.

    :raises InvalidArgumentError: if that is what asks.
    """
    callers = islice(walk_stack(sys._getframe(1)), _MAX_CALL_DEPTH)
    key = next((frame.f_locals.get("index") for frame, _ in callers if frame.f_code is _SETITEM_CODE), None)
    if is_key(key):
        raise InvalidArgumentError(
            f"buffer[{key!r}] = values would replace a tensor of a copy, and the elements would keep theirs; write "
            f"buffer[:][{key!r}][:] = values"
        )


class ByteBudget:
    """Keeps a storage to a number of bytes: where it is reached, the ring closes, and the oldest elements go.

    :param max_bytes: what it may hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._before = 0

    def check_buffers(self, storage: Any) -> None:
        """Refuse buffers that remember places, which change.

        :raises InvalidArgumentError: If a writer does not overwrite the oldest, or a sampler has records by place.
        """
        for buffer in storage._attached_entities:
            sampler, writer = (getattr(buffer, name, None) for name in ("_sampler", "_writer"))
            records = next((words for name, words in _RECORDS_OF_PLACES.items() if hasattr(sampler, name)), None)
            if records is not None:
                raise InvalidArgumentError(
                    f"max_bytes={self.max_bytes} moves elements to other places, and {type(sampler).__name__} records "
                    f"{records} by place: expected another sampler. Leave max_bytes out and pass a smaller max_size, "
                    "or pass sampler=RandomSampler()"
                )
            if not isinstance(writer, RoundRobinWriter) or writer.tracks_generations:
                raise InvalidArgumentError(
                    f"max_bytes={self.max_bytes} goes with writers that overwrite the oldest, got "
                    f"{type(writer).__name__}; leave max_bytes out, or writer="
                )

    def enforce(self, storage: Any) -> None:
        """Make room for as much as came last, so that the bytes held stay below the limit.

        :raises OutOfMemoryError: if not even a few elements fit.
        """
        held = storage.used_nbytes
        # What came at once may have been much, and the elements before are not to go for that.
        coming = min(max(held - self._before, 0), self.max_bytes // 2)
        while held + coming > self.max_bytes:
            # Of elements that continue none, each keeps a block open, and what is dropped would take as much as before.
            storage.free_stream_buffers(_STREAM_SHARE if len(storage) > 1 else 0)
            held = storage.used_nbytes
            if held + coming <= self.max_bytes or (len(storage) < 2 and held <= self.max_bytes):
                break
            if len(storage) < 2:
                self._before = held
                raise OutOfMemoryError(
                    f"max_bytes={self.max_bytes} is too little: {len(storage)} elements of this kind take {held} "
                    "bytes; pass a larger max_bytes, or add fewer at a time"
                )
            storage._drop_oldest(max(len(storage) // _DROP_DIVISOR, 1))
            held = storage.used_nbytes
        self._before = held
