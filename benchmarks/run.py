"""All benchmarks whose figures README.md quotes, one after the other: ``make bench``.

The millions of transitions take an hour; ``--quick`` stores 100,000 of each game.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> None:
    """Run all benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="100,000 transitions a game instead of 1,000,000")
    size = "100000" if parser.parse_args().quick else "1000000"
    for line in (
        "benchmarks.replay_buffer",
        "benchmarks.replay_buffer --draws 1",
        "benchmarks.replay_buffer pong breakout mspacman seaquest montezuma --codec patch+lz4",
        f"benchmarks.memory --size {size}",
        f"benchmarks.memory --size {size} --codec patch+lz4",
        "benchmarks.memory seaquest --size 50000 --wraps 1",
        "benchmarks.memory seaquest --size 50000 --wraps 10",
        "benchmarks.buffer_family",
        "benchmarks.frame_storage ms_pacman seaquest --size 100000",
        "benchmarks.first_use",
        "benchmarks.lossy",
        f"benchmarks.disk --transitions {size}",
        "benchmarks.devices",
        "benchmarks.gym_wrapper",
        "benchmarks.parallel_env",
        "benchmarks.factories",
        "benchmarks.isolation",
        "benchmarks.vec_env",
        "benchmarks.gym_vec_env",
    ):
        print("\n$ python -m", line, flush=True)
        subprocess.run([sys.executable, "-m", *line.split()], check=True)


if __name__ == "__main__":
    main()
