"""Logs of the episodes in worker processes.

After each step, the parent process copies the pool's shared memory, which contains actions, observations and ends of
episodes. It derives the episodes from these copies only when they are needed. A worker writes only the generators
before a reset, to shared memory, so that the parent can read them after the worker has died.
"""

from __future__ import annotations

import dataclasses
import pickle
from array import array
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from rl_ext_core.recording.episode_log import MAX_STEPS, EpisodeLog, observation_checksum, record_setting, step_checksum
from rl_ext_core.recording.generators import Generators, Snapshot, read_snapshot
from rl_ext_core.recording.memory_layout import OTHER_REWARD, SKIPPED, TERMINATED, TRUNCATED, MemoryLayout

__all__ = ["HEAD_BYTES", "HeadWriter", "VectorLog"]

# Shared memory for the generators of an environment. Untouched pages take no memory.
HEAD_BYTES = 1 << 16
_HEADER = 24
# Number of resets, number of the reset that began the episode, and size of the pickled generators.
_COUNT, _START, _SIZE = range(3)
# Steps that no log needs are deleted in groups.
_TRIM = 1024
# Larger observations are not copied. Their checksums are stored.
_MAX_COPIED_BYTES = 4096
# Memory for the steps of a pool. Episodes that need more are not recorded.
_MAX_BYTES = 128 << 20


class HeadWriter:
    """Writer of the generators' states before each reset, in the worker.

    :param generators: generators of the environment
    :param block: memory of :data:`HEAD_BYTES` bytes
    """

    def __init__(self, generators: Generators, block: Any) -> None:
        self._generators, self._block = generators, block
        self._cells = memoryview(block)[:_HEADER].cast("Q")
        self._cells[_COUNT] = self._cells[_START] = self._cells[_SIZE] = 0
        # Places of the generators whose pickled snapshot is in the block, place of its bytes, and its size.
        self._written: tuple[Any, slice, int] = (None, slice(0), 0)

    def write(self) -> None:
        """Count a reset, and write the states before it, unless it only continues a game after a lost life."""
        cells = self._cells
        cells[_COUNT] += 1
        if cells[_START] and not self._generators.is_full_reset():
            return
        snapshot = self._generators.snapshot()
        cells[_SIZE] = 0  # until the states are complete
        cells[_START] = cells[_COUNT]
        places, part, size = self._written
        if type(snapshot) is tuple and snapshot[0] is places:
            self._block[part] = snapshot[1]
        else:
            size = self._write_snapshot(snapshot)
        cells[_SIZE] = size

    def _write_snapshot(self, snapshot: Snapshot) -> int:
        """Write a pickled snapshot, and return its size; 0 if it is too large."""
        packed = pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL)
        if len(packed) > HEAD_BYTES - _HEADER:
            return 0
        self._block[_HEADER : _HEADER + len(packed)] = packed
        if isinstance(snapshot, tuple):  # the next snapshot will differ in these bytes only
            start = _HEADER + packed.index(snapshot[1])
            self._written = snapshot[0], slice(start, start + len(snapshot[1])), len(packed)
        return len(packed)


@dataclasses.dataclass
class _Event:
    """Reset or other call of an environment, in the parent.

    :ivar step: number of the step before which the call was made
    :ivar name: name of the call
    :ivar data: data of the call
    :ivar checksum: checksum of the returned observation; None for other calls than resets, Ellipsis for pending calls
    :ivar reset: number of the reset, as the worker counts; 0 for other calls and pending resets
    :ivar automatic: whether this is an automatic reset, in the step before
    """

    step: int
    name: str
    data: Any
    checksum: Any = ...
    reset: int = 0
    automatic: bool = False


@dataclasses.dataclass
class _Episode:
    """Log of one environment's episode, in the parent.

    :ivar resets: number of resets that have returned, since the worker's start
    :ivar start: number of the reset that began the episode
    :ivar events: calls since this reset. If it is not the first of them, the episode is not recorded
    :ivar settings: calls that set attributes before the reset
    :ivar generators: states of the generators; None if they are in shared memory
    """

    resets: int = 0
    start: int = 0
    events: list[_Event] = dataclasses.field(default_factory=list)
    settings: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    generators: dict[tuple[int, str], Any] | None = None

    @property
    def first(self) -> int | None:
        """Number of the first step; None if the episode is not recorded."""
        return self.events[0].step if self.events and self.events[0].reset == self.start else None


class VectorLog:
    """Logs of the current episodes of a pool of environments.

    :param heads: memory of each environment's generators
    :param block: shared memory of the pool
    :param layout: layout of this memory
    :param reset_delay: number of steps from the end of an episode to the step that resets the environment, 0 or 1; None
        if no step resets it
    :param ended: bits of the flags of an environment whose episode has ended
    """

    def __init__(
        self, heads: Iterable[Any], block: Any, layout: MemoryLayout, *, reset_delay: int | None, ended: int
    ) -> None:
        self._heads = [memoryview(head) for head in heads]
        self._cells = [head[:_HEADER].cast("Q") for head in self._heads]
        self._layout, self._reset_delay, self._ended = layout, reset_delay, ended
        self._arrays = layout.arrays(block)
        n_parts, number = len(layout.paths), len(self._heads)
        self._observations = [self._arrays[f"observation {index}"] for index in range(n_parts)]
        # Copying a few small arrays takes less time than the checksum of each environment. Observations come first.
        self._copies = sum(part.nbytes for part in self._observations) <= _MAX_COPIED_BYTES
        self._offset = 0 if self._copies else layout.fields[n_parts][1]
        self._memory = memoryview(block)[self._offset : layout.size]
        flags_at = layout.fields[-1][1] - self._offset
        self._flags, self._no_flags = slice(flags_at, flags_at + number), bytes(number)
        self._max_steps = min(MAX_STEPS, _MAX_BYTES // (len(self._memory) + 4 * number))
        self._episodes = [_Episode() for _ in range(number)]
        self._settings: list[dict[tuple[str, str], tuple[str, Any]]] = [{} for _ in range(number)]
        # Copies of the memory after each step, maybe with the checksums of all observations at the end.
        self._rows: list[bytes] = []
        self._first_step = 0  # number of self._rows[0]
        self._next_trim = _TRIM  # number of rows
        self._n_read = 0  # number of the first step that _read_rows has not read
        self._actions: dict[int, Any] = {}  # actions that are not in shared memory, by the number of the step
        self._pending_step: Any = None  # its actions; Ellipsis for those in shared memory
        self._pending: list[tuple[int, _Event]] = []  # environments and their calls that have not returned
        self._reset_due: set[int] = set()  # environments that the first step that was not read resets

    @property
    def _step(self) -> int:
        """Number of the next step, or of the pending one."""
        return self._first_step + len(self._rows)

    def begin_reset(self, number: int, arguments: dict[str, Any]) -> None:
        """Record a reset before it is made."""
        self._add_call(number, "reset", arguments)
        self._reset_due.discard(number)

    def begin_call(self, number: int, name: str, data: Any) -> None:
        """Record another call before it is made. The caller does not change its data later."""
        self._add_call(number, name, data)
        record_setting(self._settings[number], name, data)

    def _add_call(self, number: int, name: str, data: Any) -> None:
        """Append a pending call to the log of an environment."""
        self._read_rows()
        self._pending_step = None  # otherwise it was interrupted before it was sent
        event = _Event(self._step, name, data)
        self._episodes[number].events.append(event)
        self._pending.append((number, event))

    def begin_step(self, actions: Any = ...) -> None:
        """Record the actions of a step before it is made.

        :param actions: an action for each environment, which the caller does not change later; default: those in
            shared memory
        """
        self._pending_step = actions

    def end(self) -> None:
        """Record that all pending calls and steps have returned."""
        if self._pending:
            self._end_calls()
        if self._pending_step is not None:
            if self._pending_step is not ...:
                self._actions[self._step] = self._pending_step
            self._pending_step = None
            row = self._memory.tobytes()
            if not self._copies:
                row += array("I", [self._checksum(self._observations, n) for n in range(len(self._heads))]).tobytes()
            self._rows.append(row)
            if len(self._rows) >= self._next_trim:
                self._trim()

    def _end_calls(self) -> None:
        """Store the checksums of pending resets, and None for other calls."""
        pending, self._pending = self._pending, []
        for number, event in pending:
            event.checksum = None
            if event.name == "reset":
                event.checksum = self._checksum(self._observations, number)
                self._episodes[number].resets += 1
                event.reset = self._episodes[number].resets
                self._find_start(number)

    def _checksum(self, parts: Iterable[Any], number: int) -> int:
        """Return the checksum of an environment's observation.

        :param parts: arrays of the observations of all environments
        :param number: number of the environment
        """
        return observation_checksum(self._layout.build_observation([part[number] for part in parts]))

    def _read_rows(self) -> None:
        """Find the automatic resets in steps that were not read."""
        if self._n_read == self._step:
            return
        changed: set[int] = set()
        part, no_flags = self._flags, self._no_flags
        for step, row in enumerate(self._rows[self._n_read - self._first_step :], self._n_read):
            flags = row[part]
            if flags == no_flags and not self._reset_due:
                continue
            resets = {number for number, flag in enumerate(flags) if flag & self._ended}
            if self._reset_delay == 1:
                resets, self._reset_due = self._reset_due, resets
            for number in resets if self._reset_delay is not None else ():
                episode = self._episodes[number]
                episode.resets += 1
                if episode.resets >= self._cells[number][_START]:  # otherwise it belongs to an earlier episode
                    checksum = self._row_checksum(step, number)
                    episode.events.append(_Event(step + 1, "reset", {}, checksum, episode.resets, automatic=True))
                    changed.add(number)
        self._n_read = self._step
        for number in changed:
            self._find_start(number)

    def _find_start(self, number: int) -> None:
        """Begin a new log with the reset before which the worker wrote the generators, if it is finished."""
        episode, start = self._episodes[number], self._cells[number][_START]
        if episode.start != start <= episode.resets:
            places = [place for place, event in enumerate(episode.events) if event.reset == start]
            events = episode.events[places[0] :] if places else []
            self._episodes[number] = _Episode(episode.resets, start, events, list(self._settings[number].values()))

    def _row_checksum(self, step: int, number: int) -> int:
        """Return the checksum of an environment's observation after a step."""
        row, count = self._rows[step - self._first_step], len(self._heads)
        if not self._copies:
            return memoryview(row)[-4 * count :].cast("I")[number]
        fields = self._layout.fields[: len(self._observations)]
        return self._checksum([np.ndarray(shape, dtype, row, at) for _, at, shape, dtype in fields], number)

    def _step_checksum(self, step: int, number: int) -> int:
        """Return the checksum of what a step of an environment returned."""
        row, values = self._rows[step - self._first_step], {}
        for name, at, shape, dtype in self._layout.fields[-3:]:
            values[name] = np.ndarray(shape, dtype, row, at - self._offset)[number].item()
        flags = values["flags"]
        reward = None if values["reward kind"] == OTHER_REWARD else values["reward"]
        return step_checksum(self._row_checksum(step, number), reward, flags & TERMINATED, flags & TRUNCATED)

    def _action(self, step: int, number: int) -> Any:
        """Return a copy of an environment's action of a step, which may be pending."""
        is_pending = step == self._step
        actions = self._pending_step if is_pending else self._actions.get(step, ...)
        if actions is ... and is_pending:
            actions = self._arrays["action"]
        elif actions is ...:
            _, at, shape, dtype = self._layout.fields[len(self._observations)]
            actions = np.ndarray(shape, dtype, self._rows[step - self._first_step], at - self._offset)
        return actions[number].copy() if isinstance(actions, np.ndarray) else actions[number]

    def drop_episodes(self, numbers: Collection[int]) -> None:
        """Record that the worker of environments has ended, and that a new one may be started."""
        self._read_rows()
        for number in numbers:
            self._episodes[number] = _Episode()
            self._cells[number][_COUNT] = self._cells[number][_START] = self._cells[number][_SIZE] = 0
            self._reset_due.discard(number)
        self._pending = [(number, event) for number, event in self._pending if number not in numbers]

    def end_restart(self, numbers: Iterable[int], *, reset_due: bool) -> None:
        """Record that the environments of a new worker were reset.

        :param numbers: numbers of the environments
        :param reset_due: whether their next step resets them again
        """
        self._end_calls()
        if reset_due:
            self._reset_due.update(numbers)

    def continue_episode(self, number: int, log: EpisodeLog) -> None:
        """Record that an environment has repeated a log.

        The worker has written other generators than those of the log, so they are stored here.
        """
        self._read_rows()
        start = self._episodes[number].resets + 1
        pairs = zip(log.calls, log.checksums, strict=True)
        events = [_Event(self._step, name, data, value) for (name, data), value in pairs]
        events[0].reset = start
        self._settings[number] = {(name, data[0]): (name, data) for name, data in log.settings}
        self._episodes[number] = _Episode(start, start, events, log.settings, log.generators)

    def _trim(self) -> None:
        """Delete the steps that no log needs. Stop recording the longest episodes if there are too many."""
        self._read_rows()
        firsts = [self._step]
        for episode in self._episodes:
            first = episode.first
            if first is not None and self._step - first + len(episode.events) <= self._max_steps:
                firsts.append(first)
            else:
                episode.events.clear()
        first = min(firsts)
        del self._rows[: first - self._first_step]
        self._actions = {step: actions for step, actions in self._actions.items() if step >= first}
        self._first_step, self._next_trim = first, len(self._rows) + _TRIM

    def episode_log(self, number: int) -> EpisodeLog | None:
        """Return the log of an environment's episode, also while a call is pending or after its worker has died.

        :return: the log. None before the first reset, and if the episode takes too many steps or bytes, or the states
            of its generators more than ``HEAD_BYTES``
        """
        self._read_rows()
        episode, head = self._episodes[number], self._heads[number]
        _, start, size = self._cells[number]
        is_reset_pending = start > episode.resets
        generators = None if is_reset_pending else episode.generators
        if generators is None:
            if not size:
                return None
            generators = read_snapshot(pickle.loads(head[_HEADER : _HEADER + size]))
        if is_reset_pending:  # maybe an automatic one in the pending step
            pending = [event for event in episode.events if event.checksum is ... and event.name == "reset"]
            arguments = pending[-1].data if pending else {}
            return EpisodeLog(generators, list(self._settings[number].values()), [("reset", arguments)], [])
        if episode.first is None:
            return None
        return EpisodeLog(generators, episode.settings, *self._calls(number))

    def _calls(self, number: int) -> tuple[list[tuple[str, Any]], list[int | None]]:
        """Return the calls of an environment's episode, and the checksums of those that have returned."""
        events = self._episodes[number].events
        resets = {event.step - 1 for event in events if event.automatic}  # steps whose observations are of a reset
        calls: list[tuple[str, Any]] = []
        sums: list[int | None] = []
        step = events[0].step
        for event in [*events, _Event(self._step, "", None)]:
            for at in range(step, event.step):
                if self._rows[at - self._first_step][self._flags.start + number] & SKIPPED:
                    continue
                if at not in resets:
                    calls.append(("step", self._action(at, number)))
                    sums.append(self._step_checksum(at, number))
                elif not self._reset_delay:
                    calls.append(("step", self._action(at, number)))
                    sums.append(None)
            step = event.step
            if event.name:
                calls.append((event.name, event.data))
                sums += [] if event.checksum is ... else [event.checksum]
        if self._pending_step is not None:
            is_reset = number in self._reset_due
            calls.append(("reset", {}) if is_reset else ("step", self._action(step, number)))
        return calls, sums
