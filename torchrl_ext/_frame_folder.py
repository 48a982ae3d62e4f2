"""The folder of a frame storage whose elements lie in files, and finding them again.

================  ====================================================================================================
file              contents
================  ====================================================================================================
``storage.json``  what the storage is like; written last, so that what is half made is not taken for one
``rows/``         the elements, with handles in place of images, memory-mapped as TorchRL does it
``frames-<n>``    the images of a column; its numbers tell how many elements count, and whether some are being written
``writing``       which elements are being written
================  ====================================================================================================
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

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError

FORMAT = 1
_MANIFEST = "storage.json"
# The numbers that are kept beside the images of the first column.
_LENGTH, _NEXT, _WRITING = 0, 1, 2
_logger = logging.getLogger("torchrl_ext")


class StorageFolder:
    """A folder that holds the elements of one storage.

    :param path: made where it does not exist.
    :raises InvalidArgumentError: if there are other files in it.
    :raises StorageError: if it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {self.path}: {error.strerror}; pass another storage_dir") from error
        foreign = [entry.name for entry in sorted(self.path.iterdir()) if not _ours(entry.name)]
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} holds {foreign[0]!r}, which is no part of a storage; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self.arguments: dict[str, Any] = {}  # of the storage
        self._writing: npt.NDArray[np.int64] | None = None
        self._fields: npt.NDArray[np.int64] | None = None

    def found(self) -> list[dict[str, Any]] | None:
        """The kinds of columns of the storage in the folder, or None where there is none.

        :raises InvalidArgumentError: if it was made with other arguments.
        :raises CorruptFileError: if it cannot be read, or is of a later format.
        """
        path = self.path / _MANIFEST
        if not path.exists():
            self._clear()
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise CorruptFileError(f"{path} is damaged: {error}") from error
        if found.get("format") != FORMAT:
            raise CorruptFileError(
                f"{self.path} has format {found.get('format')!r}, this version reads {FORMAT}; open it with the "
                "version of rl-ext that wrote it"
            )
        for name, given in json.loads(json.dumps(self.arguments)).items():
            if found["arguments"].get(name) != given:
                raise InvalidArgumentError(
                    f"the storage in {self.path} was made with {name}={found['arguments'].get(name)!r}, got {given!r}; "
                    "pass the same, or another storage_dir"
                )
        kinds: list[dict[str, Any]] = found["columns"]
        for number in range(len(kinds)):
            file = self.frames(number)
            if not file.exists() or file.stat().st_size == 0:
                raise CorruptFileError(f"{file} is missing or empty; start again in another folder")
        return kinds

    def _clear(self) -> None:
        """Deletes what was half made."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def frames(self, number: int) -> Path:
        """The file of a column's images."""
        return self.path / f"frames-{number}"

    def new_rows(self, rows: Any) -> Any:
        """Elements like these in files, all zero."""
        mapped = rows.memmap_like(prefix=self.path / "rows")
        for file in (self.path / "rows").rglob("*.memmap"):
            _reserve(file)
        return mapped

    def begin(self, columns: list[dict[str, Any]], fields: npt.NDArray[np.int64], n_rows: int) -> None:
        """Notes that all files are there."""
        self._map_writing(n_rows)
        self._fields = fields
        beside = self.path / (_MANIFEST + ".new")
        beside.write_text(json.dumps({"format": FORMAT, "arguments": self.arguments, "columns": columns}))
        beside.rename(self.path / _MANIFEST)

    def rows(self) -> Any:
        """The elements that are there.

        :raises CorruptFileError: if files are missing.
        """
        try:
            return TensorDict.load_memmap(self.path / "rows")
        except Exception as error:  # damaged bytes can make the reader do anything
            raise CorruptFileError(f"{self.path / 'rows'} is damaged ({type(error).__name__}: {error})") from error

    def _map_writing(self, n_rows: int) -> None:
        path = self.path / "writing"
        mode: Any = "r+" if path.exists() else "w+"
        self._writing = np.memmap(path, np.int64, mode=mode, shape=(n_rows,))
        _reserve(path)

    def will_write(self, places: npt.NDArray[np.int64]) -> None:
        """Notes which elements do not count until :meth:`written`."""
        assert self._fields is not None
        assert self._writing is not None
        self._writing[: len(places)] = places
        self._fields[_WRITING] = len(places)

    def written(self, length: int, following: int) -> None:
        """Notes that they count, how many elements there are, and where the next one goes."""
        assert self._fields is not None
        self._fields[_LENGTH], self._fields[_NEXT] = length, following
        self._fields[_WRITING] = 0

    def reopened(self, fields: npt.NDArray[np.int64], n_rows: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        """How many elements there are, where the next one goes, and which were being written."""
        self._map_writing(n_rows)
        assert self._writing is not None
        self._fields = fields
        length, following, n_writing = (int(n) for n in fields[:3])
        return length, following, np.array(self._writing[: min(max(n_writing, 0), n_rows)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writing": None, "_fields": None}  # a child maps them anew


def _ours(name: str) -> bool:
    return name in (_MANIFEST, _MANIFEST + ".new", "rows", "writing") or name.startswith("frames-")


def _reserve(path: Path) -> None:
    """Takes the disk space of a file, since writing to a mapping where the disk is full kills."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise StorageError(
                f"cannot write {size:,} bytes to {path}: {error.strerror}; make room there, or pass another storage_dir"
            ) from error


def repair(rows: Any, keys: list[Any], torn: npt.NDArray[np.int64], length: int) -> int:
    """Takes out elements that were half written; returns how many elements are left.

    Those at the end are cut off. One in the middle of a full ring becomes a copy of the one before it, which counts.
    """
    torn = np.unique(torn[(torn >= 0) & (torn < len(rows))])
    if len(torn) == 0:
        return length
    beyond = torn[torn >= length]
    inside = torn[torn < length]
    for key in keys:
        rows.get(key)[torch.from_numpy(beyond)] = 0
    whole = np.setdiff1d(np.arange(length), inside)
    if len(whole) == 0:
        for key in keys:
            rows.get(key)[torch.from_numpy(torn)] = 0
        length = 0
    elif len(inside):
        before = whole[np.searchsorted(whole, inside) - 1]
        rows[torch.from_numpy(inside)] = rows[torch.from_numpy(before)]
    _logger.warning(
        "%d elements were being written when their process ended: %d are lost, %d became copies of the one before",
        len(torn),
        len(beyond) if length else len(torn),
        len(inside) if length else 0,
    )
    return length
