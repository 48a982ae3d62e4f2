"""Batches of stacks in any order, with runs and repetitions, decode to the same bytes as one stack at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.testing import LAYOUTS, ReferenceStore, make_transitions
from tests.core.frames.disk_helpers import append_all, drifting_transitions

N_ROWS, N_ENVS, N_STEPS = 60, 2, 80
GRAY, GRAY_LAST, SINGLE = LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]
LONG = StackLayout((150,), np.dtype(np.uint8), 150, 0)  # a run of these spans more blocks than the kernels follow

CASES: dict[str, tuple[StackLayout, dict[str, Any]]] = {
    "raw": (GRAY, {"codec": "raw"}),
    "patch": (GRAY, {"codec": "patch"}),
    "patch, channels last": (GRAY_LAST, {"codec": "patch"}),
    "patch, single frames": (SINGLE, {"codec": "patch"}),
    "patch, long stacks": (LONG, {"codec": "patch"}),
    "bounded": (GRAY, {"max_error": 3}),
    "bounded, channels last": (GRAY_LAST, {"max_error": 3}),
    "jpeg": (StackLayout((4, 32, 32), np.dtype(np.uint8), 4, 0), {"codec": "jpeg"}),
}


@functools.cache
def stored(case: str) -> tuple[FrameStore, np.ndarray, np.ndarray]:
    """Return a store whose ring has wrapped, all its handles, and the stacks decoded one at a time."""
    layout, options = CASES[case]
    if case == "jpeg":
        pytest.importorskip("simplejpeg")
    store, plain = FrameStore(N_ROWS, N_ENVS, layout, **options), ReferenceStore(N_ROWS, N_ENVS, layout)
    odd = 0.4 if layout is LONG else 0.05
    steps = make_transitions(layout, n_envs=N_ENVS, n_steps=N_STEPS, contents="mixed", odd=odd, transposed=0.0)
    append_all([store, plain], steps)
    # One environment after the other, and each next stack after its stack: runs of steps 0 and 1.
    rows = np.tile((store.position + np.arange(N_ROWS)) % N_ROWS, N_ENVS)
    envs = np.repeat(np.arange(N_ENVS), N_ROWS)
    handles = np.stack(store.handles(rows, envs), axis=1).reshape(-1)
    handles = np.concatenate([handles, np.zeros(1, np.int64)])
    alone = np.empty((len(handles), *layout.shape), layout.dtype)
    for i in range(len(handles)):
        store.get_stacks(handles[i : i + 1], alone[i : i + 1])
    if not store.lossy:
        pairs = plain.observations[rows, envs], plain.next_observations[rows, envs]
        assert alone[:-1].tobytes() == np.stack(pairs, axis=1).tobytes()
    return store, handles, alone


STRETCHES = st.lists(
    st.tuples(st.integers(0, 2 * N_ROWS * N_ENVS), st.integers(1, 40), st.sampled_from([1, 2, 2, 0, -1, 3])),
    min_size=1,
    max_size=8,
)


def places_of(stretches: list[tuple[int, int, int]], n: int) -> np.ndarray:
    """Return positions of handles: for each stretch a start, a length and the step to the next handle."""
    return np.concatenate([(start + step * np.arange(length)) % n for start, length, step in stretches])


@pytest.mark.sample(quick=1)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(stretches=STRETCHES, next_stretches=STRETCHES, following=st.booleans(), num_threads=st.sampled_from([1, 3]))
def test_batches_in_any_order_equal_single_stacks(
    case: str, stretches: Any, next_stretches: Any, following: bool, num_threads: int
) -> None:
    store, handles, alone = stored(case)
    places = places_of(stretches, len(handles))
    nexts = (
        (places + 1) % len(handles) if following else np.resize(places_of(next_stretches, len(handles)), len(places))
    )
    outs = np.full((3, len(places), *store.layout.shape), 77, store.layout.dtype)
    store.get_stacks(handles[places], outs[0], handles[nexts], outs[1], num_threads=num_threads)
    store.get_stacks(handles[places], outs[2], num_threads=num_threads)
    for out, expected in zip(outs, (places, nexts, places), strict=True):
        assert out.tobytes() == alone[expected].tobytes()


def test_handles_of_rows_that_do_not_exist_are_refused() -> None:
    store, handles, _ = stored("patch")
    one = np.zeros(1, np.int64)
    for rows, envs in ((one + N_ROWS, one), (one, one + N_ENVS), (one - 1, one), (one, np.zeros(2, np.int64))):
        with pytest.raises(InvalidArgumentError, match=r"expected two int64 arrays .* rows from 0 to 59"):
            store.handles(rows, envs)
    with pytest.raises(InvalidArgumentError, match="include some that name no stack"):
        store.get_stacks(handles[:1] + (1 << 30), np.empty((1, *GRAY.shape), np.uint8))


def test_damaged_images_of_a_run_are_reported() -> None:
    pytest.importorskip("simplejpeg")
    layout = CASES["jpeg"][0]
    store = FrameStore(N_ROWS, 1, layout, codec="jpeg")
    append_all([store], drifting_transitions(layout, 40, n_envs=1))
    store._pool._arrays["contents"][:] = 7
    handles, _ = store.handles(np.arange(20), np.zeros(20, np.int64))
    with pytest.raises(CorruptFileError, match="20 transitions cannot be read, because a block of at least one"):
        store.get_stacks(handles, np.empty((20, *layout.shape), np.uint8))
