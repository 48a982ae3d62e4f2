"""The project's exceptions.

Each one is also the builtin that callers of the extended libraries already catch, so that
``except ValueError`` keeps working. ``except RlExtError`` catches whatever this project raises on purpose.
"""

from __future__ import annotations

__all__ = [
    "CorruptFileError",
    "DeviceConflictError",
    "DeviceUnavailableError",
    "EnvironmentOutputError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "MissingDependencyError",
    "OutOfMemoryError",
    "RlExtError",
    "missing_dependency",
]


class RlExtError(Exception):
    """Base of everything that this project raises on purpose."""


class InvalidArgumentError(RlExtError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class InvalidTypeError(RlExtError, TypeError):
    """An argument has a type that cannot be used."""


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


class OutOfMemoryError(RlExtError, MemoryError):
    """What was asked for does not fit into the memory or the byte budget it was given."""


def missing_dependency(name: str, extra: str, why: str) -> MissingDependencyError:
    """Build the error for a package that is not installed, with the line that installs it.

    :param name: the package that could not be imported, as one types it after ``import``
    :param extra: the extra of ``rl-ext`` that brings it
    :param why: what needs the package, as a noun phrase that starts the sentence
    :return: the error, for the caller to raise
    """
    text = f"{why} needs the package {name!r}, which is not installed. Install it with:\n"
    return MissingDependencyError(f'{text}    pip install "rl-ext[{extra}]"', name=name)
