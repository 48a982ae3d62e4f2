"""Elements of a storage in a folder: memory-mapping, recovery after a kill, salvage.

The files of a folder are described in ``rl_ext_core.frames.folder``.
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

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.frames.folder import RowArrays, StoreFolder, as_corrupt_file
from rl_ext_core.frames.journal import Journal, JournalRecord, Places
from rl_ext_core.frames.store import SalvageReport, longest_run
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import describe_rows, dtype_from_name, rebuild

_logger = logging.getLogger("torchrl_ext")

_ROWS_FILE = "rows"
_STORAGE_ARGUMENTS = ("max_size", "ndim", "pixels")


def open_folder(
    path: str | os.PathLike[str], arguments: dict[str, Any], *, repair: bool = False, resume: bool = False
) -> StoreFolder:
    """Open or create the folder of a storage, and lock it.

    :param path: the folder
    :param arguments: arguments of the storage: ``max_size``, ``ndim``, ``pixels``, and the options of its pools
    :param repair: whether the folder is damaged; its arguments are not compared then
    :param resume: whether to continue with the elements in the folder
    """
    return StoreFolder(path, arguments, repair=repair, salvage="FrameStorage.salvage", resume=resume)


def complete_elements(rows: RowArrays, journal: Journal) -> None:
    """Update the checksums of elements of which the caller had views, and flush the journal."""
    record, _ = journal.read()
    if record.exposed:
        rows.update_checksums(np.arange(record.length))
    journal.flush()


def create_rows(folder: StoreFolder, columns: list[FrameColumn], rows: Any) -> None:
    """Create the files of a new folder for elements like ``rows``, filled with zeros.

    :param folder: a new folder
    :param columns: columns of the images
    :param rows: TensorDict with handles in place of images, of the shape of all elements
    :raises InvalidTypeError: If ``rows`` contains something else than tensors and TensorDicts.
    :raises StorageError: If the disk is full.
    """
    if type(rows) is not TensorDict:
        raise InvalidTypeError(
            f"a storage in files stores TensorDicts, got {type(rows).__name__}. Convert the data with "
            "data.to_tensordict(), or leave storage_dir out"
        )
    description = describe_rows(rows, values=False)[0]
    n_bytes = (math.prod(leaf["shape"][1:]) * dtype_from_name(leaf["dtype"]).itemsize for leaf in description["leaves"])
    folder.rows = RowArrays(len(rows))
    # Stored as bytes, because NumPy does not have all of torch's dtypes.
    folder.add_rows(_ROWS_FILE, {str(number): ((n,), np.dtype(np.uint8)) for number, n in enumerate(n_bytes)})
    settings = {"columns": [column.kind for column in columns], "elements": description}
    folder.begin(settings, kinds=len(columns))


def map_rows(folder: StoreFolder) -> TensorDict:
    """Return the elements of a folder as memory-mapped tensors, in a locked TensorDict.

    :raises CorruptFileError: If the description of the elements is damaged.
    """
    assert folder.settings is not None

    def view(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the file of tensor ``number`` as a tensor, without a copy."""
        return torch.from_numpy(folder.rows.arrays[str(number)].reshape(-1)).view(dtype).reshape(shape)

    with as_corrupt_file(f"{folder.path} is"):
        return rebuild(folder.settings["elements"], view).lock_()


def recover_rows(
    rows: Any,
    columns: list[FrameColumn],
    journal: Journal,
    folder: StoreFolder | None,
    *,
    process_name: str,
    reopening: bool,
) -> tuple[int, int]:
    """Repair elements after a process was killed, or after a folder was opened.

    :param rows: all elements, with handles in place of images
    :param columns: columns of the images
    :param journal: journal of the storage
    :param folder: folder of the elements; None: memory
    :param process_name: name of the process that was killed, for the log
    :param reopening: whether a closed folder is opened; elements are compared with their checksums then
    :return: number of valid elements along the first dimension, and the place of the next one
    :raises CorruptFileError: If elements or images are missing or damaged.
    """
    if folder is not None:
        folder.rows.refresh()
    record, writing = journal.read() if folder is None or not reopening else _read_checked_record(folder)
    length = _drop_torn_rows(rows, record, writing, process_name)
    if folder is not None:
        folder.rows.update_checksums(np.unique(writing))
    for column in columns:
        column.clear(rows, length, record.n_written)
        column.recover(rows, length, None if folder is None else folder.path)
    next_row = record.next_row % len(rows) if length == len(rows) else length
    journal.end_write(length, next_row)
    if reopening:
        journal.flush()
    return length, next_row


def _read_checked_record(folder: StoreFolder) -> tuple[JournalRecord, Places]:
    """Read the last record of the journal, and verify the checksums of its elements."""
    record, writing = folder.read_journal()
    places = np.arange(record.length)
    if record.exposed:
        message = "%s was not closed: of its elements, only the images are checked for damage"
        _logger.info(message, folder.path)
        folder.rows.update_checksums(places)
    elif n_wrong := len(folder.rows.corrupt_rows(np.setdiff1d(places, writing))):
        raise folder.corrupt_file_error(
            _ROWS_FILE, f"the checksums of {n_wrong} of {len(places)} elements do not match"
        )
    return record, writing


def _drop_torn_rows(rows: Any, record: JournalRecord, writing: Places, process_name: str) -> int:
    """Remove elements that were partly written; return how many elements are left.

    Those at the end are cut off. In the middle of a full ring, they become copies of the valid element before them.
    """
    length = min(record.length, len(rows))
    torn = np.unique(writing[writing < min(len(rows), record.n_written)])
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
        "%s ended while it wrote %d of the elements: %d lost, %d replaced by a copy of the element before",
        process_name,
        len(torn),
        len(torn) - len(inside),
        len(inside),
    )
    return length


def salvage_folder(path: str | os.PathLike[str]) -> SalvageReport:
    """Repair a damaged folder: keep the longest run of intact elements, and drop all others."""
    folder = open_folder(path, {}, repair=True)
    try:
        with as_corrupt_file(f"{folder.path} is"):
            rows, kinds = map_rows(folder), (folder.settings or {})["columns"]
            options = {name: value for name, value in folder.options.items() if name not in _STORAGE_ARGUMENTS}
            columns = [
                FrameColumn(kind, len(rows), options, num_threads=None, file=folder.frames(number))
                for number, kind in enumerate(kinds)
            ]
            kept, length = _keep_longest_run(folder, rows, columns)
            # Along the first of several dimensions, one row contains several elements.
            n = rows.shape[1 : folder.options["ndim"]].numel()
    finally:
        folder.close()
    _logger.warning("%s: number of elements kept: %d, dropped: %d", folder.path, kept * n, (length - kept) * n)
    return SalvageReport(kept * n, (length - kept) * n)


def _keep_longest_run(folder: StoreFolder, rows: Any, columns: list[FrameColumn]) -> tuple[int, int]:
    """Move the longest run of intact rows to the beginning; return its and the old length."""
    assert folder.journal is not None
    n_places, held = len(rows), folder.rows.n_reserved
    record, writing = folder.read_journal(lambda: None if folder.rows.is_full else held)
    rows = rows[:held]
    good = np.ones(min(record.length, held), dtype=np.bool_)
    good[writing[writing < len(good)]] = False
    if not record.exposed:
        good[folder.rows.corrupt_rows(np.arange(len(good)))] = False
    for column in columns:
        good &= _find_readable(column, rows, good)
    oldest = record.next_row % n_places if len(good) == n_places else 0
    order = (oldest + np.arange(len(good))) % max(len(good), 1)
    places = order[slice(*longest_run(good[order]))]
    rows[: len(places)] = rows[torch.from_numpy(places)].clone()
    for column in columns:
        column.clear(rows, len(places), len(rows))
        column.recover_handles(column.handles(rows, len(rows)))
    folder.rows.update_checksums(np.arange(len(places)))
    folder.journal.end_write(len(places), len(places))
    folder.journal.flush()
    folder.rows.reserve(folder.journal.read()[0].n_written)
    return len(places), record.length


def _find_readable(column: FrameColumn, rows: Any, good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return (n,) booleans: which elements have all images of a column.

    :param good: (n,) which elements are intact so far; images of others are removed
    """
    length = len(good)
    column.clear(rows, length, len(rows))
    for key in column.keys:
        rows.get(key)[:length][torch.from_numpy(~good)] = 0
    flat = column.handles(rows, length)
    there = column.recover_handles(flat) | (flat == 0)
    there[there] &= column.pool.are_intact(flat[there])
    found: npt.NDArray[np.bool_] = there.reshape(len(column.keys), length, -1).all(axis=(0, 2))
    return found
