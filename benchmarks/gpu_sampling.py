"""``sample()`` onto a GPU: ``CompressedReplayBuffer(decode_on_gpu=True)`` against Stable Baselines3's buffer.

    python -m benchmarks.gpu_sampling [pong] [--batch-size 256] [--draws 10] [--rounds 100] [--transitions 1000000]

All buffers contain the same recorded transitions, in main memory. They take turns in one process, and each draws ten
batches in a row, as in ``benchmarks.replay_buffer``. The clock stops when all observations are on the GPU. Ratios are
medians, with a 95 % interval. ``--transitions`` is the size of one more buffer, which repeats the recording, to measure
its memory.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks import recordings
from benchmarks.measure import (
    format_ratio,
    machine,
    make_sampler,
    ratio_interval,
    record,
    synchronized_time,
    time_in_turns,
)
from sb3_ext import CompressedReplayBuffer

OURS, HOST, THEIRS = "decode_on_gpu=True", "decoded on the CPU", "SB3's ReplayBuffer"
TARGETS = {HOST: 2.0, THEIRS: 5.0}


def fill(make: Callable[..., Any], recording: Any, n_transitions: int, **options: Any) -> Any:
    """Create a buffer, and add transitions, repeating the recording if it is too short."""
    first = next(iter(recording.transitions()))
    n_envs = len(first[0])
    buffer = make(
        n_transitions, recording.observation_space, recording.action_space, device="cuda", n_envs=n_envs, **options
    )
    laps = itertools.chain.from_iterable(recording.transitions() for _ in itertools.count())
    for transition in itertools.islice(laps, n_transitions // n_envs):
        buffer.add(*transition)
    return buffer


def check_equal(buffers: dict[str, Any], batch_size: int) -> None:
    """Raise an error if samples with the same seed differ."""
    found = []
    for buffer in buffers.values():
        np.random.seed(0)
        found.append(buffer.sample(batch_size))
    for other in found[1:]:
        for left, right in zip(found[0], other, strict=True):
            assert left is right is None or torch.equal(left, right)


def measure(name: str, options: argparse.Namespace) -> None:
    """Measure a recording, and print a table."""
    recording = recordings.load(name)
    n = recording.n_transitions
    buffers = {
        OURS: fill(CompressedReplayBuffer, recording, n, decode_on_gpu=True),
        HOST: fill(CompressedReplayBuffer, recording, n),
        THEIRS: fill(ReplayBuffer, recording, n),
    }
    for batch_size in (32, options.batch_size):
        for _ in range(5):
            check_equal(buffers, batch_size)
        competitors = {key: make_sampler(buffer, batch_size, options.draws) for key, buffer in buffers.items()}
        seconds = time_in_turns(competitors, rounds=options.rounds, clock=synchronized_time)
        print(f"\n{name}: {n:,} transitions, sample({batch_size}), samples are equal")
        for key, found in seconds.items():
            line = f"{key:24}{np.median(found) * 1e3 / options.draws:>10.3f} ms"
            if key != OURS:
                low, ratio, high = ratio_interval(seconds, OURS, baseline=key)
                line += f"  {format_ratio(ratio, TARGETS[key])} [{low:.1f}, {high:.1f}]"
                record("gpu_sampling", f"{name}, {batch_size}, {key}", ratio=ratio, low=low, high=high)
            record(
                "gpu_sampling",
                f"{name}, {batch_size}, {key} ms",
                milliseconds=float(np.median(found)) * 1e3 / options.draws,
            )
            print(line)


def measure_memory(name: str, options: argparse.Namespace) -> None:
    """Measure the memory of a large buffer, in the host and in the GPU."""
    buffer = fill(CompressedReplayBuffer, recordings.load(name), options.transitions, decode_on_gpu=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):
        samples = buffer.sample(options.batch_size)
    peak, batch = torch.cuda.max_memory_allocated(), 2 * samples.observations.nbytes
    print(
        f"\n{name}: {options.transitions:,} transitions take {buffer.stored_nbytes / 1e9:.3f} GB in the host; "
        f"at most {peak / 1e9:.3f} GB in the GPU while sampling batches of {batch / 1e9:.3f} GB"
    )
    record("gpu_sampling", f"{name}, memory", host_gb=buffer.stored_nbytes / 1e9, gpu_gb=peak / 1e9)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_sampling", description=main.__doc__)
    parser.add_argument("names", nargs="*", default=["pong"], metavar="recording")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--draws", type=int, default=10, help="batches in a row")
    parser.add_argument("--transitions", type=int, default=1_000_000)
    options = parser.parse_args()
    print(f"{machine()}, {torch.cuda.get_device_name()}")
    for name in options.names:
        measure(name, options)
    measure_memory(options.names[0], options)


if __name__ == "__main__":
    main()
