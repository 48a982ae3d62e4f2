"""The elements of a storage where processes share them, or a later one comes to their file: what counts is noted beside
them, so that they can be made whole after a process was killed.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames.journal import Journal, Note, Places
from rl_ext_core.frames.region import PAGE, PrivateRegion, RegionFile, new_region
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import dtype_named, rebuilt, sizes_of

_logger = logging.getLogger("torchrl_ext")

_SUM = np.dtype(np.uint32)


class RowFile:
    """Elements in a file, and a checksum of each: of its small leaves, and of the handles of its images.

    :param description: what :func:`described` says of them, without values.
    :param file: the file.
    :ivar tensors: the elements as this process sees them. Keys cannot be added.
    :raises CorruptFileError: if the description is none.
    """

    def __init__(self, description: dict[str, Any], file: RegionFile) -> None:
        self.description = description
        self._region: PrivateRegion = new_region(self._lay_out(), file)
        self._map()

    def _lay_out(self) -> int:
        """Find out where each leaf begins, and what an element takes of it; the checksums come last."""
        leaves = self.description["leaves"]
        self._n_rows: int = self.description["nodes"][0]["batch_size"][0]
        self._sizes = [math.prod(sizes_of(leaf["shape"])[1:]) * dtype_named(leaf["dtype"]).itemsize for leaf in leaves]
        self._sizes.append(_SUM.itemsize)
        self._offsets, end = [], 0
        for n_bytes in self._sizes:
            self._offsets.append(end)
            end += -(-max(self._n_rows * n_bytes, 1) // PAGE) * PAGE
        return end

    def _map(self) -> None:
        from rl_ext_core.frames.machine import sum_rows  # it loads numba

        def view(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            array = self._region.array(self._offsets[number], (self._n_rows * self._sizes[number],), np.uint8)
            return torch.from_numpy(array).view(dtype).reshape(shape)

        self.tensors = rebuilt(self.description, view)
        self.tensors.lock_()
        self._sum_rows = sum_rows
        self._leaf_sizes = np.array(self._sizes[:-1], dtype=np.int64)
        self._sums = self._region.array(self._offsets[-1], (self._n_rows,), _SUM)
        start = self._sums.ctypes.data - self._offsets[-1]
        self._addresses = np.array([start + offset for offset in self._offsets[:-1]], dtype=np.uint64)

    def make_sure_of(self, n_rows: int) -> None:
        """Make sure that the first elements can be written to.

        :raises StorageError: if there is no room on the disk.
        """
        for offset, n_bytes in zip(self._offsets, self._sizes, strict=True):
            self._region.reserve(offset, min(n_rows, self._n_rows) * n_bytes)

    @property
    def held(self) -> int:
        """How many elements can be read and written."""
        sizes = zip(self._offsets, self._sizes, strict=True)
        return min(self._n_rows, *(self._region.held(offset) // n_bytes for offset, n_bytes in sizes if n_bytes))

    def refresh(self) -> None:
        """Learn what other processes have made sure of."""
        self._region.refresh()

    def _sums_of(self, places: Places) -> npt.NDArray[np.uint32]:
        found = np.zeros(len(places), dtype=_SUM)
        self._sum_rows(self._addresses, self._leaf_sizes, places, found)
        return found

    def update_sums(self, places: Places) -> None:
        """Note what these elements are now."""
        self._sums[places] = self._sums_of(places)

    def wrong(self, places: Places) -> Places:
        """Return those of these elements that are not what was noted."""
        found: Places = places[self._sums_of(places) != self._sums[places]]
        return found

    @property
    def full(self) -> bool:
        """Whether there ever was an element at the last place."""
        return bool(self._sums[-1])

    def unlock(self) -> None:
        """Let others use the file."""
        self._region.unlock()

    def __getstate__(self) -> dict[str, Any]:
        return {"description": self.description, "_region": self._region}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lay_out()
        self._map()


def recover(
    rows: Any, columns: list[FrameColumn], journal: Journal, file: RowFile | None, *, who: str, folder: Path | None
) -> tuple[int, int]:
    """Make elements whole that another process left behind.

    :param file: where they lie, or None for memory.
    :param who: what to log of that process.
    :param folder: where the files are, if nobody used them since; they are compared with their checksums then.
    :return: how many elements count along the first dimension, and where the next one goes.
    :raises CorruptFileError: if there are fewer than were noted, or they are not what was stored.
    """
    note, writing = journal.read()
    if file is not None:
        file.refresh()
        if folder is not None:
            _check(file, note, writing, folder)
    length = _without_torn(rows, note, writing, who)
    if file is not None:
        file.update_sums(np.unique(writing))
    for column in columns:
        column.clear(rows, length, note.touched)
        column.recover(rows, length, folder)
    following = note.following % len(rows) if length == len(rows) else length
    journal.written(length, following)
    if folder is not None:
        journal.settle()
    return length, following


def _check(file: RowFile, note: Note, writing: Places, folder: Path) -> None:
    length = min(note.length, len(file.tensors))
    salvage = f"to keep what is intact: FrameStorage.salvage({str(folder)!r})"
    most = max(note.length, note.touched, int(writing.max(initial=-1)) + 1)
    if most > file.held:
        raise CorruptFileError(
            f"{folder / 'rows'} is damaged: it holds {file.held} elements, expected {most}; {salvage}"
        )
    if note.exposed:
        message = "%s was not closed: whether elements without their images are what they were is not checked"
        _logger.info(message, folder)
        file.update_sums(np.arange(length))
    elif n_wrong := len(file.wrong(np.setdiff1d(np.arange(length), writing))):
        raise CorruptFileError(
            f"{folder / 'rows'} is damaged: {n_wrong} of {length} elements have another checksum than when they were "
            f"stored; {salvage}"
        )


def _without_torn(rows: Any, note: Note, writing: Places, who: str) -> int:
    """Take out elements that were half written; return how many elements are left.

    Those at the end are cut off. One in the middle of a full ring becomes a copy of the one before it, which counts.
    """
    length = min(note.length, len(rows))
    torn = np.unique(writing[writing < min(len(rows), note.touched)])
    if len(torn) == 0:
        return length
    inside = torn[torn < length]
    whole = np.setdiff1d(np.arange(length), inside)
    if len(whole) == 0:
        length, inside = 0, inside[:0]
    if len(inside):
        before = whole[np.searchsorted(whole, inside) - 1]
        rows[torch.from_numpy(inside)] = rows[torch.from_numpy(before)]
    _logger.warning(
        "%d elements were being written when %s ended: %d are lost, %d became copies of the one before",
        len(torn),
        who,
        len(torn) - len(inside),
        len(inside),
    )
    return length
