"""Writes the files that ``test_lossy_format`` reads. Run it once for a new format, and never again for a released one.

python -m tests.core.frames.make_lossy_fixtures
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames.checkpoint import FORMAT_VERSION

DATA = Path(__file__).with_name("data")
WAYS: dict[str, dict[str, Any]] = {
    "patch": {"codec": "patch", "max_error": 4, "block_length": 4},
    "patch+lz4": {"codec": "patch+lz4", "max_error": 9, "block_length": 4},
    "jpeg": {"codec": "jpeg", "quality": 90},
}
LAYOUT = StackLayout((6, 6, 70), np.dtype(np.uint8), 2, 0)
CAPACITY, N_ENVS, N_STEPS = 3, 2, 11
ADAPTIVE_CAPACITY, ADAPTIVE_STEPS = 4, 66


def path_of(way: str, kind: str = "store") -> Path:
    """The file of a way of storing; of kind ``store`` or ``adaptive``."""
    return DATA / f"lossy-{kind}-v{FORMAT_VERSION}-{way}.pkl"


def stacks(time: int) -> npt.NDArray[np.uint8]:
    """The observations at a time: a picture that moves, of formulas, since a generator's numbers may change."""

    def frame(time: int, env: int) -> npt.NDArray[np.int64]:
        channel, y, x = np.meshgrid(np.arange(3), np.arange(6), np.arange(70), indexing="ij")
        x = x + 3 * time + 10 * env
        moving = np.abs((x * 4 + y * 7 + channel * 5) % 400 - 200) + (x * y + time) % 5
        still = (x * x + 31 * y * env) % 256 if time % 6 == 5 else 0
        return np.where((y > 4) & (time % 6 == 5), still, moving).clip(0, 255)

    every = [np.concatenate([frame(time - age, env) for age in (1, 0)]) for env in range(N_ENVS)]
    return np.array(every, dtype=np.uint8)


def filled(way: str, kind: str) -> FrameStore:
    """A store with what is in the file."""
    if kind == "store":
        store: FrameStore = FrameStore(CAPACITY, N_ENVS, LAYOUT, **WAYS[way])
    else:
        options = {name: value for name, value in WAYS[way].items() if name != "block_length"}
        store = FrameStore.adaptive(ADAPTIVE_CAPACITY, N_ENVS, LAYOUT.shape, LAYOUT.dtype, **options)
    for time in range(N_STEPS if kind == "store" else ADAPTIVE_STEPS):
        store.append(stacks(time), stacks(time + 1))
    return store


def main() -> None:
    """Writes all files."""
    DATA.mkdir(exist_ok=True)
    for way in WAYS:
        for kind in ("store", "adaptive"):
            path_of(way, kind).write_bytes(pickle.dumps(filled(way, kind), protocol=5))


if __name__ == "__main__":
    main()
