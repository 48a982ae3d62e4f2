"""What a storage notes beside its elements, so that whoever comes after a process that was killed knows what counts."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames._region import Region

_FIELDS = struct.Struct("<QQQQQQ")  # a turn, the numbers of a note, and how many elements are being written
_SLOT = struct.Struct("<QQQQQQI4x")  # and their CRC-32
_SLOTS = (0, 64)
_PLACES = 4096  # where the places of elements that are being written begin
Places = npt.NDArray[np.int64]


class Note(NamedTuple):
    """What is noted.

    :ivar length: elements that count, along the first dimension.
    :ivar following: where the next one goes.
    :ivar touched: places from here on were never written.
    :ivar exposed: whether elements may have changed without notice.
    :ivar writing: places that are being written, and do not count.
    """

    length: int
    following: int
    touched: int
    exposed: bool
    writing: Places


class Marks:
    """Notes in shared memory, or in a file.

    The latest one is never overwritten, but the one before it: a process may be killed while it writes one.

    :param n_rows: places along the first dimension.
    :param path: the file.
    :raises StorageError: if the file cannot be used, or another process uses it.
    :raises CorruptFileError: if it has another size.
    """

    def __init__(self, n_rows: int, *, path: Path | None = None) -> None:
        self._n_rows = n_rows
        self._region = Region(_PLACES + n_rows * np.dtype(np.int64).itemsize, path=path)
        self._region.reserve(0, self._region.n_bytes)
        self._map()

    def _map(self) -> None:
        self._slots = self._region.array(0, (_PLACES,), np.uint8)
        self._places = self._region.array(_PLACES, (self._n_rows,), np.int64)

    def _crc(self, *fields: int) -> int:
        return zlib.crc32(self._places[: fields[-1]].data, zlib.crc32(_FIELDS.pack(*fields)))

    def _is_whole(self, start: int) -> bool:
        *fields, crc = _SLOT.unpack_from(self._slots.data, start)
        return fields[-1] <= self._n_rows and crc == self._crc(*fields)

    def _latest(self) -> int:
        """The slot that was written last."""
        return max(_SLOTS, key=lambda start: _SLOT.unpack_from(self._slots.data, start)[0])

    def read(self) -> Note:
        """The latest note that is whole.

        :raises CorruptFileError: if none is.
        """
        for start in _SLOTS:
            if not self._is_whole(start):
                self._slots[start : start + _SLOT.size] = 0
        turn, length, following, touched, exposed, n_writing = self._fields()
        if turn == 0:
            raise CorruptFileError(
                f"{self._region.path} is damaged: the checksums of its notes do not match their contents; salvage what "
                "is intact"
            )
        return Note(length, following, touched, bool(exposed), self._places[:n_writing].copy())

    def _fields(self) -> tuple[int, ...]:
        return _FIELDS.unpack_from(self._slots.data, self._latest())

    def _write(self, length: int, following: int, touched: int, exposed: int, n_writing: int) -> None:
        turn = self._fields()[0] + 1
        fields = turn, length, following, touched, exposed, n_writing
        _SLOT.pack_into(self._slots.data, _SLOTS[turn % 2], *fields, self._crc(*fields))

    def will_write(self, places: Places) -> None:
        """Notes which elements do not count until :meth:`written`."""
        _, length, following, touched, exposed, _ = self._fields()
        self._places[: len(places)] = places
        self._write(length, following, max(touched, int(places.max(initial=-1)) + 1), exposed, len(places))

    def written(self, length: int, following: int) -> None:
        """Notes that they count, how many elements there are, and where the next one goes."""
        _, _, _, touched, exposed, _ = self._fields()
        self._write(length, following, max(touched, length), exposed, 0)

    def expose(self) -> None:
        """Notes that elements may change without notice from now on."""
        _, length, following, touched, exposed, n_writing = self._fields()
        if not exposed:
            self._write(length, following, touched, 1, n_writing)

    def settle(self) -> None:
        """Notes twice what counts, so that damage to either note does no harm, and that elements do not change."""
        for _ in _SLOTS:
            _, length, following, touched, _, n_writing = self._fields()
            self._write(length, following, touched, 0, n_writing)

    def unlock(self) -> None:
        """Lets others use the file."""
        self._region.unlock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_n_rows": self._n_rows, "_region": self._region}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def noted_elements(path: Path) -> int:
    """How many elements count by a file of notes; 0 where there is none, or nothing in it that is whole."""
    n_rows = (path.stat().st_size - _PLACES) // np.dtype(np.int64).itemsize if path.exists() else 0
    if n_rows < 1:
        return 0
    marks = Marks(n_rows, path=path)
    try:
        return marks.read().length
    except CorruptFileError:
        return 0
    finally:
        marks.unlock()
