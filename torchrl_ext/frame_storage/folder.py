"""The folder of a frame storage whose elements lie in files, finding them again, and what is left of a damaged one.

=================  ===================================================================================================
file               contents
=================  ===================================================================================================
``storage.json``   what the storage is like; written last, so that what is half made is not taken for one
``rows``           the elements, with handles in place of images: one array a leaf, and their checksums
``frames-<n>``     the images of a column, with checksums
``journal``        how many elements count, and which are being written
``journal-2``      the other one of the two latest notes of that; in a storage that was closed they say the same
=================  ===================================================================================================

All of it is arrays and plain values. Each file names the storage that it belongs to, and grows with what it holds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, StorageError
from rl_ext_core.frames import Salvaged
from rl_ext_core.frames.folder import read_json, reading, write_json
from rl_ext_core.frames.journal import Journal, Note, Places, noted_elements
from rl_ext_core.frames.region import RegionFile
from rl_ext_core.frames.store import longest_run
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import described
from torchrl_ext.frame_storage.rows import RowFile

_logger = logging.getLogger("torchrl_ext")

FORMAT = 5
MANIFEST = "storage.json"
_JOURNAL = ("journal", "journal-2")
_NOT_OPTIONS = ("max_size", "ndim", "pixels")


class StorageFolder:
    """A folder that holds the elements of one storage.

    :param path: made where it does not exist.
    :param arguments: of the storage: ``max_size``, ``ndim``, ``pixels``, and the options of its pools.
    :param mend: whether files that were cut short are made as long as they were.
    :raises InvalidArgumentError: if there are other files in it.
    :raises StorageError: if it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], arguments: dict[str, Any], *, mend: bool = False) -> None:
        if not os.fspath(path):
            raise InvalidArgumentError(f"storage_dir={path!r} names no folder; for example storage_dir='buffer'")
        self.path, self.arguments = Path(path).absolute(), arguments
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            entries = sorted(self.path.iterdir())
        except OSError as error:
            raise StorageError(f"cannot use {self.path}: {error.strerror}; pass another storage_dir") from error
        if foreign := [entry.name for entry in entries if not _ours(entry.name)]:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} holds {foreign[0]!r}, which is no part of a storage; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self._identity, self._mend = os.urandom(16), mend

    def found(self) -> dict[str, Any] | None:
        """Return what the storage in the folder is like, or None where there is none.

        :raises InvalidArgumentError: if it was made with other arguments.
        :raises CorruptFileError: if it cannot be read, or is of a later format.
        """
        if not (self.path / MANIFEST).exists():
            self.clear()
            return None
        found = read_json(self.path / MANIFEST, FORMAT)
        for name, given in json.loads(json.dumps(self.arguments)).items():
            if found["arguments"].get(name) != given:
                raise InvalidArgumentError(
                    f"the storage in {self.path} was made with {name}={found['arguments'].get(name)!r}, got {given!r}; "
                    "pass the same, or another storage_dir"
                )
        names = ["rows", *_JOURNAL, *(f"frames-{number}" for number in range(len(found["columns"])))]
        files = [self.path / name for name in names]
        missing = [file for file in files if not file.is_file() or file.stat().st_size == 0]
        if missing and not self._mend:
            raise CorruptFileError(
                f"{missing[0]} is missing or empty: it was deleted, or cut short; to keep what is intact: "
                f"FrameStorage.salvage({str(self.path)!r})"
            )
        self._identity = bytes.fromhex(found["identity"])
        return found

    def clear(self) -> None:
        """Delete what was half made.

        :raises CorruptFileError: if elements were stored, so that there was more than that.
        """
        if (held := noted_elements((self.path / _JOURNAL[0], self.path / _JOURNAL[1]))) > 0:
            raise CorruptFileError(
                f"{self.path} holds {held} elements, and {MANIFEST} is missing, which says what they are like; put it "
                "back, or pass another storage_dir. Nothing was deleted"
            )
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def begin_anew(self) -> None:
        """Delete a storage that holds nothing."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        self.clear()
        self._identity = os.urandom(16)

    def _file(self, name: str) -> RegionFile:
        return RegionFile(self.path / name, self._identity, self._mend)

    def frames(self, number: int) -> RegionFile:
        """Return the file of a column's images."""
        return self._file(f"frames-{number}")

    def journal(self, n_rows: int) -> Journal:
        """Return the notes that are there, or else new ones."""
        return Journal(n_rows, files=(self._file(_JOURNAL[0]), self._file(_JOURNAL[1])))

    def rows(self, description: dict[str, Any]) -> RowFile:
        """Return the elements that are there.

        :raises CorruptFileError: if they are described in no way that is known.
        """
        with reading(f"{self.path / MANIFEST} is"):
            return RowFile(description, self._file("rows"))

    def new_rows(self, rows: Any) -> RowFile:
        """Return elements like these, all zero.

        :raises InvalidTypeError: if there is something in them that is no tensor.
        """
        if type(rows) is not TensorDict:
            raise InvalidTypeError(
                f"a storage in files holds TensorDicts, got {type(rows).__name__}; convert the data: "
                "data.to_tensordict(), or store without storage_dir"
            )
        return self.rows(described(rows, values=False)[0])

    def begin(self, columns: list[FrameColumn], rows: RowFile) -> None:
        """Note that all files are there."""
        manifest = {
            "format": FORMAT,
            "identity": self._identity.hex(),
            "arguments": self.arguments,
            "columns": [column.kind for column in columns],
            "rows": rows.description,
        }
        write_json(self.path / MANIFEST, manifest)


def _ours(name: str) -> bool:
    return name in (MANIFEST, f"{MANIFEST}.new", "rows", *_JOURNAL) or name.startswith("frames-")


def salvage(path: Path) -> Salvaged:
    """Keep the longest run of intact elements of a damaged folder; see ``FrameStorage.salvage``."""
    if not path.is_dir() or not any(path.iterdir()):
        raise InvalidArgumentError(f"storage_dir={str(path)!r} holds no storage")
    folder = StorageFolder(path, {}, mend=True)
    folder.arguments = read_json(path / MANIFEST, FORMAT)["arguments"]
    opened: list[Any] = []
    try:
        with reading(f"{path} is"):
            found = folder.found() or {}
            opened.append(file := folder.rows(found["rows"]))
            n_places = len(file.tensors)
            opened.append(journal := folder.journal(n_places))
            options = {name: value for name, value in folder.arguments.items() if name not in _NOT_OPTIONS}
            columns = []
            for number, kind in enumerate(found["columns"]):
                columns.append(FrameColumn(kind, n_places, options, num_threads=None, file=folder.frames(number)))
                opened.append(columns[-1])
            kept, length = _keep_longest_run(file, columns, journal)
            file.make_sure_of(journal.read()[0].touched)
            # Of several dimensions, an element of the first one is as many as the others hold.
            n = file.tensors.shape[1 : folder.arguments["ndim"]].numel()
    finally:
        for each in opened:
            each.unlock()
    _logger.warning("%s: kept %d elements, gave up %d", path, kept * n, (length - kept) * n)
    return Salvaged(kept * n, (length - kept) * n)


def _keep_longest_run(file: RowFile, columns: list[FrameColumn], journal: Journal) -> tuple[int, int]:
    """Move the longest run of elements that are whole to the beginning; return how many it and all were."""
    n_places, rows = len(file.tensors), file.tensors[: file.held]
    note, writing = _last_note(file, journal)
    if note.length and not len(rows):
        raise CorruptFileError(
            f"the head of {file._region.path} is damaged: where its parts lie is not known, so none of {note.length} "
            "elements can be named; put the file back from a copy"
        )
    good = np.ones(min(note.length, len(rows)), dtype=np.bool_)
    good[writing[writing < len(good)]] = False
    if not note.exposed:
        good[file.wrong(np.arange(len(good)))] = False
    for column in columns:
        good &= _readable(column, rows, good)
    oldest = note.following % n_places if len(good) == n_places else 0
    order = (oldest + np.arange(len(good))) % max(len(good), 1)
    places = order[slice(*longest_run(good[order]))]
    kept = rows[torch.from_numpy(places)].clone()
    rows[: len(places)] = kept
    for column in columns:
        column.clear(rows, len(places), len(rows))
        column.found_again(column.handles(rows, len(rows)))
    file.update_sums(np.arange(len(places)))
    journal.written(len(places), len(places))
    journal.settle()
    return len(places), note.length


def _last_note(file: RowFile, journal: Journal) -> tuple[Note, Places]:
    """The latest note, and places that are being written; where none is whole, all places are looked at.

    :raises CorruptFileError: if none is whole, and which element is the oldest cannot be known.
    """
    try:
        return journal.read()
    except CorruptFileError as error:
        if file.full:
            raise CorruptFileError(
                f"{str(error).partition(';')[0]}, so where this full storage begins is not known, nor the order of its "
                "elements; put back one of the two files from a copy"
            ) from None
        return Note(0, file.held, 0, file.held, 0, 0), np.zeros(0, dtype=np.int64)


def _readable(column: FrameColumn, rows: Any, good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(n,) which elements have all their images of a column."""
    length = len(good)
    column.clear(rows, length, len(rows))
    for key in column.keys:
        rows.get(key)[:length][torch.from_numpy(~good)] = 0
    flat = column.handles(rows, length)
    there = column.found_again(flat) | (flat == 0)
    there[there] &= column.pool.readable(flat[there])
    found: npt.NDArray[np.bool_] = there.reshape(len(column.keys), length, -1).all(axis=(0, 2))
    return found
