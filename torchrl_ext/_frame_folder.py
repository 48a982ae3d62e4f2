"""The folder of a frame storage whose elements lie in files, and finding them again.

================  ====================================================================================================
file              contents
================  ====================================================================================================
``storage.json``  what the storage is like; written last, so that what is half made is not taken for one
``rows/``         the elements, with handles in place of images, memory-mapped as TorchRL does it
``frames-<n>``    the images of a column
``marks``         how many elements count, and which are being written
``sums``          checksums of the elements; those of images lie with these
================  ====================================================================================================
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from torchrl_ext._frame_marks import noted_elements

FORMAT = 2
_MANIFEST = "storage.json"


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

    def found(self) -> list[dict[str, Any]] | None:
        """The kinds of columns of the storage in the folder, or None where there is none.

        :raises InvalidArgumentError: if it was made with other arguments.
        :raises CorruptFileError: if it cannot be read, or is of a later format.
        """
        if not (self.path / _MANIFEST).exists():
            self.clear()
            return None
        found = self.manifest()
        for name, given in json.loads(json.dumps(self.arguments)).items():
            if found["arguments"].get(name) != given:
                raise InvalidArgumentError(
                    f"the storage in {self.path} was made with {name}={found['arguments'].get(name)!r}, got {given!r}; "
                    "pass the same, or another storage_dir"
                )
        kinds: list[dict[str, Any]] = found["columns"]
        for name, size in found["sizes"].items():
            file = self.path / name
            if not file.exists() or file.stat().st_size != size:
                raise CorruptFileError(
                    f"{file} has not the {size:,} bytes that it had: it was cut short, written to, or deleted; to keep "
                    f"what is intact: FrameStorage.salvage({str(self.path)!r})"
                )
        if _crc_of_shapes(self.path) != found["shapes"]:
            raise CorruptFileError(f"{self.path / 'rows'} is damaged: the shapes of its tensors are other ones")
        return kinds

    def manifest(self) -> dict[str, Any]:
        """What the storage is like.

        :raises CorruptFileError: if that cannot be read, or is of a later format.
        """
        path = self.path / _MANIFEST
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            version = found["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        if version != FORMAT:
            raise CorruptFileError(
                f"{self.path} has format {version!r}, this version reads {FORMAT}; open it with the version of rl-ext "
                "that wrote it"
            )
        if found.pop("checksum", None) != _crc_of(found):
            raise CorruptFileError(f"{path} is damaged: its checksum does not match its contents")
        return found

    def clear(self) -> None:
        """Deletes what was half made.

        :raises CorruptFileError: if elements were stored, so that there was more than that.
        """
        if (held := noted_elements(self.marks)) > 0:
            raise CorruptFileError(
                f"{self.path} holds {held} elements, and {_MANIFEST} is missing, which says what they are like; put it "
                "back, or pass another storage_dir. Nothing was deleted"
            )
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

    @property
    def marks(self) -> Path:
        """The file of notes."""
        return self.path / "marks"

    @property
    def sums(self) -> Path:
        """The file of checksums."""
        return self.path / "sums"

    def begin(self, columns: list[dict[str, Any]]) -> None:
        """Notes that all files are there."""
        beside = self.path / (_MANIFEST + ".new")
        files = [file for file in self.path.rglob("*") if file.is_file()]
        manifest = {
            "format": FORMAT,
            "arguments": self.arguments,
            "columns": columns,
            "sizes": {str(file.relative_to(self.path)): file.stat().st_size for file in files},
            "shapes": _crc_of_shapes(self.path),
        }
        beside.write_text(json.dumps({**manifest, "checksum": _crc_of(manifest)}))
        beside.rename(self.path / _MANIFEST)

    def rows(self) -> Any:
        """The elements that are there.

        :raises CorruptFileError: if files are missing.
        """
        try:
            return TensorDict.load_memmap(self.path / "rows")
        except Exception as error:  # damaged bytes can make the reader do anything
            raise CorruptFileError(f"{self.path / 'rows'} is damaged ({type(error).__name__}: {error})") from error


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _crc_of_shapes(path: Path) -> int:
    """CRC-32 of what TorchRL notes about the tensors in a folder."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sorted(path.rglob("meta.json"))))


def _ours(name: str) -> bool:
    return name in (_MANIFEST, _MANIFEST + ".new", "rows", "marks", "sums") or name.startswith("frames-")


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
