from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames import FrameStore, Observation, StackLayout
from rl_ext_core.frames.log_table import FrameTable
from tests.core.frames.transitions import (
    ReferenceStore,
    append_all,
    check_contents,
    drifting_transitions,
    make_store,
    make_transitions,
)
from tests.forks import result_in_fork

RGB = StackLayout((9, 20, 100), np.dtype(np.uint8), 3, 0)


@settings(max_examples=60 if "CI" in os.environ else 10)
@given(
    shape=st.sampled_from([(1, 7, 9), (3, 40, 64), (30, 33, 3), (2, 5, 16), (700,), (64,), (2, 100, 12)]),
    n_stack=st.sampled_from([1, 2]),
    bound=st.integers(1, 127),
    noise=st.sampled_from([0, 3, 60]),
    speed=st.sampled_from([0, 1, 2, 7]),
    gray=st.booleans(),
)
def test_moving_pictures_are_within_max_error(
    shape: tuple[int, ...], n_stack: int, bound: int, noise: int, speed: int, gray: bool
) -> None:
    rng, axis = np.random.default_rng(bound), 0 if len(shape) == 1 or shape[0] <= shape[-1] else len(shape) - 1
    layout = StackLayout(
        tuple(n * (n_stack if at == axis else 1) for at, n in enumerate(shape)), np.uint8, n_stack, axis
    )
    image = rng.integers(256, size=(2, *shape)) // 32 * 32 + np.arange(shape[-1])
    if gray:
        image[:] = image[:, :1]
    frames = [np.roll(image, speed * t, -1) + rng.integers(-noise, noise + 1, image.shape) for t in range(42)]
    frames = [frame.clip(0, 255).astype(np.uint8) for frame in frames]
    stacks = [np.concatenate(frames[t : t + n_stack], axis + 1) for t in range(40)]
    plain, store = ReferenceStore(30, 2, layout), make_store(30, 2, layout, max_error=bound)
    append_all((plain, store), itertools.pairwise(stacks))
    check_contents(store, plain, bound)


@pytest.mark.parametrize("speed", [0, 1, 2, 5])
@pytest.mark.parametrize("bound", [1, 4, 16])
def test_max_error_takes_less_memory_however_the_picture_moves(speed: int, bound: int) -> None:
    stores = [make_store(200, 2, RGB, max_error=error) for error in (bound, 0)]
    append_all(stores, drifting_transitions(RGB, 200, speed=speed))
    assert stores[0].nbytes < (0.75 if bound == 1 else 0.6) * stores[1].nbytes


def test_channels_that_change_together_take_less_memory() -> None:
    stores = [make_store(200, 2, RGB, max_error=4) for _ in range(2)]
    for before, after in drifting_transitions(RGB, 200):
        stores[0].append(before, after)
        for stack in (before, after):
            for frame in np.split(stack, 3, axis=1):
                frame[:] = frame[:, :1] // np.array([1, 2, 1])[:, None, None]
        stores[1].append(before, after)
    assert stores[1].nbytes < 0.75 * stores[0].nbytes


@pytest.mark.parametrize("n_stack", [None, 3])
def test_adaptive_store_is_exact_until_it_knows_the_layout(n_stack: int | None) -> None:
    plain, described = ReferenceStore(200, 2, RGB), Observation(RGB.shape, np.uint8, n_stack=n_stack)
    store, exact = (FrameStore(200, 2, described._replace(max_error=bound)) for bound in (4, 0))
    for step, transition in enumerate(drifting_transitions(RGB, 200)):
        plain.append(*transition)
        for each in (store, exact):
            each.append(*transition)
        if step in (0, 5, 62, 63, 64, 127, 199):
            check_contents(store, plain, 0 if step < 63 and n_stack is None else 4)
    assert store.layout.n_stack == 3
    assert store.nbytes < 0.7 * exact.nbytes
    again = pickle.loads(pickle.dumps(store))
    append_all((plain, again), drifting_transitions(RGB, 100, seed=1))
    check_contents(again, plain, 4)
    assert "lossy" in repr(again)


@pytest.mark.parametrize("n_stack", [None, 3])
def test_errors_do_not_add_up_if_another_key_is_detected_later(n_stack: int | None) -> None:
    camera = Observation(RGB.shape, np.uint8, n_stack=n_stack, max_error=4)
    store = FrameStore(
        300, 2, {"front": camera, "side": camera._replace(n_stack=None), "place": Observation((2,), "f4")}
    )
    plain, still = ReferenceStore(300, 2, RGB), np.zeros((2, *RGB.shape), np.uint8)
    for step, (before, after) in enumerate(drifting_transitions(RGB, 300)):
        places = [np.full((2, 2), number, np.float32) for number in (step, step + 1)]
        sides = (still, still) if step < 150 else (before, after)
        plain.append(before, after)
        pairs = zip((before, after), sides, places, strict=True)
        store.append(*({"front": front, "side": side, "place": place} for front, side, place in pairs))
    found = np.empty((300, *RGB.shape), np.uint8)
    store.get(np.arange(300), np.zeros(300, np.int64), {"front": found})
    assert 0 < np.abs(found.astype(int) - plain.observations[:, 0]).max() <= 4
    assert [store.layout[key].n_stack for key in ("front", "side")] == [3, 3]


def test_full_ring_that_lost_its_oldest_rows_is_not_stored_again() -> None:
    layout = StackLayout((3, 20, 100), np.dtype(np.uint8), 1, 0)
    plain, store = (
        ReferenceStore(64, 2, layout),
        make_store(64, 2, layout, is_adaptive=True, max_error=4, max_bytes=700_000),
    )
    append_all((plain, store), make_transitions(layout, n_steps=70, contents="noise"))
    assert store.position == plain.position
    assert store.size < 64
    rows, found = (store.first + np.arange(store.size)) % 64, np.empty((store.size, *layout.shape), np.uint8)
    store.get(rows, np.zeros_like(rows), found)
    np.testing.assert_array_equal(found, plain.observations[rows, 0])


ARGUMENT, TYPE = InvalidArgumentError, InvalidTypeError


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"capacity": 0}, ARGUMENT, "capacity=0"),
        ({"n_envs": 0}, ARGUMENT, "n_envs=0"),
        ({"max_bytes": 1000}, ARGUMENT, "max_bytes=1,000 is too little for 100 x 2 transitions.* Pass a smaller"),
        *(
            ({"n_stack": n, "shape": (12, 8, 20)}, ARGUMENT, rf"n_stack={n}.*12 channels.*\[1, 2, 3, 4, 6, 12\].*=None")
            for n in (0, -1, 7, 256)
        ),
        ({"max_error": -1}, ARGUMENT, "max_error=-1 must be from 0"),
        ({"max_error": 128}, ARGUMENT, "max_error=128 must be from 0"),
        ({"max_error": 1.5}, TYPE, "max_error=1.5 must be an integer"),
        ({"max_error": 4, "codec": "raw"}, ARGUMENT, "max_error=4 has no .*'raw'.*leave one of them out"),
        ({"max_error": 4, "dtype": np.float32}, TYPE, "is for frames of dtype uint8, got float32"),
        ({"codec": "patch+lz4"}, ARGUMENT, "is unknown; expected one of 'patch', 'raw', 'jpeg'"),
        ({"quality": 80, "codec": "raw"}, ARGUMENT, "quality=80 is for codec='jpeg' only"),
        ({"codec": "jpeg", "quality": 0}, ARGUMENT, "quality=0 must be from 1 to 100"),
        ({"codec": "jpeg", "quality": 9.5}, TYPE, "quality=9.5 must be an integer"),
        ({"codec": "jpeg", "shape": (4, 40, 40), "dtype": "f4"}, TYPE, "stores images of dtype uint8, got float32"),
        ({"codec": "jpeg", "shape": (9, 40, 40), "n_stack": 1}, ARGUMENT, r"1 or 3 channels, got .* \(9, 40, 40\)"),
        ({"codec": "jpeg", "shape": (8, 40, 40)}, ARGUMENT, r"shape \(2, 40, 40\) \(4 in an observation"),
        ({"codec": "jpeg", "shape": (12,)}, ARGUMENT, "1 or 3 channels"),
        ({"codec": "jpeg", "shape": (2, 3, 40, 40), "n_stack": 2}, ARGUMENT, "1 or 3 channels"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], error: Any, text: str) -> None:
    described = {"shape": (4, 30, 30), "dtype": np.uint8, "n_stack": 4}
    sizes = {"capacity": 100, "n_envs": 2}
    for name, value in options.items():
        (described if name in Observation._fields else sizes)[name] = value
    with pytest.raises(error, match=f"(?s){text}"):
        FrameStore(observation=Observation(**described), **sizes)


JPEGS = [
    StackLayout((9, 40, 48), np.dtype(np.uint8), 3, 0),
    StackLayout((40, 48, 4), np.dtype(np.uint8), 4, 2),
    StackLayout((40, 48, 3), np.dtype(np.uint8), 1, 0),
    StackLayout((40, 48), np.dtype(np.uint8), 1, 0),
]


def test_jpeg_raises_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "simplejpeg" else find(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=r"codec 'jpeg' needs(.|\n)*rl-ext\[frames-jpeg\]"):
        make_store(200, 2, JPEGS[0], codec="jpeg")


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("layout", JPEGS, ids=str)
def test_adaptive_store_changes_to_jpeg_after_detection(layout: StackLayout) -> None:
    plain, store = ReferenceStore(150, 2, layout), make_store(150, 2, layout, is_adaptive=True, codec="jpeg")
    for step, transition in enumerate(drifting_transitions(layout, 150)):
        plain.append(*transition)
        store.append(*transition)
        if step == 20:
            check_contents(store, plain)
    assert (store.parts[None].codec, store.layout.n_stack) == ("jpeg", layout.n_stack)
    found = np.empty((300, *layout.shape), np.uint8)
    store.get(np.repeat(np.arange(150), 2), np.tile(np.arange(2), 150), found)
    assert np.mean((found.astype(int) - plain.observations.reshape(found.shape)) ** 2) < 30  # a PSNR of 33
    assert "lossy" in repr(store)
    again = pickle.loads(pickle.dumps(store))
    again.append(*next(iter(drifting_transitions(layout, 1, seed=5))))


# The state machine of FrameStorage tests lossless tables.
@pytest.mark.parametrize("options", [{"max_error": 3}, {"codec": "jpeg"}], ids=str)
@pytest.mark.parametrize("in_folder", [False, True])
def test_table_rows_in_any_order_stay_as_they_were_first_read(options: Any, in_folder: bool, tmp_path: Any) -> None:
    if options.get("codec") == "jpeg":
        pytest.importorskip("simplejpeg")
    layout, n_rows = StackLayout((3, 24, 24), np.dtype(np.uint8), 3, 0), 400
    observation = Observation(layout.shape, np.uint8, n_stack=3, **options)
    table = FrameTable(n_rows, observation, folder=tmp_path if in_folder else None)
    random, expected = np.random.default_rng(0), np.zeros((2, n_rows, *layout.shape), np.uint8)

    def read(table: FrameTable, rows: Any) -> Any:
        outs = np.empty((2, len(rows), *layout.shape), np.uint8)
        table.get(rows, *outs)
        return outs

    for seed in range(40):
        steps = drifting_transitions(layout, 60, n_envs=1, seed=seed)
        stacks, nexts = (np.concatenate(part) for part in zip(*steps, strict=True))
        if seed % 9 == 5:  # a failed write leaves everything as it was
            table.put(random.permutation(n_rows)[:60], stacks, nexts)
            table.roll_back()
            continue
        rows = random.permutation(n_rows)[:60] if seed > 8 else np.arange(seed * 60, seed * 60 + 60) % n_rows
        table.put(rows, stacks, nexts)
        table.commit()
        expected[:, rows] = read(table, rows)
        # Copies of rows to other segments do not add errors.
        np.testing.assert_array_equal(read(table, np.arange(n_rows)), expected)
    table.copy(np.array([7, 9]), np.array([8, 7]))
    expected[:, [8, 7]] = expected[:, [7, 9]]
    np.testing.assert_array_equal(read(table, np.arange(n_rows)), expected)
    if not in_folder:
        again = FrameTable(n_rows, observation)
        again.restore(table.contents())
        np.testing.assert_array_equal(read(again, np.arange(n_rows)), expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_writes_of_a_fork_do_not_change_a_table() -> None:
    layout, rows = StackLayout((3, 24, 24), np.dtype(np.uint8), 3, 0), np.arange(9)
    table, found = FrameTable(9, Observation(layout.shape, np.uint8, n_stack=3)), np.empty((9, *layout.shape), np.uint8)
    (stacks, nexts), others = (
        [np.concatenate(part) for part in zip(*drifting_transitions(layout, 9, n_envs=1, seed=seed), strict=True)]
        for seed in (0, 1)
    )
    table.put(rows, stacks, nexts)
    # The fork writes other stacks to the same place.
    assert result_in_fork(lambda: table.roll_back() or table.put(rows, *others)) == "None"
    table.get(rows, found, None)
    np.testing.assert_array_equal(found, stacks)
