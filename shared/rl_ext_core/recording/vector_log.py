"""Logs of the episodes in worker processes.

The parent process appends actions and checksums, because it has them anyway. A worker writes only the generators before
a reset, to shared memory, so that the parent can read them after the worker has died. A step of a worker costs nothing.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_ext_core.recording.episode_log import MAX_STEPS, EpisodeLog, observation_checksum
from rl_ext_core.recording.generators import Generators
from rl_ext_core.recording.recorder import record_setting

__all__ = ["HEAD_BYTES", "HeadWriter", "VectorLog"]

# Shared memory for the generators of an environment. Untouched pages take no memory.
HEAD_BYTES = 1 << 16
_HEADER = 16
_COUNT, _SIZE = range(2)
# Steps that no log needs are deleted in groups.
_TRIM = 1024
_MAX_COPIED_BYTES = 4096


class HeadWriter:
    """Writer of the generators' states before each reset, in the worker.

    :param generators: generators of the environment
    :param block: memory of :data:`HEAD_BYTES` bytes
    """

    def __init__(self, generators: Generators, block: Any) -> None:
        self._generators, self._block = generators, block
        self._cells = memoryview(block)[:_HEADER].cast("Q")
        self._cells[_COUNT] = self._cells[_SIZE] = 0

    def write(self) -> None:
        """Write the states before a reset, unless the reset only continues a game after a lost life."""
        cells = self._cells
        if cells[_COUNT] and not self._generators.is_full_reset():
            return
        packed = pickle.dumps(self._generators.states(), pickle.HIGHEST_PROTOCOL)
        cells[_SIZE] = 0
        cells[_COUNT] += 1
        if len(packed) <= HEAD_BYTES - _HEADER:
            self._block[_HEADER : _HEADER + len(packed)] = packed
            cells[_SIZE] = len(packed)


@dataclasses.dataclass
class _Episode:
    """Log of one environment's episode, in the parent.

    :ivar first: number of its first step; None if it is not recorded
    :ivar head_count: number of heads that the worker had written when the episode was reset
    :ivar settings: calls that set attributes before the reset
    :ivar events: number of the step before which a call was made, name, data, and checksum of its observation. The
        checksum is Ellipsis while the call is pending
    :ivar skipped: numbers of steps that reset the environment, without using the action
    :ivar unknown: numbers of steps whose observations were replaced by those of a reset
    :ivar generators: states of the generators; None if they are in shared memory
    """

    first: int | None = None
    head_count: int = 0
    settings: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    events: list[list[Any]] = dataclasses.field(default_factory=list)
    skipped: set[int] = dataclasses.field(default_factory=set)
    unknown: set[int] = dataclasses.field(default_factory=set)
    generators: dict[tuple[int, str], Any] | None = None


class VectorLog:
    """Logs of the current episodes of a pool of environments.

    :param heads: memory of each environment's generators
    :param observations: shared arrays of the observations, (num_envs, ...) each
    :param build: function that builds an observation from its arrays
    :param at_next_step: whether a step after the end of an episode resets the environment, and ignores its action
    """

    def __init__(
        self,
        heads: Sequence[Any],
        observations: Sequence[np.ndarray[Any, Any]],
        build: Callable[[list[Any]], Any],
        *,
        at_next_step: bool,
    ) -> None:
        self._heads = [memoryview(block) for block in heads]
        self._cells = [head[:_HEADER].cast("Q") for head in self._heads]
        self._observations, self._build, self._at_next_step = observations, build, at_next_step
        # Copying a few small arrays takes less time than the checksum of each environment.
        self._copies = sum(array.nbytes for array in observations) <= _MAX_COPIED_BYTES
        self._episodes = [_Episode() for _ in heads]
        self._settings: list[dict[tuple[str, str], tuple[str, Any]]] = [{} for _ in heads]
        # Actions of each step, and copies of the observations or their checksums.
        self._actions: list[Any] = []
        self._results: list[list[Any]] = []
        self._first_step = 0  # number of self._actions[0]
        self._reset_due: set[int] = set()
        self._pending: list[tuple[int, list[Any]]] = []  # environments, and events whose calls have not returned

    @property
    def _step(self) -> int:
        """Number of the next step."""
        return self._first_step + len(self._actions)

    def begin_reset(self, number: int, arguments: dict[str, Any]) -> None:
        """Record a reset before it is made."""
        self._reset_due.discard(number)
        self._add_event(number, "reset", arguments)

    def begin_call(self, number: int, name: str, data: Any) -> None:
        """Record another call before it is made."""
        record_setting(self._settings[number], name, data)
        self._add_event(number, name, data)

    def _add_event(self, number: int, name: str, data: Any) -> None:
        """Append a pending call to the log of an environment."""
        event = [self._step, name, data, ...]
        self._episodes[number].events.append(event)
        self._pending.append((number, event))

    def begin_step(self, actions: Any) -> None:
        """Record the actions of a step. The caller does not write to them later."""
        self._actions.append(actions)

    def end(self, ended: Sequence[int], failed: Sequence[int]) -> None:
        """Record that all pending calls and steps have returned.

        :param ended: environments whose episodes ended in the pending step
        :param failed: environments whose workers have failed, and are replaced
        """
        if self._pending:
            self._end_calls()
        if len(self._results) < len(self._actions):
            if self._copies:
                self._results.append([array.copy() for array in self._observations])
            else:
                numbers = range(len(self._heads))
                self._results.append([self._checksum(self._observations, number) for number in numbers])
            if ended or self._reset_due:
                self._end_episodes(ended)
                if len(self._actions) > _TRIM:
                    self._trim()
            elif len(self._actions) > MAX_STEPS:
                self._trim()
        for number in failed:
            self._episodes[number] = _Episode()

    def _end_calls(self) -> None:
        """Store the checksums of pending resets, and None for other calls."""
        pending, self._pending = self._pending, []
        for number, event in pending:
            event[3] = None
            if event[1] == "reset":
                event[3] = self._checksum(self._observations, number)
                self._add_reset(number, event)

    def _checksum(self, arrays: Sequence[Any], number: int) -> int:
        """Return the checksum of an environment's observation.

        :param arrays: arrays of the observations of all environments
        :param number: number of the environment
        """
        return observation_checksum(self._build([array[number] for array in arrays]))

    def _add_reset(self, number: int, event: list[Any]) -> None:
        """Begin a new log with a reset, if the worker wrote the generators; otherwise the reset is one of its calls."""
        episode, count = self._episodes[number], self._cells[number][_COUNT]
        if count != episode.head_count:
            settings = list(self._settings[number].values())
            self._episodes[number] = _Episode(event[0], count, settings, [event])

    def _end_episodes(self, ended: Sequence[int]) -> None:
        """Record the automatic resets in or after the last step.

        :param ended: environments whose episodes ended in the step
        """
        last = self._step - 1
        resets, self._reset_due = self._reset_due, set(ended) if self._at_next_step else set()
        if not self._at_next_step:
            resets = set(ended)
        for number in resets:
            event = [last + 1, "reset", {}, self._checksum(self._observations, number)]
            episode = self._episodes[number]
            if self._at_next_step:
                episode.skipped.add(last)
            else:
                episode.unknown.add(last)
            episode.events.append(event)
            self._add_reset(number, event)

    def end_restart(self, numbers: Sequence[int], *, reset_due: bool) -> None:
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
        step = self._step
        events = [[step, name, data, value] for (name, data), value in zip(log.calls, log.checksums, strict=True)]
        count = self._cells[number][_COUNT]
        self._settings[number] = {(name, data[0]): (name, data) for name, data in log.settings}
        self._episodes[number] = _Episode(step, count, log.settings, events, generators=log.generators)

    def _trim(self) -> None:
        """Delete the steps that no log needs. Stop recording the longest episodes if there are too many."""
        for episode in self._episodes:
            if episode.first is not None and self._step - episode.first > MAX_STEPS:
                episode.first = None
        first = min((episode.first for episode in self._episodes if episode.first is not None), default=self._step)
        del self._actions[: first - self._first_step], self._results[: first - self._first_step]
        self._first_step = first

    def episode_log(self, number: int) -> EpisodeLog | None:
        """Return the log of an environment's episode, also while a call is pending or after its worker has died.

        :return: the log; None before the first reset, for an episode of more than ``MAX_STEPS`` steps, and for
            generators whose states take more than ``HEAD_BYTES``
        """
        episode, head = self._episodes[number], self._heads[number]
        count, size = self._cells[number]
        generators = episode.generators
        if generators is None or count != episode.head_count:
            if not size:
                return None
            generators = pickle.loads(head[_HEADER : _HEADER + size])
        if count != episode.head_count:  # a pending reset, maybe an automatic one in the pending step
            pending = [event for event in episode.events if event[3] is ... and event[1] == "reset"]
            arguments = pending[-1][2] if pending else {}
            return EpisodeLog(generators, list(self._settings[number].values()), [("reset", arguments)], [])
        if episode.first is None:
            return None
        calls: list[tuple[str, Any]] = []
        sums: list[int | None] = []
        events = iter([*episode.events, [self._step + 1]])
        event = next(events)
        for step in range(episode.first, self._step + 1):
            while event[0] <= step:
                calls.append((event[1], event[2]))
                sums += [] if event[3] is ... else [event[3]]
                event = next(events)
            if step < self._step and step not in episode.skipped:
                calls.append(("step", self._actions[step - self._first_step][number]))
                sums += self._result(step, number)
        return EpisodeLog(generators, episode.settings, calls, sums)

    def _result(self, step: int, number: int) -> list[int | None]:
        """Return the checksum of a step of an environment in a list, which is empty while the step is pending."""
        results = self._results[step - self._first_step : step - self._first_step + 1]
        if step in self._episodes[number].unknown:
            return [None] * len(results)
        return [self._checksum(found, number) if self._copies else found[number] for found in results]
