"""Checkpoints of a frame storage: what ``dumps`` and ``state_dict`` write, and reading it back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames._format import checksum

FORMAT = 1
_METADATA = "frames.json"


def as_tensors(value: Any) -> Any:
    """Copies of all arrays in nested containers, as tensors. Older versions of torch know no unsigned numbers."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(np.int32 if value.dtype == np.uint32 else value.dtype).copy())
    if isinstance(value, dict):
        return {key: as_tensors(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_tensors(part) for part in value]
    return value


def as_arrays(value: Any) -> Any:
    """What :func:`as_tensors` was given."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().numpy()
        return array.view(np.uint32) if array.dtype == np.int32 else array
    if isinstance(value, dict):
        return {key: as_arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_arrays(part) for part in value]
    return value


def rows_checksum(rows: Any) -> int:
    """CRC-32 of all tensors of a TensorDict."""
    leaves = {
        str(key): leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for key, leaf in rows.items(include_nested=True, leaves_only=True)
        if isinstance(leaf, torch.Tensor)
    }
    return checksum({name: leaves[name] for name in sorted(leaves)})


class FrameStorageCheckpointer(StorageCheckpointerBase):
    """Writes a :class:`FrameStorage` to a folder as it is in memory, compressed, and reads it back.

    What was in the folder before is replaced once all is written. The folder's files are checked when they are read.
    """

    def register_save_hook(self, hook: Any) -> None:
        """
        :raises InvalidArgumentError: always, since hooks expect images in plain tensors.
        """
        raise InvalidArgumentError("FrameStorage has no save hooks: it is smaller than what they make of it already")

    def register_load_hook(self, hook: Any) -> None:
        """
        :raises InvalidArgumentError: always.
        """
        raise InvalidArgumentError("FrameStorage has no load hooks, since it has no save hooks")

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Writes a storage.

        :raises InvalidArgumentError: if nothing was ever stored.
        """
        if not storage.initialized:
            raise InvalidArgumentError("this FrameStorage is empty: there is nothing to save; add something first")
        path = Path(path)
        if path.exists() and not (path / _METADATA).exists() and any(path.iterdir()):
            raise InvalidArgumentError(f"{path} holds other files, which would be deleted; pass a new folder")
        beside = path.with_name(path.name + ".writing")
        if beside.exists():  # of a program that was killed
            shutil.rmtree(beside)
        beside.mkdir(parents=True)
        try:
            with storage.lock:
                _write(storage, beside)
        except BaseException:
            shutil.rmtree(beside)
            raise
        if path.exists():
            shutil.rmtree(path)
        beside.rename(path)

    def loads(self, storage: Any, path: str | Path) -> None:
        """Reads a storage.

        :raises CorruptFileError: if the files are damaged or incomplete, or of a later format.
        :raises InvalidArgumentError: if they hold more than the storage has room for.
        """
        path = Path(path)
        try:
            metadata = json.loads((path / _METADATA).read_text())
        except (OSError, ValueError) as error:
            raise CorruptFileError(
                f"{path} holds no FrameStorage ({type(error).__name__}: {error}); write it with buffer.dumps(path)"
            ) from error
        if metadata.get("format") != FORMAT:
            raise CorruptFileError(
                f"{path} has format {metadata.get('format')!r}, this version reads {FORMAT}; load it with the version "
                "of rl-ext that wrote it"
            )
        if _sizes(path) != metadata.get("sizes"):  # what is cut short, torch fills up with zeros
            raise CorruptFileError(f"{path} is damaged: files are missing, or of other sizes than were written")
        try:
            rows = TensorDict.load_memmap(path / "rows")
            frames = [_read_column(path, number, column) for number, column in enumerate(metadata["frames"])]
            intact = rows_checksum(rows) == metadata["rows"]
        except Exception as error:  # damaged bytes can make the readers do anything
            raise CorruptFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        if not intact:
            raise CorruptFileError(f"{path} is damaged: the checksum of its rows does not match")
        storage.take(rows, frames, metadata["len"])


def _write(storage: Any, path: Path) -> None:
    rows, frames = storage.held()
    rows.memmap(path / "rows", copy_existing=True)
    columns = []
    for number, column in enumerate(frames):
        for name, array in column["pool"]["arrays"].items():
            np.save(path / f"{number}-{name}.npy", array)
        pool = {name: value for name, value in column["pool"].items() if name != "arrays"}
        columns.append({**column, "pool": pool})
    metadata = {
        "format": FORMAT,
        "len": len(storage),
        "rows": rows_checksum(rows),
        "sizes": _sizes(path),
        "frames": columns,
    }
    (path / _METADATA).write_text(json.dumps(metadata))


def _sizes(path: Path) -> dict[str, int]:
    files = [file for file in path.rglob("*") if file.is_file() and file.name != _METADATA]
    return {str(file.relative_to(path)): file.stat().st_size for file in files}


def _read_column(path: Path, number: int, column: dict[str, Any]) -> dict[str, Any]:
    files = sorted(path.glob(f"{number}-*.npy"))
    arrays = {file.stem.split("-", 1)[1]: np.load(file, mmap_mode="r") for file in files}
    return {**column, "pool": {**column["pool"], "arrays": arrays}}
