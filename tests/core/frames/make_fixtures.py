"""Write the files that ``test_format`` reads. Run it once for a new format, and never for a released one.

python -m tests.core.frames.make_fixtures
"""

from __future__ import annotations

import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames import folder as folders
from rl_ext_core.frames.checkpoint import FORMAT_VERSION
from tests.core.frames.disk_helpers import open_store

DATA = Path(__file__).with_name("data")
EXACT = ("raw", "patch")
ENCODINGS: dict[str, dict[str, Any]] = {
    **{codec: {"codec": codec} for codec in EXACT},
    "patch-lossy": {"codec": "patch", "max_error": 4},
    "jpeg": {"codec": "jpeg", "quality": 90},
}
KINDS = {"store": (3, 11), "adaptive": (4, 66)}  # capacity, and transitions
LAYOUT = StackLayout((6, 6, 70), np.dtype(np.uint8), 2, 0)
N_ENVS = 2


def path_of(encoding: str, kind: str = "store") -> Path:
    """Return the path of the file for an encoding and a kind of store."""
    return DATA / f"{kind}-v{FORMAT_VERSION}-{encoding}.pkl"


def stacks(time: int) -> npt.NDArray[np.uint8]:
    """Compute a moving picture with formulas, because random numbers may change with the version of NumPy."""

    def frame(time: int, env: int) -> npt.NDArray[np.int64]:
        """Compute one frame of the moving picture."""
        channel, y, x = np.meshgrid(np.arange(3), np.arange(6), np.arange(70), indexing="ij")
        x = x + 3 * time + 10 * env
        moving = np.abs((x * 4 + y * 7 + channel * 5) % 400 - 200) + (x * y + time) % 5
        still = (x * x + 31 * y * env) % 256 if time % 6 == 5 else 0
        return np.where((y > 4) & (time % 6 == 5), still, moving).clip(0, 255)

    every = [np.concatenate([frame(time - age, env) for age in (1, 0)]) for env in range(N_ENVS)]
    return np.array(every, dtype=np.uint8)


def first_transitions(n_steps: int) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Return the first ``count`` transitions of the moving picture."""
    return [(stacks(time), stacks(time + 1)) for time in range(n_steps)]


def make_filled_store(encoding: str, kind: str) -> FrameStore:
    """Create a store with the transitions that the fixture file contains."""
    capacity, n_steps = KINDS[kind]
    if kind == "store":
        store: FrameStore = FrameStore(capacity, N_ENVS, LAYOUT, **ENCODINGS[encoding])
    else:
        store = FrameStore.adaptive(capacity, N_ENVS, LAYOUT.shape, LAYOUT.dtype, **ENCODINGS[encoding])
    for transition in first_transitions(n_steps):
        store.append(*transition)
    return store


FOLDERS: dict[str, dict[str, Any]] = {"raw": {}, "patch": {}, "adaptive": {"codec": "patch", "n_stack": 3}}
FOLDER_CAPACITY, FOLDER_STEPS = 30, 47


def path_of_folder(kind: str) -> Path:
    """Return the path of the archive with the folder of a kind of store."""
    return DATA / f"folder-v{folders.FORMAT_VERSION}-{kind}.zip"


def main() -> None:
    """Write all files and folders."""
    DATA.mkdir(exist_ok=True)
    for encoding in ENCODINGS:
        for kind in KINDS:
            path_of(encoding, kind).write_bytes(pickle.dumps(make_filled_store(encoding, kind), protocol=5))
    for kind, options in FOLDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            open_store(folder, kind, FOLDER_CAPACITY, count=FOLDER_STEPS, **options)[0].close()
            with zipfile.ZipFile(path_of_folder(kind), "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(Path(folder).iterdir()):
                    archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
