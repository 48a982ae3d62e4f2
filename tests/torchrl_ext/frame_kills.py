"""Functions of processes that add to a storage until they are killed.

A fork server imports this module.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from types import FrameType
from typing import Any

import torch

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


class KillAtLine:
    """Trace function that kills this process after a number of lines of the storage's code.

    :param line: number of lines
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in _FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def add_and_be_killed(buffer: Any, number: int, batch: int, line: int) -> None:
    torch.set_num_threads(1)
    data = make_batch(number, batch)
    sys.settrace(KillAtLine(line))
    buffer.extend(data)


all_transitions()
