"""``GymVecEnv`` against ``DummyVecEnv`` and Isaac Lab's ``Sb3VecEnvWrapper``.

    python -m benchmarks.gym_vec_env [cartpole torch] [--rounds 15] [--isaac-wrapper PATH]

Competitors take turns in one process, with the same actions, and are measured in CPU time of the calling thread. Ratios
are medians over the rounds. *Bare* is the environment alone, so the difference is the adapter's overhead. The target is
printed next to each figure.

``PATH`` is Isaac Lab's ``source/isaaclab_rl/isaaclab_rl/sb3.py``. Without it, ``torch`` measures this package alone. On
the CPU, that wrapper returns buffers that the next step overwrites. GymVecEnv copies them, 0.8 MB per step, so compare
the wrapper with ``copy=False``.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.measure import format_ratio, machine, parse_options, speedup, time_in_turns
from sb3_ext import GymVecEnv

Run = Callable[[], object]
N_ENVS, MANY = 16, 4096


def build() -> Any:
    """Make a CartPole."""
    return gymnasium.make("CartPole-v1")


def make_stepper(env: Any, actions: Any) -> Run:
    """Return a function that steps an environment once with each action."""
    env.reset()

    def step_all_actions() -> None:
        """Step the environment once with each action."""
        for action in actions:
            env.step(action)

    step_all_actions()
    return step_all_actions


def make_single_env_stepper(actions: Any) -> Run:
    """Return a function that steps environments one by one, a vectorized one's lower bound."""
    envs = [build() for _ in range(N_ENVS)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)

    def step_all_actions() -> None:
        """Step each environment with its actions, and reset it after each episode."""
        for action in actions:
            for env, mine in zip(envs, action, strict=True):
                _, _, terminated, truncated, _ = env.step(mine)
                if terminated or truncated:
                    env.reset()

    step_all_actions()
    return step_all_actions


def cartpole(options: argparse.Namespace) -> None:
    """Compare adapters on 16 CartPoles, with and without the batches of SyncVectorEnv."""
    actions = np.random.default_rng(0).integers(2, size=(200, N_ENVS))
    seconds = time_in_turns(
        {
            "DummyVecEnv": make_stepper(DummyVecEnv([build] * N_ENVS), actions),
            "ours": make_stepper(GymVecEnv(SyncVectorEnv([build] * N_ENVS)), actions),
            "ours, by its own step": make_stepper(GymVecEnv(VectorWrapper(SyncVectorEnv([build] * N_ENVS))), actions),
            "SyncVectorEnv, bare": make_stepper(SyncVectorEnv([build] * N_ENVS), actions),
            "environments, bare": make_single_env_stepper(actions),
        },
        rounds=options.rounds,
        clock=time.thread_time,
    )
    print(f"\ncartpole: steps per second of {N_ENVS} environments")
    for name, found in seconds.items():
        verdict = format_ratio(speedup(seconds, name, baseline="DummyVecEnv"), 1.5 if name == "ours" else None)
        print(f"{name:28}{len(actions) * N_ENVS / np.median(found):>12,.0f}  {verdict}")


def measure_isaac_like(options: argparse.Namespace) -> None:
    """Compare adapters on 4096 environments in Isaac Lab's style."""
    from benchmarks import isaac_like

    isaac_like.install()
    torch.set_num_threads(1)
    actions = list(np.random.default_rng(0).uniform(-1, 1, (20, MANY, isaac_like.ACTION_SIZE)).astype(np.float32))

    def make_env() -> Any:
        """Make 4096 sub-environments that return final observations."""
        return isaac_like.IsaacLike(MANY, final_obs=True)

    competitors = {
        "bare": make_stepper(make_env(), [torch.from_numpy(action) for action in actions]),
        "ours": make_stepper(GymVecEnv(make_env(), clip_actions=100.0), actions),
        "ours, copy=False": make_stepper(GymVecEnv(make_env(), clip_actions=100.0, copy=False), actions),
    }
    if options.isaac_wrapper:
        spec = importlib.util.spec_from_file_location("isaac_wrapper", options.isaac_wrapper)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        competitors["Sb3VecEnvWrapper"] = make_stepper(
            module.Sb3VecEnvWrapper(make_env(), action_low=-100.0, action_high=100.0), actions
        )
    seconds = time_in_turns(competitors, rounds=options.rounds, clock=time.thread_time)
    print(f"\ntorch: microseconds of overhead per step of {MANY} environments")
    added = {name: (found - seconds["bare"]) / len(actions) * 1e6 for name, found in seconds.items()}
    for name, found in list(added.items())[1:]:
        verdict = ""
        if options.isaac_wrapper and name.startswith("ours"):
            verdict = format_ratio(speedup(added, name, baseline="Sb3VecEnvWrapper"), 3.0 if name == "ours" else None)
        print(f"{name:28}{np.median(found):>12,.0f}  {verdict}")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"cartpole": cartpole, "torch": measure_isaac_like}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gym_vec_env", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isaac-wrapper", metavar="PATH", help="Isaac Lab's isaaclab_rl/sb3.py")
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options)


if __name__ == "__main__":
    main()
