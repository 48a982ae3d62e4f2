"""The files of one frame store: its sealed blocks, its reference frames, and the journal that says what counts."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, StorageError
from rl_ext_core.frames._state import FRAME_NUMBERS, STEP_SHIFT, Bytes
from rl_ext_core.frames.disk import _journal as journal
from rl_ext_core.frames.disk._blocks import FileFrames, FileSlabs
from rl_ext_core.frames.disk._files import damage
from rl_ext_core.frames.disk._folder import Folder, Head
from rl_ext_core.frames.disk._journal import Contents, Journal
from rl_ext_core.frames.disk._rows import RowArrays

_COMPACT_FROM = 1 << 20  # bytes of a journal, below which it is not worth the work
_ROWS_A_RECORD = 4096

Index = npt.NDArray[np.uint64]


class StoreFiles:
    """The files of one frame store.

    A transition counts once the frames of all its environments are in sealed blocks and the journal says so.

    :param folder: where they are.
    :param start: what the journal begins with: the options of the folder's owner, and the settings of the store.
    :param rows: arrays of the store's owner.
    :param contents: what the journal says, where there is one.
    :param replaces: whether what is in the folder stays until :meth:`take_place`.
    """

    def __init__(
        self,
        folder: Folder,
        start: dict[str, Any],
        rows: RowArrays,
        *,
        frame_bytes: int,
        contents: Contents | None = None,
        replaces: bool = False,
    ) -> None:
        self.folder, self.rows = folder, rows
        self._start = start
        settings = start["settings"]
        self._capacity, self._shift = settings["capacity"], settings["block_length"].bit_length() - 1
        self._sealed = np.zeros(settings["n_envs"], dtype=np.int64)  # frames in sealed blocks
        self.index: Index = np.zeros((0, 0), dtype=np.uint64)
        self.added = self.committed = self.first = 0  # numbers of transitions: given, that count, the oldest held
        self.attached = not replaces
        self.newest_unfinished = False  # whether the owner has yet to write to the newest transition's row
        self._number = folder.head.journal if contents else folder.head.journal + 1
        self._frames_number = start["frames"] if contents else self._number
        self._start["frames"] = self._frames_number
        blocks, references = (folder.file(kind, self._frames_number) for kind in ("blocks", "references"))
        sums = contents.references if contents else {}
        self.slabs = FileSlabs(blocks, [], [])
        self.frames = FileFrames(references, frame_bytes, sums, self._note_reference)
        self.sums = np.zeros(self._capacity, dtype=np.uint32) if contents is None else contents.sums
        self._journal = Journal(folder.file("journal", self._number), contents.n_bytes if contents else 0)
        self._compact_at = 2 * self._journal.n_bytes + _COMPACT_FROM
        if contents is None:
            blocks.truncate(0)
            references.truncate(0)
            self._journal.append(self._started())
        if contents is None and not replaces:
            self.take_place()

    def _started(self) -> bytes:
        arrays = self.rows.described()
        return journal.json_record(journal.START, {"format": journal.FORMAT_VERSION, **self._start, "arrays": arrays})

    def take_place(self) -> None:
        """Makes these the files that count, and removes those that did."""
        self.attached = True
        self.folder.switch(Head(self.added, self._number, self._journal.n_bytes))
        self._remove_others()

    def _remove_others(self) -> None:
        numbers = {"journal": self._number, "blocks": self._frames_number, "references": self._frames_number}
        self.folder.keep_only(numbers)

    @property
    def options(self) -> dict[str, Any]:
        """What the folder's owner was told."""
        options: dict[str, Any] = self._start["options"]
        return options

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A row array, made where there is none yet.

        :raises InvalidArgumentError: if transitions were stored without it.
        """
        found = self.rows.get(name, shape, dtype)
        if found is not None:
            return found
        if self.added:
            raise InvalidArgumentError(
                f"{self.folder.path} holds {self.added:,} transitions and no row array {name!r}; pass another "
                "storage_dir, or ask for all arrays before the first transition is added"
            )
        found = self.rows.add(name, shape, dtype)
        described = {"name": name, "shape": list(shape), "dtype": found.dtype.str}
        self._journal.append(journal.json_record(journal.ARRAY, described))
        return found

    def before_row(self) -> None:
        """Notes that a transition will be overwritten, before it is.

        :raises StorageError: if that cannot be written.
        """
        if self.attached:
            self.folder.write_head(Head(self.added + 1, self._number, self._journal.n_bytes))

    def note_row(self, row: int) -> None:
        """Notes that a transition was stored in a row.

        :raises InvalidArgumentError: if it is neither the next row nor the one stored last.
        """
        last = (self.added - 1) % self._capacity
        if row == self.added % self._capacity:
            self.added += 1
        elif row != last or not self.added:
            raise InvalidArgumentError(
                f"row={row}: with storage_dir, transitions are stored one after the other, next in row "
                f"{self.added % self._capacity}"
            )
        else:
            self.nothing_came()
        if self.added <= self.committed:
            self.committed = self.added - 1
            self._journal.append(journal.number_record(journal.REDO, self.committed))

    def nothing_came(self) -> None:
        """Takes back what :meth:`before_row` noted."""
        if self.attached:
            self.folder.switch(Head(self.added, self._number, self._journal.n_bytes))

    def forget_newest(self, count: int) -> None:
        """Takes transitions back."""
        self.added -= count
        if self.added < self.committed:
            self.committed = self.added
            self._journal.append(journal.number_record(journal.REDO, self.added))
        self.nothing_came()

    def _note_reference(self, number: int, crc: int) -> None:
        self._journal.append(journal.reference_record(number, crc))

    def note_sealed(self, env: int, number: int, block: Bytes, reference: int, slab: int, offset: int) -> int:
        """Notes a block that was written, and the transitions that are complete with it; returns its CRC-32.

        :raises StorageError: if that cannot be written; the block does not count then.
        """
        crc = zlib.crc32(block.data)
        places = (self.slabs.starts[slab], self.slabs.sizes[slab], offset)
        noted = journal.block_record(env, reference, number, *places, len(block), crc)
        sealed = self._sealed.copy()
        sealed[env] = (number + 1) << self._shift
        self._append_rows(sealed, noted)
        self._sealed = sealed
        return crc

    def note_rows(self) -> None:
        """Notes the transitions that are complete."""
        self._append_rows(self._sealed, b"")

    def _append_rows(self, sealed: npt.NDArray[np.int64], before: bytes) -> None:
        end = self.added - self.newest_unfinished
        start = max(self.committed, self.added - self._capacity)
        places = np.arange(start, max(end, start)) % self._capacity
        entries = self.index[places]
        low, step = np.uint64(FRAME_NUMBERS - 1), (entries >> np.uint64(STEP_SHIFT)) & np.uint64(0xFF)
        behind = (sealed.astype(np.uint64) - (entries & low) - step) & low
        complete = ((behind >= 1) & (behind < FRAME_NUMBERS // 2)).all(axis=1)
        count = len(complete) if complete.all() else int(complete.argmin())
        places, sums = places[:count], None
        if count:
            sums = self.rows.sums(places)
            before += journal.rows_record(start, entries[:count], sums)
        if before:
            self._journal.append(before)
        if sums is not None:
            self.committed, self.sums[places] = start + count, sums

    def newest_row_changed(self) -> None:
        """Notes another checksum for the newest transition's row."""
        if self.added and self.committed == self.added:
            place = np.array([(self.added - 1) % self._capacity])
            sums = self.rows.sums(place)
            self._journal.append(journal.rows_record(self.added - 1, self.index[place], sums))
            self.sums[place] = sums

    def note_first(self, first: int) -> None:
        """Notes that transitions before this one are gone."""
        self._journal.append(journal.number_record(journal.FIRST, first))
        self.first = first

    def block_records(
        self,
        envs: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
        slabs: npt.NDArray[np.int64],
        places: npt.NDArray[np.uint32],
        sums: npt.NDArray[np.uint32],
    ) -> npt.NDArray[np.void]:
        """Records of blocks.

        :param places: (n, 2) offsets and reference frames.
        :param sums: (n, 3) sizes and CRC-32.
        """
        found = np.zeros(len(envs), dtype=journal.BLOCK_RECORD)
        found["env"], found["number"] = envs, numbers
        found["slab"] = np.array(self.slabs.starts, dtype=np.uint64)[slabs]
        found["slab_bytes"] = np.array(self.slabs.sizes, dtype=np.uint32)[slabs]
        found["offset"], found["reference"] = places[:, 0], places[:, 1]
        found["n_bytes"], found["crc"] = sums[:, 0], sums[:, 1]
        return found

    def check_block(self, block: memoryview, crc: int) -> None:
        """
        :raises CorruptFileError: if it is not what was written.
        """
        if zlib.crc32(block) != crc:
            raise damage(self.slabs.file.path, "the checksum of a block does not match its contents")

    @property
    def wants_compaction(self) -> bool:
        """Whether the journal is mostly about what is gone."""
        return self.attached and self._journal.n_bytes >= self._compact_at

    def write_anew(self, blocks: npt.NDArray[np.void]) -> None:
        """Writes a journal that holds nothing else than what counts now.

        :param blocks: records of the blocks that are still needed.
        :raises StorageError: if it cannot be written; the one before counts then.
        """
        file = self.folder.file("journal", self._number + 1)
        try:
            written = Journal(file, 0)
            written.append(self._started())
            written.append(b"".join(journal.reference_record(*each) for each in self.frames.sums.items()))
            written.append(b"".join(journal.record(journal.BLOCK, block.tobytes()) for block in blocks))
            for record in self._rows_records():
                written.append(record)
            self.folder.switch(Head(self.added, self._number + 1, written.n_bytes))
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                file.path.unlink()
            self._compact_at = self._journal.n_bytes + _COMPACT_FROM  # and not at every step
            raise
        self._journal.file.close()
        self._journal, self._number = written, self._number + 1
        self._compact_at = 2 * written.n_bytes + _COMPACT_FROM
        self._remove_others()

    def _rows_records(self) -> list[bytes]:
        first = max(self.first, self.added - self._capacity)
        found = []
        for start in range(first, self.committed, _ROWS_A_RECORD):
            places = np.arange(start, min(start + _ROWS_A_RECORD, self.committed)) % self._capacity
            found.append(journal.rows_record(start, self.index[places], self.sums[places]))
        if not found:
            found.append(journal.number_record(journal.REDO, self.committed))
        return [journal.number_record(journal.FIRST, first), *found]

    def resume(self, *, added: int, first: int, sealed: npt.NDArray[np.int64]) -> None:
        """Goes on with what a journal said."""
        self.added = self.committed = added
        self.first, self._sealed = first, sealed

    def anew(self) -> StoreFiles:
        """Files with nothing in them, which take the place of these."""
        files = StoreFiles(self.folder, dict(self._start), self.rows, frame_bytes=self.frames.frame_bytes)
        self.give_way()
        return files

    def give_way(self) -> None:
        """Closes the files, which were replaced."""
        self.attached = False
        self._close_files()

    def close(self) -> None:
        """Closes the files, and lets others use the folder."""
        if self.attached and self.folder.ours:
            with contextlib.suppress(StorageError):
                self.folder.switch(Head(self.added, self._number, self._journal.n_bytes))
        self._close_files()
        self.folder.close()

    @property
    def closed(self) -> bool:
        """Whether nothing can be read or written any more."""
        return self._journal.file.closed

    def _close_files(self) -> None:
        for file in (self._journal.file, self.slabs.file, self.frames.file):
            file.close()

    def discard(self) -> None:
        """Closes the files and removes them, unless others count already."""
        self._close_files()
        if not self.attached:
            for file in (self._journal.file, self.slabs.file, self.frames.file):
                file.path.unlink(missing_ok=True)
