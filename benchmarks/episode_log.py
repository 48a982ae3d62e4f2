"""Time of a step with recorded episodes, against the same step without.

    python -m benchmarks.episode_log [--rounds 100]

Four environments are stepped by random actions, so that episodes of CartPole end after 22 steps on average. Steps with
and without the recorder take turns. "in this process" is a DummyVecEnv to which ResumeCallback has added recorders.
"make_vec_env" is ours in this process, which records, against SB3's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common import env_util
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.measure import machine, record, speedup, time_in_turns
from rl_ext_core.recording import EpisodeRecorder
from sb3_ext import SharedMemoryVecEnv, make_vec_env

STEPS = 300  # per round
BUILDS = 7


def maker(env_id: str, *, recorded: bool = False) -> Callable[[], Any]:
    """Return a function that builds an environment."""

    def make_env() -> Any:
        if env_id.startswith("ALE/"):
            import ale_py

            gymnasium.register_envs(ale_py)
        env = Monitor(gymnasium.make(env_id))
        return EpisodeRecorder(env) if recorded else env

    return make_env


def build(where: str, env_id: str, *, recorded: bool) -> Any:
    """Return the environments, in processes or in this process."""
    if where == "make_vec_env":
        build_env = maker(env_id)
        return make_vec_env(build_env, 4, isolation="in-process") if recorded else env_util.make_vec_env(build_env, 4)
    if where == "in this process":
        return DummyVecEnv([maker(env_id, recorded=recorded)] * 4)
    return SharedMemoryVecEnv([maker(env_id)] * 4, recorder=recorded)


def measure(where: str, env_id: str, rounds: int) -> float:
    """Return the time of a recorded step, as a multiple of that of another one."""
    envs = {name: build(where, env_id, recorded=name == "recorded") for name in ("recorded", "not recorded")}
    for env in envs.values():
        env.seed(0)
        env.reset()
        env.action_space.seed(0)
    actions = [np.array([env.action_space.sample() for _ in range(4)]) for _ in range(STEPS)]

    def step(env: Any) -> None:
        for action in actions:
            env.step(action)

    seconds = time_in_turns({name: lambda env=env: step(env) for name, env in envs.items()}, rounds=rounds)
    for env in envs.values():
        env.close()
    return 1 / speedup(seconds, "recorded", baseline="not recorded")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episode_log", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=140)
    options = parser.parse_args()
    print(machine())
    for env_id in ("CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"):
        for where in ("in processes", "in this process", "make_vec_env"):
            rounds = options.rounds if env_id == "CartPole-v1" else max(options.rounds // 10, 5)
            # New processes each time, because some run faster than others for as long as they live.
            ratio = float(np.median([measure(where, env_id, max(rounds // BUILDS, 3)) for _ in range(BUILDS)]))
            print(f"{env_id:16} {where:16} {ratio:.3f} times the time of a step")
            record("episode_log", f"{env_id} {where}", ratio=ratio)


if __name__ == "__main__":
    main()
