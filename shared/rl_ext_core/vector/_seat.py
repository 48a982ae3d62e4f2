"""One worker, seen from the parent: its process, its pipes, and whether it owes an answer."""

from __future__ import annotations

import os
from typing import Any

from rl_ext_core import processes
from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import _messages
from rl_ext_core.vector._layout import Memory, Progress

__all__ = ["Seat"]

# Looked up in every step.
_TOLD, _ANSWERED, _KIND = Progress.TOLD, Progress.ANSWERED, Progress.ANSWER_KIND


class Seat:
    """A worker's place, which processes take one after the other.

    Ctrl-C may come between any two lines. Whether an answer is awaited is therefore told by numbers in shared memory,
    and what was interrupted can be done again: messages are read from a file, and who is woken looks at the numbers.

    :param number: of the worker
    :param first: number of its first environment
    :param last: one past that of its last

    :ivar process: that has it now
    :ivar watch: over this process; of all together where they fail together; None: nobody has it
    :ivar attempt: how often it was taken before
    :ivar said: the last answer
    :ivar lost: the failure of the worker that is to be replaced; None once that is done
    """

    def __init__(self, number: int, first: int, last: int) -> None:
        self.number, self.first, self.last = number, first, last
        self.process: Any = None
        self.watch: processes.Watch | None = None
        self.attempt = 0
        self.said: Any = None
        self.lost: WorkerError | None = None
        self.ends: tuple[Any, ...] = ()
        self._mail: Memory | None = None
        self._cells = Progress(bytearray(Progress.size(1)), 1).of(0)
        self._read = self._told = 0

    def take(self, process: Any, commands: Any, replies: Any, own_reply: Any, mail: Memory, cells: memoryview) -> None:
        """Put a process in that has started; its first answer is awaited.

        :param commands: where it is woken
        :param replies: where it wakes this process
        :param own_reply: the other end of that, by which this process wakes itself
        :param mail: for messages
        :param cells: its part of the progress
        """
        self._cells, self._read, self._told, self._mail = cells, 0, cells[_TOLD], mail
        self._mailbox = _messages.Mailbox(mail.descriptor)
        self.commands, self.replies, self._own_reply = commands.fileno(), replies.fileno(), own_reply.fileno()
        self.process, self.ends = process, (commands, replies, own_reply)

    def give_up(self) -> None:
        """Close the pipes: the worker closes its environments and ends, if it can."""
        ends, self.ends = self.ends, ()
        for end in ends:
            end.close()
        if self._mail is not None:
            self._mail.close()
        self.forgive()

    def forgive(self) -> None:
        """Await no answer any more."""
        self._read = self._told = self._cells[_TOLD]

    @property
    def owes(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._read != self._cells[_TOLD])

    def step(self) -> None:
        """Have it step with the actions in shared memory."""
        # The worker has cleared the size of the last message.
        self._cells[_TOLD] = self._told = self._told + 1
        if self.ends:
            try:  # noqa: SIM105 a context manager takes as long as the rest of this
                os.write(self.commands, b"\0")
            except (BrokenPipeError, BlockingIOError):
                pass  # as in _messages.ring, which is a call more

    def send(self, message: bytes) -> None:
        """Give a command; that the worker is gone shows where its answer is read."""
        if self.ends:
            self._mailbox.write(message)
        self._cells[Progress.TOLD_SIZE] = len(message)
        self._cells[_TOLD] = self._told = self._told + 1
        self.ring()

    def settle(self) -> None:
        """Find out what was done of a command: Ctrl-C may have come between any two lines of it."""
        self._told = self._cells[_TOLD]
        if self.owes:
            self.ring()
        else:
            self._cells[Progress.TOLD_SIZE] = 0

    def ring(self) -> None:
        """Wake the worker."""
        if self.ends:
            _messages.ring(self.commands)

    def wake(self) -> None:
        """Wake this process where it waits for the answer."""
        if self.ends:
            _messages.ring(self._own_reply)

    def is_over(self) -> bool:
        """Whether there is nothing to wait for: the answer is there, or the worker has failed."""
        told = self._cells[Progress.TOLD]
        return self._cells[Progress.ANSWERED] == told or self.watch is None or self.watch.failure is not None

    def is_there(self) -> bool:
        """Whether the worker lives, as far as is known, and waits for a command."""
        return self.watch is not None and self.watch.failure is None and self.is_over()

    def is_busy(self) -> bool:
        """Whether the worker is at a command, or has died of it and the watch does not know yet."""
        return self.owes and not self.is_over() and (self.lives() or self.process.exitcode != 0)

    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self.process is not None and self.process.is_alive()

    def read(self) -> None:
        """Wait for the answer, if one is awaited.

        :raises EOFError: the worker is gone
        """
        number, cells = self._told, self._cells
        if number == self._read:
            return
        while cells[_ANSWERED] != number:
            watch = self.watch
            if watch is None or watch.failure is not None:
                raise EOFError("a worker is gone")
            os.read(self.replies, 64)
        kind = cells[_KIND]
        if kind == 0:  # nothing, as after most steps
            self.said = None
        else:
            data = self._mailbox.read(cells[Progress.ANSWER_SIZE])
            try:
                self.said = _messages.answer(kind, data)
            except Exception:  # whatever the code of what was sent raises
                self.said, self._read = None, number
                raise
        self._read = number
