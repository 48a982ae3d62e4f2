"""Encodings of frames: the options that a user sets, and the layout that is detected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.codecs import check_codec, validate_max_error
from rl_ext_core.frames.jpeg import DEFAULT_QUALITY, JpegCodec
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout

LAST_CHECK = 4096  # transitions per environment after which the layout is not detected any more
LOSSY_AFTER = 64  # transitions per environment after which a detected layout is final, so that frames may be lossy
COPY_BATCH = 64  # transitions per environment, or stacks, that are copied at a time
_SMALL_FRAME = 512  # bytes; for smaller frames, the rows of a block take more than patches save


class Encoding(NamedTuple):
    """Encoding of frames. Its fields are options of :class:`FrameStore` and :class:`FramePool`.

    :ivar layout: How a stack is made of frames.
    :ivar codec: Name of the codec.
    :ivar max_error: Maximum error per byte.
    :ivar quality: JPEG quality, 1 to 100.
    """

    layout: StackLayout
    codec: str
    max_error: int = 0
    quality: int = DEFAULT_QUALITY

    @property
    def lossy(self) -> bool:
        """Whether decoded frames may differ from the stored ones."""
        return self.max_error > 0 or self.codec == "jpeg"


@dataclass(frozen=True)
class EncodingOptions:
    """Options of a store that may still have to detect its layout.

    :param codec: Name of the codec.
    :param n_stack: Frames per stack, or None to detect it.
    :param max_error: Maximum error per byte.
    :param quality: JPEG quality, 1 to 100.
    :param layouts: Possible layouts that the codec can store, those of the smallest frames first.
    """

    codec: str
    n_stack: int | None
    max_error: int
    quality: int
    layouts: tuple[StackLayout, ...]

    @classmethod
    def check(
        cls,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str = "patch",
        n_stack: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
    ) -> EncodingOptions:
        """Check the options of a store for observations of a shape.

        :raises InvalidArgumentError: If options exclude each other, or do not fit the observations.
        :raises InvalidTypeError: If an option or the dtype has the wrong type.
        :raises MissingDependencyError: If the codec needs a package that is not installed.
        """
        check_codec(codec, quality=quality)
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        bound = validate_max_error(max_error, codec=codec, dtype=layouts[0].dtype)
        if codec == "jpeg" and not (layouts := [layout for layout in layouts if _is_image(layout)]):
            JpegCodec(list(candidate_layouts(shape, dtype, n_stack=n_stack))[-1], quality)  # raises
        return cls(codec, n_stack, bound, quality, tuple(layouts))

    @property
    def lossy(self) -> dict[str, int]:
        """Options that make the encoding lossy; empty if it is lossless."""
        if self.codec == "jpeg":
            return {"quality": self.quality}
        return {"max_error": self.max_error} if self.max_error else {}

    @property
    def requested(self) -> dict[str, Any]:
        """Options as plain values."""
        return {"codec": self.codec, "n_stack": self.n_stack, **self.lossy}

    def encoding(self, layout: StackLayout | None = None, *, exact: bool = False) -> Encoding:
        """Return the encoding for a layout.

        :param layout: The layout. Without one, or if the codec cannot store it, it is that of the largest frames.
        :param exact: Whether the encoding must be lossless, because the frames will be encoded again.
        """
        if exact and self.lossy:
            return Encoding(layout or replace(self.layouts[-1], n_stack=1, axis=0), "patch")
        if layout not in self.layouts:
            layout = self.layouts[-1]
        small = self.codec == "patch" and layout.frame_bytes < _SMALL_FRAME and not self.max_error
        return Encoding(layout, "raw" if small else self.codec, self.max_error, self.quality)


def _is_image(layout: StackLayout) -> bool:
    """Return whether JPEG images can store the frames of a layout."""
    try:
        JpegCodec(layout, DEFAULT_QUALITY)
    except (InvalidArgumentError, InvalidTypeError):
        return False
    return True


def detect_layout(layout: StackLayout, stacks: npt.NDArray[Any], nexts: npt.NDArray[Any] | None) -> StackLayout | None:
    """Detect the layout of stacks from successive ones.

    :param layout: Any layout of the stacks.
    :param stacks: Stacks of shape ``(n, *layout.shape)``.
    :param nexts: Next stacks of the same shape, or None if ``stacks`` contains them.
    :return: The layout, or None if the stacks do not change.
    """
    shape, dtype = layout.shape, layout.dtype
    stacks = stacks[:COPY_BATCH]
    if nexts is not None:
        return find_layout(shape, dtype, stacks, nexts[:COPY_BATCH])
    unstacked = None
    for distance in range(1, len(stacks) // 2 + 1):  # the next stack comes later if environments take turns
        found = find_layout(shape, dtype, stacks[:-distance], stacks[distance:])
        if found is not None and found.n_stack > 1:
            return found
        unstacked = unstacked or found
    return unstacked
