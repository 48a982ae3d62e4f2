"""How frames are stored where that is left open: how they are stacked, by which codec, and in which blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Codec, LossyOptions, get_codec
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout

if TYPE_CHECKING:
    from rl_ext_core.frames.pool import FramePool
    from rl_ext_core.frames.store import FrameStore

LAST_CHECK = 4096  # transitions an environment, after which what was found is kept
JUDGE_AFTER = 64  # transitions an environment, before which compression says little
COPY_BATCH = 64  # transitions an environment, or stacks, that are copied at a time
_LOOK_BACK = 16  # transitions an environment that a layout is found from
_NOISE_FRACTION = 0.95  # noise: not worth decoding
_SMALL_FRAME = 512  # bytes: below, patches save less than the bookkeeping of a block costs
_LARGE_FRAME = 1024  # bytes, beside which a block's bookkeeping is little
# Frames a block, by what a frame takes as a fraction of its raw size, up to which a line holds. The more a patch holds,
# the more it costs to go through those before the frame that is wanted; but where most frames are stored whole, one
# starts at the last of these.
_LENGTHS = ((0.06, 16), (0.15, 8), (0.6, 4), (0.95, 8))

_logger = logging.getLogger("rl_ext_core.frames")


class Encoding(NamedTuple):
    """How frames are stored; its fields are options of :class:`FrameStore` and :class:`FramePool`.

    :ivar layout: how a stack is made of frames.
    :ivar codec: the codec, or its name.
    :ivar block_length: frames a block.
    :ivar max_error: how far off each byte may be.
    :ivar quality: of JPEG.
    """

    layout: StackLayout
    codec: str | Codec
    block_length: int
    max_error: int = 0
    quality: int = DEFAULT_QUALITY

    def log(self, what: str) -> None:
        """Says that frames are stored in this way from here on."""
        shape, n_stack = self.layout.shape, self.layout.n_stack
        message = "%s of shape %s: %d frames a stack, codec %r, %d frames a block"
        _logger.info(message, what, shape, n_stack, self.codec, self.block_length)


@dataclass(frozen=True)
class EncodingChooser:
    """What was asked for, and what suits the frames where that leaves it open.

    :param codec: name of a codec, or ``"auto"``.
    :param n_stack: frames a stack, or None.
    :param block_length: frames a block, or None.
    :param loss: what may be lost.
    :param first_layout: how observations are stacked as far as is known before the first one.
    """

    codec: str
    n_stack: int | None
    block_length: int | None
    loss: LossyOptions
    first_layout: StackLayout

    @classmethod
    def from_options(
        cls,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str = "auto",
        n_stack: int | None = None,
        block_length: int | None = None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
    ) -> EncodingChooser:
        """The same, of options.

        :raises InvalidArgumentError: if they exclude each other, or do not fit the observations.
        :raises InvalidTypeError: likewise, because of a type.
        """
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        loss = LossyOptions.from_options(
            codec, layouts, max_error=max_error, quality=quality, block_length=block_length
        )
        return cls(codec, n_stack, block_length, loss, layouts[-1] if n_stack is None else layouts[0])

    @property
    def options(self) -> dict[str, Any]:
        """As plain values."""
        return {"codec": self.codec, "n_stack": self.n_stack, "block_length": self.block_length, **self.loss.options}

    def lossless(self, layout: StackLayout) -> Encoding:
        """How frames are stored of which nothing is lost yet, and little is known."""
        if self.codec != "auto" and not self.loss.codec_is_lossy:
            return Encoding(layout, self.codec, self.length())
        # Only patches can leave out what is within the bound.
        small = layout.frame_bytes < _SMALL_FRAME and not self.loss.options
        return Encoding(layout, "raw" if small else "patch", self.length())

    def first_encoding(self, layout: StackLayout) -> Encoding:
        """Likewise, where what is read must not change later, and layouts are found by what is given."""
        if self.loss.codec_is_lossy:
            return Encoding(self.loss.matching_layout(layout), self.codec, 1, **self.loss.options)
        return self.lossless(layout)

    def length(self, changes: float = 0.0) -> int:
        """Frames a block.

        :param changes: what a frame takes, as a fraction of its raw size.
        """
        if self.block_length is not None:
            return self.block_length
        length = next((length for limit, length in _LENGTHS if changes < limit), _LENGTHS[-1][1])
        # All of a sealed block has to be opened to read any of it.
        seals = self.codec != "auto" and not self.loss.codec_is_lossy and get_codec(self.codec).seals
        return max(length // 2, 4) if seals else length

    def _is_noise(self, changes: float) -> bool:
        return self.codec == "auto" and changes > _NOISE_FRACTION

    def better_for_store(self, store: FrameStore) -> Encoding | None:
        """How a store's transitions are to be stored from here on; None where they are.

        A store that may be lossy is exact until its layout is known and it has seen enough to choose, and keeps to that
        from then on: what is not exact any more cannot be stored anew without being off by more.
        """
        now = store.encoding
        if now.max_error or get_codec(store.codec).lossy:
            return None
        found = now.layout if self.n_stack is not None else _detect_store_layout(store)
        chosen, layout = now, found or now.layout
        if layout != now.layout:
            chosen = self.lossless(layout)
        elif store.size >= JUDGE_AFTER:
            changes = store.stored_fraction
            codec = "raw" if self._is_noise(changes) else now.codec
            chosen = now._replace(codec=codec, block_length=self.length(changes))
        if self._may_become_lossy(store, known=found is not None):
            chosen = self._lossy_encoding(store, self.loss.matching_layout(layout))
        return None if chosen == now else chosen

    def _may_become_lossy(self, store: FrameStore, *, known: bool) -> bool:
        """Whether enough is known to give exactness up."""
        half_full = 2 * store.size >= min(2 * JUDGE_AFTER, store.capacity)
        known = known or store.seen >= LAST_CHECK
        return bool(self.loss.options) and known and half_full and store.seen >= JUDGE_AFTER

    def _lossy_encoding(self, store: FrameStore, layout: StackLayout) -> Encoding:
        lossless = self.lossless(layout)
        if self.loss.codec_is_lossy or not get_codec(str(lossless.codec)).patches:
            return self.first_encoding(layout)
        trial = lossless._replace(max_error=self.loss.options["max_error"])
        return trial._replace(block_length=self.length(store.reencode(trial).stored_fraction))

    def better_for_pool(self, pool: FramePool) -> Encoding | None:
        """How stacks of the layout that is known are to be stored from here on; None where they are."""
        now, bound = pool.encoding, self.loss.options.get("max_error", 0)
        if pool.codec.lossy:
            return None
        if now.max_error != bound:
            return now._replace(max_error=bound)
        changes = pool.stored_fraction
        noise = self._is_noise(changes) and not bound
        length = self.length(changes)
        if noise and self.block_length is None and now.layout.frame_bytes >= _LARGE_FRAME:
            length = 1  # nothing is shared: those that stay longest would keep others
        chosen = now._replace(codec="raw" if noise else now.codec, block_length=length)
        return None if chosen == now else chosen


def _detect_store_layout(store: FrameStore) -> StackLayout | None:
    """How a store's newest observations are stacked."""
    before, after = store.transitions(np.arange(max(store.size - _LOOK_BACK, 0), store.size))
    described = store.layout.shape, store.layout.dtype
    # In a rollout there are no next observations but those of the row below.
    below = before[: -store.n_envs], before[store.n_envs :]
    return find_layout(*described, before, after) or find_layout(*described, *below)


def matching_layout(layout: StackLayout, stacks: npt.NDArray[Any], nexts: npt.NDArray[Any] | None) -> StackLayout:
    """How stacks are made of frames, by those that follow each other; the layout given where they do not tell."""
    shape, dtype = layout.shape, layout.dtype
    if nexts is not None:
        return find_layout(shape, dtype, stacks[:COPY_BATCH], nexts[:COPY_BATCH]) or layout
    stacks = stacks[:COPY_BATCH]
    for distance in range(1, len(stacks) // 2 + 1):  # of environments that take turns, the successor comes later
        found = find_layout(shape, dtype, stacks[:-distance], stacks[distance:])
        if found is not None and found.n_stack > 1:
            return found
    return layout
