"""Program that runs ParallelEnv on Melting Pot, and checks its workers and their simulators.

python program.py NUM_WORKERS
"""

from __future__ import annotations

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


def private_mib(process: int) -> int:
    """Return the MiB that a process shares with no other process."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) // 1024


def check_documented_line(num_workers: int) -> None:
    """Check that workers are independent of each other and of this process, and that they are small."""
    envs = ParallelEnv(num_workers, MeltingpotEnv("commons_harvest__open"))
    rollout, workers = envs.rollout(5), workers_of(envs)
    assert rollout.shape == (num_workers, 5)
    assert len(rollout["RGB"][:, 0].unique(dim=0)) == num_workers
    assert len({chain[0] for chain in seeds(workers)}) == num_workers
    assert count_own_simulators() == 1  # the instance's own simulator
    # A process that imports TorchRL and Melting Pot itself has a gigabyte of private memory.
    private = [private_mib(worker) for worker in workers]
    assert max(private) < 300, private
    envs.close()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def check_changed_instance() -> None:
    """Check that seeded workers copy a changed instance reproducibly."""
    instance = MeltingpotEnv("commons_harvest__open", max_steps=100)
    instance.rollout(2)
    instance.max_steps = 4  # the constructor's arguments no longer describe the instance
    before, chains = count_own_simulators(), []
    for _ in range(2):
        envs = ParallelEnv(2, instance, seed=0)
        done = envs.rollout(10, break_when_any_done=False)["next", "done"]
        assert [row.flatten().nonzero().flatten().tolist() for row in done] == [[3, 7]] * 2
        chains.append(seeds(workers_of(envs)))
        envs.close()
    first, again = chains
    assert first == again, chains
    assert all(chain == [(chain[0] + count) % 2**32 for count in range(3)] for chain in first), chains
    assert first[0][0] != first[1][0]
    assert count_own_simulators() == before
    assert instance.rollout(10).shape == (4,)


if __name__ == "__main__":
    check_documented_line(int(sys.argv[1]))
    check_changed_instance()
