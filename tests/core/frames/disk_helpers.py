"""Transitions computed from their number, and stores to add them to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from rl_ext_core.frames import FrameStore, Observation, StackLayout
from tests.core.frames.transitions import ReferenceStore

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


def make_store(
    capacity: int, n_envs: int, layout: StackLayout, *, codec: str = "patch", max_error: int = 0, **options: Any
) -> FrameStore:
    """Create a store of one kind of observations whose layout is known."""
    observation = Observation(layout.shape, layout.dtype, codec, layout.n_stack, max_error, axis=layout.axis)
    return FrameStore(capacity, n_envs, observation, **options)


def adaptive_store(capacity: int, n_envs: int, shape: Any, dtype: Any, **options: Any) -> FrameStore:
    """Create a store of one kind of observations that detects the layout."""
    names = [name for name in ("row_dtype", "max_bytes", "storage_dir", "resume") if name in options]
    of_store = {name: options.pop(name) for name in names}
    return FrameStore(capacity, n_envs, Observation(shape, dtype, **options), **of_store)


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
