"""Formats, checksums and errors of what stores save."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_ext_core.errors import CorruptFileError, MissingDependencyError, RlExtError

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


@contextlib.contextmanager
def as_corrupt_pickle(file: Any, what: str, *, written_by: str) -> Iterator[None]:
    """Within the context, raise ``CorruptFileError`` instead of errors of unpickling.

    Unpickling damaged bytes can fail in arbitrary ways.

    ``OSError`` and this project's own exceptions are not changed.

    :param file: File that is read
    :param what: Name of its contents, such as ``"store"``
    :param written_by: Call that writes such a file
    :raises MissingDependencyError: If the file was written with NumPy 2, and the installed one is older
    :raises CorruptFileError: If anything else fails
    """
    try:
        yield
    except (RlExtError, OSError):
        raise
    except Exception as error:
        # A damaged name of a module can begin like NumPy 2's.
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing.startswith("numpy._core") and int(np.__version__.partition(".")[0]) < 2:
            raise MissingDependencyError(
                f"{file} was written with NumPy 2, whose arrays NumPy {np.__version__} cannot read; run "
                "pip install 'numpy>=2', and load it again"
            ) from error
        raise CorruptFileError(
            f"{file} is truncated, damaged, or not a {what} ({type(error).__name__}: {error}); write it with "
            f"{written_by}"
        ) from error
