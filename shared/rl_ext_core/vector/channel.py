"""Channel between a pool and its workers: shared numbers, messages, pipes.

Commands and answers are numbered. The numbers are in the worker's cells, in shared memory, and each cell is written
atomically. So each side can read the state of the other at any time, also after Ctrl-C between any two lines. A message
is a pickle in a file, which can be read several times. Most steps need no message, because their data is in the shared
arrays. A byte in a pipe only wakes the other side, which then reads the numbers.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rl_ext_core import _pickle, resources
from rl_ext_core._interrupts import defer_signals
from rl_ext_core._system import WINDOWS, new_memory_file, picklable_descriptor, read_at, write_at
from rl_ext_core.errors import StorageError

if TYPE_CHECKING:
    from rl_ext_core.processes import Watch

_CACHED_BYTES = 1 << 20  # message files up to this size stay allocated until the next message
_LINE = 64  # bytes of a cache line. Each worker's cells begin a new one


# -- numbers, messages and bells


class Cell:
    """Indices of the integers in shared memory by which a worker and its parent communicate.

    They are the environment and phase that the worker is in, and number and size of the last command and answer.
    """

    ENVIRONMENT, PHASE, COMMAND, COMMAND_SIZE, ANSWER, ANSWER_SIZE = range(6)


def new_cells(block: Any = None) -> memoryview:
    """Return a block of memory as an array of integers; by default, of memory not shared."""
    return memoryview(bytearray(_LINE) if block is None else block).cast("B").cast("Q")


class SharedMemory:
    """Anonymous shared memory, which is freed when the last process that uses it ends.

    :param descriptor: file descriptor of existing memory; default: new memory
    """

    @defer_signals
    def __init__(self, size: int = 0, descriptor: int | None = None) -> None:
        self._descriptor = new_memory_file("rl_ext_core-vector")[0] if descriptor is None else descriptor
        # Unlike __del__, it is not called after the interpreter has cleared the globals of modules.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False
        if size:
            self.resize(size)

    def resize(self, size: int) -> None:
        """Set the size in bytes. On Windows, this is possible only before the memory is mapped.

        :raises StorageError: If the limit of file sizes (``ulimit -f``) is too low.
        """
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise StorageError(
                f"{size / 1e6:.1f} MB of shared memory count as a file, and this process may not write files of this "
                "size: expected a higher limit. Use ulimit -f unlimited"
            ) from None

    def map(self, size: int, offset: int = 0) -> mmap.mmap:
        """Map ``size`` bytes from an offset into this process."""
        return mmap.mmap(self._descriptor, size, offset=offset)

    def write(self, message: bytes) -> None:
        """Replace the message in the memory."""
        if not len(message) <= os.fstat(self._descriptor).st_size <= max(_CACHED_BYTES, len(message)):
            self.resize(len(message))
        write_at(self._descriptor, message, 0)

    def read(self, size: int) -> bytes:
        """Read the message of ``size`` bytes."""
        return read_at(self._descriptor, size, 0)

    def close(self) -> None:
        """Close the file descriptor in this process. Mappings stay valid."""
        self._descriptor = -1
        self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_memory, (picklable_descriptor(self._descriptor),)


def _rebuild_memory(descriptor: Any) -> SharedMemory:
    return SharedMemory(0, descriptor.detach())


class _PosixDoorbell:
    """One end of a one-way pipe, whose bytes only wake the other process."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._descriptor = connection, connection.fileno()
        if connection.writable:
            os.set_blocking(self._descriptor, False)

    def ring(self) -> None:
        """Wake the process at the other end, if it waits."""
        try:  # noqa: SIM105 a context manager would double the time of this method
            os.write(self._descriptor, b"\0")
        except OSError:
            pass  # the process has ended, which the watch reports, or the pipe is full of unread bytes

    def wait(self) -> bytes:
        """Wait until the other end rings; return an empty result if the other end is closed."""
        return os.read(self._descriptor, 256)

    def clear(self) -> None:
        """Do nothing. Unread bytes are read in the next wait."""

    def close(self) -> None:
        """Close this end. Later calls of :meth:`ring` do nothing."""
        self._descriptor = -1
        self._connection.close()


class _WindowsDoorbell(_PosixDoorbell):
    """Doorbell for Windows, where each ring is a message that must be read."""

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
        """Drop unread rings, because the next ring would block if the pipe were full."""
        while self._connection.poll():
            self.wait()


_Doorbell = _WindowsDoorbell if WINDOWS else _PosixDoorbell


def should_spin(num_workers: int) -> bool:
    """Return whether each worker and the parent have their own CPU core."""
    # Other processors may show a number before the arrays that were written ahead of it. System calls keep the order.
    return not WINDOWS and platform.machine() in ("x86_64", "AMD64") and resources.usable_cores() > num_workers


class SpinWaiter:
    """Poller that checks an integer in shared memory for a short time before a wait blocks.

    Being woken takes longer than a short step. Polling is wasted if the wait takes longer, and slows other processes
    down if this process is preempted meanwhile. After such a wait, the next few waits do not poll. After another one,
    the number is four times as large. It shrinks again in the course of a hundred successful waits. In this way, long
    steps and busy machines are detected.
    """

    # The parent has nothing else to do while workers step. A worker that polls may slow down the parent, which computes
    # the actions and may share a core with it. So workers poll for a shorter time.
    ANSWER_SECONDS, COMMAND_SECONDS = 500e-6, 150e-6
    _MAX_SKIPPED_WAITS = 4096
    _PREEMPTED_SECONDS = 30e-6  # gap between two readings of the clock, which take 0.1 microseconds

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = 0.0
        self._left = 0

    def wait_for_value(self, cells: memoryview, place: int, number: int) -> bool:
        """Poll until a cell has a value, for a short time or not at all; return whether it has."""
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
    """Pickle an answer or the actions of a step, by value if plain pickle fails."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pack_by_value(value)


# Pickles functions and classes by value if the other process cannot import them.
pack_by_value = _pickle.dumps
unpack = pickle.loads


# -- the two ends


class WorkerChannel:
    """The worker's end of the channel: pipes that wake this process and the parent, numbers, and messages.

    :param spins: whether to poll before waiting
    """

    def __init__(
        self, commands: Connection, replies: Connection, cells: SharedMemory, mail: SharedMemory, spins: bool
    ) -> None:
        self._commands, self._replies, self._mail = _Doorbell(commands), _Doorbell(replies), mail
        self.cells = new_cells(cells.map(_LINE))
        cells.close()
        self._spin = SpinWaiter(SpinWaiter.COMMAND_SECONDS) if spins else None

    def commands(self) -> Iterator[tuple[str, Any]]:
        """Yield commands as (name, data) until the parent closes its end.

        A step with the shared actions is ``("step", None)``.
        """
        cells, spin, last_command, last_answer = self.cells, self._spin, Cell.COMMAND, Cell.ANSWER
        while (
            spin is not None and spin.wait_for_value(cells, last_command, cells[last_answer] + 1)
        ) or self._commands.wait():
            if cells[last_command] != cells[last_answer]:  # otherwise the parent rang twice
                size = cells[Cell.COMMAND_SIZE]
                yield unpack(self._mail.read(size)) if size else ("step", None)

    def reply(self, message: bytes) -> None:
        """Answer the last command with a pickled message, which is empty for None."""
        cells = self.cells
        if message:
            self._mail.write(message)
        cells[Cell.ANSWER_SIZE] = len(message)
        cells[Cell.ANSWER] = cells[Cell.COMMAND]
        self._replies.ring()


class WorkerHandle:
    """The parent's handle of worker ``number``, which has the environments from ``first`` to before ``last``.

    If the worker fails, another process may replace it.

    Ctrl-C may come between any two lines. Therefore the numbers in shared memory decide whether an answer is awaited,
    and interrupted methods can be called again.

    :ivar process: current process of the worker
    :ivar watch: watch over the worker's group; None if there is no process
    :ivar attempt: number of earlier processes of this worker
    :ivar answer: last answer
    :ivar cells: cells of the worker, indexed by :class:`Cell`
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
        """Start a process, and await its first answer.

        :param target: function of the process. Its first argument is a tuple with the arguments of
            :class:`WorkerChannel`, and ``arguments`` follow
        """
        self.disconnect()
        memory, self._mail = SharedMemory(_LINE), SharedMemory()
        self.cells, self._read, self.answer = new_cells(memory.map(_LINE)), 0, None
        self.cells[Cell.COMMAND] = 1  # the first command is to build the environments
        command_reader, commands = context.Pipe(duplex=False)
        replies, reply_writer = context.Pipe(duplex=False)
        self._commands, self._replies, self._own_doorbell = map(_Doorbell, (commands, replies, reply_writer))
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
        """Close the pipes and the message file."""
        for end in self._open_ends:
            end.close()
        self.discard_answer()

    def end(self) -> None:
        """End the process and its child processes."""
        if self.watch is not None:
            self.watch.kill()
            self.watch.stop()
        elif self.process is not None and self.process.pid is not None:
            self.process.kill()
            self.process.join()
        self.watch = None
        self.disconnect()

    def send(self, name: str, data: Any) -> None:
        """Send a command. For a step: its packed form, or None for the shared actions."""
        message: bytes = (data or b"") if name == "step" else pack_by_value((name, data))
        if message:
            self._mail.write(message)
        cells = self.cells
        cells[Cell.COMMAND_SIZE] = len(message)
        cells[Cell.COMMAND] += 1
        self._commands.ring()

    def wake_worker(self) -> None:
        """Wake the worker again, because Ctrl-C may have prevented that after a command."""
        self._commands.ring()

    def interrupt_wait(self) -> None:
        """Wake this process from its wait for the answer."""
        self._own_doorbell.ring()

    def receive(self) -> None:
        """Wait for the answer, if one is awaited.

        :raises EOFError: If the worker has ended.
        """
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
                raise EOFError("a worker has ended")
            self._replies.wait()
        size = cells[Cell.ANSWER_SIZE]
        self.answer = None  # most steps have an empty answer
        if size:
            message = self._mail.read(size)
            try:
                self.answer = unpack(message)
            except Exception:  # user code that unpickles an object may raise anything
                self._read = number
                raise
        self._read = number

    def discard_answer(self) -> None:
        """Stop awaiting an answer."""
        self._read = self.cells[Cell.COMMAND]

    def awaits_answer(self) -> bool:
        """Return whether an answer is awaited."""
        return bool(self._read != self.cells[Cell.COMMAND])

    def has_failed(self) -> bool:
        """Return whether the worker has failed or was ended."""
        return self.watch is None or self.watch.is_killed or self.watch.failure is not None

    def is_done(self) -> bool:
        """Return whether the answer has arrived or the worker has failed."""
        return bool(self.cells[Cell.ANSWER] == self.cells[Cell.COMMAND]) or self.has_failed()

    def is_busy(self) -> bool:
        """Return whether the worker executes a command, or died in it undetected."""
        return self.awaits_answer() and not self.is_done() and (self.is_alive() or self.process.exitcode != 0)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.is_alive()
