"""Memory that is taken page by page as it is written, which child processes share, or find again in a file; and a lock
between processes that the system frees when its holder dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable
from multiprocessing import context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core._system import PAGE
from rl_ext_core.errors import CorruptFileError, NotCopyableError, OutOfMemoryError, StorageError

__all__ = [
    "PAGE",
    "PrivateRegion",
    "ProcessLock",
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
    """As many bytes, rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where the array's memory begins."""
    # What ``PyArray_DATA`` reads, in a tenth of the time that ``__array_interface__`` takes: the first field behind the
    # header that all objects have.
    return _Pointer.from_address(id(array) + _HEADER).value


def copy_and_free(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copies bytes. Where the source is what pickle has just made of a file, which nobody else refers to, its memory is
    given back on the way: both together would take twice as much.
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
    """The error for what the system refused."""
    return StorageError(
        f"cannot {doing} {path}: {error.strerror or error}. What was stored before is intact and nothing of this call "
        "is; make room there, or pass a storage_dir elsewhere"
    )


def allocate(n_bytes: int) -> npt.NDArray[np.uint8]:
    """An uninitialised array of bytes.

    :raises OutOfMemoryError: where the system has no more.
    """
    try:
        return np.empty(n_bytes, dtype=np.uint8)
    except MemoryError:
        raise _out_of_memory_error(n_bytes) from None


def _out_of_memory_error(n_bytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no memory for another {n_bytes:,} bytes. What was stored before is intact and nothing of this call is; "
        "pass a smaller buffer_size."
    )


class PrivateRegion:
    """A range of zeros as large as the worst case, of which only what is written takes memory.

    :param n_bytes: its size.
    :raises OutOfMemoryError: where the system refuses so large a range.
    """

    path: Path | None = None
    version = 0  # another number when it has grown
    n_bytes: int
    _map: Any
    _parts: dict[int, int]  # by where they begin, how much of them can be used; where memory has to be asked for

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self._parts = n_bytes, {}
        try:
            self._addresses = _system.Addresses(round_to_pages(n_bytes), writable=True)
        except OSError:
            raise _address_space_error(n_bytes) from None
        self._map = self._addresses.memory

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A view of a part, which keeps the memory alive."""
        return np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)

    def held(self, offset: int) -> int:
        """How many bytes of the part that begins there can be used."""
        return self.n_bytes - offset if _system.COMMITS_LAZILY else self._parts.get(offset, 0)

    def reserve(self, offset: int, n_bytes: int) -> None:
        """Makes sure that the first bytes of a part can be used.

        :param offset: where the part begins, as in :meth:`array`.
        :raises StorageError: if there is no room.
        :raises OutOfMemoryError: if there is no memory.
        """
        held = self.held(offset)
        if held >= n_bytes:
            return
        more = _growth(held, n_bytes)
        try:
            self._addresses.commit(offset + held, min(more, round_to_pages(self.n_bytes) - offset - held))
        except OSError:
            raise _out_of_memory_error(more) from None
        self._parts[offset] = held + more

    def refresh(self) -> None:
        """Learns what other processes have made sure of."""

    def clear(self, start: int) -> None:
        """Gives memory back; every byte from a page's beginning on is zero again."""
        self.discard(start, self.n_bytes - start)

    def discard(self, start: int, n_bytes: int) -> None:
        """Gives whole pages back whose contents do not matter any more."""
        self._addresses.discard(start, n_bytes)

    def page_out(self, offset: int) -> None:
        """Has a part in a file count as resident no longer; it is the system's to keep it at hand."""


class Region(PrivateRegion):
    """A range of zeros as large as the worst case, of which only what is written takes memory.

    It belongs to this process until it is pickled for a child that is being started: then both see the same bytes.
    There is no name that others could find it by, so nothing is left behind by a process that is killed.

    :param n_bytes: its size.
    :raises OutOfMemoryError: where the system refuses so large a range.
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
        self.n_bytes = n_bytes
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            self._map = self._map_memory()
        except OSError:
            self._close()
            raise _address_space_error(n_bytes) from None

    def _map_memory(self) -> Any:
        return mmap.mmap(self._descriptor, self.n_bytes)

    @property
    def descriptor(self) -> int:
        """What the system calls it."""
        return self._descriptor

    def clear(self, start: int) -> None:
        """Likewise, in all processes."""
        try:
            self._map.madvise(mmap.MADV_REMOVE, start)
        except (OSError, AttributeError):
            os.ftruncate(self._descriptor, start)
            os.ftruncate(self._descriptor, self.n_bytes)

    def discard(self, start: int, n_bytes: int) -> None:
        """Nothing: others may use the pages."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_region, (type(self), _system.picklable_descriptor(self._descriptor), self.n_bytes, self.path)


# A file begins with the first two of these; then come the entries of a table, one for each piece behind the table.
_HEAD = struct.Struct("<8s16sQI4x")  # what it is, whose, bytes of the range; CRC-32
_COUNTS_AT = _HEAD.size  # one word: how often pieces were forgotten, how many there are, and CRC-32 of both
_ENTRY = struct.Struct("<QQI4x")  # the part that a piece is of, and its size; CRC-32 of these and all before
_TABLE_AT = 64
_TABLE_BYTES = 1 << 16
_MAGIC = b"rl-ext-4"


class RegionFile(NamedTuple):
    """Where a region lies.

    :ivar path: the file, made where it does not exist; what is there is found again.
    :ivar identity: 16 bytes, of the storage that the file belongs to.
    :ivar repair: whether a file that was cut short is made as long as it was.
    :ivar lenient: whether what is written where nothing was reserved is lost, instead of ending the process.
    """

    path: Path
    identity: bytes = bytes(16)
    repair: bool = False
    lenient: bool = False


def new_region(n_bytes: int, file: RegionFile | None = None, *, private: bool = False) -> PrivateRegion:
    """A region in memory, which only this process sees or its children too, or in a file."""
    if file is not None:
        return FileRegion(n_bytes, file)
    if private:
        return PrivateRegion(n_bytes)
    return Region(n_bytes) if _system.COMMITS_LAZILY else GrowingRegion(n_bytes)


class FileRegion(Region):
    """A region in a file that grows with what is held.

    The file consists of pieces, in the order in which they were needed; each is the continuation of a part, which is
    what :meth:`array` was asked for. What was not reserved reads as zeros, and writing there ends the process. That no
    other process has the file too is its owner's to see to.

    :param n_bytes: size of the range.
    :param file: the file.
    :raises StorageError: if the file cannot be used.
    :raises CorruptFileError: if the file is damaged, cut short, or of another storage.
    """

    _writable = False  # where nothing was reserved
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
        try:
            _system.allocate_file_space(descriptor, offset, n_bytes)
        except OSError as error:
            raise storage_error(self._name, error, doing=f"write {n_bytes:,} bytes to") from error

    def _check_header(self, descriptor: int, size: int, expected: bytes, *, repair: bool) -> None:
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
                f"{self.path} is of another storage than the files beside it; put back the file that belongs there"
            )
        entries = self._read_table(table.ljust(_TABLE_BYTES, b"\0"), repair=repair)
        if repair:
            _system.write_at(descriptor, struct.pack("<Q", _pack_counts(0, len(entries))), _COUNTS_AT)
        end = _TABLE_BYTES + sum(n for _, n in entries)
        if size < end and not repair:
            raise CorruptFileError(
                f"{self.path} has {size:,} bytes, expected {end:,}: it was cut short, or written to; to keep what is "
                "intact, salvage it"
            )
        _system.truncate_file(descriptor, end)  # what is behind was never used
        # A copy may have holes, which a full disk would not fill.
        if size < end or getattr(os.fstat(descriptor), "st_blocks", end) * 512 < end:
            self._allocate_file(descriptor, 0, end)

    def _read_table(self, table: bytes, *, repair: bool) -> list[tuple[int, int]]:
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
        """See :meth:`Region.array`."""
        made = super().array(offset, shape, dtype)
        self._limits[offset] = round_to_pages(made.nbytes)
        return made

    def held(self, offset: int) -> int:
        """See :meth:`Region.held`."""
        return self._parts.get(offset, 0)

    def reserve(self, offset: int, n_bytes: int) -> None:
        """See :meth:`Region.reserve`."""
        if (held := self._parts.get(offset, 0)) >= n_bytes:
            return
        self.refresh()
        held = self._parts.get(offset, 0)
        more = min(_growth(held, n_bytes), self._limits.get(offset, self.n_bytes - offset) - held)
        if more <= 0:
            return
        forgotten, count = self._known
        if count >= _MAX_PIECES:
            raise StorageError(f"{self._name} has too many pieces; make a new one from a checkpoint")
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
        """See :meth:`Region.refresh`."""
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
                raise CorruptFileError(f"{self.path} is damaged: its head names more than there is")
            self._addresses.map(part + held, n_bytes, self._descriptor, self._end)
            self._parts[part] = held + n_bytes
            self._end += n_bytes
            self._known = forgotten, number + 1
        self._known, self.version = (forgotten, count), word

    def _drop_mapping(self) -> None:
        self._addresses.empty()
        self._parts.clear()
        self._end, self._crc, self._known = _TABLE_BYTES, 0, (_unpack_counts(int(self._word[0]))[0], 0)

    def clear(self, start: int) -> None:
        """See :meth:`Region.clear`. Parts before ``start`` have to be the first that were reserved."""
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
        """See :meth:`Region.page_out`."""
        self._addresses.page_out(offset, self._parts.get(offset, 0))


class GrowingRegion(FileRegion):
    """A :class:`Region` where memory has to be asked for: a file that is deleted when nobody has it open any more.

    :param n_bytes: its size.
    :raises StorageError: if there is no room among temporary files.
    """

    path = None
    _name = "memory that processes share"

    def __init__(self, n_bytes: int) -> None:
        self._initialize(_system.new_memory_file("rl-ext-frames")[0], round_to_pages(n_bytes), bytes(16))


def _pack_counts(forgotten: int, count: int) -> int:
    both = forgotten << 16 | count
    return both << 32 | zlib.crc32(struct.pack("<I", both))


def _unpack_counts(word: int) -> tuple[int, int]:
    return word >> 48, (word >> 32) & 0xFFFF


_MAX_PIECES = (_TABLE_BYTES - _TABLE_AT) // _ENTRY.size


def _growth(held: int, wanted: int) -> int:
    """How much to add to a part: a quarter of it at least, so that there are few pieces however large it becomes."""
    return round_to_pages(max(wanted - held, held // 4))


def _address_space_error(n_bytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"the system refuses {n_bytes:,} bytes of address space for frames, of which only what is written takes "
        "memory; pass a smaller max_size, or raise the limit (ulimit -v unlimited)"
    )


def _rebuild_region(cls: type[Region], descriptor: Any, n_bytes: int, path: Path | None) -> Region:
    region = cls.__new__(cls)
    if path is not None:
        region.path = path
    region._open(descriptor.detach(), n_bytes)
    return region


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


class ProcessLock:
    """Like :func:`multiprocessing.RLock`, but whoever comes next is not blocked for ever by a holder that was killed.

    Locks of the kernel belong to an open file description: each process opens one file in memory anew, and the kernel
    frees the lock with the description. What the holder had changed may be half done then; :attr:`recover` is called
    with its number before anything else is done under the lock.

    A process that was forked must not use it, since it has its parent's description.
    """

    def __init__(self) -> None:
        self._open(new_region(np.dtype(np.int64).itemsize))  # type: ignore[arg-type]

    def _open(self, region: Region) -> None:
        self.recover: Callable[[int], None] | None = None
        self._region = region
        holder = region.array(0, (1,), np.int64)
        region.reserve(0, holder.nbytes)
        self._holder = holder.data
        self._threads = threading.RLock()
        self._depth = 0
        self._pid = os.getpid()
        try:
            self._descriptor = _system.reopen_for_locking(region.descriptor)
        except OSError as error:
            raise StorageError(
                f"cannot open {error.filename}: {error.strerror}; processes share memory by way of /proc"
            ) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # threads may use it until the very end
        _locks.add(self)

    def __enter__(self) -> None:
        self.check_process()
        self._threads.acquire()
        try:
            if self._depth == 0:
                self._lock_and_recover()
            self._depth += 1
        except BaseException:
            if self._depth == 0:
                _system.unlock(self._descriptor)
            self._threads.release()
            raise

    def _lock_and_recover(self) -> None:
        _system.lock(self._descriptor)
        if (dead := self._holder[0]) and self.recover is not None:
            self._depth += 1  # it may use the lock
            try:
                self.recover(dead)
            finally:
                self._depth -= 1
        self._holder[0] = self._pid

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder[0] = 0
            _system.unlock(self._descriptor)
        self._threads.release()

    def check_process(self) -> None:
        """
        :raises NotCopyableError: in a process that was forked from the one that made it.
        """
        if self._pid != os.getpid():
            raise NotCopyableError(
                "this storage came along with a fork, which copies one part of it and shares the other; start the "
                'process with multiprocessing.get_context("spawn") and pass it the buffer as an argument'
            )

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return _rebuild_lock, (self._region,)


def _rebuild_lock(region: Region) -> ProcessLock:
    lock = ProcessLock.__new__(ProcessLock)
    lock._open(region)
    return lock


def _close_in_child() -> None:
    # Otherwise a child that was forked keeps the lock that its parent holds when that one dies.
    for lock in list(_locks):
        lock._close()


_system.after_fork(_close_in_child)
