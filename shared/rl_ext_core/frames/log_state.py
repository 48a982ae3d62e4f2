"""State of a log, which its kernels share: one array of sizes, positions and addresses.

A log stores the frames of one or more columns, such as the keys of a ``Dict`` observation. The state begins with
``N_LOG`` numbers of the log, then come ``N_COLUMN`` numbers per column. A single array is used, because passing several
arguments to a kernel takes longer than comparing a frame.

Positions count ``uint32`` words: ``slot << SEGMENT_SHIFT | word``, where the slot says which segment.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import int64, uint32, uint64

from rl_ext_core.frames.kernel_primitives import inner, int64s, load_u32, uint32s

# Numbers of the log.
(
    CAPACITY,  # rows of the ring
    N_ENVS,
    N_COLUMNS,
    SEGMENT_SHIFT,  # log2 of the largest number of words per segment
    TABLE,  # address of the segments' addresses, by slot
    N_SLOTS,  # length of that table, and of the two below
    LIVE,  # address of the number of pairs in each segment
    USED,  # address of the number of words in each segment, 0 for the open one
    PAIRS,  # address of the pairs, (capacity, n_envs, n_columns)
    ROWS,  # address of the caller's data, one row per transition
    ROW_BYTES,  # size of such a row
    FRAMED,  # whether records have headers, so that they are found again in files
    POSITION,  # row of the next transition
    STORED,  # number of rows with transitions, which end before the position
    FULL,  # whether the position has returned to row 0
    END,  # position from which on another segment is opened; 0 if none is open
    NEXT,  # position of the next record
    SEQUENCE,  # number of the open segment, counted from the first one ever
    RECORDS,  # number of records that were ever written
    USED_WORDS,  # words of all closed segments that contain live rows
    RESTART_WORDS,  # words of the first record of the open segment
    DIED,  # number of segments that have lost their last live row and are not freed yet
    ROW_INPUT,  # row of the transition to write, -1 for the position
    DATA_INPUT,  # address of the caller's data of this transition
) = range(24)
N_LOG = 24

# Numbers of a column.
(
    N_STACK,
    FRAME_BYTES,
    PADDED_BYTES,  # size of a frame in work memory, a multiple of ``PADDING``
    PIXELS,
    CHANNELS,  # of one frame
    ITEMSIZE,
    ORDER,  # memory order of stored frames and decoded stacks, PLANAR or INTERLEAVED
    FRAMES,  # address of the newest frames, (n_envs, slots, padded bytes): each stream's newest stack, as a ring
    SLOTS,  # number of such frames per stream
    DECODED,  # address of the newest frames as they will be decoded, (n_envs, padded bytes), if the bound is not 0
    STREAMS,  # address of the streams, (n_envs, N_STREAM)
    SCRATCH,  # address of work memory
    MASK,  # address of a mask of the bytes that an interleaved stack shares with the one before
    BOUND,  # largest error per byte; 0 is exact
    CHAIN,  # largest number of entries per chain; 0 to store whole frames
    BUDGET,  # bytes of patches after which a chain ends
    ENTRY_WORDS,  # largest number of words per entry
    ABOVE,  # distance in bytes to the one that predicts a byte of a quantized frame
    CHANNEL,  # distance to the previous channel, which may predict it too; 0 without one
    SHARED_KEY,  # first key in the open segment, -1 if there is none
    ENCODED,  # whether a codec encodes the frames, as opaque entries
    BLOBS,  # address of the opaque entries of this push, 0 if frames are patched
    NEW_FRAMES,  # address to which new frames are copied instead of being written, 0 usually
    OBS_INPUT,  # address of this push's stacks, and their memory order
    OBS_ORDER,
    NEXT_INPUT,
    NEXT_ORDER,
) = range(27)
N_COLUMN = 27

# Numbers of a stream, which is the sequence of frames of one environment.
(
    NEWEST,  # position of its newest entry, -1 if it has none in the open segment
    CHAIN_LENGTH,  # entries since the start of its chain
    CHAIN_BYTES,  # bytes of these entries
    KEY,  # position of the frame that chains start from, -1 if there is none
    KEY_BYTES,  # bytes of the patches that start from it
    DEPTH,  # frames of its newest stack that are not padding
    SLOT,  # place of its newest frame in FRAMES
    HAS_STACK,  # whether FRAMES contains its newest stack as it was given, interleaved, and then its newest frame
    BACKOFF,  # frames that are stored whole without a look, and how many of these are left
    ENTRIES,  # number of its entries
) = range(10)
N_STREAM = 10

# Kinds of entries.
RAW, KEY_FRAME, START, DELTA, OPAQUE, RESIDUAL_START, RESIDUAL_DELTA, QUANTIZED = range(8)
SEGMENT_HEADER = 8  # words
RECORD_HEADER = 5  # words
SIZE_BITS = (1 << 31) - 1  # of the first word of a record; the other bit says whether it is a transition
_LONG = 0x3FFF  # in a header of one word: size and distance follow in two more words

# A pair is a transition of an environment: ``position << 23 | chain << 18 | back << 12 | depth << 6 | next_depth``.
# Position: newest entry of the next observation. Chain: entries since the start of its chain. Back: entries from that
# of the next observation to that of the observation. Depths: frames that are not padding. 0 means that there is none.
MAX_CHAIN = 31


class FrameShape(NamedTuple):
    """Form of a column's frames, as the kernels of ``interleave`` read it."""

    n_stack: int
    frame_bytes: int
    pixels: int
    frame_channels: int
    itemsize: int
    stored: int


@inner
def column_start(number):  # type: ignore[no-untyped-def]
    """Return the index in the state at which a column's numbers begin."""
    return N_LOG + N_COLUMN * number


@inner
def shape_of(state, c):  # type: ignore[no-untyped-def]
    """Return the form of the frames of the column whose numbers begin at index ``c``."""
    return FrameShape(
        state[c + N_STACK],
        state[c + FRAME_BYTES],
        state[c + PIXELS],
        state[c + CHANNELS],
        state[c + ITEMSIZE],
        state[c + ORDER],
    )


@inner
def stream_of(state, c, env):  # type: ignore[no-untyped-def]
    """Return the address of the numbers of one stream of a column."""
    return state[c + STREAMS] + 8 * N_STREAM * env


@inner
def address_at(state, position):  # type: ignore[no-untyped-def]
    """Return the address of a position."""
    shift = state[SEGMENT_SHIFT]
    start = int64s(state[TABLE], state[N_SLOTS])[position >> shift]
    return start + ((position & ((1 << shift) - 1)) << 2)


@inner
def read_header(address):  # type: ignore[no-untyped-def]
    """Return an entry's kind, whether it is narrow, its bytes, words to the previous entry, and the address behind."""
    word = int64(load_u32(uint64(address)))
    if word & _LONG == _LONG:
        n_bytes, distance = int64(load_u32(uint64(address + 4))), int64(load_u32(uint64(address + 8)))
        return word >> 29, (word >> 28) & 1, n_bytes, distance, address + 12
    return word >> 29, (word >> 28) & 1, word & _LONG, (word >> 14) & _LONG, address + 4


@inner
def write_header(address, kind, narrow, n_bytes, distance):  # type: ignore[no-untyped-def]
    """Write an entry's header; return its number of words."""
    words = uint32s(address, 3)
    if n_bytes < _LONG and distance <= _LONG:
        words[0] = uint32(kind << 29 | narrow << 28 | distance << 14 | n_bytes)
        return 1
    words[0], words[1], words[2] = uint32(kind << 29 | narrow << 28 | _LONG), uint32(n_bytes), uint32(distance)
    return 3
