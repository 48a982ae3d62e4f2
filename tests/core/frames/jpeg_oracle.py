"""What JPEG makes of frames, by simplejpeg itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg

from rl_ext_core.frames.layout import StackLayout


def as_jpeg(stacks: Any, layout: StackLayout, quality: int = 95) -> np.ndarray[Any, Any]:
    """Stacks whose frames each went through JPEG, but for those of which it would make more bytes than they have.

    :param stacks: shape ``(n, *layout.shape)``.
    """
    axis = layout.axis + 1
    parts = np.split(np.asarray(stacks), layout.n_stack, axis=axis)
    return np.concatenate([np.stack([_through(frame, quality) for frame in part]) for part in parts], axis=axis)


def _through(frame: np.ndarray[Any, Any], quality: int) -> np.ndarray[Any, Any]:
    if not frame.any():
        return frame  # as padding is
    planar = frame.ndim == 3 and frame.shape[2] not in (1, 3)
    image = np.moveaxis(frame, 0, -1) if planar else frame.reshape(*frame.shape[:2], -1)
    colours, subsampling = ("GRAY", "Gray") if image.shape[2] == 1 else ("RGB", "444")
    encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colours, subsampling)
    if len(encoded) >= image.size:
        return frame
    decoded = simplejpeg.decode_jpeg(encoded, colours)
    return np.moveaxis(decoded, -1, 0) if planar else decoded.reshape(frame.shape)
