"""Taking stacks apart: which of their frames are new, and where those go."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames._state import (
    ALL_STORED,
    BOUNDARY,
    ENTRY_HEADER,
    INTERLEAVED,
    PLANAR,
    PUSHED,
    SLACK,
    STUCK_AT_OBSERVATION,
    Addresses,
    Bytes,
    Geometry,
    Streams,
)
from rl_ext_core.frames.arena import ReferencePool, address_of, allocate
from rl_ext_core.frames.blocks import BlockTable
from rl_ext_core.frames.codecs import Codec
from rl_ext_core.frames.layout import StackLayout

_GOOD_REFERENCE = 2  # a reference frame is one whose patch takes at most half of a frame


def _rows(n_rows: int, n_bytes: int) -> Bytes:
    return allocate(n_rows * (n_bytes + SLACK), "buffers").reshape(n_rows, n_bytes + SLACK)


def _kept_bytes(layout: StackLayout) -> Bytes:
    unit = layout.frame_channels * layout.dtype.itemsize
    period = unit * layout.n_stack
    return np.tile(np.where(np.arange(period) < period - unit, 255, 0).astype(np.uint8), layout.pixels)[None]


class StreamWriter:
    """Stores the stacks of several environments in step, each environment's frames in a stream of their own.

    :param layout: how an observation is stacked.
    :param n_envs: number of environments.
    :param codec: how frames are stored.
    :param block_length: frames in a block, a power of two.
    :param kernels: the module with the loops.
    """

    def __init__(
        self, layout: StackLayout, n_envs: int, *, codec: Codec, block_length: int, kernels: ModuleType
    ) -> None:
        self.layout, self._codec, self._kernels = layout, codec, kernels
        self.geometry = Geometry(
            n_stack=layout.n_stack,
            frame_bytes=layout.frame_bytes,
            pixels=layout.pixels,
            frame_channels=layout.frame_channels,
            itemsize=layout.dtype.itemsize,
            stored=PLANAR if layout.planar else INTERLEAVED,
            coder=codec.coder,
            block_shift=block_length.bit_length() - 1,
        )
        self.streams = Streams(
            last=_rows(n_envs, layout.stack_bytes),
            last_memory=np.zeros(n_envs, dtype=np.uint8),
            fresh=_rows(n_envs, layout.frame_bytes),
            frame=_rows(n_envs, layout.frame_bytes),
            depth=np.zeros(n_envs, dtype=np.uint8),
            total=np.zeros(n_envs, dtype=np.int64),
            open=_rows(n_envs, block_length * (layout.frame_bytes + ENTRY_HEADER)),
            open_bytes=np.zeros(n_envs, dtype=np.int64),
            open_frames=np.zeros(n_envs, dtype=np.int64),
            scratch=_rows(1, layout.frame_bytes),
            kept=_kept_bytes(layout),
        )
        for rows in (self.streams.last, self.streams.fresh, self.streams.frame):
            rows[:] = 0  # they go into files, which hold nothing by chance
        self.blocks = BlockTable(self.streams.open, frame_bytes=layout.frame_bytes, codec=codec)
        self.stored_whole = 0  # stacks that shared nothing
        self._status = np.zeros(n_envs, dtype=np.int64)
        self._entries = np.zeros(n_envs, dtype=np.uint64)
        self._shape = (n_envs, *layout.shape)
        # The strides of views that VecTransposeImage makes: channel-first over channel-last memory.
        channel_last = np.empty((n_envs, *layout.shape[1:], layout.shape[0]), dtype=layout.dtype)
        self._transposed = np.moveaxis(channel_last, -1, 1).strides if layout.planar else None
        self._open_high = np.zeros(n_envs, dtype=np.int64)  # bytes of open blocks ever written

    def _arrange(self, stacks: npt.NDArray[np.generic], *, name: str) -> tuple[npt.NDArray[np.generic], int]:
        """Checks a batch of stacks and brings it into one of the two memory orders that the kernels read.

        :param stacks: shape ``(n_envs, *layout.shape)``; views as ``VecTransposeImage`` makes them are not copied.
        :param name: what the caller calls it.
        :raises InvalidTypeError: if its dtype cannot be converted without loss.
        :raises InvalidArgumentError: if its shape is another one.
        """
        layout = self.layout
        stacks = np.asarray(stacks)
        if stacks.shape != self._shape:
            raise InvalidArgumentError(
                f"{name} has shape {stacks.shape}, expected {self._shape}: (number of environments, "
                "*observation shape). Nothing was stored."
            )
        if stacks.dtype != layout.dtype:
            if not np.can_cast(stacks.dtype, layout.dtype, "safe"):
                raise InvalidTypeError(
                    f"{name} has dtype {stacks.dtype}, which does not fit into {layout.dtype} without loss. Nothing "
                    f"was stored; convert it with {name}.astype(np.{layout.dtype}) if that is meant."
                )
            stacks = stacks.astype(layout.dtype)
        if stacks.flags.c_contiguous:
            return stacks, PLANAR if layout.planar else INTERLEAVED
        if stacks.strides == self._transposed:
            return stacks, INTERLEAVED
        return np.ascontiguousarray(stacks), PLANAR if layout.planar else INTERLEAVED

    def push_pair(self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]) -> Addresses:
        """Stores what is new in the stacks of one transition an environment; returns their entries for the index.

        :param observations: shape ``(n_envs, *layout.shape)``.
        :param next_observations: likewise.
        :return: (n_envs,), valid until the next call.
        :raises OutOfMemoryError: where the system has no more. What was stored before is intact.
        """
        kernels, geometry, streams = self._kernels, self.geometry, self.streams
        stacks, memory = self._arrange(observations, name="obs")
        next_stacks, next_memory = self._arrange(next_observations, name="next_obs")
        address, next_address = address_of(stacks), address_of(next_stacks)
        reached = kernels.push_pair(
            address, memory, next_address, next_memory, geometry, streams, self._status, self._entries
        )
        if reached == ALL_STORED:
            return self._entries
        try:
            if reached == STUCK_AT_OBSERVATION:
                self._store_stuck(address, memory)
                kernels.begin_entries(streams, self._entries)
                kernels.push(next_address, next_memory, geometry, streams, self._status)
            self._store_stuck(next_address, next_memory)
        except BaseException:
            # Some newest stacks are not stored: nothing may be taken for their continuation.
            streams.last_memory[:] = 0
            raise
        kernels.complete_entries(streams, self._entries)
        return self._entries

    def _store_stuck(self, address: int, memory: int) -> None:
        """Stores those stacks that the kernel alone could not."""
        streams = self.streams
        for env, status in enumerate(self._status.tolist()):
            if status == BOUNDARY:
                self._store_frame(env, address_of(streams.fresh[env]))
                streams.depth[env] = min(int(streams.depth[env]) + 1, self.layout.n_stack)
            elif status > PUSHED:
                self._store_whole(env, address + env * self.layout.stack_bytes, memory)

    def _store_whole(self, env: int, address: int, memory: int) -> None:
        layout, streams = self.layout, self.streams
        frames = allocate(layout.stack_bytes + SLACK, "buffers")
        start = address_of(frames)
        self._kernels.take_frames(address, memory, self.geometry, start)
        padding = self._kernels.leading_padding(start, self.geometry)
        self.stored_whole += 1
        for position in range(padding, layout.n_stack):
            self._store_frame(env, start + position * layout.frame_bytes)
        streams.depth[env] = layout.n_stack - padding
        self._kernels.copy(address_of(streams.last[env]), address, layout.stack_bytes)
        streams.last_memory[env] = memory

    def _store_frame(self, env: int, address: int) -> None:
        if self.streams.open_frames[env] % (1 << self.geometry.block_shift) == 0:
            self._begin_block(env, address)
        self._kernels.append_frame(env, address, self.geometry, self.streams)

    def _begin_block(self, env: int, address: int) -> None:
        streams = self.streams
        if streams.open_frames[env]:
            used = int(streams.open_bytes[env])
            self._open_high[env] = max(self._open_high[env], used)
            self.blocks.seal(env, streams.open[env, :used])
            streams.open_frames[env] = 0
        reference = None
        if self._codec.patches:
            reference = self._reference_for(address)
            # The first patch is taken against it, as the others are against the frame before.
            streams.frame[env, : self.layout.frame_bytes] = self.blocks.references.view(reference)
        self.blocks.begin(env, reference)
        streams.open_bytes[env] = 0

    def _reference_for(self, address: int) -> int:
        pool: ReferencePool = self.blocks.references
        best = -1
        if pool.recent:
            limit = self.layout.frame_bytes // _GOOD_REFERENCE
            scratch = allocate(2 * limit + SLACK, "buffers")
            candidates = np.array(pool.recent[::-1], dtype=np.int64)
            best = self._kernels.best_reference(
                address, self.geometry, candidates, pool.addresses, limit, address_of(scratch)
            )
        if best < 0:
            frame = allocate(self.layout.frame_bytes, "buffers")
            self._kernels.copy(address_of(frame), address, self.layout.frame_bytes)
            best = pool.add(frame)
        return int(best)

    @property
    def bytes_a_frame(self) -> float:
        """What a frame took on average, reference frames included, before anything was freed."""
        stored = self.blocks.frame_bytes + int(self.streams.open_bytes.sum())
        return stored / max(int(self.streams.total.sum()), 1)

    @property
    def nbytes(self) -> int:
        """Bytes held: blocks, their table, and the buffers of the streams as far as they were written."""
        buffers = sum(array.nbytes for array in self.streams) - self.streams.open.nbytes
        opened = int(np.maximum(self._open_high, self.streams.open_bytes).sum())
        return self.blocks.nbytes + buffers + opened

    def state(self) -> dict[str, Any]:
        """What a file needs."""
        streams = self.streams
        kept = {name: array for name, array in streams._asdict().items() if name not in ("scratch", "kept")}
        kept["open"] = [row[:used] for row, used in zip(streams.open, streams.open_bytes.tolist(), strict=True)]
        return {"streams": kept, "blocks": self.blocks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Becomes the writer that :meth:`state` described."""
        for name, stored in state["streams"].items():
            target = getattr(self.streams, name)
            if name == "open":
                for row, block in zip(target, stored, strict=True):
                    row[: len(block)] = block
            else:
                target[:] = stored
        self.blocks.restore(state["blocks"])
