"""Checkpoints of stores, with checksums; loading one does not run code from the file."""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from rl_ext_core._interrupts import run_pending_handlers
from rl_ext_core.errors import CorruptFileError, MissingDependencyError, RlExtError, StorageError

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


_S = TypeVar("_S")

# All classes and functions that a checkpoint may refer to. Another one would run code that this project did not write.
_ALLOWED_GLOBALS = {
    ("builtins", "list"),
    ("rl_ext_core.frames.store", "FrameStore"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("numeric", "_frombuffer"),
            ("multiarray", "_reconstruct"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that refuses classes and functions that stores do not use."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which stores do not use")
        return super().find_class(module, name)


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


class _InterruptibleFile:
    """File that runs deferred signal handlers before each write, since writing takes long.

    If a handler raises, the caller discards the partial file.

    :param file: File opened for writing bytes
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write bytes, and return their number."""
        run_pending_handlers()
        return self._file.write(data)


def _dump(store: Any, file: BinaryIO) -> None:
    """Pickle a store to an open file; handlers of deferred signals run between writes."""
    # Protocol 5 writes views of arrays without copying them.
    pickle.dump(store, _InterruptibleFile(file), protocol=5)


def save(store: Any, file: str | os.PathLike[str] | BinaryIO) -> None:
    """Write a store to a path or an open file.

    An existing file is replaced only once the new one is complete.

    :raises StorageError: If the file cannot be written
    """
    if not isinstance(file, (str, os.PathLike)):
        _dump(store, file)
        return
    path = Path(file)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as opened:
            _dump(store, opened)
        part.replace(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. An older file there is unchanged; free disk space, or "
            "pass another path"
        ) from error
    finally:
        part.unlink(missing_ok=True)


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


def load(cls: type[_S], file: str | os.PathLike[str] | BinaryIO) -> _S:
    """Read a store from a path or an open file.

    :raises CorruptFileError: If the file is damaged, or contains something else
    """
    with _open_for_reading(file) as opened, as_corrupt_pickle(file, "store", written_by=f"{cls.__name__}.save(path)"):
        store = _Unpickler(opened).load()
    if not isinstance(store, cls):
        raise CorruptFileError(f"{file} contains a {type(store).__name__}, expected a {cls.__name__}")
    return store


@contextlib.contextmanager
def _open_for_reading(file: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    """Open a path within the context; leave a file that is already open as it is."""
    if isinstance(file, (str, os.PathLike)):
        with Path(file).open("rb") as opened:
            yield opened
    else:
        yield file
