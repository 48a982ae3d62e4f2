"""EnvPool in ``GymVecEnv`` and environments in worker processes against EnvPool alone.

    .venv-jax/bin/python -m benchmarks.envpool [pong halfcheetah] [--envs 8] [--rounds 15] [--cpu]

``scripts/make_jax_venv.sh`` makes that virtual environment. EnvPool steps environments in C++ threads, an upper bound
for Python environments in processes. It gets one thread per core. The competitors take turns in one process, with
the same actions. Ratios are medians over the rounds, with bootstrap 95 % intervals. Skipped frames count, as in
EnvPool's paper: 4 per step of Pong, 5 of HalfCheetah. ``--cpu`` measures the CPU time of all processes and threads, for
machines with other load.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.gym_vec_env import make_stepper
from benchmarks.measure import machine, parse_options, ratio_interval, record, time_in_turns
from benchmarks.processes import descendants_of, own_cpu_s
from sb3_ext import GymVecEnv, SharedMemoryVecEnv

RAW = "EnvPool, alone"


def build_pong() -> Any:
    """Make Pong with EnvPool's preprocessing: 4 gray frames of 84 x 84, frame skip 4."""
    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # suppresses the version line
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(env), 4)


# For each part: EnvPool's id, a function that makes gymnasium's environment, frames per step, and steps per round.
PARTS: dict[str, tuple[str, Callable[[], Any], int, int]] = {
    "pong": ("Pong-v5", build_pong, 4, 40),
    "halfcheetah": ("HalfCheetah-v5", partial(gymnasium.make, "HalfCheetah-v5"), 5, 150),
}


def cpu_time() -> float:
    """Return the CPU seconds of this process and its workers."""
    return time.process_time() + sum(map(own_cpu_s, descendants_of()))


def measure(name: str, options: argparse.Namespace) -> None:
    """Measure one environment, and print a table."""
    import envpool

    task, build, frames, steps = PARTS[name]
    count = options.envs

    def make_pool() -> Any:
        """Make EnvPool's environments, with one thread per CPU."""
        return envpool.make_gymnasium(task, num_envs=count, num_threads=os.cpu_count() or 1, seed=0)

    single = build()
    single.action_space.seed(0)
    actions = [np.stack([single.action_space.sample() for _ in range(count)]) for _ in range(steps)]
    single.close()
    envs = {
        RAW: make_pool(),
        "EnvPool in GymVecEnv": GymVecEnv(make_pool()),
        "SharedMemoryVecEnv": SharedMemoryVecEnv([build] * count),
        "SubprocVecEnv": SubprocVecEnv([build] * count),
        "AsyncVectorEnv": AsyncVectorEnv([build] * count),
    }
    competitors = {label: make_stepper(env, actions) for label, env in envs.items()}
    seconds = time_in_turns(competitors, rounds=options.rounds, clock=cpu_time if options.cpu else time.perf_counter)
    print(f"\n{task}: frames per {'CPU ' * options.cpu}second with {count} environments, and percent of EnvPool alone")
    figures = {}
    for label, found in seconds.items():
        low, figures[label], high = (100 * bound for bound in ratio_interval(seconds, label, baseline=RAW))
        rate = f"{steps * count * frames / np.median(found):>12,.0f}"
        print(f"{label:28}{rate}{figures[label]:>8.1f} % [{low:.1f}, {high:.1f}]")
        envs[label].close()
    record("envpool", f"{name}{' (CPU time)' * options.cpu}", **figures)


def main() -> None:
    """Measure, and print a table per environment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.envpool", description=main.__doc__)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time")
    options = parse_options(parser, PARTS)
    try:
        import envpool  # noqa: F401
    except ImportError:
        sys.exit("EnvPool is not installed. Run: scripts/make_jax_venv.sh; .venv-jax/bin/python -m benchmarks.envpool")
    print(machine())
    for name in options.names:
        measure(name, options)


if __name__ == "__main__":
    main()
