"""The project's exceptions.

Each one is also the builtin that callers of the extended libraries already catch, so that
``except ValueError`` keeps working. ``except RlExtError`` catches whatever this project raises on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "CorruptFileError",
    "DeviceConflictError",
    "DeviceUnavailableError",
    "EnvironmentOutputError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "IsolationError",
    "MissingDependencyError",
    "NotCopyableError",
    "OutOfMemoryError",
    "RlExtError",
    "StorageError",
    "WorkerError",
    "_combined_error_class",
    "install_line",
    "_missing_dependency_error",
]


class RlExtError(Exception):
    """Base of everything that this project raises on purpose."""


class InvalidArgumentError(RlExtError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class InvalidTypeError(RlExtError, TypeError):
    """An argument has a type that cannot be used."""


class IsolationError(RlExtError, RuntimeError):
    """Environments cannot be kept apart, or fail by themselves."""


class MissingDependencyError(RlExtError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


class DeviceUnavailableError(RlExtError, RuntimeError):
    """A device was asked for by name and cannot be used on this machine."""


class DeviceConflictError(RlExtError, RuntimeError):
    """A device was decided on too late: a library in this process has read other settings already."""


class CorruptFileError(RlExtError, ValueError):
    """Stored bytes are damaged, cut short, or of a format that this version does not read."""


class EnvironmentOutputError(RlExtError, ValueError):
    """An environment returned what its spaces do not promise."""


class NotCopyableError(RlExtError, TypeError):
    """An environment cannot be copied into another process as it is."""


class OutOfMemoryError(RlExtError, MemoryError):
    """What was asked for does not fit into the memory or the byte budget it was given."""


class StorageError(RlExtError, OSError):
    """Files cannot be written to: the disk is full, or they belong to another process."""


class WorkerError(RlExtError, RuntimeError):
    """A worker process has failed, and the others were ended.

    Where the worker raised an exception that can be rebuilt in this process, that is the ``__cause__``.

    :param text: what happened in the first line, then where
    :ivar worker: number of the worker; None if none had started
    :ivar kind: "exception", "signal", "exit", "timeout" or "start"
    :ivar phase: what it was at
    :ivar seed: of its environments
    :ivar exitcode: of its process, negative for signals
    :ivar traceback: where it was, as the worker saw it
    :ivar notes: what it has said of itself
    """

    def __init__(
        self,
        text: str,
        *,
        worker: int | None = None,
        kind: str = "start",
        phase: str | None = None,
        seed: int | None = None,
        exitcode: int | None = None,
        traceback: str = "",
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(text)
        self.worker = worker
        self.kind = kind
        self.phase = phase
        self.seed = seed
        self.exitcode = exitcode
        self.traceback = traceback
        self.notes = dict(notes or {})


def _combined_error_class(kind: type[RlExtError], error: BaseException) -> type[RlExtError]:
    """Return a class of errors that is one of ours and that of another library's error, for who catches the latter.

    :param kind: ours
    :param error: what the other library has raised
    """
    if isinstance(error, kind):
        return kind
    try:
        return type(kind.__name__, (kind, type(error)), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    except TypeError:  # built in ones that do not go together
        return kind


# The package is in no package index yet. Once it is there: "rl-ext", and no note.
_SOURCE = "./rl-ext"
_SOURCE_NOTE = f" ({_SOURCE} is your clone of the repository)"


def install_line(extra: str) -> str:
    """Return the command that installs this package with one of its extras.

    :param extra: Name of the extra, or several of them with commas
    """
    return f'pip install "{_SOURCE}[{extra}]"'


def _missing_dependency_error(name: str, extra: str, why: str) -> MissingDependencyError:
    """Build the error for a package that is not installed, with the line that installs it.

    :param name: the package that could not be imported, as one types it after ``import``
    :param extra: the extra of ``rl-ext`` that brings it
    :param why: what needs the package, as a noun phrase that starts the sentence
    :return: the error, for the caller to raise
    """
    text = f"{why} needs the package {name!r}, which is not installed. Install it with{_SOURCE_NOTE}:\n"
    return MissingDependencyError(f"{text}    {install_line(extra)}", name=name)
