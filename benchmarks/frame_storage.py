"""``FrameStorage`` against TorchRL's ``LazyTensorStorage``, ``LazyMemmapStorage`` and ``CompressedListStorage``.

    python -m benchmarks.frame_storage [game ...] [--size 200000] [--codec raw]

All storages get the same Atari transitions as in ``benchmarks.memory``, in batches of 64 steps per environment, as
collectors return them. Memory is the growth of a fresh process per transition. Times are CPU seconds of
``buffer.sample(batch_size)``, images included, with both storages taking turns in one process.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import CompressedListStorage, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from tqdm import tqdm

from benchmarks.measure import machine, resident_bytes, sampling_speedup
from benchmarks.memory import GAMES, N_ENVS, transitions
from benchmarks.processes import run_module
from torchrl_ext import FrameStorage

STEPS = 64  # Per environment and batch.
LAZY_SIZE = 20_000  # Transitions in LazyTensorStorage, which takes 56 KB for each.
BATCH = N_ENVS * STEPS
LIST_SIZE = 2_000  # Transitions in CompressedListStorage, which stores only 60 per second.


def batches(game: str, size: int, *, steps: int = STEPS) -> Iterator[TensorDict]:
    """Yield batches of transitions as collectors return them, one environment after the other.

    :param steps: Steps per environment and batch.
    """
    stream = transitions(game, steps=-(-size // (N_ENVS * steps)) * steps)
    while part := list(islice(stream, steps)):
        pixels, next_pixels, actions, rewards, done = (
            torch.from_numpy(np.stack(values, axis=1)).flatten(0, 1) for values in zip(*part, strict=True)
        )
        following = {"pixels": next_pixels, "reward": rewards.float()[:, None], "done": done[:, None]}
        yield TensorDict(
            {"pixels": pixels, "action": actions, "done": torch.zeros_like(done)[:, None], "next": following},
            batch_size=[len(pixels)],
        )


def storage(name: str, size: int) -> Any:
    """Make a storage by name: ``lazy``, ``memmap``, ``list``, or a codec of ``FrameStorage``."""
    if name in ("lazy", "memmap"):
        return LazyTensorStorage(size) if name == "lazy" else LazyMemmapStorage(size, auto_cleanup=True)
    return CompressedListStorage(size) if name == "list" else FrameStorage(size, codec=name, num_threads=1)


def make_filled_buffer(game: str, name: str, size: int) -> TensorDictReplayBuffer:
    """Return a buffer filled with ``size`` transitions."""
    buffer = TensorDictReplayBuffer(storage=storage(name, size))
    for batch in tqdm(batches(game, size), total=-(-size // BATCH), desc=f"{game} {name}", leave=False):
        buffer.extend(layout_for(name, batch))
    return buffer


def layout_for(name: str, batch: TensorDict) -> TensorDict:
    """Flatten a batch for ``CompressedListStorage``, which does not compress nested entries."""
    return batch.flatten_keys(".") if name == "list" else batch


def fill(game: str, name: str, size: int) -> None:
    """Fill a buffer; print the process's growth in bytes and the number of transitions."""
    warm = make_filled_buffer(game, name, BATCH)
    before = resident_bytes()
    buffer = make_filled_buffer(game, name, size)
    print(resident_bytes() - before, len(buffer), len(warm))


def bytes_per_transition(game: str, name: str, size: int) -> float:
    """Return the bytes per transition that :func:`fill` measures in a fresh process."""
    line = run_module("benchmarks.frame_storage", game, "--fill", name, "--size", size)
    grown, count, _ = map(int, line.split())
    return grown / count


def speed(game: str, baseline: str, codec: str, size: int, *, batch_size: int, draws: int, rounds: int) -> float:
    """Return the speedup of ``FrameStorage.sample`` over another storage."""
    pair = {name: TensorDictReplayBuffer(storage=storage(name, size)) for name in (baseline, codec)}
    for batch in batches(game, size):
        for name, buffer in pair.items():
            buffer.extend(layout_for(name, batch.clone()))
    return sampling_speedup(pair[codec], pair[baseline], batch_size, rounds=rounds, draws=draws)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frame_storage", description=main.__doc__)
    parser.add_argument("games", nargs="*", default=GAMES)
    parser.add_argument("--size", type=int, default=200_000, help="transitions in FrameStorage")
    parser.add_argument("--codec", default="patch")
    parser.add_argument("--fill", metavar="STORAGE", help="fill one storage in this process: lazy, list, or a codec")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    if options.fill:
        fill(options.games[0], options.fill, options.size)
        return
    print(machine())
    lazy = bytes_per_transition(options.games[0], "lazy", LAZY_SIZE)
    print(f"LazyTensorStorage: {lazy:,.0f} bytes per transition")
    print(f"{'':18} {'':>8} {'LazyTensorStorage':^26} {'LazyMemmapStorage':^17} {'CompressedListStorage':^21}")
    print(f"{'game':18} {'bytes':>8} {'memory':>8}{'     n=32    n=256' * 2} {'memory':>8} {'n=256':>8}")
    for game in options.games:
        ours = bytes_per_transition(game, options.codec, options.size)
        listed = bytes_per_transition(game, "list", LIST_SIZE)
        pairs = [(name, n) for name in ("lazy", "memmap") for n in (32, 256)]
        speeds = [speed(game, name, options.codec, LAZY_SIZE, batch_size=n, draws=10, rounds=30) for name, n in pairs]
        slow = speed(game, "list", options.codec, LIST_SIZE, batch_size=256, draws=1, rounds=5)
        ratios = [f"{lazy / ours:.0f}×", *(f"{s:.2f}×" for s in speeds), f"{listed / ours:.0f}×", f"{slow:.0f}×"]
        print(f"{game:18} {ours:8.0f} {' '.join(f'{ratio:>8}' for ratio in ratios)}", flush=True)


if __name__ == "__main__":
    main()
