"""Choosing a codec and a block length by what was seen of the frames."""

from __future__ import annotations

import logging

from rl_ext_core.frames.layout import StackLayout

LAST_CHECK = 4096  # transitions an environment, after which what was found is kept
JUDGE_AFTER = 64  # transitions an environment, before which compression says little
ALL_CHANGES = 0.95  # noise: not worth decoding
_SMALL_FRAME = 512  # bytes: below, patches save less than the bookkeeping of a block costs
# Frames a block, by what a frame takes as a fraction of its raw size, up to which a line holds. The more a patch holds,
# the more it costs to go through those before the frame that is wanted; but where most frames are stored whole, one
# starts at the last of these.
_LENGTHS = ((0.06, 16), (0.15, 8), (0.6, 4), (0.95, 8))

_logger = logging.getLogger("rl_ext_core.frames")


def suiting_length(changes: float, *, seals: bool) -> int:
    """Frames a block.

    :param changes: what a frame takes, as a fraction of its raw size.
    :param seals: whether full blocks are compressed.
    """
    length = next((length for limit, length in _LENGTHS if changes < limit), _LENGTHS[-1][1])
    # All of a sealed block has to be opened to read any of it.
    return max(length // 2, 4) if seals else length


def is_small(layout: StackLayout) -> bool:
    """Whether frames are too small for patches to be worth it."""
    return layout.frame_bytes < _SMALL_FRAME


def log_choice(what: str, layout: StackLayout, *, codec: str, block_length: int) -> None:
    """Says how observations are stored from here on."""
    _logger.info(
        "%s of shape %s: %d frames a stack, codec %r, %d frames a block",
        what,
        layout.shape,
        layout.n_stack,
        codec,
        block_length,
    )
