"""How much a frame pool holds, and making sure of room for more."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._pool_state import COUNTS, PAGE, Sizes
from rl_ext_core.frames._region import Region
from rl_ext_core.frames._state import SLACK
from rl_ext_core.frames.layout import StackLayout


class Room:
    """What the arrays of a pool take, and may take.

    :param region: where they lie.
    :param arrays: by name.
    :param sizes: the most that there may be of each kind.
    :param layout: how a stack is made of frames.
    :param stream_frames: that each stream keeps, besides its newest stack and its open block.
    """

    def __init__(
        self,
        region: Region,
        arrays: dict[str, npt.NDArray[Any]],
        sizes: Sizes,
        *,
        layout: StackLayout,
        stream_frames: int,
    ) -> None:
        self._region, self._arrays, self._sizes = region, arrays, sizes
        self._layout, self._stream_frames = layout, stream_frames
        self._head, self._streams = arrays["head"], arrays["streams"]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        head, layout = self._head, self._layout
        rows = sum(int(head[field]) * self._row_bytes(name) for name, field in COUNTS.items())
        streams = int(head[state.STREAMS]) * (layout.stack_bytes + self._stream_frames * layout.frame_bytes)
        references = int(head[state.REFERENCES]) * (layout.frame_bytes + SLACK)
        return rows + int(head[state.PAGES]) * PAGE + references + streams + self._opened_bytes

    @property
    def unused_nbytes(self) -> int:
        """Those of them that were freed and wait to be used again."""
        head, frame = self._head, self._layout.frame_bytes + SLACK
        return int(head[state.FREE_PAGES]) * PAGE + int(head[state.FREE_REFERENCES]) * frame

    @property
    def changed_fraction(self) -> float:
        """What a frame took on average, as a fraction of its raw size."""
        head, layout = self._head, self._layout
        references = int(head[state.REFERENCES]) * layout.frame_bytes
        stored = int(head[state.BLOCK_BYTES]) + self._opened_bytes + references
        return stored / max(int(head[state.FRAMES]), 1) / layout.frame_bytes

    @property
    def _opened_bytes(self) -> int:
        return int(self._streams[: self._head[state.STREAMS], state.OPEN_BYTES].sum())

    def _row_bytes(self, name: str) -> int:
        array = self._arrays[name]
        return array.itemsize * math.prod(array.shape[1:])

    def make_sure_of(self, n_stacks: int, *, block_length: int) -> None:
        """Makes sure that so many stacks can be stored, however little they share.

        :raises OutOfMemoryError: if they cannot.
        :raises StorageError: if a file cannot grow.
        """
        head, sizes, layout = self._head, self._sizes, self._layout
        blocks = n_stacks * (layout.n_stack // block_length + 1)
        # One more, since a block is stored sealed before it is given up as it was.
        pages = (n_stacks + 1) * (layout.stack_bytes // PAGE + layout.n_stack + 1)
        needed = [(state.BLOCKS, blocks, sizes.blocks), (state.PAGES, pages, sizes.pages)]
        needed.append((state.REFERENCES, blocks, sizes.references))
        if any(head[used] + more > most for used, more, most in needed):
            raise OutOfMemoryError(
                f"the storage holds as many frames as it can number ({int(head[state.FRAMES]):,} were stored, "
                f"{self.nbytes:,} bytes are held); pass a smaller max_size"
            )
        if self._region.path is not None:
            counts = {used: int(head[used]) + more for used, more, _ in needed}
            counts[state.STREAMS] = min(int(head[state.STREAMS]) + n_stacks, sizes.streams)
            self._reserve(counts)

    def _reserve(self, counts: dict[int, int]) -> None:
        """Makes sure that the file has room for so many of each kind."""
        rows = {name: counts.get(field, 0) for name, field in COUNTS.items()}
        rows |= dict.fromkeys(("last", "frame", "open", "entry_sums"), counts[state.STREAMS])
        rows |= {"free_pages": counts[state.PAGES], "free_blocks": counts[state.BLOCKS]}
        rows |= {"free_references": counts[state.REFERENCES], "unsealed": counts[state.BLOCKS], "turned": 1024}
        n_bytes = {name: n * self._row_bytes(name) for name, n in rows.items()}
        n_bytes["pages"] = counts[state.PAGES] * PAGE + SLACK
        n_bytes["references"] = counts[state.REFERENCES] * (self._layout.frame_bytes + SLACK)
        for name, n in n_bytes.items():
            self._region.reserve(state.offset_of(name, self._sizes), min(n, self._arrays[name].nbytes))
