"""Write the sample of the current storage format: ``python -m tests.core.frames.write_samples``.

Samples of released formats are never written again, because later versions must read them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rl_ext_core.frames.checkpoint import FORMAT
from rl_ext_core.frames.store import FrameStore, Observation
from tests.core.frames.disk_helpers import transition

SAMPLES = Path(__file__).parent / "samples"
CAPACITY, N_ROWS, N_ENVS = 12, 20, 2
ROW = np.dtype([("number", "<i8"), ("reward", "<f4")])
# "bounded" moves, so that it contains quantized frames.
OBSERVATIONS = {
    "exact": Observation((3, 9, 8), np.uint8, n_stack=3),
    "bounded": Observation((20, 16), np.uint8, n_stack=1, max_error=4),
    "numbers": Observation((5,), np.float64, n_stack=1),
}


def compute_stacks(number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Compute the observations and next observations of a transition."""
    exact = dict(zip((0, 1), transition(number), strict=True))
    y, x = np.mgrid[:20, :16]
    sides = []
    for side in range(2):
        t = number + side
        bounded = np.stack([(y * 3 + (x + 2 * t + env) ** 2) % 250 for env in range(N_ENVS)]).astype(np.uint8)
        numbers = np.array([[t, -0.0, np.nan, np.inf, t / 3 + env] for env in range(N_ENVS)])
        sides.append({"exact": exact[side], "bounded": bounded, "numbers": numbers})
    return sides[0], sides[1]


def open_store(folder: Path, *, resume: bool) -> FrameStore:
    """Open a store with the options of the sample."""
    return FrameStore(CAPACITY, N_ENVS, OBSERVATIONS, row_dtype=ROW, storage_dir=folder, resume=resume)


def main() -> None:
    """Write the sample; refuse if there is one."""
    folder = SAMPLES / f"format_{FORMAT}"
    store = open_store(folder, resume=False)
    for number in range(N_ROWS):
        store.append(*compute_stacks(number), np.array([(number, number / 2)], ROW))
    store.close()
    (folder / "lock").write_text("")


if __name__ == "__main__":
    main()
