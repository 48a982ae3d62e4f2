"""What a sealed block is in memory and in files: two sizes, and what its codec has made of the contents."""

from __future__ import annotations

import numpy as np

from rl_ext_core.frames._state import SEALED_HEADER, Bytes
from rl_ext_core.frames.codecs import Codec


def seal_block(codec: Codec, contents: Bytes) -> Bytes:
    """A full block as it is stored: as it was, where the codec would need more."""
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
