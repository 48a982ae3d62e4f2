"""JPEG by choice: images come back nearly as they were, and everything else is refused by name."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames import FrameStore, StackLayout, codec_names, get_codec
from rl_ext_core.testing import PlainStore
from tests.core.frames.disk_toys import append_all
from tests.core.frames.test_bounded_error import drifting, everything

LAYOUTS = {
    "rgb, channels first": StackLayout((9, 40, 48), np.dtype(np.uint8), 3, 0),
    "rgb, channels last": StackLayout((40, 48, 9), np.dtype(np.uint8), 3, 2),
    "grey, channels first": StackLayout((4, 40, 48), np.dtype(np.uint8), 4, 0),
    "grey, channels last": StackLayout((40, 48, 4), np.dtype(np.uint8), 4, 2),
    "one rgb frame": StackLayout((40, 48, 3), np.dtype(np.uint8), 1, 0),
    "one rgb frame, channels first": StackLayout((3, 40, 48), np.dtype(np.uint8), 1, 0),
    "one grey frame": StackLayout((40, 48), np.dtype(np.uint8), 1, 0),
}


def filled(layout: StackLayout, n_steps: int = 60, **options: Any) -> tuple[FrameStore, PlainStore]:
    plain, store = PlainStore(n_steps, 2, layout), FrameStore(n_steps, 2, layout, codec="jpeg", **options)
    append_all((plain, store), drifting(layout, n_steps))
    return store, plain


def psnr(store: Any, plain: PlainStore) -> float:
    made, true = everything(store, plain)
    return float(10 * np.log10(255**2 / np.mean((made - true) ** 2)))


def read(store: FrameStore, row: int) -> npt.NDArray[np.uint8]:
    out = np.empty((2, 1, *store.layout.shape), np.uint8)
    store.get(np.array([row]), np.array([0]), out[0], out[1])
    return out


@pytest.mark.parametrize(
    ("shape", "dtype", "n_stack", "error", "text"),
    [
        ((4, 40, 40), np.float32, 4, InvalidTypeError, "stores images of dtype uint8, got float32"),
        ((9, 40, 40), np.uint8, 1, InvalidArgumentError, r"1 or 3 channels, got frames of shape \(9, 40, 40\)"),
        ((2, 40, 40), np.uint8, 1, InvalidArgumentError, "1 or 3 channels"),
        ((8, 40, 40), np.uint8, 4, InvalidArgumentError, r"frames of shape \(2, 40, 40\) \(4 in an observation"),
        ((12,), np.uint8, 1, InvalidArgumentError, "1 or 3 channels"),
        ((2, 3, 40, 40), np.uint8, 2, InvalidArgumentError, "1 or 3 channels"),
    ],
)
def test_what_is_no_image_is_refused(shape: tuple[int, ...], dtype: Any, n_stack: int, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        FrameStore(10, 1, StackLayout(shape, np.dtype(dtype), n_stack, 0), codec="jpeg")
    with pytest.raises(error, match="codec='jpeg' stores images"):
        FrameStore.adaptive(10, 1, shape, dtype, codec="jpeg", n_stack=n_stack)


@pytest.mark.parametrize(
    ("quality", "error", "text"),
    [
        (0, InvalidArgumentError, "quality=0 must be from 1 to 100"),
        (101, InvalidArgumentError, "quality=101 must be from 1 to 100"),
        (9.5, InvalidTypeError, "quality=9.5 must be a whole number"),
        (True, InvalidTypeError, "quality=True must be a whole number"),
    ],
)
def test_a_quality_that_is_none_is_refused(quality: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        get_codec("jpeg", quality=quality)
    with pytest.raises(error, match=text):
        FrameStore(10, 1, LAYOUTS["one rgb frame"], codec="jpeg", quality=quality)


@pytest.mark.parametrize("name", ["raw", "patch", "patch+lz4"])
def test_other_codecs_have_no_quality(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="quality=80 is for codec='jpeg' only"):
        get_codec(name, quality=80)


def test_it_is_never_chosen_and_is_refused_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "jpeg" in codec_names()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "simplejpeg" else find(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=r"codec 'jpeg' needs(.|\n)*rl-ext\[frames-jpeg\]"):
        get_codec("jpeg")
    layout = LAYOUTS["rgb, channels first"]
    store = FrameStore.adaptive(200, 2, layout.shape, layout.dtype)
    append_all((store,), drifting(layout, 200))
    assert store.codec != "jpeg"


@pytest.mark.parametrize("name", ["rgb, channels first", "grey, channels last", "one rgb frame", "one grey frame"])
def test_an_adaptive_store_finds_the_stack_and_goes_over_to_jpeg(name: str) -> None:
    layout = LAYOUTS[name]
    plain = PlainStore(150, 2, layout)
    store = FrameStore.adaptive(150, 2, layout.shape, layout.dtype, codec="jpeg", quality=90)
    for step, transition in enumerate(drifting(layout, 150)):
        plain.append(*transition)
        store.append(*transition)
        if step == 20:
            assert not np.subtract(*everything(store, plain)).any()
    assert (store.codec, store.block_length, store.layout.n_stack) == ("jpeg", 1, layout.n_stack)
    assert psnr(store, plain) > 33
    assert "lossy: quality=90" in repr(store)
    again = pickle.loads(pickle.dumps(store))
    again.append(*next(iter(drifting(layout, 1, seed=5))))
    assert again.choice.quality == 90
