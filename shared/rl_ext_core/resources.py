"""Limits of this process and its control groups: CPU cores, memory, open files, folders that it can write to."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, StorageError

__all__ = [
    "NO_SPACE",
    "available_memory",
    "check_folder",
    "check_open_file_limit",
    "check_path",
    "memory_warning",
    "private_memory",
    "usable_cores",
    "write_problem",
]

_ROOT = Path("/")
NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
# File descriptors that each worker takes in this process, including its start, and that stay free for other uses.
_DESCRIPTORS_PER_WORKER, _SPARE_DESCRIPTORS = 10, 20


def usable_cores() -> int:
    """Count the CPU cores that this process may use.

    The count respects the process's affinity and the quotas of its control groups.

    :return: Number of cores, at least 1
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for group in _control_groups("cpu"):
        quota, period = _read_group_file(group, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def available_memory() -> int | None:
    """Return the memory that this process can still use, also within its control groups.

    :return: Bytes; None if the system does not report it
    """
    sizes = [_read_field(_ROOT / "proc/meminfo", "MemAvailable:", 1024)]
    for group in _control_groups("memory"):
        limit = _read_group_file(group, "memory.max", "memory.limit_in_bytes")[0]
        used = _read_group_file(group, "memory.current", "memory.usage_in_bytes")[0]
        if limit.isdigit() and used.isdigit():
            # The page cache counts as used memory there, but the kernel frees it on demand.
            names = "total_inactive_file", "inactive_file"
            cached = next(filter(None, (_read_field(group / "memory.stat", name) for name in names)), 0)
            sizes.append(max(int(limit) - int(used) + cached, 0))
    return min((size for size in sizes if size is not None), default=None)


def private_memory() -> int | None:
    """Return the memory that this process does not share, and that is freed when it ends.

    :return: Bytes; None if the system does not report it
    """
    rollup = _ROOT / "proc/self/smaps_rollup"
    parts = [_read_field(rollup, name, 1024) for name in ("Private_Clean:", "Private_Dirty:")]
    return None if None in parts else sum(part or 0 for part in parts)


def memory_warning(private_bytes: int, num_workers: int) -> str | None:
    """Return a warning if workers will not fit into memory.

    :param private_bytes: Measured private memory of one worker, in bytes
    :param num_workers: Number of workers
    :return: Warning text with the sizes; None if the workers fit, or the available memory is unknown
    """
    available = available_memory()
    if available is None or private_bytes * num_workers <= available:
        return None
    needed, fitting = private_bytes * num_workers / 1e9, max(1, available // private_bytes)
    return (
        f"{num_workers} {'worker needs' if num_workers == 1 else 'workers need'} about {needed:.1f} GB "
        f"({private_bytes / 1e6:.0f} MB each, measured), but only {available / 1e9:.1f} GB are available: "
        f"use {fitting} or fewer"
    )


def check_open_file_limit(n_workers: int, argument: str) -> None:
    """Raise if this process cannot open enough files for its workers.

    The check comes before the first start, because workers cannot be ended cleanly without free file descriptors.

    :param n_workers: Number of workers
    :param argument: Code that sets the number of workers, with ``{}`` for the number
    :raises InvalidArgumentError: If the limit of open files is too low
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    if not os.path.isdir("/proc/self/fd"):
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = limit - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and n_workers * _DESCRIPTORS_PER_WORKER > left:
        raise InvalidArgumentError(
            f"{argument.format(n_workers)} needs {n_workers * _DESCRIPTORS_PER_WORKER} file descriptors, but this "
            f"process can open only {max(left, 0)} more (ulimit -n is {limit}). Use "
            f"{argument.format(max(left // _DESCRIPTORS_PER_WORKER, 1))} or fewer, or raise the limit: ulimit -n 4096"
        )


def check_path(argument: str, path: Any) -> None:
    """Raise if an argument is not a path, or is empty.

    :param argument: Name of the argument
    :param path: Its value
    :raises InvalidTypeError: If it is neither a string nor a ``Path``
    :raises InvalidArgumentError: If it is empty, which would be the working directory
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidTypeError(f"{argument}={path!r} is not a path, expected a string or a Path. Use {argument}='run1'")
    if not os.fspath(path):
        raise InvalidArgumentError(f"{argument}='' is empty, expected the name of a folder. Use {argument}='run1'")


def check_folder(argument: str, path: str | os.PathLike[str]) -> None:
    """Raise if a folder cannot be created or written to. A file is written there, and deleted.

    :param argument: Name of the argument that has the path
    :param path: Path of a folder, which need not exist
    :raises StorageError: If it cannot be written to
    """
    check_path(argument, path)
    folder, created = Path(os.path.abspath(path)), list[Path]()
    try:
        for missing in reversed([each for each in (folder, *folder.parents) if not os.path.lexists(each)]):
            with contextlib.suppress(FileExistsError):  # another process has created it meanwhile
                missing.mkdir()
                created.append(missing)
        with tempfile.TemporaryFile(prefix=".rl-ext-", dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        advice = "Free space there, or use" if error.errno in NO_SPACE else "Use"
        raise StorageError(
            f"{argument}={os.fspath(path)!r} cannot be written to: {write_problem(folder, error)}. {advice} another "
            f"folder, for example {argument}={str(Path.home() / 'runs')!r}"
        ) from error
    finally:
        for each in reversed(created):
            with contextlib.suppress(OSError):
                each.rmdir()


def write_problem(path: Path, error: OSError) -> str:
    """Return why a file or folder cannot be written to.

    :param path: Absolute path
    :param error: Error of the system
    """
    existing = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    if existing.is_symlink() and not existing.exists():
        return f"{existing} is a link to a path that does not exist"
    if not os.path.isdir(existing) and (existing != path or error.errno in (errno.ENOTDIR, errno.EEXIST)):
        return f"{existing} is a file"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{error.strerror}: {existing} belongs to {_user_of(existing)}"
    return f"{error.strerror or error} ({existing})"


def _user_of(path: Path) -> str:
    try:
        return f"the user {path.owner()!r}"
    except (OSError, KeyError, NotImplementedError):  # a user without a name, or Windows
        return "another user"


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, innermost first."""
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        # Version 2 has one hierarchy without a controller's name, version 1 has one for each controller.
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            mount = _ROOT / "sys/fs/cgroup" / (controller if names else "")
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _read_group_file(group: Path, name: str, *older: str) -> list[str]:
    """Return the words in a file of cgroups v2, or in the equivalent files of cgroups v1.

    Missing files are read as empty.
    """
    words = _read(group / name).split() or [_read(group / file).strip() for file in older]
    return words if len(words) >= len(older) else [""] * len(older)


def _read_field(path: Path, name: str, unit: int = 1) -> int | None:
    """Return the number after a name in a file, times ``unit``; None if it is missing."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1]) * unit
    return None


def _read(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
