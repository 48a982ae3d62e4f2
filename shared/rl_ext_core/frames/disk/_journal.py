"""The journal: records that say what in the other files counts, each with a checksum.

A record is ``[kind: u32][size: u32][crc: u32]`` and its contents. Numbers are little-endian. Transitions are counted
from the first one that the store was ever given; frames and blocks likewise, for each environment.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames.disk._files import File, damage

FORMAT_VERSION = 1

START = 1  # JSON: format, options, settings, generation of the frames' files, and the row arrays
ARRAY = 2  # JSON: name, shape and dtype of a row array
REFERENCE = 3  # number and CRC-32 of a reference frame
BLOCK = 4  # where a sealed block lies
ROWS = 5  # number of the first transition, and then for each one its entries and the checksum of its row
FIRST = 6  # number of the oldest transition that counts
REDO = 7  # number of a transition that will be stored again, and so will all that follow

_HEADER = struct.Struct("<III")
_NUMBER = struct.Struct("<Q")
_REFERENCE = struct.Struct("<II")
_BLOCK = struct.Struct("<IIQQIIII")

BLOCK_RECORD = np.dtype(
    [
        ("env", "<u4"),
        ("reference", "<u4"),
        ("number", "<u8"),
        ("slab", "<u8"),  # where it begins in the file
        ("slab_bytes", "<u4"),
        ("offset", "<u4"),
        ("n_bytes", "<u4"),
        ("crc", "<u4"),
    ]
)


def record(kind: int, contents: bytes) -> bytes:
    """One record."""
    crc = zlib.crc32(contents, kind)
    return _HEADER.pack(kind, len(contents), crc) + contents


def records(data: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Where each record ends, its kind and its contents, up to the first one that is damaged or cut short."""
    view, at = memoryview(data), 0
    while at + _HEADER.size <= len(view):
        kind, size, crc = _HEADER.unpack_from(view, at)
        contents = view[at + _HEADER.size : at + _HEADER.size + size]
        if len(contents) < size or zlib.crc32(contents, kind) != crc:
            return
        at += _HEADER.size + size
        yield at, kind, contents


def json_record(kind: int, contents: dict[str, Any]) -> bytes:
    """A record of plain values."""
    return record(kind, json.dumps(contents).encode())


def number_record(kind: int, number: int) -> bytes:
    """A record of one number."""
    return record(kind, _NUMBER.pack(number))


def reference_record(number: int, crc: int) -> bytes:
    """A record of one reference frame."""
    return record(REFERENCE, _REFERENCE.pack(number, crc))


def block_record(*fields: int) -> bytes:
    """A record of one block, from the fields of ``BLOCK_RECORD``."""
    return record(BLOCK, _BLOCK.pack(*fields))


def rows_record(first: int, entries: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint32]) -> bytes:
    """A record of transitions that follow each other."""
    return record(ROWS, _NUMBER.pack(first) + entries.astype("<u8").tobytes() + sums.astype("<u4").tobytes())


@dataclass
class Contents:
    """What a journal says.

    :ivar committed: number of the transition after the newest one that counts.
    :ivar first: number of the oldest one that counts, but for those that were overwritten since.
    :ivar index: (capacity, n_envs) entries of the transitions, as in the store.
    :ivar sums: (capacity,) checksums of their rows.
    """

    start: dict[str, Any]
    index: npt.NDArray[np.uint64]
    sums: npt.NDArray[np.uint32]
    arrays: dict[str, list[Any]]
    references: dict[int, int] = field(default_factory=dict)
    blocks: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=BLOCK_RECORD))
    committed: int = 0
    first: int = 0
    n_bytes: int = 0  # of the journal, up to the end of the last record

    def add_rows(self, contents: memoryview) -> None:
        """Takes a record of kind ROWS."""
        capacity, n_envs = self.index.shape
        first = _NUMBER.unpack_from(contents)[0]
        count = (len(contents) - _NUMBER.size) // (8 * n_envs + 4)
        places = np.arange(first, first + count) % capacity
        entries = np.frombuffer(contents, "<u8", count * n_envs, _NUMBER.size)
        self.index[places] = entries.reshape(count, n_envs)
        self.sums[places] = np.frombuffer(contents, "<u4", count, _NUMBER.size + entries.nbytes)
        self.committed = first + count


def read(file: File, *, whole: int | None) -> Contents:
    """What a journal says, up to its end or to the first damaged record.

    :param whole: bytes that are known to have been written; a journal that is damaged before is refused. None takes
        what can be read.
    :raises CorruptFileError: if it is damaged, or of another format.
    """
    data = file.read(0, file.size)
    found, blocks = None, bytearray()
    for end, kind, contents in records(data):
        if kind == START:
            found = _started(file, json.loads(bytes(contents)))
        elif found is None:
            break
        elif kind == ARRAY:
            name, shape, dtype = json.loads(bytes(contents)).values()
            found.arrays[name] = [shape, dtype]
        elif kind == REFERENCE:
            number, crc = _REFERENCE.unpack(contents)
            found.references[number] = crc
        elif kind == BLOCK:
            blocks += contents
        elif kind == ROWS:
            found.add_rows(contents)
        elif kind == FIRST:
            found.first = _NUMBER.unpack(contents)[0]
        elif kind == REDO:
            found.committed = _NUMBER.unpack(contents)[0]
        if found is not None:
            found.n_bytes = end
    good = 0 if found is None else found.n_bytes
    if found is None or (whole is not None and good < whole):
        raise damage(file.path, f"what follows byte {good:,} of {whole or len(data):,} is cut short or altered")
    found.blocks = np.frombuffer(bytes(blocks), dtype=BLOCK_RECORD)
    return found


def _started(file: File, start: dict[str, Any]) -> Contents:
    if start.get("format") != FORMAT_VERSION:
        raise CorruptFileError(
            f"{file.path} has format {start.get('format')!r}, this version reads {FORMAT_VERSION}; open the folder "
            "with the version of rl-ext that wrote it"
        )
    capacity, n_envs = start["settings"]["capacity"], start["settings"]["n_envs"]
    index = np.zeros((capacity, n_envs), dtype=np.uint64)
    return Contents(start, index, np.zeros(capacity, dtype=np.uint32), dict(start["arrays"]))


class Journal:
    """A journal that is written to. A record that cannot be written leaves no trace.

    :param file: the file.
    :param n_bytes: where it ends; what follows is cut off.
    """

    def __init__(self, file: File, n_bytes: int) -> None:
        self.file, self.n_bytes = file, n_bytes
        file.truncate(n_bytes)

    def append(self, data: bytes) -> None:
        """Writes records.

        :raises StorageError: if they cannot be written.
        """
        try:
            self.file.write(self.n_bytes, data)
        except BaseException:
            self.file.truncate(self.n_bytes)
            raise
        self.n_bytes += len(data)
