"""Memory regions that grow as they are written: private, shared with child processes, or in a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core._system import PAGE
from rl_ext_core.errors import CorruptFileError, OutOfMemoryError, StorageError
from rl_ext_core.resources import NO_SPACE, write_problem

__all__ = [
    "PAGE",
    "PrivateRegion",
    "Region",
    "RegionFile",
    "address_of",
    "allocate",
    "copy_and_free",
    "new_region",
    "round_to_pages",
    "storage_error",
]

_Pointer = ctypes.c_size_t
_HEADER = object.__basicsize__
_COPY_CHUNK = 1 << 20  # bytes at a time


def round_to_pages(n_bytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of an array's memory."""
    # This reads the first field after the object header, as ``PyArray_DATA`` does. ``__array_interface__`` takes ten
    # times as long.
    return _Pointer.from_address(id(array) + _HEADER).value


def copy_and_free(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy bytes. If pickle has just read the source from a file, free its memory on the way.

    Nothing else refers to such a source, and keeping it would double the memory.

    :param target: Bytes to write to.
    :param source: Bytes of the same length.
    """
    base: Any = source
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    just_read = isinstance(owner, bytearray) and source.flags.writeable and source.flags.c_contiguous
    start = address_of(source)
    for at in range(0, len(source), _COPY_CHUNK):
        stop = min(at + _COPY_CHUNK, len(source))
        target[at:stop] = source[at:stop]
        first, last = -(-(start + at) // PAGE) * PAGE, (start + stop) // PAGE * PAGE
        if just_read and first < last:
            _system.discard_pages(first, last - first)


def storage_error(path: Path | str, error: OSError, *, doing: str) -> StorageError:
    """Create the error for a failed file operation.

    :param path: The file.
    :param error: Error of the system.
    :param doing: Verb for the message, such as ``"open"``.
    """
    has_space = error.errno is not None and error.errno not in NO_SPACE
    why = write_problem(Path(os.path.abspath(path)), error) if has_space else error.strerror or error
    return StorageError(
        f"cannot {doing} {path}: {why}. Data that was stored before this call is intact, and nothing of this call was "
        f"stored. {'P' if has_space else 'Free some space there, or p'}ass another storage_dir"
    )


def allocate(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Create an uninitialized array of bytes.

    :raises OutOfMemoryError: If there is not enough memory.
    """
    try:
        return np.empty(n_bytes, dtype=np.uint8)
    except MemoryError:
        raise _out_of_memory_error(n_bytes) from None


def _out_of_memory_error(n_bytes: int) -> OutOfMemoryError:
    """Build the error for a failed allocation of that many bytes."""
    return OutOfMemoryError(
        f"no memory for another {n_bytes:,} bytes. Data that was stored before this call is intact, and nothing of "
        "this call was stored. Pass a smaller buffer_size."
    )


class PrivateRegion:
    """Zeroed address range of one process. Only pages that are written to take memory.

    :param n_bytes: Size of the range.
    :raises OutOfMemoryError: If the system refuses so large a range.
    """

    path: Path | None = None
    version = 0  # changes when the region grows
    n_bytes: int
    _map: Any
    _parts: dict[int, int]  # reserved bytes by offset of the part, on systems that must reserve memory

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self._parts = n_bytes, {}
        try:
            self._addresses = _system.Addresses(round_to_pages(n_bytes), writable=True)
        except OSError:
            raise _address_space_error(n_bytes) from None
        self._map = self._addresses.memory

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Create a view of a part of the region, which keeps the memory alive.

        :param offset: Start of the part.
        :param shape: Shape of the view.
        :param dtype: Dtype of the view.
        """
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def reserved_bytes(self, offset: int) -> int:
        """Return how many bytes of the part at an offset are reserved.

        :param offset: Start of the part.
        """
        return self.n_bytes - offset if _system.COMMITS_LAZILY else self._parts.get(offset, 0)

    def reserve(self, offset: int, n_bytes: int) -> None:
        """Reserve the first bytes of a part.

        :param offset: Start of the part, as in :meth:`array`.
        :param n_bytes: Number of bytes that will be used.
        :raises StorageError: If the disk is full.
        :raises OutOfMemoryError: If there is not enough memory.
        """
        held = self.reserved_bytes(offset)
        if held >= n_bytes:
            return
        more = _growth(held, n_bytes)
        try:
            self._addresses.commit(offset + held, min(more, round_to_pages(self.n_bytes) - offset - held))
        except OSError:
            raise _out_of_memory_error(more) from None
        self._parts[offset] = held + more

    def refresh(self) -> None:
        """Do nothing, because no other process can reserve memory here."""

    def clear(self, start: int) -> None:
        """Free memory, and zero all bytes from ``start`` on, which is the start of a page."""
        self.discard(start, self.n_bytes - start)

    def discard(self, start: int, n_bytes: int) -> None:
        """Free whole pages. Their contents are undefined afterwards."""
        self._addresses.discard(start, n_bytes)

    def page_out(self, offset: int) -> None:
        """Do nothing, because there is no file to page out to."""


class Region(PrivateRegion):
    """Zeroed address range that child processes can share. Only pages that are written to take memory.

    A child process that receives the pickled region when it starts sees the same bytes. The memory has no name in the
    file system, so a killed process leaves nothing behind.

    :param n_bytes: Size of the range.
    :raises OutOfMemoryError: If the system refuses so large a range.
    """

    def __init__(self, n_bytes: int) -> None:
        descriptor, _ = _system.new_memory_file("rl-ext-frames")
        try:
            os.ftruncate(descriptor, n_bytes)
        except OSError:
            os.close(descriptor)
            raise _address_space_error(n_bytes) from None
        self._open(descriptor, n_bytes)

    def _open(self, descriptor: int, n_bytes: int) -> None:
        """Map the file of a descriptor, which is closed together with this object."""
        self.n_bytes = n_bytes
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            self._map = self._map_memory()
        except OSError:
            self._close()
            raise _address_space_error(n_bytes) from None

    def _map_memory(self) -> Any:
        """Map the whole file, and return the mapping."""
        return mmap.mmap(self._descriptor, self.n_bytes)

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory."""
        return self._descriptor

    def clear(self, start: int) -> None:
        """Free memory in all processes, and zero all bytes from ``start`` on, which is the start of a page."""
        try:
            self._map.madvise(mmap.MADV_REMOVE, start)
        except (OSError, AttributeError):
            os.ftruncate(self._descriptor, start)
            os.ftruncate(self._descriptor, self.n_bytes)

    def discard(self, start: int, n_bytes: int) -> None:
        """Do nothing, because other processes may use the pages."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_region, (type(self), _system.picklable_descriptor(self._descriptor), self.n_bytes, self.path)


# A file starts with a header, a word of counts, and a table with one entry per piece. The pieces follow the table.
_HEAD = struct.Struct("<8s16sQI4x")  # magic, identity, bytes of the range, CRC-32
_COUNTS_AT = _HEAD.size  # one word: number of calls of clear(), number of pieces, and CRC-32 of both
_ENTRY = struct.Struct("<QQI4x")  # offset of the part, size of the piece, CRC-32 of all entries up to this one
_TABLE_AT = 64
_TABLE_BYTES = 1 << 16
_MAGIC = b"rl-ext-4"


class RegionFile(NamedTuple):
    """Path and options of the file that a region is stored in.

    :ivar path: Path, created if it does not exist. An existing file keeps its contents.
    :ivar identity: 16 bytes that identify the storage that the file belongs to.
    :ivar repair: Whether to extend a file that was cut short.
    :ivar lenient: Whether writes outside of reserved memory are lost, instead of ending the process.
    """

    path: Path
    identity: bytes = bytes(16)
    repair: bool = False
    lenient: bool = False


def new_region(n_bytes: int, file: RegionFile | None = None, *, private: bool = False) -> PrivateRegion:
    """Create a region.

    :param n_bytes: Size of the range.
    :param file: File of the region, or None for memory.
    :param private: Whether the memory is not shared with child processes.
    """
    if file is not None:
        return FileRegion(n_bytes, file)
    if private:
        return PrivateRegion(n_bytes)
    return Region(n_bytes) if _system.COMMITS_LAZILY else GrowingRegion(n_bytes)


class FileRegion(Region):
    """Region in a file that grows as memory is reserved.

    A part is the memory of one :meth:`array`. The file consists of pieces in the order of their reservation, and each
    piece continues a part. Bytes that are not reserved read as zeros, and writing to them ends the process. The owner
    must ensure that no other storage opens the file.

    :param n_bytes: Size of the range.
    :param file: File of the region.
    :raises StorageError: If the file cannot be used.
    :raises CorruptFileError: If the file is damaged, cut short, or belongs to another storage.
    """

    _writable = False  # whether bytes that are not reserved can be written to
    _name: Path | str

    def __init__(self, n_bytes: int, file: RegionFile) -> None:
        self.path, identity, repair, lenient = file
        self._name, self._writable = file.path, lenient
        try:
            descriptor = _system.open_file(file.path)
        except OSError as error:
            raise storage_error(self._name, error, doing="open") from error
        self._initialize(descriptor, round_to_pages(n_bytes), identity, repair=repair)

    def _initialize(self, descriptor: int, n_bytes: int, identity: bytes, *, repair: bool = False) -> None:
        """Write the header of a new file or check an existing one, then map the file."""
        try:
            head = _HEAD.pack(_MAGIC, identity, n_bytes, 0)
            head = _HEAD.pack(_MAGIC, identity, n_bytes, zlib.crc32(head))
            size = os.fstat(descriptor).st_size
            if size == 0:
                self._allocate_file(descriptor, 0, _TABLE_BYTES)
                _system.write_at(descriptor, head + struct.pack("<Q", _pack_counts(0, 0)), 0)
            else:
                self._check_header(descriptor, size, head, repair=repair)
        except BaseException:
            os.close(descriptor)
            raise
        self._open(descriptor, n_bytes)

    def _allocate_file(self, descriptor: int, offset: int, n_bytes: int) -> None:
        """Allocate disk space for a part of the file; raise ``StorageError`` if there is none."""
        try:
            _system.allocate_file_space(descriptor, offset, n_bytes)
        except OSError as error:
            raise storage_error(self._name, error, doing=f"write {n_bytes:,} bytes to") from error

    def _check_header(self, descriptor: int, size: int, expected: bytes, *, repair: bool) -> None:
        """Raise if the file's header is damaged, or of another storage; repair it if requested."""
        if size < _TABLE_BYTES and repair:
            os.ftruncate(descriptor, _TABLE_BYTES)
        table = _system.read_at(descriptor, _TABLE_BYTES, 0)
        head = table[: _HEAD.size].ljust(_HEAD.size)
        magic, identity, n_bytes, crc = _HEAD.unpack(head)
        if repair and crc != zlib.crc32(_HEAD.pack(magic, identity, n_bytes, 0)):
            _system.write_at(descriptor, expected, 0)
            magic, identity, n_bytes, crc = _HEAD.unpack(expected)
        if crc != zlib.crc32(_HEAD.pack(magic, identity, n_bytes, 0)) or magic != _MAGIC:
            raise CorruptFileError(f"{self.path} is damaged: the checksum of its head does not match its contents")
        if (magic, identity, n_bytes, crc) != _HEAD.unpack(expected):
            raise CorruptFileError(
                f"{self.path} belongs to another storage than the other files in its folder. Put back the right file"
            )
        entries = self._unpack_pieces(table.ljust(_TABLE_BYTES, b"\0"), repair=repair)
        if repair:
            _system.write_at(descriptor, struct.pack("<Q", _pack_counts(0, len(entries))), _COUNTS_AT)
        end = _TABLE_BYTES + sum(n for _, n in entries)
        if size < end and not repair:
            raise CorruptFileError(
                f"{self.path} has {size:,} bytes, expected {end:,}: it was cut short or overwritten. To keep the "
                "intact data, salvage it"
            )
        _system.truncate_file(descriptor, end)  # bytes after the last piece were never used
        # A copy of the file may have holes, which could not be written to if the disk is full.
        if size < end or getattr(os.fstat(descriptor), "st_blocks", end) * 512 < end:
            self._allocate_file(descriptor, 0, end)

    def _unpack_pieces(self, table: bytes, *, repair: bool) -> list[tuple[int, int]]:
        """Return part and size of each piece in a file's table, up to the first damaged entry."""
        word = int(np.frombuffer(table, np.uint64, 1, _COUNTS_AT)[0])
        forgotten, count = _unpack_counts(word)
        found, crc = [], 0
        for number in range(_MAX_PIECES if repair else count if word == _pack_counts(forgotten, count) else 0):
            part, n_bytes, expected = _ENTRY.unpack_from(table, _TABLE_AT + number * _ENTRY.size)
            crc = zlib.crc32(_ENTRY.pack(part, n_bytes, 0), crc)
            if crc != expected:
                break
            found.append((part, n_bytes))
        if word != _pack_counts(forgotten, len(found)) and not repair:
            raise CorruptFileError(f"{self.path} is damaged: the checksums in its head do not match its contents")
        return found

    def _map_memory(self) -> Any:
        """Reserve addresses, map all pieces of the file, and return the mapping."""
        self._addresses = _system.Addresses(self.n_bytes, writable=self._writable)
        self._table = mmap.mmap(self._descriptor, _TABLE_BYTES)
        self._word = np.frombuffer(self._table, np.uint64, 1, _COUNTS_AT)
        self.version, self._known = 0, (0, 0)
        self._parts = {}
        self._limits: dict[int, int] = {}
        self._end, self._crc = _TABLE_BYTES, 0
        self._map = self._addresses.memory
        self.refresh()
        return self._map

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Create a view of a part of the region, which keeps the memory alive."""
        made = super().array(offset, shape, dtype)
        self._limits[offset] = round_to_pages(made.nbytes)
        return made

    def reserved_bytes(self, offset: int) -> int:
        """Return how many bytes of the part at an offset are reserved."""
        return self._parts.get(offset, 0)

    def reserve(self, offset: int, n_bytes: int) -> None:
        """Reserve the first bytes of a part, in the file."""
        if (held := self._parts.get(offset, 0)) >= n_bytes:
            return
        self.refresh()
        held = self._parts.get(offset, 0)
        more = min(_growth(held, n_bytes), self._limits.get(offset, self.n_bytes - offset) - held)
        if more <= 0:
            return
        forgotten, count = self._known
        if count >= _MAX_PIECES:
            raise StorageError(f"{self._name} has too many pieces. Create a new storage from a checkpoint")
        try:
            self._allocate_file(self._descriptor, self._end, more)
        except BaseException:
            _system.truncate_file(self._descriptor, self._end)
            raise
        crc = zlib.crc32(_ENTRY.pack(offset, more, 0), self._crc)
        _ENTRY.pack_into(self._table, _TABLE_AT + count * _ENTRY.size, offset, more, crc)
        self._word[0] = _pack_counts(forgotten, count + 1)
        self.refresh()

    def refresh(self) -> None:
        """Map the pieces that another process has reserved."""
        word = int(self._word[0])
        if word == self.version:
            return
        forgotten, count = _unpack_counts(word)
        if forgotten != self._known[0]:
            self._drop_mapping()
        for number in range(self._known[1], count):
            part, n_bytes, self._crc = _ENTRY.unpack_from(self._table, _TABLE_AT + number * _ENTRY.size)
            held = self._parts.get(part, 0)
            if part + held + n_bytes > self.n_bytes or part % PAGE or n_bytes % PAGE:
                raise CorruptFileError(f"{self.path} is damaged: its header lists more memory than the region has")
            self._addresses.map(part + held, n_bytes, self._descriptor, self._end)
            self._parts[part] = held + n_bytes
            self._end += n_bytes
            self._known = forgotten, number + 1
        self._known, self.version = (forgotten, count), word

    def _drop_mapping(self) -> None:
        """Unmap all pieces, after the region was cleared."""
        self._addresses.empty()
        self._parts.clear()
        self._end, self._crc, self._known = _TABLE_BYTES, 0, (_unpack_counts(int(self._word[0]))[0], 0)

    def clear(self, start: int) -> None:
        """Free memory and zero all bytes from ``start`` on. Parts before it must have been reserved first."""
        self.refresh()
        kept, end, forgotten = 0, _TABLE_BYTES, self._known[0]
        for number in range(self._known[1]):
            part, n_bytes, _ = _ENTRY.unpack_from(self._table, _TABLE_AT + number * _ENTRY.size)
            if part >= start:
                break
            kept, end = number + 1, end + n_bytes
        self._word[0] = _pack_counts((forgotten + 1) % (1 << 16), kept)
        self.refresh()
        _system.truncate_file(self._descriptor, end)

    def page_out(self, offset: int) -> None:
        """Stop counting a part as resident memory. The system keeps it in its cache while there is space."""
        self._addresses.page_out(offset, self._parts.get(offset, 0))


class GrowingRegion(FileRegion):
    """Shared region for systems that must reserve memory: a file that is deleted with its last process.

    :param n_bytes: Size of the range.
    :raises StorageError: If the disk of temporary files is full.
    """

    path = None
    _name = "the memory that processes share"

    def __init__(self, n_bytes: int) -> None:
        self._initialize(_system.new_memory_file("rl-ext-frames")[0], round_to_pages(n_bytes), bytes(16))


def _pack_counts(forgotten: int, count: int) -> int:
    """Pack how often a region was cleared, its number of pieces, and their CRC into a word."""
    both = forgotten << 16 | count
    return both << 32 | zlib.crc32(struct.pack("<I", both))


def _unpack_counts(word: int) -> tuple[int, int]:
    """Return the two counts in a word from :func:`_pack_counts`."""
    return word >> 48, (word >> 32) & 0xFFFF


_MAX_PIECES = (_TABLE_BYTES - _TABLE_AT) // _ENTRY.size


def _growth(held: int, wanted: int) -> int:
    """Return how many bytes to add to a part: at least a quarter of it, so that there are few pieces."""
    return round_to_pages(max(wanted - held, held // 4))


def _address_space_error(n_bytes: int) -> OutOfMemoryError:
    """Build the error for addresses that the system refuses to reserve."""
    return OutOfMemoryError(
        f"the system refuses {n_bytes:,} bytes of address space for frames, of which only written pages take memory. "
        "Pass a smaller max_size, or raise the limit (ulimit -v unlimited)"
    )


def _rebuild_region(cls: type[Region], descriptor: Any, n_bytes: int, path: Path | None) -> Region:
    """Unpickle a region in a child process; the memory is shared."""
    region = cls.__new__(cls)
    if path is not None:
        region.path = path
    region._open(descriptor.detach(), n_bytes)
    return region
