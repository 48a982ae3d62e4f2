"""Every pixel of every sample is within the bound, and without one the bits are what they always were."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import FrameStore, StackLayout, arrays, bounded, patch
from rl_ext_core.testing import LAYOUTS, PlainStore, transitions
from tests.core.frames.disk_toys import append_all

Array = npt.NDArray[Any]
IMAGES = [layout for layout in LAYOUTS if layout.dtype == np.uint8]
CODECS = ["patch", "patch+lz4"]
RGB = StackLayout((9, 20, 100), np.dtype(np.uint8), 3, 0)
RGB_LAST = StackLayout((20, 100, 9), np.dtype(np.uint8), 3, 2)


def everything(store: Any, plain: PlainStore) -> tuple[Array, Array]:
    """All that a store holds, and what it was given, as signed numbers."""
    rows = np.repeat(np.arange(plain.capacity), plain.n_envs)
    envs = np.tile(np.arange(plain.n_envs), plain.capacity)
    made = np.empty((2, len(rows), *plain.layout.shape), np.uint8)
    store.get(rows, envs, made[0], made[1])
    given_to_it = np.stack([plain.observations[rows, envs], plain.next_observations[rows, envs]])
    return made.astype(int), given_to_it.astype(int)


def worst(store: Any, plain: PlainStore) -> int:
    made, true = everything(store, plain)
    return int(np.abs(made - true).max())


def drifting(layout: StackLayout, n_steps: int, *, n_envs: int = 2, seed: int = 0, speed: int = 2) -> Any:
    """Transitions of natural-looking images that move and change by a little everywhere, with episodes that end."""
    rng = np.random.default_rng(seed)
    shape = list(layout.shape)
    shape[layout.axis] //= layout.n_stack
    picture = rng.normal(size=(n_envs, *shape))
    for axis in (-1, -2):
        for _ in range(40):
            picture = picture + np.roll(picture, 1, axis)
    picture = 128 + 60 * picture / picture.std()
    frames = []
    for time in range(n_steps + layout.n_stack):
        picture = np.roll(picture, speed, -1)
        drift = 15 * np.sin(time / 9 + picture / 30) + rng.normal(size=picture.shape)
        frames.append((picture + drift).clip(0, 255).astype(np.uint8))
    stacks = [np.concatenate(frames[at : at + layout.n_stack], axis=layout.axis + 1) for at in range(n_steps + 1)]
    yield from itertools.pairwise(stacks)


@st.composite
def cases(draw: st.DrawFn) -> tuple[StackLayout, dict[str, Any], list[dict[str, Any]]]:
    layout = draw(st.sampled_from([*IMAGES, RGB, RGB_LAST]))
    store = {
        "codec": draw(st.sampled_from(CODECS)),
        "block_length": draw(st.sampled_from([1, 2, 4, 16])),
        "max_error": draw(st.sampled_from([1, 2, 3, 4, 7, 16, 40, 100, 127])),
    }
    episodes = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "n_steps": st.integers(1, 25),
                    "contents": st.sampled_from(["noise", "sparse", "mixed", "constant", "drift"]),
                    "odd": st.sampled_from([0.0, 0.2]),
                    "transposed": st.sampled_from([0.0, 0.5]),
                    "seed": st.integers(0, 3),
                }
            ),
            min_size=1,
            max_size=3,
        )
    )
    return layout, store, episodes


@pytest.mark.slow
@settings(max_examples=30)
@given(case=cases())
def test_every_pixel_is_within_the_bound(case: tuple[StackLayout, dict[str, Any], list[dict[str, Any]]]) -> None:
    layout, options, episodes = case
    plain = PlainStore(20, 2, layout)
    store = FrameStore(20, 2, layout, **options)
    for episode in episodes:
        if episode["contents"] == "drift":
            steps = drifting(layout, episode["n_steps"], seed=episode["seed"])
        else:
            steps = transitions(layout, **episode)
        append_all((plain, store), steps)
        assert worst(store, plain) <= options["max_error"]
    assert worst(pickle.loads(pickle.dumps(store)), plain) <= options["max_error"]


@pytest.mark.sample(quick=0, ci=4)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", [RGB, RGB_LAST], ids=["planar", "interleaved"])
@pytest.mark.parametrize("bound", [1, 4, 20])
def test_errors_do_not_add_up_while_a_picture_drifts(codec: str, layout: StackLayout, bound: int) -> None:
    plain, store = PlainStore(300, 2, layout), FrameStore(300, 2, layout, codec=codec, max_error=bound)
    append_all((plain, store), drifting(layout, 300, speed=0))
    made, true = everything(store, plain)
    assert np.abs(made - true).max() == bound  # it is made use of
    exact = FrameStore(300, 2, layout, codec=codec)
    append_all((exact,), drifting(layout, 300, speed=0))
    assert store.nbytes < 0.7 * exact.nbytes


def test_frames_are_shared_by_their_true_pixels_not_by_the_decoded_ones() -> None:
    """Two stacks that differ by less than the bound are two stacks."""
    rng = np.random.default_rng(0)
    plain, store = PlainStore(30, 1, RGB), FrameStore(30, 1, RGB, codec="patch", max_error=10)
    stack = rng.integers(20, 200, size=(1, *RGB.shape)).astype(np.uint8)
    for step in range(30):
        after = np.concatenate([stack[:, 3:], rng.integers(20, 200, size=(1, 3, 20, 100)).astype(np.uint8)], axis=1)
        plain.append(stack, after)
        store.append(stack, after)
        stack = after.copy()
        if step % 3 == 0:
            stack[:, :, 0, 0] += 3  # within the bound of what is stored, but not what was given
    assert store._pool._arrays["head"][arrays.FRAMES] == (1 + 10) * RGB.n_stack + 30
    assert worst(store, plain) <= 10


def adaptive(plain: PlainStore, **options: Any) -> FrameStore:
    return FrameStore.adaptive(plain.capacity, plain.n_envs, plain.layout.shape, plain.layout.dtype, **options)


@pytest.mark.sample(quick=0, ci=4)
@pytest.mark.parametrize("codec", ["auto", "patch", "patch+lz4"])
@pytest.mark.parametrize("n_stack", [None, 3])
def test_an_adaptive_store_finds_the_stack_before_it_loses_anything(codec: str, n_stack: int | None) -> None:
    plain = PlainStore(200, 2, RGB)
    store, exact = (adaptive(plain, codec=codec, n_stack=n_stack, max_error=bound) for bound in (4, 0))
    for step, transition in enumerate(drifting(RGB, 200)):
        plain.append(*transition)
        for each in (store, exact):
            each.append(*transition)
        if step in (0, 5, 62, 63, 64, 127, 199):
            assert worst(store, plain) <= (0 if step < 63 else 4)
    assert store.layout.n_stack == 3
    assert store.max_error == 4
    assert store.nbytes < 0.7 * exact.nbytes
    again = pickle.loads(pickle.dumps(store))
    append_all((plain, again), drifting(RGB, 100, seed=1))
    assert worst(again, plain) <= 4
    assert "lossy: max_error=4" in repr(again)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_error": -1}, InvalidArgumentError, "max_error=-1 must be from 0"),
        ({"max_error": 128}, InvalidArgumentError, "max_error=128 must be from 0"),
        ({"max_error": 1.5}, InvalidTypeError, "max_error=1.5 must be a whole number"),
        ({"max_error": True}, InvalidTypeError, "max_error=True must be a whole number"),
        ({"max_error": "4"}, InvalidTypeError, "max_error='4' must be a whole number"),
        ({"max_error": 4, "codec": "raw"}, InvalidArgumentError, "max_error=4 has no effect on codec='raw'"),
        ({"max_error": 4, "codec": "raw"}, InvalidArgumentError, "use codec='patch', 'patch\\+lz4' or 'auto'"),
        ({"max_error": 4, "dtype": np.float32}, InvalidTypeError, "is for frames of dtype uint8, got float32"),
        ({"max_error": 4, "dtype": np.int8}, InvalidTypeError, "is for frames of dtype uint8, got int8"),
        ({"quality": 80}, InvalidArgumentError, "quality=80 is for codec='jpeg' only"),
    ],
)
@pytest.mark.parametrize("make", ["frame", "adaptive"])
def test_what_cannot_be_bounded_is_refused(make: str, options: dict[str, Any], error: Any, text: str) -> None:
    options = dict(options)
    layout = StackLayout((4, 30, 30), np.dtype(options.pop("dtype", np.uint8)), 4, 0)
    described = (layout,) if make == "frame" else (layout.shape, layout.dtype)
    store: Any = FrameStore if make == "frame" else FrameStore.adaptive
    with pytest.raises(error, match=text):
        store(10, 1, *described, **options)


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("size", range(65_520, 65_540))
def test_the_longest_patches_are_not_taken_for_packed_frames(size: int) -> None:
    n_runs, n_bytes = 400, 200_000
    lengths = np.full(n_runs, (size - 2 * n_runs - 2) // n_runs)
    lengths[: (size - 2 * n_runs - 2) % n_runs] += 1
    before, after = (np.zeros(n_bytes + 64, np.uint8) for _ in range(2))
    for run, length in enumerate(lengths.tolist()):
        after[run * 400 + 200 : run * 400 + 200 + length] = 9
    entry, scratch = (np.zeros(n_bytes + 64, np.uint8) for _ in range(2))
    places = [np.uint64(array.ctypes.data) for array in (before, after, entry, scratch)]
    patch.append_entry(places[0], places[1], n_bytes, places[2], places[3], 4)
    assert int(entry[:2].view("<u2")[0]) in (size, patch.WHOLE)
    assert not bounded.is_packed(places[2])


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(
    "options", [{"max_error": 4}, {"codec": "patch+lz4", "max_error": 4}, {"codec": "jpeg"}], ids=str
)
def test_on_disk_it_is_found_again_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = PlainStore(200, 2, RGB)
    store = adaptive(plain, storage_dir=tmp_path / "there", **options)
    append_all((plain, store), drifting(RGB, 250))
    made, true = everything(store, plain)
    if "max_error" in options:
        assert 0 < np.abs(made - true).max() <= 4
    store.close()
    again = adaptive(plain, storage_dir=tmp_path / "there", **options)
    assert again.lossy
    assert again.max_error == options.get("max_error", 0)
    np.testing.assert_array_equal(everything(again, plain)[0], made)
    again.close()
    with pytest.raises(InvalidArgumentError):
        adaptive(plain, storage_dir=tmp_path / "there")
