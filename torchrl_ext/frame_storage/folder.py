"""Elements that a later process finds in a folder, or that others share: tensors over arrays of files, made whole after
a process was killed, and what is left of them in a damaged folder.

``rl_ext_core.frames.folder`` says what lies in a folder.
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
from rl_ext_core.frames import SalvageReport
from rl_ext_core.frames.folder import RowArrays, StoreFolder, as_corrupt_file
from rl_ext_core.frames.journal import Journal, JournalRecord, Places
from rl_ext_core.frames.store import longest_run
from torchrl_ext.frame_storage.columns import FrameColumn
from torchrl_ext.frame_storage.format import describe_rows, dtype_from_name, rebuild

_logger = logging.getLogger("torchrl_ext")

_ROWS_FILE = "rows"
_STORAGE_ARGUMENTS = ("max_size", "ndim", "pixels")


def open_folder(path: str | os.PathLike[str], arguments: dict[str, Any], *, repair: bool = False) -> StoreFolder:
    """Return the folder of a storage.

    :param arguments: of the storage: ``max_size``, ``ndim``, ``pixels``, and the options of its pools.
    :param repair: whether it is damaged. What it was made with is not compared then.
    """
    return StoreFolder(path, arguments, repair=repair, salvage="FrameStorage.salvage")


def begin(folder: StoreFolder, columns: list[FrameColumn], rows: Any) -> None:
    """Have a new folder hold elements like these, all zero.

    :raises InvalidTypeError: if there is something in them that is no tensor.
    :raises StorageError: if there is no room on the disk.
    """
    if type(rows) is not TensorDict:
        raise InvalidTypeError(
            f"a storage in files holds TensorDicts, got {type(rows).__name__}; convert the data: "
            "data.to_tensordict(), or store without storage_dir"
        )
    description = describe_rows(rows, values=False)[0]
    n_bytes = (math.prod(leaf["shape"][1:]) * dtype_from_name(leaf["dtype"]).itemsize for leaf in description["leaves"])
    folder.rows = RowArrays(len(rows))
    # NumPy does not know all dtypes, but their bytes.
    folder.add_rows(_ROWS_FILE, {str(number): ((n,), np.dtype(np.uint8)) for number, n in enumerate(n_bytes)})
    settings = {"columns": [column.kind for column in columns], "elements": description}
    folder.begin(settings, kinds=len(columns))


def map_rows(folder: StoreFolder) -> TensorDict:
    """Return the elements of a folder as this process sees them. Keys cannot be added.

    :raises CorruptFileError: if they are described in no way that is known.
    """
    assert folder.settings is not None

    def view(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(folder.rows.arrays[str(number)].reshape(-1)).view(dtype).reshape(shape)

    with as_corrupt_file(f"{folder.path} is"):
        return rebuild(folder.settings["elements"], view).lock_()


def recover(
    rows: Any,
    columns: list[FrameColumn],
    journal: Journal,
    folder: StoreFolder | None,
    *,
    process_name: str,
    reopening: bool,
) -> tuple[int, int]:
    """Make elements whole that another process left behind.

    :param folder: where they lie, or None for memory.
    :param process_name: what to log of that process.
    :param reopening: whether nobody used the files since; they are compared with their checksums then.
    :return: how many elements count along the first dimension, and where the next one goes.
    :raises CorruptFileError: if there are fewer than were noted, or they are not what was stored.
    """
    if folder is not None:
        folder.rows.refresh()
    record, writing = journal.read() if folder is None or not reopening else _read_checked_record(folder)
    length = _drop_torn_rows(rows, record, writing, process_name)
    if folder is not None:
        folder.rows.record(np.unique(writing))
    for column in columns:
        column.clear(rows, length, record.n_written)
        column.recover(rows, length, None if folder is None else folder.path)
    next_row = record.next_row % len(rows) if length == len(rows) else length
    journal.end_write(length, next_row)
    if reopening:
        journal.flush()
    return length, next_row


def _read_checked_record(folder: StoreFolder) -> tuple[JournalRecord, Places]:
    """What counts, of elements that are what they were."""
    record, writing = folder.read_journal()
    places = np.arange(record.length)
    if record.exposed:
        message = "%s was not closed: whether elements without their images are what they were is not checked"
        _logger.info(message, folder.path)
        folder.rows.record(places)
    elif n_wrong := len(folder.rows.corrupt_rows(np.setdiff1d(places, writing))):
        raise folder.corrupt_file_error(
            _ROWS_FILE, f"{n_wrong} of {len(places)} elements have another checksum than when they were stored"
        )
    return record, writing


def _drop_torn_rows(rows: Any, record: JournalRecord, writing: Places, process_name: str) -> int:
    """Take out elements that were half written; return how many elements are left.

    Those at the end are cut off. One in the middle of a full ring becomes a copy of the one before it, which counts.
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
        "%d elements were being written when %s ended: %d are lost, %d became copies of the one before",
        len(torn),
        process_name,
        len(torn) - len(inside),
        len(inside),
    )
    return length


def salvage(path: str | os.PathLike[str]) -> SalvageReport:
    """Keep the longest run of intact elements of a damaged folder; see ``FrameStorage.salvage``."""
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
            # Of several dimensions, an element of the first one is as many as the others hold.
            n = rows.shape[1 : folder.options["ndim"]].numel()
    finally:
        folder.close()
    _logger.warning("%s: kept %d elements, gave up %d", folder.path, kept * n, (length - kept) * n)
    return SalvageReport(kept * n, (length - kept) * n)


def _keep_longest_run(folder: StoreFolder, rows: Any, columns: list[FrameColumn]) -> tuple[int, int]:
    """Move the longest run of elements that are whole to the beginning; return how many it and all were."""
    assert folder.journal is not None
    n_places, held = len(rows), folder.rows.held
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
    folder.rows.record(np.arange(len(places)))
    folder.journal.end_write(len(places), len(places))
    folder.journal.flush()
    folder.rows.reserve(folder.journal.read()[0].n_written)
    return len(places), record.length


def _find_readable(column: FrameColumn, rows: Any, good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(n,) which elements have all their images of a column."""
    length = len(good)
    column.clear(rows, length, len(rows))
    for key in column.keys:
        rows.get(key)[:length][torch.from_numpy(~good)] = 0
    flat = column.handles(rows, length)
    there = column.recover_handles(flat) | (flat == 0)
    there[there] &= column.pool.are_intact(flat[there])
    found: npt.NDArray[np.bool_] = there.reshape(len(column.keys), length, -1).all(axis=(0, 2))
    return found
