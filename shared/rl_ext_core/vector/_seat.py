"""One worker, seen from the parent: its process, its pipes, and whether it owes an answer."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rl_ext_core import processes
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector import _messages

__all__ = ["Seat"]


class Seat:
    """A worker's place, which processes take one after the other.

    :param number: of the worker
    :param first: number of its first environment
    :param last: one past that of its last

    :ivar process: that has it now
    :ivar watch: over this process alone; None: the pool has one for all
    :ivar attempt: how often it was taken before
    :ivar owes: whether an answer is awaited. Reading it may be interrupted by Ctrl-C, and goes on later
    :ivar torn: whether that has happened amid an answer, the rest of which is of no use
    :ivar said: the last answer
    """

    def __init__(self, number: int, first: int, last: int) -> None:
        self.number, self.first, self.last = number, first, last
        self.process: Any = None
        self.watch: processes.Watch | None = None
        self.attempt = 0
        self.owes = self.torn = False
        self.said: Any = None
        self.commands = self.replies = -1
        self.ends: tuple[Any, ...] = ()

    def take(self, process: Any, commands: Any, replies: Any) -> None:
        """Put a process in that has started; its first answer is awaited."""
        self.process, self.ends = process, (commands, replies)
        self.owes, self.torn = True, False
        self.commands, self.replies = commands.fileno(), replies.fileno()

    def give_up(self) -> None:
        """Close the pipes."""
        for end in self.ends:
            end.close()
        self.ends, self.owes = (), False

    def step(self) -> None:
        """Have it step with the actions in shared memory."""
        self.owes = True
        try:  # noqa: SIM105 a context manager takes as long as the rest of this
            os.write(self.commands, _messages.STEP)
        except BrokenPipeError:
            pass  # as in send

    def send(self, message: bytes) -> None:
        """Give a command."""
        self.owes = True
        # Why it is gone is told where the answer is read.
        with contextlib.suppress(BrokenPipeError):
            _messages.write(self.commands, message)

    def read(self) -> None:
        """Wait for the answer.

        :raises EOFError: the worker is gone
        :raises InvalidArgumentError: Ctrl-C has come amid an earlier answer
        """
        if self.torn:
            raise InvalidArgumentError(
                "these environments were interrupted amid an answer; close them, env.close(), and make new ones"
            )
        kind = os.read(self.replies, 1)
        if kind == _messages.NOTHING:
            self.owes, self.said = False, None
            return
        if not kind:
            raise EOFError("a worker's pipe was closed")
        self.torn = True
        data = _messages.read_packed(self.replies)
        self.owes = self.torn = False
        self.said = _messages.answer(kind, data)
