"""Processes that add to a storage until they are killed. A fork server imports this once."""

from __future__ import annotations

import functools
import os
import signal
import sys
from types import FrameType
from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer

from tests.torchrl_ext.frame_data import Videos, count_elements
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("inner", "vector")]
_FILES = ("torchrl_ext/", "rl_ext_core/frames", "torchrl/data/replay_buffers", "multiprocessing/sharedctypes")


@functools.cache
def all_transitions() -> Any:
    """All transitions that are ever added."""
    return Videos(2, seed=3).collect(300).reshape(-1)


@functools.cache
def all_hashes() -> list[str]:
    """What each of them holds."""
    return [next(iter(count_elements(all_transitions()[i : i + 1], KEYS))) for i in range(len(all_transitions()))]


def batch_slice(number: int, size: int) -> slice:
    """The transitions that are added as the ``number``-th batch."""
    start = number * size % (len(all_transitions()) - size)
    return slice(start, start + size)


def make_batch(number: int, size: int) -> Any:
    """That batch."""
    return all_transitions()[batch_slice(number, size)].clone()


def add_until_killed(buffer: Any, n_complete: Any, batch: int) -> None:
    """Counts the batches that are complete."""
    torch.set_num_threads(1)
    while True:
        buffer.extend(make_batch(n_complete.value, batch))
        n_complete.value += 1


def open_folder(folder: Any, size: int, **options: Any) -> Any:
    """A buffer in files."""
    return TensorDictReplayBuffer(storage=FrameStorage(size, storage_dir=folder, **options), batch_size=16)


class KillAtLine:
    """Kills this process when so many lines of the storage's code were executed.

    :param line: how many.
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
    """Adds a batch and is killed meanwhile."""
    torch.set_num_threads(1)
    data = make_batch(number, batch)
    sys.settrace(KillAtLine(line))
    buffer.extend(data)


all_transitions()
