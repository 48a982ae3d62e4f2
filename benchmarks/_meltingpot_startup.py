"""What workers of Melting Pot cost: ``.venv-meltingpot/bin/python -m benchmarks._meltingpot_startup``.

Prints JSON: for TorchRL's own ParallelEnv under spawn, and for ours, each twice in one fresh process, until the first
reset is done. ``server`` is the fork server and whatever else serves all workers; ``private_mib`` is what a process
shares with no other (USS), ``proportional_mib`` counts in its share of the rest (PSS): these add up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.processes import descendants_of, run_module, own_cpu_s, private_mib, proportional_mib

SUBSTRATE = "commons_harvest__open"


def build(kind: str, num_workers: int) -> Any:
    """Build a vectorised environment in one of the two ways."""
    from torchrl.envs.libs.meltingpot import MeltingpotEnv

    if kind == "upstream":
        from torchrl.envs import ParallelEnv

        return ParallelEnv(num_workers, lambda: MeltingpotEnv(SUBSTRATE), mp_start_method="spawn")
    from torchrl_ext import ParallelEnv as Ours

    return Ours(num_workers, MeltingpotEnv(SUBSTRATE))


def costs(processes: Iterable[int]) -> dict[str, list[float]]:
    """Give what each of some processes has taken so far."""
    found = sorted(processes)
    return {
        "cpu_s": [round(own_cpu_s(process), 2) for process in found],
        "private_mib": [round(private_mib(process), 1) for process in found],
        "proportional_mib": [round(proportional_mib(process), 1) for process in found],
    }


def measure(kind: str, num_workers: int) -> list[dict[str, Any]]:
    """Start workers twice in this process."""
    measured = []
    for _ in range(2):
        start, before = time.perf_counter(), own_cpu_s()
        envs = build(kind, num_workers)
        envs.reset()
        wall = time.perf_counter() - start
        workers = [worker.pid for worker in envs._workers]
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
        line = run_module("benchmarks._meltingpot_startup", "--kind", kind, "--workers", given.workers)
        results[kind] = json.loads(line)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
