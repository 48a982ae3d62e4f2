"""Arrays with one row a transition, of whoever owns a store: actions, rewards, flags."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.disk._files import File, damage
from rl_ext_core.frames.disk._folder import Folder

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_WEIGHTS = np.random.default_rng(20).integers(1 << 40, 1 << 63, size=1 << 10, dtype=np.uint64) | np.uint64(1)


class RowArrays:
    """Arrays in memory, or mapped files where there is a folder.

    :param capacity: rows.
    :param folder: where the files are.
    """

    def __init__(self, capacity: int, folder: Folder | None = None) -> None:
        self._capacity, self._folder = capacity, folder
        self._arrays: dict[str, npt.NDArray[Any]] = {}

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

    def add(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array, zero.

        :raises StorageError: if there is no room on the disk.
        """
        array = self._allocated(name, (self._capacity, *shape), np.dtype(dtype), new=True)
        self._arrays[name] = array
        return array

    def reopen(self, arrays: dict[str, list[Any]]) -> None:
        """Takes the arrays of a journal.

        :raises CorruptFileError: if a file has another size.
        """
        for name, (shape, dtype) in arrays.items():
            self._arrays[name] = self._allocated(name, (self._capacity, *shape), np.dtype(dtype), new=False)

    def _allocated(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, new: bool) -> npt.NDArray[Any]:
        if self._folder is None:
            return np.zeros(shape, dtype=dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes == 0:
            return np.zeros(shape, dtype=dtype)
        file = File(self._folder.path / f"row-{name}")
        try:
            if new:
                file.truncate(0)
                file.reserve(n_bytes)
            elif file.size != n_bytes:
                raise damage(file.path, f"it has {file.size:,} bytes, expected {n_bytes:,}")
            # Not np.memmap: parts of it would be pickled by the name of that class.
            return np.frombuffer(file.mapped(n_bytes), dtype=dtype).reshape(shape)
        finally:
            file.close()

    def described(self) -> dict[str, list[Any]]:
        """Shape of a row and dtype of each."""
        return {name: [list(array.shape[1:]), array.dtype.str] for name, array in self._arrays.items()}

    def sums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """A checksum of each of these rows, which no changed bit leaves as it is."""
        total = np.zeros(len(rows), dtype=np.uint64)
        at = 0
        for _, array in sorted(self._arrays.items()):
            n_bytes = array[:1].nbytes
            padded = np.zeros((len(rows), -(-n_bytes // 8) * 8), dtype=np.uint8)
            padded[:, :n_bytes] = np.ascontiguousarray(array[rows]).reshape(-1).view(np.uint8).reshape(-1, n_bytes)
            words = padded.view(np.uint64)
            total += (words * _WEIGHTS[np.arange(at, at + words.shape[1]) % len(_WEIGHTS)]).sum(axis=1, dtype=np.uint64)
            at += words.shape[1]
        return (total >> np.uint64(32)).astype(np.uint32)

    def nbytes(self, n_rows: int) -> int:
        """Bytes of that many rows."""
        return sum(array[:n_rows].nbytes for array in self._arrays.values())
