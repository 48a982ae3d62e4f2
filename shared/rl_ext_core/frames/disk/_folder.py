"""The folder of a store: who may write to it, and which of its files count.

========================  ==========================================================================================
file                      contents
========================  ==========================================================================================
``lock``                  number of the process that writes; locked while it does
``head``                  how many transitions were ever given, which journal counts, and how long that is at least
``journal-<n>``           what in the other files counts
``blocks-<n>``            sealed blocks of frames
``references-<n>``        reference frames
``row-<name>``            an array with one row a transition, of the store's owner
========================  ==========================================================================================
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import weakref
import zlib
from pathlib import Path
from typing import NamedTuple

from rl_ext_core.errors import InvalidArgumentError, StorageError
from rl_ext_core.frames.disk._files import File, damage, refusal

_OURS = re.compile(r"lock|head|row-.*|(journal|blocks|references)-\d+")
_SLOT = struct.Struct("<QQQI4x")  # the fields of a head and their CRC-32
_N_SLOTS = 2

_open_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


class Head(NamedTuple):
    """What changes with every transition.

    It is written before a transition is, so that what that one overwrites is known to be gone.
    """

    added: int = 0
    journal: int = 0  # number of the journal
    n_bytes: int = 0  # of it; 0 where there is none yet


class Folder:
    """A folder that this process alone may write to.

    :param path: made where it does not exist.
    :param damaged: whether a head that cannot be read is taken for an empty one.
    :raises InvalidArgumentError: if there are other files in it.
    :raises StorageError: if another process writes to it, or it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], *, damaged: bool = False) -> None:
        self.path = Path(path).absolute()
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _OURS.fullmatch(entry.name))
        except OSError as error:
            raise refusal(self.path, error, doing="use the folder") from error
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} holds {foreign[0]!r}, which is no part of a store; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self._lock = _locked(self.path / "lock")
        self._pid = os.getpid()
        self._turn = 0  # the slot that is written next
        try:
            self._head = File(self.path / "head")
            self.head = Head() if damaged and not self._head_is_whole() else self._read_head()
        except BaseException:
            self.abandon()
            raise
        _open_folders.add(self)

    def _slots(self) -> list[Head]:
        data = self._head.read(0, _N_SLOTS * _SLOT.size)
        return [Head(*fields) for *fields, crc in _SLOT.iter_unpack(data) if crc == _crc(fields)]

    def _head_is_whole(self) -> bool:
        return self._head.size == _N_SLOTS * _SLOT.size and bool(self._slots())

    def _read_head(self) -> Head:
        if self._head.size == 0:
            if any(self.path.glob("journal-*")):
                raise damage(self._head.path, "it is empty")
            self._write_slots(Head())
            return Head()
        found = self._slots()
        if not found:
            raise damage(self._head.path, "its checksums do not match its contents")
        return max(found, key=lambda head: (head.journal, head.n_bytes, head.added))

    def write_head(self, head: Head) -> None:
        """
        Keeps the one before, in case that this process ends meanwhile.

        :raises StorageError: if it cannot be written.
        """
        self._head.write(self._turn * _SLOT.size, _SLOT.pack(*head, _crc(head)))
        self._turn = 1 - self._turn
        self.head = head

    def _write_slots(self, head: Head) -> None:
        for _ in range(_N_SLOTS):
            self.write_head(head)

    def switch(self, head: Head) -> None:
        """Makes another journal count, and forgets the one before."""
        self._write_slots(head)

    def file(self, kind: str, number: int) -> File:
        """One of the numbered files."""
        return File(self.path / f"{kind}-{number}")

    def keep_only(self, numbers: dict[str, int]) -> None:
        """Removes the numbered files of those kinds that have another number."""
        for kind, number in numbers.items():
            for path in self.path.glob(f"{kind}-*"):
                if path.name != f"{kind}-{number}":
                    path.unlink()

    @property
    def ours(self) -> bool:
        """Whether this is the process that opened it, and not one forked from that."""
        return self._pid == os.getpid()

    def check_ours(self) -> None:
        """
        :raises StorageError: in a process that was forked from the one that writes.
        """
        if not self.ours:
            raise StorageError(
                f"{self.path} is written to by process {self._pid}, not by this one, {os.getpid()}, which was forked "
                "from it: two of them would overwrite each other's frames. Open another storage_dir here"
            )

    def close(self) -> None:
        """Lets others write to it."""
        if hasattr(self, "_head"):
            self._head.close()
        self.unlock()
        _open_folders.discard(self)

    def unlock(self) -> None:
        """Gives up the lock, in this process: the one that it was forked from keeps its own."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def abandon(self) -> None:
        """Closes it, and leaves nothing where nothing was."""
        self.close()
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)


def _crc(fields: list[int] | Head) -> int:
    return zlib.crc32(struct.pack("<QQQ", *fields))


def _locked(path: Path) -> int:
    """A descriptor of the locked file."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise refusal(path, error, doing="open") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace")
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise refusal(path, error, doing="lock") from error
        who = "this process" if owner == str(os.getpid()) else "another process"
        raise StorageError(
            f"{path.parent} is in use by {who}, {owner or 'of unknown number'}; close its buffer first, or pass "
            "another storage_dir"
        ) from None
    return lock


def _unlock_in_child() -> None:
    # A forked child shares the lock: without this, the folder stays locked for as long as any child lives.
    for folder in list(_open_folders):
        folder.unlock()


os.register_at_fork(after_in_child=_unlock_in_child)
