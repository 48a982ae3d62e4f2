"""Elements of a storage in a folder: memory-mapping, recovery after a kill, salvage.

In addition to the files of ``rl_ext_core.frames.log_folder``, the folder contains

- ``log-<generation>/<number>``: the segments of one image column
- ``array-elements``: all other values, leaf after leaf
- ``array-marks``: see :class:`Marks`
- ``array-locations``: the newest record of each image, by which missing ones are found
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.log_folder import LogFolder, as_corrupt_file
from rl_ext_core.frames.shared_memory import MemoryFile
from rl_ext_core.frames.store import SalvageReport
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import describe_rows, dtype_from_name, rebuild

_logger = logging.getLogger("torchrl_ext")

_ALIGNMENT = 64  # bytes
_STORAGE_ARGUMENTS = ("max_size", "ndim", "pixels")


class Marks:
    """Length of a storage, and the elements that are being written, which stay if a process is killed.

    :param memory: ``uint8`` zeros of a new storage, shape ``(n_bytes(n_rows),)``; or shared memory of that size.
    :ivar writing: Whether an element is being written, shape ``(n_rows,)``.
    """

    def __init__(self, memory: npt.NDArray[np.uint8] | MemoryFile) -> None:
        self._memory = memory
        if isinstance(memory, MemoryFile):
            memory = np.frombuffer(memory.map(0, memory.n_bytes), np.uint8)
        self._numbers, self.writing = memory[:16].view(np.int64), memory[16:].view(np.bool_)

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, (self._memory,)

    @staticmethod
    def n_bytes(n_rows: int) -> int:
        """Return the size of the memory for ``n_rows`` elements along the first dimension."""
        return 16 + n_rows

    @property
    def length(self) -> int:
        """Number of stored elements along the first dimension."""
        return int(self._numbers[0])

    @property
    def next_row(self) -> int:
        """Place of the next element."""
        return int(self._numbers[1])

    def update(self, length: int, next_row: int) -> None:
        """Set the length and the place of the next element."""
        self._numbers[:] = length, next_row


def create_elements(folder: LogFolder, columns: list[FrameColumn], rows: Any) -> None:
    """Create the files of a new folder for elements like ``rows``.

    :param folder: A new folder.
    :param columns: Image columns.
    :param rows: TensorDict without images, of the shape of all elements.
    :raises InvalidTypeError: If ``rows`` contains something else than tensors and TensorDicts.
    :raises StorageError: If the disk is full.
    """
    if type(rows) is not TensorDict:
        raise InvalidTypeError(
            f"a storage in files stores TensorDicts, got {type(rows).__name__}. Convert the data with "
            "data.to_tensordict(), or leave storage_dir out"
        )
    kinds = [{**column.kind, "settings": column.table.part.settings} for column in columns]
    settings = {"columns": kinds, "elements": describe_rows(rows, values=False)[0], "n_rows": len(rows)}
    folder.segments(new=True)
    folder.use(settings)


def map_elements(folder: LogFolder) -> tuple[TensorDict, Marks]:
    """Return the elements of a folder as memory-mapped tensors, in a locked TensorDict.

    :raises CorruptFileError: If the description of the elements is damaged.
    """
    assert folder.settings is not None
    with as_corrupt_file(f"{folder.path} is"):
        description, n_rows = folder.settings["elements"], folder.settings["n_rows"]
        starts = [0]
        for leaf in description["leaves"]:
            size = math.prod(leaf["shape"]) * dtype_from_name(leaf["dtype"]).itemsize
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        memory = folder.array("elements", (starts[-1] + _ALIGNMENT,), np.uint8)

        def view(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            """Return tensor ``number``, without a copy."""
            size = math.prod(shape) * dtype.itemsize
            if not size:
                return torch.empty(shape, dtype=dtype)
            return torch.from_numpy(memory[starts[number] :][:size]).view(dtype).reshape(shape)

        rows = rebuild(description, view).lock_()
        return rows, Marks(folder.array("marks", (Marks.n_bytes(n_rows),), np.uint8))


def open_column(
    folder: LogFolder, number: int, kind: dict[str, Any], options: dict[str, Any], *, num_threads: int | None = None
) -> FrameColumn:
    """Return an image column of a folder, into which no image was read yet.

    :param kind: Description of the column.
    :param options: Options of the storage.
    """
    assert folder.settings is not None
    path = folder.segments() / str(number)
    path.mkdir(exist_ok=True)
    column = FrameColumn(
        kind, folder.settings["n_rows"], options, num_threads=num_threads, folder=path, settings=kind["settings"]
    )
    column.table.log.is_in_place = folder.is_in_place
    name = "locations" + "_" * number
    column.table.locations = folder.array(name, (math.prod(column.batch),), np.int64)
    return column


def drop_torn_elements(rows: Any, columns: list[FrameColumn], marks: Marks, process_name: str) -> None:
    """Remove elements that were partly written when a process ended.

    Those at the end are cut off. In the middle, they become copies of the valid element before them.
    """
    length = min(marks.length, len(rows))
    torn = np.flatnonzero(marks.writing)
    inside = torn[torn < length]
    whole = np.setdiff1d(np.arange(length), inside)
    if not len(whole):
        length, inside = 0, inside[:0]
    for row in inside.tolist():
        before = int(whole[np.searchsorted(whole, row) - 1])
        rows[row] = rows[before]
        for column in columns:
            sources, targets = (column.rows_of(place) for place in (before, row))
            column.table.copy(sources, targets)
    for column in columns:
        column.table.clear(length * column.per_row)
    if len(torn):
        _logger.warning(
            "%s ended while it wrote %d of the elements: %d lost, %d replaced by a copy of the element before",
            process_name,
            len(torn),
            len(torn) - len(inside),
            len(inside),
        )
    marks.update(length, marks.next_row % len(rows) if length == len(rows) else length)
    marks.writing[:] = False


def salvage_folder(path: str | os.PathLike[str]) -> SalvageReport:
    """Repair a damaged folder: keep the longest run of intact elements, and drop all others."""
    folder = LogFolder(path, None)
    try:
        if folder.settings is None:
            raise InvalidArgumentError(f"storage_dir={os.fspath(path)!r} does not contain a storage")
        rows, marks = map_elements(folder)
        with as_corrupt_file(f"{folder.path} is"):
            options = {name: value for name, value in folder.options.items() if name not in _STORAGE_ARGUMENTS}
            columns = [open_column(folder, *each, options) for each in enumerate(folder.settings["columns"])]
            kept, length = _keep_longest_run(rows, columns, marks)
            n = rows.shape[1 : folder.options["ndim"]].numel()  # elements per row
            for column in columns:
                column.table.close()
    finally:
        folder.close()
    _logger.warning("%s: number of elements kept: %d, dropped: %d", folder.path, kept * n, (length - kept) * n)
    return SalvageReport(kept * n, (length - kept) * n)


def _keep_longest_run(rows: Any, columns: list[FrameColumn], marks: Marks) -> tuple[int, int]:
    """Move the longest run of intact rows to the beginning; return its and the old length."""
    length = min(marks.length, len(rows))
    good = ~marks.writing[:length]
    for column in columns:
        found = column.table.recover(repair=True)[: length * column.per_row]
        good &= found.reshape(length, -1).all(axis=1)
    oldest = marks.next_row % len(rows) if length == len(rows) else 0
    order = (oldest + np.arange(length)) % max(length, 1)
    places = order[slice(*_longest_run(good[order]))]
    rows[: len(places)] = rows[torch.from_numpy(places)].clone()
    for column in columns:
        column.table.move(column.rows_of(places))
    marks.update(len(places), len(places) % len(rows))
    marks.writing[:] = False
    return len(places), length


def _longest_run(good: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the end of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])


def check_images(columns: list[FrameColumn], length: int, folder: LogFolder, writing: npt.NDArray[np.bool_]) -> None:
    """Read the images in a folder.

    :param length: Number of elements along the first dimension.
    :param writing: Elements that were being written, whose images may be missing.
    :raises CorruptFileError: If images are missing or damaged.
    """
    for column in columns:
        found = column.table.recover()[: length * column.per_row]
        found |= np.repeat(writing[:length], column.per_row)
        if lost := int(np.count_nonzero(~found)):
            raise CorruptFileError(
                f"{lost} of {len(found)} images of {column.keys} in {folder.path} are missing: the data was "
                "truncated or overwritten. Keep the intact elements with FrameStorage.salvage(storage_dir)"
            )
