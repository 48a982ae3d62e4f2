"""Threads that decode parts of a batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rl_ext_core._system import after_fork

_PART = 16  # items per call; few, so that a thread that loses its core delays the batch by one part only
_executor: ThreadPoolExecutor | None = None


def _drop_executor() -> None:
    """Drop the thread pool after a fork, because threads do not survive a fork."""
    global _executor
    _executor = None


after_fork(_drop_executor)


def run_in_threads(work: Callable[[int, int], None], n_items: int, *, num_threads: int) -> None:
    """Call ``work(start, stop)`` for parts that together cover ``range(n_items)``.

    The calling thread takes part. It processes small batches alone.

    :param work: Function of the start and the stop of a part.
    :param n_items: Number of items.
    :param num_threads: Maximum number of threads.
    """
    global _executor
    helpers = min(num_threads, n_items // (2 * _PART)) - 1
    if helpers < 1:
        work(0, n_items)
        return
    parts = itertools.count()  # next() on it is atomic under the GIL

    def process_parts() -> None:
        while (start := next(parts) * _PART) < n_items:
            work(start, min(start + _PART, n_items))

    if _executor is None:  # it starts a thread only if none of its threads is idle
        _executor = ThreadPoolExecutor(max(os.cpu_count() or 1, num_threads), thread_name_prefix="rl-ext-frames")
    futures = [_executor.submit(process_parts) for _ in range(helpers)]
    try:
        process_parts()
    finally:
        for future in futures:
            if not future.cancel():  # a future that never started needs no waiting
                future.result()
