"""What workers are told and what they answer: pickles in files, which may be read twice, and bytes that only wake."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from typing import Any

from rl_ext_core.factory import _byvalue

__all__ = ["NOTHING", "RAISED", "VALUE", "Mailbox", "Raised", "answer", "packed", "packed_error", "ring", "unpacked"]

# Kinds of answers: done, and there is nothing more to say; a value; an exception that leaves the worker alive.
NOTHING, VALUE, RAISED = range(3)

_KEPT = 1 << 20  # bytes of a mailbox that stay allocated from one message to the next


class RemoteTracebackError(Exception):
    """Shows where in its worker an exception was raised, as the cause of that exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Raised:
    """What an environment has raised; its worker lives on.

    :ivar error: the exception
    :ivar summary: its ``repr`` in the worker
    """

    def __init__(self, error: Exception, summary: str) -> None:
        self.error, self.summary = error, summary


class Mailbox:
    """A file that holds one message. A worker and its parent write it in turns.

    :param descriptor: of the file
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, message: bytes) -> None:
        """Put a message in the place of the last one."""
        if os.fstat(self._descriptor).st_size > max(_KEPT, len(message)):
            os.ftruncate(self._descriptor, 0)
        written, data = 0, memoryview(message)
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], written)

    def read(self, size: int) -> bytes:
        """Read the message, which has this many bytes."""
        parts: list[bytes] = []
        found = 0
        while found < size:
            parts.append(os.pread(self._descriptor, size - found, found))
            if not parts[-1]:
                raise EOFError(f"a message of {size} bytes ends after {found}")
            found += len(parts[-1])
        return b"".join(parts)


def ring(doorbell: int) -> None:
    """Wake who waits at the other end of a pipe, which looks for itself why it was woken."""
    try:  # noqa: SIM105 a context manager takes as long as the rest of this
        os.write(doorbell, b"\0")
    except (BrokenPipeError, BlockingIOError):
        pass  # nobody is there, which the watch tells; or it was rung often enough


def packed(value: Any) -> bytes:
    """Pickle what a worker answers, or is told by numbers alone.

    :raises Exception: it cannot be pickled
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return _byvalue.dumps(value, message=True)


def unpacked(data: bytes) -> Any:
    """Unpickle what the other process has packed."""
    return pickle.loads(data)


def packed_error(error: BaseException) -> bytes:
    """Pack what an environment has raised such that it can be unpickled whatever that was."""
    kind = type(error).__name__
    summary, shown, text = f"{kind}: its own code raises while it is told", f"{kind}(...)", ""
    data = b""
    with contextlib.suppress(Exception):  # whatever the exception's own code raises
        summary, shown = f"{kind}: {error}", repr(error)
    with contextlib.suppress(Exception):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    with contextlib.suppress(Exception):
        data = packed(error)
    return packed((data, summary, shown, text))


def answer(kind: int, data: bytes) -> Any:
    """Understand what a worker has written; :class:`Raised` is what its environment has raised."""
    if kind == NOTHING:
        return None
    if kind == VALUE:
        return unpacked(data)
    error, summary, shown, text = unpacked(data)
    try:
        found = unpacked(error)
    except Exception:  # whatever its own code raises; or it is of a module that exists in the worker only
        found = None
    if not isinstance(found, Exception):
        found = RuntimeError(summary)
    found.__cause__ = RemoteTracebackError(text)
    return Raised(found, shown)
