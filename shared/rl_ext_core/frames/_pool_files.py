"""What a file holds of a frame pool: its arrays, as far as they are in use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._format import checksum
from rl_ext_core.frames._pool_state import COUNTS, PAGE
from rl_ext_core.frames._state import SLACK
from rl_ext_core.frames.codecs import DEFAULT_QUALITY
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.pool import FramePool

POOL_FORMAT = 1


def described(pool: FramePool) -> dict[str, Any]:
    """Plain values, and views of arrays, which are written without a copy; with a checksum."""
    pool.refresh()
    layout, head, arrays = pool.layout, pool._pool.head, pool._arrays
    n_streams = int(head[state.STREAMS])
    opened_bytes = pool._pool.streams[:n_streams, state.OPEN_BYTES].tolist()
    opened = [row[:n] for row, n in zip(arrays["open"], opened_bytes, strict=False)]
    used: dict[str, npt.NDArray[Any]] = {name: arrays[name][: head[field]] for name, field in COUNTS.items()}
    used |= {
        "head": head,
        "last": arrays["last"][:n_streams, : layout.stack_bytes],
        "frame": arrays["frame"][:n_streams, : layout.frame_bytes],
        "open": np.concatenate([np.zeros(0, dtype=np.uint8), *opened]),
        "pages": arrays["pages"][: int(head[state.PAGES]) * PAGE],
        "references": arrays["references"][: int(head[state.REFERENCES]) * (layout.frame_bytes + SLACK)],
    }
    description = {
        "format": POOL_FORMAT,
        "layout": (tuple(map(int, layout.shape)), layout.dtype.str, int(layout.n_stack), int(layout.axis)),
        "codec": pool.codec.name,
        "block_length": pool.block_length,
        "max_error": pool.max_error,
        **({"quality": pool.quality} if pool.codec.lossy else {}),
        "arrays": dict(sorted(used.items())),
    }
    return {**description, "checksum": checksum(description)}


def restored(description: Any, n_handles: int) -> FramePool:
    """The pool that was described, with room for so many stacks.

    :raises CorruptFileError: if it is damaged, or of a later format.
    """
    version = description.get("format") if isinstance(description, dict) else None
    if version != POOL_FORMAT:
        raise CorruptFileError(
            f"the frames have format {version!r}, this version reads {POOL_FORMAT}; load them with the version of "
            "rl-ext that wrote them"
        )
    if checksum(description) != description.get("checksum"):
        raise CorruptFileError("the frames are damaged: their checksum does not match their contents")
    shape, dtype, n_stack, axis = description["layout"]
    layout = StackLayout(tuple(shape), np.dtype(dtype), n_stack, axis)
    pool = FramePool(
        n_handles,
        layout,
        codec=description["codec"],
        block_length=description["block_length"],
        max_error=description["max_error"],
        quality=description.get("quality", DEFAULT_QUALITY),
    )
    stored = description["arrays"]
    for name in (*COUNTS, "last", "frame", "pages", "references"):
        part = stored[name]
        target = pool._arrays[name]
        target = target[: len(part)] if part.ndim == 1 else target[: len(part), : part.shape[1]]
        target[:] = part
    start = 0
    opened_bytes = stored["streams"][:, state.OPEN_BYTES].tolist()
    for row, n_bytes in zip(pool._arrays["open"], opened_bytes, strict=False):
        row[:n_bytes] = stored["open"][start : start + n_bytes]
        start += n_bytes
    pool._arrays["head"][: state.KIND_OF_POOL] = stored["head"][: state.KIND_OF_POOL]
    return pool
