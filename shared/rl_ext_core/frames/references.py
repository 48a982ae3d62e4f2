"""Raw frames that the first patches of blocks start from."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

from rl_ext_core.frames import arena
from rl_ext_core.frames._state import SLACK, Addresses, Bytes


class Frames(Protocol):
    """Places for frames, by number.

    :ivar capacity: how many places there are.
    :ivar chunk_frames: how many of them lie together.
    :ivar addresses: (capacity,) where they lie in memory; 0 for those that do not.
    """

    capacity: int
    chunk_frames: int
    addresses: Addresses

    def grow(self) -> list[int]:
        """Makes more places; returns their numbers."""

    def write(self, number: int, frame: Bytes, *, keep: Collection[int]) -> None:
        """Copies a frame to its place, and leaves it in memory, beside those that are to be kept there."""

    def view(self, number: int) -> Bytes:
        """The bytes of a frame."""

    def load(self, numbers: Collection[int], *, keep: Collection[int]) -> None:
        """Makes sure that frames are in memory, beside those that are to be kept there."""

    def n_bytes(self, touched: int, n_free: int) -> int:
        """Bytes that are held, where the first ``touched`` places were ever written and ``n_free`` of all are free."""

    def give_back(self, free: Collection[int]) -> list[int]:
        """Gives back what only free places are in; returns the numbers of those that are gone."""

    def chunks(self, touched: int) -> list[Bytes]:
        """The first places, ``chunk_frames`` at a time."""


def frames_a_chunk(frame_bytes: int, max_bytes: int | None) -> int:
    """How many places memory is taken for at a time."""
    return max(arena.piece_bytes(max_bytes) // (frame_bytes + SLACK), 1)


class RamFrames:
    """Frames in memory.

    :param frame_bytes: size of a frame.
    :param chunk_frames: places that memory is taken for at a time.
    """

    def __init__(self, frame_bytes: int, *, chunk_frames: int) -> None:
        self._frame_bytes, self._stride = frame_bytes, frame_bytes + SLACK
        self.chunk_frames = chunk_frames
        self._chunks: list[Bytes] = []
        self._gone: list[int] = []  # numbers of chunks that were given back
        self.capacity = 0
        self.addresses: Addresses = np.zeros(0, dtype=np.uint64)

    def grow(self) -> list[int]:
        """See :class:`Frames`."""
        return self.take(arena.reserve(self.chunk_frames * self._stride, "reference frames"))

    def take(self, chunk: Bytes) -> list[int]:
        """Likewise, with memory that is there."""
        number = self._gone.pop() if self._gone else len(self._chunks)
        if number == len(self._chunks):
            self._chunks.append(chunk)
            self.capacity += self.chunk_frames
            self.addresses = np.append(self.addresses, np.zeros(self.chunk_frames, dtype=np.uint64))
        self._chunks[number] = chunk
        first, stop = number * self.chunk_frames, (number + 1) * self.chunk_frames
        steps = np.arange(self.chunk_frames, dtype=np.uint64) * np.uint64(self._stride)
        self.addresses[first:stop] = steps + np.uint64(arena.address_of(chunk))
        return list(range(first, stop))

    def write(self, number: int, frame: Bytes, *, keep: Collection[int]) -> None:
        """See :class:`Frames`."""
        self.view(number)[:] = frame[: self._frame_bytes]
        chunk, place = divmod(number, self.chunk_frames)
        # It goes into files, which hold nothing by chance.
        self._chunks[chunk][place * self._stride :][self._frame_bytes : self._stride] = 0

    def view(self, number: int) -> Bytes:
        """See :class:`Frames`."""
        chunk, place = divmod(number, self.chunk_frames)
        return self._chunks[chunk][place * self._stride :][: self._frame_bytes]

    def load(self, numbers: Collection[int], *, keep: Collection[int]) -> None:
        """All of them are in memory."""

    def n_bytes(self, touched: int, n_free: int) -> int:
        """See :class:`Frames`."""
        in_gone = (min(max(touched - number * self.chunk_frames, 0), self.chunk_frames) for number in self._gone)
        return (touched - sum(in_gone)) * self._stride

    def give_back(self, free: Collection[int]) -> list[int]:
        """See :class:`Frames`."""
        places = np.bincount(np.array(list(free), dtype=np.int64) // self.chunk_frames, minlength=len(self._chunks))
        gone = [number for number in np.flatnonzero(places == self.chunk_frames).tolist() if len(self._chunks[number])]
        for number in gone:
            self._chunks[number] = np.zeros(0, dtype=np.uint8)
        self._gone += gone
        return [number * self.chunk_frames + place for number in gone for place in range(self.chunk_frames)]

    def chunks(self, touched: int) -> list[Bytes]:
        """See :class:`Frames`."""
        firsts = range(0, self.capacity, self.chunk_frames)
        sizes = [min(max(touched - first, 0), self.chunk_frames) * self._stride for first in firsts]
        return [chunk[:size] for chunk, size in zip(self._chunks, sizes, strict=True)]


class ReferencePool:
    """Reference frames, counted by the blocks that start from them.

    Frames have one size, so a freed place is used again and a frame that lives long holds nothing else back.

    :param frames: where they are.
    """

    RECENT = 4  # a new block tries this many of the latest

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._users = [0] * frames.capacity
        self._free = list(range(frames.capacity))  # a heap: the first places first, so that the last ones become free
        self._touched = 0  # places ever written
        self.recent: list[int] = []

    @property
    def addresses(self) -> Addresses:
        """Where the frames lie in memory, by number; 0 for one that does not."""
        return self._frames.addresses

    def add(self, frame: Bytes) -> int:
        """Stores a frame and makes it one of the recent; returns its number.

        :raises OutOfMemoryError: where the system has no more; nothing is changed then.
        :raises StorageError: where a file cannot be written.
        """
        if not self._free:
            self._free = self._frames.grow()
            self._users += [0] * (self._frames.capacity - len(self._users))
        number = self._free[0]
        self._frames.write(number, frame, keep=self.recent)
        heapq.heappop(self._free)
        self._touched = max(self._touched, number + 1)
        self._users[number] = 1  # being recent counts as a use
        self.recent.append(number)
        if len(self.recent) > self.RECENT:
            self.release(self.recent.pop(0))
        return number

    def use(self, number: int) -> None:
        """Counts a block that starts from the frame, which stays recent for it."""
        self._users[number] += 1
        if self.recent[-1] != number:
            self.recent.remove(number)
            self.recent.append(number)

    def release(self, number: int) -> None:
        """Takes back one use; the last one frees the frame."""
        self._users[number] -= 1
        if self._users[number] == 0:
            heapq.heappush(self._free, number)

    def view(self, number: int) -> Bytes:
        """The bytes of a frame."""
        return self._frames.view(number)

    def load(self, numbers: Collection[int]) -> None:
        """Makes sure that frames are in memory."""
        self._frames.load(numbers, keep=self.recent)

    def trim(self) -> None:
        """Gives memory back that is of no use now."""
        gone = set(self._frames.give_back(self._free))
        if gone:
            self._free = sorted(number for number in self._free if number not in gone)

    @property
    def nbytes(self) -> int:
        """Bytes ever written and not given back, which is what is resident."""
        return self._frames.n_bytes(self._touched, len(self._free))

    def state(self) -> dict[str, Any]:
        """What a file needs. The bytes are views, which pickle writes without a copy."""
        return {
            "chunks": self._frames.chunks(self._touched),
            "users": self._users[: self._touched],
            "recent": list(self.recent),
            "touched": self._touched,
            "chunk_frames": self._frames.chunk_frames,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, frame_bytes: int) -> ReferencePool:
        """The pool that :meth:`state` described, in memory."""
        # A store of another budget has pieces of another size.
        frames = RamFrames(frame_bytes, chunk_frames=state.get("chunk_frames") or frames_a_chunk(frame_bytes, None))
        for stored in state["chunks"]:
            chunk = stored
            if len(stored) < frames.chunk_frames * frames._stride or not arena.was_just_read(stored):
                chunk = arena.reserve(frames.chunk_frames * frames._stride, "reference frames")
                chunk[: len(stored)] = stored
            frames.take(chunk)
        pool = cls(frames)
        pool.take_over(state["users"], state["recent"], state["touched"])
        return pool

    def take_over(self, users: list[int], recent: list[int], touched: int) -> None:
        """Counts the uses of frames that are there already."""
        self._users[: len(users)] = users
        self.recent, self._touched = list(recent), touched
        self._free = [number for number, users in enumerate(self._users) if users == 0]
