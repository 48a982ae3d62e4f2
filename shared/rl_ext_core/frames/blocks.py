"""Where each block of each environment lies, from the first one that is still needed to the one being filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.frames._sealing import open_block, seal_block
from rl_ext_core.frames._state import OFFSET, REFERENCE, SEALED_HEADER, SLAB, Blocks, Bytes, Counts
from rl_ext_core.frames.arena import Arena, RamSlabs, address_of
from rl_ext_core.frames.codecs import Codec
from rl_ext_core.frames.references import RamFrames, ReferencePool, frames_a_chunk

if TYPE_CHECKING:
    from rl_ext_core.frames.disk._recovery import LiveBlocks
    from rl_ext_core.frames.disk._store import StoreFiles

_FIRST_RING = 16

# What is known of each block in a file: its size, its CRC-32, and whether that is still to be compared.
_SIZE, _CRC, _UNCHECKED = range(3)


class BlockTable:
    """A ring of blocks an environment, their bytes in an arena, and the reference frames that they start from.

    :param opened: (n_envs, ...) the open blocks; block ``e`` is filled in row ``e``.
    :param frame_bytes: size of a frame.
    :param codec: seals full blocks.
    :param max_bytes: what the store may hold in all.
    :param files: where sealed blocks and reference frames go, or None for memory.
    """

    def __init__(
        self,
        opened: Bytes,
        *,
        frame_bytes: int,
        codec: Codec,
        max_bytes: int | None = None,
        files: StoreFiles | None = None,
    ) -> None:
        self._n_envs = len(opened)
        self._frame_bytes, self._max_bytes = frame_bytes, max_bytes
        self._codec = codec
        self._files = files
        if files is None:
            chunk_frames = frames_a_chunk(frame_bytes, max_bytes)
            self._arena = Arena(RamSlabs(trimmed=max_bytes is not None), reserved=self._n_envs, max_bytes=max_bytes)
            self.references = ReferencePool(RamFrames(frame_bytes, chunk_frames=chunk_frames))
        else:
            self._arena = Arena(files.slabs, reserved=self._n_envs, max_bytes=max_bytes)
            self.references = ReferencePool(files.frames)
        self._first = np.zeros(self._n_envs, dtype=np.int64)  # blocks before are freed
        self._next = np.zeros(self._n_envs, dtype=np.int64)  # the block after the open one
        self._table = np.zeros((self._n_envs, _FIRST_RING, 3), dtype=np.uint32)
        self._in_files = np.zeros((self._n_envs, _FIRST_RING if files else 0, 3), dtype=np.uint32)
        self._opened_from = np.full(self._n_envs, -1)  # reference frames of the newest blocks
        self._view: Blocks | None = None
        self.fill_in(opened)

    def view(self) -> Blocks:
        """The arrays for the kernels, valid until a block begins."""
        if self._view is None or self._view.reference_address is not self.references.addresses:
            self._arena.addresses[: self._n_envs] = self._open_addresses
            self._view = Blocks(
                table=self._table,
                slab_address=self._arena.addresses,
                reference_address=self.references.addresses,
            )
        return self._view

    def fill_in(self, opened: Bytes) -> None:
        """Has the blocks to come be filled in these rows. None may be open."""
        self._open_addresses = [address_of(row) for row in opened]
        self._view = None

    def begin(self, env: int, reference: int | None) -> None:
        """Opens the next block of an environment.

        :param reference: number of the frame that its first patch starts from, if there is one.
        """
        self._make_room(env)
        slot = int(self._next[env]) & (self._table.shape[1] - 1)
        self._table[env, slot] = env, 0, reference or 0
        if reference is not None:
            self.references.use(reference)
            self._opened_from[env] = reference
        self._next[env] += 1
        self._view = None

    def _make_room(self, env: int) -> None:
        ring = self._table.shape[1]
        if self._next[env] - self._first[env] < ring:
            return
        self._table = self._in_a_ring_of(2 * ring, self._table)
        if self._files is not None:
            self._in_files = self._in_a_ring_of(2 * ring, self._in_files)

    def _in_a_ring_of(self, n_slots: int, table: Any) -> Any:
        grown = np.zeros((self._n_envs, n_slots, 3), dtype=np.uint32)
        for env in range(self._n_envs):
            numbers = np.arange(self._first[env], self._next[env])
            grown[env, numbers & (n_slots - 1)] = table[env, numbers & (table.shape[1] - 1)]
        return grown

    def seal(self, env: int, block: Bytes) -> None:
        """Moves the full open block of an environment into the arena.

        :raises OutOfMemoryError: where the system has no more; the block stays open then.
        :raises StorageError: where a file cannot be written; likewise.
        """
        if self._codec.seals:
            block = seal_block(self._codec, block)
        slab, offset = self._arena.store(block)
        number = int(self._next[env]) - 1
        slot = number & (self._table.shape[1] - 1)
        if self._files is not None:
            try:
                crc = self._files.note_sealed(
                    env, number, block, int(self._table[env, slot, REFERENCE]), slab - self._n_envs, offset
                )
            except BaseException:
                self._arena.take_back(slab, offset)
                raise
            self._in_files[env, slot] = len(block), crc, False
        self._table[env, slot, :REFERENCE] = slab, offset
        self._view = None

    def unseal(self, env: int, slot: int) -> bytes | memoryview:
        """The contents of a sealed block in memory."""
        slab, offset = int(self._table[env, slot, SLAB]), int(self._table[env, slot, OFFSET])
        n_sealed = int(np.frombuffer(self._arena.read(slab, offset, SEALED_HEADER), "<u4")[0])
        return self.opened(self._arena.read(slab, offset, SEALED_HEADER + n_sealed))

    def opened(self, stored: memoryview) -> bytes | memoryview:
        """The contents of a sealed block as it is stored."""
        return open_block(self._codec, stored)

    def read_from_files(
        self, envs: Counts, slots: Counts, read_regions: Callable[..., int]
    ) -> tuple[Bytes, Counts, Counts]:
        """Sealed blocks as they are stored, one behind the other, where each begins, and how long it is.

        :param read_regions: a kernel.
        :raises CorruptFileError: if one is damaged.
        """
        assert self._files is not None
        where, known = self._table[envs, slots].astype(np.int64), self._in_files[envs, slots]
        if self._codec.patches and not self._files.frames.all_in_memory:
            self._load_references(where[:, REFERENCE])
        sizes = known[:, _SIZE].astype(np.int64)
        blocks, starts = self._files.slabs.read_many(
            where[:, SLAB] - self._n_envs, where[:, OFFSET], sizes, read_regions
        )
        for at in known[:, _UNCHECKED].nonzero()[0].tolist():
            self._files.check_block(blocks[starts[at] : starts[at] + sizes[at]].data, int(known[at, _CRC]))
            self._in_files[envs[at], slots[at], _UNCHECKED] = False
        return blocks, starts, sizes

    def _load_references(self, numbers: Counts) -> None:
        """Makes sure that these reference frames are in memory, and those of the open blocks."""
        opened = self._opened_from[self._opened_from >= 0]
        addresses = self.references.addresses
        if not (addresses[numbers].all() and addresses[opened].all()):
            self.references.load(np.unique(np.concatenate([numbers, opened])).tolist())

    def free_before(self, env: int, block: int) -> None:
        """Frees the blocks of an environment before this one."""
        mask = self._table.shape[1] - 1
        while self._first[env] < min(block, int(self._next[env]) - 1):
            slot = int(self._first[env]) & mask
            self._arena.free(int(self._table[env, slot, SLAB]))
            if self._codec.patches:
                self.references.release(int(self._table[env, slot, REFERENCE]))
            self._first[env] += 1

    def trim(self) -> None:
        """Gives memory back that freed blocks have left."""
        self.references.trim()

    @property
    def next_numbers(self) -> Counts:
        """(n_envs,) numbers of the blocks that come next."""
        return self._next

    def records(self) -> Any:
        """The sealed blocks in files, as the journal has them."""
        assert self._files is not None
        envs = np.repeat(np.arange(self._n_envs), self._next - self._first)
        parts = [np.arange(*part) for part in zip(self._first.tolist(), self._next.tolist(), strict=True)]
        numbers = np.concatenate(parts)
        slots = numbers & (self._table.shape[1] - 1)
        table, in_files = self._table[envs, slots], self._in_files[envs, slots]
        sealed = table[:, SLAB] >= self._n_envs
        envs, numbers, table, in_files = envs[sealed], numbers[sealed], table[sealed], in_files[sealed]
        return self._files.block_records(
            envs, numbers, table[:, SLAB].astype(np.int64) - self._n_envs, table[:, OFFSET:], in_files
        )

    def take_over(self, live: LiveBlocks, places: Counts, n_live: list[int], used: list[int]) -> None:
        """Goes on with blocks that are in files already.

        :param places: the slab of each.
        :param n_live: how many are in each slab.
        :param used: how many bytes of each slab are in use.
        """
        assert self._files is not None
        self._first, self._next = live.first.copy(), live.after.copy()
        ring = max(_FIRST_RING, 1 << int((self._next - self._first).max()).bit_length())
        self._table = np.zeros((self._n_envs, ring, 3), dtype=np.uint32)
        self._in_files = np.zeros((self._n_envs, ring, 3), dtype=np.uint32)
        records = live.records
        where = records["env"], records["number"] & np.uint64(ring - 1)
        self._table[where] = np.stack([places + self._n_envs, records["offset"], records["reference"]], axis=1)
        self._in_files[where] = np.stack([records["n_bytes"], records["crc"], np.ones(len(places))], axis=1)
        self._arena = Arena(self._files.slabs, reserved=self._n_envs, max_bytes=self._max_bytes)
        self._arena.take_over(n_live, used)
        if self._codec.patches:
            users = np.bincount(records["reference"], minlength=self._files.frames.capacity).tolist()
            touched = int(records["reference"].max()) + 1 if len(records) else 0
            self.references.take_over(users, [], touched)
        self._view = None

    @property
    def frame_bytes(self) -> int:
        """Bytes of sealed blocks and reference frames."""
        return self._arena.nbytes + self.references.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.frame_bytes + self._table.nbytes + self._in_files.nbytes

    def state(self) -> dict[str, Any]:
        """What a file needs."""
        return {
            "table": self._table,
            "first": self._first,
            "next": self._next,
            "arena": self._arena.state(),
            "references": self.references.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Becomes the table that :meth:`state` described."""
        # Copies: the arrays may belong to another store, or to memory that cannot be written.
        self._table, self._first, self._next = (state[name].copy() for name in ("table", "first", "next"))
        self._arena = Arena.restore(state["arena"], reserved=self._n_envs, max_bytes=self._max_bytes)
        self.references = ReferencePool.restore(state["references"], frame_bytes=self._frame_bytes)
        self._view = None
