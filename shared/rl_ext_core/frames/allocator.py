"""Allocator of grains: allocates and frees runs of grains in any order.

It works like a heap with boundary tags. The first grain of a free run stores its length, and links to other free runs
of about that length. The last four bytes of the run store the length again. Bits in ``edges`` mark the first and the
last grain of each free run. A freed run is merged with the free runs on both sides.
"""

from __future__ import annotations

from numba import int64, njit, uint8, uint32, uint64

from rl_ext_core.frames.arrays import BINS, FREE_GRAINS, GRAINS, N_BINS
from rl_ext_core.frames.kernel_primitives import kernel, load_u32, store_u32
from rl_ext_core.frames.views import pool_in

# Offsets in the first grain of a free run, after its length: the first grains of the previous and the next run of the
# list, plus one, so that 0 is the end of the list.
_PREVIOUS_RUN, _NEXT_RUN = 4, 8
_TAIL = 4  # bytes at the end of a free run that store its length
_MAX_TRIES = 8  # runs of the same list that are tried before a longer one is split


@njit(nogil=True, inline="always")
def address_of_grain(p, grain):  # type: ignore[no-untyped-def]
    """Return the address of a grain, the smallest piece of memory that is allocated."""
    return p.grains + uint64(grain * p.grain_bytes)


@njit(nogil=True, inline="always")
def grains_of(p, n_bytes):  # type: ignore[no-untyped-def]
    """Return how many grains a number of bytes takes, rounded up."""
    return (int64(n_bytes) + p.grain_bytes - 1) // p.grain_bytes


@njit(nogil=True)
def _bin_of(n):  # type: ignore[no-untyped-def]
    """Return the index in ``head`` of the list of free runs of about ``n`` grains."""
    number = BINS
    while n > 1:
        n >>= 1
        number += 1
    return number


@njit(nogil=True, inline="always")
def _is_edge(p, grain):  # type: ignore[no-untyped-def]
    """Return whether a grain is marked as the first or last one of a free run."""
    return p.edges[grain >> 3] & uint8(1 << (grain & 7)) != uint8(0)


@njit(nogil=True, inline="always")
def _set_edge(p, grain, edge):  # type: ignore[no-untyped-def]
    """Mark a grain as the first or last one of a free run, or remove that mark."""
    bit = uint8(1 << (grain & 7))
    if edge:
        p.edges[grain >> 3] |= bit
    else:
        p.edges[grain >> 3] &= ~bit


@njit(nogil=True)
def _add_free_run(p, first, n):  # type: ignore[no-untyped-def]
    """Make ``n`` grains a free run, the first one in the list of its length."""
    start, number = address_of_grain(p, first), _bin_of(n)
    behind = p.head[number]
    store_u32(start, uint32(n))
    store_u32(start + uint64(_PREVIOUS_RUN), uint32(0))
    store_u32(start + uint64(_NEXT_RUN), uint32(behind))
    store_u32(address_of_grain(p, first + n) - uint64(_TAIL), uint32(n))
    if behind > 0:
        store_u32(address_of_grain(p, behind - 1) + uint64(_PREVIOUS_RUN), uint32(first + 1))
    p.head[number] = first + 1
    _set_edge(p, first, True)
    _set_edge(p, first + n - 1, True)


@njit(nogil=True)
def _remove_free_run(p, first, n):  # type: ignore[no-untyped-def]
    """Remove a free run from its list."""
    start = address_of_grain(p, first)
    before, behind = load_u32(start + uint64(_PREVIOUS_RUN)), load_u32(start + uint64(_NEXT_RUN))
    if before > 0:
        store_u32(address_of_grain(p, int64(before) - 1) + uint64(_NEXT_RUN), behind)
    else:
        p.head[_bin_of(n)] = int64(behind)
    if behind > 0:
        store_u32(address_of_grain(p, int64(behind) - 1) + uint64(_PREVIOUS_RUN), before)
    _set_edge(p, first, False)
    _set_edge(p, first + n - 1, False)


@njit(nogil=True)
def _find_free_run(p, n):  # type: ignore[no-untyped-def]
    """Return the first grain of a free run of at least ``n`` grains, or -1."""
    number = _bin_of(n)
    at = p.head[number]
    for _ in range(_MAX_TRIES):
        if at == 0:
            break
        start = address_of_grain(p, at - 1)
        if int64(load_u32(start)) >= n:
            return at - 1
        at = int64(load_u32(start + uint64(_NEXT_RUN)))
    for longer in range(number + 1, BINS + N_BINS):
        if p.head[longer] > 0:
            return p.head[longer] - 1
    return -1


@njit(nogil=True)
def allocate_grains(p, n):  # type: ignore[no-untyped-def]
    """Allocate ``n`` grains, from a free run or after the last used grain.

    :return: First grain.
    """
    first = _find_free_run(p, n)
    if first < 0:
        p.head[GRAINS] += n
        return p.head[GRAINS] - n
    length = int64(load_u32(address_of_grain(p, first)))
    _remove_free_run(p, first, length)
    if length > n:
        _add_free_run(p, first, length - n)
    p.head[FREE_GRAINS] -= n
    return first + length - n


@njit(nogil=True)
def free_grains(p, first, n):  # type: ignore[no-untyped-def]
    """Free ``n`` grains, and merge them with the free runs on both sides."""
    p.head[FREE_GRAINS] += n
    if first > 0 and _is_edge(p, first - 1):
        length = int64(load_u32(address_of_grain(p, first) - uint64(_TAIL)))
        first -= length
        n += length
        _remove_free_run(p, first, length)
    end = first + n
    if end < p.head[GRAINS] and _is_edge(p, end):
        length = int64(load_u32(address_of_grain(p, end)))
        _remove_free_run(p, end, length)
        n += length
    _add_free_run(p, first, n)


@njit(nogil=True)
def free_unused_grains(p, used):  # type: ignore[no-untyped-def]
    """Rebuild the lists of free runs from the grains that are in use.

    :param used: Shape ``(grains,)``, True for used grains.
    """
    for number in range(BINS, BINS + N_BINS):
        p.head[number] = 0
    p.head[FREE_GRAINS] = 0
    for i in range((used.shape[0] >> 3) + 1):
        p.edges[i] = uint8(0)
    end = used.shape[0]
    while end > 0:
        first = end
        while first > 0 and not used[first - 1]:
            first -= 1
        if first < end:
            _add_free_run(p, first, end - first)
            p.head[FREE_GRAINS] += end - first
        end = first - 1


@kernel
def list_free_runs(state, least, runs):  # type: ignore[no-untyped-def]
    """List the free runs of a minimum length.

    :param least: Minimum number of grains.
    :param runs: Output, shape ``(n, 2)``: first grain and length.
    :return: Number of listed runs.
    """
    p, found = pool_in(state), 0
    for number in range(_bin_of(least), BINS + N_BINS):
        at = p.head[number]
        while at > 0:
            start = address_of_grain(p, at - 1)
            length = int64(load_u32(start))
            if length >= least and found < runs.shape[0]:
                runs[found, 0], runs[found, 1] = at - 1, length
                found += 1
            at = int64(load_u32(start + uint64(_NEXT_RUN)))
    return found
