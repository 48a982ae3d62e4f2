"""Arrays of a frame pool: their fields, sizes and memory.

All arrays of a pool are in one region, so that processes can share them. ``pool`` explains the terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames.geometry import ENTRY_HEADER, SLACK, Bytes, Counts, Geometry
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.region import PrivateRegion, round_to_pages

Numbers = npt.NDArray[np.uint32]

_GRAIN = 32  # bytes of the smallest grain; a free run stores its own length and neighbors in one grain

# Fields of ``head``: counters and settings.
BLOCKS, FREE_BLOCKS = 0, 1  # block numbers ever used (0 means no block), and how many of these are free
GRAINS, FREE_GRAINS = 2, 3
REFERENCES, FREE_REFERENCES = 4, 5
STREAMS = 6
CLOCK = 7
NEWEST_STREAM = 8
FRAMES, BLOCK_BYTES = 9, 10  # totals ever stored
UNSEALED = 11  # number of full blocks that will be sealed
RECENT = 12  # first of four fields: the latest references, or -1
N_RECENT = 4
N_HELD = 16  # number of handles that were returned and not released
SETTINGS_VERSION = 17  # counts the changes of the next five fields
N_STACK, AXIS, CODEC, MAX_ERROR, QUALITY = 18, 19, 20, 21, 22
UNLIKE = 23  # stacks stored since the last one that resembled a stream
SETTINGS_SUM = 30  # checksum of these five fields
RECONFIGURING = 31  # 1 while the settings are being changed, so that a killed process leaves a mark
BINS, N_BINS = 32, 32  # lists of free runs by length, see ``allocator``
N_HEAD = 64
_MAX_NUMBER = 2**32 - 2

_RESERVED_KINDS = BLOCKS, GRAINS, REFERENCES, STREAMS  # counters whose arrays need reserved memory

# The field of ``head`` that counts the used rows of an array.
COUNT_FIELDS = {
    "blocks": BLOCKS,
    "sums": BLOCKS,
    "free_blocks": FREE_BLOCKS,
    "users": REFERENCES,
    "reference_sums": REFERENCES,
    "free_references": FREE_REFERENCES,
    "streams": STREAMS,
}

# Columns of ``blocks``. The position of a block is written before its kind, because a process may be killed in between.
GRAIN = 0  # first grain of a full block
N_BYTES = 1  # size of a full block
USERS = 2  # number of users: stacks with a frame in the block, and the stream that fills it
PREVIOUS = 3  # previous block of the same stream
REFERENCE = 4  # reference that the first patch starts from
KIND = 5
STREAM = 6  # stream that fills the block
SEALED_GRAIN, SEALED_BYTES = 7, 8  # first grain and size of a sealed block, in a pool with checksums
N_BLOCK, N_BLOCK_UNCHECKED = 9, 7  # number of columns with and without checksums

# Columns of ``sums``, the checksums of blocks. Each is written before the kind of its block changes.
OPEN_SUM = 0  # of the row in ``blocks`` while the block is open
STORED_SUM = 1  # of the contents of a full block; the next column is that of its row
SEALED_SUM = 3  # of the contents of a sealed block; the next column is that of its row
N_SUMS = 5

# Kinds of blocks.
FREE = 0
OPEN = 1  # being filled, in the buffer of a stream
FULL = 2
SEALED = 3  # full, of one frame, and stored as a JPEG image, or uncompressed if that is not smaller

# Columns of ``streams``.
OPEN_BLOCK = 0
OPEN_FRAMES = 1
OPEN_BYTES = 2
NEWEST = 3  # handle of the newest stack
LAST_USED = 4  # value of CLOCK
ENDED = 5  # whether the trajectory is over
FOLLOWER = 6  # stream that was used after this one the last time
ORDER = 7  # memory order of the newest stack in ``last``: PLANAR or INTERLEAVED
NEWEST_FRAME = 8  # where the newest frame is: ``IN_ROW``, ``IN_REFERENCE``, or its offset in ``open`` plus 1
WHOLE_FRAMES = 9  # frames stored whole since the last patch, see ``encode``
N_STREAM = 10

IN_ROW = 0  # in ``frame``
IN_REFERENCE = -1  # in the reference of the open block, because no frame of the block differs from it

# Bits of a handle, an ``int64``: block of the newest frame, its place in the block, and the depth of the stack (its
# frames without padding). 0 means no stack.
PLACE_SHIFT = 32
DEPTH_SHIFT = 48

# Bits of a pair, an ``int64``: block and place of the next observation's newest frame, depth of the observation, number
# of frames between both newest frames, and depth of the next observation. 0 means no transition.
MOST_BLOCKS, MOST_PLACES = 1 << 28, 1 << 12
PAIR_PLACE_SHIFT, PAIR_DEPTH_SHIFT, PAIR_STEP_SHIFT, PAIR_NEXT_DEPTH_SHIFT = 28, 40, 48, 56


class PoolArrays(NamedTuple):
    """Arrays that the kernels use, as views of one region. Rows of bytes end with ``SLACK`` unused bytes."""

    head: Counts  # counters and settings
    blocks: Numbers  # (blocks, 9)
    sums: Numbers  # (blocks, 5): checksums
    free_blocks: Numbers  # last in, first out
    unsealed: Numbers  # full blocks that will be sealed
    filled: Numbers  # blocks that the current stack has filled
    edges: Bytes  # one bit per grain: whether a free run starts or ends there
    users: Numbers  # (references,): number of blocks that use each one
    reference_sums: Numbers  # (references,): checksums
    free_references: Numbers  # last in, first out
    streams: Counts  # (streams, 10)
    last: Bytes  # (streams, stack bytes): newest stacks
    frame: Bytes  # (streams, frame bytes): newest frames, as they will be decoded, if they are stored as patches
    open: Bytes  # (streams, block bytes): contents of open blocks
    entry_sums: Numbers  # (streams, frames per block): checksums of the frames in ``open``


def make_kernel_state(pool: PoolArrays, geometry: Geometry, starts: Sequence[int]) -> Counts:
    """Pack sizes and addresses into the ``state`` argument of kernels, which ``views.pool_in`` unpacks.

    A single array is used because unpacking tuples of arrays at each call takes longer than storing a frame. The result
    is valid while the arrays exist.

    :param pool: Arrays of the pool.
    :param geometry: Sizes of the layout.
    :param starts: Address of the first grain, bytes per grain, address of the first reference, bytes per reference.
    """
    arrays = [number for array in pool for number in (array.ctypes.data, len(array), array.shape[-1])]
    return np.array([*geometry, *arrays, *starts], dtype=np.int64)


class Sizes(NamedTuple):
    """Maximum sizes of the arrays of a pool."""

    blocks: int
    grains: int
    references: int  # number of frames with the smallest possible size
    streams: int
    stack_bytes: int
    block_frames: int  # maximum block length
    grain: int  # bytes per grain
    has_checksums: bool = True
    rows: int = 0  # of the index, with one pair per stream


def sizes_for_handles(
    n_handles: int,
    *,
    stack_bytes: int,
    n_stack: int,
    least_frames: int,
    block_frames: int,
    streams: int,
    grain: int | None = None,
) -> Sizes:
    """Compute sizes that suffice for a number of stacks even if they share no frames.

    :param n_handles: Maximum number of stacks.
    :param stack_bytes: Size of a stack.
    :param n_stack: Maximum number of frames per stack.
    :param least_frames: Minimum block length.
    :param block_frames: Maximum block length.
    :param streams: Maximum number of streams.
    :param grain: Bytes per grain, or None for the smallest size that can be numbered.
    """
    n_handles += 3 * streams  # each stream stores its newest stack
    blocks = min(n_handles * ((n_stack - 1) // least_frames + 2) + 2 * streams, _MAX_NUMBER)
    # In the worst case, each stack has its own frames, in blocks whose other frames are not used any more.
    contents = 4 * n_handles * (stack_bytes + 256) + blocks * 256 + streams * block_frames * (stack_bytes + 256)
    references = min(blocks, contents // (stack_bytes // n_stack + SLACK))
    if grain is None:
        grain = _GRAIN
        while n_handles * (stack_bytes + 256) // grain > _MAX_NUMBER:
            grain *= 2
    return Sizes(blocks, min(contents // grain, _MAX_NUMBER), references, streams, stack_bytes, block_frames, grain)


def sizes_for_ring(n_rows: int, *, layout: StackLayout, block_length: int, streams: int, has_checksums: bool) -> Sizes:
    """Compute sizes that suffice for a ring of transitions even if they share no frames.

    :param n_rows: Transitions per stream.
    :param layout: How a stack is made of frames.
    :param block_length: Frames per block.
    :param streams: Number of streams.
    :param has_checksums: Whether the pool stores checksums.
    """
    n_pairs = (n_rows + 2) * streams
    row = layout.stack_bytes + (layout.n_stack + 1) * (ENTRY_HEADER + 1)
    blocks = 2 * n_pairs * (layout.n_stack // block_length + 1) + 4 * streams
    contents = 5 * n_pairs * row // 2 + 4 * streams * block_length * row
    grain = _GRAIN
    while contents // grain > _MAX_NUMBER:
        grain *= 2
    references = min(blocks, contents // (layout.frame_bytes + SLACK) + 2)
    return Sizes(
        min(blocks, MOST_BLOCKS - 2),
        contents // grain + blocks,
        references,
        streams,
        layout.stack_bytes,
        block_length,
        grain,
        has_checksums,
        n_rows,
    )


def _edge_bytes(grains: int) -> int:
    """Return the size of the bitmap ``edges``: one bit per grain and one more, in whole bytes."""
    return grains // 8 + 2


def _shapes_and_dtypes(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Return the shape and dtype of each array of a pool, by name."""
    row = sizes.stack_bytes + SLACK
    opened = sizes.block_frames * (sizes.stack_bytes + ENTRY_HEADER) + SLACK
    has_checksums = int(sizes.has_checksums)
    return {
        "head": ((N_HEAD,), np.int64),
        "blocks": ((sizes.blocks, N_BLOCK if sizes.has_checksums else N_BLOCK_UNCHECKED), np.uint32),
        "sums": ((has_checksums * sizes.blocks, N_SUMS), np.uint32),
        "free_blocks": ((sizes.blocks,), np.uint32),
        "unsealed": ((sizes.blocks,), np.uint32),
        "filled": ((1024,), np.uint32),
        "edges": ((_edge_bytes(sizes.grains),), np.uint8),
        "users": ((sizes.references,), np.uint32),
        "reference_sums": ((has_checksums * sizes.references,), np.uint32),
        "free_references": ((sizes.references,), np.uint32),
        "streams": ((sizes.streams, N_STREAM), np.int64),
        "last": ((sizes.streams, row), np.uint8),
        "frame": ((sizes.streams, row), np.uint8),
        "open": ((sizes.streams, opened), np.uint8),
        "entry_sums": ((has_checksums * sizes.streams, sizes.block_frames), np.uint32),
        "index": ((sizes.rows, sizes.streams), np.int64),
        "index_sums": ((has_checksums * sizes.rows,), np.uint32),
        "contents": ((sizes.grains * sizes.grain + SLACK,), np.uint8),
        "references": ((sizes.references * row,), np.uint8),
    }


@functools.cache
def _offsets(sizes: Sizes) -> tuple[dict[str, int], int]:
    """Return the offset of each array in the region, and the size of the region."""
    offsets, end = {}, 0
    for name, (shape, dtype) in _shapes_and_dtypes(sizes).items():
        offsets[name] = end
        end += round_to_pages(math.prod(shape) * np.dtype(dtype).itemsize)
    return offsets, end


def region_bytes(sizes: Sizes) -> int:
    """Return the size of the region for all arrays."""
    return _offsets(sizes)[1]


def array_offset(name: str, sizes: Sizes) -> int:
    """Return the offset of an array in its region."""
    return _offsets(sizes)[0][name]


def array_specs(sizes: Sizes) -> dict[str, tuple[int, tuple[int, ...], type[np.generic]]]:
    """Return the offset, shape and dtype of each array, by name."""
    offsets, _ = _offsets(sizes)
    return {name: (offsets[name], shape, dtype) for name, (shape, dtype) in _shapes_and_dtypes(sizes).items()}


class PoolMemory:
    """Memory of the arrays of a pool: usage, limits, and reserving more.

    :param region: Region that contains the arrays.
    :param arrays: Arrays by name.
    :param sizes: Maximum sizes.
    :param layout: How a stack is made of frames.
    :param block_length: Frames per block.
    :param stream_bytes: Bytes per stream, in addition to its open block and its row in ``frame``.
    """

    def __init__(
        self,
        region: PrivateRegion,
        arrays: dict[str, npt.NDArray[Any]],
        sizes: Sizes,
        *,
        layout: StackLayout,
        block_length: int,
        stream_bytes: int,
    ) -> None:
        self._region, self._arrays, self._sizes = region, arrays, sizes
        self._layout, self._stream_bytes = layout, stream_bytes
        self._head, self._streams = arrays["head"], arrays["streams"]
        # In the worst case, a stack fills several blocks, the first one with its first frame.
        turns = -(-layout.n_stack // block_length)
        self._block_length = block_length
        most = sizes.blocks, sizes.grains, sizes.references, sizes.streams
        self._limits: npt.NDArray[np.int64] = np.array(most, dtype=np.int64)
        grains = -(-arrays["open"].shape[1] // sizes.grain)
        self.per_stack = np.array([turns, turns * grains, turns, 1], dtype=np.int64)
        self.capacity = self._count_reserved()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        head, layout = self._head, self._layout
        rows = sum(self._arrays[name][: int(head[field])].nbytes for name, field in COUNT_FIELDS.items())
        references = int(head[REFERENCES]) * (layout.frame_bytes + SLACK)
        grains = int(head[GRAINS])
        return rows + grains * self._sizes.grain + grains // 8 + references + self.stream_nbytes

    @property
    def stream_nbytes(self) -> int:
        """Bytes in use by the buffers of streams and by open blocks, included in ``nbytes``."""
        n_streams = int(self._head[STREAMS])
        rows = n_streams - int(np.count_nonzero(self._streams[:n_streams, NEWEST_FRAME]))
        return n_streams * self._stream_bytes + rows * self._row_bytes("frame") + self._opened_bytes

    @property
    def unused_nbytes(self) -> int:
        """Bytes that were freed and will be reused, included in ``nbytes``."""
        head, frame = self._head, self._layout.frame_bytes + SLACK
        return int(head[FREE_GRAINS]) * self._sizes.grain + int(head[FREE_REFERENCES]) * frame

    @property
    def stored_fraction(self) -> float:
        """Average stored size of a frame as a fraction of its raw size."""
        head, layout = self._head, self._layout
        references = int(head[REFERENCES]) * layout.frame_bytes
        stored = int(head[BLOCK_BYTES]) + self._opened_bytes + references
        return stored / max(int(head[FRAMES]), 1) / layout.frame_bytes

    @property
    def _opened_bytes(self) -> int:
        """Return the total bytes in the open blocks of all streams."""
        return int(self._streams[: self._head[STREAMS], OPEN_BYTES].sum())

    def _row_bytes(self, name: str) -> int:
        """Return the bytes per row of the array with that name."""
        array = self._arrays[name]
        return array.itemsize * math.prod(array.shape[1:])

    def check_capacity(self, n_stacks: int) -> None:
        """Raise if the pool cannot number enough blocks and grains for more stacks.

        :param n_stacks: Number of stacks to add.
        :raises OutOfMemoryError: If there are not enough.
        """
        head, sizes, layout = self._head, self._sizes, self._layout
        blocks = n_stacks * (layout.n_stack // self._block_length + 1)
        # One more, because a sealed block is stored before the memory of the unsealed one is freed.
        grains = (n_stacks + 1) * (layout.stack_bytes // sizes.grain + layout.n_stack + 1)
        needed = [(BLOCKS, blocks, sizes.blocks), (GRAINS, grains, sizes.grains)]
        needed.append((REFERENCES, blocks, sizes.references))
        if any(head[used] + more > most for used, more, most in needed):
            self._raise_full()
        if self._known_version != self._region.version:  # another process has reserved memory
            self.capacity = self._count_reserved()

    def reserve_stacks(self, n_stacks: int) -> None:
        """Reserve memory for more stacks.

        :param n_stacks: Number of stacks to add.
        :raises OutOfMemoryError: If there are not enough numbers.
        :raises StorageError: If the file cannot grow.
        """
        counts = self._head[list(_RESERVED_KINDS)] + n_stacks * self.per_stack
        # If all streams are in use, the pool reuses one.
        counts[-1] = min(counts[-1], self._sizes.streams)
        self._reserve(*counts.tolist())

    def reserve_block(self, n_bytes: int) -> None:
        """Reserve memory for a block.

        :param n_bytes: Size of the block.
        """
        more = -(-n_bytes // self._sizes.grain)
        self._reserve(*(int(self._head[kind]) + (more if kind == GRAINS else 0) for kind in _RESERVED_KINDS))

    def try_reserve(self, counts: npt.NDArray[np.int64]) -> bool:
        """Reserve memory for the given counts of blocks, grains, references and streams.

        :param counts: Shape ``(4,)``.
        :return: Whether the counts are within the limits. If not, nothing is reserved.
        """
        if ((counts < 0) | (counts > self._limits)).any():
            return False
        self._reserve(*counts.tolist())
        return True

    def _reserve(self, blocks: int, grains: int, references: int, streams: int) -> None:
        """Reserve memory for these total counts; raise if they exceed the pool's maximum sizes."""
        sizes = self._sizes
        if blocks > sizes.blocks or grains > sizes.grains or references > sizes.references:
            self._raise_full()
        rows = dict.fromkeys(("blocks", "sums", "free_blocks", "unsealed"), blocks)
        rows |= {"edges": _edge_bytes(grains), "filled": len(self._arrays["filled"])}
        rows |= dict.fromkeys(("users", "reference_sums", "free_references"), references)
        rows |= dict.fromkeys(("streams", "last", "frame", "open", "entry_sums"), streams)
        n_bytes = {name: n * self._row_bytes(name) for name, n in rows.items()}
        n_bytes["contents"] = grains * sizes.grain + SLACK
        n_bytes["references"] = references * (self._layout.frame_bytes + SLACK)
        for name, n in n_bytes.items():
            self._region.reserve(array_offset(name, self._sizes), min(n, self._arrays[name].nbytes))
        self.capacity = self._count_reserved()
        if (self.capacity < (blocks, grains, references, streams)).any():
            self._raise_full()  # otherwise the caller would retry forever

    def _count_reserved(self) -> npt.NDArray[np.int64]:
        """Return how many blocks, grains, references and streams fit into the reserved memory."""
        self._known_version = self._region.version
        held = {name: self._region.reserved_bytes(array_offset(name, self._sizes)) for name in self._arrays}
        rows = {name: held[name] // self._row_bytes(name) for name in self._arrays}
        rows["contents"] = min((held["contents"] - SLACK) // self._sizes.grain, 8 * (rows["edges"] - 1))
        rows["references"] = held["references"] // (self._layout.frame_bytes + SLACK)
        kinds = (
            ("blocks", "sums", "free_blocks", "unsealed"),
            ("contents",),
            ("references", "users", "reference_sums", "free_references"),
            ("streams", "last", "frame", "open", "entry_sums"),
        )
        most = [min(rows[name] for name in names) for names in kinds]
        return np.minimum(np.array(most, dtype=np.int64), self._limits)

    def _raise_full(self) -> None:
        """Raise ``OutOfMemoryError``, because no numbers of blocks or grains are left."""
        raise OutOfMemoryError(
            f"the storage has no numbers left for more frames ({int(self._head[FRAMES]):,} were stored, "
            f"{self.nbytes:,} bytes are in use). Pass a smaller max_size"
        )
