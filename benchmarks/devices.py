"""Time of ``resolve()`` and of the inventory, and of factories with and without a decision.

    python -m benchmarks.devices [--repeats 20]

Figures are medians. Work that happens once per process is timed inside of ``--repeats`` fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import machine
from rl_ext_core.devices import EglDevice, Gpu, Inventory, resolve

# Variables of the calling shell that must not influence the decisions.
DEVICE_VARIABLES = ("CUDA_", "MUJOCO_", "PYOPENGL_")

IMPORT = """
import time
start = time.perf_counter()
import rl_ext_core.devices
answer = time.perf_counter() - start
"""
INVENTORY = """
import time
from rl_ext_core.devices import Inventory
start = time.perf_counter()
found = Inventory.current()
answer = time.perf_counter() - start
"""
# Workers come from multiprocessing's fork server, without any imports; dict stands for an environment.
WORKERS = """
import multiprocessing, statistics
import cloudpickle
from rl_ext_core.devices import resolve
work = "import pickle, time; t = time.perf_counter(); pickle.loads(packed)(); answers.put(time.perf_counter() - t)"
context = multiprocessing.get_context("forkserver")
answers = context.SimpleQueue()
from rl_ext_core.factory import as_factory
decision = resolve("cpu", render="same", renderer="robosuite")
decided, = as_factory(dict).for_workers(1, devices=decision)
plain, = as_factory(dict).for_workers(1)
packed = [cloudpickle.dumps(factory) for factory in (plain, decided)]
taken = [[], []]
for turn in range({repeats}):
    for which in (0, 1) if turn % 2 else (1, 0):
        worker = context.Process(target=exec, args=(work, {{"packed": packed[which], "answers": answers}}))
        worker.start()
        taken[which].append(answers.get())
        worker.join()
answer = [statistics.median(seconds) for seconds in taken]
"""
# Python code starts CUDA through _lazy_init only, and CUDA cannot start without the driver's library.
CUDA = """
import torch
from benchmarks.devices import many_gpus
def mapped(): return "libcuda.so" in open("/proc/self/maps").read()
before, started = mapped(), []
from rl_ext_core.devices import Inventory, resolve
torch.cuda._lazy_init = lambda: started.append(1)
Inventory.current()
for inventory in (None, many_gpus()):
    for worker in range(4):
        options = dict(worker=worker, inventory=inventory, on_missing="cpu")
        resolve("auto", render="same", renderer="robosuite", **options)
answer = len(started) + int(torch.cuda.is_initialized()) + int(mapped() and not before)
"""


def many_gpus(count: int = 8) -> Inventory:
    """Return the inventory of a machine whose EGL devices list the GPUs in reverse."""
    gpus = tuple(
        Gpu(f"GPU-{n:08x}-0000-4000-8000-{n:012x}", "NVIDIA H100", f"0000:{n + 1:02x}:00.0", n, 2**36, 2**36)
        for n in range(count)
    )
    egl = [EglDevice(n, False, gpus[count - 1 - n].uuid, f"/dev/dri/renderD{128 + n}", True) for n in range(count)]
    here = Inventory.current()
    return Inventory(
        gpus=gpus,
        egl=(*egl, EglDevice(count, True)),
        fastest_first=tuple(gpu.uuid for gpu in gpus),
        versions={**here.versions, "torch.cuda": "12.6"},
        osmesa=True,
    )


def run_in_fresh_process(code: str) -> Any:
    """Run ``code`` in a new interpreter, and return the value of its variable ``answer``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(DEVICE_VARIABLES)}
    command = [sys.executable, "-c", f"{code}\nimport json\nprint(json.dumps(answer))"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median duration of a call in seconds."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="fresh processes for each figure")
    repeats = parser.parse_args().repeats
    for name in [name for name in os.environ if name.startswith(DEVICE_VARIABLES)]:
        del os.environ[name]
    print(machine())
    here, eight = Inventory.current(), many_gpus()

    def make_decision(inventory: Inventory | None) -> Callable[[], object]:
        """Return a function that chooses a device, from this or a new inventory."""
        return lambda: resolve("auto", render="same", renderer="robosuite", on_missing="cpu", inventory=inventory)

    plain, decided = run_in_fresh_process(WORKERS.format(repeats=repeats))
    imported = statistics.median(run_in_fresh_process(IMPORT) for _ in range(repeats))
    first = statistics.median(run_in_fresh_process(INVENTORY) for _ in range(repeats))
    rows = [
        (
            f"resolve(), this machine ({len(here.gpus)} GPUs), inventory read before",
            median_seconds(make_decision(None), 1000),
        ),
        (f"resolve(), {len(eight.gpus)} GPUs", median_seconds(make_decision(eight), 1000)),
        ("Inventory.current(), first call in a process (queries EGL in another one)", first),
        ("import rl_ext_core.devices", imported),
        ("unpickling and calling a worker's factory in a forkserver worker", plain),
        ("the same, with a decision (includes apply())", decided),
    ]
    for name, seconds in rows:
        print(f"{name:<75} {seconds * 1e3:9.3f} ms")
    print(f"{'number of times inventory and resolve() started CUDA':<75} {run_in_fresh_process(CUDA):9}")


if __name__ == "__main__":
    main()
