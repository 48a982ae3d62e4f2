"""Slices of trajectories: ``FrameStorage`` and ``SliceSampler`` against TorchRL's classes.

    python -m benchmarks.slices [images] [additions] [--size 100000] [--games ms_pacman ...]

``images`` samples slices of Atari transitions with TorchRL's sampler, from ``FrameStorage`` and ``LazyTensorStorage``.
``additions`` samples 256 slices of length 4 after each addition of 500 low-dimensional steps. The ``LazyTensorStorage``
has room for 6 million steps and contains 5 million. TorchRL's sampler and ours take turns, both with cached values.
Times are medians of CPU time. Ratios have bootstrap 95 % intervals.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import numpy as np
import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tqdm import tqdm

from benchmarks.frame_storage import batches
from benchmarks.measure import format_ratio, machine, parse_options, ratio_interval, time_in_turns
from torchrl_ext import FrameStorage, SliceSampler

SHAPES = ((32, 8), (16, 64))  # Number of slices and their length.
STEPS = 500  # Steps per environment and batch, and of a low-dimensional episode.
STORED, CAPACITY = 5_000_000, 6_000_000
TARGET_SECONDS = 0.0048


def trajectory_ids(batch: TensorDict) -> torch.Tensor:
    """Number the trajectories of a batch, which ends those that continue in the next batch."""
    ends = batch["next", "done"].squeeze(-1).clone()
    ends[STEPS - 1 :: STEPS] = True
    return ends.cumsum(0) - ends.long()


def measure_images(game: str, size: int, *, rounds: int = 40) -> None:
    """Print the speedup of ``FrameStorage`` over ``LazyTensorStorage`` for each shape of slices."""
    storages = {"LazyTensorStorage": LazyTensorStorage(size), "FrameStorage": FrameStorage(size, num_threads=1)}
    buffers = {name: TensorDictReplayBuffer(storage=storage) for name, storage in storages.items()}
    n_trajectories = 0
    for batch in tqdm(batches(game, size, steps=STEPS), desc=game, leave=False):
        ids = trajectory_ids(batch) + n_trajectories
        n_trajectories = int(ids[-1]) + 1
        batch["collector", "traj_ids"] = ids
        for buffer in buffers.values():
            buffer.extend(batch.clone())
    for n_slices, slice_len in SHAPES:
        held: dict[str, Any] = {}

        def sample(name: str, batch_size: int = n_slices * slice_len, held: dict[str, Any] = held) -> None:
            """Sample a batch, which stays in memory until the next one."""
            held[name] = buffers[name].sample(batch_size)

        for buffer in buffers.values():
            buffer.set_sampler(torchrl.data.SliceSampler(slice_len=slice_len, traj_key=("collector", "traj_ids")))
        competitors = {name: lambda name=name: sample(name) for name in buffers}
        time_in_turns(competitors, rounds=3)
        seconds = time_in_turns(competitors, rounds=rounds, clock=time.thread_time)
        times = " ".join(f"{name} {np.median(part) * 1e3:6.2f} ms" for name, part in seconds.items())
        low, ratio, high = ratio_interval(seconds, "FrameStorage", baseline="LazyTensorStorage")
        verdict = f"{format_ratio(ratio, 2)} [{low:.2f}, {high:.2f}]"
        print(f"{game:18} {n_slices} slices of {slice_len:2}: {times} {verdict}", flush=True)


def make_steps(start: int, n: int) -> TensorDict:
    """Make (n,) low-dimensional steps of episodes of equal length."""
    numbers = torch.arange(start, start + n)
    done = (numbers % STEPS == STEPS - 1)[:, None]
    return TensorDict(
        {
            "obs": torch.randn(n, 24),
            "action": torch.randn(n, 6),
            "episode": numbers // STEPS,
            "next": {"reward": torch.randn(n, 1), "done": done},
        },
        batch_size=[n],
    )


def measure_additions(*, rounds: int = 40) -> None:
    """Print how long a sample takes after an addition, for both kinds of boundaries."""
    storage = LazyTensorStorage(CAPACITY)
    writer = ReplayBuffer(storage=storage)
    for start in tqdm(range(0, STORED, 100 * STEPS), desc="additions", leave=False):
        writer.extend(make_steps(start, 100 * STEPS))
    n_steps = STORED
    for key in ({"traj_key": "episode"}, {"end_key": ("next", "done")}):
        options: dict[str, Any] = {**key, "num_slices": 256, "truncated_key": None, "cache_values": True}
        samplers = {"torchrl": torchrl.data.SliceSampler(**options), "torchrl_ext": SliceSampler(**options)}
        # Both buffers share the storage: the writer's additions are marked in each of them.
        buffers = {name: ReplayBuffer(storage=storage, sampler=each) for name, each in samplers.items()}

        def extend() -> None:
            """Add an episode."""
            nonlocal n_steps
            writer.extend(make_steps(n_steps, STEPS))
            n_steps += STEPS

        competitors = {name: (lambda b=b: b.sample(1024)) for name, b in buffers.items()}
        time_in_turns(competitors, rounds=3, prepare=extend)
        seconds = time_in_turns(competitors, rounds=rounds, clock=time.thread_time, prepare=extend)
        times = {name: float(np.median(seconds[name])) for name in buffers}
        line = " ".join(f"{name} {value * 1e3:6.2f} ms" for name, value in times.items())
        verdict = "" if times["torchrl_ext"] <= TARGET_SECONDS else "  missed"
        low, ratio, high = ratio_interval(seconds, "torchrl_ext", baseline="torchrl")
        verdict += f" {format_ratio(ratio, None)} [{low:.2f}, {high:.2f}]"
        print(f"{next(iter(key)):18} {line} (≤ {TARGET_SECONDS * 1e3:.1f} ms){verdict}", flush=True)


def main() -> None:
    """Measure and print a line per case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=main.__doc__)
    parser.add_argument("--size", type=int, default=100_000, help="transitions with images")
    parser.add_argument("--games", nargs="+", default=["ms_pacman", "seaquest"])
    options = parse_options(parser, ("images", "additions"))
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    print(machine())
    if "additions" in options.names:
        measure_additions()
    if "images" in options.names:
        for game in options.games:
            measure_images(game, options.size)


if __name__ == "__main__":
    main()
