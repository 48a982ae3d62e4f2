"""The log of frames against ``FrameStore`` and SB3's ``ReplayBuffer``, with the figures that it must reach.

    python -m benchmarks.frame_log [part ...] [--games pong breakout] [--size 20000] [--envs 2]

All stores contain the same transitions, in one process, and take turns. Times are CPU seconds of the calling thread.
Each part prints a limit next to each ratio of medians:

- ``games``: recorded games, channel-first and channel-last as SB3 passes them
- ``pictures``: noise, smooth noise and a panning camera
- ``bounded``: noise of three strengths with ``max_error=4``
- ``folder``: adding to files
- ``large``: frames of 480×640×3 with large and distant changes
- ``sizes``: time of ``append`` and ``get`` and resident memory against the number of transitions
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks import recordings
from benchmarks.measure import machine, parse_options, record, resident_bytes, time_in_turns
from rl_ext_core.frames import FrameStore
from rl_ext_core.frames.log_store import LogStore

ROW = np.dtype([("actions", np.int64), ("rewards", np.float32), ("dones", np.float32), ("timeouts", np.float32)])
Pair = tuple[np.ndarray, np.ndarray]


def _fill(stores: dict[str, Callable[..., Any]], pairs: list[Pair], laps: int) -> dict[str, np.ndarray]:
    """Add the transitions to all stores in turn, and return the seconds of each call in the last lap."""
    seconds: dict[str, list[float]] = {name: [] for name in stores}
    for lap in range(laps):
        for turn, sides in enumerate(pairs):
            # Like those of an environment that has just stepped, observations are in the caches.
            pair = tuple(side.copy("K") for side in sides)
            for name in list(stores) if turn % 2 else list(reversed(stores)):
                start = time.thread_time()
                stores[name](*pair)
                if lap == laps - 1:
                    seconds[name].append(time.thread_time() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def _ratio(seconds: dict[str, np.ndarray], name: str, baseline: str) -> float:
    """Return the ratio of the medians of two competitors."""
    return float(np.median(seconds[name]) / np.median(seconds[baseline]))


def _sample(stores: dict[str, Any], batch: int, rounds: int) -> dict[str, np.ndarray]:
    """Decode random batches in turn, check that they are equal, and return the seconds of each call."""
    first = next(iter(stores.values()))
    rng, places = np.random.default_rng(0), {}
    outs = {name: np.empty((2, batch, *first.layout.shape), first.layout.dtype) for name in stores}

    def draw() -> None:
        places["rows"], places["envs"] = rng.integers(first.size, size=batch), rng.integers(first.n_envs, size=batch)

    def read(name: str) -> Callable[[], None]:
        return lambda: stores[name].get(places["rows"], places["envs"], *outs[name])

    draw()
    for name in stores:
        read(name)()
        if not first.lossy:
            np.testing.assert_array_equal(outs[name], outs[next(iter(stores))])
    return time_in_turns({name: read(name) for name in stores}, rounds=rounds, clock=time.thread_time, prepare=draw)


def _compare(label: str, pairs: list[Pair], limits: dict[str, float], capacity: int, **options: Any) -> None:
    """Compare both stores on these transitions, and print a row."""
    shape, dtype, n_envs = pairs[0][0].shape[1:], pairs[0][0].dtype, len(pairs[0][0])
    today = FrameStore.adaptive(capacity, n_envs, shape, dtype, **options)
    log = LogStore.adaptive(capacity, n_envs, shape, dtype, **options)
    laps = -(-capacity // len(pairs)) + 1
    adding = _fill({"today": today.append, "log": log.append}, pairs, laps)
    n = capacity * n_envs
    figures = {"bytes": log.nbytes / today.nbytes, "push": _ratio(adding, "log", "today")}
    for batch, rounds in ((32, 300), (256, 100)):
        figures[f"get_{batch}"] = _ratio(_sample({"today": today, "log": log}, batch, rounds), "log", "today")
    shown = "  ".join(
        f"{name} {figure:.2f}{'' if figure <= limits[name] else ' >'} ≤ {limits[name]}"
        for name, figure in figures.items()
    )
    print(f"{label:26} {today.nbytes / n:7.0f} → {log.nbytes / n:6.0f} bytes  {shown}", flush=True)
    record("frame_log", label, bytes_today=today.nbytes / n, bytes_log=log.nbytes / n, **figures)


def compare_games(options: argparse.Namespace) -> None:
    """Compare recorded games, and adding with SB3's buffer."""
    steps = options.size // options.envs
    for game in options.games:
        recording = recordings.load(game, steps=min(steps, 10_000))
        for last in (False, True):
            pairs = [(obs, nexts) for obs, nexts, *_ in recording.transitions(transposed_views=last)]
            if options.envs != recording.n_envs:
                pairs = _spread(pairs, options.envs)
            most = {"breakout": 0.8, "pong": 1.0}.get(game, 1.05) if options.size >= 100_000 else 1.2
            limits = {"bytes": most, "push": 0.6, "get_32": 1.0, "get_256": 1.05}
            label = f"{game} {'last' if last else 'planar'} {options.size // 1000}k × {options.envs}"
            _compare(label, pairs, limits, steps)
            _compare_add(label, pairs, 1.1 if last else 0.9)


def _spread(pairs: list[Pair], n_envs: int) -> list[Pair]:
    """Return transitions of another number of environments, which play parts of the recording."""
    n_given = len(pairs[0][0])
    ahead = len(pairs) * n_given // n_envs
    spread = []
    for t in range(len(pairs)):
        places = [((t + env // n_given * ahead) % len(pairs), env % n_given) for env in range(n_envs)]
        spread.append(tuple(np.stack([pairs[row][side][env] for row, env in places]) for side in range(2)))
    return spread  # type: ignore[return-value]


def _compare_add(label: str, pairs: list[Pair], most: float) -> None:
    """Compare adding whole transitions with SB3's buffer, in a full ring of the recording's length."""
    n_envs, shape = len(pairs[0][0]), pairs[0][0].shape[1:]
    capacity = len(pairs)
    space = spaces.Box(0, 255, shape, np.uint8)
    plain = ReplayBuffer(capacity * n_envs, space, spaces.Discrete(6), device="cpu", n_envs=n_envs)
    store = LogStore.adaptive(capacity, n_envs, shape, np.uint8, row_dtype=np.dtype((ROW, (n_envs,))))
    actions, zeros, infos = np.zeros((n_envs, 1), np.int64), np.zeros(n_envs, np.float32), [{} for _ in range(n_envs)]
    row = np.zeros(n_envs, ROW)

    def add(obs: np.ndarray, nexts: np.ndarray) -> None:
        """Add a transition as a buffer of SB3 would."""
        row["actions"], row["rewards"], row["dones"] = actions.reshape(n_envs), zeros, zeros
        row["timeouts"] = [info.get("TimeLimit.truncated", False) for info in infos]
        store.append(obs, nexts, row)

    def add_plain(obs: np.ndarray, nexts: np.ndarray) -> None:
        """Add a transition to SB3's buffer."""
        plain.add(obs, nexts, actions, zeros, zeros, infos)

    seconds = _fill({"SB3": add_plain, "log": add}, pairs, 2)
    ratio, times = _ratio(seconds, "log", "SB3"), [1e6 * np.median(seconds[name]) for name in ("SB3", "log")]
    print(
        f"{'':26} add: SB3 {times[0]:.1f}, log {times[1]:.1f} µs, {ratio:.2f}{' >' * (ratio > most)} ≤ {most}",
        flush=True,
    )
    record("frame_log", f"{label} add", ratio=ratio)


def _stack(frames: Iterator[np.ndarray], n: int, n_stack: int) -> list[Pair]:
    """Return transitions of one environment that stacks these frames, channel-first."""
    held = [next(frames)] * n_stack
    pairs = []
    for _ in range(n):
        before = np.concatenate(held)[None]
        held = [*held[1:], next(frames)]
        pairs.append((before, np.concatenate(held)[None]))
    return pairs


def compare_pictures(options: argparse.Namespace) -> None:
    """Compare pictures of which each pixel changes."""
    rng, width = np.random.default_rng(0), 2600
    texture = np.repeat(np.repeat(rng.integers(0, 255, (3, 25, width // 8)), 4, 1), 8, 2).astype(np.uint8)
    smooth = np.cumsum(rng.integers(-3, 4, (3, 100, width)), 2).astype(np.uint8)
    noise = (rng.integers(0, 255, (3, 100, 100), dtype=np.uint8) for _ in itertools.count())
    pan, walk = ((image[:, :, t : t + 100] for t in itertools.count()) for image in (texture, smooth))
    limits = {"bytes": 1.03, "push": 1.0, "get_32": 1.05, "get_256": 1.05}
    for label, frames in (("noise", noise), ("panning", pan), ("smooth", walk)):
        _compare(label, _stack(frames, 2000, 3), limits, 2000)


def compare_bounded(options: argparse.Namespace) -> None:
    """Compare noise with a bound."""
    limits = {"bytes": 1.0, "push": 1.0, "get_32": 1.0, "get_256": 1.0}
    coarse = np.random.default_rng(0).integers(0, 255, (12, 12)).astype(float)
    background = np.kron(coarse, np.ones((7, 7)))
    for sigma in (1.0, 2.0, 4.0):

        def frames(sigma: float = sigma) -> Iterator[np.ndarray]:
            """Generate a moving square before a background, with noise."""
            for t in itertools.count():
                frame, (y, x) = background.copy(), (int(30 + 25 * np.sin(t / 17)), int(40 + 30 * np.cos(t / 23)))
                frame[y : y + 10, x : x + 10] = 230
                noise = np.random.default_rng(t).normal(0, sigma, frame.shape)
                yield np.clip(np.rint(frame + noise), 0, 255).astype(np.uint8)[None]

        _compare(f"bounded, noise of {sigma:.0f}", _stack(frames(), 3000, 4), limits, 3000, max_error=4)


def compare_folder(options: argparse.Namespace) -> None:
    """Compare adding to files with adding to memory."""
    for game in options.games:
        recording = recordings.load(game, steps=min(options.size // 2, 5000))
        pairs = [(obs, nexts) for obs, nexts, *_ in recording.transitions(transposed_views=False)]
        folder = Path(tempfile.mkdtemp())
        shape = pairs[0][0].shape[1:]
        stores: Any = {
            name: kind.adaptive(len(pairs), 2, shape, np.uint8, storage_dir=path)
            for name, kind, path in (
                *(("memory", LogStore, None), ("log", LogStore, folder / "log")),
                ("today", FrameStore, folder / "today"),
            )
        }
        seconds = _fill({name: store.append for name, store in stores.items()}, pairs, 2)
        times = {name: f"{1e6 * np.median(values):.1f} µs" for name, values in seconds.items()}
        ratio = _ratio(seconds, "log", "memory")
        stores["log"].close()
        start = time.perf_counter()
        LogStore.adaptive(len(pairs), 2, shape, np.uint8, storage_dir=folder / "log", resume=True).close()
        print(
            f"{game:26} push {times}, files {ratio:.2f} ≤ 1.5; opened in {time.perf_counter() - start:.2f} s",
            flush=True,
        )
        record("frame_log", f"{game} folder", ratio=ratio)
        stores["today"].close()
        shutil.rmtree(folder)


def compare_large(options: argparse.Namespace) -> None:
    """Compare large frames with large and distant changes."""
    rng = np.random.default_rng(0)
    background, texture = (rng.integers(0, 255, shape, dtype=np.uint8) for shape in ((3, 480, 640), (3, 160, 160)))
    limits = {"bytes": 1.03, "push": 1.0, "get_32": 1.0, "get_256": 1.05}
    for side in (140, 150):

        def frames(side: int = side) -> Iterator[np.ndarray]:
            """Generate a square that moves up and down."""
            for t in itertools.count():
                frame, y = background.copy(), int(150 + 100 * np.sin(t / 9))
                frame[:, y : y + side, 100 : 100 + side] = texture[:, :side, :side]
                yield frame

        _compare(f"480×640×3, square of {side}", _stack(frames(), 100, 1), limits, 100)


def compare_sizes(options: argparse.Namespace) -> None:
    """Measure the log against its number of transitions, with the recording in a loop."""
    for game in options.games:
        recording = recordings.load(game, steps=10_000)
        pairs = [(obs, nexts) for obs, nexts, *_ in recording.transitions(transposed_views=False)]
        warm = LogStore.adaptive(1000, 2, pairs[0][0].shape[1:], np.uint8)
        for pair in pairs[:200]:
            warm.append(*pair)
        _sample({"log": warm}, 32, 1)
        for n in (10_000, 100_000, 1_000_000, 10_000_000):
            if n > options.most:
                break
            before, store = resident_bytes(), LogStore.adaptive(n // 2, 2, pairs[0][0].shape[1:], np.uint8)
            seconds = np.empty(n // 2)
            for i in range(n // 2):
                start = time.thread_time()
                store.append(*pairs[i % len(pairs)])
                seconds[i] = time.thread_time() - start
            used = (resident_bytes() - before) / n
            push = 1e6 * np.median(seconds[-min(20_000, n // 4) :])
            reading = {size: 1e6 * np.median(_sample({"log": store}, size, 100)["log"]) for size in (32, 256)}
            print(
                f"{game:12} {n:10,}: {store.nbytes / n:.1f} bytes, resident {used:.1f}; push {push:.1f}, get(32) "
                f"{reading[32]:.0f}, get(256) {reading[256]:.0f} µs",
                flush=True,
            )
            record("frame_log", f"{game} {n}", bytes=used, push=push, **{f"get_{k}": v for k, v in reading.items()})


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "games": compare_games,
    "pictures": compare_pictures,
    "bounded": compare_bounded,
    "folder": compare_folder,
    "large": compare_large,
    "sizes": compare_sizes,
}


def main() -> None:
    """Measure, and print a row per comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frame_log", description=main.__doc__)
    parser.add_argument("--games", nargs="*", default=["breakout", "pong", "mspacman", "spaceinvaders"])
    parser.add_argument("--size", type=int, default=20_000, help="transitions in the ring")
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--most", type=int, default=1_000_000, help="largest number of transitions of sizes")
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options)


if __name__ == "__main__":
    main()
