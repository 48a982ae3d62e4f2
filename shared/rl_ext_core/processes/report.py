"""Report of a worker to its parent: progress, stacks, and the final exception.

The report is an anonymous file in memory that both processes share. Unlike a pipe, it never blocks the writer, and it
can be read several times, also after the worker's death. The first page is overwritten in place. After it, faulthandler
appends stack traces; the worker appends a mark and its exception.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import sys
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

from rl_ext_core._system import new_memory_file, read_at

PAGE = 4096
# Offsets in the page of single bytes, which a killed process cannot leave half-written: the progress, whether the
# worker has exit callbacks, was asked to end, and has reported an exception.
PROGRESS, NEEDS_CLOSE, END_REQUESTED, RAISED = range(4)
_MARK = b"\0report\0"
_TEXT_LIMIT = 100_000
_PICKLE_LIMIT = 1_000_000
_SUMMARY_LIMIT = 300
# Tracebacks of workers start in these files. The frames of the user's code follow.
_WORKER_FILES = ("/multiprocessing/process.py", "/processes/context.py", "/processes/worker.py")


class RemoteTracebackError(Exception):
    """Cause of an exception from a worker, which shows the traceback in that worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Progress(IntEnum):
    """Stages of a worker's start."""

    LAUNCHED = 0
    IMPORTING = 1
    UNPICKLING = 2
    RUNNING = 3


@dataclass(frozen=True)
class ExceptionRecord:
    """An exception raised in a worker, as text and in pickled form.

    :ivar summary: ``repr`` of the exception, shortened
    :ivar traceback: traceback in the worker
    :ivar pickled: pickle of the exception, without its cause; None if it cannot be pickled
    :ivar time: monotonic time of the report, in seconds
    :ivar is_exit: whether it is a SystemExit
    """

    summary: str
    traceback: str
    pickled: bytes | None
    time: float
    is_exit: bool

    @classmethod
    def from_exception(cls, error: BaseException) -> ExceptionRecord:
        """Record an exception, in the worker."""
        where: TracebackType | None = error.__traceback__
        while (
            where and where.tb_next and where.tb_frame.f_code.co_filename.replace(os.sep, "/").endswith(_WORKER_FILES)
        ):
            where = where.tb_next
        text = _shorten("".join(traceback.format_exception(type(error), error, where)), _TEXT_LIMIT)
        is_exit = isinstance(error, SystemExit)
        return cls(_summarize(error), text, _pickle_exception(error), time.monotonic(), is_exit)

    def unpickle(self) -> BaseException | None:
        """Unpickle the exception; return None if that fails or would import a module."""
        try:
            found = _LoadedModulesUnpickler(io.BytesIO(self.pickled or b"")).load()
        except Exception:  # the exception's own code may raise anything
            return None
        return found if isinstance(found, BaseException) else None

    def to_exception(self) -> Exception:
        """Return an exception to raise in the parent, whose cause shows the worker's traceback.

        If the exception cannot be unpickled, or is not an Exception, it is a RuntimeError with the summary.
        """
        found = self.unpickle()
        error = found if isinstance(found, Exception) else RuntimeError(self.summary)
        error.__cause__ = RemoteTracebackError(self.traceback)
        return error


class WorkerReport:
    """Report of a worker, which maps it, as its parent does.

    :param fd: file descriptor of the report in the worker; default: a new report

    :ivar page: first page, whose bytes at :data:`NEEDS_CLOSE`, :data:`END_REQUESTED` and :data:`RAISED` are 0 or 1
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = new_memory_file("rl_ext_core-report")[0] if fd is None else fd
        if fd is None:
            # Unlike __del__, it is not called after the interpreter has cleared the globals of modules.
            weakref.finalize(self, os.close, self.fd).atexit = False
            os.ftruncate(self.fd, PAGE)
        self.page = mmap.mmap(self.fd, PAGE)
        # The worker appends here, because both processes share the file offset. Windows' mmap changes it.
        os.lseek(self.fd, 0, os.SEEK_END)

    @property
    def progress(self) -> Progress:
        """Stage that the worker has reached."""
        return Progress(self.page[PROGRESS])

    @property
    def exception_record(self) -> ExceptionRecord | None:
        """Exception that the worker reported; None if there is none or it is incomplete."""
        with suppress(Exception):
            found: ExceptionRecord = pickle.loads(self._read(PAGE).partition(_MARK)[2])
            return found
        return None

    def text(self, start: int = PAGE) -> str:
        """Return faulthandler's text.

        :param start: an earlier :meth:`size`, to get the text after it; default: all
        """
        return _shorten(self._read(start).partition(_MARK)[0].decode(errors="replace"), _TEXT_LIMIT)

    def size(self) -> int:
        """Return the size of the report in bytes."""
        return os.fstat(self.fd).st_size

    def write_exception(self, error: BaseException) -> bool:
        """Report an exception that ends this worker; return whether it was written."""
        try:
            rest = memoryview(_MARK + pickle.dumps(ExceptionRecord.from_exception(error)))
            while rest:
                rest = rest[os.write(self.fd, rest) :]
            self.page[RAISED] = 1
        except Exception:  # out of memory or space: multiprocessing prints the exception instead
            return False
        return True

    def _read(self, start: int) -> bytes:
        return read_at(self.fd, self.size() - start, start)


def _summarize(error: BaseException) -> str:
    """Return the repr of an exception on one line, shortened."""
    try:
        text = repr(error)
    except Exception as second:
        text = f"{type(error).__name__}(<its repr raises {type(second).__name__}>)"
    return _shorten(" ".join(text.split()), _SUMMARY_LIMIT)


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} [... {len(text) - limit} characters cut ...] {text[-(limit - head) :]}"


def _pickle_exception(error: BaseException) -> bytes | None:
    """Pickle an exception; return None if that fails or the result is too long."""
    for module in ("pickle", "rl_ext_core._pickle"):  # the second one pickles classes by value
        with suppress(Exception):  # the exception's own code may raise anything; its text is still reported
            packed: bytes = importlib.import_module(module).dumps(error)
            return packed if len(packed) <= _PICKLE_LIMIT else None
    return None


class _LoadedModulesUnpickler(pickle.Unpickler):
    """Unpickler that does not import modules.

    An error from a worker must not load a simulator into the parent. Code that catches an exception by its class has
    imported the class's module already.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not loaded")
        return super().find_class(module, name)
