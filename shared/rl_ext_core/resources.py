"""What this process may use: processor cores and memory, with the limits of its control groups, and descriptors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from rl_ext_core.errors import InvalidArgumentError

__all__ = ["available_memory", "check_open_file_limit", "private_memory", "memory_warning", "usable_cores"]

_ROOT = Path("/")
# Which a worker takes in this process, with what its start needs; and for everything else.
_DESCRIPTORS_PER_WORKER, _SPARE_DESCRIPTORS = 10, 20


def usable_cores() -> int:
    """Count the cores that this process may run on: its affinity, and the quotas of its control groups.

    :return: at least 1
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for group in _control_groups("cpu"):
        quota, period = _read_group_file(group, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def available_memory() -> int | None:
    """Return the bytes that can still be used: the machine's, and those up to the limits of the control groups.

    :return: bytes; None where the system does not say
    """
    sizes = [_read_field(_ROOT / "proc/meminfo", "MemAvailable:", 1024)]
    for group in _control_groups("memory"):
        limit = _read_group_file(group, "memory.max", "memory.limit_in_bytes")[0]
        used = _read_group_file(group, "memory.current", "memory.usage_in_bytes")[0]
        if limit.isdigit() and used.isdigit():
            # What the page cache holds counts as used there, and is given up on demand.
            names = "total_inactive_file", "inactive_file"
            cached = next(filter(None, (_read_field(group / "memory.stat", name) for name in names)), 0)
            sizes.append(max(int(limit) - int(used) + cached, 0))
    return min((size for size in sizes if size is not None), default=None)


def private_memory(pid: int | str = "self") -> int | None:
    """Return the bytes that a process shares with no other: what ends with it.

    :param pid: of the process
    :return: bytes; None where the system does not say
    """
    rollup = _ROOT / f"proc/{pid}/smaps_rollup"
    parts = [_read_field(rollup, name, 1024) for name in ("Private_Clean:", "Private_Dirty:")]
    return None if None in parts else sum(part or 0 for part in parts)


def memory_warning(private_bytes: int, num_workers: int) -> str | None:
    """Say that workers will not fit into memory, if they will not.

    :param private_bytes: what one of them takes for itself, measured
    :return: a sentence with the figures
    """
    available = available_memory()
    if available is None or private_bytes * num_workers <= available:
        return None
    needed, fitting = private_bytes * num_workers / 1e9, max(1, available // private_bytes)
    return (
        f"{num_workers} workers need about {needed:.1f} GB ({private_bytes / 1e6:.0f} MB each, measured), and "
        f"{available / 1e9:.1f} GB are available: use {fitting} or fewer"
    )


def check_open_file_limit(n_workers: int, argument: str) -> None:
    """Refuse more workers than there are descriptors for: with none left, nothing could be ended in good order either.

    :param argument: what says how many workers there are, with ``{}`` in place of the number
    :raises InvalidArgumentError: there are too few
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    if not os.path.isdir("/proc/self/fd"):
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = limit - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and n_workers * _DESCRIPTORS_PER_WORKER > left:
        raise InvalidArgumentError(
            f"{n_workers} workers need {n_workers * _DESCRIPTORS_PER_WORKER} descriptors of files, and this process may open "
            f"{max(left, 0)} more (ulimit -n is {limit}). Write {argument.format(max(left // _DESCRIPTORS_PER_WORKER, 1))} or "
            "fewer, or raise the limit: ulimit -n 4096"
        )


def _control_groups(controller: str) -> Iterator[Path]:
    """Return the folders of this process's control groups, from its own to the outermost that is to be seen."""
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        # Version 2 has one hierarchy and names no controller, version 1 has one for each.
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            mount = _ROOT / "sys/fs/cgroup" / (controller if names else "")
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _read_group_file(group: Path, name: str, *older: str) -> list[str]:
    """Read a file of version 2, or those that hold the same in version 1; what is not there is empty."""
    words = _read(group / name).split() or [_read(group / file).strip() for file in older]
    return words if len(words) >= len(older) else [""] * len(older)


def _read_field(path: Path, name: str, unit: int = 1) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1]) * unit
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
