"""Start-up cost of Melting Pot workers: TorchRL's ``ParallelEnv`` against this package's.

    .venv-meltingpot/bin/python -m benchmarks._meltingpot_startup [--workers 4]

Prints JSON. Each class starts its workers twice in one fresh process, and is measured until the first reset returns.
``server`` is the fork server and any other process that serves all workers. ``private_mib`` is memory that a process
shares with no other process (USS). ``proportional_mib`` includes its share of shared memory (PSS), so values add up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.processes import descendants_of, own_cpu_s, private_mib, proportional_mib, run_module

SUBSTRATE = "commons_harvest__open"


def build(kind: str, num_workers: int) -> Any:
    """Build a ``ParallelEnv`` of TorchRL or of this package."""
    from torchrl.envs.libs.meltingpot import MeltingpotEnv

    if kind == "upstream":
        from torchrl.envs import ParallelEnv

        return ParallelEnv(num_workers, lambda: MeltingpotEnv(SUBSTRATE), mp_start_method="spawn")
    from torchrl_ext import ParallelEnv as Ours

    return Ours(num_workers, MeltingpotEnv(SUBSTRATE))


def costs(processes: Iterable[int]) -> dict[str, list[float]]:
    """Return CPU seconds and memory of each process, sorted by process id."""
    found = sorted(processes)
    return {
        "cpu_s": [round(own_cpu_s(process), 2) for process in found],
        "private_mib": [round(private_mib(process), 1) for process in found],
        "proportional_mib": [round(proportional_mib(process), 1) for process in found],
    }


def measure(kind: str, num_workers: int) -> list[dict[str, Any]]:
    """Start workers twice in this process, and return the costs of each start."""
    measured = []
    for _ in range(2):
        start, before = time.perf_counter(), own_cpu_s()
        envs = build(kind, num_workers)
        envs.reset()
        wall = time.perf_counter() - start
        workers = [process.pid for process in (envs._workers if kind == "upstream" else envs._pool.processes)]
        measured.append(
            {
                "wall_s": round(wall, 2),
                "parent_cpu_s": round(own_cpu_s() - before, 2),
                "workers": costs(workers),
                "server": costs(set(descendants_of()) - set(workers)),
            }
        )
        envs.close()
    return measured


def main() -> None:
    """Measure both classes in fresh processes, or with ``--kind`` one class in this process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kind", choices=("upstream", "ours"))
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(measure(given.kind, given.workers)))
        return
    results = {}
    for kind in ("upstream", "ours"):
        line = run_module("benchmarks._meltingpot_startup", "--kind", kind, "--workers", given.workers)
        results[kind] = json.loads(line)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
