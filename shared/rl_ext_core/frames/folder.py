"""The folder of a store: who may write to it, what lies in it, and its rows.

===============  =====================================================================================================
file             contents
===============  =====================================================================================================
``lock``         number of the process that writes; locked while it lives, or any that it shares the store with
``store.json``   what the store is like; written last, so that what is half made is not taken for one
``making``       nothing; it is stored_options until ``store.json`` is, and what it lies beside may be deleted
``frames-<n>``   frames, and the index of a ring, with checksums: another file for each kind of frames, and for each
                 other way to store them
``rows``         arrays with one row an element, of the store's owner; where they come one by one, ``row-<name>``
``sums``         checksums of these rows
``journal``      how many elements count, and which are being written
``journal-2``    the other one of the two latest notes of that; in a store that was closed they say the same
===============  =====================================================================================================

All of it is arrays and plain values. Each file but the first three names the store that it belongs to, and grows with
what it holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, RlExtError, StorageError
from rl_ext_core.frames.checkpoint import checksum
from rl_ext_core.frames.journal import Journal, JournalRecord, Places
from rl_ext_core.frames.region import PrivateRegion, RegionFile, new_region, round_to_pages, storage_error

FORMAT_VERSION = 6
MANIFEST = "store.json"
_INCOMPLETE, _JOURNAL = "making", ("journal", "journal-2")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FILES = re.compile(rf"rows|row-{_NAME.pattern}|sums|frames-\d+|journal(-2)?")
_SUMS = ""  # in place of the name of an array, which is never that short

Fields = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]  # name, shape of a row, and dtype

_open_folders: weakref.WeakSet[StoreFolder] = weakref.WeakSet()


def validate_path(path: str | os.PathLike[str]) -> Path:
    """
    :raises InvalidArgumentError: for an empty path, which would be the current folder.
    """
    if not os.fspath(path):
        raise InvalidArgumentError(
            f"storage_dir={path!r} is empty; pass the name of a folder, for example storage_dir='buffer', or None to "
            "keep everything in memory"
        )
    return Path(path)


@contextlib.contextmanager
def as_corrupt_file(what: str) -> Iterator[None]:
    """Call whatever goes wrong meanwhile damage: what was altered may lead anywhere.

    :param what: is read, and "is" or "are".
    """
    try:
        yield
    except (RlExtError, MemoryError):
        raise
    except Exception as error:
        raise CorruptFileError(f"{what} damaged ({type(error).__name__}: {error})") from error


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Writes plain values and a checksum of them, in place of what the file held before."""
    fields = json.loads(json.dumps(fields))
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w") as file:
        file.write(json.dumps({**fields, "checksum": checksum(fields)}))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path, version: int) -> dict[str, Any]:
    """What :func:`write_json` wrote.

    :param version: that ``format`` must be.
    :raises CorruptFileError: if it cannot be read, or is of another format.
    """
    with as_corrupt_file(f"{path} is"):
        found: dict[str, Any] = json.loads(path.read_text())
        if found["format"] != version:
            raise CorruptFileError(
                f"{path.parent} has format {found['format']!r}, this version reads {version}; open the folder with the "
                "version of rl-ext that wrote it"
            )
    if found.pop("checksum", None) != checksum(found):
        raise CorruptFileError(f"{path} is damaged: its checksum does not match its contents")
    return found


class RowArrays:
    """Arrays with one row an element, in memory; or in files, which have room for as many as were asked for by
    :meth:`reserve`, and a checksum of each row.

    :param n_rows: the most that there may be.
    :ivar arrays: of shape ``(n_rows, *shape)``, by name.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._files: dict[str, tuple[PrivateRegion, Fields]] = {}
        self._map_files()

    def _map_files(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._parts: list[tuple[PrivateRegion, int, int]] = []  # where an array begins, bytes of a row
        for region, fields in self._files.values():
            self._map_fields(region, fields)

    def _map_fields(self, region: PrivateRegion, fields: Fields) -> None:
        start = 0
        for name, (shape, dtype) in fields.items():
            self.arrays[name] = region.array(start, (self.n_rows, *shape), dtype)
            self._parts.append((region, start, math.prod(shape) * dtype.itemsize))
            if not _system.COMMITS_LAZILY:
                region.reserve(start, self._padded_nbytes(shape, dtype))  # their owner may read all of them
            start += self._padded_nbytes(shape, dtype)
        self._n_reserved = 0
        self._checksum_inputs: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = (
            None  # addresses, bytes of a row
        )

    def _padded_nbytes(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        return round_to_pages(max(self.n_rows * math.prod(shape) * dtype.itemsize, 1))

    def get(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """The array of that name, if there is one.

        :raises InvalidArgumentError: if it has another shape or dtype, or this is no name for a file.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"a row array cannot be named {name!r}; use letters, digits, '_', '-' and '.'")
        array = self.arrays.get(name)
        if array is not None and (array.shape[1:], array.dtype) != (tuple(shape), np.dtype(dtype)):
            raise InvalidArgumentError(
                f"row array {name!r} holds rows of shape {array.shape[1:]} and dtype {array.dtype}, not {tuple(shape)} "
                f"and {np.dtype(dtype)}; pass another storage_dir"
            )
        return array

    def add(self, name: str, fields: Fields, file: RegionFile | None = None) -> None:
        """Adds arrays, which are zero, or what the file holds.

        :param name: of the file.
        :param file: where they lie, or None for memory.
        :raises StorageError: if there is no room on the disk.
        :raises CorruptFileError: if the file is damaged, or has another size.
        """
        region = new_region(sum(self._padded_nbytes(*field) for field in fields.values()), file, private=True)
        self._files[name] = region, fields
        self._map_fields(region, fields)

    def describe(self) -> dict[str, Any]:
        """Which arrays there are in which files, in values that JSON knows."""
        files = {
            file: {name: [list(shape), dtype.str] for name, (shape, dtype) in fields.items()}
            for file, (_, fields) in self._files.items()
        }
        return {"n_rows": self.n_rows, "files": files}

    def smallest_file(self) -> tuple[int, str]:
        """How many rows can be written to, and the name of the file that has no more."""
        held = [(region.held(start) // n, region.path.name) for region, start, n in self._parts if n and region.path]
        return min([(self.n_rows, ""), *held])

    @property
    def held(self) -> int:
        """How many rows can be written to."""
        return self.smallest_file()[0]

    def reserve(self, n_rows: int) -> None:
        """Makes sure that the first rows can be written to.

        :raises StorageError: if there is no room on the disk.
        """
        if n_rows > self._n_reserved:
            for region, start, row_bytes in self._parts:
                region.reserve(start, min(n_rows, self.n_rows) * row_bytes)
            self._n_reserved = self.held

    def refresh(self) -> None:
        """Learns what other processes have made sure of."""
        for region, _ in self._files.values():
            region.refresh()

    def _checksums_of(self, rows: Places) -> npt.NDArray[np.uint32]:
        from rl_ext_core.frames.machine import sum_rows  # it loads numba

        if self._checksum_inputs is None:
            arrays = [array for name, array in self.arrays.items() if name != _SUMS]
            addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
            self._checksum_inputs = addresses, np.array([array[:1].nbytes for array in arrays], dtype=np.int64)
        found = np.zeros(len(rows), dtype=np.uint32)
        sum_rows(*self._checksum_inputs, rows, found)
        return found

    def record(self, rows: Places) -> None:
        """Notes what these rows are now."""
        self.arrays[_SUMS][rows] = self._checksums_of(rows)

    def corrupt_rows(self, rows: Places) -> Places:
        """Those of these rows that are not what was noted."""
        found: Places = rows[self._checksums_of(rows) != self.arrays[_SUMS][rows]]
        return found

    @property
    def is_full(self) -> bool:
        """Whether the last row was ever noted."""
        return bool(self.arrays[_SUMS][-1])

    def nbytes(self, n_rows: int) -> int:
        """Bytes of that many rows."""
        return sum(array[:n_rows].nbytes for array in self.arrays.values())

    def __getstate__(self) -> dict[str, Any]:
        # Only on the way to a child process, which shares them.
        return {"n_rows": self.n_rows, "_files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()


class StoreFolder:
    """A folder that this process alone may write to, and those that it shares the store with.

    :param path: made where it does not exist.
    :param options: what the folder's owner is told, plain values; another owner has to be told the same.
    :param capacity: rows. An owner that learns later how many there are has :attr:`rows` made anew.
    :param repair: whether files that were cut short are made as long as they were, and options are not compared.
    :param salvage: the name of what keeps the intact rows of such a folder.
    :ivar repair: likewise.
    :ivar settings: how the frames that are there are stored, plain values of the owner; None where there are none.
    :ivar rows: the owner's arrays.
    :ivar journal: what counts, once there is anything.
    :raises InvalidArgumentError: if there are other files in it, it was made with other options, or the path is empty;
        with ``repair``, if there is no store in it.
    :raises StorageError: if another process writes to it, or it cannot be made.
    :raises CorruptFileError: if a file in it is damaged.
    """

    journal: Journal | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: dict[str, Any],
        *,
        capacity: int = 1,
        repair: bool = False,
        salvage: str = "rl_ext_core.frames.salvage",
    ) -> None:
        self.path, self.repair, self._salvage_name = validate_path(path).absolute(), repair, salvage
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        if repair and not any(self.path.glob("frames-*")):
            raise InvalidArgumentError(f"storage_dir={str(self.path)!r} holds no store")
        self._created = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_store_file(entry))
        except OSError as error:
            raise storage_error(self.path, error, doing="use the folder") from error
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} holds {foreign[0]!r}, which is no part of a store; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self._take_lock(_open_lock_file(self.path / "lock"))
        self._reset(capacity)
        try:
            self._open()
        except BaseException:
            self.abandon()
            raise

    def _reset(self, capacity: int) -> None:
        self._identity, self._numbers = os.urandom(16), [0]
        self.settings: dict[str, Any] | None = None
        self.rows, self.journal = RowArrays(capacity), None

    def _open(self) -> None:
        manifest = self.path / MANIFEST
        if not manifest.exists():
            if self.repair or (self._has_any(*_JOURNAL) and not self._has_any(_INCOMPLETE)):
                raise CorruptFileError(
                    f"{self.path} holds a store, and {MANIFEST} is missing, which says what it is like; put it back, "
                    "or pass another storage_dir. Nothing was deleted"
                )
            self._delete_contents()
            return
        found = read_json(manifest, FORMAT_VERSION)
        if self.repair:
            self.options = found["options"]
        self._check_options(found["options"])
        with as_corrupt_file(f"{manifest} is"):
            self._identity, self._numbers = bytes.fromhex(found["identity"]), found["frames"]
            files = found["rows"]["files"]
            for name in (*self._frame_file_names(self._numbers), *files, *_JOURNAL):
                file = self._region_file(name).path
                if not self.repair and not (file.is_file() and file.stat().st_size):
                    raise self.corrupt_file_error(name, "it is gone, or empty")
            self.rows = RowArrays(found["rows"]["n_rows"])
            for name, arrays in files.items():
                fields = {key: (tuple(shape), np.dtype(dtype)) for key, (shape, dtype) in arrays.items()}
                self.rows.add(name, fields, self._region_file(name))
            self.journal = self._new_journal()
            self.settings = found["settings"]
        self.delete_old_frames()

    def _check_options(self, stored_options: dict[str, Any]) -> None:
        # Those that are told to others too come first: another n_envs makes another capacity as well.
        names = sorted({**stored_options, **self.options}, key=lambda name: name == "capacity")
        differing = [name for name in names if stored_options.get(name) != self.options.get(name)]
        if differing:
            was, given = (
                " and ".join(f"{name}={told.get(name)!r}" for name in differing)
                for told in (stored_options, self.options)
            )
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} was made with {was}, not with {given}; pass what it was made with, or "
                "another storage_dir"
            )

    def corrupt_file_error(self, name: str, what: str) -> CorruptFileError:
        """The error for a file that holds something else than was written."""
        cure = f"To keep what is intact: {self._salvage_name}({str(self.path)!r})"
        return CorruptFileError(
            f"{self.path / name} is damaged: {what}. {'Put it back from a copy' if self.repair else cure}"
        )

    def _delete_contents(self) -> None:
        """Deletes what was half made."""
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == _INCOMPLETE):
            if entry.name != "lock":
                _delete(entry)

    def _has_any(self, *names: str) -> bool:
        return any((self.path / name).exists() for name in names)

    def _is_in_place(self) -> bool:
        """Whether the path leads to this folder, and not to another one by now, which may be another store's."""
        with contextlib.suppress(FileNotFoundError):
            # Windows moves no folder with open files.
            return _system.WINDOWS or os.path.samestat(os.fstat(self._lock), os.stat(self.path / "lock"))
        return False

    def _check_in_place(self) -> None:
        if not self._is_in_place():
            raise StorageError(
                f"{self.path} was moved, deleted or replaced since it was opened here, so nothing more is written to "
                "it; pass another storage_dir"
            )

    def _mark_incomplete(self) -> None:
        self._check_in_place()
        try:
            (self.path / _INCOMPLETE).touch()
        except OSError as error:
            raise storage_error(self.path / _INCOMPLETE, error, doing="write") from error

    def start_over(self) -> None:
        """Deletes a store that holds nothing."""
        self._mark_incomplete()
        (self.path / MANIFEST).unlink(missing_ok=True)
        self._reset(self.rows.n_rows)
        self._delete_contents()

    def _region_file(self, name: str, *, new: bool = False) -> RegionFile:
        if not _FILES.fullmatch(name):
            raise CorruptFileError(f"{self.path / MANIFEST} is damaged: it names {name!r}, which is no file of a store")
        if new:
            self._check_in_place()
            _delete(self.path / name)  # of a process that was killed
        # Arrays that were asked for by name are in the hands of others, who may write anywhere.
        return RegionFile(self.path / name, self._identity, self.repair, lenient=name.startswith("row-"))

    def _new_journal(self) -> Journal:
        return Journal(self.rows.n_rows, files=(self._region_file(_JOURNAL[0]), self._region_file(_JOURNAL[1])))

    def _frame_file_names(self, numbers: list[int]) -> list[str]:
        return [f"frames-{number}" for number in numbers]

    def frames(self, kind: int = 0, *, next_generation: bool = False) -> RegionFile:
        """The file of one kind of frames; or that of frames which will take their place."""
        name = f"frames-{self._numbers[0] + kind + next_generation}"
        return self._region_file(name, new=next_generation or self.settings is None)

    def begin(self, settings: dict[str, Any], *, kinds: int = 1, next_generation: bool = False) -> None:
        """Makes frames count that are stored in this way.

        :param kinds: of frames. Where there are several, others cannot take their place.
        :raises StorageError: if it cannot be written.
        """
        before = self._numbers
        try:
            if self.journal is None:
                self._mark_incomplete()
                self.rows.add("sums", {_SUMS: ((), np.dtype(np.uint32))}, self._region_file("sums", new=True))
                self.journal = self._new_journal()
                self.journal.record(length=0, next_row=0, n_written=0, exposed=False)
            first = self._numbers[0] + next_generation
            self._numbers = [*range(first, first + kinds)]
            self._write(settings)
        except BaseException:
            self._numbers = before
            raise
        self.delete_old_frames()

    def _write(self, settings: dict[str, Any]) -> None:
        manifest = {
            "format": FORMAT_VERSION,
            "identity": self._identity.hex(),
            "frames": self._numbers,
            "options": self.options,
            "settings": settings,
            "rows": self.rows.describe(),
        }
        self._check_in_place()
        try:
            write_json(self.path / MANIFEST, manifest)
        except OSError as error:
            raise storage_error(self.path / MANIFEST, error, doing="write") from error
        self.settings = settings

    def add_rows(self, name: str, fields: Fields) -> None:
        """Adds arrays to :attr:`rows`, which are zero.

        :param name: of their file.
        :raises StorageError: if they cannot be written.
        """
        self.rows.add(name, fields, self._region_file(name, new=True))
        if self.settings is not None:
            self._write(self.settings)

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, empty: bool) -> npt.NDArray[Any]:
        """A row array, made where there is none yet.

        :param empty: whether no transition was stored.
        :raises InvalidArgumentError: if transitions were stored without it.
        """
        found = self.rows.get(name, shape, dtype)
        if found is None and not empty:
            raise InvalidArgumentError(
                f"{self.path} holds transitions and no row array {name!r}; pass another storage_dir, or ask for all "
                "arrays before the first transition is added"
            )
        if found is None:
            self.add_rows(f"row-{name}", {name: (tuple(shape), np.dtype(dtype))})
        return self.rows.arrays[name]

    def read_journal(self, n_written: Callable[[], int | None] = lambda: None) -> tuple[JournalRecord, Places]:
        """What counts by the latest note, and the rows that were being written.

        Where no note is whole, a folder that is mended holds all rows that were ever written, unless it was full.

        :param n_written: says how many these are, or None where the last row is among them.
        :raises CorruptFileError: if that is not known, or rows are not there that were noted.
        """
        assert self.journal is not None
        most = self.rows.n_rows
        try:
            record, writing = self.journal.read()
        except CorruptFileError:
            if not self.repair or (found := n_written()) is None:
                what = "the checksums of both notes are wrong, so which row of a full store is the oldest is not known"
                raise self.corrupt_file_error(_JOURNAL[0], what) from None
            record, writing = JournalRecord(0, found, found, found, 0, 0), np.zeros(0, dtype=np.int64)
        if not record.length <= record.n_written <= most or record.next_row > most:
            raise self.corrupt_file_error(_JOURNAL[0], "it says that there are more elements than rows")
        needed = max(record.n_written, int(writing.max(initial=-1)) + 1)
        held, name = self.rows.smallest_file()
        if held < (min(record.length, 1) if self.repair else needed):
            raise self.corrupt_file_error(name, f"by its head there are {held} rows in it, expected {needed}")
        return record, writing

    def delete_old_frames(self) -> None:
        """Deletes frames in whose place others are."""
        self._check_in_place()
        for path in self.path.glob("frames-*"):
            if path.name not in self._frame_file_names(self._numbers):
                _system.remove_file(path)
        (self.path / _INCOMPLETE).unlink(missing_ok=True)

    @property
    def is_writer(self) -> bool:
        """Whether this is a process that may write to it, and not one forked from that."""
        return self._pid == os.getpid()

    def check_writer(self) -> None:
        """
        :raises StorageError: in a process that was forked from the one that writes, and after it was closed.
        """
        if not self.is_writer:
            raise StorageError(
                f"{self.path} is written to by process {self._pid}, not by this one, {os.getpid()}, which was forked "
                "from it: two of them would overwrite each other's frames. Open another storage_dir here"
            )
        self.check_open()

    @property
    def closed(self) -> bool:
        """Whether nothing can be read or written any more."""
        return not self.close.alive and self.is_writer

    def check_open(self) -> None:
        """
        :raises StorageError: after it was closed.
        """
        if self.closed:
            raise StorageError(f"{self.path} was closed; open it again, by another buffer with the same storage_dir")

    def _take_lock(self, descriptor: int) -> None:
        self._pid, self._lock = os.getpid(), descriptor
        # Lets others write to it, once no process that shares the store holds the lock.
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False  # stores are closed then, and it with them
        _open_folders.add(self)

    def abandon(self) -> None:
        """Closes it, and leaves nothing where nothing was."""
        must_delete = self._created and self._is_in_place()
        self.close()
        if must_delete:
            shutil.rmtree(self.path, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        # Only on the way to a child process, which holds the lock as well.
        return {**self.__dict__, "_lock": _system.picklable_descriptor(self._lock), "close": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_lock(state["_lock"].detach())


def _is_store_file(entry: Path) -> bool:
    known = entry.name in ("lock", MANIFEST, f"{MANIFEST}.new", _INCOMPLETE) or _FILES.fullmatch(entry.name)
    return bool(known) and not entry.is_dir()


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error, doing="delete") from error


def _open_lock_file(path: Path) -> int:
    """A descriptor of the locked file."""
    try:
        lock = _system.open_exclusive(path)
    except BlockingIOError:
        owner = ""
        with contextlib.suppress(OSError):
            owner = path.read_text(errors="replace")[:32]
        who = "this process" if owner == str(os.getpid()) else "another process"
        raise StorageError(
            f"{path.parent} is in use by {who}, {owner or 'of unknown number'}, or one that shares its buffer; close "
            "it first, or pass another storage_dir"
        ) from None
    except OSError as error:
        if error.filename is not None:
            raise storage_error(path, error, doing="open") from error
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}; nobody else is known to use it. Pass a storage_dir "
            "on a file system that has locks, as local disks do and some network drives do not"
        ) from error
    os.ftruncate(lock, 0)
    _system.write_at(lock, str(os.getpid()).encode(), 0)
    return lock


def _unlock_in_child() -> None:
    # A forked child shares the lock: without this, the folder stays locked for as long as any child lives.
    for folder in list(_open_folders):
        folder.close()


_system.after_fork(_unlock_in_child)
