"""What a frame storage changes about the buffers that use it, so that processes can be killed while they share it.

TorchRL shares numbers and a lock by semaphores. Those stay taken for ever when their holder is killed.
"""

from __future__ import annotations

from multiprocessing import sharedctypes
from typing import Any

from torchrl.data import RoundRobinWriter

_NUMBERS_OF_STORAGES = "_len_value", "_last_cursor_index_value", "_mutation_revision_value"
_NUMBERS_OF_WRITERS = "_cursor_value", "_write_count_value"


class NoLock:
    """In place of the lock of a shared number: each is read and written by one instruction."""

    def acquire(self) -> None:
        """Does nothing, as all others."""

    def release(self) -> None:
        """See :meth:`acquire`."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Share:
    """``share()`` of a buffer; what it replaces takes a semaphore.

    :param buffer: the buffer.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __call__(self, shared: bool = True) -> Any:
        type(self._buffer).share(self._buffer, shared)
        if shared:
            self._buffer._write_lock = self._buffer._storage.lock
        return self._buffer


def _without_locks(owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        number = getattr(owner, name, None)
        if isinstance(number, sharedctypes.SynchronizedBase) and not isinstance(number.get_lock(), NoLock):
            lock: Any = NoLock()
            setattr(owner, name, sharedctypes.synchronized(number.get_obj(), lock))


def bear_kills(storage: Any) -> None:
    """Takes the semaphores away from a storage and its buffers."""
    _without_locks(storage, _NUMBERS_OF_STORAGES)
    for buffer in storage._attached_entities:
        _without_locks(getattr(buffer, "_writer", None), _NUMBERS_OF_WRITERS)
        if hasattr(buffer, "_write_lock"):
            buffer.share = _Share(buffer)
            if buffer.shared:
                buffer._write_lock = storage.lock


def go_on_at(storage: Any, place: int) -> None:
    """Lets the writers of a storage go on at a place."""
    for buffer in storage._attached_entities:
        writer = getattr(buffer, "_writer", None)
        if isinstance(writer, RoundRobinWriter):
            writer._cursor = place
            writer._write_count = max(writer._write_count, len(storage))
