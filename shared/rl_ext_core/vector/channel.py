"""What a pool and its workers exchange: numbers in shared memory, messages in a file, and bytes that only wake.

A command and its answer have a number each, in the worker's cells. Every cell is written at once, and by one of the two
sides. So each finds out at any time where the other is, however that has ended, and also after Ctrl-C has come between
two lines: a message is read from a file, as often as one likes, and who is woken looks at the numbers. A message is a
pickle. Most steps need none: what they exchange are arrays.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import platform
import time
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from rl_ext_core import resources
from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import new_memory_file
from rl_ext_core.errors import StorageError
from rl_ext_core.factory import _byvalue
from rl_ext_core.processes.report import Raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.errors import WorkerError
    from rl_ext_core.processes import Watch

__all__ = [
    "CELL_BYTES",
    "Cell",
    "Memory",
    "Raised",
    "Spin",
    "WorkerHandle",
    "cells_of",
    "pack",
    "pack_by_value",
    "ring",
    "unpack",
    "worth_spinning",
]

_KEPT = 1 << 20  # bytes of a message that stay allocated until the next one
CELL_BYTES = 64  # a cache line for each worker, at the beginning of the shared memory


class Cell:
    """Places of a worker's cells: what it is at, and the numbers and sizes of the last command and the last answer."""

    ENVIRONMENT, PHASE, TOLD, TOLD_SIZE, ANSWERED, ANSWER_SIZE = range(6)


def cells_of(block: Any, worker: int) -> memoryview:
    """Return the cells of a worker, by its number."""
    return memoryview(block).cast("B")[CELL_BYTES * worker : CELL_BYTES * (worker + 1)].cast("Q")


@contextlib.contextmanager
def _limited(size: int) -> Iterator[None]:
    """Say which limit keeps memory from growing: it counts as a file."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise StorageError(
            f"{size / 1e6:.1f} MB of shared memory count as a file, and this process may write none that large: raise "
            "the limit, ulimit -f unlimited"
        ) from None


class Memory:
    """Shared memory without a name: nothing is left of it when the last process is gone.

    :param size: in bytes

    :ivar descriptor: of the file that it is
    """

    @uninterrupted
    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = new_memory_file("rl_ext_core-vector")[0] if descriptor is None else descriptor
        if descriptor is None:
            self.grow(size)

    def grow(self, size: int) -> None:
        """Make it that large."""
        with _limited(size):
            os.ftruncate(self.descriptor, size)

    def map(self, size: int) -> mmap.mmap:
        """Map its first bytes into this process."""
        return mmap.mmap(self.descriptor, size)

    def write(self, message: bytes) -> None:
        """Put a message in the place of the last one."""
        if os.fstat(self.descriptor).st_size > max(_KEPT, len(message)):
            os.ftruncate(self.descriptor, 0)
        written, data = 0, memoryview(message)
        with _limited(len(data)):
            while written < len(data):
                written += os.pwrite(self.descriptor, data[written:], written)

    def read(self, size: int) -> bytes:
        """Read the message, which has this many bytes."""
        parts: list[bytes] = []
        found = 0
        while found < size:
            parts.append(os.pread(self.descriptor, size - found, found))
            if not parts[-1]:
                raise EOFError(f"a message of {size} bytes ends after {found}")
            found += len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Close it here; what is mapped stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (reduction.DupFd(self.descriptor),)


def _inherited(descriptor: Any) -> Memory:
    return Memory(0, descriptor.detach())


def ring(pipe: int) -> None:
    """Wake who waits at the other end of a pipe, which looks for itself why it was woken."""
    try:  # noqa: SIM105 a context manager takes as long as the rest of this
        os.write(pipe, b"\0")
    except (BrokenPipeError, BlockingIOError):
        pass  # nobody is there, which the watch tells; or it was rung often enough


def worth_spinning(num_workers: int) -> bool:
    """Return whether workers and their parent have a core each, so that one that spins takes it from nobody."""
    # Other processors may show a number before the arrays that were written ahead of it; the kernel keeps the order.
    return platform.machine() in ("x86_64", "AMD64") and resources.usable_cores() > num_workers


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
    """Pickle what a worker answers, or is told by numbers alone.

    :raises Exception: it cannot be pickled
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pack_by_value(value)


def pack_by_value(value: Any) -> bytes:
    """Pickle what may hold functions and classes that the other process cannot import.

    :raises Exception: it cannot be pickled
    """
    return _byvalue.dumps(value, message=True)


def unpack(message: bytes) -> Any:
    """Unpickle what the other process has packed."""
    return pickle.loads(message)


class WorkerHandle:
    """A worker of a pool; when it fails, another process may take its place.

    Ctrl-C may come between any two lines. Whether an answer is awaited is therefore told by numbers in shared memory,
    and what was interrupted can be done again.

    :param number: of the worker
    :param first: number of its first environment
    :param last: one past that of its last

    :ivar process: that it is now
    :ivar watch: over this process; of all together where they fail together; None: there is no process
    :ivar attempt: how many processes it was before
    :ivar answer: the last one
    :ivar lost: the failure of the process that is to be replaced; None once that is done
    """

    def __init__(self, number: int, first: int, last: int) -> None:
        self.number, self.first, self.last = number, first, last
        self.process: Any = None
        self.watch: Watch | None = None
        self.attempt = 0
        self.answer: Any = None
        self.lost: WorkerError | None = None
        self.ends: tuple[Any, ...] = ()
        self._spin: Spin | None = None
        self._mail: Memory | None = None
        self.cells = cells_of(bytearray(CELL_BYTES), 0)
        self._read = self._told = 0

    def connect(
        self, process: Any, commands: Any, replies: Any, own_reply: Any, mail: Memory, cells: Any, spin: Spin | None
    ) -> None:
        """Take a process that has started; its first answer is awaited, which may begin with spinning."""
        self.cells, self._read, self._told, self._mail, self._spin = cells, 0, cells[Cell.TOLD], mail, spin
        self._commands, self.replies, self._own_reply = commands.fileno(), replies.fileno(), own_reply.fileno()
        self.process, self.ends = process, (commands, replies, own_reply)

    def disconnect(self) -> None:
        """Close the pipes: the worker closes its environments and ends, if it can."""
        ends, self.ends = self.ends, ()
        for end in ends:
            end.close()
        if self._mail is not None:
            self._mail.close()
        self.await_nothing()

    def await_nothing(self) -> None:
        """Await no answer any more."""
        self._read = self._told = self.cells[Cell.TOLD]

    def step(self) -> None:
        """Have it step with the actions in shared memory."""
        # The worker has cleared the size of the last message.
        self.cells[Cell.TOLD] = self._told = self._told + 1
        if self.ends:
            try:  # noqa: SIM105 a context manager takes as long as the rest of this
                os.write(self._commands, b"\0")
            except (BrokenPipeError, BlockingIOError):
                pass  # as in ring, which is a call more

    def send(self, name: str, data: Any) -> None:
        """Give a command; that the worker is gone shows where its answer is received.

        :raises Exception: the data cannot be pickled
        """
        # Actions are plain, and sent in every step.
        message = (pack if name == "step" else pack_by_value)((name, data))
        if self.ends and self._mail is not None:
            self._mail.write(message)
        self.cells[Cell.TOLD_SIZE] = len(message)
        self.cells[Cell.TOLD] = self._told = self._told + 1
        self._ring()

    def _ring(self) -> None:
        if self.ends:
            ring(self._commands)

    def wake(self) -> None:
        """Wake this process where it waits for the answer."""
        if self.ends:
            ring(self._own_reply)

    def settle(self) -> None:
        """Find out what was done of a command: Ctrl-C may have come between any two lines of it."""
        self._told = self.cells[Cell.TOLD]
        if self.is_awaited():
            self._ring()
        else:
            self.cells[Cell.TOLD_SIZE] = 0

    def receive(self) -> None:
        """Wait for the answer, if one is awaited.

        :raises EOFError: the worker is gone
        """
        number, cells = self._told, self.cells
        if number == self._read:
            return
        if cells[Cell.ANSWERED] != number and (self._spin is None or not self._spin.sees(cells, Cell.ANSWERED, number)):
            while cells[Cell.ANSWERED] != number:
                if self.has_failed():
                    raise EOFError("a worker is gone")
                os.read(self.replies, 256)
        size = cells[Cell.ANSWER_SIZE]
        if size == 0:  # nothing, as after most steps
            self.answer = None
        else:
            assert self._mail is not None
            message = self._mail.read(size)
            try:
                self.answer = unpack(message)
            except Exception:  # whatever the code of what was sent raises
                self.answer, self._read = None, number
                raise
        self._read = number

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
        """Return whether the worker is at a command, or has died of it and the watch does not know yet."""
        return self.is_awaited() and not self.is_over() and (self.is_alive() or self.process.exitcode != 0)

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self.process is not None and self.process.is_alive()

    def end(self) -> None:
        """End the process."""
        if self.watch is not None:
            self.watch.kill()
            self.watch.stop()
        self.watch = None
        self.disconnect()
