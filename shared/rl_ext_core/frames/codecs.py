"""Codecs: how the frames of a block become bytes, how a full block is sealed, and what of a frame may be lost.

A codec names one of two coders, which the kernels run frame by frame, and may compress each block once it is full:

==============  ===========================================================  =======================
codec           frames of a block                                            full blocks
==============  ===========================================================  =======================
``raw``         as they are                                                  as they are
``patch``       what changed since the frame before (see ``patch``)          as they are
``patch+lz4``   what changed since the frame before                          compressed by LZ4
``jpeg``        one frame a block, as it is                                  a JPEG image (``jpeg``)
==============  ===========================================================  =======================

All but ``jpeg`` are lossless, unless a store is told to keep to a bound (``max_error``).
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

DEFAULT_QUALITY = 95  # of JPEG
_LARGEST_MAX_ERROR = 127
_DEFAULT_BLOCK_LENGTH = 16


class Codec(ABC):
    """How blocks of frames are stored. Instances hold no frames.

    :cvar name: what users and files call it.
    :cvar patches: whether frames are stored as patches, or as they are.
    :cvar seals: whether full blocks go through :meth:`seal`.
    :cvar lossy: whether :meth:`unseal` gives something else than :meth:`seal` was given. Blocks hold one frame then,
        and are sealed at once, so that what is read does not change later.

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
        """The codec with another quality.

        :raises InvalidArgumentError: if it has none.
        """
        raise InvalidArgumentError(
            f"quality={quality} is for codec='jpeg' only; leave it out, or pass codec='jpeg' as well"
        )

    @property
    def options(self) -> dict[str, int]:
        """What the codec was told, as options of :func:`get_codec`."""
        return {}

    def fits(self, layout: StackLayout) -> bool:
        """Whether it can store the frames of a layout."""
        try:
            self.for_frames(layout)
        except (InvalidArgumentError, InvalidTypeError):
            return False
        return True

    def for_frames(self, layout: StackLayout) -> Codec:
        """The codec for the frames of a layout; most do not depend on it.

        :raises InvalidArgumentError: if the codec cannot store such frames.
        :raises InvalidTypeError: likewise, because of their dtype.
        """
        return self

    @property
    def coder(self) -> int:
        """How the frames of a block are laid out, in the kernels' terms."""
        return PATCH if self.patches else RAW

    @abstractmethod
    def check_available(self) -> None:
        """Raises ``MissingDependencyError`` if a package that the codec needs is not installed."""

    def c_decompressor(self) -> int:
        """Address of a C function that opens sealed blocks without Python, or 0 where there is none.

        It is ``int f(const char *source, char *target, int source_bytes, int target_bytes)``, thread-safe, and returns
        the bytes written, or a negative number for damaged input. Opens the same blocks as :meth:`unseal`.
        """
        return 0

    @abstractmethod
    def seal(self, block: memoryview) -> bytes | memoryview:
        """Compresses a full block."""

    @abstractmethod
    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes | memoryview:
        """The block that :meth:`seal` was given.

        :param n_bytes: size of that block.
        """


class RawCodec(Codec):
    """Frames as they are: what is saved is saved by sharing alone."""

    name = "raw"
    patches = False
    seals = False

    def check_available(self) -> None:
        """Nothing is needed."""

    def seal(self, block: memoryview) -> bytes | memoryview:
        """The block as it is."""
        return block

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes | memoryview:
        """The block that was sealed."""
        return sealed


class PatchCodec(RawCodec):
    """What changed since the frame before; the first frame of a block against a shared reference frame."""

    name = "patch"
    patches = True


class PatchLz4Codec(Codec):
    """Patches, full blocks compressed by LZ4: the smallest."""

    name = "patch+lz4"
    patches = True
    seals = True

    def check_available(self) -> None:
        """Raises where lz4 is missing."""
        if importlib.util.find_spec("lz4") is None:
            raise _missing_dependency_error("lz4", "frames", f"codec {self.name!r}")

    def c_decompressor(self) -> int:
        """``LZ4_decompress_safe`` as the package lz4 carries it."""
        return _lz4_decompress_safe()

    def seal(self, block: memoryview) -> bytes:
        """The block, compressed."""
        import lz4.block

        sealed: bytes = lz4.block.compress(block, mode="high_compression", compression=9, store_size=False)
        return sealed

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        """The block that was sealed."""
        import lz4.block

        block: bytes = lz4.block.decompress(sealed, uncompressed_size=n_bytes)
        return block


def check_numba(purpose: str) -> None:
    """Makes sure that frames can be encoded and decoded, whatever the codec.

    :param purpose: what needs that.
    :raises MissingDependencyError: if numba is not installed.
    :raises InvalidArgumentError: if it is told not to compile.
    """
    if (given := os.environ.get("NUMBA_DISABLE_JIT", "0")) not in ("", "0"):
        raise InvalidArgumentError(
            f"{purpose} needs numba to compile, and NUMBA_DISABLE_JIT={given!r} keeps it from that; write "
            "del os.environ['NUMBA_DISABLE_JIT'] before the first import of numba"
        )
    if importlib.util.find_spec("numba") is None:
        raise _missing_dependency_error("numba", "frames", purpose)


@functools.cache
def _lz4_decompress_safe() -> int:
    import lz4.block._block as extension

    try:
        function = ctypes.CDLL(extension.__file__).LZ4_decompress_safe
    except (OSError, AttributeError):
        return 0  # built against a system's liblz4, or with hidden symbols: blocks are opened from Python
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_REGISTRY: dict[str, Callable[[], Codec]] = {}


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Makes a codec known under its name. Usable as a class decorator.

    :raises InvalidArgumentError: if another codec has that name.
    """
    if _REGISTRY.get(codec.name, codec) is not codec:
        raise InvalidArgumentError(f"a codec named {codec.name!r} is registered already; choose another name")
    _REGISTRY[codec.name] = codec
    return codec


def codec_names() -> list[str]:
    """The names of all registered codecs."""
    return sorted(_REGISTRY)


def get_codec(name: str, *, quality: int = DEFAULT_QUALITY) -> Codec:
    """The codec of that name.

    :param quality: of the images that ``jpeg`` makes, 1 to 100.
    :raises InvalidTypeError: if the name is not a string.
    :raises InvalidArgumentError: if no codec has that name.
    :raises MissingDependencyError: if it needs a package that is not installed; no other codec takes its place.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(f"codec must be a name, got {name!r}; for example codec='auto'")
    if name not in _REGISTRY:
        raise InvalidArgumentError(f"unknown codec {name!r}; known: 'auto', {', '.join(map(repr, codec_names()))}")
    codec = _REGISTRY[name]()
    codec.check_available()
    return codec if quality == DEFAULT_QUALITY else codec.with_quality(quality)


for _codec in (RawCodec, PatchCodec, PatchLz4Codec):
    register_codec(_codec)


def seal_block(codec: Codec, contents: Bytes) -> Bytes:
    """A full block as it is stored: two sizes, and what the codec has made of it; as it was, where that is longer."""
    smaller = np.frombuffer(codec.seal(contents.data), dtype=np.uint8)
    if len(smaller) >= len(contents):
        smaller = contents
    sizes = np.array([len(smaller), len(contents)], dtype="<u4").view(np.uint8)
    return np.concatenate([sizes, smaller])


def open_block(codec: Codec, stored: memoryview) -> bytes | memoryview:
    """The contents of a block."""
    n_sealed, n_bytes = np.frombuffer(stored[:SEALED_HEADER], dtype="<u4").tolist()
    contents = stored[SEALED_HEADER:]
    return contents if n_sealed == n_bytes else codec.unseal(contents, n_bytes)


def validate_max_error(max_error: int, *, codec: Codec, dtype: npt.DTypeLike) -> int:
    """``max_error`` as a plain number.

    :raises InvalidTypeError: if it is no whole number, or the frames are not of dtype uint8.
    :raises InvalidArgumentError: if it is out of range, or the codec has no use for it.
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, np.integer)):
        raise InvalidTypeError(f"max_error={max_error!r} must be a whole number, for example max_error=4")
    if not 0 <= max_error <= _LARGEST_MAX_ERROR:
        raise InvalidArgumentError(
            f"max_error={max_error} must be from 0, which is bit-exact, to {_LARGEST_MAX_ERROR}; for example max_error=4"
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
            f"max_error={max_error} has no effect on codec={codec.name!r}, which stores no patches; use codec='patch', "
            "'patch+lz4' or 'auto', or leave max_error out"
        )
    return int(max_error)


def resolve_block_length(block_length: int | None, codec: Codec, *, most: int | None = None) -> int:
    """Frames in a block, where nothing is said the codec's usual number.

    :param most: that a block may hold, where there are frames already.
    :raises InvalidArgumentError: if it cannot be used, or the codec cannot have blocks of that many.
    """
    if block_length is None:
        return 1 if codec.lossy else _DEFAULT_BLOCK_LENGTH
    if codec.lossy and block_length != 1:
        raise InvalidArgumentError(
            f"block_length={block_length} is not for codec={codec.name!r}, whose frames are read one by one; leave "
            "block_length out"
        )
    if most is not None and (not 1 <= block_length <= most or block_length & (block_length - 1)):
        raise InvalidArgumentError(
            f"block_length={block_length} is not a power of two from 1 to {most}; for example 16"
        )
    return block_length


def describe_lossiness(options: Mapping[str, Any]) -> str:
    """What ``repr`` says of the options of a store."""
    lossy = [f"{name}={options[name]}" for name in ("max_error", "quality") if options.get(name)]
    return f"lossy: {', '.join(lossy)}" if lossy else "lossless"


@dataclass(frozen=True)
class LossyOptions:
    """What an adaptive store may lose, once it is no longer exact.

    :param options: of :class:`FrameStore`; empty where nothing may be lost.
    :param layouts: those that are possible then, the finest frames first.
    :param codec_is_lossy: whether it is the codec that loses.
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
        """What the options of a store ask for.

        :param codec: name of a codec, or ``"auto"``.
        :param layouts: how an observation may be stacked.
        :raises InvalidArgumentError: if the options exclude each other, or fit none of the layouts.
        :raises InvalidTypeError: likewise, because of a type.
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
        """The layout, or where it is not possible the one with the largest frames; stacks are taken apart then."""
        return layout if layout in self.layouts else self.layouts[-1]
