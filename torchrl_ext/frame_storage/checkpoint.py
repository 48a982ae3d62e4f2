"""Checkpoints of a frame storage, for ``dumps``, ``loads`` and ``state_dict``."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.log_folder import MANIFEST, as_corrupt_file, read_json, write_json
from torchrl_ext.frame_storage.format import pack_rows, unpack_rows

FORMAT = 4
_METADATA = "frames.json"  # describes the contents, and names their folder
_CONTENTS = re.compile("contents-[0-9a-f]{16}")


class State(OrderedDict[str, Any]):
    """State dictionary that other storages refuse with a clear error.

    Pickling it makes it a plain OrderedDict.
    """

    def __missing__(self, key: str) -> Any:
        if key == "_storage":
            raise InvalidArgumentError(
                "this is the state of a FrameStorage, which stores images compressed; load it into a FrameStorage, and "
                "add its elements: buffer.extend(frame_storage[:])"
            )
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def as_state(rows: Any, frames: list[dict[str, Any]], length: int, is_full: bool) -> State:
    """Copy the contents of a storage to a dictionary of tensors and plain values."""
    packed = _map_tree(pack_rows(rows, frames), np.ndarray, _as_tensor)
    return State(frame_storage=packed, initialized=True, _len=length, full=is_full)


def from_state(state: dict[str, Any]) -> tuple[Any, list[dict[str, Any]], int, bool]:
    """Return the arguments of :func:`as_state` from its result: rows, frames, length, and whether it is full.

    :raises CorruptFileError: If the state is damaged.
    """
    with as_corrupt_file("this state is"):
        rows, frames = unpack_rows(_map_tree(state["frame_storage"], torch.Tensor, _as_array))
        return rows, frames, state["_len"], state["full"]


def _map_tree(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Copy nested dictionaries and lists, and replace all instances of a class in them."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_tree(part, kind, change) for key, part in tree.items()}
    return [_map_tree(part, kind, change) for part in tree] if isinstance(tree, (list, tuple)) else tree


def _as_tensor(array: Any) -> torch.Tensor:
    """Copy an array to a tensor; uint32 becomes int32 with the same bits."""
    # Older versions of torch have no unsigned dtypes except uint8.
    return torch.from_numpy(array.view(np.int32 if array.dtype == np.uint32 else array.dtype).copy())


def _as_array(tensor: torch.Tensor) -> Any:
    """Convert a tensor to an array; int32 becomes uint32 with the same bits."""
    array = tensor.detach().cpu().numpy()
    return array.view(np.uint32) if array.dtype == np.int32 else array


class FrameStorageCheckpointer(StorageCheckpointerBase):
    """Checkpointer that writes a :class:`FrameStorage` to a folder without decompressing it.

    An older checkpoint in the folder is replaced when the new one is complete. The files contain arrays and JSON only.
    Reading them executes no code, and their checksums are verified.
    """

    def register_save_hook(self, hook: Any) -> None:
        """Refuse the hook, because it would expect plain tensors instead of compressed images.

        :raises InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "FrameStorage does not support save hooks, because it stores images compressed; hooks expect plain "
            "tensors. Use buffer[:] to export them"
        )

    def register_load_hook(self, hook: Any) -> None:
        """Refuse the hook, because there are no save hooks.

        :raises InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "FrameStorage does not support load hooks, because it stores images compressed; hooks expect plain "
            "tensors. Use buffer.extend(data) to import them"
        )

    @defer_signals
    def dumps(self, storage: Any, path: str | Path) -> None:
        """Write a storage to a folder.

        For the folder that is its ``storage_dir``, flush the files instead.

        If the process is killed meanwhile, the folder still contains the previous checkpoint.

        :param storage: the storage
        :param path: a new folder, an empty one, or one with a checkpoint, which is replaced
        :raises InvalidArgumentError: If nothing was ever stored, or the folder contains other files.
        :raises InvalidTypeError: If elements contain something else than tensors and plain values. Nothing is written.
        :raises StorageError: If the files cannot be written.
        """
        storage._require_open()
        if not storage.initialized:
            raise InvalidArgumentError(
                "this FrameStorage is empty: there is nothing to save. Add elements first: buffer.extend(data)"
            )
        path = Path(path)
        if storage._is_stored_in(path):
            return storage.flush()
        made = not path.exists()
        try:
            entries = [] if made else [entry.name for entry in sorted(path.iterdir())]
            if foreign := [name for name in entries if not _is_checkpoint_entry(name)]:
                raise InvalidArgumentError(
                    f"{path} holds other files than a checkpoint, such as {foreign[0]!r}. Pass a new folder"
                )
            contents = path / f"contents-{os.urandom(8).hex()}"
            contents.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"cannot write to {path}: {error.strerror}. Pass another folder") from error
        is_complete = False
        try:
            with storage.lock:
                packed = _save_arrays(pack_rows(*storage._contents()), contents)
                metadata = {
                    "format": FORMAT,
                    "contents": contents.name,
                    "len": len(storage),
                    "full": storage._is_full,
                    "held": packed,
                }
            write_json(path / _METADATA, metadata)
            is_complete = True
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot write to {path}: {error.strerror}. A previous checkpoint is intact. Free space on the disk, "
                "or pass another folder"
            ) from error
        finally:
            if not is_complete:
                shutil.rmtree(path if made else contents, ignore_errors=True)
        for entry in path.iterdir():
            if entry.name not in (
                _METADATA,
                contents.name,
            ):  # left by a previous checkpoint, or by a process that was killed
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    @defer_signals
    def loads(self, storage: Any, path: str | Path) -> None:
        """Replace the contents of a storage by those in a folder.

        :param storage: the storage
        :param path: folder that :meth:`dumps` wrote
        :raises CorruptFileError: If the files are damaged or incomplete, or have a later format.
        :raises InvalidArgumentError: If they contain more elements than fit, or belong to another kind of storage.
        """
        path = Path(path)
        storage._require_open()
        if storage._is_stored_in(path):
            return
        if (path / MANIFEST).exists():
            raise InvalidArgumentError(
                f"{path} is a storage_dir, not a checkpoint; open it: FrameStorage(..., storage_dir={str(path)!r}, "
                "resume=True)"
            )
        if (path / "storage_metadata.json").exists():
            raise InvalidArgumentError(
                f"{path} is the checkpoint of another kind of storage than FrameStorage; load it into a storage of "
                "that kind, and add its elements: buffer.extend(other[:])"
            )
        if not (path / _METADATA).exists():
            raise CorruptFileError(f"{path} contains no FrameStorage. Use buffer.dumps(path) to write one")
        metadata = read_json(path / _METADATA, FORMAT)
        with as_corrupt_file(f"{path} is"):
            if not _CONTENTS.fullmatch(metadata["contents"]):
                raise CorruptFileError(f"{path / _METADATA} does not name the folder of its contents")
            rows, frames = unpack_rows(_load_arrays(metadata["held"], path / metadata["contents"]))
        storage._replace_contents(rows, frames, metadata["len"], metadata["full"])


def _is_checkpoint_entry(name: str) -> bool:
    """Return whether a file of this name belongs to a checkpoint."""
    return name in (_METADATA, f"{_METADATA}.new") or _CONTENTS.fullmatch(name) is not None


def _save_arrays(packed: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write arrays in nested dictionaries to files, and replace them by the files' names."""
    names = (f"{number}.npy" for number in itertools.count())

    def save(array: Any) -> str:
        """Write an array to the next file, and return the file's name."""
        run_pending_handlers()
        name = next(names)
        np.save(path / name, array, allow_pickle=False)
        return name

    changed: dict[str, Any] = _map_tree(packed, np.ndarray, save)
    return changed


def _load_arrays(packed: dict[str, Any], path: Path) -> dict[str, Any]:
    """Replace names of files in nested dictionaries by memory-mapped arrays."""

    def read(name: str) -> Any:
        """Return the array in a file, memory-mapped."""
        run_pending_handlers()
        file = path / Path(name).name
        return np.lib.format.open_memmap(file, mode="r") if file.stat().st_size else np.zeros(0, dtype=np.uint8)

    packed["leaves"] = _map_tree(packed["leaves"], str, read)
    for column in packed["frames"]:
        table = column["table"]
        table["pairs"] = read(table["pairs"])
        table["segments"] = [(slot, read(name)) for slot, name in table["segments"]]
    return packed
