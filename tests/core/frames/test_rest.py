"""A store that rests holds what it held in less memory, and goes on."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from rl_ext_core.frames import FrameStore
from rl_ext_core.testing import LAYOUTS, PlainStore, check_contents, transitions
from tests.core.frames.disk_toys import append_all

N_ENVS = 2


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
@pytest.mark.parametrize("codec", ["raw", "patch", "patch+lz4"])
@pytest.mark.parametrize("capacity", [100, 37])
def test_what_comes_after_a_rest(layout: object, codec: str, capacity: int) -> None:
    store = FrameStore(capacity, N_ENVS, layout, codec=codec, block_length=8)  # type: ignore[arg-type]
    plain = PlainStore(capacity, N_ENVS, layout)  # type: ignore[arg-type]
    steps = list(transitions(layout, n_envs=N_ENVS, n_steps=90, contents="sparse"))  # type: ignore[arg-type]
    for number, step in enumerate(steps):
        if number in (0, 13, 14, 60):
            before = store.nbytes
            store.rest()
            assert store.nbytes < before or not number
            check_contents(store, plain)
            store = pickle.loads(pickle.dumps(store))
            check_contents(store, plain)
        store.append(*step)
        plain.append(*step)
    check_contents(store, plain)
    store.clear()
    assert store.size == 0


def test_an_adaptive_store_that_is_cleared_after_a_rest_keeps_what_it_found_out() -> None:
    layout = LAYOUTS[0]
    store = FrameStore.adaptive(40, N_ENVS, layout.shape, layout.dtype)
    for _ in range(3):
        plain = PlainStore(40, N_ENVS, layout)
        append_all((store, plain), transitions(layout, n_envs=N_ENVS, n_steps=40, contents="sparse"))
        store.rest()
        check_contents(store, plain)
        assert store.layout == layout
        store.clear()


@pytest.mark.parametrize("codec", ["raw", "patch", "patch+lz4"])
def test_next_observations_alone(codec: str) -> None:
    layout = LAYOUTS[0]
    store = FrameStore(50, 3, layout, codec=codec, block_length=4)
    append_all((store,), transitions(layout, n_envs=3, n_steps=80, contents="mixed", odd=0.1))
    rng = np.random.default_rng(0)
    rows, envs = rng.integers(50, size=60), rng.integers(3, size=60)
    before, after, alone = (np.empty((60, *layout.shape), layout.dtype) for _ in range(3))
    store.get(rows, envs, before, after)
    store.get(rows, envs, None, alone)
    np.testing.assert_array_equal(alone, after)
    store.get(rows, envs, None)
