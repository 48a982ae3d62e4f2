"""Prioritized sampling against uniform sampling of the same buffer.

    python -m benchmarks.prioritized [--size 1000000] [--recording pong]

One buffer is filled with recorded frames, and has random priorities. Its uniform and its prioritized ``sample()`` take
turns, in CPU seconds of the calling thread. The last figure is a whole gradient step of DQN with a small network on
vectors, where the overhead is largest.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch as th
from stable_baselines3 import DQN
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, record, speedup, time_in_turns
from sb3_ext import CompressedPrioritizedReplayBuffer, CompressedReplayBuffer

ROUNDS = 2000
TARGET = 1.3  # at most this many times the time of uniform sampling


def fill(recording_name: str, size: int) -> CompressedPrioritizedReplayBuffer:
    """Return a full buffer of recorded transitions with random priorities."""
    recording = recordings.load(recording_name)
    spaces = recording.observation_space, recording.action_space
    buffer = CompressedPrioritizedReplayBuffer(size, *spaces, device="cpu", n_envs=2, num_threads=1)
    with tqdm(total=size, desc="filling", leave=False) as bar:
        while not buffer.full:
            for transition in recording.transitions():
                buffer.add(*transition)
                bar.update(2)
                if buffer.full:
                    break
    generator = np.random.default_rng(0)
    for _ in range(size // 256):  # on average, each transition once
        buffer.sample(256)
        buffer.update_priorities(generator.exponential(size=256))
    return buffer


def measure_sampling(buffer: CompressedPrioritizedReplayBuffer, batch_size: int) -> dict[str, float]:
    """Return the microseconds of both kinds of sampling and of an update, and the ratio."""
    competitors = {
        "uniform": lambda: CompressedReplayBuffer.sample(buffer, batch_size),
        "prioritized": lambda: buffer.sample(batch_size),
    }
    errors = np.random.default_rng(1).exponential(size=(ROUNDS, batch_size))
    time_in_turns(competitors, rounds=20)
    seconds = time_in_turns(competitors, rounds=ROUNDS, clock=time.thread_time)
    ratio = 1 / speedup(seconds, "prioritized", baseline="uniform")
    updates = []
    for row in errors:
        buffer.sample(batch_size)
        start = time.thread_time()
        buffer.update_priorities(row)
        updates.append(time.thread_time() - start)
    medians = {name: 1e6 * float(np.median(values)) for name, values in seconds.items()}
    return {**medians, "update": 1e6 * float(np.median(updates)), "ratio": ratio}


def measure_gradient_step() -> float:
    """Return the time of DQN's gradient step with priorities, as a multiple of that without."""
    models = {}
    for cls in (CompressedReplayBuffer, CompressedPrioritizedReplayBuffer):
        model = DQN("MlpPolicy", "CartPole-v1", buffer_size=20_000, learning_starts=1000, replay_buffer_class=cls)
        models[cls.__name__] = model.learn(1000)
    steps = {name: lambda model=model: model.train(10, batch_size=32) for name, model in models.items()}
    time_in_turns(steps, rounds=5)
    seconds = time_in_turns(steps, rounds=60, clock=time.thread_time)
    return 1 / speedup(seconds, "CompressedPrioritizedReplayBuffer", baseline="CompressedReplayBuffer")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prioritized", description=main.__doc__)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--recording", default="pong")
    options = parser.parse_args()
    th.set_num_threads(1)
    print(machine())
    buffer = fill(options.recording, options.size)
    print(f"{options.size:,} transitions of {options.recording}; microseconds of sample(n) and of update_priorities()")
    for batch_size in (32, 256):
        found = measure_sampling(buffer, batch_size)
        missed = f" (target {TARGET})" if found["ratio"] > TARGET else ""
        print(
            f"n={batch_size:<4} uniform {found['uniform']:6.0f}  prioritized {found['prioritized']:6.0f}  "
            f"ratio {found['ratio']:.2f}{missed}  update {found['update']:5.0f}"
        )
        record("prioritized", f"{options.recording} n={batch_size}", **found)
    step = measure_gradient_step()
    print(f"gradient step of DQN on CartPole: {step:.2f} times that of uniform replay")
    record("prioritized", "gradient step", ratio=step)


if __name__ == "__main__":
    main()
