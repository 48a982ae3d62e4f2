"""Taking stacks apart: which of their frames are new, and where those go."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames._geometry import geometry_of, kept_bytes
from rl_ext_core.frames._state import (
    ALL_STORED,
    BOUNDARY,
    ENTRY_HEADER,
    GROUP,
    INTERLEAVED,
    PLANAR,
    PUSHED,
    SCRATCH_FRAMES,
    SLACK,
    STUCK_AT_OBSERVATION,
    Addresses,
    Bytes,
    Counts,
    Streams,
)
from rl_ext_core.frames.arena import address_of, allocate, reserve
from rl_ext_core.frames.blocks import BlockTable
from rl_ext_core.frames.codecs import Codec
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.references import ReferencePool

if TYPE_CHECKING:
    from rl_ext_core.frames.disk._recovery import LiveBlocks
    from rl_ext_core.frames.disk._store import StoreFiles

_GOOD_REFERENCE = 2  # a reference frame is one whose patch takes at most half of a frame
_RESEMBLING = 8  # likewise an eighth, for frames that follow each other


def _rows(n_rows: int, n_bytes: int) -> Bytes:
    return reserve(n_rows * (n_bytes + SLACK), "buffers").reshape(n_rows, n_bytes + SLACK)


def _scratch(frame_bytes: int, max_error: int) -> Bytes:
    if not max_error:
        return _rows(1, frame_bytes)
    # Zeros, because what is behind a frame is looked at, though it decides nothing.
    return np.zeros((SCRATCH_FRAMES, frame_bytes + GROUP), dtype=np.uint8)


class StreamWriter:
    """Stores the stacks of several environments in step, each environment's frames in a stream of their own.

    :param layout: how an observation is stacked.
    :param n_envs: number of environments.
    :param codec: how frames are stored.
    :param block_length: frames in a block, a power of two.
    :param kernels: the module with the loops.
    :param max_error: how far off the bytes of a frame may be.
    :param max_bytes: what the store may hold in all.
    :param files: where sealed blocks go, or None for memory.
    """

    def __init__(
        self,
        layout: StackLayout,
        n_envs: int,
        *,
        codec: Codec,
        block_length: int,
        kernels: ModuleType,
        max_error: int = 0,
        max_bytes: int | None = None,
        files: StoreFiles | None = None,
    ) -> None:
        self.layout, self._codec, self._kernels = layout, codec, kernels
        self.geometry = geometry_of(layout, codec=codec, block_length=block_length, max_error=max_error)
        self.streams = Streams(
            last=_rows(n_envs, layout.stack_bytes),
            last_memory=np.zeros(n_envs, dtype=np.uint8),
            fresh=_rows(1, layout.frame_bytes),
            frame=_rows(n_envs, layout.frame_bytes),
            depth=np.zeros(n_envs, dtype=np.uint8),
            total=np.zeros(n_envs, dtype=np.int64),
            open=_rows(n_envs, block_length * (layout.frame_bytes + ENTRY_HEADER)),
            open_bytes=np.zeros(n_envs, dtype=np.int64),
            open_frames=np.zeros(n_envs, dtype=np.int64),
            scratch=_scratch(layout.frame_bytes, max_error),
            kept=kept_bytes(layout)[None],
        )
        for rows in (self.streams.last, self.streams.frame):
            rows[:] = 0  # they go into files, which hold nothing by chance
        self.blocks = BlockTable(
            self.streams.open, frame_bytes=layout.frame_bytes, codec=codec, max_bytes=max_bytes, files=files
        )
        self.stored_whole = 0  # stacks that shared nothing
        self._resting = False
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
                self._kernels.take_newest(env, self.geometry, streams)
                self._store_frame(env, address_of(streams.fresh))
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
        self._resting = False
        for position in range(padding, layout.n_stack):
            self._store_frame(env, start + position * layout.frame_bytes)
        streams.depth[env] = layout.n_stack - padding
        self._kernels.copy(address_of(streams.last[env]), address, layout.stack_bytes)
        streams.last_memory[env] = memory

    def _store_frame(self, env: int, address: int) -> None:
        if self.streams.open_frames[env] % (1 << self.geometry.block_shift) == 0:
            self._begin_block(env, address)
        self._kernels.append_frame(env, address, self.geometry, self.streams)
        if self._codec.lossy:
            self._seal(env)

    def _seal(self, env: int) -> None:
        streams = self.streams
        used = int(streams.open_bytes[env])
        self._open_high[env] = max(self._open_high[env], used)
        self.blocks.seal(env, streams.open[env, :used])
        streams.open_frames[env] = 0

    def _begin_block(self, env: int, address: int) -> None:
        streams = self.streams
        if streams.open_frames[env]:
            self._seal(env)
        reference = None
        if self._codec.patches:
            reference = self._reference_for(env, address)
            # The first patch is taken against it, as the others are against the frame before.
            streams.frame[env, : self.layout.frame_bytes] = self.blocks.references.view(reference)
        self.blocks.begin(env, reference)
        streams.open_bytes[env] = 0

    def _best_of(self, candidates: Counts, addresses: Addresses, address: int, part: int) -> int:
        """The candidate with the smallest patch to the frame at ``address``; -1 if none takes that part of a frame."""
        if not len(candidates):
            return -1
        limit = self.layout.frame_bytes // part
        scratch = address_of(self.streams.scratch)
        return int(self._kernels.best_reference(address, self.geometry, candidates, addresses, limit, scratch))

    def _resembles_newest(self, env: int, address: int) -> bool:
        """Whether a frame is much like the one before it. One that is not will be like none of those to come."""
        newest = np.array([address_of(self.streams.frame[env])], dtype=np.uint64)
        return self._best_of(np.zeros(1, dtype=np.int64), newest, address, _RESEMBLING) == 0

    def seal_open(self) -> None:
        """Seals the open blocks, full or not. What is stored next shares no frame with what was stored before."""
        streams = self.streams
        streams.last_memory[:] = 0
        for env in range(len(streams.total)):
            if streams.open_frames[env]:
                self._seal(env)
                streams.open_bytes[env] = 0
                # The frames to come are numbered as those of a block that begins.
                streams.total[env] = self.blocks.next_numbers[env] << self.geometry.block_shift

    def take_over(self, live: LiveBlocks, *where: Any) -> None:
        """Goes on behind blocks that are in files already; see :meth:`BlockTable.take_over`."""
        self.blocks.take_over(live, *where)
        self.streams.total[:] = live.after << self.geometry.block_shift

    def _reference_for(self, env: int, address: int) -> int:
        pool: ReferencePool = self.blocks.references
        best = self._best_of(np.array(pool.recent[::-1], dtype=np.int64), pool.addresses, address, _GOOD_REFERENCE)
        if best < 0 and self.geometry.max_error and pool.recent and not self._resembles_newest(env, address):
            best = pool.recent[-1]
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
        if self._resting:
            buffers -= self.streams.last.nbytes + self.streams.frame.nbytes
        opened = int(np.maximum(self._open_high, self.streams.open_bytes).sum())
        return self.blocks.nbytes + buffers + opened

    def rest(self) -> None:
        """Gives back the memory that only stacks to come need. Should there be any, the next ones are stored whole."""
        self.seal_open()
        layout, n_envs = self.layout, self._shape[0]
        self.streams.last_memory[:] = 0
        self.streams = self.streams._replace(
            last=_rows(n_envs, layout.stack_bytes),
            frame=_rows(n_envs, layout.frame_bytes),
            open=_rows(n_envs, self.streams.open.shape[1] - SLACK),
        )
        self.blocks.fill_in(self.streams.open)
        self._open_high[:] = 0
        self._resting = True

    def state(self) -> dict[str, Any]:
        """What a file needs."""
        streams = self.streams
        kept = {name: array for name, array in streams._asdict().items() if name not in ("scratch", "kept", "fresh")}
        kept["open"] = [row[:used] for row, used in zip(streams.open, streams.open_bytes.tolist(), strict=True)]
        return {"streams": kept, "blocks": self.blocks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Becomes the writer that :meth:`state` described."""
        for name, stored in state["streams"].items():
            target = getattr(self.streams, name)
            if name == "fresh":
                continue  # earlier versions wrote it; nothing in it is needed any more
            if name == "open":
                for row, block in zip(target, stored, strict=True):
                    row[: len(block)] = block
            else:
                target[:] = stored
        self.blocks.restore(state["blocks"])
