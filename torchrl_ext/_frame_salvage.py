"""What is left of a damaged folder of a frame storage."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import Salvaged
from torchrl_ext._frame_columns import FrameColumn
from torchrl_ext._frame_folder import StorageFolder
from torchrl_ext._frame_marks import Marks, Note
from torchrl_ext._frame_sums import RowSums

_logger = logging.getLogger("torchrl_ext")
Places = npt.NDArray[np.int64]


def arguments_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the storage in a folder was made with.

    :raises InvalidArgumentError: if there is none.
    :raises CorruptFileError: if that cannot be read.
    """
    path = Path(path).absolute()
    if not path.is_dir() or not any(path.iterdir()):
        raise InvalidArgumentError(f"storage_dir={str(path)!r} holds no storage")
    found: dict[str, Any] = StorageFolder(path).manifest()["arguments"]
    if found["pixels"] is not None:
        found["pixels"] = [key if isinstance(key, str) else tuple(key) for key in found["pixels"]]
    return found


def mend_sizes(folder: StorageFolder) -> None:
    """Makes files as long as they were; what is missing will not have the right checksum."""
    for name, size in folder.manifest()["sizes"].items():
        file = folder.path / name
        if not file.exists() or file.stat().st_size != size:
            with file.open("ab") as opened:
                opened.truncate(size)


def salvage_elements(rows: Any, columns: list[FrameColumn], marks: Marks, sums: RowSums) -> tuple[int, int]:
    """Moves the longest run of elements that are whole to the beginning.

    :return: how long it is, and how many elements there were.
    """
    note = _note(marks, len(rows))
    good = np.ones(note.length, dtype=np.bool_)
    good[note.writing[note.writing < note.length]] = False
    if not note.exposed:
        good[sums.wrong(np.arange(note.length))] = False
    for column in columns:
        good &= _readable(column, [rows.get(key) for key in column.keys], good)
    start = note.following % len(rows) if note.length == len(rows) else 0
    places = _longest_run(good, start)
    kept = rows[torch.from_numpy(places)].clone()
    rows[: len(places)] = kept
    for column in columns:
        held = [rows.get(key) for key in column.keys]
        for handles in held:
            handles[len(places) :] = 0
        column.pool.recover(np.concatenate([handles.reshape(-1).numpy() for handles in held]))
    sums.update(np.arange(len(rows)))
    marks.written(len(places), len(places))
    marks.settle()
    return len(places), note.length


def _note(marks: Marks, n_rows: int) -> Note:
    """The latest note; where none is whole, all places are looked at."""
    try:
        note = marks.read()
    except CorruptFileError:
        return Note(n_rows, 0, n_rows, False, np.zeros(0, dtype=np.int64))
    return note._replace(length=min(note.length, n_rows))


def _readable(column: FrameColumn, held: list[torch.Tensor], good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(n,) which elements have all their images of a column."""
    length = len(good)
    for handles in held:
        handles[length:] = 0
        handles[:length][torch.from_numpy(~good)] = 0
    flat = np.concatenate([handles[:length].reshape(-1).numpy() for handles in held])
    there = column.pool.recover(flat) | (flat == 0)
    there[there] &= column.pool.readable(flat[there])
    found: npt.NDArray[np.bool_] = there.reshape(len(held), length, -1).all(axis=(0, 2))
    return found


def _longest_run(good: npt.NDArray[np.bool_], start: int) -> Places:
    """Places of the longest run of elements that are whole, the newest one of equals.

    :param start: the place of the oldest.
    """
    order = (start + np.arange(len(good))) % max(len(good), 1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good[order], [False]])))
    if not len(edges):
        return order[:0]
    lengths = edges[1::2] - edges[::2]
    longest = len(lengths) - 1 - int(lengths[::-1].argmax())
    return order[edges[2 * longest] : edges[2 * longest + 1]]


def log(path: Path, found: Salvaged) -> Salvaged:
    """Says what was kept."""
    _logger.warning("%s: kept %d elements, gave up %d", path, *found)
    return found
