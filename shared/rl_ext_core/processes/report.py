"""The file in which a worker says how far it got and why it dies, shared with its parent and without a name.

A file in memory rather than a pipe: writing it never blocks, whoever reads it or not, it takes what is large, it can be
read after the death and more than once. It starts with a page that is overwritten in place (how far the worker got,
its notes); what follows is appended: faulthandler's text, and records between marks that such text cannot contain.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pickle
import struct
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core._system import new_memory_file

PAGE = 4096
_NUMBER, _LENGTH = struct.Struct("=I"), struct.Struct("=Q")
# Of the page: how far it got, whether it has something to close, whether it was asked to end, and its notes.
_CLOSES_AT, _ASKED_AT, _NOTES_AT = 4, 8, 12
_NOTES_FROM = _NOTES_AT + _LENGTH.size
_NOTES_LIMIT = PAGE - _NOTES_FROM
_MARK = b"\0report\0"
_TEXT_LIMIT = 100_000
_PICKLE_LIMIT = 1_000_000
_SUMMARY_LIMIT = 300
_CAUSES_LIMIT = 10
# Where every worker's traceback starts; the user's code comes after it.
_OUR_FILES = ("/multiprocessing/process.py", "/multiprocessing/spawn.py", "/rl_ext_core/processes/worker.py")
_encode = json.JSONEncoder(default=repr).encode


class Progress(IntEnum):
    """How far a worker got."""

    LAUNCHED = 0
    IMPORTING = 1
    UNPICKLING = 2
    RUNNING = 3


@dataclass(frozen=True)
class Raised:
    """An exception that ended a worker, as it was in the worker."""

    summary: str
    traceback: str
    pickled: list[bytes | None]  # it, its cause, the cause's, and so on; pickle leaves causes out
    time: float
    exits: bool
    unguarded: bool  # the main script starts processes when it is imported

    @classmethod
    def of(cls, error: BaseException, time: float, *, unguarded: bool = False) -> Raised:
        """Describe an exception, in the worker."""
        exits = isinstance(error, SystemExit)
        return cls(_summary(error), _formatted(error), _pickled_causes(error), time, exits, unguarded)

    def exception(self) -> BaseException | None:
        """Unpickle the exception, unless that fails or would import what this process has not imported."""
        found = None
        for packed in reversed(self.pickled):
            cause, found = found, _unpickled(packed)
            if found is not None:
                found.__cause__ = cause
        return found


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
        self.taken = False  # whether someone shows what it says
        self._closed: Contents | None = None
        # It may be closed by the main thread while another one reads it.
        self._lock = threading.Lock()
        try:
            os.ftruncate(self.fd, PAGE)
            # The offset is shared with the worker: here, nothing is read or written with it afterwards.
            os.lseek(self.fd, PAGE, os.SEEK_SET)
        except BaseException:
            os.close(self.fd)
            raise

    @uninterrupted
    def ask_to_end(self) -> bool:
        """Note that the worker is to end, which a signal will tell it; tell whether it has something to close then."""
        with self._lock:
            if self._closed:
                return False
            os.pwrite(self.fd, _NUMBER.pack(1), _ASKED_AT)
            return bool(*_NUMBER.unpack(os.pread(self.fd, _NUMBER.size, _CLOSES_AT)))

    @uninterrupted
    def size(self) -> int:
        """Return the number of bytes, for :meth:`since`."""
        with self._lock:
            return 0 if self._closed else os.fstat(self.fd).st_size

    @uninterrupted
    def since(self, start: int) -> tuple[str, list[tuple[Any, ...]], int]:
        """Read faulthandler's text and the worker's own records from a place on; give the place after the last one."""
        with self._lock:
            if self._closed:
                return "", [], start
            text, records, read = _parted(os.pread(self.fd, os.fstat(self.fd).st_size, start))
            return text, [record for record in records if isinstance(record, tuple)], start + read

    @uninterrupted
    def read(self) -> Contents:
        """Read everything, also after :meth:`close`."""
        with self._lock:
            return self._closed or self._contents()

    @uninterrupted
    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = self._contents()
            os.close(self.fd)

    def _contents(self) -> Contents:
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        (progress,), (length,) = _NUMBER.unpack_from(data), _LENGTH.unpack_from(data, _NOTES_AT)
        notes = json.loads(data[_NOTES_FROM : _NOTES_FROM + length]) if length else {}
        text, records, _ = _parted(data[PAGE:])
        raised = next((record for record in records if isinstance(record, dict)), None)
        return Contents(Progress(progress), notes, None if raised is None else Raised(**raised), text)

    def print_if_untaken(self) -> None:
        """Write the worker's traceback where multiprocessing would have: nobody asked for the report."""
        raised = None if self.taken else self.read().raised
        if raised is not None and not raised.exits and sys.stderr is not None:
            sys.stderr.write(raised.traceback)


class Writer:
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, PAGE)

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

    def append(self, record: Any) -> None:
        """Append a record at once: this process may die of what it does next."""
        payload = pickle.dumps(record)
        rest = memoryview(_MARK + _LENGTH.pack(len(payload)) + payload)
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def raised(self, error: BaseException, time: float, *, unguarded: bool = False) -> bool:
        """Report an exception that ends this worker, and tell whether the report has arrived."""
        try:
            self.append(asdict(Raised.of(error, time, unguarded=unguarded)))
        except Exception:  # no memory, no space: the caller has other ways to tell
            return False
        return True


def _parted(data: bytes) -> tuple[str, list[Any], int]:
    """Part faulthandler's text from the records; one that was cut short by the worker's death is none."""
    text, at = b"", 0
    records: list[Any] = []
    while (mark := data.find(_MARK, at)) >= 0:
        begin = mark + len(_MARK) + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, begin - _LENGTH.size)[0] if begin <= len(data) else math.inf
        if end > len(data):
            return _decoded(text + data[at:mark]), records, at
        text += data[at:mark]
        records.append(pickle.loads(data[begin : int(end)]))
        at = int(end)
    return _decoded(text + data[at:]), records, at


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
    while where is not None and where.tb_next is not None and where.tb_frame.f_code.co_filename.endswith(_OUR_FILES):
        where = where.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, where))
    except Exception as second:  # an exception's own __str__ may raise
        text = "".join(traceback.format_tb(where))
        text += f"{type(error).__name__}: <formatting it raises {type(second).__name__}>\n"
    return _cut(text, _TEXT_LIMIT)


def _cut(text: str, limit: int) -> str:
    """Keep both ends of a long text: where it starts, and what it comes to."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} [... {len(text) - limit} characters cut ...] {text[-(limit - head) :]}"


def _pickled_causes(error: BaseException | None) -> list[bytes | None]:
    found: list[bytes | None] = []
    while error is not None and len(found) < _CAUSES_LIMIT:
        sink = _BoundedSink()
        try:
            pickle.Pickler(sink).dump(error)
            found.append(sink.getvalue())
        except Exception:  # whatever the exception's own code raises; its text still goes
            found.append(None)
        error = error.__cause__
    return found


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
