"""Kernels that decode transitions straight into a batch, or gather their entries for a GPU.

Random reads of a log are slow because of the memory's latency. So the entries of the next few samples are prefetched,
at the positions of the rows before theirs in the table of pairs.
"""

from __future__ import annotations

from numba import int64, uint64

from rl_ext_core.frames.interleave import interleave_frames
from rl_ext_core.frames.kernel_primitives import (
    copy_frame,
    inner,
    int64s,
    kernel,
    load_u32,
    prefetch,
    specialize,
    uint8s,
    zero_bytes,
)
from rl_ext_core.frames.layout import PLANAR
from rl_ext_core.frames.log_patch import LARGE_FRAME, apply_patch, apply_residuals
from rl_ext_core.frames.log_quantize import decode_quantized
from rl_ext_core.frames.log_state import (
    ABOVE,
    BOUND,
    CAPACITY,
    CHANNEL,
    DELTA,
    FRAME_BYTES,
    KEY_FRAME,
    N_COLUMNS,
    N_ENVS,
    N_STACK,
    OPAQUE,
    ORDER,
    PADDED_BYTES,
    PAIRS,
    QUANTIZED,
    RESIDUAL_DELTA,
    RESIDUAL_START,
    SEGMENT_SHIFT,
    START,
    address_at,
    column_start,
    read_header,
    shape_of,
)

OPAQUE_FIELDS = 5  # of an opaque entry in a batch: address, bytes, sample, side, place in the stack
_AHEAD = 4  # samples that are prefetched together
_LINE = 64  # bytes per cache line
_MAX_LINES = 8  # cache lines of an entry that are prefetched
_MARGIN = 7  # entries between the wanted ones and the start of their chain, on average
_MAX_ENTRIES = 256

# Of a buffer to which entries are gathered, to upload it to a GPU.
ALIGNMENT = 16  # of contents, and bytes behind them
# Numbers of a chain: its first entry, its number of entries, entries before the first wanted frame, and the number of
# that frame in the batch.
N_CHAIN = 4
# Numbers of an entry: the place of its contents in the buffer; and its form, which is one of these, or the bytes per
# header of its patch, 2 or 3.
N_ENTRY = 2
WHOLE, UNCHANGED = range(2)
N_RECENT = 4096  # latest entries, whose contents are copied once. One replaces another with the same remainder.
_STACKS_AHEAD = 8  # stacks whose newest entries are prefetched, to gather them


@inner
def _prefetch_sample(state, pairs, at, step):  # type: ignore[no-untyped-def]
    """Prefetch the entries of the transition at index ``at`` of the pairs.

    :param step: Pairs per row.
    """
    pair, shift = pairs[at], state[SEGMENT_SHIFT]
    n_frames = max(pair & 63, (pair >> 12 & 63) + (pair >> 6 & 63))
    in_chain = (pair >> 18 & 31) + 1
    n_entries = in_chain if in_chain >= n_frames else n_frames + _MARGIN
    slot, n_lines, before = pair >> 23 >> shift, 4, pair >> 23
    for i in range(n_entries):
        position = pairs[at] >> 23
        if position >> shift != slot:
            return
        if i:
            n_lines = min(max((before - position) // (_LINE // 4 * step), 1), _MAX_LINES)
        address = uint64(address_at(state, position))
        for k in range(n_lines):
            prefetch(address + uint64(_LINE * k))
        before = position
        at -= step
        if at < 0:
            return


@specialize
def _decode_sample(state, c, pair, entries, work, places, out, next_out, sample, opaque, n_opaque, bounded):  # type: ignore[no-untyped-def]
    """Decode one transition.

    :param entries: Scratch array, four numbers per entry.
    :param work: Address of work memory: two frames, a frame of zeros, then frames for interleaving.
    :param places: Scratch array, shape ``(n_stack + 2 * n_stack,)``.
    :param out, next_out: Addresses of the observation and of the next observation; 0 for one that is not wanted.
    :param opaque: Output, see ``OPAQUE_FIELDS``.
    :param bounded: None to compile only what exact frames need, else True.
    :return: Number of opaque entries.
    """
    n_stack, n_bytes, padded = state[c + N_STACK], state[c + FRAME_BYTES], state[c + PADDED_BYTES]
    planar, pitch, bound = state[c + ORDER] == PLANAR, padded + 64, state[c + BOUND]
    position, back = pair >> 23, pair >> 12 & 63
    depth, next_depth = pair >> 6 & 63 if out else 0, pair & 63 if next_out else 0
    needed, n = max(next_depth, back + depth), 0
    while True:
        kind, narrow, size, distance, contents = read_header(address_at(state, position))
        k = 4 * n
        entries[k], entries[k + 1], entries[k + 2], entries[k + 3] = kind, size << 1 | narrow, contents, position
        n += 1
        if n >= needed and kind != DELTA and kind != RESIDUAL_DELTA:
            break
        position -= distance
    if planar:
        if out and depth < n_stack:
            zero_bytes(uint64(out), (n_stack - depth) * n_bytes)
        if next_out and next_depth < n_stack:
            zero_bytes(uint64(next_out), (n_stack - next_depth) * n_bytes)
    first, second, zeros = work, work + pitch, work + 2 * pitch
    source = int64(0)
    # Large frames are decoded in the output. Those before the oldest wanted one are decoded in its place.
    is_direct = planar and bound == 0 and padded > LARGE_FRAME
    home = next_out + (n_stack - next_depth) * n_bytes
    if depth > 0 and back + depth >= next_depth:
        home = out + (n_stack - depth) * n_bytes
    for age in range(n - 1, -1, -1):
        kind, size, contents = entries[4 * age], entries[4 * age + 1] >> 1, entries[4 * age + 2]
        place, next_place = n_stack - 1 - (age - back), n_stack - 1 - age
        wanted, next_wanted = n_stack - depth <= place < n_stack, age < next_depth
        if kind <= KEY_FRAME:
            source = contents
        elif kind != OPAQUE:
            narrow = entries[4 * age + 1] & 1
            if kind == START or kind == RESIDUAL_START:  # noqa: SIM109
                key = entries[4 * age + 3] - int64(load_u32(uint64(contents)))
                _, _, _, _, source = read_header(address_at(state, key))
                contents += 4
            if bounded is not None:  # noqa: SIM102
                if kind >= RESIDUAL_START:
                    target = second if source == first else first
                    if kind == QUANTIZED:
                        decode_quantized(contents, target, n_bytes, state[c + ABOVE], state[c + CHANNEL], bound)
                    else:
                        apply_residuals(source, contents, size, narrow, target, padded, bound)
                    source, size = target, 0
            if size:
                target = first
                if is_direct:
                    target = out + place * n_bytes if wanted else next_out + next_place * n_bytes
                    target = target if wanted or next_wanted else home
                if source != target and source != second:
                    copy_frame(uint64(target), uint64(source), n_bytes)
                    source = target
                apply_patch(source, contents, narrow, padded, int64(is_direct))
        if kind == OPAQUE:
            for side in range(2):
                if next_wanted if side else wanted:
                    opaque[n_opaque, 0], opaque[n_opaque, 1], opaque[n_opaque, 2] = contents, size, sample
                    opaque[n_opaque, 3], opaque[n_opaque, 4] = side, next_place if side else place
                    n_opaque += 1
            if age < needed:
                places[n_stack + age] = zeros
        elif planar:
            if wanted and source != out + place * n_bytes:
                copy_frame(uint64(out + place * n_bytes), uint64(source), n_bytes)
            if next_wanted and source != next_out + next_place * n_bytes:
                copy_frame(uint64(next_out + next_place * n_bytes), uint64(source), n_bytes)
        elif age < needed:
            places[n_stack + age] = source
            if source == first or source == second:  # noqa: SIM109
                places[n_stack + age] = work + (3 + age) * pitch
                copy_frame(uint64(work + (3 + age) * pitch), uint64(source), n_bytes)
    if not planar:
        shape = shape_of(state, c)
        for side in range(2):
            to, known = (next_out, next_depth) if side else (out, depth)
            if to:
                for i in range(n_stack):
                    age = n_stack - 1 - i
                    places[i] = places[n_stack + age + (0 if side else back)] if age < known else zeros
                interleave_frames(places, shape, uint64(to))
    return n_opaque


def count_scratch_bytes(n_stack: int, padded: int, *, planar: bool) -> int:
    """Return the size of the work memory that a column's transitions are decoded in."""
    return 32 * (_MAX_ENTRIES + n_stack) + (3 if planar else 3 + 2 * n_stack) * (padded + 64) + 64


def _define_decode(bounded):  # type: ignore[no-untyped-def]
    """Define ``decode_transitions``.

    :param bounded: None for a log of exact frames, else True.
    """

    def decode_transitions(state, number, rows, envs, start, stop, out, next_out, opaque, scratch):  # type: ignore[no-untyped-def]
        """Decode a part of a batch.

        :param number: Number of the column.
        :param rows: Rows of the ring; or, if ``envs`` is empty, pairs.
        :param envs: Environments, shape ``(batch,)``.
        :param start, stop: Part of the batch.
        :param out, next_out: Addresses of the observations and of the next observations of the whole batch, or 0.
        :param opaque: Output, see ``OPAQUE_FIELDS``.
        :param scratch: Address of work memory, see :func:`count_scratch_bytes`.
        :return: Number of opaque entries.
        """
        c = column_start(number)
        n_stack, n_bytes = state[c + N_STACK], state[c + N_STACK] * state[c + FRAME_BYTES]
        pitch, n_opaque = state[c + PADDED_BYTES] + 64, int64(0)
        entries, places = int64s(scratch, 4 * _MAX_ENTRIES), int64s(scratch + 32 * _MAX_ENTRIES, 4 * n_stack)
        work = scratch + 32 * (_MAX_ENTRIES + n_stack)
        uint8s(work + 2 * pitch, pitch)[:] = 0
        step, n_envs = state[N_ENVS] * state[N_COLUMNS], state[N_ENVS]
        pairs = int64s(state[PAIRS], state[CAPACITY] * step)
        direct = len(envs) == 0
        for i in range(start, stop):
            if not direct and (i - start) % _AHEAD == 0:
                for k in range(i, min(i + _AHEAD, stop)):
                    _prefetch_sample(state, pairs, (rows[k] * n_envs + envs[k]) * state[N_COLUMNS] + number, step)
            pair = rows[i] if direct else pairs[(rows[i] * n_envs + envs[i]) * state[N_COLUMNS] + number]
            to, next_to = out + i * n_bytes if out else int64(0), next_out + i * n_bytes if next_out else int64(0)
            if pair == 0:
                if to:
                    zero_bytes(uint64(to), n_bytes)
                if next_to:
                    zero_bytes(uint64(next_to), n_bytes)
                continue
            n_opaque = _decode_sample(state, c, pair, entries, work, places, to, next_to, i, opaque, n_opaque, bounded)
        return n_opaque

    return kernel(decode_transitions)


decode_transitions, decode_bounded = map(_define_decode, (None, True))


@kernel
def find_handles(state, number, rows, envs, handles, next_handles):  # type: ignore[no-untyped-def]
    """Write handles of observations and next observations: pairs of which only the next observation is read.

    :param number: Number of the column.
    :param rows, envs: Shape ``(batch,)``.
    :param handles, next_handles: Output, shape ``(batch,)``; 0 for a row without a transition.
    """
    pairs = int64s(state[PAIRS], state[CAPACITY] * state[N_ENVS] * state[N_COLUMNS])
    for i in range(len(rows)):
        pair = pairs[(rows[i] * state[N_ENVS] + envs[i]) * state[N_COLUMNS] + number]
        handles[i] = next_handles[i] = 0
        if pair:
            position = pair >> 23
            next_handles[i] = position << 23 | (pair & 63)
            for _ in range(pair >> 12 & 63):
                position -= read_header(address_at(state, position))[3]
            handles[i] = position << 23 | (pair >> 6 & 63)


@kernel
def are_inside(rows, envs, n_rows, n_envs):  # type: ignore[no-untyped-def]
    """Return whether all rows and environments exist."""
    inside = True
    for i in range(len(rows)):
        inside = inside and 0 <= rows[i] < n_rows and 0 <= envs[i] < n_envs
    return inside


@kernel
def gather_entries(state, number, handles, buffer, capacity, chains, entries, recent):  # type: ignore[no-untyped-def]
    """Copy the entries of stacks to a buffer, and list the chains to decode.

    :param number: Number of the column, whose frames are exact and not opaque.
    :param handles: Handles of the stacks, shape ``(n,)``; 0 has no chains.
    :param buffer: Address of the buffer.
    :param capacity: Size of the buffer. If it is too small, nothing is written behind it.
    :param chains, entries: Output, shapes ``(chains, N_CHAIN)`` and ``(entries, N_ENTRY)``.
    :param recent: Scratch array, shape ``(N_RECENT + MAX_CHAIN + MAX_STACK, 2)``, filled with -1.
    :return: Number of chains, number of entries, bytes that the buffer needs, number of frames without data.
    """
    c = column_start(number)
    n_stack, used, n_chains, n_entries, padding = state[c + N_STACK], int64(0), int64(0), int64(0), int64(0)
    for k in range(len(handles)):
        if k + _STACKS_AHEAD < len(handles):
            prefetch(uint64(address_at(state, handles[k + _STACKS_AHEAD] >> 23)))
        position, depth, target = handles[k] >> 23, handles[k] & 63, (k + 1) * n_stack
        padding += n_stack - depth
        while depth > 0:  # the newest chain first
            n = 0
            while True:
                recent[N_RECENT + n, 0] = position
                kind, _, _, distance, _ = read_header(address_at(state, position))
                n += 1
                position -= distance
                if kind != DELTA:
                    break
            first, n_frames = n_entries, min(n, depth)
            depth -= n_frames
            target -= n_frames
            for i in range(n - 1, -1, -1):
                at = recent[N_RECENT + i, 0]
                for part in range(2):  # the key that the entry needs, then the entry
                    kind, narrow, size, _, contents = read_header(address_at(state, at))
                    entry = at
                    if kind == START and part == 0:
                        entry = at - int64(load_u32(uint64(contents)))
                        kind, narrow, size, _, contents = read_header(address_at(state, entry))
                    elif part == 0:
                        continue
                    elif kind == START:
                        contents += 4
                    slot = entry % N_RECENT
                    if recent[slot, 0] != entry:
                        if used + size <= capacity:
                            copy_frame(uint64(buffer + used), uint64(contents), size)
                        recent[slot, 0], recent[slot, 1] = entry, used
                        used = (used + size + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
                    form = WHOLE if kind <= KEY_FRAME else (3 - narrow if size else UNCHANGED)
                    entries[n_entries, 0], entries[n_entries, 1] = recent[slot, 1], form
                    n_entries += 1
            chains[n_chains, 0], chains[n_chains, 1] = first, n_entries - first
            chains[n_chains, 2], chains[n_chains, 3] = n_entries - first - n_frames, target
            n_chains += 1
    return n_chains, n_entries, used, padding
