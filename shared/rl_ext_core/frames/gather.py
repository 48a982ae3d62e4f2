"""Kernel that gathers the entries of a batch in one buffer, to upload it to a GPU."""

from __future__ import annotations

from numba import int64, uint64

from rl_ext_core.frames.kernel_primitives import copy_frame, kernel, load_u32, prefetch
from rl_ext_core.frames.log_state import (
    DELTA,
    KEY_FRAME,
    N_STACK,
    START,
    address_at,
    column_start,
    read_header,
)

ALIGNMENT = 16  # of contents in the buffer, and bytes behind them
# Numbers of a chain: its first entry, its number of entries, entries before the first wanted frame, and the number of
# that frame in the batch.
N_CHAIN = 4
# Numbers of an entry: the place of its contents in the buffer; and its form, which is one of these, or the bytes per
# header of its patch, 2 or 3.
N_ENTRY = 2
WHOLE, UNCHANGED = range(2)
N_RECENT = 4096  # latest entries, whose contents are copied once. One replaces another with the same remainder.
_AHEAD = 8  # stacks whose newest entries are prefetched


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
        if k + _AHEAD < len(handles):
            prefetch(uint64(address_at(state, handles[k + _AHEAD] >> 23)))
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
