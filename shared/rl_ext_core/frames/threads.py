"""Threads that decode parts of a batch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rl_ext_core._system import after_fork

_PART = 16  # items per call; few, so that a thread that loses its core delays the batch by one part only

# Maximum number of threads, and their executor, which has not started any yet.
_executor: tuple[int, ThreadPoolExecutor] = 0, ThreadPoolExecutor(1)
_executor_lock = threading.Lock()


def _reset_threads() -> None:
    """Replace the thread pool after a fork."""
    global _executor, _executor_lock
    _executor, _executor_lock = (0, ThreadPoolExecutor(1)), threading.Lock()


after_fork(_reset_threads)  # threads do not survive a fork


def _submit(work: Callable[[], None], times: int) -> list[Future[None]]:
    """Call ``work`` in several threads. The thread pool grows to the largest number ever requested."""
    global _executor
    with _executor_lock:
        size, pool = _executor
        if times > size:
            pool.shutdown(wait=False)  # its threads end after their last task
            _executor = times, (pool := ThreadPoolExecutor(times, thread_name_prefix="rl-ext-frames"))
        return [pool.submit(work) for _ in range(times)]


def run_in_threads(work: Callable[[int, int], None], n_items: int, *, num_threads: int) -> None:
    """Call ``work(start, stop)`` for parts that together cover ``range(n_items)``.

    The calling thread takes part. It processes small batches alone.

    :param work: Function of the start and the stop of a part.
    :param n_items: Number of items.
    :param num_threads: Maximum number of threads.
    """
    helpers = min(num_threads, n_items // (2 * _PART)) - 1
    if helpers < 1:
        work(0, n_items)
        return
    parts = itertools.count()  # next() on it is atomic under the GIL

    def process_parts() -> None:
        """Call ``work`` for parts until none is left."""
        while (start := next(parts) * _PART) < n_items:
            work(start, min(start + _PART, n_items))

    futures = _submit(process_parts, helpers)
    try:
        process_parts()
    finally:
        for future in futures:
            if not future.cancel():  # a future that never started needs no waiting
                future.result()
