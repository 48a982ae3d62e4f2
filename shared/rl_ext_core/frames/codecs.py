"""Codecs, which encode the frames of a block and compress full blocks.

A codec selects one of two coders, which the kernels run frame by frame. It may compress each block once it is full:

- ``raw``: uncompressed frames
- ``patch``: the change since the previous frame (see ``patch``)
- ``patch+lz4``: the same, with full blocks compressed by LZ4
- ``jpeg``: blocks of one frame, each compressed to a JPEG image (see ``jpeg``)

All except ``jpeg`` are lossless, unless a store has an error bound (``max_error``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _missing_dependency_error
from rl_ext_core.frames.geometry import PATCH, RAW, SEALED_HEADER, Bytes
from rl_ext_core.frames.layout import StackLayout

DEFAULT_QUALITY = 95  # JPEG quality
_LARGEST_MAX_ERROR = 127
_DEFAULT_BLOCK_LENGTH = 16


class Codec(ABC):
    """Base class of codecs. Instances do not contain frames.

    :cvar name: Name in arguments and files
    :cvar patches: Whether frames are stored as patches instead of uncompressed
    :cvar seals: Whether full blocks are compressed by :meth:`seal`
    :cvar lossy: Whether :meth:`unseal` returns other bytes than :meth:`seal` was given. A block of a lossy codec has
        one frame and is sealed at once, so that reads never change later.

    >>> from rl_ext_core.frames import get_codec
    >>> codec = get_codec("patch")
    >>> codec.name, codec.lossy
    ('patch', False)
    """

    name: ClassVar[str]
    patches: ClassVar[bool]
    seals: ClassVar[bool]
    lossy: ClassVar[bool] = False

    def with_quality(self, quality: int) -> Codec:
        """Return the codec with another quality; only lossy codecs have one.

        :param quality: As for :class:`JpegCodec`
        :raises InvalidArgumentError: If the codec has no quality setting
        """
        raise InvalidArgumentError(
            f"quality={quality} is for codec='jpeg' only; leave it out, or pass codec='jpeg' as well"
        )

    @property
    def options(self) -> dict[str, int]:
        """Settings of the codec, as keyword arguments of :func:`get_codec`."""
        return {}

    def fits(self, layout: StackLayout) -> bool:
        """Return whether the codec can store the frames of a layout."""
        try:
            self.for_frames(layout)
        except (InvalidArgumentError, InvalidTypeError):
            return False
        return True

    def for_frames(self, layout: StackLayout) -> Codec:
        """Return the codec for the frames of a layout; most codecs return themselves.

        :raises InvalidArgumentError: If the codec cannot store such frames
        :raises InvalidTypeError: If the codec cannot store frames of that dtype
        """
        return self

    @property
    def coder(self) -> int:
        """The kernels' number of the coder: ``PATCH`` or ``RAW``."""
        return PATCH if self.patches else RAW

    @abstractmethod
    def check_available(self) -> None:
        """Raise if a required package is missing.

        :raises MissingDependencyError: If a package that the codec needs is not installed
        """

    def c_decompressor(self) -> int:
        """Return the address of a C function that decompresses blocks; 0 if there is none.

        Its signature is ``int f(const char *source, char *target, int source_bytes, int target_bytes)``. It must be
        thread-safe, and return the bytes written, or a negative number for damaged input. It must open all blocks that
        :meth:`unseal` opens.
        """
        return 0

    @abstractmethod
    def seal(self, block: memoryview) -> bytes | memoryview:
        """Compress a full block."""

    @abstractmethod
    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes | memoryview:
        """Decompress a block.

        :param sealed: Bytes that :meth:`seal` returned
        :param n_bytes: Size of the uncompressed block
        :return: The block that :meth:`seal` was given
        """


class RawCodec(Codec):
    """Codec that does not compress. Stores save memory only by sharing frames between stacks."""

    name = "raw"
    patches = False
    seals = False

    def check_available(self) -> None:
        """Do nothing, because no package is needed."""

    def seal(self, block: memoryview) -> bytes | memoryview:
        """Return the block unchanged."""
        return block

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes | memoryview:
        """Return the block unchanged."""
        return sealed


class PatchCodec(RawCodec):
    """Codec that stores the bytes that differ from the previous frame.

    The first frame of a block is compared with a reference frame that many blocks share.
    """

    name = "patch"
    patches = True


class PatchLz4Codec(Codec):
    """Codec that stores patches and compresses full blocks by LZ4, for the smallest size."""

    name = "patch+lz4"
    patches = True
    seals = True

    def check_available(self) -> None:
        """Raise if lz4 is missing.

        :raises MissingDependencyError: If lz4 is not installed
        """
        if importlib.util.find_spec("lz4") is None:
            raise _missing_dependency_error("lz4", "frames", f"codec {self.name!r}")

    def c_decompressor(self) -> int:
        """Return the address of ``LZ4_decompress_safe`` in lz4; 0 if it is hidden there."""
        return _lz4_decompress_safe()

    def seal(self, block: memoryview) -> bytes:
        """Compress the block."""
        import lz4.block

        sealed: bytes = lz4.block.compress(block, mode="high_compression", compression=9, store_size=False)
        return sealed

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        """Decompress the block."""
        import lz4.block

        block: bytes = lz4.block.decompress(sealed, uncompressed_size=n_bytes)
        return block


def check_numba(purpose: str) -> None:
    """Raise if numba cannot compile the kernels, which all codecs need.

    :param purpose: Subject of the error text, such as ``"FrameStore"``
    :raises MissingDependencyError: If numba is not installed
    :raises InvalidArgumentError: If ``NUMBA_DISABLE_JIT`` is set
    """
    if (given := os.environ.get("NUMBA_DISABLE_JIT", "0")) not in ("", "0"):
        raise InvalidArgumentError(
            f"{purpose} needs numba's compiler, which NUMBA_DISABLE_JIT={given!r} turns off; write "
            "del os.environ['NUMBA_DISABLE_JIT'] before the first import of numba"
        )
    if importlib.util.find_spec("numba") is None:
        raise _missing_dependency_error("numba", "frames", purpose)


@functools.cache
def _lz4_decompress_safe() -> int:
    """Return the address of the C function in lz4 that decompresses; 0 if it is hidden there."""
    import lz4.block._block as extension

    try:
        function = ctypes.CDLL(extension.__file__).LZ4_decompress_safe
    except (OSError, AttributeError):
        # lz4 was built against the system's liblz4, or hides its symbols. Blocks are opened from Python then.
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_REGISTRY: dict[str, Callable[[], Codec]] = {}


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Register a codec under its name. It works as a class decorator.

    :return: The same class
    :raises InvalidArgumentError: If another codec has that name
    """
    if _REGISTRY.get(codec.name, codec) is not codec:
        raise InvalidArgumentError(f"name={codec.name!r} is already registered by another codec; choose another name")
    _REGISTRY[codec.name] = codec
    return codec


def codec_names() -> list[str]:
    """Return the names of all registered codecs, sorted."""
    return sorted(_REGISTRY)


def get_codec(name: str, *, quality: int = DEFAULT_QUALITY) -> Codec:
    """Create the codec of a name.

    :param name: One of :func:`codec_names`
    :param quality: JPEG quality of codec ``jpeg``, 1 to 100
    :raises InvalidTypeError: If the name is not a string
    :raises InvalidArgumentError: If there is no codec of that name, or the quality does not fit it
    :raises MissingDependencyError: If the codec needs a package that is not installed. There is no fallback.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(f"codec must be a string, got {name!r}; for example codec='auto'")
    if name not in _REGISTRY:
        raise InvalidArgumentError(f"codec={name!r} is unknown; known: 'auto', {', '.join(map(repr, codec_names()))}")
    codec = _REGISTRY[name]()
    codec.check_available()
    return codec if quality == DEFAULT_QUALITY else codec.with_quality(quality)


for _codec in (RawCodec, PatchCodec, PatchLz4Codec):
    register_codec(_codec)


def seal_block(codec: Codec, contents: Bytes) -> Bytes:
    """Compress a full block for storage, with a header of two sizes.

    The contents stay uncompressed if the codec does not make them smaller.
    """
    smaller = np.frombuffer(codec.seal(contents.data), dtype=np.uint8)
    if len(smaller) >= len(contents):
        smaller = contents
    sizes = np.array([len(smaller), len(contents)], dtype="<u4").view(np.uint8)
    return np.concatenate([sizes, smaller])


def open_block(codec: Codec, stored: memoryview) -> bytes | memoryview:
    """Return the uncompressed contents of a block that :func:`seal_block` returned."""
    n_sealed, n_bytes = np.frombuffer(stored[:SEALED_HEADER], dtype="<u4").tolist()
    contents = stored[SEALED_HEADER:]
    return contents if n_sealed == n_bytes else codec.unseal(contents, n_bytes)


def validate_max_error(max_error: int, *, codec: Codec, dtype: npt.DTypeLike) -> int:
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
    if not codec.patches:
        raise InvalidArgumentError(
            f"max_error={max_error} has no effect on codec={codec.name!r}, which does not store patches; use "
            "codec='patch', 'patch+lz4' or 'auto', or leave max_error out"
        )
    return int(max_error)


def resolve_block_length(block_length: int | None, codec: Codec, *, most: int | None = None) -> int:
    """Check the number of frames per block, or return the codec's default.

    :param block_length: Frames per block, or None for the default
    :param most: Largest block length; None if it is not known yet
    :raises InvalidArgumentError: If it is not a power of two up to ``most``, or the codec needs blocks of one frame
    """
    if block_length is None:
        return 1 if codec.lossy else _DEFAULT_BLOCK_LENGTH
    if codec.lossy and block_length != 1:
        raise InvalidArgumentError(
            f"block_length={block_length} cannot be used with codec={codec.name!r}, which has one frame per block; "
            "leave block_length out"
        )
    if most is not None and (not 1 <= block_length <= most or block_length & (block_length - 1)):
        raise InvalidArgumentError(
            f"block_length={block_length} is not a power of two from 1 to {most}; for example block_length=16"
        )
    return block_length


def describe_lossiness(options: Mapping[str, Any]) -> str:
    """Return "lossless", or "lossy" with the lossy options, for a store's ``repr``."""
    lossy = [f"{name}={options[name]}" for name in ("max_error", "quality") if options.get(name)]
    return f"lossy: {', '.join(lossy)}" if lossy else "lossless"


@dataclass(frozen=True)
class LossyOptions:
    """Lossy settings that an adaptive store switches to once it has chosen a layout.

    :param options: Lossy options of :class:`FrameStore`; empty for a lossless store
    :param layouts: Layouts that these options allow, those of the smallest frames first
    :param codec_is_lossy: Whether the codec itself is lossy, as JPEG is
    """

    options: dict[str, int]
    layouts: tuple[StackLayout, ...]
    codec_is_lossy: bool

    @classmethod
    def from_options(
        cls,
        codec: str,
        layouts: Sequence[StackLayout],
        *,
        max_error: int,
        quality: int,
        block_length: int | None,
    ) -> LossyOptions:
        """Check the options of a store, and extract the lossy ones.

        :param codec: Name of a codec, or ``"auto"``
        :param layouts: Possible layouts of an observation
        :raises InvalidArgumentError: If options exclude each other, or do not fit any of the layouts
        :raises InvalidTypeError: If an option or the observations have the wrong type
        """
        chosen = PatchCodec() if codec == "auto" else get_codec(codec)
        if quality != DEFAULT_QUALITY:
            chosen = chosen.with_quality(quality)
        bound = validate_max_error(max_error, codec=chosen, dtype=layouts[0].dtype)
        if not chosen.lossy:
            return cls({"max_error": bound} if bound else {}, tuple(layouts), codec_is_lossy=False)
        resolve_block_length(block_length, chosen)
        fitting = tuple(layout for layout in layouts if chosen.fits(layout))
        if not fitting:
            chosen.for_frames(layouts[-1])
        return cls(chosen.options, fitting, codec_is_lossy=True)

    def matching_layout(self, layout: StackLayout) -> StackLayout:
        """Return the layout if it is allowed, else the allowed one with the largest frames."""
        return layout if layout in self.layouts else self.layouts[-1]
