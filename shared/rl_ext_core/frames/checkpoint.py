"""Formats, checksums and errors of what stores save."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_ext_core.errors import CorruptFileError

FORMAT = 1  # of folders, their segments, and pickles of stores


def checksum(state: Any) -> int:
    """Return the CRC-32 of nested containers of arrays and plain values.

    The entries ``"checksum"`` and ``"held"`` (the lock) of dicts are left out.
    """
    if isinstance(state, np.ndarray):
        contents = zlib.crc32(np.ascontiguousarray(state).reshape(-1).view(np.uint8).data)
        parts: Any = (state.dtype.str, state.shape, contents)
    elif isinstance(state, dict):
        parts = [(key, checksum(value)) for key, value in state.items() if key not in ("checksum", "held")]
    elif isinstance(state, (list, tuple)):
        parts = [checksum(value) for value in state]
    else:
        parts = state
    return zlib.crc32(repr(parts).encode())


def format_error(what: object, found: Any, expected: int) -> CorruptFileError:
    """Create the error for data of another format.

    :param what: Subject of the error text, such as ``"the replay buffer"``
    :param found: Format of the data
    :param expected: Format that this version reads
    """
    return CorruptFileError(
        f"{what} has format {found!r}, but this version reads {expected}; use the version of rl-ext that wrote it"
    )


def _hold_lock(lock: Any) -> Iterator[None]:
    """Hold a lock until this generator is closed or dropped."""
    with lock:
        yield


class HeldLock:
    """Lock that is held until pickle has written the state that this object is part of.

    It is the last entry of a state that consists of views, so that other threads cannot change their memory meanwhile.
    If the state is dropped instead, the lock is released too. The lock is held by a generator, because Ctrl-C cannot
    interrupt the release when a generator is dropped.

    :param lock: An ``RLock``, which is acquired at once
    """

    def __init__(self, lock: Any) -> None:
        self._hold = _hold_lock(lock)
        next(self._hold)

    def release(self) -> None:
        """Release the lock."""
        self._hold.close()  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.release()
        return list, ()


def reduce_with_lock(lock: Any, reduce: Callable[[], Any]) -> Any:
    """Call ``reduce``, and hold the lock until pickle has written its result.

    :param lock: An ``RLock``
    :param reduce: Returns the value of ``__reduce_ex__``, whose third entry is a dictionary
    :return: The value of ``__reduce_ex__``, with the lock as entry ``"held"`` of that dictionary
    """
    held = HeldLock(lock)
    try:
        function, arguments, state, *rest = reduce()
    except BaseException:
        held.release()
        raise
    return function, arguments, {**state, "held": held}, *rest
