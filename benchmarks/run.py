"""Run all benchmarks whose figures the documentation quotes (``make bench``).

    python -m benchmarks.run [--quick] [--again] [NAME ...]

The output of each is stored in ``benchmarks/results``, with the machine and the duration. An interrupted run continues
after the last benchmark that finished. At the end, all figures that missed their targets are listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import RESULTS, machine

# Commands, and their minutes on 2 cores, for the estimate of the total time.
COMMANDS: dict[str, float] = {
    "replay_buffer": 14,
    "replay_buffer --draws 1": 14,
    "prioritized": 8,
    "sequences": 3,
    "resume": 5,
    "crashes": 4,
    "killed_runs": 7,
    "episode_log": 2,
    "memory --size {size}": 45,
    "memory seaquest --size 50000 --wraps 1": 1,
    "memory seaquest --size 50000 --wraps 10": 4,
    "buffer_family": 20,
    "frame_storage ms_pacman seaquest pong breakout --size 100000": 15,
    "recipes": 12,
    "slices": 8,
    "first_use": 3,
    "lossy": 20,
    "disk --transitions {size}": 10,
    "datasets": 15,
    "devices": 1,
    "gym_wrapper": 15,
    "parallel_env": 5,
    "copies": 40,
    "isolation": 3,
    "vec_env": 12,
    "gym_vec_env": 1,
    "tensor": 8,
}


def result_path(command: str) -> Path:
    """Return the path of a command's stored output."""
    words = "".join(letter if letter.isalnum() else " " for letter in command).split()
    return RESULTS / f"{'-'.join(words)}.run.json"


def run(command: str, show: Callable[[str], object]) -> dict[str, Any]:
    """Run a benchmark, show its lines as they are printed, and store them."""
    started = time.monotonic()
    program = [sys.executable, "-u", "-m", *f"benchmarks.{command}".split()]
    lines = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            show(line.rstrip("\n"))
            lines.append(line.rstrip("\n"))
    if process.returncode:
        raise SystemExit(
            f"python -m benchmarks.{command} exited with {process.returncode}. Run the same command to continue here."
        )
    minutes = (time.monotonic() - started) / 60
    found = {"command": command, "machine": machine(), "minutes": round(minutes, 1), "lines": lines}
    RESULTS.mkdir(exist_ok=True)
    result_path(command).write_text(json.dumps(found, indent=1, ensure_ascii=False))
    return found


def main() -> None:
    """Run all benchmarks that have no results from this machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="replay_buffer, vec_env, … (default: all)")
    parser.add_argument("--quick", action="store_true", help="100,000 transitions per game instead of 1,000,000")
    parser.add_argument("--again", action="store_true", help="also run benchmarks that have results")
    options = parser.parse_args()
    known = {command.split()[0] for command in COMMANDS}
    if not set(options.names) <= known:
        parser.error(f"choose from {', '.join(sorted(known))}")
    size = "100000" if options.quick else "1000000"
    todo = {
        command.format(size=size): minutes / 10 if options.quick and "{size}" in command else minutes
        for command, minutes in COMMANDS.items()
        if not options.names or command.split()[0] in options.names
    }
    results: dict[str, dict[str, Any]] = {}
    for command in todo:
        if not options.again and result_path(command).exists():
            before = json.loads(result_path(command).read_text())
            if before["machine"] == machine():
                results[command] = before
    left = {command: minutes for command, minutes in todo.items() if command not in results}
    print(f"{machine()}: finished: {len(results)}, to run: {len(left)}, about {sum(left.values()):.0f} minutes")
    with tqdm(total=round(sum(left.values())), unit="min", disable=not left) as progress:
        for command, minutes in left.items():
            tqdm.write(f"\n$ python -m benchmarks.{command}")
            results[command] = run(command, tqdm.write)
            progress.update(round(minutes))
    missed = [(name, line) for name, found in results.items() for line in found["lines"] if "missed" in line]
    print(f"\nfigures that missed their targets: {len(missed)}")
    for name, line in missed:
        print(f"  {name.split()[0]:16}{line.strip()}")


if __name__ == "__main__":
    main()
