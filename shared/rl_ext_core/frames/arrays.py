"""The arrays of a frame pool, as its kernels see them, and making sure of room in them.

All lie in one region, so that processes can share them.
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

_GRAIN = 32  # bytes: what a block takes is a multiple of it, and at least as much as a free run has to say

# The fields of ``head``.
BLOCKS, FREE_BLOCKS = 0, 1  # block numbers ever used (0 is none), and how many of these are free
GRAINS, FREE_GRAINS = 2, 3
REFERENCES, FREE_REFERENCES = 4, 5
STREAMS = 6
CLOCK = 7
NEWEST_STREAM = 8
FRAMES, BLOCK_BYTES = 9, 10  # ever stored
UNSEALED = 11  # full blocks that a codec has to seal yet
RECENT = 12  # and the four fields behind: the latest reference frames, or -1
N_RECENT = 4
N_HELD = 16  # stacks that were put and not released
SETTINGS_VERSION = 17  # counts the changes of the six fields behind
N_STACK, AXIS, BLOCK_LENGTH, CODEC, MAX_ERROR, QUALITY = 18, 19, 20, 21, 22, 23
SETTINGS_SUM = 30  # of the six fields
RECONFIGURING = 31  # whether the fields and all that they are about are being changed
BINS, N_BINS = 32, 32  # of free runs by their length, see ``allocator``
N_HEAD = 64
_MAX_NUMBER = 2**32 - 2

_RESERVED_KINDS = BLOCKS, GRAINS, REFERENCES, STREAMS  # of what there has to be room for

# How many rows of an array are in use.
COUNT_FIELDS = {
    "blocks": BLOCKS,
    "sums": BLOCKS,
    "free_blocks": FREE_BLOCKS,
    "users": REFERENCES,
    "reference_sums": REFERENCES,
    "free_references": FREE_REFERENCES,
    "streams": STREAMS,
}

# The columns of ``blocks``. Where a block lies is written before its kind says so: a process may be killed in between.
GRAIN = 0  # the first of those that it lies in
N_BYTES = 1
USERS = 2  # stacks that need it, and the stream that fills it
PREVIOUS = 3  # block of the same stream before it
REFERENCE = 4
KIND = 5
STREAM = 6  # that fills it
SEALED_GRAIN, SEALED_BYTES = 7, 8  # with checksums: where it lies and how long it is once it is sealed
N_BLOCK, N_BLOCK_UNCHECKED = 9, 7

# The columns of ``sums``, checksums: of a block's row while it is filled; of what it holds once it is full, and of its
# row then; likewise of what that was sealed to. Each is written before the kind of the block changes.
OPEN_SUM = 0
STORED_SUM = 1
SEALED_SUM = 3
N_SUMS = 5

# Kinds of blocks.
FREE = 0
OPEN = 1  # being filled: in the buffer of a stream
FULL = 2
SEALED = 3  # likewise, and compressed

# When a full block is noted to be sealed: once the next one begins, or, where it holds one frame, at once.
SEAL_NEVER, SEAL_LATER, SEAL_AT_ONCE = 0, 1, 2

# The columns of ``streams``.
OPEN_BLOCK = 0
OPEN_FRAMES = 1
OPEN_BYTES = 2
NEWEST = 3  # handle of the newest stack
LAST_USED = 4
ENDED = 5
FOLLOWER = 6  # the stream that was pushed to after this one
ORDER = 7  # how the newest stack lies in ``last``: PLANAR or INTERLEAVED
N_STREAM = 8

# A handle names a stack: its newest frame's block, the frame's place in it, and how many frames are not padding. 0 is
# none. It is an ``int64``.
PLACE_SHIFT = 32
DEPTH_SHIFT = 48

# A transition names two stacks of one stream: the newest frame of the next observation, as above; how many frames of
# the observation are not padding; how much further the next observation's newest frame is; and how many frames of that
# one are not padding. 0 is none. It is an ``int64`` too.
MOST_BLOCKS, MOST_PLACES = 1 << 28, 1 << 12
PAIR_PLACE_SHIFT, PAIR_DEPTH_SHIFT, PAIR_STEP_SHIFT, PAIR_NEXT_DEPTH_SHIFT = 28, 40, 48, 56


class PoolArrays(NamedTuple):
    """Views of one region. Rows of bytes are ``SLACK`` longer than what they hold."""

    head: Counts
    blocks: Numbers  # (n, 9)
    sums: Numbers  # (n, 5)
    free_blocks: Numbers  # a stack
    unsealed: Numbers  # numbers of full blocks
    filled: Numbers  # blocks that became full while a stack was pushed
    edges: Bytes  # a bit a grain: whether a free run begins or ends there
    users: Numbers  # blocks a reference frame
    reference_sums: Numbers  # their checksums
    free_references: Numbers  # a stack
    streams: Counts  # (n, 8)
    last: Bytes  # (streams, stack bytes): the newest stack
    frame: Bytes  # (streams, frame bytes): the newest frame as it will be decoded
    open: Bytes  # (streams, block bytes)
    entry_sums: Numbers  # (streams, frames in a block): checksums of the frames in ``open``


def make_kernel_state(pool: PoolArrays, geometry: Geometry, starts: Sequence[int]) -> Counts:
    """A ``state`` for kernels, see ``views.pool_in``: one array, because taking tuples of arrays apart at each call
    costs more than storing a frame.

    It holds addresses: it is good for as long as these arrays live and stay where they are.

    :param starts: address of the first grain and bytes of each; likewise of the reference frames.
    """
    arrays = [number for array in pool for number in (array.ctypes.data, len(array), array.shape[-1])]
    return np.array([*geometry, *arrays, *starts], dtype=np.int64)


class Sizes(NamedTuple):
    """How large the arrays may become."""

    blocks: int
    grains: int
    references: int  # the most frames, of the smallest size
    streams: int
    stack_bytes: int
    block_frames: int  # the most that a block may be asked to hold
    grain: int  # bytes
    has_checksums: bool = True  # whether there are checksums
    rows: int = 0  # of transitions, one a stream in each


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
    """Sizes that suffice for so many stacks, however little they share.

    :param n_handles: stacks.
    :param n_stack: the most frames that a stack may turn out to have.
    :param least_frames: the fewest frames that a block may hold.
    :param block_frames: the most.
    :param grain: bytes, or None for as few as can be numbered.
    """
    n_handles += 3 * streams  # each stream keeps its newest stack
    blocks = min(n_handles * ((n_stack - 1) // least_frames + 2) + 2 * streams, _MAX_NUMBER)
    # Each stack may have its own frames, in blocks of which the other frames serve nobody any more.
    contents = 4 * n_handles * (stack_bytes + 256) + blocks * 256 + streams * block_frames * (stack_bytes + 256)
    references = min(blocks, contents // (stack_bytes // n_stack + SLACK))
    if grain is None:
        grain = _GRAIN
        while n_handles * (stack_bytes + 256) // grain > _MAX_NUMBER:
            grain *= 2
    return Sizes(blocks, min(contents // grain, _MAX_NUMBER), references, streams, stack_bytes, block_frames, grain)


def sizes_for_ring(n_rows: int, *, layout: StackLayout, block_length: int, streams: int, has_checksums: bool) -> Sizes:
    """Sizes that suffice for a ring of so many transitions a stream, however little they share."""
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
    """Bytes of a bit for each grain and the one behind them; whole ones, since that is how they are counted again."""
    return grains // 8 + 2


def _array_specs(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
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
    offsets, end = {}, 0
    for name, (shape, dtype) in _array_specs(sizes).items():
        offsets[name] = end
        end += round_to_pages(math.prod(shape) * np.dtype(dtype).itemsize)
    return offsets, end


def region_bytes(sizes: Sizes) -> int:
    """Size of the region that such arrays need."""
    return _offsets(sizes)[1]


def array_offset(name: str, sizes: Sizes) -> int:
    """Where an array begins in its region."""
    return _offsets(sizes)[0][name]


def array_specs(sizes: Sizes) -> dict[str, tuple[int, tuple[int, ...], type[np.generic]]]:
    """Where each array begins, its shape, and its dtype."""
    offsets, _ = _offsets(sizes)
    return {name: (offsets[name], shape, dtype) for name, (shape, dtype) in _array_specs(sizes).items()}


class PoolMemory:
    """What the arrays of a pool take, and may take.

    :param region: where they lie.
    :param arrays: by name.
    :param sizes: the most that there may be of each kind.
    :param layout: how a stack is made of frames.
    :param block_length: frames in a block.
    :param stream_bytes: that each stream keeps, besides its open block.
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
        # Of each of ``_RESERVED_KINDS``: how many numbers may be in use, and how many one more stack takes at worst. It may fill
        # a block again and again, the first time with a single frame.
        turns = -(-layout.n_stack // block_length)
        self._block_length = block_length
        most = sizes.blocks, sizes.grains, sizes.references, sizes.streams
        self._limits: npt.NDArray[np.int64] = np.array(most, dtype=np.int64)
        grains = -(-arrays["open"].shape[1] // sizes.grain)
        self.per_stack = np.array([turns, turns * grains, turns, 1], dtype=np.int64)
        self.most = self._count_reserved()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        head, layout = self._head, self._layout
        rows = sum(self._arrays[name][: int(head[field])].nbytes for name, field in COUNT_FIELDS.items())
        references = int(head[REFERENCES]) * (layout.frame_bytes + SLACK)
        grains = int(head[GRAINS])
        return rows + grains * self._sizes.grain + grains // 8 + references + self.stream_nbytes

    @property
    def stream_nbytes(self) -> int:
        """Those of them that only stacks to come need, and what is being filled."""
        return int(self._head[STREAMS]) * self._stream_bytes + self._opened_bytes

    @property
    def unused_nbytes(self) -> int:
        """Those of them that were freed and wait to be used again."""
        head, frame = self._head, self._layout.frame_bytes + SLACK
        return int(head[FREE_GRAINS]) * self._sizes.grain + int(head[FREE_REFERENCES]) * frame

    @property
    def stored_fraction(self) -> float:
        """What a frame took on average, as a fraction of its raw size."""
        head, layout = self._head, self._layout
        references = int(head[REFERENCES]) * layout.frame_bytes
        stored = int(head[BLOCK_BYTES]) + self._opened_bytes + references
        return stored / max(int(head[FRAMES]), 1) / layout.frame_bytes

    @property
    def _opened_bytes(self) -> int:
        return int(self._streams[: self._head[STREAMS], OPEN_BYTES].sum())

    def _row_bytes(self, name: str) -> int:
        array = self._arrays[name]
        return array.itemsize * math.prod(array.shape[1:])

    def check_capacity(self, n_stacks: int) -> None:
        """
        :raises OutOfMemoryError: if so many stacks cannot be numbered, however little they share.
        """
        head, sizes, layout = self._head, self._sizes, self._layout
        blocks = n_stacks * (layout.n_stack // self._block_length + 1)
        # One more, since a block is stored sealed before it is given up as it was.
        grains = (n_stacks + 1) * (layout.stack_bytes // sizes.grain + layout.n_stack + 1)
        needed = [(BLOCKS, blocks, sizes.blocks), (GRAINS, grains, sizes.grains)]
        needed.append((REFERENCES, blocks, sizes.references))
        if any(head[used] + more > most for used, more, most in needed):
            self._raise_full()
        if self._known_version != self._region.version:  # other processes made sure of more
            self.most = self._count_reserved()

    def reserve_stacks(self, n_stacks: int) -> None:
        """Makes sure of room for so many more stacks.

        :raises OutOfMemoryError: if they cannot be numbered.
        :raises StorageError: if a file cannot grow.
        """
        counts = self._head[list(_RESERVED_KINDS)] + n_stacks * self.per_stack
        # Where all streams are in use, one begins anew.
        counts[-1] = min(counts[-1], self._sizes.streams)
        self._reserve(*counts.tolist())

    def reserve_block(self, n_bytes: int) -> None:
        """Likewise, of room for a block of so many bytes."""
        more = -(-n_bytes // self._sizes.grain)
        self._reserve(*(int(self._head[kind]) + (more if kind == GRAINS else 0) for kind in _RESERVED_KINDS))

    def try_reserve(self, counts: npt.NDArray[np.int64]) -> bool:
        """Return whether there can be so many of each kind, and make sure of room for them if so."""
        if ((counts < 0) | (counts > self._limits)).any():
            return False
        self._reserve(*counts.tolist())
        return True

    def _reserve(self, blocks: int, grains: int, references: int, streams: int) -> None:
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
        self.most = self._count_reserved()
        if (self.most < (blocks, grains, references, streams)).any():
            self._raise_full()  # whoever needs that much would ask again and again

    def _count_reserved(self) -> npt.NDArray[np.int64]:
        """How many numbers of each kind may be in use now."""
        self._known_version = self._region.version
        held = {name: self._region.held(array_offset(name, self._sizes)) for name in self._arrays}
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
        raise OutOfMemoryError(
            f"the storage holds as many frames as it can number ({int(self._head[FRAMES]):,} were stored, "
            f"{self.nbytes:,} bytes are held); pass a smaller max_size"
        )
