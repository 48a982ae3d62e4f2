"""Sealed blocks and reference frames in files, as the arena and the pool of reference frames keep them in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection

import numpy as np

from rl_ext_core.frames._state import SLACK, Bytes, Counts
from rl_ext_core.frames.arena import address_of, allocate
from rl_ext_core.frames.disk._files import PREAD, File, Regions, damage
from rl_ext_core.frames.references import frames_a_chunk

_CACHED_BYTES = 4 << 20  # of reference frames: the few that most blocks of a game start from


class FileSlabs:
    """Slabs that are regions of a file; see :class:`~rl_ext_core.frames.arena.Slabs`.

    :param file: the file.
    :param starts: where the slabs begin that are there already.
    :param sizes: how long these are.
    """

    keeps_empty = False

    def __init__(self, file: File, starts: list[int], sizes: list[int]) -> None:
        self.file = file
        self.starts, self.sizes = starts, sizes
        self._starts_as_array = np.zeros(0, dtype=np.int64)

    def add(self, n_bytes: int, number: int) -> int:
        """See :class:`~rl_ext_core.frames.arena.Slabs`."""
        start = self.starts[-1] + self.sizes[-1] if self.starts else 0
        self.file.grow(start + n_bytes)
        self.starts.append(start)
        self.sizes.append(n_bytes)
        return 0

    def write(self, number: int, offset: int, data: Bytes) -> None:
        """See :class:`~rl_ext_core.frames.arena.Slabs`."""
        self.file.write(self.starts[number] + offset, data.data)

    def read(self, number: int, offset: int, n_bytes: int) -> memoryview:
        """See :class:`~rl_ext_core.frames.arena.Slabs`."""
        return memoryview(self.file.read(self.starts[number] + offset, n_bytes))

    def read_many(
        self, numbers: Counts, offsets: Counts, sizes: Counts, read_regions: Callable[..., int]
    ) -> tuple[Bytes, Counts]:
        """Regions of slabs, one behind the other, and where each begins.

        :param read_regions: a kernel.
        :raises CorruptFileError: if the file ends before.
        :raises StorageError: if it cannot be read.
        """
        if len(self._starts_as_array) != len(self.starts):
            self._starts_as_array = np.array(self.starts, dtype=np.int64)
        places = self._starts_as_array[numbers] + offsets
        ends = sizes.cumsum()
        target = allocate((int(ends[-1]) if len(ends) else 0) + SLACK, "buffers")
        if read_regions(PREAD, self.file.descriptor, places, sizes, address_of(target)):
            parts = zip(places.tolist(), sizes.tolist(), strict=True)
            everything = b"".join(self.file.read(place, size) for place, size in parts)
            target[: len(everything)] = np.frombuffer(everything, dtype=np.uint8)
        return target, ends - sizes

    def emptied(self, number: int) -> None:
        """See :class:`~rl_ext_core.frames.arena.Slabs`. What is behind it in the file would have to move."""

    def heads(self, used: list[int]) -> list[Bytes]:
        """See :class:`~rl_ext_core.frames.arena.Slabs`."""
        return Regions(self.file, [(start, n + SLACK if n else 0) for start, n in zip(self.starts, used, strict=True)])


class FileFrames:
    """Reference frames in a file, those used last in memory too; see :class:`~rl_ext_core.frames.references.Frames`.

    :param file: the file.
    :param frame_bytes: size of a frame.
    :param sums: CRC-32 of the frames that are there already.
    :param written: is told number and CRC-32 of a frame that was written, and may refuse it.
    """

    def __init__(self, file: File, frame_bytes: int, sums: dict[int, int], written: Callable[[int, int], None]) -> None:
        self.file = file
        self.frame_bytes, self._stride = frame_bytes, frame_bytes + SLACK
        self.sums, self._written = sums, written
        self._cached: dict[int, Bytes] = {}
        self.capacity = max(sums, default=-1) + 1
        self.chunk_frames = frames_a_chunk(frame_bytes, None)
        self.addresses = np.zeros(self.capacity, dtype=np.uint64)

    @property
    def all_in_memory(self) -> bool:
        """Whether there is nothing to load."""
        return len(self._cached) == len(self.sums)

    @property
    def cached_bytes(self) -> int:
        """Bytes in memory."""
        return len(self._cached) * self._stride

    def grow(self) -> list[int]:
        """See :class:`~rl_ext_core.frames.references.Frames`."""
        first = self.capacity
        self.addresses = np.append(self.addresses, np.zeros(self.chunk_frames, dtype=np.uint64))
        self.capacity += self.chunk_frames
        return list(range(first, self.capacity))

    def write(self, number: int, frame: Bytes, *, keep: Collection[int]) -> None:
        """See :class:`~rl_ext_core.frames.references.Frames`."""
        data = allocate(self._stride, "reference frames")
        data[: self.frame_bytes], data[self.frame_bytes :] = frame[: self.frame_bytes], 0
        crc = zlib.crc32(data[: self.frame_bytes].data)
        self.file.write(number * self._stride, data.data)
        self._written(number, crc)
        self.sums[number] = crc
        self._make_room(1, {number, *keep})
        self._keep(number, data)

    def _make_room(self, count: int, kept: Collection[int]) -> None:
        """Drops frames from memory, where others are too many together with those there."""
        if (len(self._cached) + count) * self._stride > _CACHED_BYTES:
            for number in [number for number in self._cached if number not in kept]:
                del self._cached[number]
                self.addresses[number] = 0

    def _keep(self, number: int, data: Bytes) -> None:
        self._cached[number] = data
        self.addresses[number] = address_of(data)

    def view(self, number: int) -> Bytes:
        """See :class:`~rl_ext_core.frames.references.Frames`."""
        if number not in self._cached:
            self._keep(number, self.read(number))
        return self._cached[number][: self.frame_bytes]

    def end_of(self, number: int) -> int:
        """Where a frame ends in the file."""
        return number * self._stride + self.frame_bytes

    def read(self, number: int) -> Bytes:
        """A frame from the file.

        :raises CorruptFileError: if it is damaged.
        """
        data = np.zeros(self._stride, dtype=np.uint8)
        data[: self.frame_bytes] = np.frombuffer(self.file.read(number * self._stride, self.frame_bytes), np.uint8)
        if zlib.crc32(data[: self.frame_bytes].data) != self.sums.get(number):
            raise damage(self.file.path, f"the checksum of reference frame {number} does not match its contents")
        return data

    def load(self, numbers: Collection[int], *, keep: Collection[int]) -> None:
        """See :class:`~rl_ext_core.frames.references.Frames`. Drops others where they would be too many."""
        missing = [number for number in numbers if not self.addresses[number]]
        if not missing:
            return
        self._make_room(len(missing), {*numbers, *keep})
        for number in missing:
            self._keep(number, self.read(number))

    def n_bytes(self, touched: int, n_free: int) -> int:
        """See :class:`~rl_ext_core.frames.references.Frames`."""
        return (self.capacity - n_free) * self._stride

    def give_back(self, free: Collection[int]) -> list[int]:
        """See :class:`~rl_ext_core.frames.references.Frames`. What is behind them in the file would have to move."""
        return []

    def chunks(self, touched: int) -> list[Bytes]:
        """See :class:`~rl_ext_core.frames.references.Frames`."""
        firsts = range(0, self.capacity, self.chunk_frames)
        sizes = [min(max(touched - first, 0), self.chunk_frames) * self._stride for first in firsts]
        self.file.grow(touched * self._stride)
        return Regions(self.file, [(first * self._stride, size) for first, size in zip(firsts, sizes, strict=True)])
