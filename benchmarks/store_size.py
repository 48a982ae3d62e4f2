"""Cost of ``FrameStore`` against its number of transitions.

    python -m benchmarks.store_size [--games breakout pong] [--most 10000000] [--folder DIR]

A recording is added in a loop, for 10,000 transitions and each larger power of ten. Prints memory, and median times in
CPU seconds of the calling thread. In parentheses, times relative to those at 100,000 transitions. Stores of all sizes
take turns. With ``--folder``, the largest store is also written there, and opened again by another process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import recordings
from benchmarks.measure import machine, record, resident_bytes
from rl_ext_core.frames import FrameStore, Observation

_BASE = 100_000  # transitions of the store that others are compared with
_ROUNDS, _GETS = 30, 10

Transition = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _fill(n: int, pairs: list[Transition], folder: Path | None = None) -> tuple[FrameStore, npt.NDArray[np.float64]]:
    """Return a full store, and the durations of the last calls of ``append``."""
    shape, seconds = pairs[0][0].shape[1:], np.empty(n // 2)
    store = FrameStore(n // 2, 2, Observation(shape, np.uint8), storage_dir=folder)
    for i in range(n // 2):
        start = time.thread_time()
        store.append(*pairs[i % len(pairs)])
        seconds[i] = time.thread_time() - start
    return store, seconds[-min(20_000, n // 4) :]


def _seconds_to_get(stores: dict[int, FrameStore], batch: int) -> dict[int, npt.NDArray[np.float64]]:
    """Return durations of decoding random batches, for each store. Stores take turns."""
    rng, seconds = np.random.default_rng(0), {n: np.empty((_ROUNDS, _GETS)) for n in stores}
    layout = next(iter(stores.values())).layout
    outs = np.empty((2, batch, *layout.shape), layout.dtype)
    for i in range(_ROUNDS):
        for n, store in stores.items():
            for k in range(_GETS):
                rows, envs = rng.integers(store.size, size=batch), rng.integers(store.n_envs, size=batch)
                start = time.thread_time()
                store.get(rows, envs, *outs)
                seconds[n][i, k] = time.thread_time() - start
    return {n: np.median(each, axis=1) for n, each in seconds.items()}


def measure_sizes(game: str, most: int, folder: Path | None) -> None:
    """Print a row per number of transitions."""
    recording = recordings.load(game, steps=10_000)
    pairs = [(obs, nexts) for obs, nexts, *_ in recording.transitions(transposed_views=False)]
    _fill(1000, pairs)
    stores: dict[int, FrameStore] = {}
    used, appends, n = {}, {}, 10_000
    while n <= most:
        before = resident_bytes()
        stores[n], appends[n] = _fill(n, pairs)
        used[n] = (resident_bytes() - before) / n
        n *= 10
    base = min(_BASE, max(stores))
    gets = {batch: _seconds_to_get(stores, batch) for batch in (32, 256)}
    for n, store in stores.items():
        ratios = {batch: float(np.median(each[n] / each[base])) for batch, each in gets.items()}
        times = {batch: 1e6 * float(np.median(each[n])) for batch, each in gets.items()}
        append = 1e6 * float(np.median(appends[n]))
        print(
            f"{game:12} {n:10,}: {store.nbytes / n:.1f} bytes, resident {used[n]:.1f}; append {append:.1f} µs, get(32) "
            f"{times[32]:.0f} µs ({ratios[32]:.2f}×), get(256) {times[256]:.0f} µs ({ratios[256]:.2f}×)",
            flush=True,
        )
        record("store_size", f"{game} {n}", bytes=used[n], append=append, **{f"get_{k}": v for k, v in times.items()})
    if folder is not None:
        n = max(stores)
        stores.clear()
        _measure_opening(game, n, pairs, folder / game)


def _measure_opening(game: str, n: int, pairs: list[Transition], folder: Path) -> None:
    """Write a store to files, and print the time that another process takes to open it."""
    folder.mkdir(parents=True)
    try:
        store, seconds = _fill(n, pairs, folder)
        shape = store.layout.shape
        del store
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            opened = pool.apply(_open, (folder, n, shape))
        append = 1e6 * float(np.median(seconds))
        print(f"{game:12} {n:10,} in files: append {append:.1f} µs, opened in {opened:.2f} s", flush=True)
        record("store_size", f"{game} {n} in files", append=append, opened=opened)
    finally:
        shutil.rmtree(folder)


def _open(folder: Path, n: int, shape: tuple[int, ...]) -> float:
    """Return the seconds that opening a folder takes, without those of loading the compiled functions."""
    FrameStore(100, 2, Observation(shape, np.uint8)).append(*np.zeros((2, 2, *shape), np.uint8))
    start = time.perf_counter()
    store = FrameStore(n // 2, 2, Observation(shape, np.uint8), storage_dir=folder, resume=True)
    seconds = time.perf_counter() - start
    assert store.size == n // 2
    return seconds


def main() -> None:
    """Measure, and print a row per number of transitions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_size", description=main.__doc__)
    parser.add_argument("--games", nargs="*", default=["breakout", "pong"])
    parser.add_argument("--most", type=int, default=1_000_000, help="largest number of transitions")
    parser.add_argument("--folder", type=Path, help="new folder for the largest store in files")
    options = parser.parse_args()
    print(machine())
    for game in options.games:
        measure_sizes(game, options.most, options.folder)


if __name__ == "__main__":
    main()
