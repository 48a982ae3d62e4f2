"""Checkpoints of a frame storage: what ``dumps`` and ``state_dict`` write, and reading it back."""

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

from rl_ext_core._interrupts import run_pending_handlers, defer_signals
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.folder import MANIFEST, read_json, as_corrupt_file, write_json
from torchrl_ext.frame_storage.format import pack_rows, unpack_rows

FORMAT = 3
_METADATA = "frames.json"  # what the folder holds, and in which of its folders
_CONTENTS = re.compile("contents-[0-9a-f]{16}")


class State(OrderedDict[str, Any]):
    """A state that other storages cannot load. Saved and read again, it is a plain dictionary."""

    def __missing__(self, key: str) -> Any:
        if key == "_storage":
            raise InvalidArgumentError(
                "this is the state of a FrameStorage, which holds images compressed; load it into a FrameStorage, and "
                "add what that holds: buffer.extend(frame_storage[:])"
            )
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def as_state(rows: Any, frames: list[dict[str, Any]], length: int) -> State:
    """Return a copy of what a storage holds, made of tensors and plain values."""
    held = _map_tree(pack_rows(rows, frames), np.ndarray, _as_tensor)
    return State(frame_storage=held, initialized=True, _len=length)


def from_state(state: dict[str, Any]) -> tuple[Any, list[dict[str, Any]], int]:
    """Return what :func:`as_state` was given.

    :raises CorruptFileError: if it is damaged.
    """
    with as_corrupt_file("this state is"):
        return *unpack_rows(_map_tree(state["frame_storage"], torch.Tensor, _as_array)), state["_len"]


def _map_tree(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same dictionaries and lists, with all that is of that kind changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_tree(part, kind, change) for key, part in tree.items()}
    return [_map_tree(part, kind, change) for part in tree] if isinstance(tree, list) else tree


def _as_tensor(array: Any) -> torch.Tensor:
    # Older versions of torch know no unsigned numbers.
    return torch.from_numpy(array.view(np.int32 if array.dtype == np.uint32 else array.dtype).copy())


def _as_array(tensor: torch.Tensor) -> Any:
    array = tensor.detach().cpu().numpy()
    return array.view(np.uint32) if array.dtype == np.int32 else array


class FrameStorageCheckpointer(StorageCheckpointerBase):
    """Writes a :class:`FrameStorage` to a folder as it is in memory, compressed, and reads it back.

    What was in the folder before is replaced once all is written. Its files hold arrays and plain values, so that any
    may be read, and are checked then.
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

    @defer_signals
    def dumps(self, storage: Any, path: str | Path) -> None:
        """Write a storage. That of a storage in files to its own folder only makes sure of what is there.

        Whoever comes after a process that was killed meanwhile finds what was there before.

        :raises InvalidArgumentError: if nothing was ever stored, or the folder holds something else.
        :raises InvalidTypeError: if elements hold what is neither a tensor nor a plain value. Nothing is written then.
        :raises StorageError: if the files cannot be written.
        """
        storage._require_open()
        if not storage.initialized:
            raise InvalidArgumentError("this FrameStorage is empty: there is nothing to save; add something first")
        path = Path(path)
        if storage._is_stored_in(path):
            return storage.flush()
        made = not path.exists()
        try:
            entries = [] if made else [entry.name for entry in sorted(path.iterdir())]
            if foreign := [name for name in entries if not _is_checkpoint_entry(name)]:
                raise InvalidArgumentError(
                    f"{path} holds other files, as {foreign[0]!r}, which are no part of a checkpoint; pass a new folder"
                )
            contents = path / f"contents-{os.urandom(8).hex()}"
            contents.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"cannot write to {path}: {error.strerror}; pass another folder") from error
        is_complete = False
        try:
            with storage.lock:
                held = _save_arrays(pack_rows(*storage._contents()), contents)
                metadata = {"format": FORMAT, "contents": contents.name, "len": len(storage), "held": held}
            write_json(path / _METADATA, metadata)
            is_complete = True
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot write to {path}: {error.strerror}. What was there before is intact; make room, or pass "
                "another folder"
            ) from error
        finally:
            if not is_complete:
                shutil.rmtree(path if made else contents, ignore_errors=True)
        for entry in path.iterdir():
            if entry.name not in (_METADATA, contents.name):  # was there before, or is of a program that was killed
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    @defer_signals
    def loads(self, storage: Any, path: str | Path) -> None:
        """Read a storage.

        :raises CorruptFileError: if the files are damaged or incomplete, or of a later format.
        :raises InvalidArgumentError: if they hold more than the storage has room for.
        """
        path = Path(path)
        storage._require_open()
        if storage._is_stored_in(path):
            return
        if (path / MANIFEST).exists():
            raise InvalidArgumentError(
                f"{path} is the folder of a storage in files; open it: FrameStorage(..., storage_dir={str(path)!r})"
            )
        if (path / "storage_metadata.json").exists():
            raise InvalidArgumentError(
                f"{path} is the checkpoint of another kind of storage than FrameStorage; load it into one of that "
                "kind, and add what it holds: buffer.extend(other[:])"
            )
        if not (path / _METADATA).exists():
            raise CorruptFileError(f"{path} holds no FrameStorage; write it with buffer.dumps(path)")
        metadata = read_json(path / _METADATA, FORMAT)
        with as_corrupt_file(f"{path} is"):
            if not _CONTENTS.fullmatch(metadata["contents"]):
                raise CorruptFileError(f"{path / _METADATA} names no contents")
            rows, frames = unpack_rows(_load_arrays(metadata["held"], path / metadata["contents"]))
        storage._replace_contents(rows, frames, metadata["len"])


def _is_checkpoint_entry(name: str) -> bool:
    return name in (_METADATA, f"{_METADATA}.new") or _CONTENTS.fullmatch(name) is not None


def _save_arrays(held: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same, with names of files in place of arrays."""
    names = (f"{number}.npy" for number in itertools.count())

    def save(array: Any) -> str:
        run_pending_handlers()
        name = next(names)
        np.save(path / name, array, allow_pickle=False)
        return name

    changed: dict[str, Any] = _map_tree(held, np.ndarray, save)
    return changed


def _load_arrays(held: dict[str, Any], path: Path) -> dict[str, Any]:
    """What :func:`_save_arrays` was given."""

    def read(name: str) -> Any:
        run_pending_handlers()
        file = path / Path(name).name
        return np.lib.format.open_memmap(file, mode="r") if file.stat().st_size else np.zeros(0, dtype=np.uint8)

    held["leaves"] = _map_tree(held["leaves"], str, read)
    for column in held["frames"]:
        column["pool"]["arrays"] = _map_tree(column["pool"]["arrays"], str, read)
    return held
