"""The field's own benchmarks, in their settings, with this package as one more competitor.

    python -m benchmarks.field [step vector push buffers rollout start pixels train save] [--rounds 30] [--large]

Competitors take turns in one process. Each ratio is the median over rounds, with a bootstrap 95 % interval. Competitors
that are not installed are named and left out. They are not requirements of this project:
``pip install rlox cpprb flashbax "sb3-extra-buffers[fast]"``. Reverb needs Python 3.11 or older, and replaces NumPy 2,
so it gets a virtual environment: ``pip install dm-reverb "tensorflow-cpu~=2.15.0"``.

- ``step``, ``vector``, ``push``, ``rollout``: the pages of rlox, https://riserally.github.io/rlox/python/benchmark/
- ``buffers``: replay buffers of several libraries, in :mod:`benchmarks.field_buffers`
- ``start``: TorchRL's ``benchmark_parallel_env_startup.py``
- ``pixels``: TorchRL's ``test_collectors_benchmark.py``, series ``test_async_collection_pixels``
- ``train``, ``save``: pages of sb3-extra-buffers, in :mod:`benchmarks.field_training`
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.data import LazyTensorStorage
from torchrl.data import ReplayBuffer as TorchReplayBuffer
from torchrl.envs import GymEnv, ParallelEnv
from torchrl.modules import MLP, ConvNet, QValueActor

import torchrl_ext
from benchmarks import _field_environments as worlds
from benchmarks import field_training
from benchmarks.field_buffers import buffers
from benchmarks.measure import OURS, is_installed, machine, parse_options, show_ratios, time_in_turns
from benchmarks.processes import run_module
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import AutoVecEnv, CompressedReplayBuffer, SharedMemoryVecEnv

show = functools.partial(show_ratios, "field")


def show_each(track: str, seconds: dict[str, np.ndarray], **options: Any) -> None:
    """Print the ratios of each of our competitors to those of others, with options of :func:`show_ratios`."""
    ours = [name for name in seconds if name.startswith(OURS)]
    for name in ours:
        found = {other: times for other, times in seconds.items() if other == name or other not in ours}
        show(f"{track}: {name}", found, **options)


def repeated(function: Callable[[], object], count: int) -> Callable[[], None]:
    """Return a function that calls another one several times."""

    def call() -> None:
        for _ in range(count):
            function()

    call()
    return call


def step(rounds: int, large: bool) -> None:
    """Measure a step of one CartPole, with resets at the end of episodes."""
    count = 100

    def gymnasium_step(env: Any) -> Callable[[], None]:
        env.reset(seed=0)

        def once() -> None:
            _, _, terminated, truncated, _ = env.step(1)
            if terminated or truncated:
                env.reset()

        return repeated(once, count)

    def torchrl_step(env: Any) -> Callable[[], None]:
        state = [env.reset()]
        action = env.action_spec.rand()

        def once() -> None:
            found = state[0].set("action", action)
            _, state[0] = env.step_and_maybe_reset(found)

        return repeated(once, count)

    runs = {
        "gymnasium": gymnasium_step(gymnasium.make("CartPole-v1")),
        "TorchRL GymEnv": torchrl_step(GymEnv("CartPole-v1")),
        "ours, GymEnv": torchrl_step(torchrl_ext.GymEnv("CartPole-v1")),
    }
    if is_installed("rlox"):
        import rlox

        env = rlox.CartPole(seed=0)
        env.reset()

        def once() -> None:
            found = env.step(1)
            if found["terminated"] or found["truncated"]:
                env.reset()

        runs["rlox"] = repeated(once, count)
    seconds = {name: found / count for name, found in time_in_turns(runs, rounds=rounds).items()}
    show("step: one CartPole", seconds, scale=1e6, unit="µs")


def vector(rounds: int, large: bool) -> None:
    """Measure 100 steps of N CartPoles."""
    for number in (1, 4, 16, 64, 256, *([512] if large else [])):
        measure_vector(number, max(5, rounds // 3))


def measure_vector(number: int, rounds: int) -> None:
    """Measure 100 steps of a number of CartPoles."""
    env_fns = [lambda: gymnasium.make("CartPole-v1")] * number
    actions = np.ones(number, np.int64)
    envs: dict[str, Any] = {
        "gymnasium SyncVectorEnv": SyncVectorEnv(env_fns),
        "SB3 DummyVecEnv": DummyVecEnv(env_fns),
        "ours, SharedMemoryVectorEnv": SharedMemoryVectorEnv(env_fns, n_workers=min(number, 2)),
    }
    if number <= 16:
        envs["SB3 SubprocVecEnv"] = SubprocVecEnv(env_fns)
    for env in envs.values():
        env.reset()
    runs = {name: repeated(functools.partial(env.step, actions), 100) for name, env in envs.items()}
    if is_installed("rlox"):
        import rlox

        fast = rlox.VecEnv(number)
        fast.reset_all()
        runs["rlox VecEnv"] = repeated(functools.partial(fast.step_all, actions.tolist()), 100)
    show(f"vector: 100 steps of {number} CartPoles", time_in_turns(runs, rounds=rounds))
    for env in envs.values():
        env.close()


def push(rounds: int, large: bool) -> None:
    """Measure 10,000 pushes of 84×84×4 to a full ring of 10,000 transitions."""
    size = 10_000
    data = [(observation, following) for observation, following, _ in worlds.play_pong(size)]
    space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)
    action, reward, done = np.zeros((1, 1), np.int64), np.zeros(1, np.float32), np.zeros(1, bool)
    theirs = ReplayBuffer(size, space, action_space)
    ours = CompressedReplayBuffer(size, space, action_space)
    storage = TorchReplayBuffer(storage=LazyTensorStorage(size))

    def push_to(buffer: Any) -> Callable[[], None]:
        def push_all() -> None:
            for observation, following in data:
                buffer.add(observation[None], following[None], action, reward, done, [{}])

        push_all()
        return push_all

    def push_tensordicts() -> None:
        for observation, _ in data:
            storage.add(TensorDict({"observation": torch.from_numpy(observation), "action": 0, "reward": 0.0}))

    push_tensordicts()
    runs = {"SB3 ReplayBuffer": push_to(theirs), "TorchRL LazyTensorStorage": push_tensordicts}
    runs["ours, CompressedReplayBuffer"] = push_to(ours)
    if is_installed("rlox"):
        import rlox

        table, zero = rlox.ExperienceTable(84 * 84 * 4, 1), np.zeros(1, np.float32)
        rows = [observation.reshape(-1).astype(np.float32) for observation, _ in data[:2000]]

        def push_rows() -> None:
            table.clear()
            for _ in range(size // len(rows)):
                for row in rows:
                    table.push(row, zero, 0.0, False, False)

        push_rows()
        runs["rlox ExperienceTable, float32"] = push_rows
    if is_installed("cpprb"):
        import cpprb

        kinds = {"shape": (84, 84, 4), "dtype": np.uint8}
        fast = cpprb.ReplayBuffer(size, {"obs": kinds, "next_obs": kinds, "act": {}, "rew": {}, "done": {}})

        def push_to_cpprb() -> None:
            for observation, following in data:
                fast.add(obs=observation, next_obs=following, act=0, rew=0.0, done=False)

        push_to_cpprb()
        runs["cpprb"] = push_to_cpprb
    show("push: 10,000 of 84×84×4 to a full ring", time_in_turns(runs, rounds=max(5, rounds // 4)))


def rollout(rounds: int, large: bool) -> None:
    """Measure rollouts of CartPole with a constant action, stored and with advantages."""
    for number, steps in ((16, 128), (64, 512), *([(256, 2048)] if large else [])):
        measure_rollout(number, steps, max(5, rounds // 3))


def measure_rollout(number: int, steps: int, rounds: int) -> None:
    """Measure rollouts of a number of CartPoles."""
    env_fns = [lambda: gymnasium.make("CartPole-v1")] * number
    actions, values, log_probs = np.zeros(number, np.int64), torch.zeros(number), torch.zeros(number)
    envs: dict[str, VecEnv] = {"SB3 DummyVecEnv": DummyVecEnv(env_fns)}
    envs["ours, AutoVecEnv"] = AutoVecEnv(env_fns)
    envs["ours, SharedMemoryVecEnv"] = SharedMemoryVecEnv(env_fns, n_workers=2)

    def collect(env: Any, buffer: Any) -> None:
        buffer.reset()
        observations, starts = env.reset(), np.ones(number)
        for _ in range(steps):
            following, rewards, dones, _ = env.step(actions)
            buffer.add(observations, actions[:, None], rewards, starts, values, log_probs)
            observations, starts = following, dones
        buffer.compute_returns_and_advantage(values, starts)

    runs: dict[str, Callable[[], None]] = {}
    for name, env in envs.items():
        buffer = RolloutBuffer(steps, env.observation_space, env.action_space, n_envs=number)
        runs[name] = repeated(functools.partial(collect, env, buffer), 1)
    if is_installed("rlox"):
        import rlox

        fast, zero = rlox.VecEnv(number), np.zeros(1, np.float32)

        def collect_with_rlox() -> None:
            fast.reset_all()
            table, zeros = rlox.ExperienceTable(4, 1), actions.tolist()
            for _ in range(steps):
                found = fast.step_all(zeros)
                parts = (found[name] for name in ("obs", "rewards", "terminated", "truncated"))
                for row, reward, terminated, truncated in zip(*parts, strict=True):
                    table.push(row, zero, float(reward), bool(terminated), bool(truncated))
            flat = np.asarray(table.rewards(), np.float64)
            rlox.compute_gae(flat, np.zeros_like(flat), np.zeros_like(flat), 0.0, 0.99, 0.95)

        runs["rlox VecEnv, ExperienceTable"] = repeated(collect_with_rlox, 1)
    show(f"rollout: {number} environments × {steps} steps", time_in_turns(runs, rounds=rounds))
    for env in envs.values():
        env.close()


def start(rounds: int, large: bool) -> None:
    """Measure the start of ParallelEnv with workers that take time to build, until the first reset."""
    for workers, delay in ((20, 0.01), *([(80, 0.01), (20, 0.1)] if large else [])):
        found: dict[str, list[float]] = {name: [] for name in worlds.STARTS}
        for turn in range(max(3, rounds // 10)):
            for name in list(found) if turn % 2 else list(reversed(found)):
                found[name].append(float(run_module("benchmarks._field_environments", name, workers, delay)))
        seconds = {name: np.array(values) for name, values in found.items()}
        show_each(f"start: {workers} workers, {delay} s each", seconds, scale=1, unit="s")


class Scale(nn.Module):
    """Conversion of pixels to floats from 0 to 1."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Convert (..., 3, 84, 84) uint8."""
        return frames.float() / 255


def make_pixel_policy(spec: Any) -> Any:
    """Return a policy on pixels: a convolutional network and two layers of 256."""
    torch.manual_seed(0)
    features = ConvNet(num_cells=(32, 64, 64), kernel_sizes=(8, 4, 3), strides=(4, 2, 1))
    network = nn.Sequential(Scale(), features, MLP(out_features=4, num_cells=[256, 256]))
    return QValueActor(network, in_keys=["pixels"], spec=spec)


def pixels(rounds: int, large: bool) -> None:
    """Measure frames per second of a collector with 8 processes of 3×84×84 pixels, 1 ms a step.

    In the second setting, episodes have 16 steps, and a reset of the first environment takes 200 ms more. TorchRL's
    asynchronous collector then returns more frames of the other environments. The others return equally many of all.
    """
    torch.set_num_threads(1)
    for slow in (False, True):
        env_fns = [functools.partial(worlds.make_pixels, slow=slow, index=index) for index in range(8)]
        plain_fns = [functools.partial(worlds.make_plain_pixels, slow=slow, index=index) for index in range(8)]
        policy = make_pixel_policy(worlds.make_pixels().action_spec)
        for size in (256, 1024):
            vectorized = SharedMemoryVectorEnv(plain_fns, autoreset_mode="SameStep")
            collectors: dict[str, Any] = {
                name: Collector(env, policy, frames_per_batch=size, total_frames=-1)
                for name, env in (
                    ("TorchRL ParallelEnv", ParallelEnv(8, env_fns)),
                    ("ours, ParallelEnv", torchrl_ext.ParallelEnv(8, env_fns)),
                    ("ours, SharedMemoryVectorEnv", torchrl_ext.GymWrapper(vectorized)),
                )
            }
            collectors["TorchRL async-shm"] = AsyncBatchedCollector(
                env_fns,
                policy=policy,
                frames_per_batch=size,
                env_backend="multiprocessing",
                env_exchange="shm",
                transport="driver",
                max_batch_size=8,
                server_timeout=0.001,
            )
            batches = {name: iter(collector) for name, collector in collectors.items()}
            runs = {name: functools.partial(next, each) for name, each in batches.items()}
            time_in_turns(runs, rounds=2)
            name = f"pixels{', slow resets' if slow else ''}: batch of {size} frames"
            show_each(name, time_in_turns(runs, rounds=max(5, rounds // 3)))
            for collector in collectors.values():
                collector.shutdown()


TRACKS: dict[str, Callable[[int, bool], None]] = {
    track.__name__: track
    for track in (step, vector, push, buffers, rollout, start, pixels, field_training.train, field_training.save)
}


def main() -> None:
    """Measure the tracks, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--large", action="store_true", help="also the largest settings, which take minutes")
    options = parse_options(parser, TRACKS, metavar="track")
    print(machine())
    for name in options.names:
        begin = time.monotonic()
        TRACKS[name](options.rounds, options.large)
        print(f"({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
