"""Frames as JPEG images: for natural images where memory is tight and time is not. Never chosen by ``"auto"``."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, register_codec
from rl_ext_core.frames.layout import StackLayout

_COLORSPACES = {1: "GRAY", 3: "RGB"}


class JpegCodec(Codec):
    """Each frame as a JPEG image of its own. Lossy: pixels may be off by any amount, though few are by much.

    Frames are ``uint8`` images of one channel or three, which are taken for red, green and blue. Colours keep their
    resolution (4:4:4). Decoding takes about 50 µs for 100×100×3, some twenty times what a patch takes.

    :param quality: 1 to 100, as JPEG means it.
    :raises InvalidTypeError: if the quality is no whole number.
    :raises InvalidArgumentError: if it is another number.

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
            raise InvalidTypeError(f"quality={quality!r} must be a whole number from 1 to 100, for example quality=95")
        if not 1 <= quality <= 100:
            raise InvalidArgumentError(f"quality={quality} must be from 1 to 100, for example quality=95")
        self.quality = int(quality)
        self._shape: tuple[int, ...] = ()
        self._planar = False

    def __repr__(self) -> str:
        return f"JpegCodec(quality={self.quality}, lossy)"

    def with_quality(self, quality: int) -> JpegCodec:
        """The codec with another quality."""
        return JpegCodec(quality)

    @property
    def options(self) -> dict[str, int]:
        """The quality."""
        return {"quality": self.quality}

    def for_frames(self, layout: StackLayout) -> JpegCodec:
        """The codec for the frames of a layout.

        :raises InvalidArgumentError: if they are no images of one channel or three.
        :raises InvalidTypeError: if they are not of dtype uint8.
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
                f"({layout.n_stack} in an observation of shape {layout.shape}); use codec='auto', or say how many "
                "frames an observation stacks, for example n_stack=3"
            )
        codec = JpegCodec(self.quality)
        codec._shape, codec._planar = tuple(shape), shape[2] not in _COLORSPACES or shape[0] < shape[2]
        return codec

    def check_available(self) -> None:
        """Raises where simplejpeg is missing."""
        if importlib.util.find_spec("simplejpeg") is None:
            raise _missing_dependency_error("simplejpeg", "frames-jpeg", "codec 'jpeg'")

    def seal(self, block: memoryview) -> bytes:
        """The frame as a JPEG image."""
        import simplejpeg

        image: Any = np.frombuffer(block, dtype=np.uint8).reshape(self._shape)
        if self._planar:
            image = np.ascontiguousarray(np.moveaxis(image, 0, -1))
        colorspace = _COLORSPACES[image.shape[2]]
        subsampling = "Gray" if colorspace == "GRAY" else "444"
        sealed: bytes = simplejpeg.encode_jpeg(image, self.quality, colorspace, subsampling)
        return sealed

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        """The frame that the image shows."""
        import simplejpeg

        channels = self._shape[0 if self._planar else 2]
        image = simplejpeg.decode_jpeg(sealed, _COLORSPACES[channels])
        block: bytes = (np.moveaxis(image, -1, 0) if self._planar else image).tobytes()
        return block


register_codec(JpegCodec)
