"""Triton kernel that decodes frames on a GPU. ``patch`` explains the format."""

from __future__ import annotations

import triton
import triton.language as tl

_ENTRY_HEADER = tl.constexpr(3)
_WHOLE = tl.constexpr(0xFFFF)
_MANY_RUNS = tl.constexpr(255)
_COPIED = tl.constexpr(2048)  # bytes that are copied at a time
_RUNS = tl.constexpr(64)  # runs that are applied at a time, and bytes of each
_RUN_BYTES = tl.constexpr(16)


@triton.jit
def _load_u16(pointer):  # type: ignore[no-untyped-def]
    """Load a little-endian number of two bytes at any alignment."""
    return tl.load(pointer).to(tl.int32) | (tl.load(pointer + 1).to(tl.int32) << 8)


@triton.jit
def _copy(target, source, n_bytes):  # type: ignore[no-untyped-def]
    """Copy bytes."""
    for start in range(0, n_bytes, _COPIED):
        places = start + tl.arange(0, _COPIED)
        inside = places < n_bytes
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


@triton.jit
def _apply_runs(target, heads, n_runs):  # type: ignore[no-untyped-def]
    """Overwrite the runs of a patch.

    :param heads: pointer to the run headers, which the bytes of all runs follow
    """
    data = heads + 2 * n_runs
    for start in range(0, n_runs, _RUNS):
        numbers = start + tl.arange(0, _RUNS)
        inside = numbers < n_runs
        skips = tl.load(heads + 2 * numbers, mask=inside, other=0).to(tl.int32)
        lengths = tl.load(heads + 2 * numbers + 1, mask=inside, other=0).to(tl.int32)
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
def decode_segments(buffer, segments, out, frame_bytes):  # type: ignore[no-untyped-def]
    """Decode one segment per program.

    :param buffer: pointer to compressed blocks and references
    :param segments: pointer to the segments, see ``gather``
    :param out: pointer to the frames of the batch
    :param frame_bytes: bytes of a frame
    """
    segment = segments + 5 * tl.program_id(0)
    entry, frame = buffer + tl.load(segment), buffer + tl.load(segment + 1)
    first, last = tl.load(segment + 2), tl.load(segment + 3)
    target = out + tl.load(segment + 4) * frame_bytes
    # All frames up to the first one are decoded in its place, each further one in a copy of the one before.
    _copy(target, frame, frame_bytes)
    tl.debug_barrier()
    for number in range(0, last + 1):
        if number > first:
            _copy(target + frame_bytes, target, frame_bytes)
            target += frame_bytes
            tl.debug_barrier()
        size = _load_u16(entry)
        n_runs = tl.load(entry + 2).to(tl.int32)
        contents = entry + _ENTRY_HEADER
        if size == _WHOLE:
            _copy(target, contents, frame_bytes)
            size = frame_bytes
        elif n_runs == _MANY_RUNS:
            _apply_runs(target, contents + 2, _load_u16(contents))
        else:
            _apply_runs(target, contents, n_runs)
        tl.debug_barrier()
        entry = contents + size
