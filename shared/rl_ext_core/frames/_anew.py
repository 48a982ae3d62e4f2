"""Storing the transitions of a frame store anew, in another way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.store import FrameStore

_COPY_ROWS = 64  # transitions an environment that are copied at a time


def read(store: FrameStore, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Transitions of all environments, row by row."""
    grid = np.repeat(rows, store.n_envs), np.tile(np.arange(store.n_envs), len(rows))
    shape = (len(grid[0]), *store.layout.shape)
    before, after = (np.empty(shape, dtype=store.layout.dtype) for _ in range(2))
    store.get(*grid, before, after)
    return before, after


def stored_anew(store: FrameStore, layout: StackLayout, *, codec: str, block_length: int, **loss: int) -> FrameStore:
    """A store of the same transitions in the same places. The store must not have wrapped."""
    anew = store.emptied(layout, codec=codec, block_length=block_length, **loss)
    with anew.taking_the_place_of(store):
        copy_transitions(store, anew)
    return anew


def copy_transitions(store: FrameStore, target: FrameStore) -> None:
    """Appends the transitions of a store that has not wrapped to another one."""
    for start in range(0, store.size, _COPY_ROWS):
        rows = np.arange(start, min(start + _COPY_ROWS, store.size))
        for observations, nexts in zip(
            *(part.reshape(len(rows), store.n_envs, *store.layout.shape) for part in read(store, rows)), strict=True
        ):
            target.append(observations, nexts)
