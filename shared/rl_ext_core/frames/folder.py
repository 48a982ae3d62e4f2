"""The folder of a store: who may write to it, what lies in it, and its rows.

===============  =====================================================================================================
file             contents
===============  =====================================================================================================
``lock``         number of the process that writes; locked while it does
``store.json``   what the store is like; written last, so that what is half made is not taken for one
``frames-<n>``   frames and index, with checksums, as the ``n``-th way to store them has them
``row-<name>``   an array with one row a transition, of the store's owner
``sums``         checksums of these rows
``journal``      how many transitions count
``journal-2``    the other one of the two latest notes of that; in a store that was closed they say the same
===============  =====================================================================================================

All of it is arrays and plain values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, RlExtError, StorageError
from rl_ext_core.frames.checkpoint import checksum
from rl_ext_core.frames.journal import Journal, noted_elements
from rl_ext_core.frames.region import RegionFile

FORMAT_VERSION = 2
MANIFEST = "store.json"
_OURS = re.compile(r"lock|store\.json(\.new)?|journal(-2)?|sums|row-.*|frames-\d+")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_open_folders: weakref.WeakSet[StoreFolder] = weakref.WeakSet()


def refusal(path: Path, error: OSError, *, doing: str) -> StorageError:
    """The error for what the system refused."""
    return StorageError(
        f"cannot {doing} {path}: {error.strerror or error}. What was stored before is intact and nothing of this call "
        "is; make room there, or pass a storage_dir elsewhere"
    )


def damage(path: Path, what: str) -> CorruptFileError:
    """The error for a file that holds something else than was written."""
    return CorruptFileError(
        f"{path} is damaged: {what}. To keep what is intact: rl_ext_core.frames.salvage({str(path.parent)!r})"
    )


def checked_path(path: str | os.PathLike[str]) -> Path:
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
def reading(what: str) -> Iterator[None]:
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
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:
        file.write(json.dumps({**fields, "checksum": checksum(fields)}))
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def read_json(path: Path, version: int) -> dict[str, Any]:
    """What :func:`write_json` wrote.

    :param version: that ``format`` must be.
    :raises CorruptFileError: if it cannot be read, or is of another format.
    """
    with reading(f"{path} is"):
        found: dict[str, Any] = json.loads(path.read_text())
        if found["format"] != version:
            raise CorruptFileError(
                f"{path.parent} has format {found['format']!r}, this version reads {version}; open the folder with the "
                "version of rl-ext that wrote it"
            )
    if found.pop("checksum", None) != checksum(found):
        raise CorruptFileError(f"{path} is damaged: its checksum does not match its contents")
    return found


class Rows:
    """Arrays with one row a transition, in memory, or in mapped files where there is a folder.

    A file has room on the disk for as many rows as were asked for by :meth:`make_sure_of`; writing where there is none
    ends the process.

    :param capacity: rows.
    :param path: the folder.
    """

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        self._capacity, self._path = capacity, path
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._files: list[tuple[int, int, Path]] = []  # descriptor, bytes of a row
        self._held = 0
        self._sums = np.zeros(0, dtype=np.uint32)
        self._summed: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None  # addresses, bytes of a row

    def get(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """The array of that name, if there is one.

        :raises InvalidArgumentError: if it has another shape or dtype, or this is no name for a file.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"a row array cannot be named {name!r}; use letters, digits, '_', '-' and '.'")
        array = self._arrays.get(name)
        if array is not None and (array.shape[1:], array.dtype) != (tuple(shape), np.dtype(dtype)):
            raise InvalidArgumentError(
                f"row array {name!r} holds rows of shape {array.shape[1:]} and dtype {array.dtype}, not {tuple(shape)} "
                f"and {np.dtype(dtype)}; pass another storage_dir"
            )
        return array

    def add(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, new: bool = True) -> npt.NDArray[Any]:
        """A new array, zero; or one that is there.

        :raises StorageError: if there is no room on the disk.
        :raises CorruptFileError: if a file has another size.
        """
        self._arrays[name] = self._allocated(f"row-{name}", (self._capacity, *shape), np.dtype(dtype), new=new)
        self._summed = None
        return self._arrays[name]

    def open_sums(self, *, new: bool) -> None:
        """Has the rows of files checked."""
        self._sums = self._allocated("sums", (self._capacity,), np.dtype(np.uint32), new=new)

    def _allocated(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, new: bool) -> npt.NDArray[Any]:
        n_bytes = math.prod(shape) * dtype.itemsize
        if self._path is None or n_bytes == 0:
            return np.zeros(shape, dtype=dtype)
        path = self._path / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise refusal(path, error, doing="open") from error
        self._files.append((descriptor, n_bytes // self._capacity, path))
        try:
            if new:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, n_bytes)
            elif (size := os.fstat(descriptor).st_size) != n_bytes:
                raise damage(path, f"it has {size:,} bytes, expected {n_bytes:,}")
            mapped = mmap.mmap(descriptor, n_bytes)
        except OSError as error:
            raise refusal(path, error, doing=f"write {n_bytes:,} bytes to") from error
        self._held = 0
        # Not np.memmap: parts of it would be pickled by the name of that class.
        return np.frombuffer(mapped, dtype=dtype).reshape(shape)

    def make_sure_of(self, n_rows: int) -> None:
        """Takes room on the disk for the first rows, and a quarter more than there was.

        :raises StorageError: if there is none.
        """
        if n_rows <= self._held:
            return
        n_rows = min(max(n_rows, self._held + self._held // 4, 64), self._capacity)
        for descriptor, row_bytes, path in self._files:
            try:
                os.posix_fallocate(descriptor, 0, n_rows * row_bytes)
            except OSError as error:
                raise refusal(path, error, doing=f"reserve {n_rows * row_bytes:,} bytes for") from error
        self._held = n_rows

    def described(self) -> dict[str, list[Any]]:
        """Shape of a row and dtype of each."""
        return {name: [list(array.shape[1:]), array.dtype.str] for name, array in self._arrays.items()}

    def _sums_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        from rl_ext_core.frames.machine import sum_rows  # it loads numba

        if self._summed is None:
            arrays = [array for _, array in sorted(self._arrays.items()) if array[:1].nbytes]
            addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
            self._summed = addresses, np.array([array[:1].nbytes for array in arrays], dtype=np.int64)
        found = np.zeros(len(rows), dtype=np.uint32)
        sum_rows(*self._summed, rows, found)
        return found

    def note(self, row: int) -> None:
        """Notes what a row is now."""
        place = np.array([row])
        self._sums[place] = self._sums_of(place)

    def wrong(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of these rows that are not what was noted."""
        found: npt.NDArray[np.int64] = rows[self._sums_of(rows) != self._sums[rows]]
        return found

    def nbytes(self, n_rows: int) -> int:
        """Bytes of that many rows."""
        return sum(array[:n_rows].nbytes for array in (*self._arrays.values(), self._sums))

    def close(self) -> None:
        """Closes the files; the arrays can be read on."""
        while self._files:
            os.close(self._files.pop()[0])


class StoreFolder:
    """A folder that this process alone may write to.

    :param path: made where it does not exist.
    :param options: what the folder's owner is told, plain values; another owner has to be told the same.
    :param capacity: rows.
    :param mend: whether files that were cut short are made as long as they were, and options are not compared.
    :ivar mend: likewise.
    :ivar settings: how the frames that are there are stored; None where there are none.
    :ivar rows: the owner's arrays.
    :ivar journal: what counts, once there is anything.
    :raises InvalidArgumentError: if there are other files in it, it was made with other options, or the path is empty.
    :raises StorageError: if another process writes to it, or it cannot be made.
    :raises CorruptFileError: if a file in it is damaged.
    """

    journal: Journal | None = None

    def __init__(
        self, path: str | os.PathLike[str], options: dict[str, Any], *, capacity: int, mend: bool = False
    ) -> None:
        self.path, self.mend = checked_path(path).absolute(), mend
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _OURS.fullmatch(entry.name))
        except OSError as error:
            raise refusal(self.path, error, doing="use the folder") from error
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} holds {foreign[0]!r}, which is no part of a store; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self._lock = _locked(self.path / "lock")
        self._pid = os.getpid()
        self._identity, self._generation = os.urandom(16), 0
        self.settings: dict[str, Any] | None = None
        self.rows = Rows(capacity, self.path)
        _open_folders.add(self)
        try:
            self._open(capacity)
        except BaseException:
            self.abandon()
            raise

    def _open(self, capacity: int) -> None:
        if not (self.path / MANIFEST).exists():
            if noted_elements((self.path / "journal", self.path / "journal-2")) > 0:
                raise damage(self.path / MANIFEST, "it is gone, which says what the other files hold")
            for path in self.path.iterdir():  # what was half made
                if path.name != "lock":
                    path.unlink()
            return
        found = read_json(self.path / MANIFEST, FORMAT_VERSION)
        if self.mend:
            self.options = found["options"]
            capacity = found["settings"]["capacity"]
            self.rows = Rows(capacity, self.path)
        self._check_same(found["options"])
        self._identity, self._generation = bytes.fromhex(found["identity"]), found["generation"]
        self.settings = found["settings"]
        rows = [f"row-{name}" for name, (shape, _) in found["rows"].items() if math.prod(shape)]
        for name in (f"frames-{self._generation}", "sums", "journal", "journal-2", *rows):
            file = self.path / name
            if not self.mend and not (file.is_file() and file.stat().st_size):
                raise damage(file, "it is gone, or empty")
        with reading(f"{self.path / MANIFEST} is"):
            for name, (shape, dtype) in found["rows"].items():
                self._mend_size(f"row-{name}", capacity * math.prod(shape) * np.dtype(dtype).itemsize)
                self.rows.add(name, tuple(shape), dtype, new=False)
        self._mend_size("sums", capacity * np.dtype(np.uint32).itemsize)
        self.rows.open_sums(new=False)
        self.journal = self._new_journal()
        self._remove_others()

    def _mend_size(self, name: str, n_bytes: int) -> None:
        if self.mend and n_bytes:
            with (self.path / name).open("ab") as file:
                file.truncate(n_bytes)

    def _check_same(self, there: dict[str, Any]) -> None:
        # Those that are told to others too come first: another n_envs makes another capacity as well.
        names = sorted({**there, **self.options}, key=lambda name: name == "capacity")
        differing = [name for name in names if there.get(name) != self.options.get(name)]
        if differing:
            was, given = (
                " and ".join(f"{name}={told.get(name)!r}" for name in differing) for told in (there, self.options)
            )
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} was made with {was}, not with {given}; pass what it was made with, or "
                "another storage_dir"
            )

    def _file(self, name: str) -> RegionFile:
        return RegionFile(self.path / name, self._identity, self.mend, locked=False)

    def _new_journal(self) -> Journal:
        return Journal(1, files=(self._file("journal"), self._file("journal-2")))

    def frames(self, *, next_generation: bool = False) -> RegionFile:
        """The file of the frames; or that of frames which will take their place."""
        file = self._file(f"frames-{self._generation + next_generation}")
        if next_generation or self.settings is None:
            file.path.unlink(missing_ok=True)  # of a process that was killed
        return file

    def begin(self, settings: dict[str, Any], *, next_generation: bool = False) -> None:
        """Makes frames count that are stored in this way.

        :raises StorageError: if it cannot be written.
        """
        try:
            if self.journal is None:
                self.rows.open_sums(new=True)
                self.journal = self._new_journal()
                self.journal.note(length=0, following=0, touched=0, exposed=False)
            self._generation += next_generation
            self._write(settings)
        except OSError as error:
            self._generation -= next_generation
            raise refusal(self.path / MANIFEST, error, doing="write") from error
        self._remove_others()

    def _write(self, settings: dict[str, Any]) -> None:
        manifest = {
            "format": FORMAT_VERSION,
            "identity": self._identity.hex(),
            "generation": self._generation,
            "options": self.options,
            "settings": settings,
            "rows": self.rows.described(),
        }
        write_json(self.path / MANIFEST, manifest)
        self.settings = settings

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, empty: bool) -> npt.NDArray[Any]:
        """A row array, made where there is none yet.

        :param empty: whether no transition was stored.
        :raises InvalidArgumentError: if transitions were stored without it.
        """
        found = self.rows.get(name, shape, dtype)
        if found is not None:
            return found
        if not empty:
            raise InvalidArgumentError(
                f"{self.path} holds transitions and no row array {name!r}; pass another storage_dir, or ask for all "
                "arrays before the first transition is added"
            )
        found = self.rows.add(name, shape, dtype)
        assert self.settings is not None
        try:
            self._write(self.settings)
        except OSError as error:
            raise refusal(self.path / MANIFEST, error, doing="write") from error
        return found

    def _remove_others(self) -> None:
        for path in self.path.glob("frames-*"):
            if path.name != f"frames-{self._generation}":
                path.unlink(missing_ok=True)

    @property
    def ours(self) -> bool:
        """Whether this is the process that opened it, and not one forked from that."""
        return self._pid == os.getpid()

    def check_ours(self) -> None:
        """
        :raises StorageError: in a process that was forked from the one that writes, and after it was closed.
        """
        if not self.ours:
            raise StorageError(
                f"{self.path} is written to by process {self._pid}, not by this one, {os.getpid()}, which was forked "
                "from it: two of them would overwrite each other's frames. Open another storage_dir here"
            )
        self.check_open()

    @property
    def closed(self) -> bool:
        """Whether nothing can be read or written any more."""
        return self._lock < 0 and self.ours

    def check_open(self) -> None:
        """
        :raises StorageError: after it was closed.
        """
        if self.closed:
            raise StorageError(f"{self.path} was closed; open it again, by another buffer with the same storage_dir")

    def close(self) -> None:
        """Lets others write to it."""
        self.rows.close()
        self.unlock()
        _open_folders.discard(self)

    def unlock(self) -> None:
        """Gives up the lock, in this process: the one that it was forked from keeps its own."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def abandon(self) -> None:
        """Closes it, and leaves nothing where nothing was."""
        self.close()
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)


def _locked(path: Path) -> int:
    """A descriptor of the locked file."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise refusal(path, error, doing="open") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace")
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StorageError(
                f"cannot lock {path}: {error.strerror or error}; nobody else is known to use it. Pass a storage_dir "
                "on a file system that has locks, as local disks do and some network drives do not"
            ) from error
        who = "this process" if owner == str(os.getpid()) else "another process"
        raise StorageError(
            f"{path.parent} is in use by {who}, {owner or 'of unknown number'}; close its buffer first, or pass "
            "another storage_dir"
        ) from None
    return lock


def _unlock_in_child() -> None:
    # A forked child shares the lock: without this, the folder stays locked for as long as any child lives.
    for folder in list(_open_folders):
        folder.unlock()


os.register_at_fork(after_in_child=_unlock_in_child)
