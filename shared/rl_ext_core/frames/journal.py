"""What counts of elements or transitions that lie in shared memory or in files, noted beside them, so that they can be
made whole after a process was killed.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames.region import PAGE, PrivateRegion, RegionFile, new_region

Places = npt.NDArray[np.int64]
_FIELDS = struct.Struct("<QQQQQQ")
_CRC = struct.Struct("<I")  # of the fields and of the places that are being written
_SLOT_BYTES = 64
_PLACE = np.dtype(np.int64)
_PLACES_OFFSET = PAGE  # where the places of elements that are being written begin


class JournalRecord(NamedTuple):
    """What is noted.

    :ivar sequence: which note it is, counted from 1.
    :ivar length: elements that count, along the first dimension.
    :ivar next_row: where the next one goes.
    :ivar n_written: places from here on were never written.
    :ivar exposed: whether elements may have changed without notice; of a ring, that at ``next_row``.
    :ivar n_writing: how many places are being written, and do not count.
    """

    sequence: int
    length: int
    next_row: int
    n_written: int
    exposed: int
    n_writing: int


class Journal:
    """Notes in shared memory, or in files.

    The latest one is never overwritten, but the one before it: a process may be killed while it writes one. In files
    each of the two lies in its own, so that one of these may be lost.

    :param n_rows: places along the first dimension.
    :param files: the file of one note and of places, and that of the other note.
    :raises StorageError: if the file cannot be used.
    :raises CorruptFileError: if it has another size.
    """

    def __init__(self, n_rows: int, *, files: tuple[RegionFile, RegionFile] | None = None) -> None:
        self._n_rows = n_rows
        self._region: PrivateRegion = new_region(_PLACES_OFFSET + n_rows * _PLACE.itemsize, files and files[0])
        self._second_region = self._region if files is None else new_region(PAGE, files[1])
        self._map_regions()

    def _map_regions(self) -> None:
        self._slots = []
        for number, region in enumerate((self._region, self._second_region)):
            page = region.array(0, (PAGE,), np.uint8)
            region.reserve(0, PAGE)
            self._slots.append(page[number * _SLOT_BYTES :][:_SLOT_BYTES])
        self._places = self._region.array(_PLACES_OFFSET, (self._n_rows,), _PLACE)

    def _compute_crc(self, fields: JournalRecord) -> int:
        return zlib.crc32(self._places[: fields.n_writing].data, zlib.crc32(_FIELDS.pack(*fields)))

    def _is_intact(self, slot: Any) -> bool:
        fields = JournalRecord(*_FIELDS.unpack_from(slot.data))
        crc = _CRC.unpack_from(slot.data, _FIELDS.size)[0]
        if fields.n_writing > self._n_rows or crc != self._compute_crc(fields):
            return False
        places = self._places[: fields.n_writing]
        return bool(((places >= 0) & (places < self._n_rows)).all())

    def _latest_record(self) -> JournalRecord:
        return max(JournalRecord(*_FIELDS.unpack_from(slot.data)) for slot in self._slots)

    def read(self) -> tuple[JournalRecord, Places]:
        """Return the latest note that is whole, and the places that are being written.

        :raises CorruptFileError: if none is.
        """
        for slot in self._slots:
            if not self._is_intact(slot):
                slot[:] = 0
        record = self._latest_record()
        if record.sequence == 0:
            raise CorruptFileError(
                f"{self._region.path} and the file beside it are damaged: the checksums of their notes do not match "
                "their contents; salvage what is intact"
            )
        return record, self._places[: record.n_writing].copy()

    def _write_record(self, **changes: int) -> None:
        latest = self._latest_record()
        fields = latest._replace(sequence=latest.sequence + 1, **changes)
        slot = self._slots[fields.sequence % 2].data
        _FIELDS.pack_into(slot, 0, *fields)
        _CRC.pack_into(slot, _FIELDS.size, self._compute_crc(fields))

    def record(self, *, length: int, next_row: int, n_written: int, exposed: bool) -> None:
        """Note all of that at once; nothing else is being written."""
        self._write_record(length=length, next_row=next_row, n_written=n_written, exposed=int(exposed), n_writing=0)

    def reserve(self, n_places: int) -> None:
        """Make sure that so many places can be noted.

        :raises StorageError: if there is no room on the disk.
        """
        self._region.refresh()
        self._region.reserve(_PLACES_OFFSET, n_places * _PLACE.itemsize)

    def begin_write(self, places: Places) -> None:
        """Note which elements do not count until :meth:`end_write`."""
        self.reserve(len(places))
        n_written = max(self._latest_record().n_written, int(places.max(initial=-1)) + 1)
        self._places[: len(places)] = places
        self._write_record(n_written=n_written, n_writing=len(places))

    def end_write(self, length: int, next_row: int) -> None:
        """Note that they count, how many elements there are, and where the next one goes."""
        n_written = max(self._latest_record().n_written, length)
        self._write_record(length=length, next_row=next_row, n_written=n_written, n_writing=0)

    def mark_exposed(self) -> None:
        """Note that elements may change without notice from now on."""
        if not self._latest_record().exposed:
            self._write_record(exposed=1)

    def flush(self) -> None:
        """Note twice what counts, so that damage to either note does no harm, and that elements do not change."""
        for _ in self._slots:
            self._write_record(exposed=0)

    def __getstate__(self) -> dict[str, Any]:
        return {"_n_rows": self._n_rows, "_region": self._region, "_second_region": self._second_region}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_regions()
