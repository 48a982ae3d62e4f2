"""Single measurements of ``benchmarks.vec_env``, each run in a fresh process.

    python -m benchmarks._vec_env_once SB3|ours|restart WORKERS

The imports at the top are those of a user's script, since worker processes may repeat them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from statistics import median

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

import sb3_ext
from benchmarks._vec_env_environments import cart_pole
from benchmarks.processes import private_mib
from rl_ext_core.errors import WorkerError
from sb3_ext import SharedMemoryVecEnv

__all__ = ["PPO"]
RESTARTS = 15


def start(library: str, workers: int) -> dict[str, float]:
    """Return seconds until the first observation, MiB per worker, and seconds of ``close()``."""
    begin = time.perf_counter()
    venv: VecEnv
    if library == "SB3":
        venv = make_vec_env(cart_pole, workers, vec_env_cls=SubprocVecEnv)
    else:
        venv = sb3_ext.make_vec_env(cart_pole, workers, isolation="process")
    venv.reset()
    seconds = time.perf_counter() - begin
    for _ in range(50):
        venv.step(np.zeros(workers, np.int64))
    private = median(private_mib(pid) for pid in venv.env_method("pid"))
    begin = time.perf_counter()
    venv.close()
    return {"seconds": seconds, "private": private, "close": time.perf_counter() - begin}


def restart() -> list[float]:
    """Kill a worker of four repeatedly, and return the seconds of steps that replace it."""
    logging.getLogger("sb3_ext").setLevel(logging.ERROR)
    venv = SharedMemoryVecEnv([cart_pole] * 4, restart="truncate")
    venv.reset()
    found = []
    for _ in range(RESTARTS):
        venv.step(np.zeros(4, np.int64))
        with contextlib.suppress(WorkerError):
            venv.env_method("die", indices=[0])
        begin = time.perf_counter()
        venv.step(np.zeros(4, np.int64))
        found.append(time.perf_counter() - begin)
    venv.close()
    return found


def main() -> None:
    """Start workers twice, where the second start reuses the fork server, or measure restarts."""
    library, workers = sys.argv[1], int(sys.argv[2])
    answer = restart() if library == "restart" else [start(library, workers) for _ in range(2)]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
