"""Tracks of ``benchmarks.field`` that sb3-extra-buffers publishes: whole trainings, and its table of buffers.

- ``train``: https://compressed-rl.readthedocs.io/latest/speed.html
- ``save``: https://compressed-rl.readthedocs.io/latest/benchmarks.html, where "save" is adding and "load" is sampling

Environments and hyperparameters are theirs. Learning rates are constant, because each turn is a call of ``learn()``.
Evaluations are left out: they take time without the buffer, and would make all ratios smaller. Additions and samples
are timed by the CPU seconds of the calling thread, trainings and files by wall clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch as th
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.save_util import save_to_pkl
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from benchmarks import memory
from benchmarks.measure import is_installed, ratio_interval, record, show_ratios, time_in_turns
from sb3_ext import CompressedReplayBuffer, CompressedRolloutBuffer

SB3 = "SB3"
N_STEPS = 128  # Steps per environment of a rollout.
DQN_STEPS = 400  # Steps of DQN per turn, with a gradient step after each fourth.
TABLE_SIZE, TABLE_ENVS, TABLE_PART = 40_000, 4, 100

# For each competitor: a class of buffer, and its options.
Buffers = dict[str, tuple[Any, dict[str, Any]]]


def make_venv(game: str, n_envs: int, *, n_stack: int, processes: bool) -> VecEnv:
    """Make an Atari game with SB3's wrappers, and channels first."""
    gymnasium.register_envs(ale_py)
    # Forks start at once. SB3's default imports its packages in each of 24 processes.
    options = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}} if processes else {}
    venv: VecEnv = make_atari_env(f"{game}NoFrameskip-v4", n_envs=n_envs, seed=0, **options)
    return VecTransposeImage(VecFrameStack(venv, n_stack) if n_stack > 1 else venv)


def list_buffers(kind: str) -> Buffers:
    """List the competitors' buffers: ``"Rollout"`` or ``"Replay"``."""
    sb3, ours = {
        "Rollout": (RolloutBuffer, CompressedRolloutBuffer),
        "Replay": (ReplayBuffer, CompressedReplayBuffer),
    }[kind]
    found: Buffers = {SB3: (sb3, {}), f"ours, {ours.__name__}": (ours, {})}
    if is_installed("sb3_extra_buffers"):
        from sb3_extra_buffers import compressed

        cls = getattr(compressed, f"Compressed{kind}Buffer")
        dtypes = {"elem_type": np.uint8, "runs_type": np.uint16}
        found["sb3-extra-buffers, zstd-3"] = (cls, {"compression_method": "zstd-3", "dtypes": dtypes})
    return found


def show_overheads(track: str, seconds: Mapping[str, np.ndarray], shares: Mapping[str, list[float]]) -> None:
    """Print how much more time than with SB3's buffer each training takes, with its interval.

    :param seconds: Seconds of each turn, by competitor.
    :param shares: Share of the calling thread's CPU time that the buffer's methods took in each turn.
    """
    print(f"\n{track}: time, more than with SB3's buffer, and share of CPU time in the buffer")
    for name, found in seconds.items():
        low, more, high = (100 * (bound - 1) for bound in ratio_interval(seconds, SB3, baseline=name))
        share = 100 * float(np.median(shares[name]))
        times = f"{np.median(found):8.2f} s {more:+6.1f} % [{low:+.1f}, {high:+.1f}]"
        print(f"{name:34}{times}, {share:5.2f} %", flush=True)
        figures = {"seconds": float(np.median(found)), "percent": more, "low": low, "high": high, "share": share}
        record("field", f"{track}: {name}", **figures)


def train(rounds: int, large: bool) -> None:
    """Measure trainings with each buffer: PPO on Pong, and DQN on MsPacman with a full replay buffer."""
    th.set_num_threads(1)
    train_ppo(rounds)
    train_dqn(rounds, 100_000 if large else 20_000)


def record_cpu_time(buffer: Any, methods: Iterable[str]) -> list[float]:
    """Record the CPU seconds of the calling thread in methods of a buffer, in the returned list."""
    seconds: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its time recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call the method."""
            start = time.thread_time()
            found = method(*args, **kwargs)
            seconds.append(time.thread_time() - start)
            return found

        return call

    for name in methods:
        setattr(buffer, name, timed(getattr(buffer, name)))
    return seconds


def compare_trainings(track: str, models: Mapping[str, Any], steps: int, rounds: int) -> None:
    """Let models learn in turns of equally many steps, and print a table."""
    shares: dict[str, list[float]] = {name: [] for name in models}

    def make_turn(name: str, model: Any) -> Callable[[], None]:
        """Return a function that trains a model for some steps."""
        model.set_logger(Logger(None, []))
        if isinstance(model, PPO):
            methods = ("reset", "add", "compute_returns_and_advantage", "_get_samples")
            recorded = record_cpu_time(model.rollout_buffer, methods)
        else:
            recorded = record_cpu_time(model.replay_buffer, ("add", "sample"))

        def learn() -> None:
            """Train for some steps."""
            recorded.clear()
            start = time.thread_time()
            model.learn(steps, reset_num_timesteps=False)
            shares[name].append(sum(recorded) / (time.thread_time() - start))

        return learn

    turns = {name: make_turn(name, model) for name, model in models.items()}
    time_in_turns(turns, rounds=1)
    seconds = time_in_turns(turns, rounds=rounds)
    title = f"train: {track}, {rounds} turns of {steps:,} steps"
    show_overheads(title, seconds, {name: found[1:] for name, found in shares.items()})


def train_ppo(rounds: int) -> None:
    """Measure PPO on Pong. A turn is one rollout and four epochs."""
    models = {
        name: PPO(
            "CnnPolicy",
            make_venv("Pong", 8, n_stack=1, processes=True),
            n_steps=N_STEPS,
            batch_size=256,
            n_epochs=4,
            learning_rate=2.5e-4,
            clip_range=0.1,
            ent_coef=0.01,
            gae_lambda=0.9,
            policy_kwargs={"normalize_images": False},
            rollout_buffer_class=cls,
            rollout_buffer_kwargs=options,
            seed=0,
            device="cpu",
        )
        for name, (cls, options) in list_buffers("Rollout").items()
    }
    compare_trainings("PPO on Pong", models, 8 * N_STEPS, rounds)
    for model in models.values():
        model.env.close()


def train_dqn(rounds: int, size: int) -> None:
    """Measure DQN on MsPacman. Its buffer contains random play before the first turn."""
    models = {
        name: DQN(
            "CnnPolicy",
            make_venv("MsPacman", 1, n_stack=4, processes=False),
            buffer_size=size,
            batch_size=32,
            learning_starts=0,
            train_freq=4,
            target_update_interval=1000,
            exploration_initial_eps=0.01,
            exploration_final_eps=0.01,
            replay_buffer_class=cls,
            replay_buffer_kwargs=options,
            seed=0,
            device="cpu",
        )
        for name, (cls, options) in list_buffers("Replay").items()
    }
    for *transition, dones in memory.transitions("ms_pacman", steps=size, n_envs=1):
        for model in models.values():
            model.replay_buffer.add(*transition, dones, [{}])
    compare_trainings(f"DQN on MsPacman, buffer of {size:,}", models, DQN_STEPS, rounds)


def play(venv: VecEnv, steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of ``ReplayBuffer.add`` for random play, as SB3's algorithms pass them."""
    observations: Any = venv.reset()
    venv.action_space.seed(0)
    for _ in range(steps):
        actions = np.array([venv.action_space.sample() for _ in range(venv.num_envs)])
        following, rewards, dones, infos = venv.step(actions)
        last: Any = deepcopy(following)
        for env in np.flatnonzero(dones):
            last[env] = infos[env]["terminal_observation"]
        yield observations, last, actions, rewards, dones, infos
        observations = following


def save(rounds: int, large: bool) -> None:
    """Measure a buffer of 40,000 transitions of MsPacman: additions, sampling of a rollout, and files."""
    th.set_num_threads(1)
    venv = make_venv("MsPacman", TABLE_ENVS, n_stack=4, processes=True)
    shared = {
        "observation_space": venv.observation_space,
        "action_space": venv.action_space,
        "device": "cpu",
        "n_envs": TABLE_ENVS,
    }
    replays = {
        name: cls(TABLE_SIZE, **shared, optimize_memory_usage=True, handle_timeout_termination=False, **options)
        for name, (cls, options) in list_buffers("Replay").items()
    }
    rollouts = {
        name: cls(TABLE_SIZE // TABLE_ENVS, **shared, **options)
        for name, (cls, options) in list_buffers("Rollout").items()
    }
    show_ratios("field", f"save: {TABLE_SIZE:,} additions", time_additions(venv, replays, rollouts))
    venv.close()
    for name, buffer in replays.items():
        print(f"{name:34}{observation_bytes(buffer) / 1e6:12,.1f} MB of observations")
    measure_loading(rollouts, max(5, rounds // 3))
    measure_files(replays, max(5, rounds // 3))


def time_additions(venv: VecEnv, replays: Mapping[str, Any], rollouts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Fill all buffers in parts, and return the seconds of replay buffers, each part as if it were the whole."""
    n_parts = TABLE_SIZE // TABLE_ENVS // TABLE_PART
    stream = play(venv, n_parts * TABLE_PART)
    part: list[tuple[Any, ...]] = []
    zeros = th.zeros(TABLE_ENVS)

    def prepare() -> None:
        """Play the next steps, and add them to the rollouts."""
        part[:] = islice(stream, TABLE_PART)
        for observations, _, actions, rewards, dones, _ in part:
            for rollout in rollouts.values():
                rollout.add(observations, actions, rewards, dones, zeros, zeros)

    def add_to(buffer: Any) -> None:
        """Add the steps to a replay buffer."""
        for transition in part:
            buffer.add(*transition)

    adders = {name: partial(add_to, buffer) for name, buffer in replays.items()}
    seconds = time_in_turns(adders, rounds=n_parts, prepare=prepare, clock=time.thread_time)
    return {name: n_parts * found for name, found in seconds.items()}


def observation_bytes(buffer: Any) -> int:
    """Return the bytes of a buffer's observations, as sb3-extra-buffers counts them."""
    if isinstance(buffer, CompressedReplayBuffer):
        return buffer.nbytes
    stored = buffer.observations
    return stored.nbytes + (sum(map(sys.getsizeof, stored.ravel())) if stored.dtype == object else 0)


def measure_loading(rollouts: Mapping[str, Any], rounds: int) -> None:
    """Measure one epoch of a rollout in batches of 64, each of which is dropped when the next one is drawn."""

    def read(buffer: Any) -> None:
        """Read all batches."""
        for _ in buffer.get(64):
            pass

    runs = {name: partial(read, buffer) for name, buffer in rollouts.items()}
    time_in_turns(runs, rounds=1)
    seconds = time_in_turns(runs, rounds=rounds, clock=time.thread_time)
    show_ratios("field", f"save: {TABLE_SIZE:,} sampled from a rollout", seconds)


def measure_files(replays: Mapping[str, Any], rounds: int) -> None:
    """Measure time and size of ``model.save_replay_buffer``, which calls ``save_to_pkl``."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{number}.pkl") for number, name in enumerate(replays)}
        runs = {name: partial(save_to_pkl, paths[name], buffer) for name, buffer in replays.items()}
        time_in_turns(runs, rounds=1)
        show_ratios("field", "save: file of a replay buffer", time_in_turns(runs, rounds=rounds))
        for name, path in paths.items():
            print(f"{name:34}{path.stat().st_size / 1e6:12,.1f} MB")
