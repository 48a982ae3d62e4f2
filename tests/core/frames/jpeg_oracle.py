"""Expected frames of the JPEG codec, computed with simplejpeg."""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg

from rl_ext_core.frames.layout import StackLayout


def as_jpeg(stacks: Any, layout: StackLayout, quality: int = 95) -> np.ndarray[Any, Any]:
    """Encode and decode each frame of stacks as JPEG, except frames that JPEG would not make smaller.

    :param stacks: Shape ``(n, *layout.shape)``.
    """
    axis = layout.axis + 1
    parts = np.split(np.asarray(stacks), layout.n_stack, axis=axis)
    return np.concatenate(
        [np.stack([_encode_and_decode(frame, quality) for frame in part]) for part in parts], axis=axis
    )


def _encode_and_decode(frame: np.ndarray[Any, Any], quality: int) -> np.ndarray[Any, Any]:
    """Return a frame after JPEG, or unchanged if JPEG would not make it smaller."""
    if not frame.any():
        return frame  # padding
    planar = frame.ndim == 3 and frame.shape[2] not in (1, 3)
    image = np.moveaxis(frame, 0, -1) if planar else frame.reshape(*frame.shape[:2], -1)
    colors, subsampling = ("GRAY", "Gray") if image.shape[2] == 1 else ("RGB", "444")
    encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colors, subsampling)
    if len(encoded) >= image.size:
        return frame
    decoded = simplejpeg.decode_jpeg(encoded, colors)
    return np.moveaxis(decoded, -1, 0) if planar else decoded.reshape(frame.shape)
