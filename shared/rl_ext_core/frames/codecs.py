"""Codecs, and checks of their options.

- ``patch``: the change of each frame since the previous one, see ``log_patch``
- ``raw``: uncompressed frames
- ``jpeg``: each frame as a JPEG image, for natural images if memory matters more than speed

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
from rl_ext_core.frames.layout import StackLayout

CODECS = ("patch", "raw", "jpeg")
DEFAULT_QUALITY = 95

_COLORSPACES = {1: "GRAY", 3: "RGB"}
_LARGEST_MAX_ERROR = 127


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


def check_codec(codec: str, *, quality: int, max_error: int, dtype: npt.DTypeLike) -> int:
    """Check a codec and its options, and return ``max_error`` as an int.

    :param codec: One of ``CODECS``
    :param quality: JPEG quality of codec ``jpeg``, 1 to 100
    :param max_error: Largest error per byte of codec ``patch``
    :param dtype: Dtype of the frames
    :raises InvalidTypeError: If the codec is not a string, a number not an integer, or the frames not of dtype uint8
    :raises InvalidArgumentError: If there is no codec of that name, or an option does not fit it
    :raises MissingDependencyError: If the codec needs a package that is not installed. There is no fallback.
    """
    if not isinstance(codec, str):
        raise InvalidTypeError(f"codec must be a string, got {codec!r}; for example codec='patch'")
    if codec not in CODECS:
        raise InvalidArgumentError(f"codec={codec!r} is unknown; expected one of {', '.join(map(repr, CODECS))}")
    if codec == "jpeg":
        if importlib.util.find_spec("simplejpeg") is None:
            raise _missing_dependency_error("simplejpeg", "frames-jpeg", "codec 'jpeg'")
        if isinstance(quality, bool) or not isinstance(quality, (int, np.integer)):
            raise InvalidTypeError(f"quality={quality!r} must be an integer from 1 to 100; for example quality=95")
        if not 1 <= quality <= 100:
            raise InvalidArgumentError(f"quality={quality} must be from 1 to 100; for example quality=95")
    elif quality != DEFAULT_QUALITY:
        raise InvalidArgumentError(
            f"quality={quality} is for codec='jpeg' only; leave it out, or pass codec='jpeg' as well"
        )
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


class JpegCodec:
    """Encoder and decoder of frames as JPEG images.

    Frames must be ``uint8`` images with one channel (gray) or three (red, green, blue). Colors are not subsampled
    (4:4:4). Decoding a 100×100×3 frame takes about 50 µs, some twenty times as long as a patch.

    :param layout: Layout of the stacks that contain the frames
    :param quality: JPEG quality, 1 to 100
    :raises InvalidArgumentError: If the frames are not images of one or three channels
    :raises InvalidTypeError: If the frames are not of dtype uint8
    """

    def __init__(self, layout: StackLayout, quality: int) -> None:
        if layout.dtype != np.uint8:
            raise InvalidTypeError(
                f"codec='jpeg' stores images of dtype uint8, got {layout.dtype}; leave codec out, which is lossless"
            )
        shape = list(layout.shape)
        shape[layout.axis] //= layout.n_stack
        if len(shape) == 2 and layout.n_stack == 1:
            shape = [*shape, 1]
        if len(shape) != 3 or min(shape[0], shape[2]) not in _COLORSPACES:
            raise InvalidArgumentError(
                f"codec='jpeg' stores images of 1 or 3 channels, got frames of shape {tuple(shape)} "
                f"({layout.n_stack} in an observation of shape {layout.shape}); leave codec out, or pass the number "
                "of stacked frames, for example n_stack=3"
            )
        self._quality, self._shape = quality, tuple(shape)
        self._planar = shape[2] not in _COLORSPACES or shape[0] < shape[2]

    def encode(self, frame: npt.NDArray[np.uint8]) -> bytes:
        """Encode a frame, which is given as bytes, as a JPEG image."""
        import simplejpeg

        image: Any = frame.reshape(self._shape)
        if self._planar:
            image = np.ascontiguousarray(np.moveaxis(image, 0, -1))
        colorspace = _COLORSPACES[image.shape[2]]
        subsampling = "Gray" if colorspace == "GRAY" else "444"
        encoded: bytes = simplejpeg.encode_jpeg(image, self._quality, colorspace, subsampling)
        return encoded

    def decode(self, encoded: memoryview) -> bytes:
        """Decode a JPEG image to a frame.

        :raises ValueError: If the image is damaged
        """
        import simplejpeg

        channels = self._shape[0 if self._planar else 2]
        image = simplejpeg.decode_jpeg(encoded, _COLORSPACES[channels])
        frame: bytes = (np.moveaxis(image, -1, 0) if self._planar else image).tobytes()
        return frame
