"""Transitions computed from their number, and processes that add them until they are killed."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.testing import ReferenceStore

LAYOUT = StackLayout((3, 9, 8), np.dtype(np.uint8), 3, 0)
N_ENVS = 2
_BACKGROUND = (np.arange(72) * 37 % 200).reshape(9, 8).astype(np.uint8)

Pair = tuple[np.ndarray, np.ndarray]


def _compute_frame(time: int, env: int) -> np.ndarray:
    """Compute a frame of an environment: a moving dot, or noise at every 13th time."""
    if time % 13 == 12:
        return np.random.default_rng([time, env]).integers(256, size=(9, 8), dtype=np.uint8)
    frame = _BACKGROUND.copy()
    frame[time % 9, (time // 9) % 8] = 200 + env
    frame[0, 0] = time % 251
    return frame


def _compute_stacks(time: int) -> np.ndarray:
    """Compute the stacks of all environments at a step. Frames from before an episode are zeros."""
    # Environments start episodes at different times, so that their blocks fill at different rates.
    every = [
        [_compute_frame(abs(time - age), env) * (age <= (time + env) % (11 + 6 * env)) for age in (2, 1, 0)]
        for env in range(N_ENVS)
    ]
    return np.array(every, dtype=np.uint8)


def transition(number: int) -> Pair:
    """Compute the observations and next observations of a transition."""
    return _compute_stacks(number), _compute_stacks(number + 1)


def append_all(stores: Iterable[Any], transitions: Iterable[Pair]) -> None:
    """Append the same transitions to several stores."""
    stores = list(stores)
    for pair in transitions:
        for store in stores:
            store.append(*pair)


def open_store(
    folder: Path | str, kind: str, capacity: int, *, count: int = 0, **options: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Open a store in a folder, with row arrays for the number of a transition and its rewards.

    :param kind: A codec, or ``"adaptive"``.
    :param count: Number of transitions to add, numbered from 0.
    :return: The store and both row arrays.
    """
    if kind == "adaptive":
        store: Any = FrameStore.adaptive(
            capacity, N_ENVS, LAYOUT.shape, np.uint8, storage_dir=folder, resume=folder is not None, **options
        )
    else:
        store = FrameStore(
            capacity, N_ENVS, LAYOUT, codec=kind, storage_dir=folder, resume=folder is not None, **options
        )
    rows = store.rows("number", (), np.int64), store.rows("reward", (N_ENVS,), np.float32)
    for number in range(count):
        add(store, *rows, number)
    return store, *rows


def add(store: Any, numbers: np.ndarray, rewards: np.ndarray, number: int) -> None:
    """Append the transition with this number, and write to its row."""
    row = store.position
    store.append(*transition(number))
    numbers[row], rewards[row] = number, number * 0.5


def check_store(store: Any, numbers: np.ndarray, rewards: np.ndarray, *, end: int | None = None) -> int:
    """Assert that a store contains the newest added transitions, and return their end.

    :param end: Expected result, or None for any.
    :return: Number of the newest transition plus one.
    """
    count = store.size
    rows = (store.first + np.arange(count)) % len(numbers)
    if count == 0:
        return 0 if end is None else end
    last = int(numbers[rows[-1]]) + 1
    assert end is None or last == end
    assert numbers[rows].tolist() == list(range(last - count, last))
    assert (rewards[rows] == np.arange(last - count, last)[:, None] * 0.5).all()
    places = np.repeat(rows, N_ENVS), np.tile(np.arange(N_ENVS), count)
    before, after = (np.empty((count * N_ENVS, *LAYOUT.shape), np.uint8) for _ in range(2))
    store.get(*places, before, after)
    expected = [transition(number) for number in range(last - count, last)]
    np.testing.assert_array_equal(before.reshape(count, N_ENVS, *LAYOUT.shape), np.stack([e[0] for e in expected]))
    np.testing.assert_array_equal(after.reshape(count, N_ENVS, *LAYOUT.shape), np.stack([e[1] for e in expected]))
    return last


def read_all(store: Any, plain: ReferenceStore) -> tuple[np.ndarray, np.ndarray]:
    """Return all stored and all added observations, as signed numbers."""
    rows = np.repeat(np.arange(plain.capacity), plain.n_envs)
    envs = np.tile(np.arange(plain.n_envs), plain.capacity)
    made = np.empty((2, len(rows), *plain.layout.shape), np.uint8)
    store.get(rows, envs, made[0], made[1])
    given_to_it = np.stack([plain.observations[rows, envs], plain.next_observations[rows, envs]])
    return made.astype(int), given_to_it.astype(int)


def max_abs_error(store: Any, plain: ReferenceStore) -> int:
    """Return the largest difference between a stored pixel and the added one."""
    made, true = read_all(store, plain)
    return int(np.abs(made - true).max())


def drifting_transitions(layout: StackLayout, n_steps: int, *, n_envs: int = 2, seed: int = 0, speed: int = 2) -> Any:
    """Generate transitions of natural-looking images that move and change a little everywhere."""
    rng = np.random.default_rng(seed)
    shape = list(layout.shape)
    shape[layout.axis] //= layout.n_stack
    picture = rng.normal(size=(n_envs, *shape))
    for axis in (-1, -2):
        for _ in range(40):
            picture = picture + np.roll(picture, 1, axis)
    picture = 128 + 60 * picture / picture.std()
    frames = []
    for step in range(n_steps + layout.n_stack):
        picture = np.roll(picture, speed, -1)
        drift = 15 * np.sin(step / 9 + picture / 30) + rng.normal(size=picture.shape)
        frames.append((picture + drift).clip(0, 255).astype(np.uint8))
    stacks = [np.concatenate(frames[at : at + layout.n_stack], axis=layout.axis + 1) for at in range(n_steps + 1)]
    yield from itertools.pairwise(stacks)


@contextmanager
def limit_file_size(n_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes, within a ``with`` block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kill_while_adding(folder: Path, kind: str, capacity: int, seconds: float) -> tuple[int, int]:
    """Fork a process that adds transitions, and kill it after ``seconds``.

    :return: Number of started transitions, and number of those that must survive.
    """
    progress = mmap.mmap(-1, 16)
    child = os.fork()
    if child == 0:
        try:
            _add_forever(folder, kind, capacity, progress)
        finally:
            os._exit(1)
    while struct.unpack_from("<q", progress)[0] == 0 and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the process ended by itself"
    added, sure = struct.unpack_from("<qq", progress)
    return added, sure


def _add_forever(folder: Path, kind: str, capacity: int, progress: mmap.mmap) -> None:
    """Add transitions, and write the progress to shared memory, until the process is killed."""
    store, numbers, rewards = open_store(folder, kind, capacity)
    number = check_store(store, numbers, rewards)
    while True:
        _write_progress(progress, 0, number + 1)
        add(store, numbers, rewards, number)
        number += 1
        _write_progress(progress, 8, number - 1)


def _write_progress(progress: mmap.mmap, at: int, number: int) -> None:
    """Write a number to shared memory in a single write of 8 bytes."""
    # A single write of 8 bytes: struct.pack_into() writes zeros first, and the process may be killed in between.
    progress[at : at + 8] = struct.pack("<q", number)


def random_seconds(seed: int) -> float:
    """Draw a duration in seconds, mostly a short one."""
    return 0.15 * random.Random(seed).random() ** 2
