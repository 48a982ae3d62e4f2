"""Files of stores that are not exact stay readable, and decode to what they always did."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import numpy.typing as npt
import pytest

from rl_ext_core.frames import FrameStore
from tests.core.frames import make_lossy_fixtures as fixtures

# Of the bytes that come out. JPEG's depend on the library.
DECODED = {
    ("patch", "store"): 2382317980,
    ("patch", "adaptive"): 3313217912,
    ("patch+lz4", "store"): 2492941697,
    ("patch+lz4", "adaptive"): 3445397735,
}


def capacity_of(kind: str) -> int:
    return fixtures.CAPACITY if kind == "store" else fixtures.ADAPTIVE_CAPACITY


def read(store: FrameStore, kind: str) -> npt.NDArray[np.uint8]:
    rows = np.repeat(np.arange(capacity_of(kind)), fixtures.N_ENVS)
    envs = np.tile(np.arange(fixtures.N_ENVS), capacity_of(kind))
    out = np.empty((2, len(rows), *fixtures.LAYOUT.shape), np.uint8)
    store.get(rows, envs, out[0], out[1])
    return out


def given(kind: str) -> npt.NDArray[np.uint8]:
    """What the rows of a store were given, as it comes out of :func:`read`."""
    n_steps = fixtures.N_STEPS if kind == "store" else fixtures.ADAPTIVE_STEPS
    newest = {time % capacity_of(kind): time for time in range(n_steps)}
    times = [newest[row] for row in range(capacity_of(kind))]
    return np.array([np.concatenate([fixtures.stacks(time + later) for time in times]) for later in (0, 1)])


@pytest.mark.parametrize("way", fixtures.WAYS)
@pytest.mark.parametrize("kind", ["store", "adaptive"])
def test_a_file_of_this_format_is_read(way: str, kind: str) -> None:
    data = fixtures.path_of(way, kind).read_bytes()
    assert len(data) < 35_000
    store = pickle.loads(data)
    assert store.lossy
    made, true = read(store, kind), given(kind)
    off = np.abs(made.astype(int) - true)
    if way == "jpeg":
        assert off.mean() < 6
    else:
        assert off.max() == fixtures.WAYS[way]["max_error"]
        assert zlib.crc32(made.tobytes()) == DECODED[way, kind]
    store.append(fixtures.stacks(200), fixtures.stacks(201))


@pytest.mark.parametrize("way", fixtures.WAYS)
@pytest.mark.parametrize("kind", ["store", "adaptive"])
def test_the_same_transitions_give_the_same_file(way: str, kind: str) -> None:
    first = pickle.dumps(fixtures.filled(way, kind), protocol=5)
    dirt = [np.full(size, 0xA5, dtype=np.uint8) for size in range(30, 9000, 7)]
    del dirt
    assert pickle.dumps(fixtures.filled(way, kind), protocol=5) == first
