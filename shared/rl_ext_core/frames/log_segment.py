"""Segments of a log: blocks of memory, or files that are mapped to memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.frames.checkpoint import FORMAT, format_error
from rl_ext_core.frames.log_state import SEGMENT_HEADER
from rl_ext_core.frames.memory import (
    address_of,
    damaged_folder_error,
    map_file,
    out_of_memory_error,
)

_MAGIC = 0x4C584C52
_HEADER = struct.Struct("<IIQI")  # magic number, format, number of the segment, words
_N_WORDS = 4  # word of the header that contains the number of words
SLACK_BYTES = 128  # readable bytes behind the contents, because kernels read in units of up to 32 bytes
_NAME = re.compile(r"(\d{12})\.log")


class Segment:
    """One segment of a log.

    :param memory: Object with the buffer protocol, whose memory contains the segment and ``SLACK_BYTES``.
    :param n_words: Number of words, header included.
    :param number: Number of the segment, counted from the first one ever.
    :param path: Path of its file, or None for memory.
    :ivar words: Its contents.
    """

    def __init__(self, memory: Any, n_words: int, number: int, path: Path | None = None) -> None:
        self.n_words, self.number, self.path = n_words, number, path
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.words = self._bytes[: 4 * n_words].view(np.uint32)
        self.address = address_of(self._bytes)

    @classmethod
    def create(cls, n_words: int, folder: Path | None, number: int, memory: Any = None) -> Segment:
        """Create an empty segment, as a file if there is a folder, and otherwise in shared or new memory.

        :param memory: Shared memory for at least so many words, or None.
        :raises OutOfMemoryError: If there is not enough memory.
        :raises StorageError: If the disk is full.
        """
        n_bytes = 4 * n_words + SLACK_BYTES
        path = None if folder is None else folder / f"{number:012d}.log"
        if memory is None:
            memory = _map_zeros(n_bytes) if path is None else _create_file(path, n_bytes)
        segment = cls(memory, n_words, number, path)
        header = np.frombuffer(_HEADER.pack(_MAGIC, FORMAT, number, n_words), dtype=np.uint32)
        segment.words[1 : len(header)] = header[1:]
        segment.words[0] = _MAGIC  # last: a process that is killed before it leaves no header
        return segment

    @classmethod
    def share(cls, memory: Any, number: int) -> Segment:
        """Use the shared memory of a segment that another process has opened."""
        return cls(memory, _HEADER.unpack_from(memory)[3], number)

    def truncate(self, n_words: int) -> None:
        """Free the disk space behind the first words of a file, and the memory of all of it until it is read."""
        if self.path is None:
            return
        self.n_words = n_words
        self.words[_N_WORDS] = n_words
        with contextlib.suppress(OSError):  # the space is only an optimization
            os.truncate(self.path, 4 * n_words + SLACK_BYTES)
        _system.unload_pages(self.address, 4 * n_words)

    def delete(self) -> None:
        """Delete the file, if there is one. The memory is freed with this object."""
        if self.path is not None:
            _system.remove_file(self.path)


def open_segments(folder: Path, *, has_gaps: bool) -> list[Segment]:
    """Map the files of all segments in a folder, in order.

    A file whose header was not written yet is left out.

    :param has_gaps: Whether files may be missing between others.
    :raises CorruptFileError: If a file is damaged or missing, or has another format.
    :raises StorageError: If a file cannot be opened.
    """
    found: list[Segment] = []
    for path in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)):
        with path.open("rb") as file:
            start = file.read(4 * SEGMENT_HEADER + 8)
        header, first_record = start[: _HEADER.size], start[4 * SEGMENT_HEADER :]
        if len(header) < _HEADER.size or not (any(header[:4]) or any(first_record)):
            continue
        magic, version, number, n_words = _HEADER.unpack(header)
        if magic == _MAGIC and version != FORMAT:
            raise format_error(path, version, FORMAT)
        size = path.stat().st_size
        is_right = magic == _MAGIC and number == int(path.stem) and n_words >= SEGMENT_HEADER
        if not is_right or size < 4 * n_words + SLACK_BYTES:
            raise damaged_folder_error(f"{path} is damaged: its header does not fit its name and its {size:,} bytes")
        if found and number != found[-1].number + 1 and not has_gaps:
            before = found[-1]
            raise damaged_folder_error(f"{before.path} is not followed by file {before.number + 1}, which is missing")
        found.append(Segment(map_file(path, size, allocate=False), n_words, number, path))
    return found


def _map_zeros(n_bytes: int) -> Any:
    try:
        if _system.WINDOWS:
            return mmap.mmap(-1, n_bytes)
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        raise out_of_memory_error(n_bytes) from None


def _create_file(path: Path, n_bytes: int) -> Any:
    """Create a file of zeros with all its disk space, and map it."""
    try:
        path.unlink(missing_ok=True)  # a killed process may have left it
        return map_file(path, n_bytes)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
