"""Where the blocks of a pool lie: runs of grains, taken and given back in any order.

What lies free says so itself, as in any heap with boundary tags: the first grain of a free run holds its length and
its neighbours in the list of those of about that length, and its last four bytes the length again. Two bits say where a
free run begins and ends, so that what is given back is joined with what is free on either side.
"""

from __future__ import annotations

from numba import int64, njit, uint8, uint32, uint64

from rl_ext_core.frames.arrays import BINS, FREE_GRAINS, GRAINS, N_BINS
from rl_ext_core.frames.machine import kernel, load_u32, store_u32
from rl_ext_core.frames.views import pool_in

# Where the first grain of a free run holds what: its length, and the numbers of the first grains of the runs before and
# behind it in its list, plus one.
_PREVIOUS_RUN, _NEXT_RUN = 4, 8
_TAIL = 4  # bytes
_MAX_TRIES = 8  # at most, for one that is just long enough


@njit(nogil=True, inline="always")
def address_of_grain(p, grain):  # type: ignore[no-untyped-def]
    """Where a grain begins; bytes of the same block follow behind."""
    return p.grains + uint64(grain * p.grain_bytes)


@njit(nogil=True, inline="always")
def grains_of(p, n_bytes):  # type: ignore[no-untyped-def]
    """How many grains so many bytes take."""
    return (int64(n_bytes) + p.grain_bytes - 1) // p.grain_bytes


@njit(nogil=True)
def _bin_of(n):  # type: ignore[no-untyped-def]
    number = BINS
    while n > 1:
        n >>= 1
        number += 1
    return number


@njit(nogil=True, inline="always")
def _is_edge(p, grain):  # type: ignore[no-untyped-def]
    return p.edges[grain >> 3] & uint8(1 << (grain & 7)) != uint8(0)


@njit(nogil=True, inline="always")
def _set_edge(p, grain, edge):  # type: ignore[no-untyped-def]
    bit = uint8(1 << (grain & 7))
    if edge:
        p.edges[grain >> 3] |= bit
    else:
        p.edges[grain >> 3] &= ~bit


@njit(nogil=True)
def _add_free_run(p, first, n):  # type: ignore[no-untyped-def]
    """Makes a free run of ``n`` grains, the first in the list of its length."""
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
    """Takes a free run out of its list."""
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
    """The first grain of a free run of at least ``n``, or -1."""
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
    """The first of ``n`` grains that are free, or were never used."""
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
    """Gives grains back, and joins them with what is free beside them."""
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
    """Makes free what is not in use, whatever was free before.

    :param used: (grains,) which are.
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
    """Lists the free runs of at least so many grains.

    :param runs: (n, 2) written: first grain and length.
    :return: how many there are.
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
