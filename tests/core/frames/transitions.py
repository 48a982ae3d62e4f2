"""Synthetic observations, and an uncompressed store to compare other stores with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames import FrameStore, Observation, StackLayout

_SPECIAL = (np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf)
_CHANGES = 3  # bytes that change from one sparse frame to the next

# Kinds of frames. "sparse" changes a few bytes per frame, and "still" repeats most frames. "special" has NaN,
# infinities and zeros of both signs. "mixed" draws one of the others for each frame.
CONTENTS = ("sparse", "noise", "still", "constant", "zeros", "full", "special", "mixed")

# Layouts to test: channel-first and channel-last, gray and RGB, images and vectors, frames of 4 to 67,600 bytes.
LAYOUTS = (
    StackLayout((4, 12, 11), np.dtype(np.uint8), 4, 0),
    StackLayout((12, 11, 4), np.dtype(np.uint8), 4, 2),
    StackLayout((9, 10, 11), np.dtype(np.uint8), 3, 0),
    StackLayout((10, 7, 6), np.dtype(np.uint8), 2, 2),
    StackLayout((3, 20, 21), np.dtype(np.uint8), 1, 0),
    StackLayout((5, 6, 2), np.dtype(np.float32), 2, 2),
    StackLayout((6, 8, 7), np.dtype(np.uint16), 3, 0),
    StackLayout((4, 7), np.dtype(np.float64), 4, 0),
    StackLayout((1,), np.dtype(np.float32), 1, 0),
    StackLayout((40, 30, 4), np.dtype(np.uint8), 4, 2),
    StackLayout((2, 260, 260), np.dtype(np.uint8), 2, 0),
)


class ReferenceStore:
    def __init__(self, capacity: int, n_envs: int, layout: StackLayout) -> None:
        self.capacity, self.n_envs, self.layout = capacity, n_envs, layout
        shape = (capacity, n_envs, *layout.shape)
        self.observations = np.zeros(shape, dtype=layout.dtype)
        self.next_observations = np.zeros(shape, dtype=layout.dtype)
        self.clear()

    def clear(self) -> None:
        self.position, self.size = 0, 0
        self.observations[:], self.next_observations[:] = 0, 0

    def append(self, observations: npt.NDArray[np.generic], next_observations: npt.NDArray[np.generic]) -> None:
        self.observations[self.position] = observations
        self.next_observations[self.position] = next_observations
        self.position = (self.position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)


def make_store(
    capacity: int,
    n_envs: int,
    layout: StackLayout,
    *,
    is_adaptive: bool = False,
    codec: str = "patch",
    max_error: int = 0,
    **options: Any,
) -> FrameStore:
    """Create a store of one kind of observations, which detects the layout if it is adaptive."""
    n_stack = None if is_adaptive else layout.n_stack
    observation = Observation(layout.shape, layout.dtype, codec, n_stack, max_error)
    return FrameStore(capacity, n_envs, observation, **options)


def append_all(stores: Iterable[Any], transitions: Iterable[Any]) -> None:
    stores = list(stores)
    for pair in transitions:
        for store in stores:
            store.append(*pair)


def make_transitions(
    layout: StackLayout,
    *,
    n_envs: int = 2,
    n_steps: int = 100,
    contents: str = "sparse",
    episode: int = 9,
    odd: float = 0.0,
    transposed: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """Generate transitions like those of a vectorized environment with stacked frames.

    After a reset, all frames of a stack except the newest are zero.

    :param episode: Mean number of steps between two resets of an environment; 0 for no resets
    :param odd: Share of observations that do not follow from the previous ones, as after another ``learn()``
    :param transposed: Share of channel-first batches that are views of channel-last memory
    """
    rng = np.random.default_rng(seed)
    envs = [_Stacker(layout, contents, rng) for _ in range(n_envs)]
    for _ in range(n_steps):
        for env in envs:
            if rng.random() < odd:
                env.scramble()
        before = np.stack([env.stack for env in envs])
        for env in envs:
            env.step()
        after = np.stack([env.stack for env in envs])
        for env in envs:
            if episode and rng.random() < 1 / episode:
                env.reset()
        yield (
            _transpose_memory(before, layout, rng.random() < transposed),
            _transpose_memory(after, layout, rng.random() < transposed),
        )


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


def _transpose_memory(
    stacks: npt.NDArray[np.generic], layout: StackLayout, transposed: bool
) -> npt.NDArray[np.generic]:
    if transposed and layout.axis == 0:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(stacks, 1, -1)), -1, 1)
    return stacks


class _Stacker:
    """Simulated environment with one frame stack, which adds a generated frame per step."""

    def __init__(self, layout: StackLayout, contents: str, rng: np.random.Generator) -> None:
        self._layout, self._contents, self._rng = layout, contents, rng
        shape = list(layout.shape)
        shape[layout.axis] = layout.frame_channels
        self._frame: npt.NDArray[np.generic] = np.zeros(shape, dtype=layout.dtype)
        self.reset()

    def reset(self) -> None:
        self.stack: npt.NDArray[np.generic] = np.zeros(self._layout.shape, dtype=self._layout.dtype)
        self.step()

    def scramble(self) -> None:
        """Shuffle the stack's channels, so that it does not continue the stack before."""
        shuffled = self._rng.permutation(np.moveaxis(self.stack, self._layout.axis, 0))
        self.stack = np.ascontiguousarray(np.moveaxis(shuffled, 0, self._layout.axis))

    def step(self) -> None:
        self._frame = self._next_frame()
        axis = self._layout.axis
        kept = np.moveaxis(np.moveaxis(self.stack, axis, 0)[self._layout.frame_channels :], 0, axis)
        self.stack = np.concatenate([kept, self._frame], axis=axis)

    def _next_frame(self) -> npt.NDArray[np.generic]:
        rng, contents = self._rng, self._contents
        if contents == "mixed":
            contents = CONTENTS[rng.integers(len(CONTENTS) - 1)]
        frame = np.ascontiguousarray(self._frame).copy()
        bytes_there = frame.reshape(-1).view(np.uint8)
        if contents == "noise":
            bytes_there[:] = rng.integers(256, size=len(bytes_there), dtype=np.uint8)
        elif contents == "special" and frame.dtype.kind == "f":
            frame[:] = rng.choice(_SPECIAL, size=frame.shape)
        elif contents == "sparse" or (contents in ("still", "special") and rng.random() < 0.3):
            places = rng.integers(len(bytes_there), size=_CHANGES)
            bytes_there[places] = rng.integers(256, size=_CHANGES, dtype=np.uint8)
        elif contents in ("zeros", "full", "constant"):
            bytes_there[:] = {"zeros": 0, "full": 255, "constant": 7}[contents]
        return frame


def check_contents(store: Any, reference: ReferenceStore, max_error: int = 0) -> None:
    """Check that a store equals a reference store within an error, rows that were never written included."""
    assert store.size == reference.size
    check_rows(store, reference.observations, reference.next_observations, max_error=max_error)


def check_rows(store: Any, *arrays: npt.NDArray[np.generic], max_error: int = 0) -> None:
    """Check that a store equals its observations and next observations, and writes nothing around the outputs."""
    rows, envs = (part.reshape(-1) for part in np.indices(arrays[0].shape[:2]))
    expected = [array[rows, envs].reshape(len(rows), -1).view(np.uint8) for array in arrays]
    # With two fill values, an output byte that is not written differs from the expected one at least once.
    for num_threads, fill in ((1, 0x00), (3, 0xA5)):
        outs = [np.empty((len(rows) + 2, *array.shape[2:]), array.dtype) for array in arrays]
        for out in outs:
            out.reshape(-1).view(np.uint8)[:] = fill
        store.get(rows, envs, *(out[1:-1] for out in outs), num_threads=num_threads)
        for out, right in zip(outs, expected, strict=True):
            left = out.reshape(len(out), -1).view(np.uint8)
            if max_error:
                assert (np.maximum(left[1:-1], right) - np.minimum(left[1:-1], right)).max() <= max_error
            else:
                np.testing.assert_array_equal(left[1:-1], right, err_msg=f"num_threads={num_threads}")
            assert (left[[0, -1]] == fill).all()
