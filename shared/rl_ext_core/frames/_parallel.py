"""Running parts of a batch in threads. The kernels release the GIL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_PART = 16  # small parts, taken as they come, so that a thread that lost its core delays the batch by one part only
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(num_threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), num_threads)  # threads do not survive a fork
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(num_threads, thread_name_prefix="rl-ext-frames")
    return _pools[key]


def run_parts(work: Callable[[int, int], None], n_items: int, *, num_threads: int) -> None:
    """Calls ``work(start, stop)`` for parts that together cover ``range(n_items)``.

    The calling thread takes part; a batch too small to share runs in it alone.
    """
    helpers = min(num_threads, n_items // (2 * _PART)) - 1
    if helpers < 1:
        work(0, n_items)
        return
    parts = itertools.count()  # next() on it is atomic under the GIL

    def take() -> None:
        while (start := next(parts) * _PART) < n_items:
            work(start, min(start + _PART, n_items))

    futures = [_pool(helpers).submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        for future in futures:
            if not future.cancel():  # one that never got to run has nothing to wait for
                future.result()
