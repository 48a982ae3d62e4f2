"""Keeping a frame storage to a number of bytes: where it is reached, the ring closes, and the oldest elements go."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import RoundRobinWriter

from rl_ext_core.errors import InvalidArgumentError, OutOfMemoryError

_PART = 64  # at least one in so many elements go at a time, since those behind them have to be moved


class Budget:
    """Watches what a storage holds.

    :param max_bytes: what it may hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._before = 0

    def check(self, storage: Any) -> None:
        """Refuses writers whose places cannot be changed.

        :raises InvalidArgumentError: if one does not overwrite the oldest.
        """
        for buffer in storage._attached_entities:
            writer = getattr(buffer, "_writer", None)
            if not isinstance(writer, RoundRobinWriter) or writer.tracks_generations:
                raise InvalidArgumentError(
                    f"max_bytes={self.max_bytes} goes with writers that overwrite the oldest, got "
                    f"{type(writer).__name__}; leave max_bytes out, or writer="
                )

    def keep(self, storage: Any) -> None:
        """Makes room for as much as came last, so that the bytes held stay below the limit.

        :raises OutOfMemoryError: if not even a few elements fit.
        """
        held = storage.used_nbytes
        coming = max(held - self._before, 0)
        while held + coming > self.max_bytes:
            if len(storage) < 2:
                raise OutOfMemoryError(
                    f"max_bytes={self.max_bytes} is too little: {len(storage)} elements of this kind take {held} "
                    "bytes; pass a larger max_bytes, or add fewer at a time"
                )
            storage.drop_oldest(max(len(storage) // _PART, 1))
            held = storage.used_nbytes
        self._before = held


def moved_down(rows: Any, start: int, n_dropped: int, length: int) -> None:
    """Moves the elements behind those that were dropped to where these were.

    :param start: the first that was dropped.
    """
    kept = rows[start + n_dropped : length].clone()
    rows[start : start + len(kept)] = kept
    if rows.get("index", None) is not None:  # what TorchRL's writers note
        index = rows.get("index")
        places = torch.arange(start, start + len(kept))
        index[start : start + len(kept)] = places.reshape(-1, *[1] * (index.ndim - 1)).expand_as(index[: len(kept)])
