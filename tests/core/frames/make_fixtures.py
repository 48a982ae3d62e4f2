"""Writes the files that ``test_format`` reads. Run it once for a new format, and never again for one that was released.

python -m tests.core.frames.make_fixtures
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames.checkpoint import FORMAT_VERSION

DATA = Path(__file__).with_name("data")
CODECS = ("raw", "patch", "patch+lz4")
LAYOUT = StackLayout((3, 6, 5), np.dtype(np.uint8), 3, 0)
CAPACITY, N_ENVS, N_STEPS = 9, 2, 25
BLOCK_LENGTH = 2


def path_of(codec: str, kind: str = "store") -> Path:
    """The file of a codec; of kind ``store`` or ``adaptive``."""
    return DATA / f"{kind}-v{FORMAT_VERSION}-{codec}.pkl"


def steps() -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """The transitions in the files. Formulas, because a generator's numbers may change with its version."""
    pixels = np.arange(30).reshape(6, 5)

    def frame(time: int, env: int) -> npt.NDArray[np.uint8]:
        if time % 7 == 6:
            return (pixels * (time + 3) * 37 + env).astype(np.uint8)
        return np.where(pixels == time, 200 + env, pixels).astype(np.uint8)

    def stacks(time: int) -> npt.NDArray[np.uint8]:
        valid = 1 + time % 11  # a reset each 11 steps
        every = [[frame(time - age, env) * (age < valid) for age in (2, 1, 0)] for env in range(N_ENVS)]
        return np.array(every, dtype=np.uint8)

    return [(stacks(time), stacks(time + 1)) for time in range(N_STEPS)]


def main() -> None:
    """Writes all files."""
    DATA.mkdir(exist_ok=True)
    for codec in CODECS:
        stores: dict[str, FrameStore] = {
            "store": FrameStore(CAPACITY, N_ENVS, LAYOUT, codec=codec, block_length=BLOCK_LENGTH),
            "adaptive": FrameStore.adaptive(CAPACITY, N_ENVS, LAYOUT.shape, LAYOUT.dtype, codec=codec),
        }
        for kind, store in stores.items():
            for transition in steps():
                store.append(*transition)
            path_of(codec, kind).write_bytes(pickle.dumps(store, protocol=5))


if __name__ == "__main__":
    main()
