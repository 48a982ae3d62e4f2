"""Messages through raw pipes: one byte where that says everything, a pickle behind it where it does not."""

from __future__ import annotations

import os
import pickle
import struct
import traceback
from typing import Any

__all__ = ["CALL", "NOTHING", "RAISED", "STEP", "VALUE", "Raised", "answer", "packed", "read", "read_packed", "write"]

# To a worker: step with the actions in shared memory; do what the message behind says.
STEP, CALL = b"s", b"c"
# From a worker: done, and there is nothing more to say; a value; an exception that leaves the worker alive.
NOTHING, VALUE, RAISED = b"0", b"v", b"e"

_LENGTH = struct.Struct("<Q")


class RemoteTracebackError(Exception):
    """Shows where in its worker an exception was raised, as the cause of that exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Raised:
    """What an environment has raised; its worker lives on.

    :ivar error: the exception
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def packed(kind: bytes, value: Any) -> bytes:
    """Give a message: a kind and a value."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return kind + _LENGTH.pack(len(data)) + data


def packed_error(error: BaseException) -> bytes:
    """Give the message that an environment has raised something; it can be unpickled whatever that was."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever the exception's own code raises
        data = b""
    return packed(RAISED, (data, f"{type(error).__name__}: {error}", text))


def behind(message: bytes) -> bytes:
    """Give what stands behind the kind of a message: a pickle."""
    return message[1 + _LENGTH.size :]


def write(descriptor: int, message: bytes) -> None:
    """Write all of it."""
    written = os.write(descriptor, message)
    if written == len(message):
        return
    left = memoryview(message)[written:]
    while left:
        left = left[os.write(descriptor, left) :]


def read(descriptor: int, size: int) -> bytes:
    """Read that many bytes.

    :raises EOFError: the other end is closed
    """
    parts, missing = [], size
    while missing:
        part = os.read(descriptor, missing)
        if not part:
            raise EOFError("the pipe to a worker was closed")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def read_packed(descriptor: int) -> bytes:
    """Read what stands behind the kind of a message: a pickle."""
    return read(descriptor, _LENGTH.unpack(read(descriptor, _LENGTH.size))[0])


def answer(kind: bytes, data: bytes) -> Any:
    """Understand what a worker has written; :class:`Raised` is what its environment has raised."""
    if kind == VALUE:
        return pickle.loads(data)
    if kind != RAISED:
        raise ValueError(f"a worker's pipe was read out of step: {kind!r}; close the environments and make new ones")
    error, summary, text = pickle.loads(data)
    try:
        found = pickle.loads(error)
    except Exception:  # whatever its own code raises; or it is of a module that exists in the worker only
        found = None
    if not isinstance(found, Exception):
        found = RuntimeError(summary)
    found.__cause__ = RemoteTracebackError(text)
    return Raised(found)
