"""Making a frame pool whole again that a process left behind, from what is sure: the handles, and what they lead to.

Everything else is found out anew: who uses what, which pages are free. Blocks that were being filled become full ones
of as many frames as are needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import CorruptFileError
from rl_ext_core.frames import _pool_state as state
from rl_ext_core.frames._pool_checks import check_places, check_rows
from rl_ext_core.frames._pool_scan import close_open, count_users, mark_pages
from rl_ext_core.frames._pool_state import BLOCKS, PAGES, STREAMS, USERS
from rl_ext_core.frames.pool import FramePool, Handles


def recover(pool: FramePool, handles: Handles) -> npt.NDArray[np.bool_]:
    """Makes a pool whole that holds these stacks and no others.

    :param handles: (n,).
    :return: (n,) which of them can be read; the others are forgotten.
    """
    pool.refresh()
    arrays, p, head = pool._arrays, pool._pool, pool._pool.head
    _check_numbers(pool)
    n_blocks = int(head[BLOCKS])
    intact, newest_places = _found_users(pool, handles)
    head[state.FREE_PAGES] = 0
    close_open(p, pool._geometry, newest_places)
    used = np.zeros(int(head[PAGES]), dtype=np.bool_)
    mark_pages(p, used)
    _set_free(arrays["free_pages"], head, state.FREE_PAGES, ~used)
    _set_free(p.free_blocks, head, state.FREE_BLOCKS, np.r_[False, p.blocks[1:n_blocks, USERS] == 0])
    live = p.blocks[1:n_blocks][p.blocks[1:n_blocks, USERS] > 0]
    n_references = int(head[state.REFERENCES])
    references = live[:, state.REFERENCE] if pool.codec.patches else live[:0, 0]
    p.users[:n_references] = np.bincount(references, minlength=n_references)[:n_references]
    _set_free(p.free_references, head, state.FREE_REFERENCES, p.users[:n_references] == 0)
    head[state.RECENT : state.RECENT + state.N_RECENT] = -1
    head[STREAMS] = head[state.NEWEST_STREAM] = head[state.UNSEALED] = 0
    head[state.HELD] = int(intact.sum())
    pool.distrust()
    return intact


def _check_numbers(pool: FramePool) -> None:
    head, sizes = pool._pool.head, pool._sizes
    limits = {BLOCKS: sizes.blocks, PAGES: sizes.pages, state.REFERENCES: sizes.references}
    if any(not 0 <= head[field] <= limit for field, limit in limits.items()):
        raise CorruptFileError(f"{pool._region.path} is damaged: it says that it holds more than it can")


def _found_users(pool: FramePool, handles: Handles) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Counts who uses which blocks; says which handles lead to blocks that can be relied on, and how far these count.

    In memory all can: other processes wrote them.
    """
    p, geometry = pool._pool, pool._geometry
    n_blocks = int(p.head[BLOCKS])
    good = np.ones(n_blocks, dtype=np.bool_)
    intact = np.zeros(len(handles), dtype=np.bool_)
    in_file = pool._region.path is not None
    if in_file:
        check_rows(p, geometry, good)
    while True:
        p.blocks[:n_blocks, USERS] = 0
        newest_places = np.full(n_blocks, -1, dtype=np.int64)
        count_users(p, handles, geometry, good, intact, newest_places)
        used = np.zeros(int(p.head[PAGES]), dtype=np.bool_)
        if not in_file or not check_places(p, geometry, newest_places, good, used):
            return intact, newest_places


def _set_free(
    target: npt.NDArray[np.uint32], head: npt.NDArray[np.int64], field: int, free: npt.NDArray[np.bool_]
) -> None:
    numbers = np.flatnonzero(free)[::-1]
    target[: len(numbers)] = numbers
    head[field] = len(numbers)
