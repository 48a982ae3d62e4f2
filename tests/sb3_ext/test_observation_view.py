from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

import sb3_ext
from rl_ext_core.errors import InvalidTypeError, OutOfMemoryError
from sb3_ext import observation_view
from tests.sb3_ext.buffer_envs import add_all, make_buffers
from tests.sb3_ext.test_rollout_buffers import fill_rollouts, make_rollout_buffers

IMAGES, ACTIONS = spaces.Box(0, 255, (2, 6, 5), np.uint8), spaces.Discrete(2)


@pytest.fixture(params=["replay", "rollout", "flattened"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, np.ndarray]:
    """Return an ObservationView and the equal array of SB3's buffer."""
    observations = np.random.default_rng(0).integers(0, 256, (8, 2, *IMAGES.shape), dtype=np.uint8)
    if request.param == "replay":
        buffers = make_buffers("plain", 16, IMAGES, ACTIONS)
        add_all(buffers, [(obs, obs, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}]) for obs in observations[:5]])
    else:
        buffers = make_rollout_buffers("plain", 8, IMAGES, ACTIONS)
        fill_rollouts(buffers, [*observations])
    parts = [buffer.observations for buffer in buffers]
    if request.param == "flattened":
        parts = [buffer.swap_and_flatten(part) for buffer, part in zip(buffers, parts, strict=True)]
    return parts[0], parts[1]


INDICES: list[Any] = [
    -1,
    slice(None, None, -3),
    np.arange(16) % 3 == 0,
    (3, np.int64(1)),
    (slice(None), [1, 0]),
    (np.array([[1], [2]]), np.array([0, 1])),
    (np.array([4, 2]), np.array([1, 1]), slice(None)),
    (5, slice(None), slice(1, 3), slice(None), 2),
    (..., 0),
    (),
]
READ: dict[str, Callable[[Any], Any]] = {
    "mean of an axis": lambda x: x.mean(axis=0),
    "reshape": lambda x: x.reshape(-1, 60),
    "compared": lambda x: x == 7,
    "both sides": lambda x: x + x,
    "ufunc": np.sqrt,
    "reduced": lambda x: np.add.reduce(x, axis=1),
    "out": lambda x: np.add(x, 1, out=np.zeros(x.shape, np.int64)),
    "concatenated": lambda x: np.concatenate([x, x]),
    "iterated": lambda x: [part.sum() for part in x],
    "tensor": lambda x: th.as_tensor(np.asarray(x)).float().mean().item(),
}


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_observation_view_indexing_matches_ndarray(pair: tuple[Any, np.ndarray], index: Any) -> None:
    """Flat views have a single axis of rows, and a rollout has half as many rows."""
    view, array = pair
    try:
        expected = array[index]
    except IndexError:
        with pytest.raises(IndexError):
            view[index]
    else:
        if array.ndim == 5 or not isinstance(index, tuple):
            np.testing.assert_array_equal(view[index], expected, strict=True)


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_observation_view_operations_match_ndarray(pair: tuple[Any, np.ndarray], read: Callable[[Any], Any]) -> None:
    found, expected = read(pair[0]), read(pair[1])
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found, expected)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


def test_size_attributes_of_observation_view_do_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    view = sb3_ext.CompressedReplayBuffer(4, IMAGES, ACTIONS, "cpu").observations
    monkeypatch.setattr(observation_view.ObservationView, "_decode", lambda *_: pytest.fail("decoded"))
    plain = np.zeros((4, 1, *IMAGES.shape), np.uint8)
    for name in ("ndim", "size", "nbytes", "shape", "dtype"):
        assert getattr(view, name) == getattr(plain, name)


def test_writing_to_observations_is_refused() -> None:
    """SB3's arrays are writable. Changes to a decoded copy would be lost."""
    buffer = sb3_ext.CompressedReplayBuffer(4, IMAGES, ACTIONS, "cpu")
    view = buffer.observations
    with pytest.raises(InvalidTypeError, match=r"cannot be assigned to\. Change a copy: np\.array"):
        view[0] = 1
    with pytest.raises(InvalidTypeError, match="cannot be assigned to"):
        view += 1
    with pytest.raises(InvalidTypeError, match="cannot be assigned to"):
        np.add(1, 1, out=view)
    for write in (lambda: view.fill(3), lambda: view.sort(), lambda: view.reshape(-1).__setitem__(0, 1)):
        with pytest.raises(ValueError, match="read-only"):
            write()
    kept = view.copy()
    kept[:] = 3  # a copy of the caller
    changed = np.asarray(view)
    changed[:] = 5
    assert not np.asarray(view).any()


def test_decoding_more_than_available_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = sb3_ext.CompressedReplayBuffer(1000, IMAGES, ACTIONS, "cpu")
    monkeypatch.setattr(observation_view, "available_memory", lambda: 59_999)
    for read in (np.asarray, lambda x: x.mean(), lambda x: x + 1):
        with pytest.raises(OutOfMemoryError, match=r"take 60 kB, but only 60 kB are free.*observations\[:1000\]"):
            read(buffer.observations)
    assert buffer.observations[:500].mean() == 0
