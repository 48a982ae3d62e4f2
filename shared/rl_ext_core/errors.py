"""Exceptions of this project.

Each derives from the builtin exception that users of the extended libraries already catch, so ``except ValueError``
keeps working. ``except RlExtError`` catches all of them.
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
    "install_line",
]


class RlExtError(Exception):
    """Base class of this project's exceptions."""


class InvalidArgumentError(RlExtError, ValueError):
    """An argument has the right type, but an invalid value."""


class InvalidTypeError(RlExtError, TypeError):
    """An argument has the wrong type."""


class IsolationError(RlExtError, RuntimeError):
    """Environments cannot be isolated from each other, or a single instance already fails."""


class MissingDependencyError(RlExtError, ImportError):
    """A required optional package is not installed."""


class DeviceUnavailableError(RlExtError, RuntimeError):
    """A device that was requested by name cannot be used on this machine."""


class DeviceConflictError(RlExtError, RuntimeError):
    """A device was chosen too late: a library has already read other settings."""


class CorruptFileError(RlExtError, ValueError):
    """A file is damaged, truncated, or has a format that this version does not read."""


class EnvironmentOutputError(RlExtError, ValueError):
    """An environment returned values that do not fit its spaces."""


class NotCopyableError(RlExtError, TypeError):
    """An environment cannot be copied to another process."""


class OutOfMemoryError(RlExtError, MemoryError):
    """The data does not fit into memory, or into the byte budget of a buffer."""


class StorageError(RlExtError, OSError):
    """Files cannot be written, such as on a full disk or if another process uses them."""


class WorkerError(RlExtError, RuntimeError):
    """A worker process has failed, and the other workers were ended.

    If the worker raised an exception that can be rebuilt in this process, it is the ``__cause__``.

    :param text: Error text, with the problem in the first line
    :ivar worker: Number of the worker; None if no worker had started
    :ivar kind: ``"exception"``, ``"signal"``, ``"exit"``, ``"timeout"`` or ``"start"``
    :ivar phase: Task of the worker when it failed, such as ``"step"``; None if unknown
    :ivar seed: Seed of its environments; None if not set
    :ivar exitcode: Exit code of its process, negative for a signal; None if the process had not ended
    :ivar traceback: Traceback in the worker; empty if there is none
    :ivar notes: Status entries that the worker has set
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
    """Return an exception class that derives from ``kind`` and from the class of ``error``.

    Callers can then catch either. If Python cannot combine the two classes, it is ``kind``.

    :param kind: Exception class of this project
    :param error: Exception of another library
    """
    if isinstance(error, kind):
        return kind
    try:
        return type(kind.__name__, (kind, type(error)), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    except TypeError:  # builtin exceptions with different memory layouts
        return kind


# The package is not on PyPI yet. Once it is, set this to "rl-ext" and the note to "".
_SOURCE = "./rl-ext"
_SOURCE_NOTE = f" ({_SOURCE} is your clone of the repository)"


def install_line(extra: str) -> str:
    """Return the command that installs this package with some of its extras.

    :param extra: Name of an extra, or several names separated by commas
    """
    return f'pip install "{_SOURCE}[{extra}]"'


def _missing_dependency_error(name: str, extra: str, why: str) -> MissingDependencyError:
    """Build the error for a package that is not installed, with the command that installs it.

    :param name: Import name of the package
    :param extra: Extra of ``rl-ext`` that includes the package
    :param why: Subject of the error text, such as ``"codec 'jpeg'"``
    :return: The error, for the caller to raise
    """
    text = f"{why} needs the package {name!r}, which is not installed. Install it with{_SOURCE_NOTE}:\n"
    return MissingDependencyError(f"{text}    {install_line(extra)}", name=name)
