"""``torchrl_ext.ParallelEnv`` against TorchRL's ``ParallelEnv`` with spawn, its default.

    python -m benchmarks.parallel_env [start many twenty built steps rates failures meltingpot] [--rounds 3]
        [--workers 4]

TorchRL's class gets a lambda, as its documentation recommends. This package's class gets the environment itself. Every
start is measured in a fresh process. The first start also starts a fork server, and tests a copy of the environment in
a temporary process. This CPU time is *shared* by all workers, like that of the parent process. Competitors take turns.
Figures are medians, with their targets next to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import format_ratio, machine, parse_options, speedup
from benchmarks.processes import run_module

LIBRARIES = ("TorchRL", "ours")
MELTINGPOT = Path(".venv-meltingpot/bin/python")
CPU_TARGET, MEMORY_TARGET, SPEED_TARGET = 15, 8, 0.95
MANY, MANY_TARGET_MIB = 32, 2500 * 1e6 / 2**20
RATE_TARGETS = {"CartPole": 4, "images": 3, "TorchRL": 2.5}
TWENTY_TARGETS_S = {"CartPole-v1": 1.5, "Ant-v5": 2.0}
LIMIT_S = 60
WIDTH = 52


class HangError(Exception):
    """Raised if a measurement exceeds its time limit."""


def run_once(*arguments: object, limit_s: float | None = None) -> Any:
    """Run a measurement in a fresh process, kill left processes, and return its result."""
    command = [sys.executable, "-m", "benchmarks._parallel_env_once", *map(str, arguments)]
    # Files instead of pipes, since a pipe stays open while any left process has it.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise HangError from None
        finally:
            _kill_group(process)
        output.seek(0)
        errors.seek(0)
        if code:
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()}")
        return json.loads(output.read().splitlines()[-1])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes in a process's group, and wait for that process."""
    # The group exists while any process is in it, even after its leader has ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_row(label: str, *columns: str, verdict: str = "") -> None:
    """Print one row of a table."""
    print(f"{label:{WIDTH}}" + "".join(f"{column:>15}" for column in columns) + f"  {verdict}", flush=True)


# -- the parts


def start(rounds: int, workers: int) -> None:
    """Measure CPU time, memory and wall time of a start."""
    found: dict[str, list[Any]] = {library: [] for library in LIBRARIES}
    for turn in range(rounds):
        for library in LIBRARIES if turn % 2 else reversed(LIBRARIES):
            found[library].append(run_once("start", library, workers))

    def median_figure(library: str, which: int, name: str) -> float:
        """Return the median over rounds of a figure of the first (0) or a later (1) start."""
        return float(median(starts[which][name] for starts in found[library]))

    def cpu_with_shared(library: str, which: int) -> float:
        """Return a worker's CPU seconds, with its part of those that serve all workers."""
        return median_figure(library, which, "cpu") + median_figure(library, which, "cpu of others") / workers

    print(f"\nCartPole-v1, {workers} workers, {rounds} rounds, until the first reset")
    print_row("", "TorchRL", "ours, first", "ours, later")
    columns = [("TorchRL", 0), ("ours", 0), ("ours", 1)]
    cpu = [median_figure(*column, "cpu") for column in columns]
    private = [median_figure(*column, "private") for column in columns]
    print_row(
        "CPU, a worker", *(f"{value:.3f} s" for value in cpu), verdict=format_ratio(cpu[0] / max(cpu[1:]), CPU_TARGET)
    )
    print_row("CPU, a worker and its part of shared CPU", *(f"{cpu_with_shared(*column):.2f} s" for column in columns))
    print_row("wall time", *(f"{median_figure(*column, 'wall'):.2f} s" for column in columns))
    print_row(
        "private memory, a worker, after a rollout",
        *(f"{value:.1f} MiB" for value in private),
        verdict=format_ratio(private[0] / max(private[1:]), MEMORY_TARGET),
    )
    print_row("memory of all processes", *(f"{median_figure(*column, 'total'):.0f} MiB" for column in columns))


def many(rounds: int, workers: int) -> None:
    """Measure the memory of 32 workers, of this package's class alone."""
    total = median(run_once("start", "ours", MANY)[0]["total"] for _ in range(rounds))
    print(f"\nCartPole-v1, {MANY} workers")
    verdict = f"(≤ {MANY_TARGET_MIB:.0f} MiB){'' if total <= MANY_TARGET_MIB else '  missed'}"
    print_row("memory of all processes, after a rollout", "", f"{total:.0f} MiB", verdict=verdict)


def twenty(rounds: int, workers: int) -> None:
    """Measure seconds from the constructor to the end of the first reset of 20 workers, of this package's class."""
    print("\nstart of 20 workers, after imports")
    for name, target in TWENTY_TARGETS_S.items():
        starts = [run_once("start", "ours", 20, name) for _ in range(rounds)]
        first, later = (median(found[which]["wall"] for found in starts) for which in (0, 1))
        verdict = f"(≤ {target} s){'' if first <= target else '  missed'}"
        print_row(f"{name}, first and later", f"{first:.2f} s", f"{later:.2f} s", verdict=verdict)


def built(rounds: int, workers: int) -> None:
    """Count the environments that the parent process builds for two workers; it needs none."""
    print("\nenvironments built in the parent, for 2 workers")
    print_row("", *LIBRARIES)
    for form in ("a function", "a lambda", "two lambdas", "an instance"):
        counts = {
            library: _count_built(library, form)
            for library in LIBRARIES
            if (library, form) != ("TorchRL", "an instance")
        }
        verdict = "(0)" if counts["ours"] == 0 else "(0)  missed"
        print_row(form, str(counts.get("TorchRL", "refused")), str(counts["ours"]), verdict=verdict)
        if "TorchRL" in counts:
            print_row("  metadata_from_workers=True, use_buffers=False", str(_count_built("from workers", form)))


def _count_built(library: str, form: str) -> Any:
    """Count the environments that the parent process builds, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        return run_once("built", library, form, Path(folder, "processes"))


def steps(rounds: int, workers: int) -> None:
    """Measure milliseconds per step with two workers."""
    print(f"\nmilliseconds per step of 2 workers, {10 * rounds} rounds")
    print_row("", *LIBRARIES)
    for kind, label in (("CartPole", "CartPole"), ("busy", "CartPole that takes 2 ms")):
        seconds = {name: np.array(column) for name, column in run_once("steps", kind, 10 * rounds).items()}
        for ours, form in (("ours", "the same lambda"), ("ours, an instance", "an instance")):
            ratio = speedup(seconds, ours, baseline="TorchRL")
            columns = (f"{np.median(seconds[name]) * 1e3:.2f}" for name in ("TorchRL", ours))
            print_row(f"{label}, {form}", *columns, verdict=format_ratio(ratio, SPEED_TARGET))


def rates(rounds: int, workers: int) -> None:
    """Measure steps per second of all workers, against TorchRL's class with fork."""
    print(f"\nsteps per second of {workers} workers, {10 * rounds} rounds, against TorchRL's with fork")
    print_row("", *LIBRARIES)
    for kind, target in RATE_TARGETS.items():
        found = run_once("steps", kind, 10 * rounds, workers, "fork")
        seconds = {name: np.array(column) for name, column in found.items()}
        ratios = seconds["TorchRL"] / seconds["ours, an instance"]
        columns = (f"{workers / np.median(seconds[name]):,.0f}" for name in ("TorchRL", "ours, an instance"))
        low, high = np.percentile(ratios, [10, 90])
        print_row(kind, *columns, verdict=f"{format_ratio(float(np.median(ratios)), target)} [{low:.1f}, {high:.1f}]")


def failures(rounds: int, workers: int) -> None:
    """Measure seconds from a worker's failure to the exception, and print its first line."""
    print("\nseconds from a worker's failure to the exception, and its first line")
    for failure in ("raise", "SIGSEGV", "SIGKILL"):
        for library in LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    took, report, closed = run_once("failing", library, failure, Path(folder, "fails"), limit_s=LIMIT_S)
                except HangError:
                    print_row(f"{failure}, {library}", f"> {LIMIT_S} s")
                    continue
            print_row(f"{failure}, {library}", f"{took:.2f} s", verdict=report.splitlines()[0][:100])
            if isinstance(closed, str):
                print_row("    then close()", "", verdict=closed[:100])


def meltingpot(rounds: int, workers: int) -> None:
    """Measure the start of Melting Pot's workers, in ``.venv-meltingpot``."""
    if not MELTINGPOT.exists():
        print(f"\nMelting Pot: skipped, since {MELTINGPOT} does not exist. Run scripts/make_meltingpot_venv.sh")
        return
    line = run_module("benchmarks._meltingpot_startup", "--workers", workers, python=MELTINGPOT)
    print(f"\nMelting Pot, {workers} workers, until the first reset")
    meltingpot_table(json.loads(line))


def meltingpot_table(found: Mapping[str, Sequence[Any]]) -> None:
    """Print the results of ``benchmarks._meltingpot_startup``."""
    starts = [found["upstream"][0], found["ours"][0], found["ours"][1]]

    def means_of_workers(name: str) -> list[float]:
        """Return the workers' mean of a figure for each start."""
        return [float(np.mean(start["workers"][name])) for start in starts]

    cpu, private = means_of_workers("cpu_s"), means_of_workers("private_mib")
    print_row("", "TorchRL", "ours, first", "ours, later")
    print_row("CPU, a worker", *(f"{value:.2f} s" for value in cpu), verdict=f"{cpu[0] / max(cpu[1:]):6.2f}×")
    print_row("wall time", *(f"{start['wall_s']:.2f} s" for start in starts))
    print_row(
        "private memory, a worker",
        *(f"{value:.0f} MiB" for value in private),
        verdict=f"{private[0] / max(private[1:]):6.2f}×",
    )


PARTS: dict[str, Callable[[int, int], None]] = {
    part.__name__: part for part in (start, many, twenty, built, steps, rates, failures, meltingpot)
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_env", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options.rounds, options.workers)


if __name__ == "__main__":
    main()
