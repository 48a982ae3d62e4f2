"""Checkpoints of a frame storage, for ``dumps``, ``loads`` and ``state_dict``."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.checkpoint import checksum, format_error
from rl_ext_core.frames.log_folder import MANIFEST, as_corrupt_file, replacing
from torchrl_ext.frame_storage.format import pack_rows, unpack_rows

FORMAT = 5
_FILE = "frames.bin"  # length of the header in 16 digits, header as JSON, aligned arrays
_LENGTH_DIGITS = 16
_ALIGNMENT = 64  # bytes
_ARRAY = "\0array"  # key of the description of an array, which no element has


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
    """Checkpointer that writes a :class:`FrameStorage` to one file without decompressing it.

    An older checkpoint in the folder is replaced when the new one is complete. The file contains arrays and JSON only.
    Reading it executes no code, and its checksums are verified.
    """

    def register_save_hook(self, hook: Any) -> None:
        """Refuse the hook, because it would expect plain tensors instead of compressed images.

        :raises InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "FrameStorage does not support save or load hooks, because it stores images compressed; hooks expect plain "
            "tensors. Use buffer[:] to export them, and buffer.extend(data) to import them"
        )

    register_load_hook = register_save_hook

    @defer_signals
    def dumps(self, storage: Any, path: str | Path) -> None:
        """Write a storage to a folder. For the folder that is its ``storage_dir``, do nothing.

        :param storage: The storage.
        :param path: A folder, which is created. If the process is killed meanwhile, it still contains the previous
            checkpoint.
        :raises InvalidArgumentError: If nothing was ever stored.
        :raises InvalidTypeError: If elements contain something else than tensors and plain values. Nothing is written.
        :raises StorageError: If the file cannot be written.
        """
        storage._require_open()
        if not storage.initialized:
            raise InvalidArgumentError(
                "this FrameStorage is empty: there is nothing to save. Add elements first: buffer.extend(data)"
            )
        path = Path(path)
        if storage._is_stored_in(path):
            return
        created = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with storage.lock:
                contents = pack_rows(*storage._contents())
                write_tree(path / _FILE, {"len": len(storage), "full": storage._is_full, "contents": contents})
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot write to {path}: {error.strerror}. A previous checkpoint is intact. Free space on the disk, "
                "or pass another folder"
            ) from error
        finally:
            if created and path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    @defer_signals
    def loads(self, storage: Any, path: str | Path) -> None:
        """Replace the contents of a storage by those in a folder.

        :param storage: The storage.
        :param path: Folder that :meth:`dumps` wrote.
        :raises CorruptFileError: If the file is damaged or incomplete, or has another format.
        :raises InvalidArgumentError: If it contains more elements than fit, or belongs to another kind of storage.
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
        if not (path / _FILE).exists():
            raise CorruptFileError(f"{path} contains no FrameStorage. Use buffer.dumps(path) to write one")
        with as_corrupt_file(f"{path / _FILE} is"):
            found = read_tree(path / _FILE)
            rows, frames = unpack_rows(found["contents"])
        storage._replace_contents(rows, frames, found["len"], found["full"])


def write_tree(path: Path, tree: dict[str, Any]) -> None:
    """Replace a file by nested dictionaries and lists of arrays and plain values."""
    arrays: list[Any] = []
    end = 0

    def place(array: Any) -> dict[str, Any]:
        """Choose the place of an array in the file, and return its description."""
        nonlocal end
        arrays.append(np.ascontiguousarray(array))
        start, end = end, end + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return {_ARRAY: [start, array.dtype.str, list(array.shape)]}

    header = {"format": FORMAT, **_map_tree(tree, np.ndarray, place)}
    text = json.dumps({**header, "checksum": checksum(header)}).encode()
    with replacing(path) as file:
        file.write(f"{len(text):{_LENGTH_DIGITS}}".encode() + text)
        for array in arrays:
            run_pending_handlers()
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(array.reshape(-1).view(np.uint8).data)
        file.write(bytes(-file.tell() % _ALIGNMENT))


def read_tree(path: Path) -> dict[str, Any]:
    """Return what :func:`write_tree` has written, with memory-mapped arrays."""
    memory = np.memmap(path, np.uint8, mode="r")
    start = _LENGTH_DIGITS + int(memory[:_LENGTH_DIGITS].tobytes())
    header = json.loads(memory[_LENGTH_DIGITS:start].tobytes())
    if header["format"] != FORMAT:
        raise format_error(path, header["format"], FORMAT)
    if header.pop("checksum") != checksum(header) or len(memory) % _ALIGNMENT:
        raise CorruptFileError(f"{path} is damaged: its checksum does not match its contents; restore it from a copy")
    start += -start % _ALIGNMENT

    def restore(tree: Any) -> Any:
        """Replace descriptions of arrays by the arrays."""
        if isinstance(tree, list):
            return [restore(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        if tree.keys() != {_ARRAY}:
            return {key: restore(part) for key, part in tree.items()}
        offset, dtype, shape = tree[_ARRAY]
        return np.ndarray(tuple(shape), np.dtype(dtype), memory.data, start + offset)

    found: dict[str, Any] = restore(header)
    return found
