"""All benchmarks whose figures README.md quotes, one after the other: ``make bench``.

The million transitions of each game take half an hour; ``--quick`` stores 100,000.
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
    for arguments in (
        ["benchmarks.replay_buffer"],
        [
            "benchmarks.replay_buffer",
            "pong",
            "breakout",
            "mspacman",
            "seaquest",
            "montezuma",
            "--codec",
            "patch+lz4",
        ],
        ["benchmarks.memory", "--size", size],
        ["benchmarks.memory", "--size", size, "--codec", "patch+lz4"],
    ):
        print("\n$ python -m", *arguments, flush=True)
        subprocess.run([sys.executable, "-m", *arguments], check=True)


if __name__ == "__main__":
    main()
