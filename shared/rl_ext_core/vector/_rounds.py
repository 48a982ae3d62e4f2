"""Environments that share workers: which worker has which, and calls of single ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rl_ext_core.vector import _messages

__all__ = ["call_in_rounds", "shares"]


def shares(num_envs: int, num_workers: int) -> list[tuple[int, int]]:
    """Give the first environment of each worker and the one behind its last: in order, and as evenly as that goes."""
    return list(itertools.pairwise(round(worker * num_envs / num_workers) for worker in range(num_workers + 1)))


def call_in_rounds(pool: Any, numbers: Sequence[int], name: str, data: Any) -> list[Any]:
    """Do :meth:`Pool.call`: one command a worker at a time, since while it writes a large answer, it reads no other."""
    pool.settle()
    results: list[Any] = [None] * len(numbers)
    raised: Exception | None = None
    pending = dict(enumerate(numbers))
    while pending:
        round_ = {pool.of_env[pending[place]].number: place for place in reversed(pending)}
        for worker, place in round_.items():
            seat = pool.seats[worker]
            pool.send(seat, name, (pending.pop(place) - seat.first, data))
        pool.wait_for_answers()
        for worker, place in round_.items():
            results[place] = pool.seats[worker].said
            if isinstance(results[place], _messages.Raised):
                raised = raised or results[place].error
    if raised is not None:
        raise raised
    return results
