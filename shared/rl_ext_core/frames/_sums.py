"""Checksums, for the kernels of frame pools. No change that is confined to eight bytes leaves one as it is but by a
chance of one in 2**32.
"""

from __future__ import annotations

from numba import njit, uint32, uint64

from rl_ext_core.frames._compile import kernel
from rl_ext_core.frames._memory import load_u8, load_u64

START = 0x2545F4914F6CDD1D
_FACTOR = 0x9E3779B97F4A7C15


@njit(nogil=True, inline="always")
def mixed(total, word):  # type: ignore[no-untyped-def]
    """A sum of one more word."""
    total = (uint64(total) ^ uint64(word)) * uint64(_FACTOR)
    return total ^ (total >> uint64(29))


@njit(nogil=True)
def add_bytes(total, start, n_bytes):  # type: ignore[no-untyped-def]
    """A sum of more bytes. They may be given in parts, if all but the last are multiples of eight."""
    total = uint64(total)
    i = 0
    while i + 8 <= n_bytes:
        total = mixed(total, load_u64(start + uint64(i)))
        i += 8
    if i < n_bytes:
        word = uint64(n_bytes - i)
        while i < n_bytes:
            word = (word << uint64(8)) | uint64(load_u8(start + uint64(i)))
            i += 1
        total = mixed(total, word)
    return total


@njit(nogil=True, inline="always")
def folded(total):  # type: ignore[no-untyped-def]
    """What is kept of a sum."""
    return uint32((total ^ (total >> uint64(32))) & uint64(0xFFFFFFFF))


@kernel
def sum_rows(addresses, sizes, rows, sums):  # type: ignore[no-untyped-def]
    """Sums of rows of several arrays.

    :param addresses: (arrays,) where they begin.
    :param sizes: (arrays,) bytes in a row.
    :param rows: (n,).
    :param sums: (n,) written.
    """
    for i in range(rows.shape[0]):
        total = uint64(START)
        for k in range(addresses.shape[0]):
            total = add_bytes(total, addresses[k] + uint64(rows[i] * sizes[k]), sizes[k])
        sums[i] = folded(total)
