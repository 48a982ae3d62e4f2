"""Stores of transitions that are computed from their number: ``python -m tests.core.frames.numbered`` writes a sample.

The sample is that of the current storage format. Samples of released formats are never written again, because later
versions must read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.frames.checkpoint import FORMAT
from rl_ext_core.frames.store import FrameStore, Observation

SAMPLES = Path(__file__).parent / "samples"
CAPACITY, N_ROWS, N_ENVS = 12, 20, 2
ROW = np.dtype([("number", "<i8"), ("reward", "<f4")])
# "bounded" moves, so that it contains quantized frames, and has two channels, which predict each other.
OBSERVATIONS = {
    "exact": Observation((3, 9, 8), np.uint8, n_stack=3),
    "bounded": Observation((2, 20, 16), np.uint8, n_stack=1, max_error=4),
    "numbers": Observation((5,), np.float64, n_stack=1),
}
_BACKGROUND = (np.arange(72) * 37 % 200).reshape(9, 8).astype(np.uint8)


def _compute_frame(time: int, env: int) -> np.ndarray:
    """Compute a frame of an environment: a moving dot, or noise at every 13th time."""
    if time % 13 == 12:
        return np.random.default_rng([time, env]).integers(256, size=(9, 8), dtype=np.uint8)
    frame = _BACKGROUND.copy()
    frame[time % 9, (time // 9) % 8] = 200 + env
    frame[0, 0] = time % 251
    return frame


@cache
def compute_observations(time: int) -> dict[str, np.ndarray]:
    """Compute the observations of all environments at a step. Frames from before an episode are zeros."""
    # Environments start episodes at different times, so that their blocks fill at different rates.
    every = [
        [_compute_frame(abs(time - age), env) * (age <= (time + env) % (11 + 6 * env)) for age in (2, 1, 0)]
        for env in range(N_ENVS)
    ]
    y, x = np.mgrid[:20, :16]
    bounded = [[(y * 3 + (x + 2 * time + env) ** 2) % 250] * 2 for env in range(N_ENVS)]
    numbers = [[time, -0.0, np.nan, np.inf, time / 3 + env] for env in range(N_ENVS)]
    return {"exact": np.array(every, np.uint8), "bounded": np.array(bounded, np.uint8), "numbers": np.array(numbers)}


def open_store(
    folder: Path | None, capacity: int = CAPACITY, observations: Mapping[str, Observation] = OBSERVATIONS
) -> FrameStore:
    options = {"storage_dir": folder, "resume": folder is not None}
    return FrameStore(capacity, N_ENVS, observations, row_dtype=ROW, **options)


def add(store: FrameStore, *numbers: int) -> None:
    for number in numbers:
        store.append(
            compute_observations(number), compute_observations(number + 1), np.array([(number, number / 2)], ROW)
        )


def check(store: FrameStore) -> int:
    """Check that a store contains successive transitions, and return the number of the newest one, or -1."""
    rows = (store.first + np.arange(store.size)) % store.capacity
    numbers = store.rows["number"][rows]
    newest = int(numbers[-1]) if len(rows) else -1
    np.testing.assert_array_equal(numbers, newest - len(rows) + 1 + np.arange(len(rows)))
    np.testing.assert_array_equal(store.rows["reward"][rows], numbers / 2)
    shapes = {key: ((N_ENVS * len(rows), *part.options.shape), part.options.dtype) for key, part in store.parts.items()}
    outs: Any = [{key: np.empty(*shape) for key, shape in shapes.items()} for _ in range(2)]
    store.get(np.repeat(rows, N_ENVS), np.tile(np.arange(N_ENVS), len(rows)), *outs)
    for i, number in enumerate(numbers.tolist()):
        for side, out in enumerate(outs):
            expected = compute_observations(number + side)
            for key, part in store.parts.items():
                found = out[key][N_ENVS * i : N_ENVS * (i + 1)]
                if part.options.max_error:
                    assert abs(found.astype(int) - expected[key]).max() <= part.options.max_error, (number, key)
                else:
                    assert found.tobytes() == expected[key].tobytes(), (number, key)
    return newest


def main() -> None:
    """Write the sample; refuse if there is one."""
    folder = SAMPLES / f"format_{FORMAT}"
    assert not folder.exists()
    store = open_store(folder)
    add(store, *range(N_ROWS))
    store.close()
    (folder / "lock").write_text("")


if __name__ == "__main__":
    main()
