"""A frame pool that finds out how stacks are made and which codec suits them."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, missing_dependency
from rl_ext_core.frames._choice import ALL_CHANGES, JUDGE_AFTER, LAST_CHECK, is_small, log_choice, suiting_length
from rl_ext_core.frames._loss import Loss
from rl_ext_core.frames._pool_files import described, restored
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, get_codec
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.pool import FramePool, Handles

_COPIED = 64  # stacks at a time


class AdaptivePool:
    """Like :class:`FramePool`, but layout, codec and block length may be left open.

    They are chosen by the first batch, and looked at again when 2, 4, 8, ... 4096 stacks were put. Where other
    processes share the pool, or it lies in a file, what the first batch says is kept.

    :param n_handles: the most stacks that are held at a time.
    :param shape: shape of a stack.
    :param dtype: dtype of the stacks.
    :param codec: name of a codec, or ``"auto"``.
    :param max_error: how far a pixel may be off; 0 is exact, as are the first few stacks in any case.
    :param quality: of JPEG, which the first stack goes through as all others do; see :class:`FrameStore`.
    :param n_stack: frames a stack, or None to find it from the data.
    :param block_length: frames a block, a power of two, or None to choose it by what is seen.
    :param path: a file to keep it in; see :class:`FramePool`.
    :raises MissingDependencyError: if numba is not installed, or what the codec needs.
    """

    def __init__(
        self,
        n_handles: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str = "auto",
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        n_stack: int | None = None,
        block_length: int | None = None,
        path: Path | None = None,
    ) -> None:
        if importlib.util.find_spec("numba") is None:
            raise missing_dependency("numba", "frames", "a pool of frames")
        self._codec, self._n_stack, self._block_length = codec, n_stack, block_length
        self._n_handles, self._max_error = n_handles, max_error
        self.shared = False
        self._in_file = path is not None
        self._next_check = 2
        self._judged = False
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        self._loss = Loss.asked_for(codec, layouts, max_error=max_error, quality=quality, block_length=block_length)
        self._first_layout = layouts[-1] if n_stack is None else layouts[0]
        self._pool = FramePool(n_handles, path=path, **self._first_choice(self._first_layout))

    def _first_choice(self, layout: StackLayout) -> dict[str, Any]:
        """How stacks of that layout are stored before more is known."""
        if self._loss.is_codec:
            # From the first one on: what is read must not change later, and other layouts are found by what is given.
            layout = self._loss.layout_like(layout)
            return {"layout": layout, "codec": self._codec, "block_length": 1, **self._loss.options}
        # Exact at first: how frames are stacked could not be seen otherwise.
        return {"layout": layout, "codec": self._first_codec(layout), "block_length": self._length(0.0)}

    def _first_codec(self, layout: StackLayout) -> str:
        if self._codec != "auto":
            return self._codec
        return "raw" if is_small(layout) and not self._max_error else "patch"

    def _length(self, changes: float) -> int:
        if self._block_length is not None:
            return self._block_length
        return suiting_length(changes, seals=self._codec != "auto" and get_codec(self._codec).seals)

    @property
    def layout(self) -> StackLayout:
        """How stacks are made, as far as is known."""
        self._pool.refresh()
        return self._pool.layout

    @property
    def codec(self) -> str:
        """Name of the codec in use."""
        self._pool.refresh()
        return self._pool.codec.name

    @property
    def block_length(self) -> int:
        """Frames in a block."""
        self._pool.refresh()
        return self._pool.block_length

    @property
    def nbytes(self) -> int:
        """Bytes held, as in :attr:`FramePool.nbytes`."""
        return self._pool.nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes that the stacks take, as in :attr:`FramePool.used_nbytes`."""
        return self._pool.used_nbytes

    def clear(self) -> None:
        """Forgets all stacks; what was found out is kept."""
        self._pool.clear()

    def put(
        self,
        stacks: npt.NDArray[Any],
        nexts: npt.NDArray[Any] | None = None,
        *,
        ended: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Handles, Handles]:
        """Stores stacks, and for each the one that follows it; see :meth:`FramePool.put`."""
        pool = self._pool
        pool.refresh()
        fresh = pool.held == 0
        if fresh:
            self._judged = False
        if fresh and self._n_stack is None:
            chosen = self._first_choice(_found_layout(pool.layout, stacks, nexts))
            if chosen["layout"] != pool.layout:
                pool.become(**chosen)
        handles = pool.put(stacks, nexts, ended=ended)
        while fresh and len(stacks) >= JUDGE_AFTER and (better := self._better()) is not None:
            pool.become(pool.layout, **better)
            handles = pool.put(stacks, nexts, ended=ended)
        return handles

    def _better(self) -> dict[str, Any] | None:
        """Codec, block length and bound that suit what was seen, where they are other ones."""
        pool = self._pool
        if pool.codec.lossy:
            return None
        if pool.max_error != self._max_error:
            return {"codec": pool.codec.name, "block_length": pool.block_length, "max_error": self._max_error}
        changes = pool.changed_fraction
        noise = self._codec == "auto" and changes > ALL_CHANGES and not self._max_error
        codec, length = "raw" if noise else pool.codec.name, self._length(changes)
        if (codec, length) == (pool.codec.name, pool.block_length) or self._judged:
            return None
        self._judged = True  # once: in other blocks, changes are other ones
        return {"codec": codec, "block_length": length, "max_error": self._max_error}

    def look_again(self, handles: Handles, next_handles: Handles | None) -> tuple[Handles, Handles] | None:
        """Stores all stacks anew where another layout, codec or block length suits what was seen meanwhile.

        :param handles: all that are held, in the order in which they came.
        :param next_handles: those of the stacks that follow them, or None.
        :return: the handles that take the place of these, which are not valid any more, or None.
        """
        if self.shared or self._in_file or not self._next_check <= len(handles) <= LAST_CHECK:
            return None
        n_held = sum(np.count_nonzero(part) for part in (handles, next_handles) if part is not None)
        if n_held != self._pool.held or not handles.all() or self._pool.lossy:
            return None  # some are elsewhere, places are empty, or errors would add up
        while self._next_check <= len(handles):
            self._next_check *= 2
        # What is stored is complete: where memory is short it stays as it is.
        with contextlib.suppress(MemoryError):
            return self._stored_anew(handles, next_handles)
        return None

    def _stored_anew(self, handles: Handles, next_handles: Handles | None) -> tuple[Handles, Handles] | None:
        pool = self._pool
        layout = pool.layout
        if self._n_stack is None:
            nexts = None if next_handles is None else next_handles[-_COPIED:]
            layout = _found_layout(layout, *self._decoded(handles[-_COPIED:], nexts))
        chosen: dict[str, Any] | None = None
        if layout != pool.layout:
            chosen = self._first_choice(layout)
        elif len(handles) >= JUDGE_AFTER:
            self._judged = False
            chosen = self._better()
        if chosen is None:
            return None
        anew = FramePool(self._n_handles, **{"layout": layout, **chosen})
        parts = []
        for start in range(0, len(handles), _COPIED):
            part = slice(start, start + _COPIED)
            nexts = None if next_handles is None else next_handles[part]
            parts.append(anew.put(*self._decoded(handles[part], nexts)))
        self._pool = anew
        log_choice("stacks", layout, codec=anew.codec.name, block_length=anew.block_length)
        return np.concatenate([put for put, _ in parts]), np.concatenate([put for _, put in parts])

    def _decoded(
        self, handles: Handles, next_handles: Handles | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        layout = self._pool.layout
        stacks = np.empty((len(handles), *layout.shape), dtype=layout.dtype)
        nexts = None if next_handles is None else np.empty_like(stacks)
        self.get(handles, stacks, next_handles, nexts)
        return stacks, nexts

    def get(
        self,
        handles: Handles,
        out: npt.NDArray[Any],
        next_handles: Handles | None = None,
        next_out: npt.NDArray[Any] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes stacks into arrays; see :meth:`FramePool.get`."""
        self._pool.get(handles, out, next_handles, next_out, num_threads=num_threads)

    def release(self, handles: Handles) -> None:
        """Gives stacks up; see :meth:`FramePool.release`."""
        self._pool.release(handles)

    def recover(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Makes a pool that was found again in a file whole; see ``_pool_recovery``.

        :param handles: all that are held.
        :return: which of them can be read; the others are forgotten.
        """
        from rl_ext_core.frames._pool_recovery import recover

        if self._pool.interrupted:
            self._pool.become(**self._first_choice(self._first_layout))
        return recover(self._pool, handles)

    def readable(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Which stacks can be read; see :meth:`FramePool.readable`."""
        return self._pool.readable(handles)

    def close(self) -> None:
        """Lets others use the file that the pool lies in. This pool must not be used any more."""
        if self._in_file:
            self._pool._region.unlock()

    def state(self) -> dict[str, Any]:
        """What a file needs of the stacks."""
        return described(self._pool)

    def restore(self, description: Any) -> None:
        """Becomes the pool that :meth:`state` described.

        :raises CorruptFileError: if it is damaged, or of a later format.
        :raises InvalidArgumentError: if it loses more than this pool may.
        """
        pool = restored(description, self._n_handles)
        if pool.max_error > self._max_error or (pool.codec.lossy and self._loss.options != {"quality": pool.quality}):
            made_with = f"codec='jpeg', quality={pool.quality}" if pool.codec.lossy else f"max_error={pool.max_error}"
            raise InvalidArgumentError(
                f"what was saved is lossy: it was made with {made_with}; pass the same, since what is added goes on so"
            )
        self._pool = pool
        self._next_check = LAST_CHECK + 1

    def __getstate__(self) -> dict[str, Any]:
        # The pool can only go to a child process, which shares it from now on.
        self.shared = True
        return self.__dict__


def _found_layout(layout: StackLayout, stacks: npt.NDArray[Any], nexts: npt.NDArray[Any] | None) -> StackLayout:
    """How stacks are made of frames, by those that follow each other; the layout given where they do not tell."""
    shape, dtype = layout.shape, layout.dtype
    if nexts is not None:
        return find_layout(shape, dtype, stacks[:_COPIED], nexts[:_COPIED]) or layout
    stacks = stacks[:_COPIED]
    for distance in range(1, len(stacks) // 2 + 1):  # of environments that take turns, the successor comes later
        found = find_layout(shape, dtype, stacks[:-distance], stacks[distance:])
        if found is not None and found.n_stack > 1:
            return found
    return layout
