"""Making a storage whole again that a process left behind in the middle of a change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_ext_core.errors import CorruptFileError
from torchrl_ext._frame_marks import Note
from torchrl_ext._frame_sums import RowSums

_logger = logging.getLogger("torchrl_ext")


def places_of(cursor: Any, n_rows: int) -> npt.NDArray[np.int64]:
    """The places along the first dimension that an index names."""
    first = cursor[0] if isinstance(cursor, tuple) else cursor
    if isinstance(first, slice):
        return np.arange(*first.indices(n_rows))
    places = torch.as_tensor(first).cpu()
    if places.dtype == torch.bool:
        places = places.nonzero()[:, 0]
    found: npt.NDArray[np.int64] = places.reshape(-1).numpy().astype(np.int64) % n_rows
    return found


def check_elements(sums: RowSums | None, note: Note, length: int, path: Path) -> None:
    """
    :param length: of the storage.
    :raises CorruptFileError: if elements are not what was stored.
    """
    if sums is None:
        return
    if note.exposed:
        _logger.info("%s was not closed: whether elements without their images are what they were is not checked", path)
        sums.update(np.arange(length))
    elif n_wrong := len(sums.wrong(np.setdiff1d(np.arange(length), note.writing))):
        raise CorruptFileError(
            f"{path / 'rows'} is damaged: {n_wrong} of {length} elements have another checksum than when they were "
            f"stored; to keep what is intact: FrameStorage.salvage({str(path)!r})"
        )


def repair(rows: Any, keys: list[Any], note: Note, who: str) -> int:
    """Takes out elements that were half written; returns how many elements are left.

    Those at the end are cut off. One in the middle of a full ring becomes a copy of the one before it, which counts.

    :param keys: of images.
    :param who: what to log of whoever wrote them.
    """
    length = min(note.length, len(rows))
    torn = np.unique(note.writing[note.writing < len(rows)])
    if len(torn) == 0:
        return length
    beyond = torn[torn >= length]
    inside = torn[torn < length]
    for key in keys:
        rows.get(key)[torch.from_numpy(beyond)] = 0
    whole = np.setdiff1d(np.arange(length), inside)
    if len(whole) == 0:
        for key in keys:
            rows.get(key)[torch.from_numpy(torn)] = 0
        length = 0
    elif len(inside):
        before = whole[np.searchsorted(whole, inside) - 1]
        rows[torch.from_numpy(inside)] = rows[torch.from_numpy(before)]
    _logger.warning(
        "%d elements were being written when %s ended: %d are lost, %d became copies of the one before",
        len(torn),
        who,
        len(beyond) if length else len(torn),
        len(inside) if length else 0,
    )
    return length
