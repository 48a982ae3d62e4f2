"""``SharedMemoryVecEnv`` against SB3's ``SubprocVecEnv``, with default start methods.

    python -m benchmarks.vec_env [steps frames busy vector learn start restart ray] [--rounds 15]
        [--envs 8]

The vectorized environments take turns in one process, with the same actions. Ratios are medians over the rounds. *Bare*
is the speed of the same workers without communication. Every start is measured in a fresh process. The first start of
SharedMemoryVecEnv also starts a fork server, which later starts reuse. Targets are printed next to the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from benchmarks import _vec_env_environments as worlds
from benchmarks.measure import format_ratio, machine, parse_options, record, speedup, time_in_turns
from benchmarks.processes import run_module
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import RayVecEnv, SharedMemoryVecEnv

SUBPROC, ONE_EACH, TWO_WORKERS, DUMMY = "SubprocVecEnv", "one each", "2 workers", "DummyVecEnv"
BARE = {ONE_EACH: "one each, bare", TWO_WORKERS: "2 workers, bare"}
WITH_RAY: dict[str, Callable[..., VecEnv]] = {kind.__name__: kind for kind in (SharedMemoryVecEnv, RayVecEnv)}
TARGETS = {
    ("steps", ONE_EACH): 3.0,
    ("steps", TWO_WORKERS): 6.0,
    ("frames", ONE_EACH): 3.5,
    ("busy", ONE_EACH): 0.75,
    ("busy", TWO_WORKERS): 0.75,
    ("learn", ONE_EACH): 1.6,
    ("start", "first"): 4.0,
    ("start", "later"): 50.0,
}
PRIVATE_MIB, RESTART_S = 10, 0.1
STARTED = 4
WIDTH = 34


def print_row(label: str, *columns: str, verdict: str = "") -> None:
    """Print one row of a table."""
    print(f"{label:{WIDTH}}" + "".join(f"{column:>16}" for column in columns) + f"  {verdict}", flush=True)


@contextlib.contextmanager
def competitors(build: Callable[[], Any], n_envs: int) -> Iterator[dict[str, VecEnv]]:
    """Make all vectorized environments by name, and close them at exit."""
    env_fns = [build] * n_envs
    made: dict[str, VecEnv] = {SUBPROC: SubprocVecEnv(env_fns)}
    made[ONE_EACH] = SharedMemoryVecEnv(env_fns)
    made[TWO_WORKERS] = SharedMemoryVecEnv(env_fns, n_workers=2)
    made[DUMMY] = DummyVecEnv(env_fns)
    try:
        yield made
    finally:
        for venv in made.values():
            venv.close()


def make_stepper(venv: VecEnv, steps: int) -> Callable[[], None]:
    """Return a function that steps a VecEnv once with each of ``steps`` random actions."""
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(steps, venv.num_envs))
    venv.seed(0)
    venv.reset()

    def step_all_actions() -> None:
        """Step the VecEnv once with each action."""
        for action in actions:
            venv.step(action)

    step_all_actions()
    return step_all_actions


def rates(name: str, build: Callable[[], Any], n_envs: int, count: int, rounds: int) -> None:
    """Measure and print steps per second, summed over all environments."""
    print(f"\n{name}: steps per second of {n_envs} environments")
    with competitors(build, n_envs) as made:
        runs: dict[str, Callable[[], object]] = {
            competitor: make_stepper(venv, count) for competitor, venv in made.items()
        }
        for competitor, bare in BARE.items():
            runs[bare] = lambda workers=made[competitor]: workers.env_method("step_many", count)  # type: ignore[misc]
        seconds = time_in_turns(runs, rounds=rounds)
    for competitor, found in seconds.items():
        target = TARGETS.get((name, competitor))
        verdict = format_ratio(speedup(seconds, competitor, baseline=SUBPROC), None if name == "busy" else target)
        if competitor in BARE:
            share = speedup(seconds, competitor, baseline=BARE[competitor])
            verdict += "   " + format_ratio(share, target if name == "busy" else None, " of bare")
        rate = count * n_envs / np.median(found)
        record(
            "vec_env",
            f"{name}: {competitor}",
            steps_per_second=rate,
            ratio=speedup(seconds, competitor, baseline=SUBPROC),
        )
        print_row(competitor, f"{rate:,.0f}", verdict=verdict)


def steps(rounds: int, n_envs: int) -> None:
    """Measure steps per second of CartPole."""
    rates("steps", worlds.cart_pole, n_envs, 400, rounds)


def frames(rounds: int, n_envs: int) -> None:
    """Measure steps per second with observations of 100 KB."""
    rates("frames", worlds.frames, n_envs, 100, rounds)


def busy(rounds: int, n_envs: int) -> None:
    """Measure steps per second of environments that take a millisecond per step."""
    rates("busy", worlds.busy, n_envs, 30, rounds)


def ray(rounds: int, n_envs: int) -> None:
    """Compare Ray actors on this machine with workers that share memory."""
    import ray as cluster

    cluster.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for name, build, count in (("CartPole", worlds.cart_pole, 100), ("a millisecond", worlds.busy, 20)):
        print(f"\nray, {name}: steps per second of {n_envs} environments in 2 workers")
        made = {competitor: kind([build] * n_envs, n_workers=2) for competitor, kind in WITH_RAY.items()}
        seconds = time_in_turns(
            {competitor: make_stepper(venv, count) for competitor, venv in made.items()}, rounds=rounds
        )
        for competitor, found in seconds.items():
            ratio = format_ratio(speedup(seconds, competitor, baseline=SharedMemoryVecEnv.__name__), None)
            print_row(competitor, f"{count * n_envs / np.median(found):,.0f}", verdict=ratio)
            made[competitor].close()
    cluster.shutdown()


def vector(rounds: int, n_envs: int) -> None:
    """Compare ``SharedMemoryVectorEnv`` with gymnasium's ``AsyncVectorEnv``."""
    for name, build, count in (("CartPole", worlds.cart_pole, 400), ("frames of 100 KB", worlds.frames, 100)):
        print(f"\nvector, {name}: steps per second of {n_envs} environments")
        env_fns = [build] * n_envs
        made: dict[str, Any] = {
            "AsyncVectorEnv": AsyncVectorEnv(env_fns),
            ONE_EACH: SharedMemoryVectorEnv(env_fns),
            TWO_WORKERS: SharedMemoryVectorEnv(env_fns, n_workers=2),
        }
        seconds = time_in_turns(
            {competitor: _make_vector_stepper(env, count) for competitor, env in made.items()}, rounds=rounds
        )
        for competitor, found in seconds.items():
            target = None if competitor == "AsyncVectorEnv" else 3.0
            verdict = format_ratio(speedup(seconds, competitor, baseline="AsyncVectorEnv"), target)
            print_row(competitor, f"{count * n_envs / np.median(found):,.0f}", verdict=verdict)
            made[competitor].close()


def _make_vector_stepper(env: Any, steps: int) -> Callable[[], None]:
    """Return a function that steps a vector environment with random actions."""
    actions = np.random.default_rng(0).integers(2, size=(steps, env.num_envs))
    env.reset(seed=0)

    def step_all_actions() -> None:
        """Step the vector environment once with each action."""
        for action in actions:
            env.step(action)

    step_all_actions()
    return step_all_actions


def _make_sb3_monitored() -> Any:
    """Make a CartPole in SB3's ``Monitor``."""
    return Monitor(worlds.cart_pole())


def learn(rounds: int, n_envs: int) -> None:
    """Measure ``PPO.learn`` on CartPole."""
    print(f"\nlearn: PPO's timesteps per second with {n_envs} environments, CartPole")
    made: dict[str, VecEnv] = {
        SUBPROC: SubprocVecEnv([_make_sb3_monitored] * n_envs),
        ONE_EACH: SharedMemoryVecEnv([worlds.monitored_cart_pole] * n_envs),
        TWO_WORKERS: SharedMemoryVecEnv([worlds.monitored_cart_pole] * n_envs, n_workers=2),
    }
    torch.set_num_threads(1)
    timesteps = 256 * n_envs
    runs: dict[str, Callable[[], object]] = {}
    for competitor, venv in made.items():
        model = PPO("MlpPolicy", venv, n_steps=256, batch_size=256, n_epochs=4, device="cpu", seed=0)
        model.set_logger(Logger(None, []))
        runs[competitor] = lambda model=model: model.learn(timesteps)  # type: ignore[misc]
        runs[competitor]()
    seconds = time_in_turns(runs, rounds=rounds)
    for venv in made.values():
        venv.close()
    for competitor, found in seconds.items():
        verdict = format_ratio(speedup(seconds, competitor, baseline=SUBPROC), TARGETS.get(("learn", competitor)))
        print_row(competitor, f"{timesteps / np.median(found):,.0f}", verdict=verdict)


def run_once(*arguments: object) -> Any:
    """Run ``benchmarks._vec_env_once`` in a fresh process, and return its result."""
    return json.loads(run_module("benchmarks._vec_env_once", *arguments))


def start(rounds: int, n_envs: int) -> None:
    """Measure seconds until the first observation, memory per worker, and ``close()``."""
    print(f"\nstart: seconds until the first observation, {STARTED} workers, CartPole")
    found: dict[str, list[Any]] = {"SB3": [], "ours": []}
    for turn in range(max(1, rounds // 3)):
        for competitor in list(found) if turn % 2 else list(reversed(found)):
            found[competitor].append(run_once(competitor, STARTED))

    def collect_figures(which: int, name: str) -> Mapping[str, list[float]]:
        """Return a figure of each competitor's first (0) or later (1) starts."""
        return {competitor: [starts[which][name] for starts in all_starts] for competitor, all_starts in found.items()}

    print_row("", "SubprocVecEnv", "ours")
    for which, label in enumerate(("first", "later")):
        seconds = collect_figures(which, "seconds")
        ratio = median(theirs / ours for theirs, ours in zip(seconds["SB3"], seconds["ours"], strict=True))
        columns = (f"{median(seconds[competitor]):.2f} s" for competitor in found)
        print_row(label, *columns, verdict=format_ratio(ratio, TARGETS["start", label]))
    private = collect_figures(1, "private")
    mine = median(private["ours"])
    verdict = f"(≤ {PRIVATE_MIB} MiB){'' if mine <= PRIVATE_MIB else '  missed'}"
    print_row(
        "private memory of a worker",
        *(f"{median(private[competitor]):.1f} MiB" for competitor in found),
        verdict=verdict,
    )
    print_row("close()", *(f"{median(collect_figures(1, 'close')[competitor]):.2f} s" for competitor in found))


def restart(rounds: int, n_envs: int) -> None:
    """Measure the step that replaces a dead worker."""
    seconds = median(run_once("restart", 0))
    verdict = f"(≤ {RESTART_S:g} s){'' if seconds <= RESTART_S else '  missed'}"
    print(f"\nrestart: a step of {STARTED} workers in which one is replaced, CartPole")
    print_row("", f"{seconds:.3f} s", verdict=verdict)


PARTS: dict[str, Callable[[int, int], None]] = {
    part.__name__: part for part in (steps, frames, busy, vector, learn, start, restart, ray)
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vec_env", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--envs", type=int, default=8)
    options = parse_options(parser, PARTS)
    print(machine())
    for name in options.names:
        PARTS[name](options.rounds, options.envs)


if __name__ == "__main__":
    main()
