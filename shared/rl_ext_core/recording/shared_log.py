"""Log of an episode in shared memory, which can be read after the process of the environment has died.

Workers that this package steps have no need of it, because their parent process has the actions, see
:mod:`~rl_ext_core.recording.vector_log`. Other libraries convert actions in their workers.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
from itertools import starmap
from typing import Any

import gymnasium
import numpy as np

from rl_ext_core.recording.episode_log import EpisodeLog
from rl_ext_core.recording.generators import Snapshot, read_snapshot
from rl_ext_core.recording.recorder import EpisodeRecorder, RecordedCall, read_result

__all__ = ["LOG_BYTES", "SharedEpisodeRecorder", "read_shared_log"]

# Shared memory for the log of an environment. Untouched pages take no memory.
LOG_BYTES = 1 << 24
# The memory begins with the end of what is complete, in bytes, or 0. After it follow pickles: the generators and
# settings, and then in turn a call and the checksum of what it returned.
_HEADER = 8


class _SharedEntries(collections.deque[Any]):
    """Recorder's entries, calls and their results in turn, with a copy in shared memory.

    :param memory: memory of :data:`LOG_BYTES` bytes
    :param head: generators and settings at the reset
    """

    def __init__(self, memory: Any, head: Any) -> None:
        super().__init__()
        self._memory, self._end = memory, memoryview(memory)[:_HEADER].cast("Q")
        self._write(head, _HEADER)

    def append(self, entry: Any) -> None:
        """Append an entry, and write it unless the memory is full."""
        super().append(entry)
        if end := self._end[0]:
            self._write(_pack_call(entry) if len(self) % 2 else read_result(entry), end)

    def _write(self, value: Any, begin: int) -> None:
        """Write a value at an offset; stop recording the episode if that is not possible."""
        self._end[0] = 0
        with contextlib.suppress(Exception):  # the object's code may raise anything
            packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if (end := begin + len(packed)) <= len(self._memory):
                self._memory[begin:end] = packed
                self._end[0] = end


class SharedEpisodeRecorder(EpisodeRecorder):
    """Recorder that also writes the log to shared memory.

    An episode is not recorded if its log takes more memory, or contains an object that cannot be pickled.

    :param env: environment, with all its wrappers
    :param memory: memory of :data:`LOG_BYTES` bytes
    """

    def __init__(self, env: gymnasium.Env[Any, Any], memory: Any) -> None:
        super().__init__(env)
        object.__setattr__(self, "_memory", memory)  # other attributes are set on the environment
        memoryview(memory)[:_HEADER].cast("Q")[0] = 0

    def _start(self, generators: Snapshot, settings: list[Any]) -> None:
        super()._start(generators, settings)
        head = read_snapshot(generators), settings
        self._set_entries(_SharedEntries(self._memory, head))

    def _stop_recording(self) -> None:
        super()._stop_recording()
        memoryview(self._memory)[:_HEADER].cast("Q")[0] = 0


def read_shared_log(memory: Any) -> EpisodeLog | None:
    """Read the log of an environment's present episode, also after its process has died.

    :param memory: memory of a :class:`SharedEpisodeRecorder`
    :return: the log; None if there is no episode, or it is not recorded
    """
    (end,) = memoryview(memory)[:_HEADER].cast("Q")
    if not end:
        return None
    file, values = io.BytesIO(memory[_HEADER:end]), []
    generators, settings = pickle.load(file)
    while file.tell() < end - _HEADER:
        values.append(pickle.load(file))
    return EpisodeLog(generators, settings, list(starmap(_unpack_call, values[::2])), values[1::2])


def _pack_call(entry: Any) -> tuple[Any, ...]:
    """Return a call with its array as bytes, because pickling arrays takes as long as a step of a small environment."""
    name, data = entry if isinstance(entry, RecordedCall) else ("step", entry)
    if isinstance(data, (np.ndarray, np.generic)) and data.dtype.kind in "biuf" and data.dtype.isnative:
        return name, (data.dtype.char, data.shape, data.tobytes()), not isinstance(data, np.ndarray)
    return name, data


def _unpack_call(name: str, data: Any, is_scalar: bool | None = None) -> tuple[str, Any]:
    """Return a call, with its array restored.

    :param is_scalar: whether it is a scalar of NumPy; None if it is neither a scalar nor an array
    """
    if is_scalar is None:
        return name, data
    dtype, shape, packed = data
    array = np.frombuffer(packed, dtype).reshape(shape)
    return name, array[()] if is_scalar else array.copy()
