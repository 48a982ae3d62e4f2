"""Helpers of all benchmarks: resident memory, timing in turns, and recorded results."""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# JSON files of measured figures, from which benchmarks.plot draws.
RESULTS = Path(__file__).resolve().parent / "results"
# Start of the name of our competitor, in benchmarks that compare several.
OURS = "ours"


def record(benchmark: str, row: str, **figures: float) -> None:
    """Add a row of figures to a benchmark's file in ``benchmarks/results``.

    Rows of another machine are dropped.
    """
    path = RESULTS / f"{benchmark}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if found.get("machine") != machine():
        found = {"machine": machine(), "rows": {}}
    found["rows"][row] = {name: round(float(figure), 4) for name, figure in figures.items()}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, without mapped files.

    Freed memory is returned to the system first, so that it does not count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def machine() -> str:
    """Return one line that describes the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def parse_options(
    parser: argparse.ArgumentParser, names: Collection[str], *, metavar: str = "part"
) -> argparse.Namespace:
    """Parse the command line, and set ``names`` to the given part names, or to all of them.

    :param parser: Parser with all other options.
    :param names: Names to choose from.
    :param metavar: Placeholder of a name in the help text.
    """
    parser.add_argument("names", nargs="*", metavar=metavar, help=", ".join(names))
    options = parser.parse_args()
    if not set(options.names) <= set(names):
        parser.error(f"choose from {', '.join(names)}")
    options.names = options.names or list(names)
    return options


def time_in_turns(
    competitors: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, np.ndarray]:
    """Run all competitors in turn, in reversed order in every other round.

    :param competitors: Functions to time, by name.
    :param rounds: Number of rounds.
    :param clock: Clock in seconds; ``time.thread_time`` counts the calling thread's CPU time alone.
    :param prepare: Function that is called before each round, and not timed.
    :return: Seconds ``(rounds,)`` of each competitor. For a ratio, take the median of elementwise quotients.
    """
    seconds = {name: np.empty(rounds) for name in competitors}
    for turn in range(rounds):
        prepare()
        names = list(competitors) if turn % 2 else list(reversed(competitors))
        for name in names:
            start = clock()
            competitors[name]()
            seconds[name][turn] = clock() - start
    return seconds


def synchronized_time() -> float:
    """Return the time once the GPU has finished, a clock for :func:`time_in_turns`."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def speedup(seconds: Mapping[str, np.ndarray], name: str, *, baseline: str) -> float:
    """Return the median over rounds of the baseline's seconds divided by those of ``name``."""
    return float(np.median(seconds[baseline] / seconds[name]))


def ratio_interval(
    seconds: Mapping[str, np.ndarray], name: str, *, baseline: str, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the 95 % interval of a speedup by the bootstrap: lower bound, median over rounds, upper bound.

    :param seconds: Result of :func:`time_in_turns`.
    :param name: Competitor.
    :param baseline: Competitor whose seconds are divided by those of ``name``.
    :param resamples: Number of resampled medians. Rounds are resampled in pairs, because load slows both.
    """
    ratios = seconds[baseline] / seconds[name]
    chosen = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return float(low), float(np.median(ratios)), float(high)


@functools.cache
def is_installed(name: str, *, package: str = "") -> bool:
    """Whether a competitor is installed; print a line, once, if it is not.

    :param name: Its module.
    :param package: Its name on PyPI, if that differs.
    """
    found = importlib.util.find_spec(name) is not None
    if not found:
        print(f"{name} is not installed and left out: pip install {package or name}")
    return found


def show_ratios(
    benchmark: str, track: str, seconds: Mapping[str, np.ndarray], *, scale: float = 1e3, unit: str = "ms"
) -> None:
    """Print the median time of each competitor, and how many times faster ours is, with its interval.

    :param benchmark: Name of the file of recorded figures.
    :param track: Heading.
    :param seconds: Result of :func:`time_in_turns`. The first name that starts with :data:`OURS` is ours.
    :param scale: Factor from seconds to ``unit``.
    :param unit: Unit of the printed times.
    """
    print(f"\n{track}")
    ours = next(name for name in seconds if name.startswith(OURS))
    for name, found in seconds.items():
        low, ratio, high = ratio_interval(seconds, ours, baseline=name)
        verdict = "" if name == ours else f"  ours is {ratio:6.2f}× as fast  [{low:.2f}, {high:.2f}]"
        print(f"{name:34}{np.median(found) * scale:12,.2f} {unit}{verdict}", flush=True)
        record(benchmark, f"{track}: {name}", seconds=float(np.median(found)), ratio=ratio, low=low, high=high)


def sampling_speedup(
    ours: Any,
    plain: Any,
    batch_size: int,
    *,
    rounds: int,
    draws: int = 10,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Return the speedup of ``ours.sample(batch_size)`` over ``plain.sample(batch_size)``.

    :param rounds: Number of rounds, in which both buffers take turns.
    :param draws: Batches in a row. Each batch stays in memory until the next one is drawn, as in training.
    :param clock: Clock in seconds.
    """
    competitors = {"plain": make_sampler(plain, batch_size, draws), "ours": make_sampler(ours, batch_size, draws)}
    time_in_turns(competitors, rounds=3)
    return speedup(time_in_turns(competitors, rounds=rounds, clock=clock), "ours", baseline="plain")


def make_sampler(buffer: Any, batch_size: int, draws: int) -> Callable[[], None]:
    """Return a function that samples ``draws`` batches, of which it stores only the last."""
    held: list[Any] = []

    def sample_all() -> None:
        """Sample ``draws`` batches; store each until the next one is drawn."""
        for _ in range(draws):
            held[:] = [buffer.sample(batch_size)]

    return sample_all


def format_ratio(ratio: float, target: float | None, unit: str = "×") -> str:
    """Format a ratio and its target, with ``missed`` if it is below."""
    suffix = "" if target is None else f"  (≥ {target:g}{unit}){'' if ratio >= target else '  missed'}"
    return f"{ratio:6.2f}{unit}{suffix}"
