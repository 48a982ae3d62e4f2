"""``sample()`` and ``add()`` of ``CompressedReplayBuffer`` against SB3's ``ReplayBuffer``.

    python -m benchmarks.replay_buffer [recording ...] [--codec raw] [--draws 1]

Both buffers contain the same recorded transitions, in one process, and take turns. ``add()`` is measured while the ring
is filled for the first time, and when it is full, as in most of a long training. Times are CPU seconds of the calling
thread. The column with two threads is wall clock, which needs an idle machine.

Each competitor draws ten batches in a row, and keeps each batch until the next is drawn, as in training. With
``--draws 1`` they alternate after every batch, so that each finds the other's frames in the caches.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, record, sampling_speedup, speedup
from benchmarks.replay import Recording
from sb3_ext import CompressedReplayBuffer

GAMES = ("pong", "breakout", "mspacman", "seaquest", "montezuma")
POLICIES = ("pong-random", "pong-scripted", "breakout-scripted")
NATURAL = (
    "mujoco-cheetah",
    "mujoco-walker",
    "mujoco-cheetah-track",
    "mujoco-walker-track",
    "vizdoom",
    "vizdoom-corridor",
)
DRAWS = 600  # Per competitor.
STEPS = 100  # Part of a lap; long enough that blocks are filled and freed in each part.
HEADER = (
    f"{'recording':18} {'codec':10} {'bytes':>7} {'full':>6} {'memory':>7} {'n=32':>6} {'n=256':>6} {'2 thr.':>6} "
    f"{'1st lap':>7} {'full':>6}"
)


def _time_lap(recording: Recording, buffers: dict[str, ReplayBuffer]) -> dict[str, np.ndarray]:
    """Add the recording to all buffers in turn, and return the seconds per ``STEPS`` steps."""
    seconds: dict[str, list[float]] = {name: [] for name in buffers}
    for turn, transition in enumerate(recording.transitions()):
        for name in list(buffers) if turn % 2 else list(reversed(buffers)):
            start = time.thread_time()
            buffers[name].add(*transition)
            seconds[name].append(time.thread_time() - start)
    whole = len(recording) // STEPS * STEPS
    return {name: np.array(values[:whole]).reshape(-1, STEPS).sum(1) for name, values in seconds.items()}


def measure(name: str, *, codec: str, draws: int, steps: int | None = None) -> str:
    """Measure one recording, and return a row of the table."""
    recording = recordings.load(name, steps=steps)
    arguments = (len(recording) * 2, recording.observation_space, recording.action_space)
    plain = ReplayBuffer(*arguments, device="cpu", n_envs=2)
    options = {"codec": codec, "num_threads": 1}
    ours = CompressedReplayBuffer(*arguments, device="cpu", n_envs=2, **options)
    # The first lap fills both buffers, and allocates SB3's pages one by one. The second lap overwrites old transitions.
    laps, stored = [], []
    for _ in range(2):
        laps.append(_time_lap(recording, {"plain": plain, "ours": ours}))
        stored.append(ours.stored_nbytes / recording.n_transitions)
    turns = {"rounds": DRAWS // draws, "draws": draws}
    speeds = [sampling_speedup(ours, plain, size, **turns) for size in (32, 256)]
    ours._observations.num_threads = 2
    speeds.append(sampling_speedup(ours, plain, 256, **turns, clock=time.perf_counter))
    adds = [speedup(seconds, "ours", baseline="plain") for seconds in laps]

    row_bytes = plain.actions.itemsize * plain.action_dim + 12
    plain_bytes = 2 * plain.observations[0, 0].nbytes + row_bytes
    columns = " ".join(f"{speed:5.2f}×" for speed in speeds) + f" {adds[0]:6.2f}× {adds[1]:5.2f}×"
    if draws == 10 and codec == "patch":
        figures = {"sample_32": speeds[0], "sample_256": speeds[1], "threads_256": speeds[2], "add": adds[0]}
        record("replay_buffer", name, bytes=stored[0], plain_bytes=plain_bytes, add_full=adds[1], **figures)
    memory = f"{stored[0]:7.0f} {stored[1]:6.0f} {plain_bytes / stored[0]:6.0f}×"
    return f"{name:18} {ours.codec:10} {memory} {columns}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_buffer", description=main.__doc__)
    parser.add_argument("names", nargs="*", default=[*GAMES, *POLICIES, *NATURAL])
    parser.add_argument("--codec", default="patch")
    parser.add_argument("--draws", type=int, default=10, help="batches in a row")
    parser.add_argument("--steps", type=int, help="steps of 2 transitions each, from the start (default: all)")
    options = parser.parse_args()
    th.set_num_threads(1)
    print(machine())
    print(
        "bytes: per transition, by nbytes; full: the same once the ring is full, with up to 2 MB of freed blocks;\n"
        "memory: SB3's bytes over these in the first lap (benchmarks.memory measures RSS); then the speedup over SB3:\n"
        "sample(32), sample(256), sample(256) in 2 threads by wall clock, add() in the first lap, and add() with\n"
        f"full buffers, in parts of {STEPS} steps"
    )
    print(HEADER)
    for name in tqdm(options.names, leave=False):
        tqdm.write(measure(name, **{key: value for key, value in vars(options).items() if key != "names"}))


if __name__ == "__main__":
    main()
