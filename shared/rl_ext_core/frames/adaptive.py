"""A frame store that finds out how observations are stacked and which codec suits them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames.codecs import get_codec
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.store import FORMAT_VERSION, FrameStore, check_format, checksum

_logger = logging.getLogger("rl_ext_core.frames")

_LAST_CHECK = 4096  # transitions an environment, after which what was found is kept
_LOOK_BACK = 16  # transitions an environment that a layout is found from
_JUDGE_AFTER = 64  # transitions an environment, before which compression says little
_COPY_ROWS = 64  # transitions an environment that are copied at a time
_SMALL_FRAME = 512  # bytes: below, patches save less than the bookkeeping of a block costs
# Frames a block, by what a frame takes as a fraction of its raw size, up to which a line holds. The more a patch holds,
# the more it costs to go through those before the frame that is wanted; but where most frames are stored whole, one
# starts at the last of these.
_BLOCK_LENGTHS = ((0.06, 16), (0.15, 8), (0.6, 4), (0.95, 8))
_ALL_CHANGES = 0.95  # noise: not worth decoding


class AdaptiveStore:
    """Like :class:`FrameStore`, but layout, codec and block length may be left open.

    They are chosen when the first transitions are seen, looked at again when 2, 4, 8, ... 4096 are stored, and what
    is stored then is stored anew if they have changed.

    :param capacity: transitions an environment.
    :param n_envs: number of environments.
    :param shape: shape of one observation.
    :param dtype: dtype of the observations.
    :param codec: name of a codec, or ``"auto"``.
    :param n_stack: frames a stack, or None to find it from the data.
    :param block_length: frames a block, a power of two, or None to choose it by what is seen.
    """

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str = "auto",
        n_stack: int | None = None,
        block_length: int | None = None,
    ) -> None:
        self._codec, self._n_stack, self._block_length = codec, n_stack, block_length
        if codec != "auto":
            get_codec(codec)
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        layout = layouts[-1] if n_stack is None else layouts[0]
        self._inner = FrameStore(capacity, n_envs, layout, codec=self._first_codec(layout), block_length=self._length())

    def _first_codec(self, layout: StackLayout) -> str:
        if self._codec != "auto":
            return self._codec
        if importlib.util.find_spec("numba") is None:
            _say_once_that_numba_is_missing()
            return "raw"
        return "raw" if layout.frame_bytes < _SMALL_FRAME else "patch"

    def _length(self, changes: float = 0.0) -> int:
        if self._block_length is not None:
            return self._block_length
        length = next((length for limit, length in _BLOCK_LENGTHS if changes < limit), _BLOCK_LENGTHS[-1][1])
        # All of a sealed block has to be opened to read any of it.
        return max(length // 2, 4) if self._codec != "auto" and get_codec(self._codec).seals else length

    @property
    def layout(self) -> StackLayout:
        """How observations are stacked, as far as is known."""
        return self._inner.layout

    @property
    def codec(self) -> str:
        """Name of the codec in use."""
        return self._inner.codec.name

    @property
    def block_length(self) -> int:
        """Frames in a block."""
        return self._inner.block_length

    @property
    def size(self) -> int:
        """Transitions held, an environment."""
        return self._inner.size

    @property
    def nbytes(self) -> int:
        """Bytes held, as in :attr:`FrameStore.nbytes`."""
        return self._inner.nbytes

    def clear(self) -> None:
        """Forgets all transitions; what was found out is kept."""
        self._inner.clear()

    def append(
        self,
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic],
        *,
        row: int | None = None,
    ) -> None:
        """Stores one transition of each environment; see :meth:`FrameStore.append`."""
        inner = self._inner
        inner.append(observations, next_observations, row=row)
        size = inner.size
        if size <= _LAST_CHECK and size & (size - 1) == 0 and not inner.full:
            self._adapt()

    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes a batch of transitions into the arrays given; see :meth:`FrameStore.get`."""
        self._inner.get(rows, envs, observations, next_observations, num_threads=num_threads)

    def __getstate__(self) -> dict[str, Any]:
        chosen = {"codec": self._codec, "n_stack": self._n_stack, "block_length": self._block_length}
        return {"format": FORMAT_VERSION, **chosen, "checksum": checksum(chosen), "store": self._inner}

    def __setstate__(self, state: Any) -> None:
        """Becomes the store that was written.

        :raises CorruptFileError: if the state is damaged, or of a later format.
        """
        check_format(state)
        chosen = {name: state.get(name) for name in ("codec", "n_stack", "block_length")}
        if checksum(chosen) != state.get("checksum") or not isinstance(state.get("store"), FrameStore):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        self._codec, self._n_stack, self._block_length = chosen.values()
        self._inner = state["store"]

    def _adapt(self) -> None:
        # The transition is stored, and what is there is complete: it stays as it is.
        with contextlib.suppress(MemoryError):
            self._look_again()

    def _look_again(self) -> None:
        inner = self._inner
        layout = inner.layout if self._n_stack is not None else self._find_layout()
        codec, length = inner.codec.name, inner.block_length
        if layout != inner.layout:
            codec, length = self._first_codec(layout), self._length()
        elif inner.size >= _JUDGE_AFTER:
            changes = inner.changed_fraction
            length = self._length(changes)
            if self._codec == "auto" and changes > _ALL_CHANGES:
                codec = "raw"
        if (layout, codec, length) == (inner.layout, inner.codec.name, inner.block_length):
            return
        self._inner = _stored_anew(inner, layout, codec=codec, block_length=length)
        _logger.info(
            "observations of shape %s: %d frames a stack, codec %r, %d frames a block",
            layout.shape,
            layout.n_stack,
            codec,
            length,
        )

    def _find_layout(self) -> StackLayout:
        inner = self._inner
        before, after = _read(inner, np.arange(max(inner.size - _LOOK_BACK, 0), inner.size))
        return find_layout(inner.layout.shape, inner.layout.dtype, before, after) or inner.layout


def _read(store: FrameStore, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Transitions of all environments, row by row."""
    grid = np.repeat(rows, store.n_envs), np.tile(np.arange(store.n_envs), len(rows))
    shape = (len(grid[0]), *store.layout.shape)
    before, after = (np.empty(shape, dtype=store.layout.dtype) for _ in range(2))
    store.get(*grid, before, after)
    return before, after


def _stored_anew(store: FrameStore, layout: StackLayout, *, codec: str, block_length: int) -> FrameStore:
    """A store of the same transitions in the same places. The store must not have wrapped."""
    anew = FrameStore(store.capacity, store.n_envs, layout, codec=codec, block_length=block_length)
    for start in range(0, store.size, _COPY_ROWS):
        rows = np.arange(start, min(start + _COPY_ROWS, store.size))
        for observations, nexts in zip(
            *(part.reshape(len(rows), store.n_envs, *layout.shape) for part in _read(store, rows)), strict=True
        ):
            anew.append(observations, nexts)
    return anew


@functools.cache
def _say_once_that_numba_is_missing() -> None:
    _logger.warning(
        "codec='auto' stores frames as they are, because numba is not installed: only what frames share is saved. "
        'For compression: pip install "rl-ext[frames]"'
    )
