"""Room for sealed blocks: a few large pieces instead of many small objects.

A Python object a frame costs kilobytes beyond its contents, which no ``len()`` shows; the resident memory does.
"""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames._state import SLACK, Addresses, Bytes

_SLAB_BYTES = 1 << 20
_SLABS_A_BUDGET = 64  # pieces are small against a budget, since only whole ones can be given back
_LEAST_SLAB_BYTES = 1 << 12
_LEAST_MAPPED = 1 << 15


def allocate(n_bytes: int, purpose: str) -> Bytes:
    """An uninitialised array of bytes.

    :raises OutOfMemoryError: where the system has no more.
    """
    try:
        return np.empty(n_bytes, dtype=np.uint8)
    except MemoryError:
        raise _no_memory(n_bytes, purpose) from None


def _no_memory(n_bytes: int, purpose: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no memory for another {n_bytes:,} bytes of {purpose}. What was stored before is intact and nothing of "
        "this call is; pass a smaller buffer_size."
    )


def reserve(n_bytes: int, purpose: str) -> Bytes:
    """Bytes that take memory page by page as they are written.

    Memory that was freed before is resident in all its length from the start: for a small store, most of what it takes.

    :raises OutOfMemoryError: where the system has no more.
    """
    if n_bytes < _LEAST_MAPPED:
        return allocate(n_bytes, purpose)
    try:
        mapped = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise _no_memory(n_bytes, purpose) from None
    return np.frombuffer(mapped, dtype=np.uint8)


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


def was_just_read(array: npt.NDArray[np.generic]) -> bool:
    """Whether the array is what pickle has made of a file's bytes, which can be written to and are nobody else's.

    Copying those would take as much memory again.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return isinstance(owner, bytearray) and array.flags.writeable and array.flags.c_contiguous


def piece_bytes(max_bytes: int | None) -> int:
    """How large the pieces are that memory is taken in."""
    if max_bytes is None:
        return _SLAB_BYTES
    return min(_SLAB_BYTES, max(max_bytes // _SLABS_A_BUDGET, _LEAST_SLAB_BYTES))


class Slabs(Protocol):
    """Large pieces of memory or of a file, by number.

    :ivar sizes: how long each is; 0 for one that was given back.
    :ivar keeps_empty: whether an empty one is held until it is used again.
    """

    sizes: list[int]
    keeps_empty: bool

    def add(self, n_bytes: int, number: int) -> int:
        """Makes a slab of the next number, or one that was given back; returns its address, 0 if it is in a file."""

    def write(self, number: int, offset: int, data: Bytes) -> None:
        """Copies bytes into a slab."""

    def read(self, number: int, offset: int, n_bytes: int) -> memoryview:
        """Bytes of a slab."""

    def emptied(self, number: int) -> None:
        """Gives an empty slab back, if that is of use."""

    def heads(self, used: list[int]) -> list[Bytes]:
        """The bytes in use of each slab, and ``SLACK`` more, so that what was read from a file can be used in place."""


class RamSlabs:
    """Slabs in memory.

    :param trimmed: whether empty ones are given back.
    """

    def __init__(self, *, trimmed: bool = False) -> None:
        self.keeps_empty = not trimmed
        self._slabs: list[Bytes] = []
        self.sizes: list[int] = []

    def add(self, n_bytes: int, number: int) -> int:
        """See :class:`Slabs`."""
        return self.take(reserve(n_bytes, "frames"), number)

    def take(self, slab: Bytes, number: int) -> int:
        """Likewise, with memory that is there."""
        if number == len(self._slabs):
            self._slabs.append(slab)
            self.sizes.append(len(slab))
        else:
            self._slabs[number], self.sizes[number] = slab, len(slab)
        return address_of(slab)

    def write(self, number: int, offset: int, data: Bytes) -> None:
        """See :class:`Slabs`."""
        self._slabs[number][offset : offset + len(data)] = data

    def read(self, number: int, offset: int, n_bytes: int) -> memoryview:
        """See :class:`Slabs`."""
        return self._slabs[number][offset : offset + n_bytes].data

    def emptied(self, number: int) -> None:
        """See :class:`Slabs`."""
        if not self.keeps_empty:
            self._slabs[number], self.sizes[number] = np.zeros(0, dtype=np.uint8), 0

    def heads(self, used: list[int]) -> list[Bytes]:
        """See :class:`Slabs`."""
        for slab, n_bytes in zip(self._slabs, used, strict=True):
            slab[n_bytes : n_bytes + SLACK] = 0  # it goes into files, which hold nothing by chance
        return [
            slab[: n_bytes + SLACK] if n_bytes else slab[:0] for slab, n_bytes in zip(self._slabs, used, strict=True)
        ]


class Arena:
    """Regions of any size in slabs. A slab is used again once all its regions are freed.

    Regions are freed about in the order in which they were stored (a ring buffer's way), so slabs empty one by one.

    :param slabs: where the regions are.
    :param reserved: slab numbers below this one are not the arena's.
    :param max_bytes: what the arena's owner may hold in all.
    """

    def __init__(self, slabs: Slabs, *, reserved: int, max_bytes: int | None = None) -> None:
        self._slabs, self._reserved, self._piece = slabs, reserved, piece_bytes(max_bytes)
        self._live: list[int] = [0] * len(slabs.sizes)  # regions a slab
        self._used: list[int] = [0] * len(slabs.sizes)  # bytes ever written a slab
        self._empty: list[int] = list(range(len(slabs.sizes)))
        self._gone: list[int] = []
        self._current = -1
        self._position = 0
        self.nbytes = 0  # of what is resident, or in use in a file
        self.addresses: Addresses = np.zeros(reserved + len(slabs.sizes), dtype=np.uint64)

    def store(self, data: Bytes) -> tuple[int, int]:
        """Copies ``data``; returns its slab number and its offset there.

        :raises OutOfMemoryError: where the system has no more; nothing is changed then.
        :raises StorageError: where a file cannot be written.
        """
        n_bytes = len(data)
        if self._current < 0 or self._position + n_bytes + SLACK > self._slabs.sizes[self._current]:
            self._next_slab(n_bytes + SLACK)
        slab, offset = self._current, self._position
        self._slabs.write(slab, offset, data)
        self._position = offset + n_bytes
        self._note_used(slab, max(self._used[slab], self._position))
        self._live[slab] += 1
        return slab + self._reserved, offset

    def take_back(self, slab: int, offset: int) -> None:
        """Undoes the last :meth:`store`."""
        self._live[slab - self._reserved] -= 1
        self._position = offset

    def _note_used(self, slab: int, n_bytes: int) -> None:
        self.nbytes += n_bytes - self._used[slab]
        self._used[slab] = n_bytes

    def _next_slab(self, n_bytes: int) -> None:
        slab = next((s for s in self._empty if self._slabs.sizes[s] >= n_bytes), -1)
        if slab >= 0:
            self._empty.remove(slab)
        else:
            slab = self._gone[-1] if self._gone else len(self._slabs.sizes)
            self._note_address(slab, self._slabs.add(max(self._piece, n_bytes), slab))
            if self._gone:
                self._gone.pop()
        retired, self._current, self._position = self._current, slab, 0
        if retired >= 0 and self._live[retired] == 0:
            self._note_empty(retired)

    def _note_address(self, slab: int, address: int) -> None:
        if slab == len(self._live):
            self._live.append(0)
            self._used.append(0)
            self.addresses = np.append(self.addresses, np.uint64(address))
        else:
            self.addresses[self._reserved + slab] = address

    def _note_empty(self, slab: int) -> None:
        self._slabs.emptied(slab)
        if not self._slabs.keeps_empty:
            self._note_used(slab, 0)
        (self._empty if self._slabs.sizes[slab] else self._gone).append(slab)

    def free(self, slab: int) -> None:
        """Gives up one region of a slab."""
        slab -= self._reserved
        self._live[slab] -= 1
        if self._live[slab] == 0:
            if slab == self._current:
                self._position = 0
            else:
                self._note_empty(slab)

    def read(self, slab: int, offset: int, n_bytes: int) -> memoryview:
        """Bytes of a slab."""
        return self._slabs.read(slab - self._reserved, offset, n_bytes)

    def take_over(self, live: list[int], used: list[int]) -> None:
        """Goes on with slabs that regions are in already.

        :param live: how many regions are in each.
        :param used: up to where each is written.
        """
        self._live, self._used, self.nbytes = live, used, sum(used)
        self._empty = [number for number, count in enumerate(live) if count == 0]

    def state(self) -> dict[str, Any]:
        """What a file needs. The bytes are views, which pickle writes without a copy."""
        needed = [bool(live) or number == self._current for number, live in enumerate(self._live)]
        used = [n_bytes * keep for n_bytes, keep in zip(self._used, needed, strict=True)]
        return {
            "sizes": list(self._slabs.sizes),
            "slabs": self._slabs.heads(used),
            "used": used,
            "live": list(self._live),
            "current": self._current,
            "position": self._position,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, reserved: int, max_bytes: int | None = None) -> Arena:
        """The arena that :meth:`state` described, in memory."""
        slabs = RamSlabs(trimmed=max_bytes is not None)
        arena = cls(slabs, reserved=reserved, max_bytes=max_bytes)
        known = state.get("used") or [len(stored) for stored in state["slabs"]]
        for number, (size, stored, used) in enumerate(zip(state["sizes"], state["slabs"], known, strict=True)):
            slab = stored
            if number == state["current"] or not (len(stored) >= used + SLACK and was_just_read(stored)):
                slab = reserve(size, "frames")
                slab[: len(stored)] = stored
            arena._note_address(number, slabs.take(slab, number))
            arena._note_used(number, used)
        arena._live, arena._current, arena._position = list(state["live"]), state["current"], state["position"]
        for number, live in enumerate(arena._live):
            if live == 0 and number != arena._current:
                (arena._empty if slabs.sizes[number] else arena._gone).append(number)
        return arena
