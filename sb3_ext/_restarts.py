"""A new worker in the place of one that has failed: the episodes it had are truncated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector._worker import DONE, TRUNCATED

if TYPE_CHECKING:
    from rl_ext_core.vector._seat import Seat
    from rl_ext_core.vector.pool import Pool
    from sb3_ext.timings import Timings

__all__ = ["Restarts"]

_log = logging.getLogger("sb3_ext")


class Restarts:
    """Replaces workers, up to a limit.

    :param pool: of the workers
    :param limit: how many times
    :param timings: where it is counted
    """

    def __init__(self, pool: Pool, limit: int, timings: Timings) -> None:
        self._pool, self._limit, self._timings = pool, limit, timings
        self._last: list[np.ndarray[Any, Any]] = []

    def remember(self, observations: Sequence[np.ndarray[Any, Any]]) -> None:
        """Keep what is returned: the last that anybody has seen of an episode, should its worker fail."""
        self._last = [array.copy() for array in observations]

    def replace(self, seat: Seat, failure: WorkerError) -> list[tuple[dict[str, Any], dict[str, Any], None]]:
        """Put a new worker in, with its environments reset.

        :param seat: of the worker that has failed
        :param failure: what it died of
        :return: what the worker would have answered: its environments' episodes are truncated
        :raises WorkerError: the limit is reached; the other workers are gone then as well
        """
        pool, first = self._pool, failure
        while True:
            if self._timings.restarts >= self._limit:
                pool.end(failure)
                raise failure
            self._timings.restarts += 1
            _log.warning("%s\n(restart %d of %d)", failure, self._timings.restarts, self._limit)
            try:
                infos = pool.restart(seat, first)
                break
            except WorkerError as again:
                failure = again
            finally:
                # Ctrl-C may come at any time: then all of this is done again.
                seat.said = first
        rows = slice(seat.first, seat.last)
        pool.arrays["reward"][rows], pool.arrays["reward kind"][rows] = 0.0, 0
        pool.arrays["flags"][rows] = DONE | TRUNCATED
        answer = [
            ({"terminal_observation": self._last_of(index), "worker_error": str(first)}, info, None)
            for index, info in enumerate(infos, seat.first)
        ]
        pool.replaced(seat, answer)
        return answer

    def _last_of(self, index: int) -> Any:
        # Nothing was returned yet where the first reset fails: then nobody reads this.
        return self._pool.layout.joined([array[index].copy() for array in self._last]) if self._last else None
