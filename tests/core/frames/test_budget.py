"""A budget in bytes: the oldest transitions go first, and what is held stays as it was."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import FrameStore
from rl_ext_core.testing import LAYOUTS, PlainStore, transitions
from tests.core.frames.disk_toys import append_all

GREY = LAYOUTS[0]
BUDGET = 100_000


def held_rows(store: Any) -> np.ndarray:
    return (store.first + np.arange(store.size)) % store.capacity


def check_held(store: Any, plain: PlainStore) -> None:
    """What is held equals the plain arrays; what was given up reads as zeros."""
    before, after = plain.observations.copy(), plain.next_observations.copy()
    gone = np.ones(plain.capacity, dtype=bool)
    gone[held_rows(store)] = False
    before[gone] = after[gone] = 0
    rows, envs = np.repeat(np.arange(plain.capacity), plain.n_envs), np.tile(np.arange(plain.n_envs), plain.capacity)
    outs = [np.empty((len(rows), *plain.layout.shape), plain.layout.dtype) for _ in range(2)]
    store.get(rows, envs, *outs)
    for out, expected in zip(outs, (before, after), strict=True):
        np.testing.assert_array_equal(out.reshape(expected.shape), expected)


def folder(tmp_path: Path, where: str) -> dict[str, Any]:
    return {"storage_dir": tmp_path / "a"} if where == "disk" else {}


@settings(max_examples=40)
@given(data=st.data(), capacity=st.sampled_from([3, 50, 300]), budget=st.integers(30_000, 200_000))
def test_a_store_with_a_budget_equals_plain_arrays(data: st.DataObject, capacity: int, budget: int) -> None:
    store: Any = FrameStore(capacity, 2, GREY, codec="patch", block_length=4, max_bytes=budget)
    plain = PlainStore(capacity, 2, GREY)
    for _ in range(data.draw(st.integers(1, 3))):
        contents = data.draw(st.sampled_from(["noise", "sparse", "mixed"]))
        for transition in transitions(GREY, n_steps=data.draw(st.integers(1, 200)), contents=contents):
            store.append(*transition)
            plain.append(*transition)
            assert store.nbytes <= budget
        action = data.draw(st.sampled_from(["nothing", "drop", "clear", "pickle"]))
        if action == "drop":
            store.drop_oldest(store.size // 2)
        if action == "clear":
            store.clear()
            plain.clear()
        if action == "pickle":
            store = pickle.loads(pickle.dumps(store))
        check_held(store, plain)


def test_an_adaptive_store_keeps_within_its_budget(tmp_path: Path) -> None:
    for where in ("memory", "disk"):
        options = folder(tmp_path, where)
        store = FrameStore.adaptive(3000, 2, GREY.shape, np.uint8, max_bytes=BUDGET, **options)
        plain = PlainStore(3000, 2, GREY)
        for transition in transitions(GREY, n_steps=1200, contents="sparse", odd=0.02):
            store.append(*transition)
            plain.append(*transition)
            assert store.nbytes <= BUDGET
        assert store.layout.n_stack == 4
        assert store.dropped
        check_held(store, plain)
        store.close()
        if where == "disk":
            store = FrameStore.adaptive(3000, 2, GREY.shape, np.uint8, max_bytes=BUDGET, **options)
            check_held(store, plain)
            store.close()


@pytest.mark.parametrize("budget", [0, -5, 1000])
def test_a_budget_for_next_to_nothing_is_refused(budget: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"max_bytes={budget:,} is too little for 2 .* pass at least"):
        FrameStore(100, 2, GREY, max_bytes=budget)


@pytest.mark.parametrize("count", [-1, 31])
def test_no_more_can_be_given_up_than_is_held(count: int) -> None:
    store = FrameStore(100, 2, GREY)
    append_all((store,), transitions(GREY, n_steps=30))
    for give_up in (store.drop_oldest, store.forget_newest):
        with pytest.raises(InvalidArgumentError, match=f"count={count} transitions cannot be given up, 30 are held"):
            give_up(count)
    assert store.size == 30
