"""JPEG codec, for natural images if memory matters more than speed.

``codec="auto"`` never chooses it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, register_codec
from rl_ext_core.frames.layout import StackLayout

_COLORSPACES = {1: "GRAY", 3: "RGB"}


class JpegCodec(Codec):
    """Lossy codec that stores each frame as a JPEG image, without an error bound.

    Frames must be ``uint8`` images with one channel (gray) or three (red, green, blue). Colors are not subsampled
    (4:4:4). Decoding a 100×100×3 frame takes about 50 µs, some twenty times as long as a patch.

    :param quality: JPEG quality, 1 to 100, default 95
    :raises InvalidTypeError: If the quality is not an integer
    :raises InvalidArgumentError: If the quality is out of range

    >>> from rl_ext_core.frames import JpegCodec
    >>> JpegCodec(quality=90).lossy
    True
    """

    name = "jpeg"
    patches = False
    seals = True
    lossy = True

    def __init__(self, quality: int = DEFAULT_QUALITY) -> None:
        if isinstance(quality, bool) or not isinstance(quality, (int, np.integer)):
            raise InvalidTypeError(f"quality={quality!r} must be an integer from 1 to 100; for example quality=95")
        if not 1 <= quality <= 100:
            raise InvalidArgumentError(f"quality={quality} must be from 1 to 100; for example quality=95")
        self.quality = int(quality)
        self._shape: tuple[int, ...] = ()
        self._planar = False

    def __repr__(self) -> str:
        return f"JpegCodec(quality={self.quality}, lossy)"

    def with_quality(self, quality: int) -> JpegCodec:
        """Return the codec with another quality."""
        return JpegCodec(quality)

    @property
    def options(self) -> dict[str, int]:
        """The quality, as a keyword argument of :func:`get_codec`."""
        return {"quality": self.quality}

    def for_frames(self, layout: StackLayout) -> JpegCodec:
        """Return a codec for the frames of a layout.

        :raises InvalidArgumentError: If they are not images of one or three channels
        :raises InvalidTypeError: If they are not of dtype uint8
        """
        if layout.dtype != np.uint8:
            raise InvalidTypeError(
                f"codec='jpeg' stores images of dtype uint8, got {layout.dtype}; use codec='auto', which is lossless"
            )
        shape = list(layout.shape)
        shape[layout.axis] //= layout.n_stack
        if len(shape) == 2 and layout.n_stack == 1:
            shape = [*shape, 1]
        if len(shape) != 3 or min(shape[0], shape[2]) not in _COLORSPACES:
            raise InvalidArgumentError(
                f"codec='jpeg' stores images of 1 or 3 channels, got frames of shape {tuple(shape)} "
                f"({layout.n_stack} in an observation of shape {layout.shape}); use codec='auto', or pass the number "
                "of stacked frames, for example n_stack=3"
            )
        codec = JpegCodec(self.quality)
        codec._shape, codec._planar = tuple(shape), shape[2] not in _COLORSPACES or shape[0] < shape[2]
        return codec

    def check_available(self) -> None:
        """Raise if simplejpeg is missing.

        :raises MissingDependencyError: If simplejpeg is not installed
        """
        if importlib.util.find_spec("simplejpeg") is None:
            raise _missing_dependency_error("simplejpeg", "frames-jpeg", "codec 'jpeg'")

    def seal(self, block: memoryview) -> bytes:
        """Encode the frame as a JPEG image."""
        import simplejpeg

        image: Any = np.frombuffer(block, dtype=np.uint8).reshape(self._shape)
        if self._planar:
            image = np.ascontiguousarray(np.moveaxis(image, 0, -1))
        colorspace = _COLORSPACES[image.shape[2]]
        subsampling = "Gray" if colorspace == "GRAY" else "444"
        sealed: bytes = simplejpeg.encode_jpeg(image, self.quality, colorspace, subsampling)
        return sealed

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        """Decode the JPEG image."""
        import simplejpeg

        channels = self._shape[0 if self._planar else 2]
        image = simplejpeg.decode_jpeg(sealed, _COLORSPACES[channels])
        block: bytes = (np.moveaxis(image, -1, 0) if self._planar else image).tobytes()
        return block


register_codec(JpegCodec)
