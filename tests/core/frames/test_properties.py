"""Whatever is appended and read in whatever order, a store equals plain arrays."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.testing import CONTENTS, PlainStore, check_contents, transitions

# A few, because compiled loops are made anew for no type but these.
DTYPES = [np.uint8, np.uint16, np.float32, np.float64]


@st.composite
def layouts(draw: st.DrawFn) -> StackLayout:
    n_stack, channels = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    rest = draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
    first = draw(st.booleans())
    shape = [n_stack * channels, *rest] if first else [*rest, n_stack * channels]
    return StackLayout(tuple(shape), np.dtype(draw(st.sampled_from(DTYPES))), n_stack, 0 if first else len(rest))


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "n_steps": draw(st.integers(1, 60)),
        "contents": draw(st.sampled_from(CONTENTS)),
        "episode": draw(st.sampled_from([0, 1, 2, 5, 20])),
        "odd": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "transposed": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=120)
@given(data=st.data(), layout=layouts(), capacity=st.integers(1, 40), n_envs=st.integers(1, 4))
def test_a_store_equals_plain_arrays(data: st.DataObject, layout: StackLayout, capacity: int, n_envs: int) -> None:
    codec = data.draw(st.sampled_from(["raw", "patch", "patch+lz4"]))
    length = data.draw(st.sampled_from([1, 2, 4, 16, 64]))
    plain = PlainStore(capacity, n_envs, layout)
    stores: list[Any] = [
        FrameStore(capacity, n_envs, layout, codec=codec, block_length=length),
        FrameStore.adaptive(capacity, n_envs, layout.shape, layout.dtype),
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        options = data.draw(episodes())
        for observations, nexts in transitions(layout, n_envs=n_envs, **options):
            plain.append(observations, nexts)
            for store in stores:
                store.append(observations, nexts)
        action = data.draw(st.sampled_from(["read", "pickle", "clear"]))
        if action == "pickle":
            stores = [pickle.loads(pickle.dumps(store)) for store in stores]
        if action == "clear":
            for store in (plain, *stores):
                store.clear()
        for store in stores:
            check_contents(store, plain, f"{store!r} after {options} and {action}")


@settings(max_examples=60)
@given(layout=layouts(), steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_frames_that_recur_are_never_confused(layout: StackLayout, steps: list[tuple[int, bool]]) -> None:
    """Few different images, so that stacks often continue each other by chance."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(6, *layout.shape)).astype(layout.dtype)
    images[0], images[1] = 0, images[2]
    images[3] = np.roll(images[2], -layout.frame_channels, axis=layout.axis)
    plain, store = PlainStore(16, 1, layout), FrameStore(16, 1, layout, codec="patch", block_length=4)
    before = images[:1]
    for image, together in steps:
        after = images[image][None]
        for each in (plain, store):
            each.append(before, after)
        before = after if together else images[(image + 1) % 6][None]
    check_contents(store, plain)
