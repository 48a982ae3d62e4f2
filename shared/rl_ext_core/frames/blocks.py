"""Where each block of each environment lies, from the first one that is still needed to the one being filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_ext_core.frames._state import REFERENCE, SEALED_HEADER, SLAB, Blocks, Bytes
from rl_ext_core.frames.arena import Arena, ReferencePool, address_of
from rl_ext_core.frames.codecs import Codec

_FIRST_RING = 16


class BlockTable:
    """A ring of blocks an environment, their bytes in an arena, and the reference frames that they start from.

    :param opened: (n_envs, ...) the open blocks; block ``e`` is filled in row ``e``.
    :param frame_bytes: size of a frame.
    :param codec: seals full blocks.
    """

    def __init__(self, opened: Bytes, *, frame_bytes: int, codec: Codec) -> None:
        self._n_envs = len(opened)
        self._frame_bytes = frame_bytes
        self._codec = codec
        self._arena = Arena(reserved=self._n_envs)
        self.references = ReferencePool(frame_bytes)
        self._first = np.zeros(self._n_envs, dtype=np.int64)  # blocks before are freed
        self._next = np.zeros(self._n_envs, dtype=np.int64)  # the block after the open one
        self._table = np.zeros((self._n_envs, _FIRST_RING, 3), dtype=np.uint32)
        self._open_addresses = [address_of(row) for row in opened]
        self._view: Blocks | None = None

    def view(self) -> Blocks:
        """The arrays for the kernels, valid until a block begins."""
        if self._view is None:
            self._arena.addresses[: self._n_envs] = self._open_addresses
            self._view = Blocks(
                table=self._table,
                slab_address=self._arena.addresses,
                reference_address=self.references.addresses,
            )
        return self._view

    def begin(self, env: int, reference: int | None) -> None:
        """Opens the next block of an environment.

        :param reference: number of the frame that its first patch starts from, if there is one.
        """
        self._make_room(env)
        slot = int(self._next[env]) & (self._table.shape[1] - 1)
        self._table[env, slot] = env, 0, reference or 0
        if reference is not None:
            self.references.use(reference)
        self._next[env] += 1
        self._view = None

    def _make_room(self, env: int) -> None:
        ring = self._table.shape[1]
        if self._next[env] - self._first[env] < ring:
            return
        grown = np.zeros((self._n_envs, 2 * ring, 3), dtype=np.uint32)
        for e in range(self._n_envs):
            numbers = np.arange(self._first[e], self._next[e])
            grown[e, numbers & (2 * ring - 1)] = self._table[e, numbers & (ring - 1)]
        self._table = grown

    def seal(self, env: int, block: Bytes) -> None:
        """Moves the full open block of an environment into the arena.

        :raises OutOfMemoryError: where the system has no more; the block stays open then.
        """
        if self._codec.seals:
            sealed = np.frombuffer(self._codec.seal(block.data), dtype=np.uint8)
            if len(sealed) >= len(block):
                sealed = block
            sizes = np.array([len(sealed), len(block)], dtype="<u4").view(np.uint8)
            block = np.concatenate([sizes, sealed])
        slab, offset = self._arena.store(block)
        slot = (int(self._next[env]) - 1) & (self._table.shape[1] - 1)
        self._table[env, slot, :REFERENCE] = slab, offset
        self._view = None

    def unseal(self, slab: int, offset: int) -> bytes | memoryview:
        """The contents of a sealed block."""
        bytes_there = self._arena.view(slab)
        n_sealed, n_bytes = bytes_there[offset : offset + SEALED_HEADER].view("<u4").tolist()
        start = offset + SEALED_HEADER
        sealed = bytes_there[start : start + n_sealed].data
        return sealed if n_sealed == n_bytes else self._codec.unseal(sealed, n_bytes)

    def free_before(self, env: int, block: int) -> None:
        """Frees the blocks of an environment before this one."""
        mask = self._table.shape[1] - 1
        while self._first[env] < min(block, int(self._next[env]) - 1):
            slot = int(self._first[env]) & mask
            self._arena.free(int(self._table[env, slot, SLAB]))
            if self._codec.patches:
                self.references.release(int(self._table[env, slot, REFERENCE]))
            self._first[env] += 1

    @property
    def frame_bytes(self) -> int:
        """Bytes of sealed blocks and reference frames."""
        return self._arena.nbytes + self.references.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.frame_bytes + self._table.nbytes

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
        self._arena = Arena.restore(state["arena"], reserved=self._n_envs)
        self.references = ReferencePool.restore(state["references"], frame_bytes=self._frame_bytes)
        self._view = None
