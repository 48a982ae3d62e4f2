"""The file in which a worker records how far it got and why it ends, shared with its parent and without a name.

A file in memory rather than a pipe: writing never blocks, and it can be read after the death and more than once. The
first page is overwritten in place. Behind it faulthandler appends text, and the worker its exception, after a mark.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import pickle
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
# Single bytes of the page, which no death can cut in two: progress, and whether the worker has something to close, was
# asked to end, and has reported an exception. Its notes follow, up to a zero.
_PROGRESS, _NEEDS_CLOSE, _END_REQUESTED, _RAISED, _NOTES = range(5)
_NOTES_LIMIT = PAGE - _NOTES - 1
_MARK = b"\0report\0"
_TEXT_LIMIT = 100_000
_PICKLE_LIMIT = 1_000_000
_SUMMARY_LIMIT = 300
_CAUSES_LIMIT = 10
# Where every worker's traceback starts; the user's code comes after it.
_WORKER_FILES = ("/multiprocessing/process.py", "/processes/context.py", "/processes/worker.py")
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
class ExceptionRecord:
    """An exception of a worker, as it was there.

    :ivar summary: its ``repr``, shortened
    :ivar traceback: where it was raised
    :ivar pickled: it, its cause, the cause's, and so on, which pickle leaves out; None: cannot be pickled
    """

    summary: str
    traceback: str
    pickled: list[bytes | None]
    time: float
    is_exit: bool

    @classmethod
    def from_exception(cls, error: BaseException) -> ExceptionRecord:
        """Describe an exception, in the worker."""
        where: TracebackType | None = error.__traceback__
        while (
            where and where.tb_next and where.tb_frame.f_code.co_filename.replace(os.sep, "/").endswith(_WORKER_FILES)
        ):
            where = where.tb_next
        text = _shorten("".join(traceback.format_exception(type(error), error, where)), _TEXT_LIMIT)
        causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and len(causes) < _CAUSES_LIMIT:
            causes.append(cause)
            cause = cause.__cause__
        return cls(
            _summarize(error), text, [*map(_pickle_exception, causes)], time.monotonic(), isinstance(error, SystemExit)
        )

    def exception(self) -> BaseException | None:
        """Unpickle the exception, unless that fails or would import what this process has not imported."""
        found = None
        for packed in reversed(self.pickled):
            cause, found = found, _unpickle_exception(packed)
            if found is not None:
                found.__cause__ = cause
        return found

    def to_exception(self) -> Exception:
        """Return the exception to raise in the parent, or what stands for it; its cause shows where it was raised."""
        found = self.exception()
        error = found if isinstance(found, Exception) else RuntimeError(self.summary)
        error.__cause__ = RemoteTracebackError(self.traceback)
        return error


class WorkerReport:
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
        return Progress(self._page[_PROGRESS])

    @property
    def has_raised(self) -> bool:
        """Whether the worker has reported an exception, and so is about to end."""
        return bool(self._page[_RAISED])

    @property
    def notes(self) -> dict[str, Any]:
        """The worker's notes, if it has ended or does not write."""
        text = self._page[_NOTES:].partition(b"\0")[0]
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    @property
    def exception_record(self) -> ExceptionRecord | None:
        """What the worker has raised; None if its death has cut the record short."""
        with suppress(Exception):
            found: ExceptionRecord = pickle.loads(self._read(PAGE).partition(_MARK)[2])
            return found
        return None

    def text(self, start: int = PAGE) -> str:
        """Read faulthandler's text from a place on, which is an earlier :meth:`size`."""
        return _shorten(self._read(start).partition(_MARK)[0].decode(errors="replace"), _TEXT_LIMIT)

    def size(self) -> int:
        """Return the number of bytes."""
        return os.fstat(self.fd).st_size

    def request_end(self) -> bool:
        """Record that the worker is to end, which a signal will tell it; return whether it has something to close."""
        self._page[_END_REQUESTED] = 1
        return bool(self._page[_NEEDS_CLOSE])

    def _read(self, start: int) -> bytes:
        return read_at(self.fd, self.size() - start, start)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it was not made
            os.close(self.fd)


class ReportWriter:
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, PAGE)
        os.lseek(fd, 0, os.SEEK_END)  # Windows' mmap changes the offset

    def set_progress(self, progress: Progress) -> None:
        """Record how far the worker is."""
        self._page[_PROGRESS] = progress

    def is_end_requested(self) -> bool:
        """Return whether the parent wants an end: anybody may send a signal."""
        return bool(self._page[_END_REQUESTED])

    def mark_needs_close(self) -> None:
        """Record that this worker has something to close before it ends."""
        self._page[_NEEDS_CLOSE] = 1

    def write_notes(self, notes: dict[str, Any]) -> None:
        """Replace the notes; what JSON does not know arrives as its ``repr``, what is long is cut."""
        try:
            data = _encode(notes).encode()
        except (TypeError, ValueError):  # keys that are no strings, a list in itself
            data = b""
        if not 0 < len(data) <= _NOTES_LIMIT:
            kept = {name: _shorten(str(value), 100) for name, value in notes.items()}
            while len(data := _encode(kept).encode()) > _NOTES_LIMIT:
                kept.popitem()
        # Empty while they are replaced: a worker that is killed half-way leaves none rather than half of them.
        self._page[_NOTES] = 0
        self._page[_NOTES + 1 : _NOTES + len(data) + 1] = data[1:] + b"\0"
        self._page[_NOTES] = data[0]

    def write_exception(self, error: BaseException) -> bool:
        """Report an exception that ends this worker, and return whether the report has arrived."""
        try:
            rest = memoryview(_MARK + pickle.dumps(ExceptionRecord.from_exception(error)))
            while rest:
                rest = rest[os.write(self.fd, rest) :]
            self._page[_RAISED] = 1
        except Exception:  # no memory, no space: the caller has other ways to tell
            return False
        return True


def _summarize(error: BaseException) -> str:
    try:
        text = repr(error)
    except Exception as second:
        text = f"{type(error).__name__}(<its repr raises {type(second).__name__}>)"
    return _shorten(" ".join(text.split()), _SUMMARY_LIMIT)


def _shorten(text: str, limit: int) -> str:
    """Keep both ends of a long text: where it starts, and what it comes to."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} [... {len(text) - limit} characters cut ...] {text[-(limit - head) :]}"


def _pickle_exception(error: BaseException) -> bytes | None:
    for module in ("pickle", "rl_ext_core._pickle"):  # the second for a class of a script that is not imported here
        with suppress(Exception):  # whatever the exception's own code raises; its text still goes
            packed: bytes = importlib.import_module(module).dumps(error)
            return packed if len(packed) <= _PICKLE_LIMIT else None
    return None


def _unpickle_exception(packed: bytes | None) -> BaseException | None:
    try:
        found = _LoadedModulesUnpickler(io.BytesIO(packed or b"")).load()
    except Exception:  # whatever the exception's own code raises
        return None
    return found if isinstance(found, BaseException) else None


class _LoadedModulesUnpickler(pickle.Unpickler):
    """Finds classes in loaded modules only: a dead worker's error must not import a simulator into the parent.

    Code that can name the class of an exception, to catch it, has imported its module.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not loaded")
        return super().find_class(module, name)
