"""``CompressedReplayBuffer`` on disk against SB3's ``ReplayBuffer`` in memory.

    python -m benchmarks.disk [recording] [--transitions 1000000] [--folder /tmp]

A recording is repeated until there are enough transitions, with four of its steps at a time for eight environments.
Sampling, saving and loading are measured, each in a fresh process. Resident memory is the growth of the process, mapped
files included and the page cache excluded. Sampling is CPU time, with all files in the page cache. SB3's buffer
contains fewer transitions, since a million take 56 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, sampling_speedup
from benchmarks.processes import run_module
from benchmarks.replay import Recording, Transition
from sb3_ext import CompressedReplayBuffer

B = TypeVar("B", bound=ReplayBuffer)

N_ENVS = 8
PLAIN_SIZE = 20_000
STEPS = 5000  # Of the recording.
WARM_UP = 500
DRAWS = 60
MB = 1e6


def transitions(recording: Recording) -> Iterator[Transition]:
    """Yield the recording's transitions endlessly, for ``N_ENVS`` environments."""
    steps = list(recording.transitions(transposed_views=False))
    at = [part * 997 for part in range(N_ENVS // recording.n_envs)]
    while True:
        parts = [steps[place % len(steps)] for place in at]
        obs, next_obs, actions, rewards, dones = (np.concatenate([part[i] for part in parts]) for i in range(5))
        yield obs, next_obs, actions, rewards, dones, [info for part in parts for info in part[5]]
        at = [place + 1 for place in at]


def make_filled_buffer(recording: Recording, cls: type[B], n: int, **options: Any) -> B:
    """Return a buffer filled with ``n`` transitions."""
    spaces = recording.observation_space, recording.action_space
    buffer = cls(n, *spaces, device="cpu", n_envs=N_ENVS, **options)
    steps = n // N_ENVS
    for transition, _ in zip(transitions(recording), tqdm(range(steps), leave=False), strict=False):
        buffer.add(*transition)
    return buffer


def resident_memory(*, peak: bool = False) -> int:
    """Return this process's resident bytes, mapped files included.

    :param peak: Return the maximum since the last call with ``peak=True`` instead.
    """
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = int(status["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
    if peak:
        Path("/proc/self/clear_refs").write_text("5")
    return found


def on_disk(recording: Recording, n: int, folder: Path) -> dict[str, float]:
    """Fill a buffer on disk, sample from it, close it and reopen it."""
    make_filled_buffer(recording, CompressedReplayBuffer, WARM_UP * N_ENVS).sample(256)  # loads lazy imports
    before = resident_memory()
    buffer = make_filled_buffer(recording, CompressedReplayBuffer, n, storage_dir=folder)
    found: dict[str, float] = {"filled": resident_memory() - before}
    for _ in range(100):
        buffer.sample(256)
    found["sampled"] = resident_memory() - before
    plain = make_filled_buffer(recording, ReplayBuffer, min(PLAIN_SIZE, n))
    for batch_size in (32, 256):
        found[f"speed {batch_size}"] = sampling_speedup(buffer, plain, batch_size, rounds=DRAWS)
    buffer.close()
    found["on disk"] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    start = time.perf_counter()
    again = CompressedReplayBuffer(
        n,
        recording.observation_space,
        recording.action_space,
        device="cpu",
        n_envs=N_ENVS,
        storage_dir=folder,
        resume=True,
    )
    found["open"] = time.perf_counter() - start
    assert again.recovered is not None
    assert again.recovered.lost == 0
    assert again.size() == buffer.buffer_size
    again.close()
    return found


def saving(recording: Recording, n: int, folder: Path) -> dict[str, float]:
    """Save a buffer as ``model.save_replay_buffer`` does."""
    buffer = make_filled_buffer(recording, CompressedReplayBuffer, n)
    resident_memory(peak=True)
    before, start = resident_memory(), time.perf_counter()
    save_to_pkl(folder / "buffer.pkl", buffer)
    found: dict[str, float] = {"seconds": time.perf_counter() - start, "extra": resident_memory(peak=True) - before}
    found["size"] = (folder / "buffer.pkl").stat().st_size / buffer.stored_nbytes
    return found


def loading(recording: Recording, n: int, folder: Path) -> dict[str, float]:
    """Load the saved buffer with ``CompressedReplayBuffer.load``, and sample once."""
    make_filled_buffer(recording, CompressedReplayBuffer, WARM_UP * N_ENVS).sample(256)
    resident_memory(peak=True)
    start = time.perf_counter()
    buffer = CompressedReplayBuffer.load(folder / "buffer.pkl", device="cpu")
    found: dict[str, float] = {
        "seconds": time.perf_counter() - start,
        "extra": resident_memory(peak=True) - resident_memory(),
    }
    buffer.sample(256)
    return found


PARTS = {"on_disk": on_disk, "saving": saving, "loading": loading}


def measure(part: str, name: str, n: int, folder: Path) -> dict[str, float]:
    """Measure one part in a fresh process."""
    line = run_module("benchmarks.disk", name, "--transitions", n, "--folder", folder, "--part", part)
    found: dict[str, float] = json.loads(line)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=main.__doc__)
    parser.add_argument("name", nargs="?", default="mspacman")
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--part", choices=PARTS, help="measure one part in this process")
    options = parser.parse_args()
    th.set_num_threads(1)
    n = options.transitions
    if options.part:
        recording = recordings.load(options.name, steps=STEPS)
        print(json.dumps(PARTS[options.part](recording, n, options.folder)))
        return
    recordings.load(options.name, steps=STEPS, progress=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="rl-ext-disk-"))
    try:
        disk = measure("on_disk", options.name, n, folder / "buffer")
        save, load = (measure(part, options.name, n, folder) for part in ("saving", "loading"))
    finally:
        shutil.rmtree(folder)
    index = 8 * n
    share = n / 1_000_000
    rows = [
        (
            "resident when filled, without index",
            f"{(disk['filled'] - index) / MB:.0f} MB",
            f"< {60 * share:.0f} MB",
        ),
        ("the same after sampling", f"{(disk['sampled'] - index) / MB:.0f} MB", f"< {60 * share:.0f} MB"),
        ("sample(32) against SB3's in memory", f"{disk['speed 32']:.2f}×", "≥ 1×"),
        ("sample(256)", f"{disk['speed 256']:.2f}×", "≥ 1×"),
        ("reopened in", f"{disk['open']:.2f} s", ""),
        ("on disk", f"{disk['on disk'] / MB:.0f} MB", ""),
        ("saving: extra memory", f"{save['extra'] / MB:.0f} MB", "≤ 64 MB"),
        ("saving: time", f"{save['seconds']:.1f} s", "≤ 10 s"),
        ("saving: file size over stored bytes", f"{save['size']:.3f}", "≤ 1.05"),
        ("loading: extra memory", f"{load['extra'] / MB:.0f} MB", "≤ 64 MB"),
        ("loading: time", f"{load['seconds']:.1f} s", "≤ 10 s"),
    ]
    print(machine())
    print(f"{options.name}, {n:,} transitions of {N_ENVS} environments; index: {index / MB:.0f} MB")
    for what, found, target in rows:
        print(f"{what:40} {found:>10} {target:>10}")


if __name__ == "__main__":
    main()
