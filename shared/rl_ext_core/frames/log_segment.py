"""Segments of a log: blocks of memory, or files that are mapped to memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.frames.checkpoint import FORMAT, format_error
from rl_ext_core.frames.log_state import SEGMENT_HEADER
from rl_ext_core.frames.memory import (
    address_of,
    as_storage_error,
    damaged_folder_error,
    out_of_memory_error,
    storage_error,
)

_MAGIC = 0x4C584C52
_HEADER = struct.Struct("<IIQI")  # magic number, format, number of the segment, words
SLACK_BYTES = 128  # readable bytes behind the contents, because kernels read in units of up to 32 bytes
_NAME = re.compile(r"(\d{12})\.log")


class Segment:
    """One segment of a log.

    :param n_words: Number of words, header included.
    :param folder: Folder of its file, or None for memory.
    :param number: Number of the segment, counted from the first one ever.
    :param memory: Shared memory to use, for at least so many words; or None.
    :ivar number: Its number.
    :ivar words: Its contents.
    :raises OutOfMemoryError: If there is not enough memory.
    :raises StorageError: If the disk is full.
    """

    def __init__(self, n_words: int, folder: Path | None, number: int, memory: Any = None) -> None:
        self.n_words, self.number, n_bytes = n_words, number, 4 * n_words + SLACK_BYTES
        self._path = None if folder is None else folder / f"{number:012d}.log"
        if memory is None:
            memory = _map_zeros(n_bytes) if self._path is None else _create_file(self._path, n_bytes)
        self._set_memory(memory)
        _HEADER.pack_into(self._bytes.data, 0, _MAGIC, FORMAT, number, n_words)

    def _set_memory(self, memory: Any) -> None:
        """Use mapped memory."""
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.words = self._bytes[: 4 * self.n_words].view(np.uint32)
        self.address = address_of(self._bytes)

    @classmethod
    def share(cls, memory: Any, number: int) -> Segment:
        """Use the shared memory of a segment that another process has opened."""
        segment = cls.__new__(cls)
        segment.number, segment._path = number, None
        segment.n_words = _HEADER.unpack_from(memory)[3]
        segment._set_memory(memory)
        return segment

    @classmethod
    def open(cls, file: SegmentFile) -> Segment:
        """Map an existing file.

        :raises StorageError: If it cannot be opened.
        """
        segment = cls.__new__(cls)
        segment.n_words, segment.number, segment._path = file.n_words, file.number, file.path
        try:
            descriptor = _system.open_file(file.path)
            try:
                segment._set_memory(_system.map_whole_file(descriptor, os.fstat(descriptor).st_size))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(file.path, error, doing="open") from error
        return segment

    def truncate(self, n_words: int) -> None:
        """Free the disk space behind the first words of a file, and the memory of all of it until it is read."""
        if self._path is None:
            return
        self.n_words = n_words
        _HEADER.pack_into(self._bytes.data, 0, *_HEADER.unpack_from(self._bytes.data)[:3], n_words)
        with contextlib.suppress(OSError):  # the space is only an optimization
            os.truncate(self._path, 4 * n_words + SLACK_BYTES)
        _system.unload_pages(self.address, 4 * n_words)

    def delete(self) -> None:
        """Delete the file, if there is one. The memory is freed with this object."""
        if self._path is not None:
            _system.remove_file(self._path)


class SegmentFile(NamedTuple):
    """Header of the file of a segment.

    :ivar path: Path of the file.
    :ivar number: Number of the segment.
    :ivar n_words: Number of words, header included.
    """

    path: Path
    number: int
    n_words: int


def list_files(folder: Path, *, has_gaps: bool = False) -> list[SegmentFile]:
    """Read the headers of all segments in a folder, in order.

    A file whose header was not written yet is left out.

    :param has_gaps: Whether files may be missing between others.
    :raises CorruptFileError: If a file is damaged or missing, or has another format.
    """
    found = []
    for path in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)):
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not any(header):
            continue
        magic, version, number, n_words = _HEADER.unpack(header)
        if magic == _MAGIC and version != FORMAT:
            raise format_error(path, version, FORMAT)
        size = path.stat().st_size
        is_right = magic == _MAGIC and number == int(path.stem) and n_words >= SEGMENT_HEADER
        if not is_right or size < 4 * n_words + SLACK_BYTES:
            raise damaged_folder_error(f"{path} is damaged: its header does not fit its name and its {size:,} bytes")
        found.append(SegmentFile(path, number, n_words))
    for before, after in itertools.pairwise(found):
        if after.number != before.number + 1 and not has_gaps:
            raise damaged_folder_error(f"{before.path} is not followed by file {before.number + 1}, which is missing")
    return found


def _map_zeros(n_bytes: int) -> Any:
    """Map private memory of zeros."""
    try:
        if _system.WINDOWS:
            return mmap.mmap(-1, n_bytes)
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        raise out_of_memory_error(n_bytes) from None


def _create_file(path: Path, n_bytes: int) -> Any:
    """Create a file of zeros with all its disk space, and map it."""
    with as_storage_error(path, doing="write"):
        descriptor = _system.open_file(path)
        try:
            os.ftruncate(descriptor, 0)
            _system.allocate_file_space(descriptor, 0, n_bytes)
            return _system.map_whole_file(descriptor, n_bytes)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)
