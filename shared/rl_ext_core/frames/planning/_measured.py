"""What storing costs, measured on transitions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.adaptive import AdaptiveStore
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.planning._rows import Sample
from rl_ext_core.frames.store import FrameStore

LEAST = 128  # transitions, below which nothing can be said
_BATCH = 32
_TIMED_S = 0.05
_COMPARED = 256  # transitions


class Measured(NamedTuple):
    """Of one way of storing: bytes and CPU microseconds a transition, and the PSNR where it is not exact."""

    frame_bytes: float
    sample_us: float
    psnr: float | None


def channel_first(sample: Sample) -> Sample:
    """The sample as buffers get images: ``VecTransposeImage`` and ``ToTensorImage`` bring the channels to the front."""
    shape = sample.before.shape[1:]
    if sample.before.dtype != np.uint8 or len(shape) != 3 or shape[0] <= shape[2]:
        return sample
    before, after = (np.ascontiguousarray(np.moveaxis(part, -1, 1)) for part in (sample.before, sample.after))
    return replace(sample, before=before, after=after)


def layout_of(sample: Sample, *, n_stack: int | None) -> StackLayout:
    """How the observations of a sample are stacked.

    :raises InvalidArgumentError: if there are too few to say.
    """
    if len(sample) < LEAST:
        raise InvalidArgumentError(
            f"{sample.source} gives {len(sample)} transitions, and a plan needs at least {LEAST}; pass more frames, or "
            "more steps"
        )
    described = sample.before.shape[1:], sample.before.dtype
    if n_stack is not None:
        return next(candidate_layouts(*described, n_stack=n_stack))
    return find_layout(*described, sample.before, sample.after) or list(candidate_layouts(*described))[-1]


def measure(sample: Sample, layout: StackLayout, options: Mapping[str, Any]) -> Measured:
    """Stores a sample as a buffer with these options would.

    :param options: of ``AdaptiveStore``, which chooses what they leave open.
    """
    chooser = AdaptiveStore(len(sample), 1, layout.shape, layout.dtype, n_stack=layout.n_stack, **options)
    _fill(chooser, sample)
    loss = {name: options[name] for name in ("max_error", "quality") if name in options}
    store = FrameStore(len(sample), 1, layout, codec=chooser.codec, block_length=chooser.block_length, **loss)
    # The difference: what the first frames and the buffers take does not grow with the transitions.
    first = len(sample) // 4
    _fill(store, sample, stop=first)
    begun = store.nbytes
    _fill(store, sample, start=first)
    return Measured((store.nbytes - begun) / (len(sample) - first), _sample_us(store), _psnr(store, sample))


def _fill(store: AdaptiveStore | FrameStore, sample: Sample, *, start: int = 0, stop: int | None = None) -> None:
    for before, after in zip(sample.before[start:stop], sample.after[start:stop], strict=True):
        store.append(before[None], after[None])


def _read(store: FrameStore, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    out = np.empty((2, len(rows), *store.layout.shape), dtype=store.layout.dtype)
    store.get(rows, np.zeros_like(rows), out[0], out[1])
    return out


def _sample_us(store: FrameStore) -> float:
    rng, seconds, count = np.random.default_rng(0), 0.0, 0
    out = np.empty((2, _BATCH, *store.layout.shape), dtype=store.layout.dtype)
    envs = np.zeros(_BATCH, dtype=np.int64)
    store.get(envs, envs, out[0], out[1])
    while seconds < _TIMED_S:
        rows = rng.integers(store.size, size=_BATCH)
        start = time.thread_time()
        store.get(rows, envs, out[0], out[1])
        seconds += time.thread_time() - start
        count += _BATCH
    return seconds / count * 1e6


def plain_us(sample: Sample) -> float:
    """What reading a transition takes where observations are plain arrays."""
    rng, seconds, count = np.random.default_rng(0), 0.0, 0
    while seconds < _TIMED_S:
        rows = rng.integers(len(sample), size=_BATCH)
        start = time.thread_time()
        _ = sample.before[rows], sample.after[rows]
        seconds += time.thread_time() - start
        count += _BATCH
    return seconds / count * 1e6


def _psnr(store: FrameStore, sample: Sample) -> float | None:
    if not store.lossy:
        return None
    rows = np.linspace(0, len(sample) - 1, min(len(sample), _COMPARED)).astype(np.int64)
    true = np.stack([sample.before[rows], sample.after[rows]]).astype(np.float64)
    error = float(np.mean((_read(store, rows).astype(np.float64) - true) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else float("inf")
