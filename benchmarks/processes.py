"""Run modules in fresh processes, and read CPU seconds and memory from ``/proc``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 1024


def run_module(module: str, *arguments: object, python: str | Path = sys.executable) -> str:
    """Run a module in a fresh process, and return the last line that it prints."""
    command = [str(python), "-m", module, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def cpu_s(process: int | str = "self") -> float:
    """Return the CPU seconds, user and system, of a process and its ended children."""
    return _sum_cpu_times(process, times=4)


def own_cpu_s(process: int | str = "self") -> float:
    """Return the CPU seconds, user and system, of a process without its children."""
    return _sum_cpu_times(process, times=2)


def _sum_cpu_times(process: int | str, *, times: int) -> float:
    """Return the sum in seconds of the first ``times`` CPU times in ``/proc/PID/stat``."""
    # Fields: user and system time of the process, then those of its ended children.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 11 + times])) / os.sysconf("SC_CLK_TCK")


def private_mib(process: int | str = "self") -> float:
    """Return the MiB that a process shares with no other process (USS)."""
    return _sum_smaps(process, "Private_")


def proportional_mib(process: int | str = "self") -> float:
    """Return a process's MiB with its share of shared pages (PSS); these may be summed."""
    return _sum_smaps(process, "Pss:")


def _sum_smaps(process: int | str, prefix: str) -> float:
    """Return the MiB of a process's memory in all fields with this prefix."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix)) / MIB


def descendants_of(process: int | str = "self") -> list[int]:
    """Return the process ids of all descendants of a process."""
    direct = [int(child) for task in Path(f"/proc/{process}/task").iterdir() for child in _children(task)]
    return direct + [below for child in direct for below in descendants_of(child)]


def _children(task: Path) -> list[str]:
    """Return the process ids of a thread's children; none if the thread has ended."""
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:  # the thread has ended meanwhile
        return []
