"""What workers of Melting Pot cost, in the environment that has it: ``.venv-meltingpot/bin/python`` with this file.

Prints JSON: for TorchRL's own ParallelEnv under spawn, and for ours, each twice in one fresh process, until the first
reset is done. ``server`` is the fork server and whatever else serves all workers; ``private_mib`` is what a process
shares with no other (USS), ``proportional_mib`` counts in its share of the rest (PSS): these add up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SUBSTRATE = "commons_harvest__open"


def build(kind: str, num_workers: int) -> Any:
    """Build a vectorised environment in one of the two ways."""
    from torchrl.envs.libs.meltingpot import MeltingpotEnv

    if kind == "upstream":
        from torchrl.envs import ParallelEnv

        return ParallelEnv(num_workers, lambda: MeltingpotEnv(SUBSTRATE), mp_start_method="spawn")
    from torchrl_ext import ParallelEnv as Ours

    return Ours(num_workers, MeltingpotEnv(SUBSTRATE))


def cpu_s(process: int | str) -> float:
    """Give the CPU seconds that a process has taken."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int | str, prefix: str) -> float:
    """Give the sum of a process's entries that start so."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix)) / 1024


def children_of(process: int) -> list[int]:
    """List a process's children and theirs."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    direct = [int(child) for task in tasks for child in task.read_text().split()]
    return direct + [below for child in direct for below in children_of(child)]


def costs(processes: Iterable[int]) -> dict[str, list[float]]:
    """Give what each of some processes has taken so far."""
    found = sorted(processes)
    return {
        "cpu_s": [round(cpu_s(process), 2) for process in found],
        "private_mib": [round(memory_mib(process, "Private_"), 1) for process in found],
        "proportional_mib": [round(memory_mib(process, "Pss:"), 1) for process in found],
    }


def measure(kind: str, num_workers: int) -> list[dict[str, Any]]:
    """Start workers twice in this process."""
    measured = []
    for _ in range(2):
        start, before = time.perf_counter(), cpu_s("self")
        envs = build(kind, num_workers)
        envs.reset()
        wall = time.perf_counter() - start
        workers = [worker.pid for worker in envs._workers]
        measured.append(
            {
                "wall_s": round(wall, 2),
                "parent_cpu_s": round(cpu_s("self") - before, 2),
                "workers": costs(workers),
                "server": costs(set(children_of(os.getpid())) - set(workers)),
            }
        )
        envs.close()
    return measured


def main() -> None:
    """Measure both in processes of their own, or one in this."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kind", choices=("upstream", "ours"))
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(measure(given.kind, given.workers)))
        return
    results = {}
    for kind in ("upstream", "ours"):
        command = [sys.executable, __file__, "--kind", kind, "--workers", str(given.workers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[kind] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
