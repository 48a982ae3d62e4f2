"""JPEG images of frames, for natural images if memory matters more than speed."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.layout import StackLayout

DEFAULT_QUALITY = 95
_COLORSPACES = {1: "GRAY", 3: "RGB"}


def validate_quality(quality: int) -> int:
    """Check a JPEG quality and return it as an int.

    :raises InvalidTypeError: If it is not an integer
    :raises InvalidArgumentError: If it is out of range
    """
    if isinstance(quality, bool) or not isinstance(quality, (int, np.integer)):
        raise InvalidTypeError(f"quality={quality!r} must be an integer from 1 to 100; for example quality=95")
    if not 1 <= quality <= 100:
        raise InvalidArgumentError(f"quality={quality} must be from 1 to 100; for example quality=95")
    return int(quality)


def check_simplejpeg() -> None:
    """Raise if simplejpeg is missing.

    :raises MissingDependencyError: If simplejpeg is not installed
    """
    if importlib.util.find_spec("simplejpeg") is None:
        raise _missing_dependency_error("simplejpeg", "frames-jpeg", "codec 'jpeg'")


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

    def encode(self, frame: memoryview) -> bytes:
        """Encode a frame as a JPEG image."""
        import simplejpeg

        image: Any = np.frombuffer(frame, dtype=np.uint8).reshape(self._shape)
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
