"""Killing workers with all that they have started.

Each worker leads a process group, so that what it starts can be found when it is gone. A program that makes a group or
a session of its own, as daemons do, is found only while the worker lives. Windows has job objects for this, see
``_windows.Job``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["kill_process_trees", "kill_group", "kill_descendants", "create_process_group"]

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
# A process may fork while its family is listed.
_ROUNDS = 3


def create_process_group() -> None:
    """Make this process the leader of a group, not the terminal's own: Ctrl-C and Ctrl-Z there are its parent's.

    Not of a session: Linux schedules sessions as groups (``sched_autogroup``), and on a busy machine a wake-up from one
    to another waits.
    """
    if hasattr(os, "setpgid"):
        with suppress(PermissionError):  # it leads a session
            os.setpgid(0, 0)


def kill_process_trees(living: Collection[int], ended: Collection[int] = ()) -> None:
    """Kill leaders of groups, and what they and those that have ended have started.

    :param living: numbers of leaders that were not waited for
    :param ended: numbers of leaders that are gone
    """
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
    """Kill the members of a group, where there are groups."""
    with suppress(OSError, AttributeError):
        os.killpg(leader, _KILL)


def kill_descendants() -> None:
    """Kill what this process has started, but not this process. Where there is no ``/proc`` this does nothing."""
    _kill(_find_members([os.getpid()]) - {os.getpid()})


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(OSError):  # it is gone, or is another user's
            os.kill(pid, _KILL)


def _find_members(leaders: Collection[int]) -> set[int]:
    """Find the members of groups, and what descends from their leaders."""
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
    """List numbers of processes, their parents and groups, where there is ``/proc``, except zombies."""
    found: list[tuple[int, int, int]] = []
    entries: list[Path] = []
    with suppress(OSError):  # also where no descriptor is left: groups are found all the same
        entries = list(Path("/proc").iterdir())
    for entry in entries:
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                state, parent, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if state != b"Z":
                    found.append((int(entry.name), int(parent), int(group)))
    return found
