"""Log of an episode: the generators at its reset, and the calls since.

An environment is a function of the code that builds it, of its random generators at the last reset, and of the calls
since. So its state can be restored by repeating these calls, without copying the memory of a simulator.

The log is in a block of memory that survives the process if it is shared. The block starts with a few integers. Rare
events follow as pickles: resets, calls, and actions that are not arrays. All other actions have slots of equal size.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import pickle
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["BLOCK_BYTES", "EpisodeLog", "LogWriter", "Repetition", "checksum", "read_log"]

# Pages of the block that were never written take no memory.
BLOCK_BYTES = 4 << 20
_HEADER, _EVENTS_END = 64, 1 << 20
# Indices of the integers. The writer counts a step as begun before it calls the environment, and as done after.
_EVENTS_SIZE, _BEGUN, _DONE, _IS_FULL = range(4)
_CHECKSUM_BYTES = 4
_MAX_CHECKED_BYTES = 8192


@dataclasses.dataclass(frozen=True)
class EpisodeLog:
    """What is needed to repeat an episode from its reset.

    :ivar generators: states of the environment's generators before the reset, see
        :func:`~rl_ext_core.recording.generators.generator_states`
    :ivar settings: calls that set attributes before the reset, as (name, data)
    :ivar calls: calls since, in order: ``("reset", {"seed": ..., "options": ...})``, ``("step", action)``, or the name
        and data of another call. The first one is a reset
    :ivar checksums: checksum of the observation that each finished reset or step returned; None for other calls
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
    :ivar first_difference: number of the first step whose observation differs from the recorded one, 0 for the reset;
        None if all are equal
    """

    observation: Any
    first_difference: int | None


def checksum(observation: Any) -> int:
    """Return a checksum of an observation: an array, a number, or nested dicts and tuples of them.

    Of a large array, evenly spaced words are read, because the checksum of all takes as long as a step of Atari.
    """
    if type(observation) is np.ndarray:
        size = observation.nbytes
        if not observation.flags.c_contiguous:
            observation = np.ascontiguousarray(observation)
        if size > _MAX_CHECKED_BYTES:
            whole = observation.reshape(-1).view(np.uint8)[: size & ~7].view(np.uint64)
            observation = np.ascontiguousarray(whole[:: size // _MAX_CHECKED_BYTES + 1])
        return zlib.crc32(observation)
    if isinstance(observation, dict):
        return zlib.crc32(repr([(key, checksum(part)) for key, part in observation.items()]).encode())
    if isinstance(observation, (tuple, list)):
        return zlib.crc32(repr([checksum(part) for part in observation]).encode())
    return zlib.crc32(repr(np.asarray(observation).tolist()).encode())


class LogWriter:
    """Writer of an episode's log.

    :param block: memory of :data:`BLOCK_BYTES` bytes; default: memory of this process
    """

    def __init__(self, block: mmap.mmap | None = None) -> None:
        self.block = mmap.mmap(-1, BLOCK_BYTES) if block is None else block
        self._cells = memoryview(self.block)[:_HEADER].cast("Q")
        self._stop()

    def start(self, head: tuple[Any, ...]) -> None:
        """Begin a log, whose first call is a reset.

        :param head: generators, settings, and arguments of the reset
        """
        self._stop()  # a reader of a half-written start finds an incomplete log
        for cell in (_EVENTS_SIZE, _BEGUN, _DONE):
            self._cells[cell] = 0
        self._begun, self._position, self.is_full = 0, _EVENTS_END, False
        self._kind: Any = None
        self.add_event("start", head)
        self._cells[_IS_FULL] = self.is_full

    def _stop(self) -> None:
        """Stop recording until the next reset."""
        self.is_full, self._kind = True, None
        self._cells[_IS_FULL] = 1

    def add_event(self, name: str, data: Any) -> None:
        """Append a call that has no slot, before it is made, or the checksum of its observation."""
        if self.is_full:
            return
        try:
            packed = pickle.dumps((self._begun, name, data), pickle.HIGHEST_PROTOCOL)
        except Exception:  # an argument that cannot be pickled, whose code may raise anything
            self._stop()
            return
        begin = _HEADER + self._cells[_EVENTS_SIZE]
        if begin + len(packed) > _EVENTS_END:
            self._stop()
            return
        self.block[begin : begin + len(packed)] = packed
        self._cells[_EVENTS_SIZE] += len(packed)

    def end_event(self, observation: Any = None) -> None:
        """Record that the last event's call has returned."""
        self.add_event("checksum", None if observation is None else checksum(observation))

    def begin_step(self, action: Any) -> bool:
        """Append an action, before the environment gets it; return whether it has a slot."""
        fits = type(action) is self._kind and action.dtype == self._dtype and action.shape == self._shape
        if not fits and (self.is_full or not self._begin_slots(action)):
            self.add_event("step", action)
            return False
        end = self._position + self._slot_bytes
        if end > BLOCK_BYTES:
            self._stop()
            return False
        try:
            self.block[self._position + _CHECKSUM_BYTES : end] = action
        except (BufferError, ValueError):  # an array that is not contiguous
            self.block[self._position + _CHECKSUM_BYTES : end] = action.tobytes()
        self._begun = begun = self._begun + 1
        self._cells[_BEGUN] = begun
        return True

    def end_step(self, observation: Any) -> None:
        """Record the observation that the last step with a slot has returned."""
        small = type(observation) is np.ndarray and observation.nbytes <= _MAX_CHECKED_BYTES
        try:
            value = zlib.crc32(observation) if small else checksum(observation)
        except (BufferError, ValueError):  # an array that is not contiguous
            value = checksum(observation)
        _store_checksum(self.block, self._position, value)
        self._position += self._slot_bytes
        self._cells[_DONE] = self._begun

    def _begin_slots(self, action: Any) -> bool:
        """Set the format of the slots by the first action, if it is an array or a number of NumPy."""
        if (
            self._kind is not None
            or not (type(action) is np.ndarray or isinstance(action, np.generic))
            or action.dtype.hasobject
        ):
            return False
        self._kind, self._dtype, self._shape = type(action), action.dtype, action.shape
        self._slot_bytes = _CHECKSUM_BYTES + action.nbytes
        self.add_event("slots", (isinstance(action, np.ndarray), action.dtype.str, action.shape))
        return not self.is_full


_store_checksum = struct.Struct("<I").pack_into


def read_log(block: Any) -> EpisodeLog | None:
    """Read a log, also while or after another process wrote it.

    :param block: memory of the log
    :return: the log; None if there was no reset yet, or the episode was too long
    """
    block = bytes(block)
    cells = memoryview(block)[:_HEADER].cast("Q")
    if cells[_IS_FULL]:
        return None
    events = list(_read_events(block[_HEADER : _HEADER + cells[_EVENTS_SIZE]]))
    _, _, (generators, settings, arguments) = events[0]
    calls: list[tuple[str, Any]] = [("reset", arguments)]
    checksums: list[int | None] = []
    slots: Iterator[tuple[Any, int]] = iter(())
    done, n_read = cells[_DONE], 0

    def read_slots(until: int) -> None:
        """Append the steps with slots up to a number."""
        nonlocal n_read
        while n_read < until:
            n_read += 1
            action, value = next(slots)
            calls.append(("step", action))
            checksums.extend([value] if n_read <= done else [])

    for position, name, data in events[1:]:
        read_slots(position)
        if name == "checksum":
            checksums.append(data)
        elif name == "slots":
            slots = _read_slots(block, *data)
        else:
            calls.append((name, data))
    read_slots(cells[_BEGUN])
    return EpisodeLog(generators, settings, calls, checksums)


def _read_events(packed: bytes) -> Iterator[tuple[int, str, Any]]:
    """Unpickle events that follow each other."""
    stream = io.BytesIO(packed)
    while stream.tell() < len(packed):
        yield pickle.load(stream)


def _read_slots(block: bytes, is_array: bool, dtype: str, shape: tuple[int, ...]) -> Iterator[tuple[Any, int]]:
    """Yield the action and the checksum of each slot."""
    kind = np.dtype(dtype)
    size, position = kind.itemsize * int(np.prod(shape)), _EVENTS_END
    while True:
        value = int.from_bytes(block[position : position + _CHECKSUM_BYTES], "little")
        action = np.frombuffer(block, kind, size // kind.itemsize, position + _CHECKSUM_BYTES).reshape(shape).copy()
        yield (action if is_array else action[()]), value
        position += _CHECKSUM_BYTES + size
