"""``sample_sequences()`` against single transitions, and against the same steps of SB3's uncompressed ``ReplayBuffer``.

    python -m benchmarks.sequences [recording ...] [--codec raw]

The buffers contain the same recorded transitions, in one process, and take turns. SB3 has no sequences, so its column
indexes the arrays: ``buffer.observations[rows, envs]``, and the same for all other fields. It does not look for the
ends of episodes. Times are CPU seconds of the calling thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, record, speedup, time_in_turns
from sb3_ext import CompressedReplayBuffer

GAMES = ("pong", "breakout", "mspacman")
SHAPES = ((1, 64), (16, 32))  # sequences per batch, and steps per sequence
HEADER = f"{'recording':12} {'codec':12} {'batch':>7} {'sample(n)':>10} {'n × sample(1)':>14} {'SB3 arrays':>11}"


def _index_arrays(buffer: ReplayBuffer, batch_size: int, length: int) -> tuple[th.Tensor, ...]:
    """Return sequences of an uncompressed buffer, which may cross the ends of episodes."""
    rows = np.random.randint(0, buffer.size() - length, size=(batch_size, 1)) + np.arange(length)
    envs = np.random.randint(0, buffer.n_envs, size=(batch_size, 1))
    arrays = (buffer.observations, buffer.actions, buffer.next_observations, buffer.dones, buffer.rewards)
    return tuple(buffer.to_torch(array[rows, envs]) for array in arrays)


def _sample_singly(buffer: CompressedReplayBuffer, n: int) -> list[Any]:
    """Return ``n`` batches of one transition."""
    return [buffer.sample(1) for _ in range(n)]


def _keep(kept: dict[str, Any], name: str, draw: Callable[[], Any]) -> None:
    """Draw a batch, and keep it instead of the previous one."""
    kept[name] = draw()


def measure(name: str, *, codec: str, rounds: int, steps: int | None) -> list[str]:
    """Measure one recording, and return rows of the table."""
    recording = recordings.load(name, steps=steps)
    arguments = (len(recording) * 2, recording.observation_space, recording.action_space)
    plain = ReplayBuffer(*arguments, device="cpu", n_envs=2)
    options = {"codec": codec, "num_threads": 1}
    ours = CompressedReplayBuffer(*arguments, device="cpu", n_envs=2, **options)
    for transition in recording.transitions():
        plain.add(*transition)
        ours.add(*transition)
    rows, kept = [], dict[str, Any]()  # each batch stays in memory until the next one is drawn, as in training
    for batch_size, length in SHAPES:
        n = batch_size * length
        draws: dict[str, Callable[[], Any]] = {
            "sequences": partial(ours.sample_sequences, batch_size, length),
            "batch": partial(ours.sample, n),
            "singles": partial(_sample_singly, ours, n),
            "plain": partial(_index_arrays, plain, batch_size, length),
        }
        competitors = {which: partial(_keep, kept, which, draw) for which, draw in draws.items()}
        time_in_turns(competitors, rounds=3)
        seconds = time_in_turns(competitors, rounds=rounds, clock=time.thread_time)
        speeds = [speedup(seconds, "sequences", baseline=other) for other in ("batch", "singles", "plain")]
        if codec == "patch":
            figures = dict(zip(("batch", "singles", "plain"), speeds, strict=True))
            record("sequences", f"{name} {batch_size}x{length}", **figures)
        columns = " ".join(f"{speed:{width}.2f}×" for speed, width in zip(speeds, (9, 13, 10), strict=True))
        rows.append(f"{name:12} {ours.codec:12} {f'{batch_size}×{length}':>7} {columns}")
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequences", description=main.__doc__)
    parser.add_argument("names", nargs="*", default=[*GAMES])
    parser.add_argument("--codec", default="patch")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, help="steps of 2 transitions each, from the start (default: all)")
    options = parser.parse_args()
    th.set_num_threads(1)
    print(machine())
    print(
        "batch: sequences × steps; then the speedup of sample_sequences() over sample() of as many transitions in one\n"
        "batch, over the same one at a time, and over the same number of steps of SB3's uncompressed arrays"
    )
    print(HEADER)
    for name in tqdm(options.names, leave=False):
        for row in measure(name, **{key: value for key, value in vars(options).items() if key != "names"}):
            tqdm.write(row)


if __name__ == "__main__":
    main()
