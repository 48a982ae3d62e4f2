"""Checkpoints of a frame storage, for ``dumps``, ``loads`` and ``state_dict``.

All contain the same bytes: the length of the header in 16 digits, the header as JSON, and aligned arrays. Reading them
executes no code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from rl_ext_core._interrupts import defer_signals, run_pending_handlers
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.checkpoint import checksum, format_error
from rl_ext_core.frames.log_folder import MANIFEST, as_corrupt_file, replacing
from torchrl_ext.frame_storage.format import ALIGNMENT, align, describe_rows, rebuild

FORMAT = 6
_FILE = "frames.bin"
_LENGTH_DIGITS = 16
_ARRAY = "\0array"  # key of the description of an array, which no element has


class FrameStorageCheckpointer(StorageCheckpointerBase):
    """Checkpointer that writes a :class:`FrameStorage` to one file without decompressing it.

    An older checkpoint in the folder is replaced when the new one is complete.
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
        path = Path(path)
        storage._require_open()
        if not storage.initialized:
            raise InvalidArgumentError(
                "this FrameStorage is empty: there is nothing to save. Add elements first: buffer.extend(data)"
            )
        if storage._is_stored_in(path):
            return
        with storage.lock:
            write = prepare_contents(storage)
            try:
                path.mkdir(parents=True, exist_ok=True)
                with replacing(path / _FILE) as file:
                    write(file)
            except OSError as error:
                raise StorageError(
                    f"cannot write to {path}: {error.strerror}. A previous checkpoint is intact. Free space on the "
                    "disk, or pass another folder"
                ) from error

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
        if not (path / _FILE).exists():
            raise CorruptFileError(
                f"{path} contains no FrameStorage. Use buffer.dumps(path) to write one. Load the checkpoint of another "
                "storage into one of that kind, and add its elements: buffer.extend(other[:])"
            )
        with as_corrupt_file(f"{path / _FILE} is"):
            contents = read_contents(np.memmap(path / _FILE, np.uint8, mode="r"), path / _FILE)
        storage._replace_contents(*contents)


def prepare_contents(storage: Any) -> Callable[[BinaryIO], None]:
    """Return a function that writes the contents of a storage. The caller must hold its lock until then.

    :raises InvalidTypeError: If elements contain something else than tensors and plain values.
    """
    rows, frames = storage._contents()
    description, tensors = describe_rows(rows, values=True)
    flat = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    leaves = [part.view(torch.uint8).numpy() for part in flat]  # NumPy does not have all of torch's dtypes
    fields = {"format": FORMAT, "len": len(storage), "rows": description, "frames": frames}
    arrays: list[Any] = []
    end = 0

    def place(tree: Any) -> Any:
        """Replace the arrays in nested dictionaries and lists by their places in the file."""
        nonlocal end
        if isinstance(tree, dict):
            return {key: place(part) for key, part in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [place(part) for part in tree]
        if not isinstance(tree, np.ndarray):
            return tree
        arrays.append(np.ascontiguousarray(tree))
        start, end = end, end + align(tree.nbytes)
        return {_ARRAY: [start, tree.dtype.str, list(tree.shape)]}

    header = place({**fields, "leaves": leaves})
    text = json.dumps({**header, "checksum": checksum([header, leaves])}).encode()

    def write(file: BinaryIO) -> None:
        """Write the header and the arrays."""
        file.write(f"{len(text):{_LENGTH_DIGITS}}".encode() + text)
        for array in [*arrays, np.zeros(0)]:
            run_pending_handlers()
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(array.reshape(-1).view(np.uint8).data)

    return write


def read_contents(memory: Any, source: Any) -> tuple[Any, list[dict[str, Any]], int]:
    """Return the elements, the frames and the length.

    If the bytes are damaged, any exception may be raised.

    :param memory: Bytes that :func:`prepare_contents` wrote, uint8 of shape ``(n,)``.
    :param source: Name of their source for errors.
    """
    start = _LENGTH_DIGITS + int(memory[:_LENGTH_DIGITS].tobytes())
    header = json.loads(memory[_LENGTH_DIGITS:start].tobytes())
    if header["format"] != FORMAT:
        raise format_error(source, header["format"], FORMAT)
    start = align(start)

    def restore(tree: Any) -> Any:
        """Replace descriptions of arrays by the arrays, without copies."""
        if isinstance(tree, list):
            return [restore(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        if tree.keys() != {_ARRAY}:
            return {key: restore(part) for key, part in tree.items()}
        offset, dtype, shape = tree[_ARRAY]
        return np.ndarray(tuple(shape), np.dtype(dtype), memory.data, start + offset)

    expected, leaves = header.pop("checksum"), restore(header["leaves"])
    if expected != checksum([header, leaves]) or len(memory) % ALIGNMENT:
        raise CorruptFileError(f"{source} is damaged: its checksum does not match its contents; restore it from a copy")
    remaining = iter(leaves)
    rows = rebuild(header["rows"], lambda n_bytes: np.array(next(remaining)))
    return rows, restore(header["frames"]), header["len"]
