"""What tells whether a file can be read: the version of its format, and a checksum."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from rl_ext_core.errors import CorruptFileError

FORMAT_VERSION = 1
# Of stores that are not exact, or do not hold all that their rows were written with: version 1 knows neither.
EXTENDED_FORMAT_VERSION = 2


def checksum(state: Any) -> int:
    """CRC-32 of nested containers of arrays and plain values, without its own entry."""
    if isinstance(state, np.ndarray):
        contents = zlib.crc32(np.ascontiguousarray(state).reshape(-1).view(np.uint8).data)
        parts: Any = (state.dtype.str, state.shape, contents)
    elif isinstance(state, dict):
        parts = [(key, checksum(value)) for key, value in state.items() if key != "checksum"]
    elif isinstance(state, (list, tuple)):
        parts = [checksum(value) for value in state]
    else:
        parts = state
    return zlib.crc32(repr(parts).encode())


def check_format(state: Any) -> None:
    """Refuses what this version does not read.

    :raises CorruptFileError: if it is of another format, or of none.
    """
    version = state.get("format") if isinstance(state, dict) else None
    if version not in (FORMAT_VERSION, EXTENDED_FORMAT_VERSION):
        raise CorruptFileError(
            f"the frame store has format {version!r}, this version reads {FORMAT_VERSION} and "
            f"{EXTENDED_FORMAT_VERSION}; load it with the version of rl-ext that wrote it"
        )
