"""Memory that is taken page by page as it is written, and that child processes can share, or find again in a file."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, OutOfMemoryError, StorageError

_STEP = 1 << 22  # bytes that are reserved in a file at a time


class Region:
    """A range of zeros as large as the worst case, of which only what is written takes memory.

    It belongs to this process until it is pickled for a child that is being started: then both see the same bytes.
    Without a file there is no name that others could find it by, so nothing is left behind by a process that is killed.

    :param n_bytes: its size.
    :param path: a file to keep it in, made where it does not exist; what is there is found again.
    :raises OutOfMemoryError: where the system refuses so large a range.
    :raises StorageError: if the file cannot be used, or another process uses it.
    :raises CorruptFileError: if the file has another size.
    """

    def __init__(self, n_bytes: int, *, path: Path | None = None) -> None:
        self.path = path
        descriptor = os.memfd_create("rl-ext-frames") if path is None else _opened_file(path)
        try:
            size = os.fstat(descriptor).st_size
            if size not in (0, n_bytes):
                raise CorruptFileError(
                    f"{path} has {size:,} bytes, expected {n_bytes:,}: it was cut short, or written to"
                )
            os.ftruncate(descriptor, n_bytes)
        except OSError:
            os.close(descriptor)
            raise _refused(n_bytes) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._open(descriptor, n_bytes)

    def _open(self, descriptor: int, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._reserved: dict[int, int] = {}
        try:
            self._map = mmap.mmap(descriptor, n_bytes)
        except OSError:
            self._close()
            raise _refused(n_bytes) from None

    @property
    def descriptor(self) -> int:
        """What the system calls it."""
        return self._descriptor

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A view of a part, which keeps the memory alive."""
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def reserve(self, offset: int, n_bytes: int) -> None:
        """Makes sure that a part of a file can be written to: writing to a mapping where the disk is full kills.

        :raises StorageError: if there is no room.
        """
        if self.path is None or self._reserved.get(offset, 0) >= n_bytes:
            return
        n_bytes = min(-(-n_bytes // _STEP) * _STEP, self.n_bytes - offset)
        try:
            os.posix_fallocate(self._descriptor, offset, n_bytes)
        except OSError as error:
            raise StorageError(
                f"cannot write to {self.path}: {error.strerror}. What was stored before is intact and nothing of this "
                "call is; make room there, or pass a storage_dir elsewhere"
            ) from error
        self._reserved[offset] = n_bytes

    def clear(self, start: int) -> None:
        """Gives memory back; every byte from a page's beginning on is zero again, in all processes."""
        self._reserved.clear()
        try:
            self._map.madvise(mmap.MADV_REMOVE, start)
        except OSError:  # some file systems cannot; a process that is killed in between leaves a short file there
            os.ftruncate(self._descriptor, start)
            os.ftruncate(self._descriptor, self.n_bytes)

    def unlock(self) -> None:
        """Lets others use the file. This process must not any more."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent, (reduction.DupFd(self._descriptor), self.n_bytes, self.path)


def _opened_file(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}; pass another storage_dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"{path} is used by another buffer; end it, or pass another storage_dir") from error
    return descriptor


def _refused(n_bytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"the system refuses {n_bytes:,} bytes of address space for frames, of which only what is written takes "
        "memory; pass a smaller max_size, or raise the limit (ulimit -v unlimited)"
    )


def _sent(descriptor: Any, n_bytes: int, path: Path | None) -> Region:
    region = Region.__new__(Region)
    region.path = path
    region._open(descriptor.detach(), n_bytes)
    return region
