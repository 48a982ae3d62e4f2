"""The file in which a worker says how far it got and why it dies, shared with its parent and without a name.

A file in memory rather than a pipe: writing it never blocks, whoever reads it or not, it takes what is large, it can be
read after the death and more than once. It starts with a page that is overwritten in place (how far the worker got,
its notes); what follows is appended: faulthandler's text, and what was raised, behind a mark that no text contains.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

from rl_ext_core._system import new_memory_file, read_at

PAGE = 4096
_NUMBER, _LENGTH = struct.Struct("=I"), struct.Struct("=Q")
# Of the page: how far it got, whether it has something to close, whether it was asked to end, its exit code plus one,
# whether it has reported an exception, and its notes.
_CLOSES_AT, _ASKED_AT, _EXITCODE_AT, _RAISED_AT, _NOTES_AT = 4, 8, 12, 16, 24
_NOTES_FROM = _NOTES_AT + _LENGTH.size
_NOTES_LIMIT = PAGE - _NOTES_FROM
_MARK = b"\0report\0"
_TEXT_LIMIT = 100_000
_PICKLE_LIMIT = 1_000_000
_SUMMARY_LIMIT = 300
_CAUSES_LIMIT = 10
# Where every worker's traceback starts; the user's code comes after it.
_OUR_FILES = ("/multiprocessing/process.py", "/processes/context.py", "/processes/worker.py")
_encode = json.JSONEncoder(default=repr).encode


class RemoteTracebackError(Exception):
    """Shows where in its worker an exception was raised, as the cause of that exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Progress(IntEnum):
    """How far a worker got."""

    LAUNCHED = 0
    IMPORTING = 1
    UNPICKLING = 2
    RUNNING = 3


@dataclass(frozen=True)
class Raised:
    """An exception of a worker, as it was there.

    :ivar summary: its ``repr``, shortened
    :ivar text: its name and what it says
    :ivar traceback: where it was raised
    :ivar pickled: it, its cause, the cause's, and so on, which pickle leaves out; None: cannot be pickled
    :ivar unguarded: whether the main script starts processes when it is imported
    """

    summary: str
    text: str
    traceback: str
    pickled: list[bytes | None]
    time: float
    exits: bool
    unguarded: bool

    @classmethod
    def of(cls, error: BaseException, *, unguarded: bool = False) -> Raised:
        """Describe an exception, in the worker."""
        text = f"{type(error).__name__}: its own code raises while it is told"
        with suppress(Exception):
            text = _cut(f"{type(error).__name__}: {error}", _TEXT_LIMIT)
        exits, now = isinstance(error, SystemExit), time.monotonic()
        return cls(_summary(error), text, _formatted(error), _pickled_causes(error), now, exits, unguarded)

    def exception(self) -> BaseException | None:
        """Unpickle the exception, unless that fails or would import what this process has not imported."""
        found = None
        for packed in reversed(self.pickled):
            cause, found = found, _unpickled(packed)
            if found is not None:
                found.__cause__ = cause
        return found

    def with_traceback(self) -> Exception:
        """Return the exception to raise in the parent, or what stands for it; its cause shows where it was raised."""
        found = self.exception()
        error = found if isinstance(found, Exception) else RuntimeError(self.text)
        error.__cause__ = RemoteTracebackError(self.traceback)
        return error


@dataclass(frozen=True)
class Contents:
    """What a worker has left in its report."""

    progress: Progress
    notes: dict[str, Any]
    raised: Raised | None
    text: str


class Report:
    """The parent's end."""

    def __init__(self) -> None:
        self.fd, _ = new_memory_file("rl_ext_core-report")
        try:
            os.ftruncate(self.fd, PAGE)
            self._page = mmap.mmap(self.fd, PAGE)
            # The worker shares the offset, and appends.
            os.lseek(self.fd, PAGE, os.SEEK_SET)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def progress(self) -> Progress:
        """How far the worker got."""
        return Progress(self._number(0))

    @property
    def has_raised(self) -> bool:
        """Whether the worker has reported an exception, and so is about to end."""
        return bool(self._number(_RAISED_AT))

    def _number(self, place: int) -> int:
        found: int = _NUMBER.unpack_from(self._page, place)[0]
        return found

    def ask_to_end(self) -> bool:
        """Record that the worker is to end, which a signal will tell it; return whether it has something to close."""
        _NUMBER.pack_into(self._page, _ASKED_AT, 1)
        return bool(self._number(_CLOSES_AT))

    def exitcode(self) -> int | None:
        """Read the exit code that the worker has recorded; None: it ended before it could."""
        recorded = self._number(_EXITCODE_AT)
        return recorded - 1 if recorded else None

    def size(self) -> int:
        """Return the number of bytes, for :meth:`text_since`."""
        return os.fstat(self.fd).st_size

    def text_since(self, start: int) -> str:
        """Read faulthandler's text from a place on."""
        return _parted(self._read(start))[0]

    def read(self) -> Contents:
        """Read everything, of a worker that has ended or does not write."""
        (length,) = _LENGTH.unpack_from(self._page, _NOTES_AT)
        notes = json.loads(self._page[_NOTES_FROM : _NOTES_FROM + length]) if length else {}
        text, raised = _parted(self._read(PAGE))
        return Contents(self.progress, notes, raised, text)

    def _read(self, start: int) -> bytes:
        return read_at(self.fd, self.size() - start, start)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it was not made
            os.close(self.fd)


class Writer:
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, PAGE)
        os.lseek(fd, 0, os.SEEK_END)  # Windows' mmap changes the offset

    def enter(self, progress: Progress) -> None:
        """Say how far the worker is."""
        # In one go: pack_into() writes zeros first, and a process that ends in between would have got nowhere.
        self._page[: _NUMBER.size] = _NUMBER.pack(progress)

    def is_asked_to_end(self) -> bool:
        """Return whether the parent wants an end: anybody may send a signal."""
        return bool(*_NUMBER.unpack_from(self._page, _ASKED_AT))

    def has_to_close(self) -> None:
        """Say that this worker has something to close before it ends."""
        _NUMBER.pack_into(self._page, _CLOSES_AT, 1)

    def write_exitcode(self, code: int) -> None:
        """Record the exit code, for a parent that the system does not report it to."""
        _NUMBER.pack_into(self._page, _EXITCODE_AT, (code & 0xFF) + 1)

    def write_notes(self, notes: dict[str, Any]) -> None:
        """Replace the notes; what JSON does not know arrives as its ``repr``."""
        try:
            data = _encode(notes).encode()
        except (TypeError, ValueError):  # keys that are no strings, a list in itself
            data = _shortened(notes)
        if len(data) > _NOTES_LIMIT:
            data = _shortened(notes)
        # Empty while they are replaced: a worker that is killed half-way leaves none rather than half of them.
        _LENGTH.pack_into(self._page, _NOTES_AT, 0)
        self._page[_NOTES_FROM : _NOTES_FROM + len(data)] = data
        _LENGTH.pack_into(self._page, _NOTES_AT, len(data))

    def raised(self, error: BaseException, *, unguarded: bool = False) -> bool:
        """Report an exception that ends this worker, and tell whether the report has arrived."""
        try:
            payload = pickle.dumps(Raised.of(error, unguarded=unguarded))
            rest = memoryview(_MARK + _LENGTH.pack(len(payload)) + payload)
            while rest:
                rest = rest[os.write(self.fd, rest) :]
            _NUMBER.pack_into(self._page, _RAISED_AT, 1)
        except Exception:  # no memory, no space: the caller has other ways to tell
            return False
        return True


def _parted(data: bytes) -> tuple[str, Raised | None]:
    """Part faulthandler's text from what was raised, which is nothing where the worker's death has cut it short."""
    text, _, rest = data.partition(_MARK)
    raised, begin = None, _LENGTH.size
    if len(rest) >= begin:
        end = begin + _LENGTH.unpack_from(rest)[0]
        if len(rest) >= end:
            raised, rest = pickle.loads(rest[begin:end]), rest[end:]
            text += rest.partition(_MARK)[0]
    return _decoded(text), raised


def _decoded(text: bytes) -> str:
    return _cut(text.decode(errors="replace"), _TEXT_LIMIT)


def _shortened(notes: dict[str, Any]) -> bytes:
    data, kept = b"{}", {}
    for name, value in notes.items():
        kept[name] = _cut(str(value), 100)
        longer = _encode(kept).encode()
        if len(longer) > _NOTES_LIMIT:
            break
        data = longer
    return data


def _summary(error: BaseException) -> str:
    try:
        text = repr(error)
    except Exception as second:
        text = f"{type(error).__name__}(<its repr raises {type(second).__name__}>)"
    return _cut(" ".join(text.split()), _SUMMARY_LIMIT)


def _formatted(error: BaseException) -> str:
    where: TracebackType | None = error.__traceback__
    while where is not None and where.tb_next is not None and _file_of(where).endswith(_OUR_FILES):
        where = where.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, where))
    except Exception as second:  # an exception's own __str__ may raise
        text = "".join(traceback.format_tb(where))
        text += f"{type(error).__name__}: <formatting it raises {type(second).__name__}>\n"
    return _cut(text, _TEXT_LIMIT)


def _file_of(where: TracebackType) -> str:
    return where.tb_frame.f_code.co_filename.replace(os.sep, "/")


def _cut(text: str, limit: int) -> str:
    """Keep both ends of a long text: where it starts, and what it comes to."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} [... {len(text) - limit} characters cut ...] {text[-(limit - head) :]}"


def _pickled_causes(error: BaseException | None) -> list[bytes | None]:
    found: list[bytes | None] = []
    while error is not None and len(found) < _CAUSES_LIMIT:
        found.append(_pickled(error))
        error = error.__cause__
    return found


def _pickled(error: BaseException) -> bytes | None:
    with suppress(Exception):  # whatever the exception's own code raises; its text still goes
        sink = _BoundedSink()
        pickle.Pickler(sink).dump(error)
        return sink.getvalue()
    with suppress(Exception):  # a class of a script that was not imported here
        from rl_ext_core import _pickle

        packed = _pickle.dumps(error)
        return packed if len(packed) <= _PICKLE_LIMIT else None
    return None


def _unpickled(packed: bytes | None) -> BaseException | None:
    try:
        found = _LoadedOnly(io.BytesIO(packed or b"")).load()
    except Exception:  # whatever the exception's own code raises
        return None
    return found if isinstance(found, BaseException) else None


class _BoundedSink(io.BytesIO):
    """Refuses more than a limit, so that an exception that holds an environment does not fill the memory."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > _PICKLE_LIMIT:
            raise OverflowError("too large to report")
        return super().write(data)


class _LoadedOnly(pickle.Unpickler):
    """Finds classes in loaded modules only: a dead worker's error must not import a simulator into the parent.

    Code that can name the class of an exception, to catch it, has imported its module.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not loaded")
        return super().find_class(module, name)
