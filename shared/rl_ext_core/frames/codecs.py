"""Codecs, and checks of their options.

- ``patch``: the change of each frame since the previous one (see ``patch``)
- ``raw``: uncompressed frames
- ``jpeg``: each frame as a JPEG image (see ``jpeg``)

All except ``jpeg`` are lossless, unless a store has an error bound (``max_error``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.jpeg import DEFAULT_QUALITY, check_simplejpeg, validate_quality

CODECS = ("patch", "raw", "jpeg")

_LARGEST_MAX_ERROR = 127
_BLOCK_FRAMES, _BLOCK_LARGE_FRAMES = 16, 8


def check_numba(purpose: str) -> None:
    """Raise if numba cannot compile the kernels, which all codecs need.

    :param purpose: Subject of the error text, such as ``"FrameStore"``
    :raises MissingDependencyError: If numba is not installed
    :raises InvalidArgumentError: If ``NUMBA_DISABLE_JIT`` is set
    """
    if (given := os.environ.get("NUMBA_DISABLE_JIT", "0")) not in ("", "0"):
        raise InvalidArgumentError(
            f"{purpose} needs numba's compiler, which NUMBA_DISABLE_JIT={given!r} turns off; use "
            "del os.environ['NUMBA_DISABLE_JIT'] before the first import of numba"
        )
    if importlib.util.find_spec("numba") is None:
        raise _missing_dependency_error("numba", "frames", purpose)


def check_codec(codec: str, *, quality: int = DEFAULT_QUALITY) -> None:
    """Raise unless the codec exists, its package is installed, and it has that quality.

    :param codec: One of ``CODECS``
    :param quality: JPEG quality of codec ``jpeg``, 1 to 100
    :raises InvalidTypeError: If the codec is not a string, or the quality is not an integer
    :raises InvalidArgumentError: If there is no codec of that name, or the quality does not fit it
    :raises MissingDependencyError: If the codec needs a package that is not installed. There is no fallback.
    """
    if not isinstance(codec, str):
        raise InvalidTypeError(f"codec must be a string, got {codec!r}; for example codec='patch'")
    if codec not in CODECS:
        raise InvalidArgumentError(f"codec={codec!r} is unknown; expected one of {', '.join(map(repr, CODECS))}")
    if codec == "jpeg":
        check_simplejpeg()
        validate_quality(quality)
    elif quality != DEFAULT_QUALITY:
        raise InvalidArgumentError(
            f"quality={quality} is for codec='jpeg' only; leave it out, or pass codec='jpeg' as well"
        )


def validate_max_error(max_error: int, *, codec: str, dtype: npt.DTypeLike) -> int:
    """Check ``max_error`` and return it as an int.

    :raises InvalidTypeError: If it is not an integer, or the frames are not of dtype uint8
    :raises InvalidArgumentError: If it is out of range, or the codec does not use it
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, np.integer)):
        raise InvalidTypeError(f"max_error={max_error!r} must be an integer; for example max_error=4")
    if not 0 <= max_error <= _LARGEST_MAX_ERROR:
        raise InvalidArgumentError(
            f"max_error={max_error} must be from 0 (bit-exact) to {_LARGEST_MAX_ERROR}; for example max_error=4"
        )
    if max_error == 0:
        return 0
    if np.dtype(dtype) != np.uint8:
        raise InvalidTypeError(
            f"max_error={max_error} is for frames of dtype uint8, got {np.dtype(dtype)}; leave max_error out, or scale "
            "the observations to uint8"
        )
    if codec != "patch":
        raise InvalidArgumentError(
            f"max_error={max_error} has no effect on codec={codec!r}, which does not store patches; leave one of them "
            "out"
        )
    return int(max_error)


def describe_lossiness(options: Mapping[str, Any]) -> str:
    """Return "lossless", or "lossy" with the lossy options, for a store's ``repr``."""
    lossy = [f"{name}={options[name]}" for name in ("max_error", "quality") if options.get(name)]
    return f"lossy: {', '.join(lossy)}" if lossy else "lossless"
