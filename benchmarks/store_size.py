"""Cost of ``FrameStore`` against its number of transitions.

    python -m benchmarks.store_size [--games breakout pong] [--most 10000000]

A recording is added in a loop, for 10,000 transitions and each larger power of ten. Prints memory, and median times in
CPU seconds of the calling thread.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks import recordings
from benchmarks.measure import machine, record, resident_bytes
from rl_ext_core.frames import FrameStore


def _seconds_to_get(store: FrameStore, batch: int, rounds: int = 100) -> float:
    """Return the median duration of decoding a random batch."""
    rng, seconds = np.random.default_rng(0), np.empty(rounds)
    outs = np.empty((2, batch, *store.layout.shape), store.layout.dtype)
    for i in range(rounds):
        rows, envs = rng.integers(store.size, size=batch), rng.integers(store.n_envs, size=batch)
        start = time.thread_time()
        store.get(rows, envs, *outs)
        seconds[i] = time.thread_time() - start
    return float(np.median(seconds))


def measure_sizes(game: str, most: int) -> None:
    """Print a row per number of transitions."""
    recording = recordings.load(game, steps=10_000)
    pairs = [(obs, nexts) for obs, nexts, *_ in recording.transitions(transposed_views=False)]
    shape = pairs[0][0].shape[1:]
    warm = FrameStore.adaptive(1000, 2, shape, np.uint8)
    for pair in pairs[:200]:
        warm.append(*pair)
    _seconds_to_get(warm, 32)
    n = 10_000
    while n <= most:
        before, store = resident_bytes(), FrameStore.adaptive(n // 2, 2, shape, np.uint8)
        seconds = np.empty(n // 2)
        for i in range(n // 2):
            start = time.thread_time()
            store.append(*pairs[i % len(pairs)])
            seconds[i] = time.thread_time() - start
        used = (resident_bytes() - before) / n
        append = 1e6 * float(np.median(seconds[-min(20_000, n // 4) :]))
        get = {batch: 1e6 * _seconds_to_get(store, batch) for batch in (32, 256)}
        print(
            f"{game:12} {n:10,}: {store.nbytes / n:.1f} bytes, resident {used:.1f}; append {append:.1f}, get(32) "
            f"{get[32]:.0f}, get(256) {get[256]:.0f} µs",
            flush=True,
        )
        record("store_size", f"{game} {n}", bytes=used, append=append, **{f"get_{k}": v for k, v in get.items()})
        n *= 10


def main() -> None:
    """Measure, and print a row per number of transitions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_size", description=main.__doc__)
    parser.add_argument("--games", nargs="*", default=["breakout", "pong"])
    parser.add_argument("--most", type=int, default=1_000_000, help="largest number of transitions")
    options = parser.parse_args()
    print(machine())
    for game in options.games:
        measure_sizes(game, options.most)


if __name__ == "__main__":
    main()
