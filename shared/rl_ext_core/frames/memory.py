"""Addresses of arrays, and errors of memory and files."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.errors import CorruptFileError, OutOfMemoryError, StorageError
from rl_ext_core.resources import NO_SPACE, write_problem

_Pointer = ctypes.c_size_t
_HEADER = object.__basicsize__


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of an array's memory."""
    # This reads the first field after the object header, as ``PyArray_DATA`` does. ``__array_interface__`` takes ten
    # times as long.
    return _Pointer.from_address(id(array) + _HEADER).value


def storage_error(path: Path | str, error: OSError, *, doing: str) -> StorageError:
    """Create the error for a failed file operation.

    :param path: The file.
    :param error: Error of the system.
    :param doing: Verb for the message, such as ``"open"``.
    """
    has_space = error.errno is not None and error.errno not in NO_SPACE
    why = write_problem(Path(os.path.abspath(path)), error) if has_space else error.strerror or error
    return StorageError(
        f"cannot {doing} {path}: {why}. Data that was stored before this call is intact, and nothing of this call was "
        f"stored. {'P' if has_space else 'Free some space there, or p'}ass another storage_dir"
    )


@contextlib.contextmanager
def as_storage_error(path: Path, *, doing: str) -> Iterator[None]:
    """Within the context, raise errors of the system as those of :func:`storage_error`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(path, error, doing=doing) from error


def map_file(path: Path, n_bytes: int, *, allocate: bool = True) -> Any:
    """Map a file to memory. A file that does not exist is created, with zeros.

    :param allocate: Whether to allocate its disk space. A write to a file without it may kill the process.
    :return: Object with the buffer protocol, which keeps the file mapped while it is referenced.
    :raises StorageError: If the disk is full, or the file cannot be opened.
    """
    with as_storage_error(path, doing="write" if allocate else "open"):
        descriptor = _system.open_file(path)
        try:
            if allocate:
                _system.allocate_file_space(descriptor, 0, n_bytes)
            return _system.map_whole_file(descriptor, n_bytes)
        finally:
            os.close(descriptor)


def damaged_folder_error(problem: str) -> CorruptFileError:
    """Create the error for a storage_dir of which files are damaged or missing."""
    return CorruptFileError(f"{problem}. Restore the folder from a copy, or pass another storage_dir")


def out_of_memory_error(n_bytes: int) -> OutOfMemoryError:
    """Build the error for a failed allocation of that many bytes."""
    return OutOfMemoryError(
        f"no memory for another {n_bytes:,} bytes. Data that was stored before this call is intact, and nothing of "
        "this call was stored. Pass a smaller buffer_size."
    )
