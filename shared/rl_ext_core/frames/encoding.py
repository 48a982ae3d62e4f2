"""Automatic choice of the layout, the codec and the block length."""

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

LAST_CHECK = 4096  # transitions per environment after which the encoding is not changed any more
JUDGE_AFTER = 64  # minimum number of transitions per environment to measure compression
COPY_BATCH = 64  # transitions per environment, or stacks, that are copied at a time
_LOOK_BACK = 16  # newest transitions per environment that are used to detect the layout
_NOISE_FRACTION = 0.95  # stored fraction above which frames are noise, which is not worth decoding
_SMALL_FRAME = 512  # bytes; for smaller frames, the rows of a block take more than patches save
_LARGE_FRAME = 1024  # bytes; for larger frames, the rows of a block take little in comparison
# (limit of the stored fraction, frames per block). Larger patches take longer to apply, so their blocks are shorter.
# Above the last but one limit most frames are stored whole, and decoding starts at the last of these.
_LENGTHS = ((0.06, 16), (0.15, 8), (0.6, 4), (0.95, 8))

_logger = logging.getLogger("rl_ext_core.frames")


class Encoding(NamedTuple):
    """Encoding of frames. Its fields are options of :class:`FrameStore` and :class:`FramePool`.

    :ivar layout: How a stack is made of frames.
    :ivar codec: Codec, or its name.
    :ivar block_length: Frames per block.
    :ivar max_error: Maximum error per byte.
    :ivar quality: JPEG quality, 1 to 100.
    """

    layout: StackLayout
    codec: str | Codec
    block_length: int
    max_error: int = 0
    quality: int = DEFAULT_QUALITY

    def log(self, what: str) -> None:
        """Log that frames are stored with this encoding from now on.

        :param what: Plural noun for the observations.
        """
        shape, n_stack = self.layout.shape, self.layout.n_stack
        message = "%s of shape %s: frames per stack: %d, codec: %r, frames per block: %d"
        _logger.info(message, what, shape, n_stack, self.codec, self.block_length)


@dataclass(frozen=True)
class EncodingChooser:
    """Requested options, and the choice of encodings that suit them and the frames.

    :param codec: Name of a codec, or ``"auto"``.
    :param n_stack: Frames per stack, or None to detect it.
    :param block_length: Frames per block, or None to choose it.
    :param loss: Permitted loss.
    :param first_layout: Layout to use before the first observation.
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
        """Create a chooser after checking the options.

        :raises InvalidArgumentError: If options exclude each other, or do not fit the observations.
        :raises InvalidTypeError: If an option or the dtype has the wrong type.
        """
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        loss = LossyOptions.from_options(
            codec, layouts, max_error=max_error, quality=quality, block_length=block_length
        )
        return cls(codec, n_stack, block_length, loss, layouts[-1] if n_stack is None else layouts[0])

    @property
    def options(self) -> dict[str, Any]:
        """Requested options as plain values."""
        return {"codec": self.codec, "n_stack": self.n_stack, "block_length": self.block_length, **self.loss.options}

    def lossless(self, layout: StackLayout) -> Encoding:
        """Return a lossless encoding, for frames about which little is known."""
        if self.codec != "auto" and not self.loss.codec_is_lossy:
            return Encoding(layout, self.codec, self.choose_block_length())
        # Small frames are patched too if there is a bound, because only patches can use it.
        small = layout.frame_bytes < _SMALL_FRAME and not self.loss.options
        return Encoding(layout, "raw" if small else "patch", self.choose_block_length())

    def first_encoding(self, layout: StackLayout) -> Encoding:
        """Return the encoding for stacks that must not change after they were stored."""
        if self.loss.codec_is_lossy:
            return Encoding(self.loss.matching_layout(layout), self.codec, 1, **self.loss.options)
        return self.lossless(layout)

    def choose_block_length(self, changes: float = 0.0) -> int:
        """Choose the number of frames per block.

        :param changes: Average stored size of a frame as a fraction of its raw size.
        """
        if self.block_length is not None:
            return self.block_length
        length = next((length for limit, length in _LENGTHS if changes < limit), _LENGTHS[-1][1])
        # Shorter blocks if they are sealed, because reading one frame decompresses the whole block.
        seals = self.codec != "auto" and not self.loss.codec_is_lossy and get_codec(self.codec).seals
        return max(length // 2, 4) if seals else length

    def _is_noise(self, changes: float) -> bool:
        """Return whether frames change so much that they should not be compressed."""
        return self.codec == "auto" and changes > _NOISE_FRACTION

    def better_for_store(self, store: FrameStore) -> Encoding | None:
        """Choose a better encoding for the transitions of a store.

        A store with a permitted loss stays exact until its layout is known and it has enough data. After that it keeps
        its encoding, because storing inexact frames again would increase their error.

        :return: The encoding, or None if the current one is best.
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
            chosen = now._replace(codec=codec, block_length=self.choose_block_length(changes))
        if self._may_become_lossy(store, known=found is not None):
            chosen = self._lossy_encoding(store, self.loss.matching_layout(layout))
        return None if chosen == now else chosen

    def _may_become_lossy(self, store: FrameStore, *, known: bool) -> bool:
        """Return whether enough is known about the frames to use the permitted loss."""
        half_full = 2 * store.size >= min(2 * JUDGE_AFTER, store.capacity)
        known = known or store.seen >= LAST_CHECK
        return bool(self.loss.options) and known and half_full and store.seen >= JUDGE_AFTER

    def _lossy_encoding(self, store: FrameStore, layout: StackLayout) -> Encoding:
        """Return the encoding that uses the permitted loss, with a block length that suits it."""
        lossless = self.lossless(layout)
        if self.loss.codec_is_lossy or not get_codec(str(lossless.codec)).patches:
            return self.first_encoding(layout)
        trial = lossless._replace(max_error=self.loss.options["max_error"])
        return trial._replace(block_length=self.choose_block_length(store.reencode(trial).stored_fraction))

    def better_for_pool(self, pool: FramePool) -> Encoding | None:
        """Choose a better encoding for the stacks of a pool with a known layout.

        :return: The encoding, or None if the current one is best.
        """
        now, bound = pool.encoding, self.loss.options.get("max_error", 0)
        if pool.codec.lossy:
            return None
        if now.max_error != bound:
            return now._replace(max_error=bound)
        changes = pool.stored_fraction
        noise = self._is_noise(changes) and not bound
        length = self.choose_block_length(changes)
        if noise and self.block_length is None and now.layout.frame_bytes >= _LARGE_FRAME:
            length = 1  # no frames are shared, and the last used frame of a block would keep the others in memory
        chosen = now._replace(codec="raw" if noise else now.codec, block_length=length)
        return None if chosen == now else chosen


def _detect_store_layout(store: FrameStore) -> StackLayout | None:
    """Detect the layout of the newest observations in a store."""
    before, after = store.transitions(np.arange(max(store.size - _LOOK_BACK, 0), store.size))
    described = store.layout.shape, store.layout.dtype
    # In a rollout, the next observations are those of the next row.
    below = before[: -store.n_envs], before[store.n_envs :]
    return find_layout(*described, before, after) or find_layout(*described, *below)


def matching_layout(layout: StackLayout, stacks: npt.NDArray[Any], nexts: npt.NDArray[Any] | None) -> StackLayout:
    """Detect the layout of stacks from successive ones.

    :param layout: Result if nothing is detected.
    :param stacks: Stacks of shape ``(n, *layout.shape)``.
    :param nexts: Next stacks of the same shape, or None if ``stacks`` contains them.
    """
    shape, dtype = layout.shape, layout.dtype
    if nexts is not None:
        return find_layout(shape, dtype, stacks[:COPY_BATCH], nexts[:COPY_BATCH]) or layout
    stacks = stacks[:COPY_BATCH]
    for distance in range(1, len(stacks) // 2 + 1):  # the next stack comes later if environments take turns
        found = find_layout(shape, dtype, stacks[:-distance], stacks[distance:])
        if found is not None and found.n_stack > 1:
            return found
    return layout
