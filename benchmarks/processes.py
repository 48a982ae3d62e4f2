"""Fresh processes for what is measured, and what processes cost: CPU seconds, and memory that is shared or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 1024


def run_module(module: str, *arguments: object, python: str | Path = sys.executable) -> str:
    """Runs a module in a fresh process, and gives the last line that it prints."""
    command = [str(python), "-m", module, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def cpu_s(process: int | str = "self") -> float:
    """The CPU seconds, user and system, of a process and of those of its children that have ended."""
    return _cpu_s(process, times=4)


def own_cpu_s(process: int | str = "self") -> float:
    """The CPU seconds of a process alone, whatever its children have taken."""
    return _cpu_s(process, times=2)


def _cpu_s(process: int | str, *, times: int) -> float:
    # Its own in user and in system mode come first, then likewise those of its children that have ended.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 11 + times])) / os.sysconf("SC_CLK_TCK")


def private_mib(process: int | str = "self") -> float:
    """What a process shares with no other: what would be free without it."""
    return _sum_smaps(process, "Private_")


def proportional_mib(process: int | str = "self") -> float:
    """What a process holds, divided by how many hold it: of several processes, these add up."""
    return _sum_smaps(process, "Pss:")


def _sum_smaps(process: int | str, prefix: str) -> float:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix)) / MIB


def descendants_of(process: int | str = "self") -> list[int]:
    """A process's children, their children and so on."""
    direct = [int(child) for task in Path(f"/proc/{process}/task").iterdir() for child in _children(task)]
    return direct + [below for child in direct for below in descendants_of(child)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:  # the thread has ended
        return []
