"""What a frame storage does to be whole whenever somebody else comes to it: other processes, or a later one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from torchrl.data import TensorStorage

from rl_ext_core.frames._process_lock import ProcessLock
from torchrl_ext._frame_buffers import go_on_at
from torchrl_ext._frame_columns import FrameColumn, Key
from torchrl_ext._frame_marks import Marks
from torchrl_ext._frame_recovery import check_elements, places_of, repair
from torchrl_ext._frame_sums import RowSums

_logger = logging.getLogger("torchrl_ext")


class Upkeep(TensorStorage):
    """A storage that notes what it changes, where others may have to make it whole."""

    _storage: Any
    _columns: list[FrameColumn]
    lock: ProcessLock
    _marks: Marks | None = None
    _sums: RowSums | None = None  # of elements in files
    _exposed = False  # whether views of these were handed out
    _places = np.zeros(0, dtype=np.int64)  # that are being written

    @property
    def _image_keys(self) -> list[Key]:
        return [key for column in self._columns for key in column.keys]

    def _will_write(self, cursor: Any) -> None:
        """Called before the first change."""
        if self._marks is not None:
            self._places = places_of(cursor, len(self._storage))
            self._marks.will_write(self._places)

    def _written(self) -> None:
        """Called when all that was changed is whole, before anything that was replaced is freed."""
        if self._marks is not None:
            if self._sums is not None:
                self._sums.update(self._places)
            last = self._last_cursor_index
            self._marks.written(self._len_along_dim0, 0 if last is None or not len(self) else last + 1)

    def _recover(self, who: str, path: Path | None = None) -> int:
        """Makes whole what another process left behind; returns where elements go on."""
        assert self._marks is not None
        rows, note = self._storage, self._marks.read()
        if path is not None:
            check_elements(self._sums, note, min(note.length, len(rows)), path)
        length = repair(rows, self._image_keys, note, who)
        if self._sums is not None:
            self._sums.update(np.unique(note.writing))
        for column in self._columns:
            column.recover([rows.get(key) for key in column.keys], length, note.touched, path)
        following = note.following % len(rows) if length == len(rows) else length
        self._len = length * (self.max_size // len(rows))
        self._set_last_cursor((following - 1) % length if length else None)
        self._marks.written(length, following)
        if path is not None:
            self._marks.settle()
        return following

    def _expose(self, index: Any) -> None:
        """Notes that elements are handed out as views, which the caller may write to."""
        if self._sums is None or self._exposed:
            return
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, (list, range)) or getattr(part, "ndim", 0) for part in parts):
            assert self._marks is not None
            self._marks.expose()
            self._exposed = True

    def _apply_conditional_patch(self, index: Any, patch: Any) -> None:
        with self.lock:
            self._expose(slice(None))
            super()._apply_conditional_patch(index, patch)

    def _make_whole(self, dead: int) -> None:
        """Called by the lock where a process was killed while it held it."""
        if self._marks is None:
            return
        if len(self._marks.read().writing) == 0:
            _logger.warning("process %d was killed while it used a FrameStorage; no element is lost", dead)
        go_on_at(self, self._recover(f"process {dead}"))
        self._bump_mutation_revision()

    def _let_go(self) -> None:
        """Lets others use the files."""
        for column in self._columns:
            column.pool.close()
        for notes in (self._marks, self._sums):
            if notes is not None:
                notes.unlock()
