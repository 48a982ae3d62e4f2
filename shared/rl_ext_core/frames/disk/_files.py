"""Files whose errors say what is left and what to do."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames._state import Bytes

PREAD = ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value or 0


def refusal(path: Path, error: OSError, *, doing: str) -> StorageError:
    """The error for what the system refused."""
    return StorageError(
        f"cannot {doing} {path}: {error.strerror or error}. What was stored before is intact and nothing of this call "
        "is; make room there, or pass a storage_dir elsewhere"
    )


def damage(path: Path, what: str) -> CorruptFileError:
    """The error for a file that holds something else than was written."""
    return CorruptFileError(
        f"{path} is damaged: {what}. To keep what is intact: rl_ext_core.frames.salvage({str(path.parent)!r})"
    )


class File:
    """A file that is read and written in place.

    It is not mapped: pages of a mapping count as resident once they were read, a mapping of a file that was cut short
    ends the process where reading raises, and so does writing to one where the disk is full.

    :param path: made where it does not exist.
    :raises StorageError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise refusal(path, error, doing="open") from error

    @property
    def descriptor(self) -> int:
        """What the system calls it."""
        return self._fd

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, n_bytes: int) -> bytes:
        """
        :raises CorruptFileError: if the file ends before.
        :raises StorageError: if it cannot be read, or was closed.
        """
        try:
            data = os.pread(self._fd, n_bytes, offset)
            while len(data) < n_bytes and (more := os.pread(self._fd, n_bytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise refusal(self.path, error, doing="read") from error
        if len(data) < n_bytes:
            raise damage(self.path, f"it ends at byte {offset + len(data):,}, expected {offset + n_bytes:,}")
        return data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """
        :raises StorageError: if not all of it can be written.
        """
        data = memoryview(data)
        try:
            done = os.pwrite(self._fd, data, offset)
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            raise refusal(self.path, error, doing=f"write {len(data):,} bytes to") from error

    def truncate(self, n_bytes: int) -> None:
        """Cuts it short."""
        os.ftruncate(self._fd, n_bytes)

    def grow(self, n_bytes: int) -> None:
        """Makes it at least that long, without taking room on the disk.

        :raises StorageError: if a file may not be so long.
        """
        try:
            if self.size < n_bytes:
                os.ftruncate(self._fd, n_bytes)
        except OSError as error:
            raise refusal(self.path, error, doing=f"write {n_bytes:,} bytes to") from error

    def reserve(self, n_bytes: int) -> None:
        """Makes it that long, on the disk too: what is mapped must not run out of space while it is written.

        :raises StorageError: if there is no room.
        """
        try:
            os.posix_fallocate(self._fd, 0, n_bytes)
        except OSError as error:
            raise refusal(self.path, error, doing=f"reserve {n_bytes:,} bytes for") from error

    def mapped(self, n_bytes: int) -> mmap.mmap:
        """Its first bytes, shared with the file."""
        return mmap.mmap(self._fd, n_bytes)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._fd < 0

    def close(self) -> None:
        """Closes it; whatever is called later is refused."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Regions(list[Bytes]):
    """Regions of a file as arrays, mapped one after the other while somebody goes through them, pickled as a list.

    Pickle remembers all that it has written, so reading them would bring the whole file into memory.
    """

    def __init__(self, file: File, regions: list[tuple[int, int]]) -> None:
        super().__init__()
        self._file, self._regions = file, regions

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Bytes]:
        end = max((start + n_bytes for start, n_bytes in self._regions), default=0)
        if end > self._file.size:
            raise damage(self._file.path, f"it ends at byte {self._file.size:,}, expected {end:,}")
        if not end:
            yield from (np.zeros(0, dtype=np.uint8) for _ in self._regions)
            return
        mapping = self._file.mapped(end)
        contents = np.frombuffer(mapping, dtype=np.uint8)
        for start, n_bytes in self._regions:
            yield contents[start : start + n_bytes]
            mapping.madvise(mmap.MADV_DONTNEED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (), None, iter(self)
