"""The field's own benchmarks, in their settings, with this package as one more competitor.

    python -m benchmarks.field [buffers start pixels train save] [--rounds 30] [--large]

Competitors take turns in one process. Each ratio is the median over rounds, with a bootstrap 95 % interval. Competitors
that are not installed are named and left out. They are not requirements of this project:
``pip install cpprb flashbax "sb3-extra-buffers[fast]"``. Reverb needs Python 3.11 or older, and replaces NumPy 2,
so it gets a virtual environment: ``pip install dm-reverb "tensorflow-cpu~=2.15.0"``.

- ``buffers``: replay buffers of several libraries, in :mod:`benchmarks.field_buffers`
- ``start``: TorchRL's ``benchmark_parallel_env_startup.py``
- ``pixels``: TorchRL's ``test_collectors_benchmark.py``, series ``test_async_collection_pixels``
- ``train``, ``save``: pages of sb3-extra-buffers, in :mod:`benchmarks.field_training`
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.envs import ParallelEnv
from torchrl.modules import MLP, ConvNet, QValueActor

import torchrl_ext
from benchmarks import _field_environments as worlds
from benchmarks import field_training
from benchmarks.field_buffers import buffers
from benchmarks.measure import OURS, machine, parse_options, show_ratios, time_in_turns
from benchmarks.processes import run_module
from rl_ext_core.vector import SharedMemoryVectorEnv

show = functools.partial(show_ratios, "field")


def show_each(track: str, seconds: dict[str, np.ndarray], **options: Any) -> None:
    """Print the ratios of each of our competitors to those of others, with options of :func:`show_ratios`."""
    ours = [name for name in seconds if name.startswith(OURS)]
    for name in ours:
        found = {other: times for other, times in seconds.items() if other == name or other not in ours}
        show(f"{track}: {name}", found, **options)


def start(rounds: int, large: bool) -> None:
    """Measure the start of ParallelEnv with workers that take time to build, until the first reset."""
    for workers, delay in ((20, 0.01), *([(80, 0.01), (20, 0.1)] if large else [])):
        found: dict[str, list[float]] = {name: [] for name in worlds.STARTS}
        for turn in range(max(3, rounds // 10)):
            for name in list(found) if turn % 2 else list(reversed(found)):
                found[name].append(float(run_module("benchmarks._field_environments", name, workers, delay)))
        seconds = {name: np.array(values) for name, values in found.items()}
        show_each(f"start: {workers} workers, {delay} s each", seconds, scale=1, unit="s")


class Scale(nn.Module):
    """Conversion of pixels to floats from 0 to 1."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Convert (..., 3, 84, 84) uint8."""
        return frames.float() / 255


def make_pixel_policy(spec: Any) -> Any:
    """Return a policy on pixels: a convolutional network and two layers of 256."""
    torch.manual_seed(0)
    features = ConvNet(num_cells=(32, 64, 64), kernel_sizes=(8, 4, 3), strides=(4, 2, 1))
    network = nn.Sequential(Scale(), features, MLP(out_features=4, num_cells=[256, 256]))
    return QValueActor(network, in_keys=["pixels"], spec=spec)


def pixels(rounds: int, large: bool) -> None:
    """Measure frames per second of a collector with 8 processes of 3×84×84 pixels, 1 ms a step.

    In the second setting, episodes have 16 steps, and a reset of the first environment takes 200 ms more. TorchRL's
    asynchronous collector then returns more frames of the other environments. The others return equally many of all.
    """
    torch.set_num_threads(1)
    for slow in (False, True):
        env_fns = [functools.partial(worlds.make_pixels, slow=slow, index=index) for index in range(8)]
        plain_fns = [functools.partial(worlds.make_plain_pixels, slow=slow, index=index) for index in range(8)]
        policy = make_pixel_policy(worlds.make_pixels().action_spec)
        for size in (256, 1024):
            vectorized = SharedMemoryVectorEnv(plain_fns, autoreset_mode="SameStep")
            collectors: dict[str, Any] = {
                name: Collector(env, policy, frames_per_batch=size, total_frames=-1)
                for name, env in (
                    ("TorchRL ParallelEnv", ParallelEnv(8, env_fns)),
                    ("ours, ParallelEnv", torchrl_ext.ParallelEnv(8, env_fns)),
                    ("ours, SharedMemoryVectorEnv", torchrl_ext.GymWrapper(vectorized)),
                )
            }
            collectors["TorchRL async-shm"] = AsyncBatchedCollector(
                env_fns,
                policy=policy,
                frames_per_batch=size,
                env_backend="multiprocessing",
                env_exchange="shm",
                transport="driver",
                max_batch_size=8,
                server_timeout=0.001,
            )
            batches = {name: iter(collector) for name, collector in collectors.items()}
            runs = {name: functools.partial(next, each) for name, each in batches.items()}
            time_in_turns(runs, rounds=2)
            name = f"pixels{', slow resets' if slow else ''}: batch of {size} frames"
            show_each(name, time_in_turns(runs, rounds=max(5, rounds // 3)))
            for collector in collectors.values():
                collector.shutdown()


TRACKS: dict[str, Callable[[int, bool], None]] = {
    track.__name__: track for track in (buffers, start, pixels, field_training.train, field_training.save)
}


def main() -> None:
    """Measure the tracks, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--large", action="store_true", help="also the largest settings, which take minutes")
    options = parse_options(parser, TRACKS, metavar="track")
    print(machine())
    for name in options.names:
        begin = time.monotonic()
        TRACKS[name](options.rounds, options.large)
        print(f"({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
