"""What a pool and its workers exchange: arrays and numbers in shared memory, messages in a file, bytes that only wake.

A command and its answer have a number each, in the worker's cells. Every cell is written at once. So each side sees at
any time where the other is, however that has ended, and also after Ctrl-C has come between two lines: a message is read
from a file, as often as one likes, and whoever is woken looks at the numbers. A message is a pickle. Most steps need
none: what they exchange are arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rl_ext_core import _pickle, resources
from rl_ext_core._interrupts import defer_signals
from rl_ext_core._system import WINDOWS, new_memory_file, read_at, picklable_descriptor, write_at
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, StorageError

if TYPE_CHECKING:
    from rl_ext_core.processes import Watch

__all__ = [
    "Cell",
    "MemoryLayout",
    "SharedMemory",
    "ObservationSlot",
    "SpinWaiter",
    "WorkerChannel",
    "WorkerHandle",
    "new_cells",
    "pack",
    "pack_by_value",
    "unpack",
    "should_spin",
]

_CACHED_BYTES = 1 << 20  # of the last message, which stay allocated until the next one
_LINE = 64  # bytes of a cache line: a worker's cells are one, and arrays do not share one

# An array of a space: the keys that lead to it, its shape and its dtype.
Leaf = tuple[tuple[Any, ...], tuple[int, ...], np.dtype[Any]]


# -- arrays


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """The arrays of one block of shared memory; each has the environments first.

    :ivar tree: dicts and tuples as in observations, with an array's number in its place
    :ivar paths: keys that lead to each of the observation's arrays
    :ivar fields: per array its name, offset in bytes, shape and dtype
    :ivar size: of the block, in bytes
    """

    tree: Any
    paths: tuple[tuple[Any, ...], ...]
    fields: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...]
    size: int

    @classmethod
    def from_spaces(cls, num_envs: int, observation_space: Any, action_space: Any) -> MemoryLayout:
        """Lay out what environments of these spaces exchange, or refuse observations without fixed shapes."""
        leaves: list[Leaf] = []
        tree = _flatten_space(observation_space, (), leaves)
        wanted: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = [
            (f"observation {index}", shape, dtype) for index, (_, shape, dtype) in enumerate(leaves)
        ]
        actions: list[Leaf] = []
        with contextlib.suppress(InvalidArgumentError):  # others are pickled
            if _flatten_space(action_space, (), actions) == 0:
                wanted.append(("action", *actions[0][1:]))
        wanted += [("reward", (), np.dtype(np.float64)), ("reward kind", (), np.dtype(np.uint8))]
        wanted += [("flags", (), np.dtype(np.uint8))]
        fields, offset = [], 0
        for name, shape, dtype in wanted:
            offset = -(-offset // _LINE) * _LINE
            fields.append((name, offset, (num_envs, *shape), dtype))
            offset += num_envs * int(np.prod(shape)) * dtype.itemsize
        return cls(tree, tuple(leaf[0] for leaf in leaves), tuple(fields), max(offset, 1))

    def arrays(self, block: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays in a block of memory."""
        return {name: np.ndarray(shape, dtype, block, offset) for name, offset, shape, dtype in self.fields}

    def slots(self, arrays: dict[str, np.ndarray[Any, Any]], environment: int) -> list[ObservationSlot]:
        """Return the rows of an environment, by its number."""
        return [
            ObservationSlot(path, arrays[f"observation {index}"][environment, ...])
            for index, path in enumerate(self.paths)
        ]

    def build_observation(self, parts: list[Any]) -> Any:
        """Make an observation of its arrays."""
        return parts[0] if self.tree == 0 else _build_observation(self.tree, parts)


def _flatten_space(space: Any, path: tuple[Any, ...], leaves: list[Leaf]) -> Any:
    """Append a space's arrays to a list; return dicts and tuples as in the space, with the arrays' numbers in place."""
    if isinstance(space, spaces.Dict):
        return {key: _flatten_space(part, (*path, key), leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_flatten_space(part, (*path, index), leaves) for index, part in enumerate(space.spaces))
    if space.shape is None or space.dtype is None or np.dtype(space.dtype).kind not in "biuf":
        raise InvalidArgumentError(
            f"{space} in an observation_space has no fixed arrays to share; expected Box, Discrete, MultiDiscrete, "
            "MultiBinary, or Dict and Tuple of these. Flatten it: gymnasium.wrappers.FlattenObservation(env)"
        )
    leaves.append((path, tuple(space.shape), np.dtype(space.dtype)))
    return len(leaves) - 1


def _build_observation(tree: Any, parts: list[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _build_observation(inner, parts) for key, inner in tree.items()}
    return tuple(_build_observation(inner, parts) for inner in tree) if isinstance(tree, tuple) else parts[tree]


class ObservationSlot:
    """The place of one array of an environment's observations.

    :param path: keys that lead to the array in the observation; empty: it is the observation
    :param place: in shared memory

    :ivar has_converted: whether the dtype could not hold all values, at any time
    """

    def __init__(self, path: tuple[Any, ...], place: np.ndarray[Any, Any]) -> None:
        self.path, self.place, self.has_converted = path, place, False
        self.shape, self.dtype = place.shape, place.dtype
        whole = (int,) if self.dtype == np.int64 else ()
        self._scalars = (self.dtype.type, *whole) if self.shape == () else ()

    def write(self, observation: Any) -> None:
        """Write the array of an observation; what the dtype cannot hold is converted."""
        value = observation
        for key in self.path:
            value = value[key]
        kind = type(value)
        same = value.dtype == self.dtype and value.shape == self.shape if kind is np.ndarray else kind in self._scalars
        if same:
            self.place[...] = value
            return
        value = np.asarray(value)
        if value.shape != self.shape:
            name = f"observation{''.join(f'[{key!r}]' for key in self.path)}" if self.path else "the observation"
            raise EnvironmentOutputError(
                f"{name} has the shape {value.shape} where the observation space says {self.shape}; give the space the "
                "shape of what reset and step return"
            )
        with np.errstate(all="ignore"):  # what does not fit is found below
            self.place[...] = value
        # Rounding between floats surprises no one: policies compute with 32 bits.
        if not self.has_converted and self.dtype.kind != "f":
            self.has_converted = not np.array_equal(self.place, value)


# -- numbers, messages and bells


class Cell:
    """Places of a worker's cells: what it is at, and the numbers and sizes of the last command and the last answer."""

    ENVIRONMENT, PHASE, COMMAND, COMMAND_SIZE, ANSWER, ANSWER_SIZE = range(6)


def new_cells(block: Any = None) -> memoryview:
    """Return a worker's cells, in a block of memory or in memory of this process alone."""
    return memoryview(bytearray(_LINE) if block is None else block).cast("B").cast("Q")


class SharedMemory:
    """Shared memory without a name: nothing is left of it when the last process is gone.

    :param size: in bytes
    :param descriptor: of the file that it is; None makes one
    """

    @defer_signals
    def __init__(self, size: int = 0, descriptor: int | None = None) -> None:
        self._descriptor = new_memory_file("rl_ext_core-vector")[0] if descriptor is None else descriptor
        if size:
            self.resize(size)

    def resize(self, size: int) -> None:
        """Make it that large; Windows does so only before it is mapped."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise StorageError(
                f"{size / 1e6:.1f} MB of shared memory count as a file, and this process may write none that large: "
                "raise the limit, ulimit -f unlimited"
            ) from None

    def map(self, size: int) -> mmap.mmap:
        """Map its first bytes into this process."""
        return mmap.mmap(self._descriptor, size)

    def write(self, message: bytes) -> None:
        """Replace the message in it."""
        if not len(message) <= os.fstat(self._descriptor).st_size <= max(_CACHED_BYTES, len(message)):
            self.resize(len(message))
        write_at(self._descriptor, message, 0)

    def read(self, size: int) -> bytes:
        """Read the message, which has this many bytes."""
        return read_at(self._descriptor, size, 0)

    def close(self) -> None:
        """Close it in this process; what is mapped stays."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_memory, (picklable_descriptor(self._descriptor),)


def _rebuild_memory(descriptor: Any) -> SharedMemory:
    return SharedMemory(0, descriptor.detach())


class _PosixDoorbell:
    """One end of a pipe that goes one way, and whose bytes only wake."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._descriptor = connection, connection.fileno()
        if connection.writable:
            os.set_blocking(self._descriptor, False)

    def ring(self) -> None:
        """Wake the process at the other end, if it waits there."""
        try:  # noqa: SIM105 a context manager takes as long as the rest of this
            os.write(self._descriptor, b"\0")
        except OSError:
            pass  # the process is gone, which the watch reports; or it was rung often enough

    def wait(self) -> bytes:
        """Wait until it is rung; return nothing if the other end is closed."""
        return os.read(self._descriptor, 256)

    def clear(self) -> None:
        """Do nothing. What was not waited for is read in the next wait."""

    def close(self) -> None:
        """Close this end; to ring it does nothing."""
        self._descriptor = -1
        self._connection.close()


class _WindowsDoorbell(_PosixDoorbell):
    """Does the same where pipes are not files: each ring is a message, and rings that nobody waits for add up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(b"\0")

    def wait(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except EOFError:
            return b""

    def clear(self) -> None:
        """Drop rings that were not waited for: with a full pipe, the next one would block."""
        while self._connection.poll():
            self.wait()


_Doorbell = _WindowsDoorbell if WINDOWS else _PosixDoorbell


def should_spin(num_workers: int) -> bool:
    """Return whether workers and their parent have a core each, so that one that spins takes it from nobody."""
    # Other processors may show a number before the arrays that were written ahead of it; the kernel keeps the order.
    return not WINDOWS and platform.machine() in ("x86_64", "AMD64") and resources.usable_cores() > num_workers


class SpinWaiter:
    """Looks again and again for a number before a wait blocks: to be woken takes longer than a short step.

    A wait that takes longer has spun for nothing, and one in which this process was put aside has taken a core from
    others. After such a one some waits block at once, and after the next four times as many, unless there were a
    hundred good ones in between. So long steps and loaded machines are detected.
    """

    # The parent has nothing else to do while workers step. A worker that spins may slow the parent down, which computes
    # actions meanwhile: cores share what they are made of.
    ANSWER_SECONDS, COMMAND_SECONDS = 500e-6, 150e-6
    _MAX_SKIPPED_WAITS = 4096
    _PREEMPTED_SECONDS = 30e-6  # between two looks at the clock, which take a tenth of a microsecond

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = 0.0
        self._left = 0

    def wait_for_value(self, cells: memoryview, place: int, number: int) -> bool:
        """Wait a little for a cell to have a value, and return whether it has."""
        if self._left:
            self._left -= 1
            return False
        clock, longest = time.perf_counter, self._PREEMPTED_SECONDS
        before = clock()
        end = before + self._seconds
        while True:
            now = clock()
            seen = cells[place] == number
            if seen or now > end or now - before > longest:
                break
            before = now
        if seen and now - before <= longest:
            self._pause *= 0.97
        else:
            self._pause = min(4 * self._pause + 4, self._MAX_SKIPPED_WAITS)
            self._left = int(self._pause)
        return seen


def pack(value: Any) -> bytes:
    """Pickle what a worker answers, or the actions of a step."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pack_by_value(value)


pack_by_value = _pickle.dumps  # for functions and classes that the other process cannot import
unpack = pickle.loads


# -- the two ends


class WorkerChannel:
    """The worker's side of the channel, in the worker.

    :param commands: pipe that wakes this process
    :param replies: pipe that wakes the parent
    :param cells: memory of the numbers, see :class:`Cell`
    :param mail: memory of messages
    :param spins: whether to spin before waiting
    """

    def __init__(
        self, commands: Connection, replies: Connection, cells: SharedMemory, mail: SharedMemory, spins: bool
    ) -> None:
        self._commands, self._replies, self._mail = _Doorbell(commands), _Doorbell(replies), mail
        self.cells = new_cells(cells.map(_LINE))
        cells.close()
        self._spin = SpinWaiter(SpinWaiter.COMMAND_SECONDS) if spins else None

    def commands(self) -> Iterator[tuple[str, Any]]:
        """Yield commands until the parent closes its end; a step with the shared actions is ``("step", None)``."""
        cells, spin, last_command, last_answer = self.cells, self._spin, Cell.COMMAND, Cell.ANSWER
        while (
            spin is not None and spin.wait_for_value(cells, last_command, cells[last_answer] + 1)
        ) or self._commands.wait():
            if cells[last_command] != cells[last_answer]:  # else it was rung twice
                size = cells[Cell.COMMAND_SIZE]
                yield unpack(self._mail.read(size)) if size else ("step", None)

    def reply(self, message: bytes) -> None:
        """Answer the last command; with nothing, if the message is empty."""
        cells = self.cells
        if message:
            self._mail.write(message)
        cells[Cell.ANSWER_SIZE] = len(message)
        cells[Cell.ANSWER] = cells[Cell.COMMAND]
        self._replies.ring()


class WorkerHandle:
    """A worker of a pool; when it fails, another process may take its place.

    Ctrl-C may come between any two lines. Whether an answer is awaited is therefore read from the numbers in shared
    memory, and what was interrupted can be done again.

    :param number: of the worker
    :param first: number of its first environment
    :param last: one past that of its last

    :ivar process: that it is now
    :ivar watch: over this process; of all together where they fail together; None: there is no process
    :ivar attempt: how many processes it was before
    :ivar answer: the last one
    :ivar cells: the numbers, see :class:`Cell`
    """

    def __init__(self, number: int, first: int, last: int) -> None:
        self.number, self.first, self.last = number, first, last
        self.process: Any = None
        self.watch: Watch | None = None
        self.attempt = 0
        self.answer: Any = None
        self.cells = new_cells()
        self._open_ends: tuple[Any, ...] = ()
        self._read = 0

    def launch(self, context: Any, target: Callable[..., object], arguments: tuple[Any, ...], *, spins: bool) -> None:
        """Start a process, whose first answer is awaited.

        It runs ``target`` with a tuple, the arguments of a :class:`WorkerEnd`, and these arguments.
        """
        self.disconnect()
        memory, self._mail = SharedMemory(_LINE), SharedMemory()
        self.cells, self._read = new_cells(memory.map(_LINE)), 0
        self.cells[Cell.COMMAND] = 1  # to build its environments
        command_reader, commands = context.Pipe(duplex=False)
        replies, reply_writer = context.Pipe(duplex=False)
        self._commands, self._replies, self._own_doorbell = (
            _Doorbell(commands),
            _Doorbell(replies),
            _Doorbell(reply_writer),
        )
        self._open_ends = self._commands, self._replies, self._own_doorbell, self._mail
        self._spin = SpinWaiter(SpinWaiter.ANSWER_SECONDS) if spins else None
        end = command_reader, reply_writer, memory, self._mail, spins
        self.process = context.Process(target=target, args=(end, *arguments))
        try:
            self.process.start()
        finally:
            command_reader.close()
            memory.close()

    def disconnect(self) -> None:
        """Close the pipes."""
        for end in self._open_ends:
            end.close()
        self.discard_answer()

    def end(self) -> None:
        """End the process, with what it has started."""
        if self.watch is not None:
            self.watch.kill()
            self.watch.stop()
        elif self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join()
        self.watch = None
        self.disconnect()

    def send(self, name: str, data: Any) -> None:
        """Give a command; a step without data takes the actions in shared memory."""
        message = b""
        if data is not None or name != "step":
            # Actions are plain, and sent in every step.
            message = (pack if name == "step" else pack_by_value)((name, data))
            self._mail.write(message)
        cells = self.cells
        cells[Cell.COMMAND_SIZE] = len(message)
        cells[Cell.COMMAND] += 1
        self._commands.ring()

    def wake_worker(self) -> None:
        """Ring again: Ctrl-C may have come after a command was written and before the worker was woken."""
        self._commands.ring()

    def interrupt_wait(self) -> None:
        """Wake this process where it waits for the answer."""
        self._own_doorbell.ring()

    def receive(self) -> None:
        """Wait for the answer, if one is awaited; raise EOFError if the worker is gone."""
        cells = self.cells
        number = cells[Cell.COMMAND]
        if number == self._read:
            return
        if cells[Cell.ANSWER] == number or (
            self._spin is not None and self._spin.wait_for_value(cells, Cell.ANSWER, number)
        ):
            self._replies.clear()
        while cells[Cell.ANSWER] != number:
            if self.has_failed():
                raise EOFError("a worker is gone")
            self._replies.wait()
        size = cells[Cell.ANSWER_SIZE]
        self.answer = None  # nothing, as after most steps
        if size:
            message = self._mail.read(size)
            try:
                self.answer = unpack(message)
            except Exception:  # whatever the code of what was sent raises
                self._read = number
                raise
        self._read = number

    def discard_answer(self) -> None:
        """Drop the answer that is awaited."""
        self._read = self.cells[Cell.COMMAND]

    def awaits_answer(self) -> bool:
        """Return whether an answer is awaited."""
        return bool(self._read != self.cells[Cell.COMMAND])

    def has_failed(self) -> bool:
        """Return whether the worker has failed, or is gone."""
        return self.watch is None or self.watch.failure is not None

    def is_done(self) -> bool:
        """Return whether there is nothing to wait for: the answer is there, or the worker has failed."""
        return bool(self.cells[Cell.ANSWER] == self.cells[Cell.COMMAND]) or self.has_failed()

    def is_busy(self) -> bool:
        """Return whether the worker is at a command, or has died of it and the watch has not seen it yet."""
        return self.awaits_answer() and not self.is_done() and (self.is_alive() or self.process.exitcode != 0)

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self.process is not None and self.process.is_alive()
