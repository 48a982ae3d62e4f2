"""Triton kernel that decodes frames on a GPU. ``log_patch`` explains the format."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_ext_core.frames import log_read

_N_CHAIN, _N_ENTRY = tl.constexpr(log_read.N_CHAIN), tl.constexpr(log_read.N_ENTRY)
_WHOLE, _UNCHANGED = tl.constexpr(log_read.WHOLE), tl.constexpr(log_read.UNCHANGED)
_COPIED = tl.constexpr(2048)  # bytes that are copied at a time
_RUNS = tl.constexpr(64)  # runs that are applied at a time, and bytes of each
_RUN_BYTES = tl.constexpr(16)


@triton.jit
def _copy(target, source, n_bytes):  # type: ignore[no-untyped-def]
    for start in range(0, n_bytes, _COPIED):
        places = start + tl.arange(0, _COPIED)
        inside = places < n_bytes
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


@triton.jit
def _apply_runs(target, heads, n_runs, header_bytes):  # type: ignore[no-untyped-def]
    """Overwrite the runs of a patch.

    :param heads: pointer to the run headers, which the bytes of all runs follow
    :param header_bytes: bytes of a header, 2 or 3; the last one is the length, the others are the skip
    """
    data = heads + header_bytes * n_runs
    for start in range(0, n_runs, _RUNS):
        numbers = start + tl.arange(0, _RUNS)
        inside = numbers < n_runs
        head = heads + header_bytes * numbers
        skips = tl.load(head, mask=inside, other=0).to(tl.int32)
        skips += tl.load(head + 1, mask=numbers < n_runs * (header_bytes - 2), other=0).to(tl.int32) << 8
        lengths = tl.load(head + header_bytes - 1, mask=inside, other=0).to(tl.int32)
        targets = tl.cumsum(skips + lengths, 0) - lengths
        sources = tl.cumsum(lengths, 0) - lengths
        for first in range(0, tl.max(lengths, 0), _RUN_BYTES):
            columns = first + tl.arange(0, _RUN_BYTES)[None, :]
            written = columns < lengths[:, None]
            found = tl.load(data + sources[:, None] + columns, mask=written)
            tl.store(target + targets[:, None] + columns, found, mask=written)
        target += tl.sum(skips + lengths, 0)
        data += tl.sum(lengths, 0)


@triton.jit
def decode_chains(buffer, chains, entries, out, frame_bytes, count_bytes):  # type: ignore[no-untyped-def]
    """Decode one chain per program.

    :param buffer: pointer to the contents of entries
    :param chains, entries: pointers to the chains and entries, see ``log_read``
    :param out: pointer to the frames of the batch
    :param frame_bytes: bytes of a frame
    :param count_bytes: bytes of a patch's number of runs, 2 or 4
    """
    chain = chains + _N_CHAIN * tl.program_id(0)
    entry, n_before = entries + _N_ENTRY * tl.load(chain), tl.load(chain + 2)
    target = out + tl.load(chain + 3) * frame_bytes
    # All frames up to the first wanted one are decoded in its place, each further one in a copy of the one before.
    for number in range(0, tl.load(chain + 1)):
        contents, form = buffer + tl.load(entry), tl.load(entry + 1)
        if number > n_before:
            if form != _WHOLE:
                _copy(target + frame_bytes, target, frame_bytes)
            target += frame_bytes
            tl.debug_barrier()
        if form == _WHOLE:
            _copy(target, contents, frame_bytes)
        elif form != _UNCHANGED:
            n_runs = tl.load(contents).to(tl.int32) | (tl.load(contents + 1).to(tl.int32) << 8)
            if count_bytes == 4:
                n_runs |= tl.load(contents + 2).to(tl.int32) << 16
                n_runs |= tl.load(contents + 3).to(tl.int32) << 24
            _apply_runs(target, contents + count_bytes, n_runs, form.to(tl.int32))
        tl.debug_barrier()
        entry += _N_ENTRY
