"""Elements of a storage in a folder: memory-mapping, recovery after a kill.

In addition to the files of ``rl_ext_core.frames.log_folder``, the folder contains

- ``log-<generation>/<number>``: the segments of one image column
- ``array-elements``: all other values, leaf after leaf
- ``array-marks``: see :class:`Marks`
- ``array-locations``: the newest record of each image, by which missing ones are found
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.frames.log_folder import LogFolder, as_corrupt_file
from rl_ext_core.frames.memory import damaged_folder_error
from rl_ext_core.frames.shared_memory import MemoryFile
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import ALIGNMENT, align, describe_rows, rebuild

_logger = logging.getLogger("torchrl_ext")


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
        return min(int(self._numbers[0]), len(self.writing))

    @property
    def next_row(self) -> int:
        """Place of the next element."""
        return int(self._numbers[1]) % len(self.writing)

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
    description, tensors = describe_rows(rows, values=False)
    n_bytes = ALIGNMENT + sum(align(tensor.nbytes) for tensor in tensors)
    folder.segments(new=True)
    folder.use({"columns": kinds, "elements": description, "n_bytes": n_bytes, "n_rows": len(rows)})


def map_elements(folder: LogFolder) -> tuple[TensorDict, Marks]:
    """Return the elements of a folder as memory-mapped tensors, in a locked TensorDict.

    :raises CorruptFileError: If the description of the elements is damaged.
    """
    assert folder.settings is not None
    start = 0
    with as_corrupt_file(f"{folder.path} is"):
        memory = folder.array("elements", (folder.settings["n_bytes"],), np.uint8)

        def next_bytes(n_bytes: int) -> npt.NDArray[np.uint8]:
            """Return the bytes of the next leaf, without a copy."""
            nonlocal start
            begin, start = start, start + align(n_bytes)
            return memory[begin : begin + n_bytes]

        rows = rebuild(folder.settings["elements"], next_bytes).lock_()
        return rows, Marks(folder.array("marks", (Marks.n_bytes(folder.settings["n_rows"]),), np.uint8))


def open_columns(folder: LogFolder, options: dict[str, Any], *, num_threads: int | None = None) -> list[FrameColumn]:
    """Return the image columns of a folder, into which no image was read yet.

    :param options: Options of the storage.
    """
    assert folder.settings is not None
    columns = []
    with as_corrupt_file(f"{folder.path} is"):
        for number, kind in enumerate(folder.settings["columns"]):
            path = folder.segments() / str(number)
            path.mkdir(exist_ok=True)
            table = {"folder": path, "settings": kind["settings"]}
            column = FrameColumn(kind, folder.settings["n_rows"], options, num_threads=num_threads, **table)
            column.table.log.is_in_place = folder.is_in_place
            columns.append(column)
            name = "locations" + "_" * number
            column.table.locations = folder.array(name, (math.prod(column.batch),), np.int64)
    return columns


def check_images(columns: list[FrameColumn], marks: Marks, folder: LogFolder) -> None:
    """Read the images in a folder. Those of elements that were being written may be missing.

    :raises CorruptFileError: If other images are missing or damaged.
    """
    length = marks.length
    found = [column.table.recover()[: length * column.per_row].reshape(length, column.per_row) for column in columns]
    is_lost = ~np.all([rows.all(axis=1) for rows in found], axis=0) & ~marks.writing[:length]
    if lost := int(np.count_nonzero(is_lost)):
        raise damaged_folder_error(
            f"images of {lost} of {length} elements in {folder.path} are missing: the data was truncated or overwritten"
        )


def drop_torn_elements(rows: Any, columns: list[FrameColumn], marks: Marks, process_name: str) -> None:
    """Remove elements that were partly written when a process ended.

    Those at the end are cut off. In the middle, they become copies of the valid element before them.
    """
    length, next_row = marks.length, marks.next_row
    torn = np.flatnonzero(marks.writing)
    inside = torn[torn < length]
    whole = np.setdiff1d(np.arange(length), inside)
    if not len(whole):
        length, inside = 0, inside[:0]
    for row in inside.tolist():
        before = int(whole[np.searchsorted(whole, row) - 1])
        rows[row] = rows[before]
        for column in columns:
            column.table.copy(column.rows_of(before), column.rows_of(row))
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
    marks.update(length, next_row if length == len(rows) else length)
    marks.writing[:] = False
