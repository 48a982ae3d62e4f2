"""Program that runs ParallelEnv on Melting Pot, and prints results as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from torchrl.envs.libs.meltingpot import MeltingpotEnv

from torchrl_ext import ParallelEnv


def seeds(processes: list[int]) -> list[list[int]]:
    """Return the seeds of the simulators that each of these processes has built, in order."""
    built = [tuple(map(int, line.split())) for line in Path(os.environ["LAB2D_LOG"]).read_text().splitlines()]
    return [[seed for process, seed in built if process == wanted] for wanted in processes]


def count_own_simulators() -> int:
    return len(seeds([os.getpid()])[0])


def workers_of(envs: Any) -> list[int]:
    return [process.pid for process in envs._pool.processes]


def all_differ(frames: Any) -> bool:
    return all(bool((one != other).any()) for at, one in enumerate(frames) for other in frames[:at])


def private_mib(process: int) -> int:
    """Return the MiB that a process shares with no other process."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) // 1024


def run_documented_line(num_workers: int) -> dict[str, Any]:
    """Run the documented call, and return the facts that the tests check."""
    envs = ParallelEnv(num_workers, MeltingpotEnv("commons_harvest__open"))
    rollout = envs.rollout(5)
    workers = workers_of(envs)
    answer = {
        "shape": list(rollout.shape),
        "frames differ": all_differ(rollout["RGB"][:, 0]),
        "first seeds": [chain[0] for chain in seeds(workers)],
        "simulators of the parent": count_own_simulators(),
        "private MiB": [private_mib(worker) for worker in workers],
    }
    envs.close()
    return answer | {"workers left": [worker for worker in workers if Path(f"/proc/{worker}").exists()]}


def run_changed_instance(num_workers: int) -> dict[str, Any]:
    """Start seeded workers twice from a changed instance; return facts to check."""
    instance = MeltingpotEnv("commons_harvest__open", max_steps=100)
    instance.rollout(2)
    instance.max_steps = 4  # the constructor's arguments no longer describe the instance
    before = count_own_simulators()
    chains, lengths = [], []
    for _ in range(2):
        envs = ParallelEnv(num_workers, instance, seed=0)
        rollout = envs.rollout(10, break_when_any_done=False)
        lengths.append(rollout["next", "done"].squeeze(-1).tolist())
        chains.append(seeds(workers_of(envs)))
        envs.close()
    return {
        "chains": chains,
        "ends": [[[step for step, done in enumerate(row) if done] for row in rows] for rows in lengths],
        "simulators of the parent": count_own_simulators() - before,
        "instance afterwards": list(instance.rollout(10).shape),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run_documented_line(int(sys.argv[1])), run_changed_instance(2)]))
