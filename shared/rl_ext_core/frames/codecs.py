"""Codecs: how the frames of a block become bytes, and how a full block is sealed.

A codec names one of two coders, which the kernels run frame by frame, and may compress each block once it is full:

==============  ===========================================================  =======================
codec           frames of a block                                            full blocks
==============  ===========================================================  =======================
``raw``         as they are                                                  as they are
``lz4``         as they are                                                  compressed by LZ4
``patch``       what changed since the frame before (see ``_patch``)         as they are
``patch+lz4``   what changed since the frame before                          compressed by LZ4
``jpeg``        one frame a block, as it is                                  a JPEG image (``jpeg``)
==============  ===========================================================  =======================

All but ``jpeg`` are lossless, unless a store is told to keep to a bound (``max_error``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, missing_dependency
from rl_ext_core.frames._state import PATCH, RAW

if TYPE_CHECKING:
    from rl_ext_core.frames.layout import StackLayout

DEFAULT_QUALITY = 95  # of JPEG


class Codec(ABC):
    """How blocks of frames are stored. Instances hold no frames.

    :cvar name: what users and files call it.
    :cvar patches: whether frames are stored as patches, which needs numba, or as they are.
    :cvar seals: whether full blocks go through :meth:`seal`.
    :cvar lossy: whether :meth:`unseal` gives something else than :meth:`seal` was given. Blocks hold one frame then,
        and are sealed at once, so that what is read does not change later.
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
    """Frames as they are: what is saved is saved by sharing alone. Needs nothing but NumPy."""

    name = "raw"
    patches = False
    seals = False

    def check_available(self) -> None:
        """Nothing is needed."""

    def seal(self, block: memoryview) -> bytes | memoryview:
        """The block as it is, or compressed."""
        return block

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes | memoryview:
        """The block that was sealed."""
        return sealed


class PatchCodec(RawCodec):
    """What changed since the frame before; the first frame of a block against a shared reference frame."""

    name = "patch"
    patches = True

    def check_available(self) -> None:
        """Raises where numba or lz4 is needed and missing."""
        if importlib.util.find_spec("numba") is None:
            raise missing_dependency("numba", "frames", f"codec {self.name!r}")


class Lz4Codec(RawCodec):
    """Frames as they are, full blocks compressed by LZ4."""

    name = "lz4"
    seals = True

    def check_available(self) -> None:
        """Raises where numba or lz4 is needed and missing."""
        super().check_available()
        if importlib.util.find_spec("lz4") is None:
            raise missing_dependency("lz4", "frames", f"codec {self.name!r}")

    def c_decompressor(self) -> int:
        """``LZ4_decompress_safe`` as the package lz4 carries it."""
        return _lz4_decompress_safe()

    def seal(self, block: memoryview) -> bytes:
        """The block as it is, or compressed."""
        import lz4.block

        sealed: bytes = lz4.block.compress(block, mode="high_compression", compression=9, store_size=False)
        return sealed

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        """The block that was sealed."""
        import lz4.block

        block: bytes = lz4.block.decompress(sealed, uncompressed_size=n_bytes)
        return block


class PatchLz4Codec(Lz4Codec, PatchCodec):
    """Patches, full blocks compressed by LZ4: the smallest."""

    name = "patch+lz4"
    patches = True


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


for _codec in (RawCodec, Lz4Codec, PatchCodec, PatchLz4Codec):
    register_codec(_codec)
