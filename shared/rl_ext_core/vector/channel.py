"""What a pool and its workers exchange: numbers in shared memory, messages in a file, and bytes that only wake.

A command and its answer have a number each, in the worker's cells. Every cell is written at once. So each side sees at
any time where the other is, however that has ended, and also after Ctrl-C has come between two lines: a message is read
from a file, as often as one likes, and whoever is woken looks at the numbers. A message is a pickle. Most steps need
none: what they exchange are arrays.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rl_ext_core import _pickle, resources
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import WINDOWS, new_memory_file, read_at, sent, write_at
from rl_ext_core.errors import StorageError
from rl_ext_core.processes.report import Raised

if TYPE_CHECKING:
    from rl_ext_core.processes import Watch

__all__ = [
    "Bell",
    "Cell",
    "Memory",
    "Raised",
    "Spin",
    "WorkerEnd",
    "WorkerHandle",
    "new_cells",
    "pack",
    "pack_by_value",
    "unpack",
    "worth_spinning",
]

_CACHED_BYTES = 1 << 20  # of the last message, which stay allocated until the next one
_CELL_BYTES = 64  # a cache line


class Cell:
    """Places of a worker's cells: what it is at, and the numbers and sizes of the last command and the last answer."""

    ENVIRONMENT, PHASE, TOLD, TOLD_SIZE, ANSWERED, ANSWER_SIZE = range(6)


def new_cells(block: Any = None) -> memoryview:
    """Return a worker's cells, in a block of memory or in memory of this process alone."""
    return memoryview(bytearray(_CELL_BYTES) if block is None else block).cast("B").cast("Q")


class Memory:
    """Shared memory without a name: nothing is left of it when the last process is gone.

    :param size: in bytes

    :ivar descriptor: of the file that it is
    """

    @uninterrupted
    def __init__(self, size: int = 0, descriptor: int | None = None) -> None:
        self.descriptor = new_memory_file("rl_ext_core-vector")[0] if descriptor is None else descriptor
        if size:
            self.resize(size)

    def resize(self, size: int) -> None:
        """Make it that large; Windows does so only before it is mapped.

        :raises StorageError: If this process may not write files that large.
        """
        try:
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise StorageError(
                f"{size / 1e6:.1f} MB of shared memory count as a file, and this process may write none that large: "
                "raise the limit, ulimit -f unlimited"
            ) from None

    def map(self, size: int) -> mmap.mmap:
        """Map its first bytes into this process."""
        return mmap.mmap(self.descriptor, size)

    def write(self, message: bytes) -> None:
        """Replace the message in it."""
        if not len(message) <= os.fstat(self.descriptor).st_size <= max(_CACHED_BYTES, len(message)):
            self.resize(len(message))
        write_at(self.descriptor, message, 0)

    def read(self, size: int) -> bytes:
        """Read the message, which has this many bytes."""
        return read_at(self.descriptor, size, 0)

    def close(self) -> None:
        """Close it in this process; what is mapped stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (sent(self.descriptor),)


def _received(descriptor: Any) -> Memory:
    return Memory(0, descriptor.detach())


class PosixBell:
    """One end of a pipe whose bytes only wake.

    :param connection: of a pipe that goes one way

    :ivar connection: the same
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self._descriptor = connection, connection.fileno()
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
        self.connection.close()


class WindowsBell(PosixBell):
    """Does the same where pipes are not files: each ring is a message, and rings that nobody waits for add up."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def ring(self) -> None:
        """Wake the process at the other end, if it waits there."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"\0")

    def wait(self) -> bytes:
        """Wait until it is rung; return nothing if the other end is closed."""
        try:
            return self.connection.recv_bytes()
        except EOFError:
            return b""

    def clear(self) -> None:
        """Drop rings that were not waited for: with a full pipe, the next one would block."""
        while self.connection.poll():
            self.wait()


Bell = WindowsBell if WINDOWS else PosixBell


def worth_spinning(num_workers: int) -> bool:
    """Return whether workers and their parent have a core each, so that one that spins takes it from nobody."""
    # Other processors may show a number before the arrays that were written ahead of it; the kernel keeps the order.
    return not WINDOWS and platform.machine() in ("x86_64", "AMD64") and resources.usable_cores() > num_workers


class Spin:
    """Looks again and again for a number before a wait blocks: to be woken takes longer than a short step.

    A wait that takes longer has spun for nothing, and one in which this process was put aside has taken a core from
    others. After such a one so many waits block at once, and after the next four times as many, unless there were a
    hundred good ones in between: long steps and loaded machines are found out that way.
    """

    # The parent has nothing else to do while workers step. A worker that spins may slow the parent down, which computes
    # actions meanwhile: cores share what they are made of.
    FOR_ANSWERS, FOR_COMMANDS = 500e-6, 150e-6
    _LONGEST_PAUSE = 4096
    _PUT_ASIDE_SECONDS = 30e-6  # between two looks at the clock, which take a tenth of a microsecond

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = 0.0
        self._left = 0

    def sees(self, cells: memoryview, place: int, number: int) -> bool:
        """Wait a little for a cell to have a value, and return whether it has."""
        if self._left:
            self._left -= 1
            return False
        clock, longest = time.perf_counter, self._PUT_ASIDE_SECONDS
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
            self._pause = min(4 * self._pause + 4, self._LONGEST_PAUSE)
            self._left = int(self._pause)
        return seen


def pack(value: Any) -> bytes:
    """Pickle what a worker answers, or the actions of a step.

    :raises Exception: it cannot be pickled
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pack_by_value(value)


def pack_by_value(value: Any) -> bytes:
    """Pickle what may contain functions and classes that the other process cannot import.

    :raises Exception: it cannot be pickled
    """
    return _pickle.dumps(value)


def unpack(message: bytes) -> Any:
    """Unpickle what the other process has packed."""
    return pickle.loads(message)


class WorkerEnd:
    """The worker's side of the channel, in the worker.

    :param commands: of the parent: the pipe that wakes this process
    :param replies: the pipe that wakes the parent
    :param cells: memory of the numbers
    :param mail: memory of messages
    :param spins: whether to spin before waiting

    :ivar cells: the numbers
    """

    def __init__(self, commands: Connection, replies: Connection, cells: Memory, mail: Memory, spins: bool) -> None:
        self._commands, self._replies, self._mail = Bell(commands), Bell(replies), mail
        self.cells = new_cells(cells.map(_CELL_BYTES))
        cells.close()
        self._spin = Spin(Spin.FOR_COMMANDS) if spins else None

    def commands(self) -> Iterator[tuple[str, Any]]:
        """Yield commands until the parent closes its end; a step with the shared actions is ``("step", None)``."""
        cells, spin, told, answered = self.cells, self._spin, Cell.TOLD, Cell.ANSWERED
        while (spin is not None and spin.sees(cells, told, cells[answered] + 1)) or self._commands.wait():
            if cells[told] != cells[answered]:  # else it was rung twice
                size = cells[Cell.TOLD_SIZE]
                yield unpack(self._mail.read(size)) if size else ("step", None)

    def reply(self, message: bytes) -> None:
        """Answer the last command; with nothing, if the message is empty."""
        cells = self.cells
        if message:
            self._mail.write(message)
        cells[Cell.ANSWER_SIZE] = len(message)
        cells[Cell.ANSWERED] = cells[Cell.TOLD]
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
        self._ends: tuple[Any, ...] = ()  # of the pipes, and the memory of messages
        self._read = 0

    def launch(self, context: Any, target: Callable[..., object], arguments: tuple[Any, ...], *, spins: bool) -> None:
        """Start a process, whose first answer is awaited.

        :param context: of :func:`rl_ext_core.processes.get_context`
        :param target: what it runs, with the arguments of a :class:`WorkerEnd` in a tuple and these
        """
        self.disconnect()
        memory, self._mail = Memory(_CELL_BYTES), Memory()
        self.cells, self._read = new_cells(memory.map(_CELL_BYTES)), 0
        self.cells[Cell.TOLD] = 1  # to build its environments
        command_reader, commands = context.Pipe(duplex=False)
        replies, reply_writer = context.Pipe(duplex=False)
        self._commands, self.replies = Bell(commands), Bell(replies)
        self._ends = self._commands, self.replies, Bell(reply_writer), self._mail
        self._spin = Spin(Spin.FOR_ANSWERS) if spins else None
        end = command_reader, reply_writer, memory, self._mail, spins
        self.process = context.Process(target=target, args=(end, *arguments))
        try:
            self.process.start()
        finally:
            command_reader.close()
            memory.close()

    def disconnect(self) -> None:
        """Close the pipes."""
        for end in self._ends:
            end.close()
        self.await_nothing()

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

    def step(self) -> None:
        """Have it step with the actions in shared memory."""
        cells = self.cells
        cells[Cell.TOLD_SIZE] = 0
        cells[Cell.TOLD] += 1
        self._commands.ring()

    def send(self, name: str, data: Any) -> None:
        """Give a command; that the worker is gone shows where its answer is received.

        :raises Exception: the data cannot be pickled
        """
        # Actions are plain, and sent in every step.
        message = (pack if name == "step" else pack_by_value)((name, data))
        self._mail.write(message)
        self.cells[Cell.TOLD_SIZE] = len(message)
        self.cells[Cell.TOLD] += 1
        self._commands.ring()

    def remind(self) -> None:
        """Ring again: Ctrl-C may have come after a command was written and before the worker was woken."""
        for bell in self._ends[:1]:
            bell.ring()

    def wake(self) -> None:
        """Wake this process where it waits for the answer."""
        for bell in self._ends[2:3]:
            bell.ring()

    def receive(self) -> None:
        """Wait for the answer, if one is awaited.

        :raises EOFError: the worker is gone
        """
        cells = self.cells
        number = cells[Cell.TOLD]
        if number == self._read:
            return
        if cells[Cell.ANSWERED] == number or (self._spin is not None and self._spin.sees(cells, Cell.ANSWERED, number)):
            self.replies.clear()
        while cells[Cell.ANSWERED] != number:
            if self.has_failed():
                raise EOFError("a worker is gone")
            self.replies.wait()
        size = cells[Cell.ANSWER_SIZE]
        if size == 0:  # nothing, as after most steps
            self.answer = None
        else:
            message = self._mail.read(size)
            try:
                self.answer = unpack(message)
            except Exception:  # whatever the code of what was sent raises
                self.answer, self._read = None, number
                raise
        self._read = number

    def await_nothing(self) -> None:
        """Drop the answer that is awaited."""
        self._read = self.cells[Cell.TOLD]

    def is_awaited(self) -> bool:
        """Return whether an answer is awaited."""
        return bool(self._read != self.cells[Cell.TOLD])

    def has_failed(self) -> bool:
        """Return whether the worker has failed, or is gone."""
        return self.watch is None or self.watch.failure is not None

    def is_over(self) -> bool:
        """Return whether there is nothing to wait for: the answer is there, or the worker has failed."""
        return bool(self.cells[Cell.ANSWERED] == self.cells[Cell.TOLD]) or self.has_failed()

    def is_busy(self) -> bool:
        """Return whether the worker is at a command, or has died of it and the watch has not seen it yet."""
        return self.is_awaited() and not self.is_over() and (self.is_alive() or self.process.exitcode != 0)

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self.process is not None and self.process.is_alive()
