"""Checkpoints of a frame storage, for ``dumps``, ``loads`` and ``state_dict``.

All contain the same bytes: a NumPy archive (``.npz``) of a header as JSON, and of all arrays. Reading it executes no
code. The archive has checksums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from rl_ext_core._interrupts import defer_signals
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.checkpoint import FORMAT, format_error
from rl_ext_core.frames.log_folder import MANIFEST, as_corrupt_file, replacing
from torchrl_ext.frame_storage.format import describe_rows, rebuild

_FILE = "frames.npz"
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
            arrays = collect_contents(storage)
            try:
                path.mkdir(parents=True, exist_ok=True)
                with replacing(path / _FILE) as file:
                    np.savez(file, *arrays)
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
        with as_corrupt_file(f"{path / _FILE} is"), (path / _FILE).open("rb") as file:
            contents = read_contents(file, path / _FILE)
        storage._replace_contents(*contents)


def collect_contents(storage: Any) -> list[npt.NDArray[Any]]:
    """Return the contents of a storage: a header as JSON, and arrays.

    The caller must hold its lock until they are written.

    :raises InvalidTypeError: If elements contain something else than tensors and plain values.
    """
    rows, frames = storage._contents()
    description, tensors = describe_rows(rows, values=True)
    flat = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    leaves = [part.view(torch.uint8).numpy() for part in flat]  # NumPy does not have all of torch's dtypes
    arrays: list[Any] = [None]

    def place(tree: Any) -> Any:
        """Replace the arrays in nested dictionaries and lists by their numbers."""
        if isinstance(tree, dict):
            return {key: place(part) for key, part in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [place(part) for part in tree]
        if not isinstance(tree, np.ndarray):
            return tree
        arrays.append(tree)
        return {_ARRAY: len(arrays) - 1}

    header = {"format": FORMAT, "len": len(storage), "rows": description, "frames": frames, "leaves": leaves}
    arrays[0] = np.frombuffer(json.dumps(place(header)).encode(), np.uint8)
    return arrays


def read_contents(file: Any, source: Any) -> tuple[Any, list[dict[str, Any]], int]:
    """Return the elements, the frames and the length.

    If the file is damaged, any exception may be raised.

    :param file: File of the arrays that :func:`collect_contents` returned.
    :param source: Name of their source for errors.
    """
    with np.load(file, allow_pickle=False) as arrays:
        header = json.loads(arrays["arr_0"].tobytes())
        if header["format"] != FORMAT:
            raise format_error(source, header["format"], FORMAT)

        def restore(tree: Any) -> Any:
            """Replace the numbers of arrays by the arrays."""
            if isinstance(tree, list):
                return [restore(part) for part in tree]
            if not isinstance(tree, dict):
                return tree
            if tree.keys() != {_ARRAY}:
                return {key: restore(part) for key, part in tree.items()}
            return arrays[f"arr_{tree[_ARRAY]}"]

        remaining, frames = iter(restore(header["leaves"])), restore(header["frames"])
        return rebuild(header["rows"], lambda n_bytes: next(remaining)), frames, header["len"]
