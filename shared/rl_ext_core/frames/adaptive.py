"""A frame store that finds out how observations are stacked and which codec suits them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.frames._anew import copy_transitions, read, stored_anew
from rl_ext_core.frames._choice import ALL_CHANGES, JUDGE_AFTER, LAST_CHECK, is_small, log_choice, suiting_length
from rl_ext_core.frames._format import EXTENDED_FORMAT_VERSION, FORMAT_VERSION, check_format, checksum
from rl_ext_core.frames._loss import Loss, options_in_words
from rl_ext_core.frames._saving import load, save
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, get_codec
from rl_ext_core.frames.disk._opening import open_folder
from rl_ext_core.frames.disk._recovery import Recovered
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout
from rl_ext_core.frames.store import FrameStore

_logger = logging.getLogger("rl_ext_core.frames")

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
        self._codec, self._n_stack, self._block_length = codec, n_stack, block_length
        layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
        self._loss = Loss.asked_for(codec, layouts, max_error=max_error, quality=quality, block_length=block_length)
        layout = layouts[-1] if n_stack is None else layouts[0]
        chosen: dict[str, Any] = {
            "layout": layout,
            "codec": self._first_codec(layout),
            "block_length": self._length(),
        }
        opening = None
        if storage_dir is not None:
            given = {"shape": list(map(int, shape)), "dtype": np.dtype(dtype).str, "codec": codec, "n_stack": n_stack}
            options = {"capacity": capacity, "n_envs": n_envs, **given, "block_length": block_length}
            options |= self._loss.options
            opening = open_folder(storage_dir, options, capacity=capacity)
            chosen |= opening.settings()
        self._inner = FrameStore(capacity, n_envs, max_bytes=max_bytes, storage_dir=opening, **chosen)
        self._seen = self._inner.size  # transitions an environment, those that were cleared included

    def _first_codec(self, layout: StackLayout) -> str:
        if self._codec != "auto" and not self._loss.is_codec:
            return self._codec
        if importlib.util.find_spec("numba") is None:
            _say_once_that_numba_is_missing()
            return "raw"
        return "raw" if is_small(layout) else "patch"

    def _length(self, changes: float = 0.0) -> int:
        if self._block_length is not None:
            return self._block_length
        seals = self._codec != "auto" and not self._loss.is_codec and get_codec(self._codec).seals
        return suiting_length(changes, seals=seals)

    def __repr__(self) -> str:
        inner = self._inner
        return (
            f"{type(self).__name__}({inner.capacity} x {inner.n_envs} transitions of {inner.layout.shape} "
            f"{inner.layout.dtype}, codec={self._codec!r}, {options_in_words(self._loss.options)})"
        )

    @property
    def lossy(self) -> bool:
        """Whether what comes out may differ from what went in, now or later."""
        return bool(self._loss.options)

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for: codec, stack size, and what may be lost."""
        return {"codec": self._codec, "n_stack": self._n_stack, **self._loss.options}

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

    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of the caller's own with one row a transition; see :meth:`FrameStore.rows`."""
        return self._inner.rows(name, shape, dtype)

    def newest_row_changed(self) -> None:
        """To be called where the newest row was written to once more; see :meth:`FrameStore.newest_row_changed`."""
        self._inner.newest_row_changed()

    def drop_oldest(self, count: int) -> None:
        """Gives up the oldest transitions; see :meth:`FrameStore.drop_oldest`."""
        self._inner.drop_oldest(count)

    def forget_newest(self, count: int) -> None:
        """Takes the newest transitions back; see :meth:`FrameStore.forget_newest`."""
        self._inner.forget_newest(count)

    def flush(self) -> None:
        """Makes sure that what was added survives the process; see :meth:`FrameStore.flush`."""
        self._inner.flush()

    def close(self) -> None:
        """Writes what is not written yet; see :meth:`FrameStore.close`."""
        self._inner.close()

    def rest(self) -> None:
        """Gives back the memory that only transitions to come need; see :meth:`FrameStore.rest`."""
        self._inner.rest()

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
        self._inner.append(observations, next_observations, row=row)
        self._count()

    def stage(
        self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]
    ) -> npt.NDArray[np.uint64]:
        """The part of :meth:`append` that may fail; see :meth:`FrameStore.stage`."""
        return self._inner.stage(observations, next_observations)

    def commit(self, staged: npt.NDArray[np.uint64], *, row: int | None = None) -> None:
        """Makes what was staged a transition; see :meth:`FrameStore.commit`."""
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
        self._inner.get(rows, envs, observations, next_observations, num_threads=num_threads)

    def save(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes the store to a file, without another copy in memory; see :meth:`FrameStore.save`."""
        save(self, file)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | BinaryIO) -> AdaptiveStore:
        """Reads what :meth:`save` wrote; see :meth:`FrameStore.load`."""
        return load(cls, file)

    def __getstate__(self) -> dict[str, Any]:
        chosen = {"codec": self._codec, "n_stack": self._n_stack, "block_length": self._block_length}
        chosen |= self._loss.options
        version = EXTENDED_FORMAT_VERSION if self._loss.options else FORMAT_VERSION
        return {"format": version, **chosen, "checksum": checksum(chosen), "store": self._inner}

    def __setstate__(self, state: Any) -> None:
        """Becomes the store that was written.

        :raises CorruptFileError: if the state is damaged, or of a later format.
        """
        check_format(state)
        options = [name for name in ("max_error", "quality") if name in state]
        chosen = {name: state.get(name) for name in ("codec", "n_stack", "block_length", *options)}
        if checksum(chosen) != state.get("checksum") or not isinstance(state.get("store"), FrameStore):
            raise CorruptFileError("the frame store is damaged: its checksum does not match its contents")
        self._codec, self._n_stack, self._block_length = list(chosen.values())[:3]
        self._inner = state["store"]
        layouts = list(candidate_layouts(self.layout.shape, self.layout.dtype, n_stack=self._n_stack))
        loss = {"max_error": 0, "quality": DEFAULT_QUALITY, **{name: chosen[name] for name in options}}
        self._loss = Loss.asked_for(self._codec, layouts, block_length=self._block_length, **loss)
        self._seen = self._inner.size

    def _adapt(self) -> None:
        # The transition is stored, and what is there is complete: it stays as it is.
        with contextlib.suppress(MemoryError, StorageError):
            self._look_again()

    def _look_again(self) -> None:
        inner = self._inner
        if inner.lossy:
            return
        found = inner.layout if self._n_stack is not None else self._find_layout()
        layout = found or inner.layout
        codec, length = inner.codec.name, inner.block_length
        if layout != inner.layout:
            codec, length = self._first_codec(layout), self._length()
        elif inner.size >= JUDGE_AFTER:
            changes = inner.changed_fraction
            length = self._length(changes)
            if self._codec == "auto" and changes > ALL_CHANGES:
                codec = "raw"
        loss: dict[str, int] = {}
        if self._may_lose(found):
            layout = self._loss.layout_like(layout)
            codec, length, loss = self._lossy_choice(layout)
        if (layout, codec, length) == (inner.layout, inner.codec.name, inner.block_length) and not loss:
            return
        self._inner = stored_anew(inner, layout, codec=codec, block_length=length, **loss)
        log_choice("observations", layout, codec=codec, block_length=length)

    def _may_lose(self, found: StackLayout | None) -> bool:
        """Whether enough is known to give exactness up, after which nothing is found out any more."""
        half_full = 2 * self._inner.size >= min(2 * JUDGE_AFTER, self._inner.capacity)
        known = found is not None or self._seen >= LAST_CHECK
        return bool(self._loss.options) and known and half_full and self._seen >= JUDGE_AFTER

    def _lossy_choice(self, layout: StackLayout) -> tuple[str, int, dict[str, int]]:
        """Codec, block length, and what is lost."""
        loss, inner = self._loss.options, self._inner
        if self._loss.is_codec:
            return self._codec, 1, loss
        codec = self._first_codec(layout)
        if not get_codec(codec).patches:
            return codec, self._length(), {}
        bound = self._loss.options["max_error"]
        trial = FrameStore(inner.size, inner.n_envs, layout, codec=codec, block_length=self._length(), max_error=bound)
        copy_transitions(inner, trial)
        return codec, self._length(trial.changed_fraction), loss

    def _find_layout(self) -> StackLayout | None:
        inner = self._inner
        before, after = read(inner, np.arange(max(inner.size - _LOOK_BACK, 0), inner.size))
        described = inner.layout.shape, inner.layout.dtype
        # In a rollout there are no next observations but those of the row below.
        below = before[: -inner.n_envs], before[inner.n_envs :]
        return find_layout(*described, before, after) or find_layout(*described, *below)


@functools.cache
def _say_once_that_numba_is_missing() -> None:
    _logger.warning(
        "codec='auto' stores frames as they are, because numba is not installed: only what frames share is saved. "
        'For compression: pip install "rl-ext[frames]"'
    )
