"""The pixel recipes of TorchRL's ``sota-implementations`` with only the storage changed.

    python -m benchmarks.recipes [dqn dqn-normalized-later ppo dreamer] [--size 6000]

Environments, transforms and batches are those of ``dqn/utils_atari.py``, ``ppo/utils_atari.py`` (which A2C shares) and
``dreamer/dreamer_utils.py``, which need torchvision. Actions are random. Batches are recorded once, then each storage
gets the same ones. Memory is the growth of a fresh process per element. Times are CPU seconds of ``extend`` and
``sample``, with all storages taking turns in one process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EndOfLifeTransform,
    GrayScale,
    NoopResetEnv,
    RenameTransform,
    Resize,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
)
from torchrl.envs.libs.gym import GymEnv
from tqdm import tqdm

from benchmarks.frame_storage import storage
from benchmarks.measure import is_installed, machine, parse_options, resident_bytes, speedup, time_in_turns
from benchmarks.processes import run_module

GAME = "ALE/Pong-v5"
STORAGES = "lazy", "memmap", "patch"  # of benchmarks.frame_storage; the last is FrameStorage


def base_env() -> TransformedEnv:
    """Make the game as both Atari recipes do."""
    env = GymEnv(GAME, frame_skip=4, from_pixels=True, pixels_only=False, categorical_action_encoding=True)
    return TransformedEnv(env, Compose(NoopResetEnv(noops=30, random=True), EndOfLifeTransform()))


def make_dqn(*, normalize: bool = True) -> TransformedEnv:
    """Make the environment of ``dqn/utils_atari.py``.

    :param normalize: Whether ``VecNorm`` is in the environment. Otherwise the buffer may apply it to samples.
    """
    transforms = [
        SignTransform(in_keys=["reward"]), ToTensorImage(), GrayScale(), Resize(84, 84), CatFrames(N=4, dim=-3),
        RewardSum(), StepCounter(max_steps=4500), DoubleToFloat(),
    ]  # fmt: skip
    return TransformedEnv(base_env(), Compose(*transforms, *([VecNorm(in_keys=["pixels"])] if normalize else [])))


def make_ppo() -> TransformedEnv:
    """Make the environment of ``ppo/utils_atari.py``, eight games in one process."""
    transforms = [
        RenameTransform(in_keys=["pixels"], out_keys=["pixels_int"]),
        ToTensorImage(in_keys=["pixels_int"], out_keys=["pixels"]), GrayScale(), Resize(84, 84), CatFrames(N=4, dim=-3),
        RewardSum(), StepCounter(max_steps=4500), SignTransform(in_keys=["reward"]), DoubleToFloat(),
        VecNorm(in_keys=["pixels"]),
    ]  # fmt: skip
    return TransformedEnv(SerialEnv(8, base_env), Compose(*transforms))


def make_dreamer() -> TransformedEnv:
    """Make the environment of ``dreamer/dreamer_utils.py``, whose images are made of ``pixels_int`` on the CPU."""
    from torchrl.envs.libs.dm_control import DMControlEnv

    transforms = [
        RenameTransform(in_keys=["pixels"], out_keys=["pixels_int"]),
        ToTensorImage(from_int=True, in_keys=["pixels_int"], out_keys=["pixels"]), Resize(64, 64), DoubleToFloat(),
        RewardSum(), StepCounter(500),
    ]  # fmt: skip
    cheetah = DMControlEnv("cheetah", "run", from_pixels=True, pixels_only=True, frame_skip=2)
    return TransformedEnv(cheetah, Compose(*transforms))


# Environment, elements per extend, elements per sample, most elements that the recipe's buffer contains.
RECIPES: dict[str, tuple[Callable[[], TransformedEnv], int, int, int]] = {
    "dqn": (make_dqn, 400, 32, 1_000_000),
    "dqn-normalized-later": (functools.partial(make_dqn, normalize=False), 400, 32, 1_000_000),
    "ppo": (make_ppo, 1024, 256, 1024),
    "dreamer": (make_dreamer, 1000, 200, 1_000_000),
}


def record_batches(recipe: str, size: int, folder: Path) -> None:
    """Store the batches of random actions in ``folder``, one memory-mapped TensorDict each."""
    make_env, frames, _, _ = RECIPES[recipe]
    collector = Collector(make_env, None, frames_per_batch=frames, total_frames=size, max_frames_per_traj=-1)
    for number, batch in enumerate(tqdm(collector, total=-(-size // frames), desc=recipe, leave=False)):
        batch.reshape(-1).memmap(str(folder / f"{number:05}"))
    collector.shutdown()


def batches(folder: Path) -> list[TensorDictBase]:
    """Return the recorded batches, which stay in files."""
    return [TensorDict.load_memmap(path) for path in sorted(folder.iterdir())]


def make_buffer(recipe: str, name: str, n_recorded: int) -> TensorDictReplayBuffer:
    """Make a recipe's buffer with a storage, for at most as many elements as were recorded."""
    _, _, batch_size, most = RECIPES[recipe]
    return TensorDictReplayBuffer(storage=storage(name, min(most, n_recorded)), batch_size=batch_size)


def fill(recipe: str, name: str, folder: Path) -> None:
    """Fill a buffer; print the growth of the process in bytes per element."""
    recorded = batches(folder)
    n_recorded = sum(map(len, recorded))
    make_buffer(recipe, name, n_recorded).extend(recorded[0].clone())  # compiles kernels
    before = resident_bytes()
    buffer = make_buffer(recipe, name, n_recorded)
    for batch in recorded:
        buffer.extend(batch.clone())
    print((resident_bytes() - before) / len(buffer))


def measure(recipe: str, folder: Path, rounds: int) -> dict[str, dict[str, np.ndarray]]:
    """Return CPU seconds of ``extend`` and ``sample`` of each storage, in turns."""
    recorded = batches(folder)
    buffers = {name: make_buffer(recipe, name, sum(map(len, recorded))) for name in STORAGES}
    following, batch = cycle(recorded), recorded[0]

    def load() -> None:
        nonlocal batch
        batch = next(following).clone()

    def extend(name: str) -> Callable[[], object]:
        return lambda: buffers[name].extend(batch)

    extends = {name: extend(name) for name in buffers}
    time_in_turns(extends, rounds=len(recorded), prepare=load)  # every storage is full
    found = {"extend": time_in_turns(extends, rounds=rounds, clock=time.thread_time, prepare=load)}
    samples: dict[str, Callable[[], object]] = {
        name: lambda buffer=buffer: [sample.clone() for sample in (buffer.sample() for _ in range(5))]
        for name, buffer in buffers.items()
    }
    found["sample"] = time_in_turns(samples, rounds=rounds, clock=time.thread_time)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=main.__doc__)
    parser.add_argument("--size", type=int, default=6000, help="elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fill", nargs=2, metavar=("STORAGE", "FOLDER"), help="fill one storage in this process")
    options = parse_options(parser, RECIPES, metavar="recipe")
    if not is_installed("torchvision"):
        return
    os.environ.setdefault("MUJOCO_GL", "egl")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.fill:
        fill(options.names[0], options.fill[0], Path(options.fill[1]))
        return
    print(machine())
    print("bytes per element; times of FrameStorage: how many times as fast as LazyTensorStorage, LazyMemmapStorage")
    print(f"{'recipe':22}{'lazy':>10}{'memmap':>10}{'frames':>10}{'memory':>8}{'extend':>16}{'sample':>16}")
    for recipe in options.names:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            record_batches(recipe, options.size, folder)
            sizes = {s: float(run_module("benchmarks.recipes", recipe, "--fill", s, folder)) for s in STORAGES}
            times = measure(recipe, folder, options.rounds)
        ratios = {
            part: ", ".join(f"{speedup(seconds, 'patch', baseline=other):.2f}×" for other in ("lazy", "memmap"))
            for part, seconds in times.items()
        }
        cells = "".join(f"{size:10,.0f}" for size in sizes.values())
        print(f"{recipe:22}{cells}{sizes['lazy'] / sizes['patch']:7.1f}×{ratios['extend']:>16}{ratios['sample']:>16}")


if __name__ == "__main__":
    main()
