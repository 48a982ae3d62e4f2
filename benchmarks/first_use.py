"""Seconds of a process's first buffer with an empty numba cache against a filled one.

    python -m benchmarks.first_use

An empty cache means that the loops are compiled. Each figure is measured in a fresh process. Imports (Stable
Baselines3, torch) do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.measure import machine

SCRIPT = """
import sys, time
import numpy as np
from gymnasium import spaces
from sb3_ext import CompressedReplayBuffer
start = time.perf_counter()
space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
buffer = CompressedReplayBuffer(1000, space, spaces.Discrete(4), **eval(sys.argv[1]))
frames = np.zeros((300, 84, 84), np.uint8)
frames[np.arange(300), np.arange(300) % 84] = np.arange(300, dtype=np.uint8)[:, None]
for at in range(295):
    before, after = frames[None, at : at + 4], frames[None, at + 1 : at + 5]
    buffer.add(before, after, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
buffer.sample(32)
print(time.perf_counter() - start)
"""
OPTIONS: dict[str, dict[str, object]] = {"default": {}, "max_error=4": {"max_error": 4}}


def seconds(options: dict[str, object], cache: str) -> float:
    """Return the seconds of making and using a buffer in a new process, with this cache."""
    command = [sys.executable, "-c", SCRIPT, repr(options)]
    environ = {**os.environ, "NUMBA_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    return float(subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Measure the default and a bounded error, and print a table."""
    print(machine())
    print(f"{'options':<14} {'first ever':>10} {'then':>8}")
    for name, options in OPTIONS.items():
        with tempfile.TemporaryDirectory() as cache:
            first, then = seconds(options, cache), seconds(options, cache)
        print(f"{name:<14} {first:8.1f} s {then:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
