"""A worker and all that it has started, and what that has started: they end together.

Each worker leads a process group, so that what it starts can be found when it is gone. What shall outlive it makes a
group or session of its own, as daemons do, and is found only while the worker lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

__all__ = ["kill_families", "kill_own_family", "lead_group"]

# Something may fork while it is looked for.
_ROUNDS = 3


def lead_group() -> None:
    """Make this process the leader of a group, not the terminal's own: Ctrl-C and Ctrl-Z there are its parent's.

    No session: Linux schedules sessions as groups (``sched_autogroup``), and on a busy machine a wake-up from one to
    another waits.
    """
    with contextlib.suppress(PermissionError):  # it leads a session
        os.setpgid(0, 0)


def kill_families(living: Collection[int], ended: Collection[int] = ()) -> None:
    """Kill processes with all that they have started.

    :param living: leaders that have not been waited for
    :param ended: leaders that are gone
    """
    leaders = {*living, *ended}
    found = {*living, *_members(leaders)}
    for _ in range(_ROUNDS):
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        found = _members(leaders) - found
        if not found:
            return


def kill_own_family() -> None:
    """Kill what this process has started, and leave it alone."""
    for pid in _members([os.getpid()]) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _members(leaders: Collection[int]) -> set[int]:
    """Find the members of groups, and what descends from their leaders, as far as the system tells."""
    parents: dict[int, list[int]] = {}
    found = set()
    for pid, parent, group in _processes():
        parents.setdefault(parent, []).append(pid)
        if group in leaders:
            found.add(pid)
    waiting = list(leaders)
    while waiting:
        children = parents.pop(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def _processes() -> list[tuple[int, int, int]]:
    """List each process's number, its parent's and that of its group; zombies are gone already."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if state != b"Z":
                    found.append((int(entry.name), int(parent), int(group)))
    return found
