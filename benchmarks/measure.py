"""What every benchmark here measures with: resident memory, and competitors that take turns in one process."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# What was measured on this machine, as JSON: the pictures of the site are drawn from it.
RESULTS = Path(__file__).resolve().parent / "results"


def record(benchmark: str, row: str, **figures: float) -> None:
    """Keep figures of a benchmark beside those that it has, with the machine, in ``benchmarks/results``."""
    path = RESULTS / f"{benchmark}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if found.get("machine") != machine():
        found = {"machine": machine(), "rows": {}}
    found["rows"][row] = {name: round(float(figure), 4) for name, figure in figures.items()}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def resident_bytes() -> int:
    """The resident memory of this process, but for mapped files, whose pages the system drops and brings back.

    What is freed but not given back to the system yet does not count either.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def machine() -> str:
    """One line that names the machine, for figures that are quoted."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def parse_options(
    parser: argparse.ArgumentParser, names: Collection[str], *, metavar: str = "part"
) -> argparse.Namespace:
    """Parses the command line, on which ``names`` may be some of these; all where there is none.

    :param parser: with every other option.
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
) -> dict[str, np.ndarray]:
    """Runs all competitors in turn, the order turned around every other round.

    :param rounds: how often.
    :param clock: ``time.thread_time`` where only the calling thread's CPU time counts.
    :return: (rounds,) seconds of each; divide two of them element by element and take the median.
    """
    seconds = {name: np.empty(rounds) for name in competitors}
    for turn in range(rounds):
        names = list(competitors) if turn % 2 else list(reversed(competitors))
        for name in names:
            start = clock()
            competitors[name]()
            seconds[name][turn] = clock() - start
    return seconds


def speedup(seconds: Mapping[str, np.ndarray], name: str, *, baseline: str) -> float:
    """The median of the ratios, round by round: above 1, ``name`` is the faster one."""
    return float(np.median(seconds[baseline] / seconds[name]))


def sampling_speedup(
    ours: Any,
    plain: Any,
    batch_size: int,
    *,
    rounds: int,
    draws: int = 10,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """How many times as fast ``ours`` samples as ``plain``.

    :param rounds: how often both take turns.
    :param draws: batches in a row; one is held while the next one is drawn, as a training loop does.
    """
    competitors = {"plain": _sampler(plain, batch_size, draws), "ours": _sampler(ours, batch_size, draws)}
    time_in_turns(competitors, rounds=3)
    return speedup(time_in_turns(competitors, rounds=rounds, clock=clock), "ours", baseline="plain")


def _sampler(buffer: Any, batch_size: int, draws: int) -> Callable[[], None]:
    held: list[Any] = []

    def sample() -> None:
        for _ in range(draws):
            held[:] = [buffer.sample(batch_size)]

    return sample


def format_ratio(ratio: float, target: float | None, unit: str = "×") -> str:
    """A ratio, and the bar that it has to reach."""
    report = "" if target is None else f"  (≥ {target:g}{unit}){'' if ratio >= target else '  missed'}"
    return f"{ratio:6.2f}{unit}{report}"
