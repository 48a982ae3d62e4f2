"""Time of a save of `ResumeCallback`, and of `resume`.

    python -m benchmarks.resume [--size 1000000] [--recording pong] [--buffer CompressedReplayBuffer] [--files]

The replay buffer of a DQN is filled with recorded frames, and saved once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, record
from sb3_ext import CompressedReplayBuffer, ResumeCallback, resume

BUFFERS = {cls.__name__: cls for cls in (CompressedReplayBuffer, ReplayBuffer)}


class Blank(gymnasium.Env):
    """Environment with the spaces of a recording, which returns zeros."""

    def __init__(self, observation_space: gymnasium.spaces.Box, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return zeros."""
        return np.zeros(self.observation_space.shape, np.uint8), 0.0, False, False, {}


class TimedCallback(ResumeCallback):
    """Callback that measures its saves."""

    seconds = 0.0

    def _on_rollout_start(self) -> None:
        start = time.perf_counter()
        super()._on_rollout_start()
        self.seconds = max(self.seconds, time.perf_counter() - start)


def fill(buffer: Any, recording: Any) -> None:
    """Fill a buffer with the transitions of a recording."""
    with tqdm(total=buffer.buffer_size, desc="filling", leave=False) as bar:
        while not buffer.full:
            for transition in recording.transitions():
                buffer.add(*transition)
                bar.update(1)
                if buffer.full:
                    break


def measure(buffer_name: str, recording_name: str, size: int, *, files: bool) -> dict[str, float]:
    """Return seconds of a save and of resuming, and megabytes of the save.

    :param files: whether the buffer is stored in files
    """
    recording = recordings.load(recording_name)

    def build_env() -> DummyVecEnv:
        return DummyVecEnv([lambda: Blank(recording.observation_space, recording.action_space)] * 2)

    with tempfile.TemporaryDirectory() as folder:
        model = DQN(
            "MlpPolicy",
            build_env(),
            buffer_size=size,
            learning_starts=10 * size,
            replay_buffer_class=BUFFERS[buffer_name],
            replay_buffer_kwargs={"storage_dir": f"{folder}/buffer"} if files else None,
            policy_kwargs={"net_arch": [8], "normalize_images": False},
        )
        fill(model.replay_buffer, recording)
        callback = TimedCallback(f"{folder}/saves", every=100)
        model.learn(150, callback=callback)
        megabytes = sum(path.stat().st_size for path in Path(folder, "saves").rglob("*") if path.is_file()) / 1e6
        if files:
            model.replay_buffer.close()
        del model
        env = build_env()
        start = time.perf_counter()
        resumed = resume(f"{folder}/saves", env)
        seconds = time.perf_counter() - start
        if files:
            resumed.replay_buffer.close()
        return {"save": callback.seconds, "resume": seconds, "megabytes": megabytes}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=main.__doc__)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--recording", default="pong")
    parser.add_argument("--buffer", choices=sorted(BUFFERS), default="CompressedReplayBuffer")
    parser.add_argument("--files", action="store_true", help="store the buffer in files, with storage_dir")
    options = parser.parse_args()
    th.set_num_threads(1)
    print(machine())
    found = measure(options.buffer, options.recording, options.size, files=options.files)
    print(
        f"{options.buffer}, {options.size:,} transitions: save {found['save']:.2f} s, resume {found['resume']:.2f} s, "
        f"{found['megabytes']:.0f} MB"
    )
    record("resume", f"{options.buffer} {options.size}{' files' if options.files else ''}", **found)


if __name__ == "__main__":
    main()
