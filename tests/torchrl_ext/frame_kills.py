"""Functions of processes that add to a storage until they are killed.

A fork server imports this module.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

import torch

from tests.interrupts import interrupt_at
from tests.torchrl_ext.frame_data import Videos, count_elements

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("inner", "vector")]
_FILES = ("torchrl_ext/", "rl_ext_core/frames", "torchrl/data/replay_buffers", "multiprocessing/sharedctypes")


@functools.cache
def all_transitions() -> Any:
    return Videos(2, seed=3).collect(300).reshape(-1)


@functools.cache
def all_hashes() -> list[str]:
    return [next(iter(count_elements(all_transitions()[i : i + 1], KEYS))) for i in range(len(all_transitions()))]


def batch_slice(number: int, size: int) -> slice:
    start = number * size % (len(all_transitions()) - size)
    return slice(start, start + size)


def make_batch(number: int, size: int) -> Any:
    return all_transitions()[batch_slice(number, size)].clone()


def add_until_killed(buffer: Any, n_complete: Any, batch: int) -> None:
    """Add batches until the process is killed, and count complete ones in ``n_complete``."""
    torch.set_num_threads(1)
    while True:
        buffer.extend(make_batch(n_complete.value, batch))
        n_complete.value += 1


def add_and_be_killed(buffer: Any, number: int, batch: int, at: int) -> None:
    """Add a batch, and kill this process after a number of steps of the storage's code."""
    torch.set_num_threads(1)
    data = make_batch(number, batch)
    interrupt_at(lambda: buffer.extend(data), at, code_paths=_FILES, number=signal.SIGKILL)


all_transitions()
