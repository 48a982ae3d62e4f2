"""Stores in files of their own: checkpoints, which are checksummed, and read without running what they hold."""

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

FORMAT_VERSION = 4


def checksum(state: Any) -> int:
    """CRC-32 of nested containers of arrays and plain values, without its own entry and that of a held lock."""
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


def check_format(state: Any) -> None:
    """Refuses what this version does not read.

    :raises CorruptFileError: if it is of another format, or of none.
    """
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise CorruptFileError(
            f"the frame store has format {version!r}, this version reads {FORMAT_VERSION}; load it with the version of "
            "rl-ext that wrote it"
        )


_S = TypeVar("_S")

# What a file of a store refers to. Anything else would be somebody else's program.
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
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of a store")
        return super().find_class(module, name)


def _lock_held(lock: Any) -> Iterator[None]:
    with lock:
        yield


class HeldLock:
    """Comes last in a state that is made of views: until pickle has come to it, nobody else may change what they show.

    Where the state is dropped before, this goes with it, and the lock is free. (A generator that is dropped ends its
    ``with`` without a step in which Ctrl-C could keep it from that.)

    :param lock: an ``RLock``; taken at once.
    """

    def __init__(self, lock: Any) -> None:
        self._hold = _lock_held(lock)
        next(self._hold)

    def release(self) -> None:
        """Lets others change it."""
        self._hold.close()  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.release()
        return list, ()


def reduce_with_lock(lock: Any, reduce: Callable[[], Any]) -> Any:
    """What ``__reduce_ex__`` returns, and nobody else may take the lock until pickle has written it.

    :param lock: an ``RLock``.
    :param reduce: returns an object in parts, of which the third is a dictionary.
    """
    held = HeldLock(lock)
    try:
        function, arguments, state, *rest = reduce()
    except BaseException:
        held.release()
        raise
    return function, arguments, {**state, "held": held}, *rest


class _InterruptibleFile:
    """A file in which each write is a place to stop at: writing takes long, and what was written is thrown away then.

    :param file: opened for writing bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """See :meth:`io.RawIOBase.write`."""
        run_pending_handlers()
        return self._file.write(data)


def _dump(store: Any, file: BinaryIO) -> None:
    # Pickle writes views of arrays as they are from protocol 5 on.
    pickle.dump(store, _InterruptibleFile(file), protocol=5)


def save(store: Any, file: str | os.PathLike[str] | BinaryIO) -> None:
    """Writes a store to a file; see :meth:`FrameStore.save`."""
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
            f"cannot write {path}: {error.strerror or error}. What was there before is intact; make room, or pass a "
            "path elsewhere"
        ) from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def as_corrupt_pickle(file: Any, what: str, *, written_by: str) -> Iterator[None]:
    """Call whatever goes wrong meanwhile damage: altered bytes can make pickle do anything.

    :param file: that is read.
    :param what: it holds.
    :param written_by: the line that writes such a file.
    :raises MissingDependencyError: if NumPy 2 wrote it, and this is an older one.
    :raises CorruptFileError: where something else goes wrong; the project's own exceptions and those of files pass.
    """
    try:
        yield
    except (RlExtError, OSError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("numpy._core"):
            raise MissingDependencyError(
                f"{file} was written with NumPy 2, whose arrays NumPy {np.__version__} does not read; the file may be "
                "whole: pip install 'numpy>=2', and read it again"
            ) from error
        raise CorruptFileError(
            f"{file} is cut short, damaged, or no {what} ({type(error).__name__}: {error}); write it with {written_by}"
        ) from error


def load(cls: type[_S], file: str | os.PathLike[str] | BinaryIO) -> _S:
    """Reads a store; see :meth:`FrameStore.load`."""
    with _open_for_reading(file) as opened, as_corrupt_pickle(file, "store", written_by=f"{cls.__name__}.save(path)"):
        store = _Unpickler(opened).load()
    if not isinstance(store, cls):
        raise CorruptFileError(f"{file} holds a {type(store).__name__}, expected a {cls.__name__}")
    return store


@contextlib.contextmanager
def _open_for_reading(file: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(file, (str, os.PathLike)):
        with Path(file).open("rb") as opened:
            yield opened
    else:
        yield file
