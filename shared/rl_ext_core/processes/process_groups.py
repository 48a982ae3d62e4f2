"""Kill worker processes together with the processes that they have started.

Each worker leads a process group, so that its child processes can be found after its death. A program that creates its
own group or session, as daemons do, is found only while the worker lives. On Windows, ``_windows.Job`` does the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
# Number of listings, because a process may fork while the processes are listed.
_ROUNDS = 3


def create_process_group() -> None:
    """Make this process the leader of a new process group.

    Ctrl-C and Ctrl-Z in the terminal then reach only the parent process. This process stays in its session, because
    Linux schedules sessions as groups (``sched_autogroup``). Wake-ups between sessions take longer on a busy machine.
    """
    if hasattr(os, "setpgid"):
        with suppress(PermissionError):  # this process leads a session
            os.setpgid(0, 0)


def kill_process_trees(living: Collection[int], ended: Collection[int] = ()) -> None:
    """Kill group leaders, and the processes started by them and by leaders that have ended."""
    leaders = {*living, *ended}
    found = {*living, *_find_members(leaders)}
    for _ in range(_ROUNDS):
        for leader in leaders:
            kill_group(leader)
        _kill(found)
        found = _find_members(leaders) - found
        if not found:
            return


def kill_group(leader: int) -> None:
    """Kill all processes of a group. On Windows, do nothing."""
    with suppress(OSError, AttributeError):
        os.killpg(leader, _KILL)


def kill_descendants() -> None:
    """Kill the processes that this process has started. Without ``/proc``, do nothing."""
    _kill(_find_members([os.getpid()]) - {os.getpid()})


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # the process has ended, or belongs to another user
            os.kill(pid, _KILL)


def _find_members(leaders: Collection[int]) -> set[int]:
    """Return the members of groups and the descendants of their leaders."""
    parents: dict[int, list[int]] = {}
    found = set()
    for pid, parent, group in _list_processes():
        parents.setdefault(parent, []).append(pid)
        if group in leaders:
            found.add(pid)
    waiting = list(leaders)
    while waiting:
        children = parents.pop(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def _list_processes() -> list[tuple[int, int, int]]:
    """List (pid, parent's pid, group) of processes except zombies; empty without ``/proc``."""
    found: list[tuple[int, int, int]] = []
    entries: list[Path] = []
    with suppress(OSError):  # no /proc, or no file descriptor is left; groups are killed all the same
        entries = list(Path("/proc").iterdir())
    for entry in entries:
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                state, parent, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if state != b"Z":
                    found.append((int(entry.name), int(parent), int(group)))
    return found
