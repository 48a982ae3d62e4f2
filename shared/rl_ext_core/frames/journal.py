"""Journal of a store's elements, for recovery after a process was killed."""

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
_CRC = struct.Struct("<I")  # covers the fields and the pending places
_SLOT_BYTES = 64
_PLACE = np.dtype(np.int64)
_PLACES_OFFSET = PAGE  # where the list of pending places begins


class JournalRecord(NamedTuple):
    """Record of the valid elements at one time.

    :ivar sequence: Number of the record, counted from 1
    :ivar length: Number of valid elements along the first dimension
    :ivar next_row: Row that the next element is written to
    :ivar n_written: Number of rows that were ever written; later rows are untouched
    :ivar exposed: Whether elements may have changed without a new checksum; in a ring, only that at ``next_row``
    :ivar n_writing: Number of rows that are being written, and are not valid
    """

    sequence: int
    length: int
    next_row: int
    n_written: int
    exposed: int
    n_writing: int


class Journal:
    """The two latest records, in shared memory or in two files.

    A new record overwrites the older one, so the latest stays intact if the process is killed while it writes. Each
    record has a file of its own, so one of the files may be lost.

    :param n_rows: Number of rows along the first dimension
    :param files: File of one record and the pending places, and file of the other record; None for shared memory
    :raises StorageError: If a file cannot be used
    :raises CorruptFileError: If a file has another size
    """

    def __init__(self, n_rows: int, *, files: tuple[RegionFile, RegionFile] | None = None) -> None:
        self._n_rows = n_rows
        self._region: PrivateRegion = new_region(_PLACES_OFFSET + n_rows * _PLACE.itemsize, files and files[0])
        self._second_region = self._region if files is None else new_region(PAGE, files[1])
        self._map_regions()

    def _map_regions(self) -> None:
        """Create the views of both records and of the list of pending rows."""
        self._slots = []
        for number, region in enumerate((self._region, self._second_region)):
            page = region.array(0, (PAGE,), np.uint8)
            region.reserve(0, PAGE)
            self._slots.append(page[number * _SLOT_BYTES :][:_SLOT_BYTES])
        self._places = self._region.array(_PLACES_OFFSET, (self._n_rows,), _PLACE)

    def _compute_crc(self, fields: JournalRecord) -> int:
        """Return the CRC-32 of a record and of its pending rows."""
        return zlib.crc32(self._places[: fields.n_writing].data, zlib.crc32(_FIELDS.pack(*fields)))

    def _is_intact(self, slot: Any) -> bool:
        """Return whether the record in a slot matches its CRC, and its pending rows are valid."""
        fields = JournalRecord(*_FIELDS.unpack_from(slot.data))
        crc = _CRC.unpack_from(slot.data, _FIELDS.size)[0]
        if fields.n_writing > self._n_rows or crc != self._compute_crc(fields):
            return False
        places = self._places[: fields.n_writing]
        return bool(((places >= 0) & (places < self._n_rows)).all())

    def _latest_record(self) -> JournalRecord:
        """Return the record with the highest sequence number, without checking its checksum."""
        return max(JournalRecord(*_FIELDS.unpack_from(slot.data)) for slot in self._slots)

    def read(self) -> tuple[JournalRecord, Places]:
        """Return the latest intact record, and the rows that are being written.

        :raises CorruptFileError: If both records are damaged
        """
        for slot in self._slots:
            if not self._is_intact(slot):
                slot[:] = 0
        record = self._latest_record()
        if record.sequence == 0:
            raise CorruptFileError(
                f"{self._region.path} and {self._second_region.path} are damaged: their checksums do not match their "
                "contents; salvage the store to keep its intact part"
            )
        return record, self._places[: record.n_writing].copy()

    def _write_record(self, **changes: int) -> None:
        """Write the latest record with these changes over the older record."""
        latest = self._latest_record()
        fields = latest._replace(sequence=latest.sequence + 1, **changes)
        slot = self._slots[fields.sequence % 2].data
        _FIELDS.pack_into(slot, 0, *fields)
        _CRC.pack_into(slot, _FIELDS.size, self._compute_crc(fields))

    def write_all(self, *, length: int, next_row: int, n_written: int, exposed: bool) -> None:
        """Record all fields, with an empty list of rows that are being written."""
        self._write_record(length=length, next_row=next_row, n_written=n_written, exposed=int(exposed), n_writing=0)

    def reserve(self, n_places: int) -> None:
        """Reserve space for the list of pending rows.

        :raises StorageError: If the disk is full
        """
        self._region.refresh()
        self._region.reserve(_PLACES_OFFSET, n_places * _PLACE.itemsize)

    def begin_write(self, places: Places) -> None:
        """Record that these rows are being written, and are not valid until :meth:`end_write`."""
        self.reserve(len(places))
        n_written = max(self._latest_record().n_written, int(places.max(initial=-1)) + 1)
        self._places[: len(places)] = places
        self._write_record(n_written=n_written, n_writing=len(places))

    def end_write(self, length: int, next_row: int) -> None:
        """Record that the pending rows are valid, the number of elements, and the next row."""
        n_written = max(self._latest_record().n_written, length)
        self._write_record(length=length, next_row=next_row, n_written=n_written, n_writing=0)

    def mark_exposed(self) -> None:
        """Record that elements may change from now on without new checksums."""
        if not self._latest_record().exposed:
            self._write_record(exposed=1)

    def flush(self) -> None:
        """Write both records with the same contents, and clear ``exposed``.

        Either of them may be lost then.
        """
        for _ in self._slots:
            self._write_record(exposed=0)

    def __getstate__(self) -> dict[str, Any]:
        return {"_n_rows": self._n_rows, "_region": self._region, "_second_region": self._second_region}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_regions()
