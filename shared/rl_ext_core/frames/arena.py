"""Memory for sealed blocks and reference frames: a few large pieces instead of many small objects.

A Python object a frame costs kilobytes beyond its contents, which no ``len()`` shows; the resident memory does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames._state import SLACK, Addresses, Bytes

_SLAB_BYTES = 1 << 20


def allocate(n_bytes: int, purpose: str) -> Bytes:
    """An uninitialised array of bytes.

    :raises OutOfMemoryError: where the system has no more.
    """
    try:
        return np.empty(n_bytes, dtype=np.uint8)
    except MemoryError:
        raise OutOfMemoryError(
            f"no memory for another {n_bytes:,} bytes of {purpose}. What was stored before is intact and nothing of "
            "this call is; pass a smaller buffer_size."
        ) from None


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


class Arena:
    """Regions of any size in slabs. A slab is used again once all its regions are freed.

    Regions are freed about in the order in which they were stored (a ring buffer's way), so slabs empty one by one.

    :param reserved: slab numbers below this one are not the arena's.
    """

    def __init__(self, *, reserved: int) -> None:
        self._reserved = reserved
        self._slabs: list[Bytes] = []
        self._live: list[int] = []  # regions a slab
        self._used: list[int] = []  # bytes ever written a slab
        self._empty: list[int] = []
        self._current = -1
        self._position = 0
        self.addresses: Addresses = np.zeros(reserved, dtype=np.uint64)

    def store(self, data: Bytes) -> tuple[int, int]:
        """Copies ``data``; returns its slab number and its offset there.

        :raises OutOfMemoryError: where the system has no more; nothing is changed then.
        """
        n_bytes = len(data)
        if self._current < 0 or self._position + n_bytes + SLACK > len(self._slabs[self._current]):
            self._next_slab(n_bytes + SLACK)
        slab, offset = self._current, self._position
        self._slabs[slab][offset : offset + n_bytes] = data
        self._position = offset + n_bytes
        self._used[slab] = max(self._used[slab], self._position)
        self._live[slab] += 1
        return slab + self._reserved, offset

    def _next_slab(self, n_bytes: int) -> None:
        slab = next((s for s in self._empty if len(self._slabs[s]) >= n_bytes), -1)
        if slab >= 0:
            self._empty.remove(slab)
        else:
            self._add_slab(allocate(max(_SLAB_BYTES, n_bytes), "frames"))
            slab = len(self._slabs) - 1
        retired, self._current, self._position = self._current, slab, 0
        if retired >= 0 and self._live[retired] == 0:
            self._empty.append(retired)

    def _add_slab(self, slab: Bytes) -> None:
        self._slabs.append(slab)
        self._live.append(0)
        self._used.append(0)
        self.addresses = np.append(self.addresses, np.uint64(address_of(slab)))

    def free(self, slab: int) -> None:
        """Gives up one region of a slab."""
        slab -= self._reserved
        self._live[slab] -= 1
        if self._live[slab] == 0:
            if slab == self._current:
                self._position = 0
            else:
                self._empty.append(slab)

    def view(self, slab: int) -> Bytes:
        """The bytes of a slab."""
        return self._slabs[slab - self._reserved]

    @property
    def nbytes(self) -> int:
        """Bytes ever written, which is what is resident."""
        return sum(self._used)

    def state(self) -> dict[str, Any]:
        """What a file needs. The bytes are views, which pickle writes without a copy."""
        needed = [bool(live) or number == self._current for number, live in enumerate(self._live)]
        return {
            "sizes": [len(slab) for slab in self._slabs],
            "slabs": [slab[: used * keep] for slab, used, keep in zip(self._slabs, self._used, needed, strict=True)],
            "live": list(self._live),
            "current": self._current,
            "position": self._position,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, reserved: int) -> Arena:
        """The arena that :meth:`state` described."""
        arena = cls(reserved=reserved)
        for size, stored in zip(state["sizes"], state["slabs"], strict=True):
            slab = allocate(size, "frames")
            slab[: len(stored)] = stored
            arena._add_slab(slab)
            arena._used[-1] = len(stored)
        arena._live, arena._current, arena._position = list(state["live"]), state["current"], state["position"]
        arena._empty = [n for n, live in enumerate(arena._live) if live == 0 and n != arena._current]
        return arena


class ReferencePool:
    """Raw frames that the first patches of blocks start from, counted by the blocks that use them.

    Frames have one size, so a freed place is used again and a frame that lives long holds nothing else back.

    :param frame_bytes: size of a frame.
    """

    RECENT = 4  # a new block tries this many of the latest

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._stride = frame_bytes + SLACK
        self._chunk_frames = max(_SLAB_BYTES // self._stride, 1)
        self._chunks: list[Bytes] = []
        self._users: list[int] = []
        self._free: list[int] = []
        self._touched = 0  # places ever written
        self.recent: list[int] = []
        self.addresses: Addresses = np.zeros(0, dtype=np.uint64)

    def add(self, frame: Bytes) -> int:
        """Stores a frame and makes it one of the recent; returns its number.

        :raises OutOfMemoryError: where the system has no more; nothing is changed then.
        """
        if not self._free:
            self._grow()
        number = self._free.pop()
        self._touched = max(self._touched, number + 1)
        self.view(number)[:] = frame[: self._frame_bytes]
        self._behind(number)[:] = 0  # it goes into files, which hold nothing by chance
        self._users[number] = 1  # being recent counts as a use
        self.recent.append(number)
        if len(self.recent) > self.RECENT:
            self.release(self.recent.pop(0))
        return number

    def _grow(self) -> None:
        chunk = allocate(self._chunk_frames * self._stride, "reference frames")
        first = len(self._users)
        self._chunks.append(chunk)
        self._users += [0] * self._chunk_frames
        self._free += range(first + self._chunk_frames - 1, first - 1, -1)
        self.addresses = np.concatenate([self.addresses, self._places(chunk)])

    def _places(self, chunk: Bytes) -> Addresses:
        steps = np.arange(self._chunk_frames, dtype=np.uint64) * np.uint64(self._stride)
        return steps + np.uint64(address_of(chunk))

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
            self._free.append(number)

    def view(self, number: int) -> Bytes:
        """The bytes of a frame."""
        chunk, place = divmod(number, self._chunk_frames)
        return self._chunks[chunk][place * self._stride :][: self._frame_bytes]

    def _behind(self, number: int) -> Bytes:
        chunk, place = divmod(number, self._chunk_frames)
        return self._chunks[chunk][place * self._stride :][self._frame_bytes : self._stride]

    @property
    def nbytes(self) -> int:
        """Bytes ever written, which is what is resident."""
        return self._touched * self._stride

    def state(self) -> dict[str, Any]:
        """What a file needs. The bytes are views, which pickle writes without a copy."""
        stored = [
            self._touched - first for first in range(0, self._chunk_frames * len(self._chunks), self._chunk_frames)
        ]
        sizes = [min(max(frames, 0), self._chunk_frames) * self._stride for frames in stored]
        return {
            "chunks": [chunk[:size] for chunk, size in zip(self._chunks, sizes, strict=True)],
            "users": self._users[: self._touched],
            "recent": list(self.recent),
            "touched": self._touched,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, frame_bytes: int) -> ReferencePool:
        """The pool that :meth:`state` described."""
        pool = cls(frame_bytes)
        for stored in state["chunks"]:
            pool._grow()
            pool._chunks[-1][: len(stored)] = stored
        pool._users[: len(state["users"])] = state["users"]
        pool.recent, pool._touched = list(state["recent"]), state["touched"]
        pool._free = [number for number in reversed(range(len(pool._users))) if pool._users[number] == 0]
        return pool
