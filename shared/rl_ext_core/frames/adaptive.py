"""Stores and pools that find out how observations are stacked, and which codec and block length suit them."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rl_ext_core._interrupts import uninterrupted
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.checkpoint import (
    FORMAT_VERSION,
    check_format,
    checksum,
    load,
    reduced_and_held,
    save,
)
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Loss, check_numba, get_codec, options_in_words
from rl_ext_core.frames.folder import StoreFolder
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.region import RegionFile
from rl_ext_core.frames.store import FrameStore, Recovered, load_kernels, stored_as

if TYPE_CHECKING:
    from rl_ext_core.frames.pool import FramePool, Handles

LAST_CHECK = 4096  # transitions an environment, after which what was found is kept
JUDGE_AFTER = 64  # transitions an environment, before which compression says little
ALL_CHANGES = 0.95  # noise: not worth decoding
_COPIED = 64  # transitions an environment, or stacks, that are copied at a time
_SMALL_FRAME = 512  # bytes: below, patches save less than the bookkeeping of a block costs
# Frames a block, by what a frame takes as a fraction of its raw size, up to which a line holds. The more a patch holds,
# the more it costs to go through those before the frame that is wanted; but where most frames are stored whole, one
# starts at the last of these.
_LENGTHS = ((0.06, 16), (0.15, 8), (0.6, 4), (0.95, 8))

_logger = logging.getLogger("rl_ext_core.frames")


def _suiting_length(changes: float, *, seals: bool) -> int:
    """Frames a block.

    :param changes: what a frame takes, as a fraction of its raw size.
    :param seals: whether full blocks are compressed.
    """
    length = next((length for limit, length in _LENGTHS if changes < limit), _LENGTHS[-1][1])
    # All of a sealed block has to be opened to read any of it.
    return max(length // 2, 4) if seals else length


def _is_small(layout: StackLayout) -> bool:
    """Whether frames are too small for patches to be worth it."""
    return layout.frame_bytes < _SMALL_FRAME


@dataclass(frozen=True)
class _Asked:
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
    loss: Loss
    first_layout: StackLayout

    @classmethod
    def checked(
        cls,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        codec: str,
        n_stack: int | None,
        block_length: int | None,
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
    ) -> _Asked:
        """The same, of options.

        :raises InvalidArgumentError: if they exclude each other, or do not fit the observations.
        :raises InvalidTypeError: likewise, because of a type.
        """
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        loss = Loss.asked_for(codec, layouts, max_error=max_error, quality=quality, block_length=block_length)
        return cls(codec, n_stack, block_length, loss, layouts[-1] if n_stack is None else layouts[0])

    @property
    def options(self) -> dict[str, Any]:
        """As plain values."""
        return {"codec": self.codec, "n_stack": self.n_stack, "block_length": self.block_length, **self.loss.options}

    def exact_codec(self, layout: StackLayout) -> str:
        """The codec for frames of which nothing is lost yet."""
        if self.codec != "auto" and not self.loss.is_codec:
            return self.codec
        # Only patches can leave out what is within the bound.
        return "raw" if _is_small(layout) and not self.loss.options else "patch"

    def length(self, changes: float = 0.0) -> int:
        """Frames a block.

        :param changes: what a frame takes, as a fraction of its raw size.
        """
        if self.block_length is not None:
            return self.block_length
        seals = self.codec != "auto" and not self.loss.is_codec and get_codec(self.codec).seals
        return _suiting_length(changes, seals=seals)


def _log_choice(what: str, layout: StackLayout, *, codec: str, block_length: int) -> None:
    """Says how observations are stored from here on."""
    _logger.info(
        "%s of shape %s: %d frames a stack, codec %r, %d frames a block",
        what,
        layout.shape,
        layout.n_stack,
        codec,
        block_length,
    )


def _read(store: FrameStore, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Transitions of all environments, row by row."""
    grid = np.repeat(rows, store.n_envs), np.tile(np.arange(store.n_envs), len(rows))
    shape = (len(grid[0]), *store.layout.shape)
    before, after = (np.empty(shape, dtype=store.layout.dtype) for _ in range(2))
    store.get(*grid, before, after)
    return before, after


def _stored_anew(store: FrameStore, layout: StackLayout, *, codec: str, block_length: int, **loss: int) -> FrameStore:
    """A store of the same transitions in the same places. The store must not have wrapped."""
    anew = store.emptied(layout, codec=codec, block_length=block_length, **loss)
    with anew.taking_the_place_of(store):
        _copy_transitions(store, anew)
    return anew


def _copy_transitions(store: FrameStore, target: FrameStore) -> None:
    """Appends the transitions of a store that has not wrapped to another one."""
    for start in range(0, store.size, _COPIED):
        rows = np.arange(start, min(start + _COPIED, store.size))
        for observations, nexts in zip(
            *(part.reshape(len(rows), store.n_envs, *store.layout.shape) for part in _read(store, rows)), strict=True
        ):
            target.append(observations, nexts)


_LOOK_BACK = 16  # transitions an environment that a layout is found from


class AdaptiveStore:
    """Like :class:`FrameStore`, but layout, codec and block length may be left open.

    They are chosen when the first transitions are seen, looked at again when 2, 4, 8, ... 4096 are stored, and what
    is stored then is stored anew if they have changed.

    One that may be lossy is exact until it knows the layout and has seen enough to choose, and keeps to its choice from
    then on: what is not exact any more cannot be stored anew without being off by more.

    :param capacity: transitions an environment.
    :param n_envs: number of environments.
    :param shape: shape of one observation.
    :param dtype: dtype of the observations.
    :param codec: name of a codec, or ``"auto"``.
    :param n_stack: frames a stack, or None to find it from the data.
    :param block_length: frames a block, a power of two, or None to choose it by what is seen.
    :param max_error: how far off each byte may be; see :class:`FrameStore`.
    :param quality: of JPEG; see :class:`FrameStore`.
    :param max_bytes: see :class:`FrameStore`.
    :param storage_dir: see :class:`FrameStore`. Layout and codec that were found out are found again there.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AdaptiveStore:
        """See :meth:`FrameStore.__new__`."""
        load_kernels(bounded=isinstance(bound := kwargs.get("max_error"), int) and bound > 0)
        store = super().__new__(cls)
        # Held while a store takes the place of another one, whose files are closed then.
        store._lock = threading.RLock()
        return store

    _lock: threading.RLock

    @uninterrupted
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
        max_error: int = 0,
        quality: int = DEFAULT_QUALITY,
        max_bytes: int | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        asked = self._asked = _Asked.checked(
            shape,
            dtype,
            codec=codec,
            n_stack=n_stack,
            block_length=block_length,
            max_error=max_error,
            quality=quality,
        )
        layout = asked.first_layout
        chosen: dict[str, Any] = {
            "layout": layout,
            "codec": asked.exact_codec(layout),
            "block_length": asked.length(),
        }
        folder = None
        if storage_dir is not None:
            given = {"shape": list(map(int, shape)), "dtype": np.dtype(dtype).str, **asked.options}
            options = {"capacity": capacity, "n_envs": n_envs, **given}
            folder = StoreFolder(storage_dir, options, capacity=capacity)
            chosen |= stored_as(folder)
        chosen |= {"capacity": capacity, "n_envs": n_envs}
        self._inner = FrameStore(max_bytes=max_bytes, storage_dir=folder, **chosen)
        self._seen = self._inner.size  # transitions an environment, those that were cleared included

    def __repr__(self) -> str:
        inner = self._inner
        return (
            f"{type(self).__name__}({inner.capacity} x {inner.n_envs} transitions of {inner.layout.shape} "
            f"{inner.layout.dtype}, codec={self._asked.codec!r}, {options_in_words(self._asked.loss.options)})"
        )

    @property
    def lossy(self) -> bool:
        """Whether what comes out may differ from what went in, now or later."""
        return bool(self._asked.loss.options)

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for: codec, stack size, and what may be lost."""
        return {name: value for name, value in self._asked.options.items() if name != "block_length"}

    @property
    def capacity(self) -> int:
        """Rows."""
        return self._inner.capacity

    @property
    def n_envs(self) -> int:
        """Number of environments."""
        return self._inner.n_envs

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

    @property
    def dropped(self) -> int:
        """How many of the oldest transitions were given up; see :attr:`FrameStore.dropped`."""
        return self._inner.dropped

    @property
    def first(self) -> int:
        """The row of the oldest transition held."""
        return self._inner.first

    @property
    def position(self) -> int:
        """The row that the next transition goes to."""
        return self._inner.position

    @property
    def full(self) -> bool:
        """Whether all rows were written."""
        return self._inner.full

    @property
    def recovered(self) -> Recovered | None:
        """What was found in ``storage_dir``; None where nothing was."""
        return self._inner.recovered

    @uninterrupted
    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of the caller's own with one row a transition; see :meth:`FrameStore.rows`."""
        with self._lock:
            return self._inner.rows(name, shape, dtype)

    @uninterrupted
    def newest_row_changed(self) -> None:
        """To be called where the newest row was written to once more; see :meth:`FrameStore.newest_row_changed`."""
        with self._lock:
            self._inner.newest_row_changed()

    @uninterrupted
    def drop_oldest(self, count: int) -> None:
        """Gives up the oldest transitions; see :meth:`FrameStore.drop_oldest`."""
        with self._lock:
            self._inner.drop_oldest(count)

    @uninterrupted
    def forget_newest(self, count: int) -> None:
        """Takes the newest transitions back; see :meth:`FrameStore.forget_newest`."""
        with self._lock:
            self._inner.forget_newest(count)

    @uninterrupted
    def flush(self) -> None:
        """Makes sure that what was added survives the process; see :meth:`FrameStore.flush`."""
        with self._lock:
            self._inner.flush()

    @uninterrupted
    def close(self) -> None:
        """Writes what is not written yet; see :meth:`FrameStore.close`."""
        with self._lock:
            self._inner.close()

    @uninterrupted
    def rest(self) -> None:
        """Gives back the memory that only transitions to come need; see :meth:`FrameStore.rest`."""
        with self._lock:
            self._inner.rest()

    @uninterrupted
    def clear(self) -> None:
        """Forgets all transitions; what was found out is kept."""
        with self._lock:
            self._inner.clear()

    @uninterrupted
    def append(
        self,
        observations: npt.NDArray[np.generic],
        next_observations: npt.NDArray[np.generic],
        *,
        row: int | None = None,
    ) -> None:
        """Stores one transition of each environment; see :meth:`FrameStore.append`."""
        with self._lock:
            self._inner._append(observations, next_observations, row)
            self._count()

    @uninterrupted
    def stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.int64]:
        """The part of :meth:`append` that may fail; see :meth:`FrameStore.stage`."""
        with self._lock:
            return self._inner.stage(observations, next_observations)

    @uninterrupted
    def commit(self, staged: npt.NDArray[np.int64], *, row: int | None = None) -> None:
        """Makes what was staged a transition; see :meth:`FrameStore.commit`."""
        with self._lock:
            self._inner.commit(staged, row=row)
            self._count()

    def _count(self) -> None:
        self._seen += 1
        # A power of two. What a store has found out holds for the rollouts that follow in it.
        if self._seen <= LAST_CHECK and self._seen & (self._seen - 1) == 0 and self._in_order:
            self._adapt()

    @property
    def _in_order(self) -> bool:
        """Whether the oldest transition is in the first row."""
        return self._inner.position in (0, self._inner.size) and not self._inner.dropped

    @uninterrupted
    def get(
        self,
        rows: npt.NDArray[np.int64],
        envs: npt.NDArray[np.int64],
        observations: npt.NDArray[np.generic] | None,
        next_observations: npt.NDArray[np.generic] | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Writes a batch of transitions into the arrays given; see :meth:`FrameStore.get`."""
        with self._lock:
            self._inner.get(rows, envs, observations, next_observations, num_threads=num_threads)

    @uninterrupted
    def save(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes the store to a file, without another copy in memory; see :meth:`FrameStore.save`."""
        save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | BinaryIO) -> AdaptiveStore:
        """Reads what :meth:`save` wrote; see :meth:`FrameStore.load`."""
        return load(cls, file)

    def __copy__(self) -> AdaptiveStore:
        return copy.deepcopy(self)  # no two stores may write to the same memory

    @uninterrupted
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_and_held(self._lock, lambda: super(AdaptiveStore, self).__reduce_ex__(protocol))

    def __getstate__(self) -> dict[str, Any]:
        chosen = self._asked.options
        return {"format": FORMAT_VERSION, **chosen, "checksum": checksum(chosen), "store": self._inner}

    def __setstate__(self, state: Any) -> None:
        """Becomes the store that was written.

        :raises CorruptFileError: if the state is damaged, or of a later format.
        """
        check_format(state)
        options = [name for name in ("max_error", "quality") if name in state]
        chosen = {name: state.get(name) for name in ("codec", "n_stack", "block_length", *options)}
        if checksum(chosen) != state.get("checksum") or not isinstance(state.get("store"), FrameStore):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        self._inner = state["store"]
        self._asked = _Asked.checked(self.layout.shape, self.layout.dtype, **chosen)
        self._seen = self._inner.size

    def _adapt(self) -> None:
        # The transition is stored, and what is there is complete: it stays as it is.
        with contextlib.suppress(MemoryError, StorageError):
            self._look_again()

    def _look_again(self) -> None:
        inner = self._inner
        if inner.lossy:
            return
        found = inner.layout if self._asked.n_stack is not None else self._find_layout()
        layout = found or inner.layout
        codec, length = inner.codec.name, inner.block_length
        if layout != inner.layout:
            codec, length = self._asked.exact_codec(layout), self._asked.length()
        elif inner.size >= JUDGE_AFTER:
            changes = inner.changed_fraction
            length = self._asked.length(changes)
            if self._asked.codec == "auto" and changes > ALL_CHANGES:
                codec = "raw"
        loss: dict[str, int] = {}
        if self._may_lose(found):
            layout = self._asked.loss.layout_like(layout)
            codec, length, loss = self._lossy_choice(layout)
        if (layout, codec, length) == (inner.layout, inner.codec.name, inner.block_length) and not loss:
            return
        self._inner = _stored_anew(inner, layout, codec=codec, block_length=length, **loss)
        _log_choice("observations", layout, codec=codec, block_length=length)

    def _may_lose(self, found: StackLayout | None) -> bool:
        """Whether enough is known to give exactness up, after which nothing is found out any more."""
        half_full = 2 * self._inner.size >= min(2 * JUDGE_AFTER, self._inner.capacity)
        known = found is not None or self._seen >= LAST_CHECK
        return bool(self._asked.loss.options) and known and half_full and self._seen >= JUDGE_AFTER

    def _lossy_choice(self, layout: StackLayout) -> tuple[str, int, dict[str, int]]:
        """Codec, block length, and what is lost."""
        loss, inner = self._asked.loss.options, self._inner
        if self._asked.loss.is_codec:
            return self._asked.codec, 1, loss
        codec = self._asked.exact_codec(layout)
        if not get_codec(codec).patches:
            return codec, self._asked.length(), {}
        bound = self._asked.loss.options["max_error"]
        trial = FrameStore(
            inner.size, inner.n_envs, layout, codec=codec, block_length=self._asked.length(), max_error=bound
        )
        _copy_transitions(inner, trial)
        return codec, self._asked.length(trial.changed_fraction), loss

    def _find_layout(self) -> StackLayout | None:
        inner = self._inner
        before, after = _read(inner, np.arange(max(inner.size - _LOOK_BACK, 0), inner.size))
        described = inner.layout.shape, inner.layout.dtype
        # In a rollout there are no next observations but those of the row below.
        below = before[: -inner.n_envs], before[inner.n_envs :]
        return find_layout(*described, before, after) or find_layout(*described, *below)


_LARGE = 1024  # bytes of a frame, beside which a block's bookkeeping is little


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
    :param file: a file to keep it in; see :class:`FramePool`.
    :raises MissingDependencyError: if numba is not installed, or what the codec needs.
    """

    @uninterrupted
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
        file: RegionFile | None = None,
    ) -> None:
        self._n_handles, self._max_error = n_handles, max_error
        self.shared = False
        self._in_file = file is not None
        self._next_check = 2
        self._judged = False
        self._asked = _Asked.checked(
            shape,
            dtype,
            codec=codec,
            n_stack=n_stack,
            block_length=block_length,
            max_error=max_error,
            quality=quality,
        )
        self._pool = _pool_class()(n_handles, file=file, **self._first_choice(self._asked.first_layout))

    def _first_choice(self, layout: StackLayout) -> dict[str, Any]:
        """How stacks of that layout are stored before more is known."""
        if self._asked.loss.is_codec:
            # From the first one on: what is read must not change later, and other layouts are found by what is given.
            layout = self._asked.loss.layout_like(layout)
            return {"layout": layout, "codec": self._asked.codec, "block_length": 1, **self._asked.loss.options}
        # Exact at first: how frames are stacked could not be seen otherwise.
        return {"layout": layout, "codec": self._asked.exact_codec(layout), "block_length": self._asked.length(0.0)}

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

    @uninterrupted
    def clear(self) -> None:
        """Forgets all stacks; what was found out is kept."""
        self._pool.clear()

    @uninterrupted
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
        if fresh and self._asked.n_stack is None:
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
        noise = self._asked.codec == "auto" and changes > ALL_CHANGES and not self._max_error
        codec, length = "raw" if noise else pool.codec.name, self._asked.length(changes)
        if noise and self._asked.block_length is None and pool.layout.frame_bytes >= _LARGE:
            length = 1  # nothing is shared: those that stay longest would keep others
        if (codec, length) == (pool.codec.name, pool.block_length) or self._judged:
            return None
        self._judged = True  # once: in other blocks, changes are other ones
        return {"codec": codec, "block_length": length, "max_error": self._max_error}

    @uninterrupted
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
        if self._asked.n_stack is None:
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
        anew = _pool_class()(self._n_handles, **{"layout": layout, **chosen})
        parts = []
        for start in range(0, len(handles), _COPIED):
            part = slice(start, start + _COPIED)
            nexts = None if next_handles is None else next_handles[part]
            parts.append(anew.put(*self._decoded(handles[part], nexts)))
        self._pool = anew
        _log_choice("stacks", layout, codec=anew.codec.name, block_length=anew.block_length)
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

    @uninterrupted
    def release(self, handles: Handles) -> None:
        """Gives stacks up; see :meth:`FramePool.release`."""
        self._pool.release(handles)

    @uninterrupted
    def recover(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Makes a pool that was found again in a file whole; see ``recovery``.

        :param handles: all that are held.
        :return: which of them can be read; the others are forgotten.
        """
        from rl_ext_core.frames.recovery import recover

        if self._pool.interrupted:
            self._pool.become(**self._first_choice(self._asked.first_layout))
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
        return self._pool.described()

    @uninterrupted
    def restore(self, description: Any) -> None:
        """Becomes the pool that :meth:`state` described.

        :raises CorruptFileError: if it is damaged, or of a later format.
        :raises InvalidArgumentError: if it loses more than this pool may.
        """
        pool = _pool_class().restored(description, self._n_handles)
        if pool.max_error > self._max_error or (
            pool.codec.lossy and self._asked.loss.options != {"quality": pool.quality}
        ):
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


def _pool_class() -> type[FramePool]:
    check_numba("A store of frames")
    from rl_ext_core.frames.pool import FramePool  # it loads numba

    return FramePool
