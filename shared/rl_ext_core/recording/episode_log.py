"""Log of an episode: the generators at its reset, and the calls since.

An environment is a function of the code that builds it, of its random generators at the last reset, and of the calls
since. So its state can be restored by repeating these calls, without copying the memory of a simulator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core import _pickle
from rl_ext_core._values import copy_output
from rl_ext_core.recording.generators import read_snapshot

# Memory for the log of an environment. Untouched pages take no memory.
LOG_BYTES = 16 << 20
# Longer episodes are not recorded.
MAX_STEPS = 100_000
_TABLE_BYTES = 12 << 20
_HEADER = 64
# Number of calls that have begun, and where the pickled data end, 0 if there is no log
CALLS, _END = range(2)
_NO_SETTINGS = pickle.dumps([])
_FAILED = 1 << 32  # is added to the number of calls after one that raised an exception
# The result of a call is the checksum of its observation, with these flags: it has returned, it has ended the episode,
# and its checksum is not known.
RETURNED, TERMINATED, TRUNCATED, NOT_CHECKED = (1 << bit for bit in range(32, 36))
# Arrays up to this size are checked completely. Of larger ones, these bytes are, because each word that is read takes
# about as long as a cache miss.
MAX_CHECKED_BYTES, _SAMPLED_BYTES = 8192, 2048


@dataclasses.dataclass(frozen=True)
class EpisodeLog:
    """Everything that is needed to repeat an episode from its reset.

    :ivar generators: states of the environment's generators before the reset, see
        :class:`~rl_ext_core.recording.generators.Generators`
    :ivar settings: calls that set attributes before the reset, as (name, data)
    :ivar calls: calls since, in order: ``("reset", {"seed": ..., "options": ...})``, ``("step", action)``, or the name
        and data of another call. The first one is a reset
    :ivar checksums: checksum of what each finished call returned: observation, reward and end of the episode; None if
        it is not known
    """

    generators: dict[tuple[int, str], Any]
    settings: list[tuple[str, Any]]
    calls: list[tuple[str, Any]]
    checksums: list[int | None]

    @property
    def steps(self) -> int:
        """Number of steps, including one that did not return."""
        return sum(name == "step" for name, _ in self.calls)

    @property
    def is_interrupted(self) -> bool:
        """Whether the last call did not return."""
        return len(self.checksums) < len(self.calls)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Result of repeating an episode.

    :ivar observation: observation that the last call returned
    :ivar first_difference: number of the first step whose observation, reward or end differs from the recorded one, 0
        for the reset; None if all are equal
    """

    observation: Any
    first_difference: int | None


class LogMemory:
    """Memory in which an environment's process writes the log of its episode, and which another process may read.

    Each call has an entry of fixed size. Calls other than steps, and actions that are not like those of the space, are
    pickled after the generators, with their number.

    :param action_space: action space of the environment
    :param memory: :data:`LOG_BYTES` bytes of shared memory; default: memory of this process
    """

    def __init__(self, action_space: Any, memory: Any = None) -> None:
        shape, dtype = getattr(action_space, "shape", None), getattr(action_space, "dtype", None)
        # memoryview supports these dtypes. Other actions are pickled.
        has_column = shape is not None and dtype is not None and dtype.isnative and dtype.char in "?bBhHiIlLqQfd"
        fields: list[Any] = [("reward", "d"), ("result", "Q")]
        fields += [("action", dtype, shape)] if has_column else []
        entry = np.dtype(fields, align=True)
        self.limit = min(MAX_STEPS, _TABLE_BYTES // entry.itemsize)
        self.memory = memoryview(_new_memory() if memory is None else memory)
        entries: Any = np.ndarray(self.limit, entry, self.memory, _HEADER)
        self._data_start = _HEADER + self.limit * entry.itemsize
        self.cells = self.memory[:_HEADER].cast("Q")
        # Writing an item of a memoryview takes a third of the time of an array's.
        self._results: Any = entries["result"]
        self.results = memoryview(self._results)
        self.rewards: Any = memoryview(entries["reward"])
        self.actions: Any = None
        self.action_type: Any = None  # type of the actions in the entries
        if has_column:
            self.actions, self.action_type = entries["action"], np.ndarray
            if shape == ():
                self.actions, self.action_type = memoryview(self.actions), self.actions.dtype.type

    @property
    def is_started(self) -> bool:
        """Whether there is a log."""
        return self.cells[_END] > 0

    def clear(self) -> None:
        """Drop the log."""
        self.cells[_END] = 0

    def start(self, snapshot: bytes, settings: list[tuple[str, Any]], arguments: dict[str, Any]) -> None:
        """Begin a new log with a reset, from generators, calls that set attributes, and arguments."""
        cells, packed = self.cells, pickle_value(settings) if settings else _NO_SETTINGS
        end = self._data_start + len(snapshot) + len(packed)
        cells[_END] = 0  # until the log is complete
        self._results[: cells[CALLS] % _FAILED + 1] = 0
        cells[CALLS] = 0 if arguments else 1  # a reset without arguments is known without data
        if packed and end <= LOG_BYTES:
            self.memory[self._data_start : end] = snapshot + packed
            cells[_END] = end
            if arguments:
                self.begin("reset", arguments)

    def begin(self, name: str, data: Any) -> None:
        """Record a call before it is made. Without memory for it, or after a call that has failed, drop the log."""
        cells = self.cells
        index, start = cells[CALLS], cells[_END]
        packed = pickle_value((index, name, data)) if start and index < self.limit else b""
        if not packed or start + len(packed) > LOG_BYTES:
            self.clear()
            return
        self.memory[start : start + len(packed)] = packed
        cells[_END] = start + len(packed)
        cells[CALLS] = index + 1

    def end(self, observation: Any = None, reward: Any = 0.0, flags: int = 0) -> None:
        """Record what the last call has returned, with flags other than ``RETURNED``."""
        index = self.cells[CALLS] - 1
        if not self.is_started or index >= self.limit:
            return
        try:
            self.rewards[index] = reward
        except Exception:  # a reward that is not a number
            self.rewards[index], observation = 0.0, (observation, reward)
        try:
            checksum = 0 if observation is None else observation_checksum(observation)
        except Exception:  # objects of the user, and tensors that NumPy cannot represent, such as bfloat16
            checksum = NOT_CHECKED
        self.results[index] = RETURNED | flags | checksum

    def make_step(
        self, env: Any, report_failure: Callable[[BaseException, str], None]
    ) -> Callable[[Any], tuple[Any, Any, bool, bool, dict[str, Any]]]:
        """Return a function that steps an environment and records the step.

        Each attribute that it would look up takes a tenth of the time of recording.
        """
        cells, limit, actions, action_type = self.cells, self.limit, self.actions, self.action_type
        rewards, results, calls_at, returned, ndarray = self.rewards, self.results, CALLS, RETURNED, np.ndarray
        shape, dtype = (actions.shape[1:], actions.dtype) if action_type is ndarray else ((), None)
        space = getattr(env, "observation_space", None)
        is_small = isinstance(space, gymnasium.spaces.Box) and space.low.nbytes <= MAX_CHECKED_BYTES
        checksum: Callable[[Any], int] = zlib.crc32 if is_small else observation_checksum

        def step(action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            index = cells[calls_at]
            if (
                type(action) is action_type
                and index < limit
                and (action_type is not ndarray or (action.shape == shape and action.dtype == dtype))
            ):
                actions[index] = action
                cells[calls_at] = index + 1
            else:
                self.begin("step", copy_output(action))
            try:
                result: tuple[Any, Any, bool, bool, dict[str, Any]] = env.step(action)
            except BaseException as error:
                report_failure(error, "step")
                raise
            try:
                observation, reward, terminated, truncated, _ = result
                rewards[index] = reward
                flags = returned
                if terminated or truncated:
                    flags += TERMINATED * terminated + TRUNCATED * truncated
                results[index] = checksum(observation) + flags
            except Exception:  # observations that are not arrays, rewards that are not numbers, and no more memory
                self.end(result[0], result[1], TERMINATED * bool(result[2]) + TRUNCATED * bool(result[3]))
            return result

        return step

    def end_by_failure(self) -> None:
        """Record that the last call has raised an exception, after which the log ends."""
        if self.cells[CALLS] <= self.limit:
            self.cells[CALLS] += _FAILED

    def last_checksum(self) -> int | None:
        """Return the checksum of the last call."""
        index = self.cells[CALLS]
        return self._checksums(index - 1, index)[0] if self.is_started else None

    def _checksums(self, start: int, stop: int) -> list[int | None]:
        checksums: list[int | None] = []
        for reward, result in zip(self.rewards[start:stop].tolist(), self.results[start:stop].tolist(), strict=True):
            if result:
                entry = reward, result % RETURNED, result // RETURNED
                checksums.append(None if result & NOT_CHECKED else zlib.crc32(repr(entry).encode()))
        return checksums

    def read(self) -> EpisodeLog | None:
        """Return the log, also while a call is pending or after the environment's process has died.

        :return: the log. None before the first reset, and if the episode takes too many steps or bytes
        """
        count = self.cells[CALLS] % _FAILED
        if not self.is_started:
            return None
        actions: Any = [None] * count if self.actions is None else np.array(self.actions[:count])
        calls = [("reset", {}), *(("step", action) for action in actions[1:])][:count]
        file = io.BytesIO(self.memory[self._data_start : self.cells[_END]])
        generators, settings = read_snapshot(file), pickle.load(file)
        while file.tell() < len(file.getbuffer()):
            index, name, data = pickle.load(file)
            if index < count:  # otherwise the process has died before it began this call
                calls[index] = name, data
        return EpisodeLog(generators, settings, calls, self._checksums(0, count))


def _new_memory() -> mmap.mmap:
    """Return memory of this process. A forked process gets a copy."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return mmap.mmap(-1, LOG_BYTES)
    memory = mmap.mmap(-1, LOG_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # Linux would use 2 MiB for the first byte
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def pickle_value(value: Any) -> bytes:
    """Pickle a value, by value if plain pickle fails; return nothing if both fail."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # objects of the user
        try:
            return _pickle.dumps(value)
        except Exception:
            return b""


def observation_checksum(observation: Any) -> int:
    """Return a checksum of an observation: an array, a tensor, or nested dicts and tuples of them.

    Of a large array, evenly spaced words are read, because the checksum of all takes as long as a step of Atari.
    """
    if type(observation) is np.ndarray and not observation.dtype.hasobject:
        if (size := observation.nbytes) > MAX_CHECKED_BYTES:
            words = np.ascontiguousarray(observation).reshape(-1).view(np.uint8)[: size & ~7].view(np.uint64)
            observation = words[:: size // _SAMPLED_BYTES + 1]
        try:
            return zlib.crc32(observation)
        except ValueError:  # an array that is not contiguous
            return zlib.crc32(observation.tobytes())
    if isinstance(observation, (dict, tuple, list)):
        parts = observation.items() if isinstance(observation, dict) else enumerate(observation)
        return zlib.crc32(repr([(key, observation_checksum(part)) for key, part in parts]).encode())
    if callable(detach := getattr(observation, "detach", None)):  # a tensor of torch
        observation = detach().cpu()
    array = np.asarray(observation)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {type(observation).__name__} cannot be compared in another process")
    return observation_checksum(array)
