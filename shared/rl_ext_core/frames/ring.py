"""Which transitions a store keeps, in which rows, within which budget, and in which folder."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, StorageError
from rl_ext_core.frames._state import DEPTH_SHIFT, FRAME_NUMBERS
from rl_ext_core.frames.disk._rows import RowArrays

if TYPE_CHECKING:
    from rl_ext_core.frames.codecs import Codec
    from rl_ext_core.frames.disk._opening import Opening
    from rl_ext_core.frames.disk._recovery import Recovered
    from rl_ext_core.frames.disk._store import StoreFiles
    from rl_ext_core.frames.layout import StackLayout
    from rl_ext_core.frames.writer import StreamWriter

_logger = logging.getLogger("rl_ext_core.frames")

_MOST_UNSEALED = 64  # transitions an environment that wait for blocks to be full; then these are sealed as they are
_LEAST_BLOCKS = 2  # an environment, of noise, that a budget has to be enough for

_in_folders: weakref.WeakSet[Ring] = weakref.WeakSet()


class Ring:
    """A ring of transitions: the newest is written over the oldest.

    :ivar position: the row that the next transition goes to.
    :ivar full: whether all rows were written.
    :ivar dropped: how many of the oldest transitions were given up, whose rows were not written again yet.
    :ivar recovered: what was found in ``storage_dir``; None where nothing was.
    """

    capacity: int
    n_envs: int
    layout: StackLayout
    codec: Codec
    block_length: int
    max_bytes: int | None
    recovered: Recovered | None
    _lock: threading.Lock
    _writer: StreamWriter
    _rows: RowArrays
    _files: StoreFiles | None

    def _begin_ring(self) -> None:
        self.position, self.full, self.dropped = 0, False, 0
        self._index = np.zeros((self.capacity, self.n_envs), dtype=np.uint64)
        if self._files is not None:
            self._files.index = self._index
            _in_folders.add(self)

    @property
    def touched(self) -> int:
        """Rows ever written."""
        return self.capacity if self.full else self.position

    @property
    def size(self) -> int:
        """Transitions held, an environment."""
        return self.touched - self.dropped

    @property
    def first(self) -> int:
        """The row of the oldest transition held; the others follow it around the ring."""
        return ((self.position if self.full else 0) + self.dropped) % self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held, with the index and the row arrays: what the process, or its files, have grown by."""
        return self._writer.nbytes + self._index[: self.touched].nbytes + self._rows.nbytes(self.touched)

    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of the caller's own with one row a transition: actions, rewards, flags.

        It is kept where the frames are: in a mapped file with ``storage_dir``, else in memory. Ask for all of them
        before the first transition is added; write to row ``i`` after the transition in row ``i`` was added, and no
        more once the next one is; see :meth:`newest_row_changed`. After the folder was opened again they hold what
        belongs to the transitions there.

        :param name: letters, digits, ``_``, ``-`` and ``.``.
        :param shape: of one row.
        :param dtype: of the array.
        :return: shape ``(capacity, *shape)``, zero where nothing was written; the same array for the same name.
        :raises InvalidArgumentError: if there is such an array of another shape or dtype, or it comes too late.
        :raises StorageError: if there is no room for it on the disk.
        """
        if self._files is not None:
            return self._files.array(name, shape, dtype)
        found = self._rows.get(name, shape, dtype)
        return self._rows.add(name, shape, dtype) if found is None else found

    def newest_row_changed(self) -> None:
        """To be called where the row of the newest transition was written to once more after :meth:`flush`.

        Its checksum would not be that of its contents.
        """
        if self._files is not None:
            with self._lock:
                self._files.newest_row_changed()

    def _advance(self, row: int, entries: npt.NDArray[np.uint64]) -> None:
        """Makes the transition with these entries the newest."""
        if self._files is not None:
            self._files.note_row(row)
        if self.full and self.dropped and row == self.position:
            self.dropped -= 1  # its row is taken
        self._index[row] = entries
        self.position = row + 1
        if self.position == self.capacity:
            self.position, self.full = 0, True
        if self.full and self.position % self.block_length == 0:
            self._free_unneeded()
        if self.max_bytes is not None:
            self._keep_within(self.max_bytes)

    def _free_unneeded(self) -> None:
        """Frees the blocks that no transition needs any more."""
        count = self._writer.streams.total
        oldest = self._index[self.first].astype(np.int64)
        behind = (count - oldest) % FRAME_NUMBERS
        first = count - behind - ((oldest >> DEPTH_SHIFT) & 0xFF) + 1
        for env, block in enumerate((first // self.block_length).tolist()):
            self._writer.blocks.free_before(env, block)

    def _keep_within(self, max_bytes: int) -> None:
        # Where the journal cannot be written, the next transition tries again.
        with contextlib.suppress(StorageError):
            while self.nbytes > max_bytes and self.size > 1:
                self._drop_oldest(min(self.block_length, self.size - 1))

    def drop_oldest(self, count: int) -> None:
        """Gives up the oldest transitions. Their rows read as zeros then.

        :param count: how many, an environment.
        :raises InvalidArgumentError: if there are not so many.
        """
        self._check_held(count)
        with self._lock:
            if count:
                self._drop_oldest(count)

    def _check_held(self, count: int) -> None:
        if not 0 <= count <= self.size:
            raise InvalidArgumentError(f"count={count} transitions cannot be given up, {self.size} are held")

    def _drop_oldest(self, count: int) -> None:
        if self._files is not None:
            self._files.note_first(self._files.added - self.size + count)
        self._index[(self.first + np.arange(count)) % self.capacity] = 0
        self.dropped += count
        self._free_unneeded()
        self._writer.blocks.trim()

    def _check_budget(self) -> None:
        if self.max_bytes is None:
            return
        block_bytes = self.block_length * self.layout.frame_bytes
        least = self._writer.nbytes + _LEAST_BLOCKS * self.n_envs * block_bytes
        if self.max_bytes < least:
            raise InvalidArgumentError(
                f"max_bytes={self.max_bytes:,} is too little for {self.n_envs} environments with observations of shape "
                f"{self.layout.shape}: what they have in the works takes up to {least:,}; pass at least that, or a "
                "smaller block_length"
            )

    def forget_newest(self, count: int) -> None:
        """Takes the newest transitions back, so that stores that belong together hold the same ones.

        :param count: how many, an environment.
        :raises InvalidArgumentError: if there are not so many.
        """
        self._check_held(count)
        with self._lock:
            if count == 0:
                return
            if self._files is not None:
                self._files.forget_newest(count)
            self._index[(self.position - 1 - np.arange(count)) % self.capacity] = 0
            self._writer.streams.last_memory[:] = 0
            if self.full and count > self.position:
                # Rows behind the new end were written before: they count as the oldest, given up.
                self.position = (self.position - count) % self.capacity
                self.dropped += count
            elif self.full:
                self.position -= count
                self.dropped += count
            else:
                self.position -= count

    def _prepare_files(self, files: StoreFiles) -> None:
        """What comes before a transition is stored."""
        files.folder.check_ours()
        if files.added - files.committed >= _MOST_UNSEALED:
            self._seal_all(files)
        if files.wants_compaction:
            # It is tried again; the journal that is there counts until then.
            with contextlib.suppress(StorageError):
                files.write_anew(self._writer.blocks.records())
        files.before_row()

    def _seal_all(self, files: StoreFiles) -> None:
        self._writer.seal_open()
        files.note_rows()

    def flush(self) -> None:
        """Makes sure that what was added survives the process. Does nothing without ``storage_dir``.

        Blocks are sealed before they are full, which costs some space: once in a while is fine, every step is not.

        :raises StorageError: if it cannot be written.
        """
        if self._files is not None:
            self._files.folder.check_ours()
            with self._lock:
                self._seal_all(self._files)

    def close(self) -> None:
        """Writes what is not written yet, and lets another process open ``storage_dir``. Nothing can be read after."""
        if self._files is None or self._files.closed:
            return
        try:
            if self._files.attached and self._files.folder.ours:
                self.flush()
        finally:
            self._files.close()
            _in_folders.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_files", None) is not None:
            _close_quietly(self)

    def _replacement(self) -> Opening | None:
        """Where a store goes that will take the place of this one."""
        from rl_ext_core.frames.disk._opening import Opening

        if self._files is None:
            return None
        return Opening(self._files.folder, self._files.options, None, self._rows, replaces=True)

    @contextlib.contextmanager
    def taking_the_place_of(self, other: Ring) -> Iterator[None]:
        """For the time in which the transitions of another store are added to this one, from the first row on.

        Whatever is raised meanwhile, the other one stays in place.
        """
        files, old = self._files, other._files
        try:
            yield
            if files is not None:
                files.newest_unfinished = True  # it has just been added to the other store
                self._seal_all(files)
                files.newest_unfinished = False
                files.take_place()
        except BaseException:
            if files is not None:
                files.discard()
            raise
        self._rows = other._rows
        if old is not None:
            old.give_way()

    def _resume(self, opening: Opening) -> None:
        from rl_ext_core.frames.disk._opening import resume

        assert self._files is not None
        span, live, where, self.recovered = resume(opening, self._files, self._index, patches=self.codec.patches)
        self._writer.take_over(live, *where)
        self.position, self.full = span.end % self.capacity, span.end >= self.capacity
        self.dropped = self.touched - (span.end - span.first)


def _close_quietly(ring: Ring) -> None:
    try:
        ring.close()
    except Exception:  # nobody is there to be told otherwise
        _logger.exception("what was added last to %s may be lost", ring._files.folder.path if ring._files else "")


def _close_all() -> None:
    for ring in list(_in_folders):
        _close_quietly(ring)


atexit.register(_close_all)
