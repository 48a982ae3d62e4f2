"""LeRobot datasets: random access by LeRobot, by TorchRL, and by our stores, into which the videos are decoded once.

    MUJOCO_GL=egl .venv-lerobot/bin/python -m benchmarks.lerobot_datasets [recording ...] [--data FOLDER]

``scripts/make_lerobot_venv.sh`` makes that virtual environment. :mod:`benchmarks.lerobot_recordings` describes the
recordings, which are made once. LeRobot decodes by PyAV or by torchcodec, TorchRL's ``LeRobotExperienceReplay`` by
torchcodec, all with the same FFmpeg libraries. Times are CPU seconds per batch of random frames. Except for the row
"as uint8", frames are converted to float32 between 0 and 1, channels-first, as LeRobot returns them. All take turns in
one process, with one thread each. "Pairs" are two consecutive frames: ``delta_timestamps`` in LeRobot, observation and
next observation in our stores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from benchmarks.measure import machine, parse_options, speedup, time_in_turns
from rl_ext_core.datasets import Dataset, open_dataset
from sb3_ext import CompressedDictReplayBuffer
from torchrl_ext import FrameStorage

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "error 4": {"max_error": 4},
}
BACKENDS = ("pyav", "torchcodec")
KEY = ("observation", "images_front")
BATCH_SIZES = (1, 32)
Sampler = Callable[[int], torch.Tensor]


def bytes_on_disk(folder: Path) -> int:
    """Return the allocated bytes of all files in a folder."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def as_floats(images: torch.Tensor) -> torch.Tensor:
    """Convert images ``(..., height, width, 3)`` to what LeRobot returns."""
    return images.movedim(-1, -3).float().div_(255)


def make_lerobot_sampler(
    folder: Path, backend: str, n_episodes: int, *, pairs: bool, rng: np.random.Generator
) -> Sampler:
    """Return a function that samples frames by LeRobot's own loader."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from benchmarks.lerobot_recordings import CAMERA, FPS

    times = {CAMERA: [0.0, 1 / FPS]} if pairs else None
    episodes = list(range(n_episodes))
    dataset = LeRobotDataset("local/pusher", folder, episodes, delta_timestamps=times, video_backend=backend)

    def sample(batch_size: int) -> torch.Tensor:
        """Return images of random items."""
        return torch.stack([dataset[int(index)][CAMERA] for index in rng.integers(len(dataset), size=batch_size)])

    return sample


def make_torchrl_sampler(folder: Path, cache: Path, n_steps: int, *, rng: np.random.Generator) -> Sampler:
    """Return a function that samples single frames by TorchRL's ``LeRobotExperienceReplay``."""
    from torchrl.data.datasets.lerobot import LeRobotExperienceReplay

    # It reads the folder that Hugging Face's library returns for an id.
    with mock.patch("huggingface_hub.snapshot_download", return_value=str(folder)):
        replay = LeRobotExperienceReplay(f"local/{folder.name}", root=cache)

    def sample(batch_size: int) -> torch.Tensor:
        """Return images of random elements."""
        index = torch.from_numpy(rng.integers(n_steps, size=batch_size))
        images: torch.Tensor = replay[index]["observation", "image", "front"]
        return images.float().div_(255)

    return sample


def make_storage_sampler(
    storage: FrameStorage, *, pairs: bool, rng: np.random.Generator, convert: Callable[[Any], Any] = as_floats
) -> Sampler:
    """Return a function that samples frames from a storage."""

    def sample(batch_size: int) -> torch.Tensor:
        """Return images of random elements."""
        index = torch.from_numpy(rng.integers(len(storage), size=batch_size))
        if not pairs:
            return convert(storage.get(slice(None))[KEY][index])
        elements = storage.get(index)
        return convert(torch.stack([elements[KEY], elements["next"][KEY]], dim=1))

    return sample


def make_buffer_sampler(dataset: Dataset) -> Sampler:
    """Return a function that samples pairs from a buffer of Stable Baselines3."""
    actions = spaces.Box(-2, 2, dataset.action_space.shape)
    env = SimpleNamespace(observation_space=dataset.observation_space, action_space=actions)
    buffer = CompressedDictReplayBuffer.from_dataset(dataset, env=env, device="cpu", num_threads=1)

    def sample(batch_size: int) -> torch.Tensor:
        """Return images of random transitions, which are channels-first already."""
        batch = buffer.sample(batch_size)
        images = torch.stack([batch.observations[KEY[1]], batch.next_observations[KEY[1]]], dim=1)
        return images.float().div_(255)

    return sample


def fill_storage(dataset: Dataset, storage: FrameStorage) -> FrameStorage:
    """Store the steps of a dataset in a storage."""
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=1)
    for episode in dataset:
        before, after = (
            {key: array[part] for key, array in episode.observations.items()}
            for part in (slice(None, -1), slice(1, None))
        )
        following = {"observation": after, "reward": episode.rewards[:, None]}
        elements = {"observation": before, "action": episode.actions, "next": following}
        buffer.extend(TensorDict(elements, [len(episode)]))
    return storage


def warm_up(dataset: Dataset) -> None:
    """Let numba compile what the configurations need."""
    lengths, dataset.lengths = dataset.lengths, dataset.lengths[:1]
    for options in CONFIGURATIONS.values():
        fill_storage(dataset, FrameStorage(dataset.n_steps, num_threads=1, **options)).close()
    dataset.lengths = lengths


def compare(samplers: dict[str, Sampler], batch_size: int, rounds: int) -> None:
    """Print the time per batch of each sampler, and how many times faster it is than LeRobot with each decoder."""
    competitors = {name: lambda sampler=sampler: sampler(batch_size) for name, sampler in samplers.items()}
    time_in_turns(competitors, rounds=1)
    seconds = time_in_turns(competitors, rounds=rounds, clock=time.process_time)
    for name in competitors:
        ratios = [speedup(seconds, name, baseline=f"LeRobot, {backend}") for backend in BACKENDS]
        times = " ".join(f"{ratio:8.2f}×" for ratio in ratios)
        print(f"    {name:34} {1000 * np.median(seconds[name]):9.1f} ms {times}", flush=True)


def measure(folder: Path, rounds: int, n_episodes: int | None) -> None:
    """Measure one recording, or its first episodes, which are equally long."""
    dataset = open_dataset(folder)
    video = bytes_on_disk(folder / "videos") * len(dataset.lengths[:n_episodes]) / len(dataset.lengths)
    dataset.lengths = dataset.lengths[:n_episodes]
    height, width, channels = dataset.observation_space[KEY[1]].shape
    raw = dataset.n_steps * height * width * channels
    start = time.process_time()
    for _ in dataset:
        pass
    decoding = time.process_time() - start
    print(f"{folder.name}: {dataset.n_steps} frames of {height}×{width}, decoded in {decoding:.1f} s")
    print(f"  {'':22} {'MB':>8} {'raw/size':>8} {'size/video':>10} {'import':>8}")
    print(f"  {'video':22} {video / 1e6:8.1f} {raw / video:7.1f}× {1:9.1f}×")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        warm_up(dataset)
        storages = {}
        for name, options in CONFIGURATIONS.items():
            target = Path(temporary, name)
            start = time.process_time()
            storage = FrameStorage(dataset.n_steps, storage_dir=target, num_threads=1, **options)
            storages[name] = fill_storage(dataset, storage)
            seconds = time.process_time() - start
            size = bytes_on_disk(target)
            print(f"  {name:22} {size / 1e6:8.1f} {raw / size:7.1f}× {size / video:9.1f}× {seconds:6.1f} s", flush=True)
        for pairs in (False, True):
            samplers = {
                f"LeRobot, {backend}": make_lerobot_sampler(folder, backend, len(dataset.lengths), pairs=pairs, rng=rng)
                for backend in BACKENDS
            }
            for name, storage in storages.items():
                samplers[f"FrameStorage, {name}"] = make_storage_sampler(storage, pairs=pairs, rng=rng)
            samplers["FrameStorage, auto, as uint8"] = make_storage_sampler(
                storages["auto"], pairs=pairs, rng=rng, convert=lambda images: images
            )
            if pairs:
                samplers["CompressedDictReplayBuffer, auto"] = make_buffer_sampler(dataset)
            else:
                samplers["TorchRL, torchcodec"] = make_torchrl_sampler(
                    folder, Path(temporary, "cache"), dataset.n_steps, rng=rng
                )
            for batch_size in BATCH_SIZES:
                print(
                    f"  {'pairs' if pairs else 'single frames'}, batches of {batch_size}; speedup over pyav, torchcodec"
                )
                compare(samplers, batch_size, rounds if batch_size > 1 else 10 * rounds)
        for storage in storages.values():
            storage.close()


def main() -> None:
    """Measure and print tables."""
    from benchmarks.lerobot_recordings import RECORDINGS, record_once

    parser = argparse.ArgumentParser(prog="python -m benchmarks.lerobot_datasets", description=main.__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "lerobot")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--episodes", type=int, help="use the first episodes only")
    options = parse_options(parser, RECORDINGS, metavar="recording")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine())
    for name in options.names:
        measure(record_once(name, options.data), options.rounds, options.episodes)


if __name__ == "__main__":
    main()
