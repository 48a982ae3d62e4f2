"""Folder of a store in files: its lock, its files, and its row arrays.

- ``lock``: id of the writing process; locked while that process, or one that shares the store, is alive
- ``store.json``: options and settings of the store; written last, so that it marks a complete store
- ``making``: empty; it exists until ``store.json`` does, and marks the other files as incomplete
- ``frames-<n>``: frames, and the index of a ring, with checksums; a new file for each kind of frames, and each time
  that the encoding changes
- ``rows``: the owner's arrays with one row per element; ``row-<name>`` for an array that is added separately
- ``sums``: checksums of these rows
- ``mutable-<name>``: an array like these, without checksums, because any of its rows may change at any time
- ``journal``: number of valid elements, and the rows that are being written
- ``journal-2``: the other one of the two latest records; in a closed store both are equal

Files contain arrays and plain values only. Each file except the first three contains the identity of its store, and
grows with its contents.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.journal import Journal, JournalRecord, Places
from rl_ext_core.frames.log_folder import MANIFEST, as_corrupt_file, read_json, validate_path, write_json
from rl_ext_core.frames.region import PrivateRegion, RegionFile, new_region, round_to_pages, storage_error
from rl_ext_core.resources import check_folder

FORMAT_VERSION = 8
_INCOMPLETE, _JOURNAL = "making", ("journal", "journal-2")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FILES = re.compile(rf"rows|(row|mutable)-{_NAME.pattern}|sums|frames-\d+|journal(-2)?")
_SUMS = ""  # key of the array of checksums; names of row arrays are never empty
_MUTABLE = "mutable-"  # prefix of files without checksums

Fields = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]  # shape of a row, and dtype, by name

_open_folders: weakref.WeakSet[StoreFolder] = weakref.WeakSet()
_opening = _system.make_fork_safe_lock()  # other threads find a locked folder in _open_folders
_OWNER_ATTEMPTS, _OWNER_PAUSE_S = 20, 0.005  # how long an owner may take to write its id


class RowArrays:
    """Arrays with one row per element, in memory or in files.

    Only the rows that :meth:`reserve` has reserved can be written to. In files each row has a checksum, except in
    files whose names begin with ``mutable-``.

    :param n_rows: Largest number of rows
    :ivar arrays: Arrays of shape ``(n_rows, *shape)``, by name
    """

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._files: dict[str, tuple[PrivateRegion, Fields]] = {}
        self._map_files()

    def _map_files(self) -> None:
        """Create the arrays as views of their files."""
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._parts: list[tuple[PrivateRegion, int, int]] = []  # offset of each array, and bytes per row
        for region, fields in self._files.values():
            self._map_fields(region, fields)

    def _map_fields(self, region: PrivateRegion, fields: Fields) -> None:
        """Create the arrays that are in one file, as views of it."""
        start = 0
        for name, (shape, dtype) in fields.items():
            self.arrays[name] = region.array(start, (self.n_rows, *shape), dtype)
            self._parts.append((region, start, math.prod(shape) * dtype.itemsize))
            if not _system.COMMITS_LAZILY:
                region.reserve(start, self._padded_nbytes(shape, dtype))  # the owner may read every row
            start += self._padded_nbytes(shape, dtype)
        self._n_reserved = 0
        # The arrays' addresses, and their bytes per row.
        self._checksum_inputs: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None

    def _padded_nbytes(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return the bytes that an array takes in its file, in whole pages."""
        return round_to_pages(max(self.n_rows * math.prod(shape) * dtype.itemsize, 1))

    def get(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """Return the array of that name, or None if there is none.

        :raises InvalidArgumentError: If it has another shape or dtype, or the name cannot be a file name
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"name={name!r} cannot name a row array; use letters, digits, '_', '-' and '.'")
        array = self.arrays.get(name)
        if array is not None and (array.shape[1:], array.dtype) != (tuple(shape), np.dtype(dtype)):
            raise InvalidArgumentError(
                f"row array {name!r} has rows of shape {array.shape[1:]} and dtype {array.dtype}, not {tuple(shape)} "
                f"and {np.dtype(dtype)}; pass another storage_dir"
            )
        return array

    def add(self, name: str, fields: Fields, file: RegionFile | None = None) -> None:
        """Add arrays, which are zero, or have the contents of the file.

        :param name: Name of the file
        :param fields: Shape and dtype of each array's rows, by name
        :param file: File of the arrays, or None for memory
        :raises StorageError: If the disk is full
        :raises CorruptFileError: If the file is damaged, or has another size
        """
        region = new_region(sum(self._padded_nbytes(*field) for field in fields.values()), file, private=True)
        self._files[name] = region, fields
        self._map_fields(region, fields)

    def describe(self) -> dict[str, Any]:
        """Describe the arrays of each file, in plain values for JSON."""
        files = {
            file: {name: [list(shape), dtype.str] for name, (shape, dtype) in fields.items()}
            for file, (_, fields) in self._files.items()
        }
        return {"n_rows": self.n_rows, "files": files}

    def smallest_file(self) -> tuple[int, str]:
        """Return the number of reserved rows, and the name of the file that has the fewest."""
        counts = [
            (region.reserved_bytes(start) // n, region.path.name)
            for region, start, n in self._parts
            if n and region.path
        ]
        return min([(self.n_rows, ""), *counts])

    @property
    def n_reserved(self) -> int:
        """Number of reserved rows, which can be written to."""
        return self.smallest_file()[0]

    def reserve(self, n_rows: int) -> None:
        """Reserve space for the first rows.

        :raises StorageError: If the disk is full
        """
        if n_rows > self._n_reserved:
            for region, start, row_bytes in self._parts:
                region.reserve(start, min(n_rows, self.n_rows) * row_bytes)
            self._n_reserved = self.n_reserved

    def refresh(self) -> None:
        """Detect the space that other processes have reserved."""
        for region, _ in self._files.values():
            region.refresh()

    def _checksums_of(self, rows: Places) -> npt.NDArray[np.uint32]:
        """Compute a checksum of each of these rows, over all arrays."""
        from rl_ext_core.frames.kernel_primitives import sum_rows  # imported here, because it loads numba

        if self._checksum_inputs is None:
            names = [
                name for file, (_, fields) in self._files.items() if not file.startswith(_MUTABLE) for name in fields
            ]
            arrays = [self.arrays[name] for name in names if name != _SUMS]
            addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
            self._checksum_inputs = addresses, np.array([array[:1].nbytes for array in arrays], dtype=np.int64)
        found = np.zeros(len(rows), dtype=np.uint32)
        sum_rows(*self._checksum_inputs, rows, found)
        return found

    def update_checksums(self, rows: Places) -> None:
        """Update the checksums of these rows."""
        self.arrays[_SUMS][rows] = self._checksums_of(rows)

    def corrupt_rows(self, rows: Places) -> Places:
        """Return those of these rows whose checksums do not match."""
        found: Places = rows[self._checksums_of(rows) != self.arrays[_SUMS][rows]]
        return found

    @property
    def is_full(self) -> bool:
        """Whether the last row has a checksum, so that all rows were written."""
        return bool(self.arrays[_SUMS][-1])

    def nbytes(self, n_rows: int) -> int:
        """Return the bytes of that many rows."""
        return sum(array[:n_rows].nbytes for array in self.arrays.values())

    def __getstate__(self) -> dict[str, Any]:
        # Used only to send the arrays to a child process, which shares them.
        return {"n_rows": self.n_rows, "_files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()


class _OpenFiles:
    """Files that a folder closes, and writes to once more, when its owner is closed or garbage-collected.

    :ivar rows: The owner's row arrays
    :ivar journal: Journal of the valid elements; None if there are no frames
    :ivar complete: Completes elements that the owner could still change; None if there are none
    :ivar lock: Lock of the owner, which another thread may use when the process exits
    """

    rows: RowArrays
    journal: Journal | None
    complete: Callable[[RowArrays, Journal], None] | None = None
    lock: Any = contextlib.nullcontext()

    @defer_signals
    def close(self, descriptor: int) -> None:
        """Complete the elements, and close the file of the lock."""
        try:
            if self.complete is not None and self.journal is not None:
                with self.lock:
                    self.complete(self.rows, self.journal)
        finally:
            os.close(descriptor)


class StoreFolder:
    """Folder of a store, locked for this process and the processes that share the store.

    :param path: Path of the folder, which is created if it does not exist
    :param options: Options of the store as plain values; opening an existing folder requires the same ones
    :param capacity: Number of rows. An owner that learns it later replaces :attr:`rows`.
    :param repair: Whether to extend truncated files to their old size, and to accept any options
    :param salvage: Name of the function that salvages a damaged folder, for error texts
    :param resume: Whether to continue with the elements in the folder; otherwise a folder with elements is refused
    :ivar repair: Whether the folder was opened to be repaired
    :ivar settings: Settings of the stored frames, as plain values of the owner; None if there are no frames
    :ivar rows: The owner's row arrays
    :ivar journal: Journal of the valid elements; None if there are no frames
    :raises InvalidArgumentError: If the path is empty, the folder contains other files or, without ``resume``,
        elements, or it was created with other options. With ``repair``, if it does not contain a store.
    :raises StorageError: If another process uses the folder, or it cannot be created
    :raises CorruptFileError: If a file in it is damaged
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: dict[str, Any],
        *,
        capacity: int = 1,
        repair: bool = False,
        salvage: str = "rl_ext_core.frames.salvage",
        resume: bool = False,
    ) -> None:
        self.files = _OpenFiles()
        self.path, self.repair, self._salvage_name = validate_path(path).absolute(), repair, salvage
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        if repair and not any(self.path.glob("frames-*")):
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} does not contain a store; pass the storage_dir of a buffer"
            )
        self._created = not self.path.exists()
        if self._created:
            check_folder("storage_dir", path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_store_file(entry))
        except OSError as error:
            raise storage_error(self.path, error, doing="use the folder") from error
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} contains {foreign[0]!r}, which is not part of a store; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        with _opening:
            self._take_lock(_open_lock_file(self.path / "lock"))
        self._reset(capacity)
        try:
            self._open(resume=resume)
        except BaseException:
            self.abandon()
            raise

    @property
    def rows(self) -> RowArrays:
        """The owner's row arrays."""
        return self.files.rows

    @rows.setter
    def rows(self, value: RowArrays) -> None:
        self.files.rows = value

    @property
    def journal(self) -> Journal | None:
        """Journal of the valid elements; None if there are no frames."""
        return self.files.journal

    @journal.setter
    def journal(self, value: Journal | None) -> None:
        self.files.journal = value

    def _reset(self, capacity: int) -> None:
        """Drop the settings, rows and journal, and choose a new identity."""
        self._identity, self._numbers = os.urandom(16), [0]
        self.settings: dict[str, Any] | None = None
        self.rows, self.journal = RowArrays(capacity), None

    def _open(self, *, resume: bool) -> None:
        """Open the store in the folder; delete it if its creation was not finished."""
        manifest = self.path / MANIFEST
        if not manifest.exists():
            if self.repair or (self._has_any(*_JOURNAL) and not self._has_any(_INCOMPLETE)):
                raise CorruptFileError(
                    f"{self.path} contains a store, but its {MANIFEST} is missing, which has the store's settings; "
                    "restore that file, or pass another storage_dir. Nothing was deleted"
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
                    raise self.corrupt_file_error(name, "it is missing or empty")
            self.rows = RowArrays(found["rows"]["n_rows"])
            for name, arrays in files.items():
                fields = {key: (tuple(shape), np.dtype(dtype)) for key, (shape, dtype) in arrays.items()}
                self.rows.add(name, fields, self._region_file(name))
            self.journal = self._new_journal()
            self.settings = found["settings"]
        if not (resume or self.repair):
            self._check_empty()
        self.delete_old_frames()

    def _check_empty(self) -> None:
        """Raise if the folder contains elements, which another run may have added."""
        record, _ = self.read_journal()
        if record.length:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} contains {record.length:,} rows of an earlier buffer, expected an "
                "empty folder. Pass resume=True to continue with them, or another storage_dir"
            )

    def _check_options(self, stored_options: dict[str, Any]) -> None:
        """Raise if the folder's store was created with other options."""
        # capacity is listed last, because it follows from options such as n_envs.
        names = sorted({**stored_options, **self.options}, key=lambda name: name == "capacity")
        differing = [name for name in names if stored_options.get(name) != self.options.get(name)]
        if differing:
            was, given = (
                " and ".join(f"{name}={options.get(name)!r}" for name in differing)
                for options in (stored_options, self.options)
            )
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} was created with {was}, not with {given}; pass the same options, or "
                "another storage_dir"
            )

    def corrupt_file_error(self, name: str, what: str) -> CorruptFileError:
        """Build the error for a damaged file.

        :param name: Name of the file
        :param what: Description of the damage
        """
        fix = f"To keep the intact part: {self._salvage_name}({str(self.path)!r})"
        return CorruptFileError(
            f"{self.path / name} is damaged: {what}. {'Restore it from a copy' if self.repair else fix}"
        )

    def _delete_contents(self) -> None:
        """Delete all files except the lock."""
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == _INCOMPLETE):
            if entry.name != "lock":
                _delete_file(entry)

    def _has_any(self, *names: str) -> bool:
        """Return whether the folder contains any of these files."""
        return any((self.path / name).exists() for name in names)

    def _is_in_place(self) -> bool:
        """Return whether the path still leads to this folder.

        The folder may have been moved or replaced.
        """
        with contextlib.suppress(FileNotFoundError):
            # Windows cannot move a folder with open files.
            return _system.WINDOWS or os.path.samestat(os.fstat(self._lock), os.stat(self.path / "lock"))
        return False

    def _check_in_place(self) -> None:
        """Raise if the path does not lead to this folder any more."""
        if not self._is_in_place():
            raise StorageError(
                f"{self.path} was moved, deleted or replaced since it was opened, so nothing is written to it any "
                "more; pass another storage_dir"
            )

    def _mark_incomplete(self) -> None:
        """Create the file that marks a store whose creation is not finished."""
        self._check_in_place()
        try:
            (self.path / _INCOMPLETE).touch()
        except OSError as error:
            raise storage_error(self.path / _INCOMPLETE, error, doing="write") from error

    def start_over(self) -> None:
        """Delete a store without elements, and start with an empty folder."""
        self._mark_incomplete()
        (self.path / MANIFEST).unlink(missing_ok=True)
        self._reset(self.rows.n_rows)
        self._delete_contents()

    def _region_file(self, name: str, *, new: bool = False) -> RegionFile:
        """Return a file of the store, for a region; with ``new``, delete an old file first."""
        if not _FILES.fullmatch(name):
            raise CorruptFileError(f"{self.path / MANIFEST} is damaged: it names {name!r}, which is not a store's file")
        if new:
            self._check_in_place()
            _delete_file(self.path / name)  # a killed process may have left it
        # Users have the arrays that they requested by name, and may write to any row.
        return RegionFile(self.path / name, self._identity, self.repair, lenient=name.startswith(("row-", _MUTABLE)))

    def _new_journal(self) -> Journal:
        """Create the journal of the rows, in its two files."""
        return Journal(self.rows.n_rows, files=(self._region_file(_JOURNAL[0]), self._region_file(_JOURNAL[1])))

    def _frame_file_names(self, numbers: list[int]) -> list[str]:
        return [f"frames-{number}" for number in numbers]

    def frames(self, kind: int = 0, *, next_generation: bool = False) -> RegionFile:
        """Return the file that stores frames of one kind, such as those of one image key.

        With ``next_generation``, it is the file that will replace the present one.
        """
        name = f"frames-{self._numbers[0] + kind + next_generation}"
        return self._region_file(name, new=next_generation or self.settings is None)

    def begin(self, settings: dict[str, Any], *, kinds: int = 1, next_generation: bool = False) -> None:
        """Write the manifest for frames with these settings; create the journal if there is none.

        :param settings: Settings of the frames, as plain values
        :param kinds: Number of kinds of frames; if there are several, they cannot be replaced later
        :param next_generation: Whether the frames replace the present ones
        :raises StorageError: If the folder cannot be written to
        """
        before = self._numbers
        try:
            if self.journal is None:
                self._mark_incomplete()
                self.rows.add("sums", {_SUMS: ((), np.dtype(np.uint32))}, self._region_file("sums", new=True))
                self.journal = self._new_journal()
                self.journal.write_all(length=0, next_row=0, n_written=0, exposed=False)
            first = self._numbers[0] + next_generation
            self._numbers = [*range(first, first + kinds)]
            self._write_manifest(settings)
        except BaseException:
            self._numbers = before
            raise
        self.delete_old_frames()

    def _write_manifest(self, settings: dict[str, Any]) -> None:
        """Replace the manifest, which has the store's settings and files."""
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

    def add_rows(self, name: str, fields: Fields, *, n_reserved: int = 0) -> None:
        """Add arrays of zeros to :attr:`rows`.

        :param name: Name of their file
        :param fields: Shape and dtype of each array's rows, by name
        :param n_reserved: Number of rows to reserve, as in the other arrays
        :raises StorageError: If the folder cannot be written to
        """
        self.rows.add(name, fields, self._region_file(name, new=True))
        self.rows.reserve(n_reserved)
        if self.settings is not None:
            self._write_manifest(self.settings)

    def array(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, n_written: int, mutable: bool
    ) -> npt.NDArray[Any]:
        """Return a row array, which is created if it does not exist.

        :param n_written: Number of rows that the store has written
        :param mutable: Whether any row may change at any time, so that rows have no checksums
        :raises InvalidArgumentError: If the array does not exist, is not mutable, and the store has transitions
        """
        found = self.rows.get(name, shape, dtype)
        if found is None and n_written and not mutable:
            raise InvalidArgumentError(
                f"{self.path} contains transitions, but no row array {name!r}; pass another storage_dir, or request "
                "all arrays before the first transition is added"
            )
        if found is None:
            prefix, fields = _MUTABLE if mutable else "row-", {name: (tuple(shape), np.dtype(dtype))}
            self.add_rows(f"{prefix}{name}", fields, n_reserved=n_written)
        return self.rows.arrays[name]

    def read_journal(self, n_written: Callable[[], int | None] = lambda: None) -> tuple[JournalRecord, Places]:
        """Return the latest record of the journal, and the rows that were being written.

        If both records are damaged, a folder that is repaired keeps all rows that were ever written. This is impossible
        for a full store, whose oldest row is then unknown.

        :param n_written: Returns the number of rows that were ever written, or None if the last row is one of them
        :raises CorruptFileError: If the valid rows are unknown, or the files have fewer rows
        """
        assert self.journal is not None
        most = self.rows.n_rows
        try:
            record, writing = self.journal.read()
        except CorruptFileError:
            if not self.repair or (found := n_written()) is None:
                what = "the checksums of both records are wrong, so the oldest row of a full store is unknown"
                raise self.corrupt_file_error(_JOURNAL[0], what) from None
            record, writing = JournalRecord(0, found, found, found, 0, 0), np.zeros(0, dtype=np.int64)
        if not record.length <= record.n_written <= most or record.next_row > most:
            raise self.corrupt_file_error(_JOURNAL[0], "its number of elements exceeds the number of rows")
        needed = max(record.n_written, int(writing.max(initial=-1)) + 1)
        n_reserved, name = self.rows.smallest_file()
        if n_reserved < (min(record.length, 1) if self.repair else needed):
            raise self.corrupt_file_error(name, f"its head reports {n_reserved} rows, expected {needed}")
        return record, writing

    def delete_old_frames(self) -> None:
        """Delete files of frames that were replaced."""
        self._check_in_place()
        for path in self.path.glob("frames-*"):
            if path.name not in self._frame_file_names(self._numbers):
                _system.remove_file(path)
        (self.path / _INCOMPLETE).unlink(missing_ok=True)

    @property
    def is_writer(self) -> bool:
        """Whether this process may write to the folder; False in a fork of the owner."""
        return self._pid == os.getpid()

    def check_writer(self) -> None:
        """Raise if this process must not write to the folder.

        :raises StorageError: If this process is a fork of the one that opened the folder, or the folder is closed
        """
        if not self.is_writer:
            raise StorageError(
                f"{self.path} belongs to process {self._pid}; this is a fork of it, process {os.getpid()}, and the two "
                "would overwrite each other's frames. Open another storage_dir here"
            )
        self.check_open()

    @property
    def closed(self) -> bool:
        """Whether the folder was closed, so that it can be neither read nor written."""
        return not self.close.alive and self.is_writer

    def check_open(self) -> None:
        """Raise if the folder is closed.

        :raises StorageError: If the folder was closed
        """
        if self.closed:
            raise StorageError(
                f"{self.path} was closed; open it again with a new buffer of the same storage_dir, and resume=True"
            )

    def _take_lock(self, descriptor: int) -> None:
        """Keep the descriptor of the locked file until the folder is closed."""
        self._pid, self._lock = os.getpid(), descriptor
        self._thread_name = threading.current_thread().name
        # Closing the descriptor releases the lock, once all processes that share the store have closed theirs.
        # The folder is closed too when it is garbage-collected, and when the process exits.
        self.close = weakref.finalize(self, self.files.close, descriptor)
        _open_folders.add(self)

    def abandon(self) -> None:
        """Close the folder, and delete it if this process created it."""
        must_delete = self._created and self._is_in_place()
        self.close()
        if must_delete:
            shutil.rmtree(self.path, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        # Used only to send the folder to a child process, which then shares the lock.
        return {**self.__dict__, "_lock": _system.picklable_descriptor(self._lock), "close": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.files.complete = None  # the process that opened the folder does it
        self._take_lock(state["_lock"].detach())


def _is_store_file(entry: Path) -> bool:
    """Return whether a file in a folder belongs to a store."""
    known = entry.name in ("lock", MANIFEST, f"{MANIFEST}.new", _INCOMPLETE) or _FILES.fullmatch(entry.name)
    return bool(known) and not entry.is_dir()


def _delete_file(path: Path) -> None:
    """Delete a file, if it exists; raise ``StorageError`` if that fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error, doing="delete") from error


def _find_owner(path: Path) -> StoreFolder | None:
    """Return the open folder of this process at a path, or None."""
    for folder in list(_open_folders):
        with contextlib.suppress(OSError):
            if not folder.closed and os.path.samestat(os.fstat(folder._lock), os.stat(path / "lock")):
                return folder
    return None


def _in_use_error(path: Path) -> StorageError:
    """Return the error for a folder that is locked, with the name of its owner."""
    process = ""
    for _ in range(_OWNER_ATTEMPTS):
        if (owner := _find_owner(path)) is not None:
            return StorageError(
                f"{path} is in use by this process, {os.getpid()}: by a buffer that thread {owner._thread_name!r} "
                "opened; close that buffer first, or pass another storage_dir"
            )
        with contextlib.suppress(OSError):
            process = (path / "lock").read_text(errors="replace")[:32]
        if process and process != str(os.getpid()):  # an id of this process is from an earlier owner
            break
        time.sleep(_OWNER_PAUSE_S)
    who = "this" if process == str(os.getpid()) else "another"
    return StorageError(
        f"{path} is in use by {who} process, {process or 'of unknown id'}, or one that shares its buffer; close that "
        "buffer first, or pass another storage_dir"
    )


def _open_lock_file(path: Path) -> int:
    """Open and lock a file, write this process's id to it, and return its descriptor."""
    try:
        try:
            lock = _system.open_exclusive(path)
        except BlockingIOError:
            # A model is a reference cycle, so its buffer exists after `del model` until garbage is collected.
            if _find_owner(path.parent) is not None:
                gc.collect()
            lock = _system.open_exclusive(path)
    except BlockingIOError:
        raise _in_use_error(path.parent) from None
    except OSError as error:
        if error.filename is not None:
            raise storage_error(path, error, doing="open") from error
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}. Pass a storage_dir on a file system that supports locks, "
            "such as a local disk; some network drives do not"
        ) from error
    os.ftruncate(lock, 0)
    _system.write_at(lock, str(os.getpid()).encode(), 0)
    return lock


def _unlock_in_child() -> None:
    """Close all folders in a forked child, so that it does not keep them locked."""
    # A forked child inherits the lock. Without this, the folder would stay locked while any child is alive.
    for folder in list(_open_folders):
        folder.files.complete = None  # its rows and journal belong to the parent process
        folder.close()


_system.after_fork(_unlock_in_child)
