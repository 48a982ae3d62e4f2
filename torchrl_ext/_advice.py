"""Warnings with figures: workers that will not fit into memory, and workers that cost more time than they save."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

from rl_ext_core import resources

__all__ = ["SpeedCheck", "warn_of_memory"]

_log = logging.getLogger("torchrl_ext")

# The first steps of workers fault their pages in.
_SKIPPED, _TIMED = 10, 40
# Below this, noise decides.
_SLOWER = 1.2


def warn_of_memory(measured: Sequence[int | None], num_workers: int) -> None:
    """Warn where the workers would need more memory than there is.

    :param measured: what some of the workers take for themselves, in bytes, as far as it is known
    """
    private_bytes = max((size for size in measured if size is not None), default=0)
    if sentence := resources.shortage(private_bytes, num_workers):
        _log.warning("%s", sentence)


class SpeedCheck:
    """Times the first steps, and warns once if the environments one after the other would be faster.

    :param step_seconds: what a step of each environment takes in one process; None: not known
    """

    def __init__(self, step_seconds: Sequence[float | None], num_workers: int) -> None:
        self._serial = None if None in step_seconds else sum(seconds or 0.0 for seconds in step_seconds)
        self._num_workers = num_workers
        self._taken: list[float] = []
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._serial is None or kind is not None or len(self._taken) >= _SKIPPED + _TIMED:
            return
        self._taken.append(time.perf_counter() - self._begin)
        if len(self._taken) == _SKIPPED + _TIMED:
            self._judge(statistics.median(self._taken[_SKIPPED:]), self._serial)

    def _judge(self, parallel: float, serial: float) -> None:
        if parallel > _SLOWER * serial:
            _log.warning(
                "these %d workers take %.2f ms for a step that takes about %.2f ms in one process (both measured): "
                "SerialEnv(%d, as_factory(env)) is faster",
                self._num_workers,
                parallel * 1e3,
                serial * 1e3,
                self._num_workers,
            )
