"""Memory, time and PSNR of lossy and lossless compression against SB3's ``ReplayBuffer``.

    python -m benchmarks.lossy [recording ...] [--data FOLDER] [--estimates]

Observations are stacks of three RGB frames of 100×100. The recordings are HalfCheetah and Walker2d with a fixed camera
and with one that follows the robot, and two levels of ViZDoom. Memory is the growth of a fresh process per transition;
the recording is repeated until the growth is large enough to measure. Times are CPU seconds of one thread, with both
buffers taking turns in one process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, resident_bytes, sampling_speedup, speedup
from benchmarks.processes import run_module
from benchmarks.replay_buffer import GAMES, NATURAL
from rl_ext_core.frames.planning import measure_transitions
from sb3_ext import CompressedReplayBuffer

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "error 4": {"max_error": 4},
    "jpeg, quality 95": {"codec": "jpeg"},
}
# SB3's buffer gets the recording once, the other buffers until they have grown by OUR_BYTES.
PLAIN_ROUNDS, OUR_BYTES = 1, 150_000_000
MOST_ROUNDS = 12
DRAWS, COMPARED = 200, 512


def fill(name: str, way: str, data: Path) -> None:
    """Fill one buffer; print the process's growth in bytes and the number of transitions."""
    recording = recordings.load(name, folder=data)
    plain = way == "sb3"
    steps = min(len(recording), 1_000) if plain else len(recording)
    recording = recording.head(steps)
    size = steps * recording.n_envs * (PLAIN_ROUNDS if plain else MOST_ROUNDS)
    arguments = (size, recording.observation_space, recording.action_space)
    options = {} if plain else CONFIGURATIONS[way]
    kind: Any = ReplayBuffer if plain else CompressedReplayBuffer
    warm = kind(200, *arguments[1:], device="cpu", n_envs=2, **options)
    for transition in recording.head(150).transitions():
        warm.add(*transition)
    before = resident_bytes()
    buffer = kind(*arguments, device="cpu", n_envs=2, **options)
    for _ in range(PLAIN_ROUNDS if plain else MOST_ROUNDS):
        for transition in recording.transitions():
            buffer.add(*transition)
        if resident_bytes() - before > OUR_BYTES:
            break
    count = (buffer.buffer_size if buffer.full else buffer.pos) * recording.n_envs
    print(json.dumps([resident_bytes() - before, count]))


def resident_bytes_per_transition(name: str, way: str, data: Path) -> float:
    """Return the bytes per transition that :func:`fill` measures in a fresh process."""
    grown, count = json.loads(run_module("benchmarks.lossy", name, "--fill", way, "--data", data))
    return float(grown / count)


def measure_recording(name: str, data: Path) -> list[str]:
    """Measure one recording with each configuration, and return the rows of the table."""
    recording = recordings.load(name, folder=data)
    recording = recording.head(min(len(recording), 2_000))
    arguments = (len(recording) * 2, recording.observation_space, recording.action_space)
    plain = ReplayBuffer(*arguments, device="cpu", n_envs=2)
    buffers = {
        way: CompressedReplayBuffer(*arguments, device="cpu", n_envs=2, num_threads=1, **options)
        for way, options in CONFIGURATIONS.items()
    }
    seconds: dict[str, list[float]] = {key: [] for key in ("plain", *buffers)}
    for transition in recording.transitions():
        for key, buffer in {"plain": plain, **buffers}.items():
            start = time.thread_time()
            buffer.add(*transition)
            seconds[key].append(time.thread_time() - start)
    adding = {key: np.array(values) for key, values in seconds.items()}
    rng = np.random.default_rng(0)
    rows, envs = rng.integers(len(recording), size=COMPARED), rng.integers(2, size=COMPARED)
    true = np.stack([plain.observations[rows, envs], plain.next_observations[rows, envs]]).astype(np.int16)
    plain_bytes, lines = resident_bytes_per_transition(name, "sb3", data), []
    for way, ours in tqdm(buffers.items(), leave=False, desc=name):
        made = np.stack([ours.observations[rows, envs], ours.next_observations[rows, envs]])
        error = np.abs(made.astype(np.int16) - true)
        mean_square = float((error.astype(np.float64) ** 2).mean())
        psnr = "exact" if mean_square == 0 else f"{10 * np.log10(255**2 / mean_square):.1f} dB"
        per_transition = resident_bytes_per_transition(name, way, data)
        speeds = [
            sampling_speedup(ours, plain, batch_size, rounds=max(DRAWS // 10 * 32 // batch_size, 8))
            for batch_size in (32, 256)
        ]
        speeds.append(speedup(adding, way, baseline="plain"))
        columns = " ".join(f"{speed:5.2f}×" for speed in speeds)
        lines.append(
            f"{name:21} {way:19} {per_transition:7.0f} {plain_bytes / per_transition:6.1f}× {columns} "
            f"{psnr:>8} {error.max():4}"
        )
    return lines


def print_estimates(data: Path) -> None:
    """Print the compressed fractions of raw frame sizes, from which plans are estimated."""
    for kind, names in {"gray": GAMES, "color": NATURAL}.items():
        found: dict[str, list[float]] = {}
        for name in tqdm(names, leave=False):
            recording = recordings.load(name, folder=data)
            steps = [(before[0], after[0]) for before, after, *_ in recording.head(1_500).transitions()]
            layout, sizes = measure_transitions(iter(steps), len(steps), n_stack=recording.n_stack)
            for options, (_, n_bytes, _) in sizes:
                found.setdefault(str(options), []).append(n_bytes / layout.frame_bytes)
        for options_text, taken_by in found.items():
            middle = float(np.exp(np.log(taken_by).mean()))
            print(f"{kind:6} {options_text:40} {min(taken_by):.3f} {middle:.3f} {max(taken_by):.3f}")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossy", description=main.__doc__)
    parser.add_argument("names", nargs="*", default=NATURAL)
    parser.add_argument("--data", type=Path, default=recordings.DATA, help="folder of the recordings")
    parser.add_argument(
        "--estimates", action="store_true", help="print only the figures from which plans are estimated"
    )
    parser.add_argument("--fill", metavar="WAY", help="fill one buffer in this process")
    options = parser.parse_args()
    th.set_num_threads(1)
    if options.fill:
        fill(options.names[0], options.fill, options.data)
        return
    print(machine())
    if options.estimates:
        print_estimates(options.data)
        return
    print(
        "bytes: resident, per transition; less: SB3's bytes over these; speedup over SB3: sample(32), sample(256),\n"
        "add(); PSNR and the largest error of a byte"
    )
    print(f"{'recording':21} {'way':19} {'bytes':>7} {'less':>7} {'n=32':>6} {'n=256':>6} {'add':>6} {'PSNR':>8}  max")
    for name in options.names:
        for line in measure_recording(name, options.data):
            print(line, flush=True)


if __name__ == "__main__":
    main()
