"""Minari's file formats against a ``storage_dir``: size on disk, and time to sample.

    python -m benchmarks.datasets [recording ...] [--steps 10000] [--folder /tmp]

The steps of a recording, with stacks of four frames, are written as Minari datasets without JPEG, and imported into a
``storage_dir``. All files are in the page cache, and the competitors take turns in one process. Minari returns whole
episodes only. So there are two competitors: its ``sample_episodes``, and h5py, which reads the rows of a batch directly
from Minari's HDF5 file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import torch as th
from tqdm import tqdm

from benchmarks import recordings
from benchmarks.measure import machine, parse_options, speedup, time_in_turns
from benchmarks.recordings import Recording
from sb3_ext import CompressedReplayBuffer

GAMES = ("pong", "breakout", "mspacman", "seaquest", "montezuma")
FORMATS = ("hdf5", "arrow")
BATCH_SIZE, ROUNDS, DRAWS = 256, 9, 20


def fill_buffer(recording: Recording) -> CompressedReplayBuffer:
    """Return a buffer that contains the whole recording."""
    spaces = recording.observation_space, recording.action_space
    buffer = CompressedReplayBuffer(recording.n_transitions, *spaces, device="cpu", n_envs=recording.n_envs)
    for transition in tqdm(recording.transitions(), total=len(recording), leave=False):
        buffer.add(*transition)
    return buffer


def bytes_on_disk(folder: Path) -> int:
    """Return the space that the files of a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def make_h5py_sampler(folder: Path) -> tuple[h5py.File, Callable[[], Any]]:
    """Return the open file, and a function that reads a random batch of transitions from it, step by step."""
    file = h5py.File(folder / "main_data.hdf5")
    lengths = np.array([len(file[f"episode_{number}/rewards"]) for number in range(len(file))])
    ends = np.cumsum(lengths)

    def sample() -> Any:
        """Read a batch of observations, next observations, actions, rewards and flags."""
        batch = []
        for step in np.random.randint(0, ends[-1], BATCH_SIZE):
            number = int(np.searchsorted(ends, step, side="right"))
            row = int(step - ends[number] + lengths[number])
            episode = file[f"episode_{number}"]
            pair = episode["observations"][row : row + 2]
            rest = [episode[name][row] for name in ("actions", "rewards", "terminations")]
            batch.append((pair[0], pair[1], *rest))
        return [th.from_numpy(np.stack(part)) for part in zip(*batch, strict=True)]

    return file, sample


def make_minari_sampler(folder: Path) -> Callable[[], Any]:
    """Return a function that samples an episode with Minari, and a batch of its transitions."""
    dataset = minari.MinariDataset(folder)

    def sample() -> Any:
        """Read one episode, and draw a batch from it."""
        (episode,) = dataset.sample_episodes(1)
        rows = np.random.randint(0, len(episode), BATCH_SIZE)
        parts: list[Any] = [episode.observations[rows], episode.observations[rows + 1]]
        parts += [np.asarray(values)[rows] for values in (episode.actions, episode.rewards, episode.terminations)]
        return [th.from_numpy(part) for part in parts]

    return sample


def measure_recording(name: str, steps: int, folder: Path) -> str:
    """Measure one recording, and return its row of the table."""
    buffer = fill_buffer(recordings.load(name, steps=steps, progress=True))
    for data_format in FORMATS:
        buffer.to_dataset(folder / data_format, data_format=data_format)
    options: dict[str, Any] = {"device": "cpu", "storage_dir": folder / "stored"}
    start = time.perf_counter()
    stored = CompressedReplayBuffer.from_dataset(folder / "hdf5", **options)
    seconds = time.perf_counter() - start
    n = stored.buffer_size
    assert n == buffer.buffer_size * buffer.n_envs
    sizes = [bytes_on_disk(folder / data_format) / n for data_format in FORMATS]
    file, read_rows = make_h5py_sampler(folder / "hdf5")
    competitors: dict[str, Callable[[], Any]] = {
        "ours": lambda: [stored.sample(BATCH_SIZE) for _ in range(DRAWS)],
        "h5py": read_rows,
        "hdf5": make_minari_sampler(folder / "hdf5"),
        "arrow": make_minari_sampler(folder / "arrow"),
    }
    time_in_turns(competitors, rounds=2)
    taken = time_in_turns(competitors, rounds=ROUNDS)
    taken["ours"] /= DRAWS
    ours = bytes_on_disk(folder / "stored") / n
    stored.close()
    file.close()
    milliseconds = {competitor: 1e3 * float(np.median(seconds)) for competitor, seconds in taken.items()}
    faster = [speedup(taken, "ours", baseline=other) for other in ("h5py", "hdf5", "arrow")]
    cells = [
        name,
        *(f"{size:,.0f}" for size in sizes),
        f"{ours:,.0f}",
        f"{min(sizes) / ours:.0f}x",
        *(f"{value:,.1f}" for value in milliseconds.values()),
        " / ".join(f"{ratio:,.0f}x" for ratio in faster),
        f"{n / seconds:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.datasets", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the recording, of two environments each")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    options = parse_options(parser, GAMES, metavar="recording")
    th.set_num_threads(1)
    print(f"{machine()}\n")
    columns = [
        "",
        *FORMATS,
        "storage_dir",
        "less",
        "ms: ours",
        "h5py",
        *(f"Minari {name}" for name in FORMATS),
        "faster",
    ]
    print("Bytes per step, milliseconds for a batch, and steps per second of the import:\n")
    print(f"| {' | '.join([*columns, 'import'])} |\n{'| --- ' * (len(columns) + 1)}|")
    for name in options.names:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(measure_recording(name, options.steps, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
