"""Frame pool: stacks of frames stored by handle, each distinct frame once, in memory that processes can share.

Terms:

- **frame**: one image or vector of an observation.
- **stack**: the ``n_stack`` newest frames, oldest first: one observation. Frames that are missing at the start of an
  episode are zeros, called padding, and are not stored.
- **stream**: a trajectory that the pool follows. A stack that continues it adds only its new frames.
- **block**: up to 16 consecutive frames of one stream, with a link to the block before it.
- **reference**: a whole frame from which the first patch of a block starts. Several blocks share one.
- **grain**: the unit of memory for blocks, 32 bytes or more. A block is stored in a run of grains.
- **handle**: an ``int64`` that names a stack: the block of its newest frame, the place there, and the number of frames
  without padding, its depth.
- **pair**: an ``int64`` that names one transition: two stacks of one stream, the observation and the next one.

Two stacks of 4 frames, in blocks of 4::

    stack A    f1 f2 f3 f4              handle (block 7, place 3, depth 4)
    stack B       f2 f3 f4 f5           handle (block 8, place 0, depth 4)

    stream     [ f1 f2 f3 f4 ] <-------- [ f5 .. .. .. ]
                 block 7                   block 8, still open
                 patches from reference 3  patches from reference 3
                 grains 40 to 52
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import defer_signals
from rl_ext_core._system import COMMITS_LAZILY
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import arrays as fields
from rl_ext_core.frames.allocator import list_free_runs
from rl_ext_core.frames.arrays import COUNT_FIELDS, PoolArrays, PoolMemory, Sizes
from rl_ext_core.frames.blocks import free_unused_blocks
from rl_ext_core.frames.checkpoint import checksum, format_error
from rl_ext_core.frames.codecs import CODECS, block_length_of, check_codec, validate_max_error
from rl_ext_core.frames.decode import are_valid_handles, decode, handles_of_pairs, verify_contents
from rl_ext_core.frames.encode import (
    end_streams,
    put_pairs,
    put_stacks,
    release_pairs,
    release_stacks,
    seal_full_blocks,
)
from rl_ext_core.frames.encoding import Encoding
from rl_ext_core.frames.geometry import (
    ENTRY_HEADER,
    GROUP,
    SCRATCH_FRAMES,
    SLACK,
    Bytes,
    Counts,
    geometry_of,
    shared_byte_mask,
)
from rl_ext_core.frames.jpeg import DEFAULT_QUALITY, JpegCodec
from rl_ext_core.frames.kernel_primitives import sum_rows
from rl_ext_core.frames.layout import StackLayout, candidate_layouts
from rl_ext_core.frames.region import PAGE as REGION_PAGE
from rl_ext_core.frames.region import PrivateRegion, RegionFile, address_of, copy_and_free, new_region

Handles = npt.NDArray[np.int64]

POOL_FORMAT = 5
MOST_STREAMS = 256  # trajectories followed at a time
_LEAST_BLOCK_FRAMES, _MOST_BLOCK_FRAMES = 8, 16  # of all layouts
_PAGE_OUT_AFTER = 4096  # stacks read or written, each in two or three pages, before pages of a file are paged out
_MIN_TRIM_BYTES = 1 << 16  # shortest free run that is returned to the system
_SEALED_STACKS = 8  # stacks stored at a time, because they take their full size until their blocks are sealed


class FramePool:
    """Storage of stacks by handle. A frame is stored once, however many stacks contain it.

    Stacks can be added in any order. :meth:`put` compares each one with the newest stacks of all streams. A stack that
    continues no stream is stored whole. Stacks are returned bit for bit as they were stored, unless ``max_error`` or
    the codec ``"jpeg"`` is used. Even then, a frame always decodes to the same values.

    All data is in one :class:`Region`. A pool that is pickled for a child process shares its memory with the child.
    The caller must hold a lock for each call, because calls that change the pool must not overlap in any process.

    :param n_handles: Maximum number of stored stacks. Unused capacity takes no memory.
    :param layout: How a stack is made of frames.
    :param codec: Name of the codec.
    :param max_error: Maximum error per byte; 0 is exact.
    :param quality: JPEG quality, 1 to 100; for the codec ``"jpeg"`` only.
    :param file: File that stores the pool, or None for memory. If it exists, the pool must be recovered before use.
    :param streams: Number of environments if transitions are added with :meth:`put_pairs`. The memory is then private
        to this process, and ``n_handles`` counts transitions per stream. None if stacks are added in any order.
    :param grain: Bytes per grain, or None for the smallest size that can be numbered.
    """

    _is_ring = _repair = False

    @defer_signals
    def __init__(
        self,
        n_handles: int,
        layout: StackLayout,
        *,
        codec: str = "patch",
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        file: RegionFile | None = None,
        streams: int | None = None,
        grain: int | None = None,
    ) -> None:
        self._shape, self._dtype = layout.shape, layout.dtype
        self._is_ring = streams is not None
        if streams is not None:
            self._sizes = fields.sizes_for_ring(
                index(n_handles),
                layout=layout,
                block_length=block_length_of(layout, codec),
                streams=streams,
                has_checksums=file is not None,
            )
        else:
            self._sizes = fields.sizes_for_handles(
                index(n_handles),
                stack_bytes=layout.stack_bytes,
                n_stack=max(other.n_stack for other in (layout, *candidate_layouts(layout.shape, layout.dtype))),
                least_frames=min(block_length_of(layout, codec), _LEAST_BLOCK_FRAMES),
                block_frames=_MOST_BLOCK_FRAMES,
                streams=MOST_STREAMS,
                grain=grain,
            )
        self._repair = file is not None and file.repair
        self._map_arrays(new_region(fields.region_bytes(self._sizes), file, private=self._is_ring))
        self._initialize(layout, codec=codec, max_error=max_error, quality=quality)

    def _initialize(self, layout: StackLayout, **options: Any) -> None:
        """Configure a new pool, or check the settings of an existing file."""
        if self._arrays["head"][fields.SETTINGS_VERSION] and not self.was_interrupted:  # the file exists
            if self._repair and self._is_ring:
                self._write_settings(layout, **options)  # the settings of a ring in a file never change
            if self._arrays["head"][fields.SETTINGS_SUM] != self._settings_checksum():
                raise CorruptFileError(
                    f"{self._region.path} is damaged: the checksum of its head does not match its contents"
                )
            self.refresh()
            if self._repair:
                kinds = [fields.BLOCKS, fields.GRAINS, fields.REFERENCES, fields.STREAMS]
                self._arrays["head"][kinds] = self._memory.capacity  # unused entries have invalid checksums
            return
        self.reconfigure(layout, **options)

    def _map_arrays(self, region: PrivateRegion) -> None:
        """Create the arrays as views of a region."""
        self._region = region
        self._arrays = {name: region.array(*field) for name, field in fields.array_specs(self._sizes).items()}
        region.reserve(fields.array_offset("head", self._sizes), self._arrays["head"].nbytes)
        self._known_version = -1
        self._free_after_trim = self._used_since_page_out = 0
        self._unchecked: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None = None

    def verify_on_read(self) -> None:
        """Compare each block and reference in a file with its checksum when it is first read."""
        if self._region.path is not None:
            n_blocks, n_references = map(int, self._arrays["head"][[fields.BLOCKS, fields.REFERENCES]])
            used = self._arrays["blocks"][:n_blocks, fields.USERS] > 0
            self._unchecked = used, self._arrays["users"][:n_references] > 0

    def _settings_checksum(self) -> int:
        """Return the CRC-32 of the settings in the pool's head."""
        return zlib.crc32(self._arrays["head"][fields.N_STACK : fields.QUALITY + 1].tobytes())

    @defer_signals
    def reconfigure(
        self,
        layout: StackLayout,
        *,
        codec: str,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
    ) -> None:
        """Delete all stacks, free their memory, and change the settings in all processes.

        :param layout: A layout of the same shape and dtype.
        :param codec: Name of the codec.
        :param max_error: Maximum error per byte; 0 is exact.
        :param quality: JPEG quality, 1 to 100.
        :raises MissingDependencyError: If the codec needs a package that is not installed.
        """
        check_codec(codec, quality=quality)
        if codec == "jpeg":
            JpegCodec(layout, quality)  # raises if it cannot store the frames
        max_error = validate_max_error(max_error, codec=codec, dtype=layout.dtype)
        head = self._arrays["head"]
        head[fields.RECONFIGURING] = 1
        self._region.clear(fields.array_offset("blocks", self._sizes))
        head[: fields.SETTINGS_VERSION] = 0
        head[fields.BINS : fields.BINS + fields.N_BINS] = 0
        head[fields.BLOCKS] = 1
        head[fields.RECENT : fields.RECENT + fields.N_RECENT] = -1
        self._write_settings(layout, codec=codec, max_error=max_error, quality=quality)
        head[fields.SETTINGS_VERSION] += 1
        head[fields.RECONFIGURING] = 0
        self.refresh()
        self._memory.reserve_block(0)

    def _write_settings(self, layout: StackLayout, *, codec: str, max_error: int, quality: int) -> None:
        """Write the settings and their checksum into the pool's head."""
        head, settings = self._arrays["head"], (layout.n_stack, layout.axis, CODECS.index(codec), max_error, quality)
        head[fields.N_STACK : fields.QUALITY + 1] = settings
        head[fields.SETTINGS_SUM] = self._settings_checksum()

    @property
    def was_interrupted(self) -> bool:
        """Whether a process was killed during :meth:`reconfigure`. The pool is empty then."""
        return bool(self._arrays["head"][fields.RECONFIGURING])

    @defer_signals
    def clear(self) -> None:
        """Delete all stacks and free their memory."""
        self.refresh()
        self.reconfigure(**self.encoding._asdict())

    @defer_signals
    def refresh(self) -> None:
        """Update this process's views after another process has grown or reconfigured the pool."""
        self._region.refresh()
        head = self._arrays["head"]
        if head[fields.SETTINGS_VERSION] == self._known_version:
            return
        n_stack, axis, codec, self.max_error, self.quality = map(int, head[fields.N_STACK : fields.QUALITY + 1])
        self.layout = layout = StackLayout(self._shape, self._dtype, n_stack, axis)
        self.codec = CODECS[codec]
        check_codec(self.codec, quality=self.quality)
        self.block_length = block_length = block_length_of(layout, self.codec)
        self._jpeg = JpegCodec(layout, self.quality) if self.codec == "jpeg" else None
        # Rows of stream arrays are as long as this layout needs, because the largest layout would waste memory.
        rows = {"frame": layout.frame_bytes + SLACK, "open": block_length * (layout.frame_bytes + ENTRY_HEADER) + SLACK}
        for name, n_bytes in rows.items():
            offset = fields.array_offset(name, self._sizes)
            self._arrays[name] = self._region.array(offset, (self._sizes.streams, n_bytes), np.uint8)
        self._geometry = geometry_of(layout, codec=self.codec, block_length=self.block_length, max_error=self.max_error)
        if self._is_ring:  # the memory order of the stacks may differ from that of the stored frames
            self._geometry = self._geometry._replace(keeps_stack=1)
        self._memory = PoolMemory(
            self._region,
            self._arrays,
            self._sizes,
            layout=layout,
            block_length=block_length,
            stream_bytes=self._stream_bytes(),
        )
        places = address_of(self._arrays["contents"]), self._sizes.grain, address_of(self._arrays["references"])
        arrays = {name: array for name, array in self._arrays.items() if name in PoolArrays._fields}
        self._pool = PoolArrays(**arrays)
        self._state = fields.make_kernel_state(self._pool, self._geometry, (*places, layout.frame_bytes + SLACK))
        self._shared_mask = np.concatenate([shared_byte_mask(layout), np.zeros(SLACK, dtype=np.uint8)])
        self._scratch = np.zeros(
            SCRATCH_FRAMES * (layout.frame_bytes + GROUP) + layout.stack_bytes + SLACK, dtype=np.uint8
        )
        self._addresses = address_of(self._shared_mask), address_of(self._scratch)
        self._known_version = int(head[fields.SETTINGS_VERSION])
        if not COMMITS_LAZILY:
            self.reserve_rows(len(self._arrays["index"]))  # because rows that were never written are read too

    def _stream_bytes(self) -> int:
        """Count the bytes that a stream stores in addition to its open block and its row in ``frame``."""
        # A block that is stored at once leaves its frame in the buffer of the stream.
        left = self.layout.frame_bytes if self._jpeg is not None else 0
        return self._geometry.keeps_stack * self.layout.stack_bytes + left

    @property
    def _item_name(self) -> str:
        """``"transitions"`` or ``"stacks"``, for error texts."""
        return "transitions" if self._is_ring else "stacks"

    @property
    def lossy(self) -> bool:
        """Whether returned stacks may differ from the stored ones."""
        return self.encoding.lossy

    @property
    def encoding(self) -> Encoding:
        """Current encoding of stacks."""
        return Encoding(self.layout, self.codec, self.max_error, self.quality)

    @property
    def held(self) -> int:
        """Number of handles that were returned by :meth:`put` and not released."""
        return int(self._arrays["head"][fields.N_HELD])

    @property
    def nbytes(self) -> int:
        """Bytes in use by the pool, shared by all its processes."""
        self.refresh()
        return self._memory.nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes in use by the pool, without freed memory that will be reused."""
        return self.nbytes - self._memory.unused_nbytes

    @property
    def stream_nbytes(self) -> int:
        """Maximum number of bytes that :meth:`free_stream_buffers` frees."""
        return self._memory.stream_nbytes

    @property
    def stored_fraction(self) -> float:
        """Average stored size of a frame as a fraction of its raw size, freed frames included."""
        return self._memory.stored_fraction

    @defer_signals
    def put(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None = None,
        *,
        ended: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Handles, Handles]:
        """Store stacks, and for each the stack that follows it.

        :param stacks: C-contiguous, shape ``(n, *layout.shape)``, of the layout's dtype.
        :param nexts: Next stacks, of the same shape and dtype, or None.
        :param ended: Shape ``(n,)``, True if the trajectory ends here, so that its stream can be reused.
        :return: Handles of the stacks and of the next stacks, each of shape ``(n,)``; zeros if ``nexts`` is None.
            Release each handle once.
        :raises OutOfMemoryError: If the stacks do not fit. Nothing is stored then.
        """
        self.refresh()
        for array in (stacks, nexts):
            if array is not None:
                self._check_array(array, len(stacks))
        n = len(stacks)
        handles, next_handles = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self._seal_full_blocks()  # left by a failed call or a killed process
        self._memory.check_capacity(n if nexts is None else 2 * n)
        flags = np.zeros(n, dtype=np.uint8) if ended is None else np.ascontiguousarray(ended).astype(np.uint8)
        part = _SEALED_STACKS if self._jpeg is not None else max(n, 1)
        try:
            for start in range(0, n, part):
                some = slice(start, start + part)
                following = None if nexts is None else nexts[some]
                self._put(stacks[some], following, flags[some], handles[some], next_handles[some])
        except BaseException:
            for put in (handles, next_handles):
                release_stacks(self._state, put)
            raise
        self._pool.head[fields.N_HELD] += np.count_nonzero(handles) + np.count_nonzero(next_handles)
        return handles, next_handles

    def _put(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None,
        ended: Bytes,
        handles: Handles,
        next_handles: Handles,
    ) -> None:
        """Store a batch of stacks, and reserve more memory whenever it is full."""
        done = 0
        while done < len(stacks):
            stored = put_stacks(
                self._state,
                self.max_error or None,
                self._memory.capacity,
                self._memory.per_stack,
                address_of(stacks[done:]),
                0 if nexts is None else address_of(nexts[done:]),
                len(stacks) - done,
                ended[done:],
                self._addresses[0],
                self._jpeg is not None,
                self._addresses[1],
                handles[done:],
                next_handles[done:],
            )
            done += int(stored)
            if done < len(stacks):
                self._memory.reserve_stacks(2 if nexts is not None else 1)
        self._seal_full_blocks()

    def _seal_full_blocks(self) -> None:
        """Compress the frames that were stored since the last call, if the codec is JPEG."""
        if self._jpeg is not None and self._pool.head[fields.UNSEALED]:
            seal_full_blocks(self._state, self._pool, self._jpeg, self._memory)

    def put_pairs(self, stacks: int, order: int, nexts: int, next_order: int) -> Handles:
        """Store one transition of each stream. The caller must defer signals.

        :param stacks: Address of the observations, one stack per stream.
        :param order: Memory order of the observations, PLANAR or INTERLEAVED.
        :param nexts: Address of the next observations.
        :param next_order: Memory order of the next observations.
        :return: Pairs, shape ``(streams,)``. Release each one once.
        :raises OutOfMemoryError: If the transitions do not fit. Nothing is stored then.
        """
        pairs = np.zeros(self._sizes.streams, dtype=np.int64)
        done = 0
        try:
            while True:
                done = put_pairs(
                    self._state,
                    self.max_error or None,
                    self._memory.capacity,
                    self._memory.per_stack,
                    done,
                    stacks,
                    order,
                    nexts,
                    next_order,
                    self._addresses[0],
                    self._jpeg is not None,
                    self._addresses[1],
                    pairs,
                )
                if done == len(pairs):
                    break
                self._memory.check_capacity(2)
                self._memory.reserve_stacks(2)
            self._seal_full_blocks()
        except BaseException:
            release_pairs(self._state, pairs)
            raise
        self._count_use(len(pairs))
        return pairs

    def release_pairs(self, pairs: Handles) -> None:
        """Free transitions.

        :param pairs: Contiguous, shape ``(n,)``; 0 is skipped.
        """
        release_pairs(self._state, pairs)

    @property
    def index(self) -> Handles:
        """Pairs of shape ``(rows, streams)``, written by the owner of the pool; 0 means no transition."""
        return self._arrays["index"]

    def reserve_rows(self, n_rows: int) -> None:
        """Reserve memory for the first rows of the index.

        :param n_rows: Number of rows that will be written to.
        :raises StorageError: If the disk is full.
        """
        for name in ("index", "index_sums"):
            self._region.reserve(fields.array_offset(name, self._sizes), self._arrays[name][:n_rows].nbytes)

    @property
    def reserved_rows(self) -> int:
        """Number of index rows with reserved memory in the file; 0 if the pool is in memory."""
        if self._region.path is None:
            return 0
        held = (
            self._region.reserved_bytes(fields.array_offset("index", self._sizes)) // self._arrays["index"].strides[0]
        )
        return min(held, len(self._arrays["index"]))

    def update_row_checksum(self, row: int) -> None:
        """Update the checksum of a row of the index, if there are checksums."""
        if self._sizes.has_checksums:
            place = np.array([row])
            self._arrays["index_sums"][place] = self._row_checksums(place)

    def corrupt_rows(self, rows: Counts) -> Counts:
        """Return the rows of the index whose checksums do not match.

        :param rows: Rows to compare.
        """
        wrong: Counts = rows[self._row_checksums(rows) != self._arrays["index_sums"][rows]]
        return wrong

    def _row_checksums(self, rows: Counts) -> npt.NDArray[np.uint32]:
        """Compute the checksums of rows of the index."""
        index, found = self._arrays["index"], np.zeros(len(rows), dtype=np.uint32)
        where = np.array([address_of(index)], dtype=np.uint64), np.array([index.strides[0]])
        sum_rows(*where, rows, found)
        return found

    def _count_use(self, n_stacks: int) -> None:
        """Count accesses, and page out the file after many of them."""
        self._used_since_page_out += n_stacks
        if self._used_since_page_out > _PAGE_OUT_AFTER and self._is_ring and self._region.path is not None:
            self._used_since_page_out = 0
            for name in ("contents", "references"):
                self._region.page_out(fields.array_offset(name, self._sizes))

    def get_pairs(
        self,
        rows: Counts,
        envs: Counts,
        out: npt.NDArray[Any] | None,
        next_out: npt.NDArray[Any] | None,
        *,
        num_threads: int,
    ) -> bool:
        """Decode the observations and next observations of transitions.

        :param rows: Rows of the index, shape ``(n,)``.
        :param envs: Columns of the index, shape ``(n,)``.
        :param out: C-contiguous output of shape ``(n, *layout.shape)``, or None.
        :param next_out: Output for the next observations, of the same shape, or None.
        :param num_threads: Threads to decode in.
        :return: Whether all rows and columns exist. If not, nothing is written.
        :raises CorruptFileError: If a block is damaged.
        """
        if (handles := self.handles_of_pairs(rows, envs)) is None:
            return False
        both = zip(handles, (out, next_out), strict=True)
        wanted = [(part, address_of(array)) for part, array in both if array is not None]
        if wanted:
            self._check_contents([part for part, _ in wanted])
            self._decode_into(wanted, num_threads)
        return True

    def handles_of_pairs(self, rows: Counts, envs: Counts) -> tuple[Handles, Handles] | None:
        """Return the handles of the observations and next observations of transitions.

        :param rows: Rows of the index, shape ``(n,)``.
        :param envs: Columns of the index, shape ``(n,)``.
        :return: Handles, both of shape ``(n,)``; or None if a row or a column does not exist.
        """
        handles, next_handles = np.empty((2, len(rows)), dtype=np.int64)
        exist = handles_of_pairs(self._state, self._arrays["index"], rows, envs, handles, next_handles)
        return (handles, next_handles) if exist else None

    def trim(self) -> None:
        """Return long free runs to the system, if the memory is private to this process."""
        free = int(self._pool.head[fields.FREE_GRAINS]) * self._sizes.grain
        if self._sizes.has_checksums or free < self._free_after_trim + _MIN_TRIM_BYTES:
            self._free_after_trim = min(self._free_after_trim, free)
            return
        self._free_after_trim = free
        start = fields.array_offset("contents", self._sizes)
        runs = np.zeros(
            (int(self._pool.head[fields.FREE_GRAINS]) * self._sizes.grain // _MIN_TRIM_BYTES + 1, 2), np.int64
        )
        for first, n in runs[: list_free_runs(self._state, _MIN_TRIM_BYTES // self._sizes.grain, runs)].tolist():
            # The first and the last bytes of a run must stay: they mark it as free.
            begin = -(-(start + (first + 1) * self._sizes.grain) // REGION_PAGE) * REGION_PAGE
            end = (start + (first + n) * self._sizes.grain - 1) // REGION_PAGE * REGION_PAGE
            if begin < end:
                self._region.discard(begin, end - begin)

    def free_stream_buffers(self) -> None:
        """Free the buffers of all streams. The next stacks share no frames with the stored ones."""
        end_streams(self._state)
        for name in ("last", "frame", "open"):
            start = fields.array_offset(name, self._sizes)
            self._region.discard(start, self._arrays[name].nbytes)
        self._pool.head[fields.STREAMS] = 0

    def check_output(self, out: npt.NDArray[Any], n: int) -> None:
        """Raise unless an output array is writable and has the right shape and dtype."""
        expected = (n, *self.layout.shape)
        if not (out.shape == expected and out.dtype == self.layout.dtype and out.flags.carray):
            kind = "an" if out.flags.writeable else "a read-only"
            raise InvalidArgumentError(
                f"an output is {kind} array of shape {out.shape} and dtype {out.dtype}, expected a C-contiguous "
                f"one to write to, of shape {expected} and dtype {self.layout.dtype}; for example "
                f"np.empty({expected}, np.{self.layout.dtype})"
            )

    def _check_array(self, array: npt.NDArray[Any], n: int) -> None:
        """Raise if an array does not have the shape, dtype and memory order of ``n`` stacks."""
        expected = (n, *self.layout.shape)
        if array.shape != expected or array.dtype != self.layout.dtype or not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"an array has shape {array.shape} and dtype {array.dtype}, expected a C-contiguous one of shape "
                f"{expected} and dtype {self.layout.dtype}"
            )

    @defer_signals
    def release(self, handles: Handles) -> None:
        """Free stacks. Release each handle as often as :meth:`put` returned it.

        :param handles: Shape ``(n,)``; 0 is skipped.
        :raises InvalidArgumentError: If a handle names no stored stack.
        """
        self.refresh()
        handles = self.check_handles(handles)
        release_stacks(self._state, handles)
        self._pool.head[fields.N_HELD] -= np.count_nonzero(handles)

    def check_handles(self, handles: Handles) -> Handles:
        """Return handles as an array.

        :raises InvalidArgumentError: If any of them names no stored stack.
        """
        handles = np.ascontiguousarray(handles, dtype=np.int64).reshape(-1)
        if not are_valid_handles(self._state, handles):
            raise InvalidArgumentError(
                f"handles {handles!r} include some that name no stack of this pool; expected handles that put() "
                "returned and that were not released yet"
            )
        return handles

    def get(
        self,
        handles: Handles,
        out: npt.NDArray[Any],
        next_handles: Handles | None = None,
        next_out: npt.NDArray[Any] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Decode stacks into arrays. Handle 0 gives zeros.

        :param handles: Shape ``(n,)``.
        :param out: Output, C-contiguous, shape ``(n, *layout.shape)``, of the layout's dtype.
        :param next_handles: Shape ``(n,)``, or None. If they name the next stacks, shared frames are decoded once.
        :param next_out: Output for ``next_handles``, of the same shape and dtype as ``out``, or None.
        :param num_threads: Threads to decode in.
        :raises InvalidArgumentError: If a handle names no stored stack, or an output has the wrong form.
        :raises CorruptFileError: If a block is damaged.
        """
        self.refresh()
        handles = self.check_handles(handles)
        self.check_output(out, len(handles))
        wanted = [(handles, address_of(out))]
        if next_handles is not None and next_out is not None:
            wanted.append((self.check_handles(next_handles), address_of(next_out)))
            self.check_output(next_out, len(handles))
        self._check_contents([part for part, _ in wanted])
        self._decode_into(wanted, num_threads)

    def _check_contents(self, wanted: list[Handles]) -> None:
        """Raise if stacks in a file do not match their checksums."""
        if self._unchecked is None:
            return
        asked = np.concatenate(wanted)
        if wrong := len(asked) - int(self.are_intact(asked).sum()):
            raise CorruptFileError(
                f"{self._region.path} is damaged: the checksums of {wrong} of {len(asked)} stacks do not match. "
                "To keep the intact data, salvage the folder"
            )

    def _decode_into(self, wanted: Sequence[tuple[Handles, int]], num_threads: int) -> None:
        """Decode batches of handles to memory addresses; raise if a block is damaged."""
        if not decode(self._state, self._geometry, self._jpeg, wanted, num_threads=num_threads):
            raise CorruptFileError(
                f"{len(wanted[0][0])} {self._item_name} cannot be read, because a block of at least one is damaged: "
                "another part of the program may have overwritten its memory. Start again from a checkpoint"
            )
        self._count_use(len(wanted[0][0]))

    def are_intact(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Verify the checksums of stacks that were not verified before.

        :param handles: Shape ``(n,)``.
        :return: Shape ``(n,)``, True for intact stacks.
        """
        right = np.ones(len(handles), dtype=np.bool_)
        if self._unchecked is not None:
            verify_contents(self._state, handles, *self._unchecked, right)
            if not any(left.any() for left in self._unchecked):
                self._unchecked = None
        return right

    def state_dict(self) -> dict[str, Any]:
        """Return the contents for a file: plain values, views of arrays that need no copy, and a checksum."""
        self.refresh()
        layout, head, arrays = self.layout, self._pool.head, self._arrays
        n_streams = int(head[fields.STREAMS])
        opened_bytes = self._pool.streams[:n_streams, fields.OPEN_BYTES].tolist()
        opened = [row[:n] for row, n in zip(self._pool.open, opened_bytes, strict=False)]
        used: dict[str, npt.NDArray[Any]] = {name: arrays[name][: head[field]] for name, field in COUNT_FIELDS.items()}
        used |= {
            "head": head,
            "last": arrays["last"][:n_streams, : layout.stack_bytes],
            "frame": arrays["frame"][:n_streams, : layout.frame_bytes],
            "entry_sums": arrays["entry_sums"][:n_streams],
            "open": np.concatenate([np.zeros(0, dtype=np.uint8), *opened]),
            "contents": arrays["contents"][: int(head[fields.GRAINS]) * self._sizes.grain],
            "references": arrays["references"][: int(head[fields.REFERENCES]) * (layout.frame_bytes + SLACK)],
        }
        description = {
            "format": POOL_FORMAT,
            "layout": (tuple(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)),
            "codec": self.codec,
            "max_error": self.max_error,
            "quality": self.quality,
            "grain": self._sizes.grain,
            "arrays": dict(sorted(used.items())),
        }
        return {**description, "checksum": checksum(description)}

    @classmethod
    def from_state_dict(cls, description: Any, n_handles: int) -> FramePool:
        """Create a pool from the result of :meth:`state_dict`.

        :param description: The state.
        :param n_handles: Maximum number of stored stacks.
        :raises CorruptFileError: If the state is damaged or has another format.
        """
        check_state_dict(description)
        shape, dtype, n_stack, axis = description["layout"]
        pool = cls(
            n_handles,
            StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis),
            codec=description["codec"],
            max_error=description["max_error"],
            quality=description["quality"],
            grain=description["grain"],
        )
        pool._load_arrays(description["arrays"])
        return pool

    @defer_signals
    def load_state_dict(self, description: Any) -> None:
        """Replace the contents by those of a pool with the same settings.

        :param description: A state that :func:`check_state_dict` accepts.
        :raises CorruptFileError: If the state is damaged in a way that its checksum does not show.
        """
        self._load_arrays(description["arrays"])

    def _load_arrays(self, stored: dict[str, Any]) -> None:
        """Copy the arrays of a result of :meth:`state_dict` into this pool."""
        if not self._sizes.has_checksums:
            stored = {**stored, "blocks": _drop_sealed_columns(stored["blocks"])}
        for name in (*COUNT_FIELDS, "last", "frame", "entry_sums", "contents", "references"):
            target = self._arrays[name]
            part = stored[name][: len(target)]  # without checksums, arrays of checksums are empty
            self._region.reserve(fields.array_offset(name, self._sizes), target[: len(part)].nbytes)
            target = target[: len(part)] if part.ndim == 1 else target[: len(part), : part.shape[1]]
            copy_and_free(target, part) if name in ("contents", "references") else np.copyto(target, part)
        start = 0
        opened_bytes = stored["streams"][:, fields.OPEN_BYTES].tolist()
        opened = self._arrays["open"][: len(opened_bytes)]
        self._region.reserve(fields.array_offset("open", self._sizes), opened.nbytes)
        for row, n_bytes in zip(opened, opened_bytes, strict=False):
            row[:n_bytes] = stored["open"][start : start + n_bytes]
            start += n_bytes
        head = self._arrays["head"]
        head[: fields.SETTINGS_VERSION] = stored["head"][: fields.SETTINGS_VERSION]
        kinds = head[[fields.BLOCKS, fields.GRAINS, fields.REFERENCES, fields.STREAMS]]
        if not self._memory.try_reserve(kinds) or not free_unused_blocks(
            self._state, np.zeros(int(head[fields.GRAINS]), dtype=np.bool_)
        ):
            raise CorruptFileError("the frames are damaged: some blocks are outside of the stored memory")

    def __getstate__(self) -> dict[str, Any]:
        # Used for child processes only, which share the memory. :meth:`state_dict` gives the contents of files.
        shape = self._shape, self._dtype.str
        return {"shape": shape, "sizes": tuple(self._sizes), "region": self._region}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        shape, dtype = sent["shape"]
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._sizes = Sizes(*sent["sizes"])
        self._map_arrays(sent["region"])
        self.verify_on_read()


def _drop_sealed_columns(blocks: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert rows of ``blocks`` to those of a pool without checksums, which store only one position per block."""
    rows = blocks[:, : fields.N_BLOCK_UNCHECKED].copy()
    if blocks.shape[1] == fields.N_BLOCK:
        sealed = blocks[:, fields.KIND] == fields.SEALED
        for column, apart in ((fields.GRAIN, fields.SEALED_GRAIN), (fields.N_BYTES, fields.SEALED_BYTES)):
            rows[sealed, column] = blocks[sealed, apart]
    return rows


def check_state_dict(description: Any) -> None:
    """Verify the format and the checksum of a result of :meth:`FramePool.state_dict`.

    :param description: The state.
    :raises CorruptFileError: If the state is damaged or has another format.
    """
    version = description.get("format") if isinstance(description, dict) else None
    if version != POOL_FORMAT:
        raise format_error("the pool of frames", version, POOL_FORMAT)
    if checksum(description) != description.get("checksum"):
        raise CorruptFileError("the frames are damaged: their checksum does not match their contents")
