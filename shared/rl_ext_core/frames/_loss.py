"""How far what comes out may differ from what went in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, PatchCodec, get_codec
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.layout import StackLayout

_MOST = 127
_USUAL_BLOCK = 16


def checked_bound(max_error: int, *, codec: Codec, dtype: npt.DTypeLike) -> int:
    """``max_error`` as a plain number.

    :raises InvalidTypeError: if it is no whole number, or the frames are not of dtype uint8.
    :raises InvalidArgumentError: if it is out of range, or the codec has no use for it.
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, np.integer)):
        raise InvalidTypeError(f"max_error={max_error!r} must be a whole number, for example max_error=4")
    if not 0 <= max_error <= _MOST:
        raise InvalidArgumentError(
            f"max_error={max_error} must be from 0, which is bit-exact, to {_MOST}; for example max_error=4"
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


def checked_block_length(block_length: int | None, codec: Codec) -> int:
    """Frames in a block, where nothing is said the codec's usual number.

    :raises InvalidArgumentError: if the codec cannot have blocks of that many.
    """
    if block_length is None:
        return 1 if codec.lossy else _USUAL_BLOCK
    if codec.lossy and block_length != 1:
        raise InvalidArgumentError(
            f"block_length={block_length} is not for codec={codec.name!r}, whose frames are read one by one; leave "
            "block_length out"
        )
    return block_length


def loss_in_words(max_error: int, codec: Codec) -> str:
    """What ``repr`` says of it."""
    if codec.lossy:
        return f"{codec!r}"
    return f"lossy: every pixel within {max_error}" if max_error else "lossless"


def options_in_words(options: Mapping[str, Any]) -> str:
    """The same, of what was asked for."""
    lossy = [f"{name}={options[name]}" for name in ("max_error", "quality") if options.get(name)]
    return f"lossy: {', '.join(lossy)}" if lossy else "lossless"


@dataclass(frozen=True)
class Loss:
    """What an adaptive store may lose, once it is no longer exact.

    :param options: of :class:`FrameStore`; empty where nothing may be lost.
    :param layouts: those that are possible then, the finest frames first.
    :param is_codec: whether it is the codec that loses.
    """

    options: dict[str, int]
    layouts: tuple[StackLayout, ...]
    is_codec: bool

    @classmethod
    def asked_for(
        cls,
        codec: str,
        layouts: Sequence[StackLayout],
        *,
        max_error: int,
        quality: int,
        block_length: int | None,
    ) -> Loss:
        """What the options of a store ask for.

        :param codec: name of a codec, or ``"auto"``.
        :param layouts: how an observation may be stacked.
        :raises InvalidArgumentError: if the options exclude each other, or fit none of the layouts.
        :raises InvalidTypeError: likewise, because of a type.
        """
        chosen = PatchCodec() if codec == "auto" else get_codec(codec)
        if quality != DEFAULT_QUALITY:
            chosen = chosen.with_quality(quality)
        bound = checked_bound(max_error, codec=chosen, dtype=layouts[0].dtype)
        if not isinstance(chosen, JpegCodec):
            return cls({"max_error": bound} if bound else {}, tuple(layouts), is_codec=False)
        checked_block_length(block_length, chosen)
        fitting = tuple(layout for layout in layouts if chosen.fits(layout))
        if not fitting:
            chosen.for_frames(layouts[-1])
        return cls({"quality": chosen.quality}, fitting, is_codec=True)

    def layout_like(self, layout: StackLayout) -> StackLayout:
        """The layout, or where it is not possible the one with the largest frames; stacks are taken apart then."""
        return layout if layout in self.layouts else self.layouts[-1]
