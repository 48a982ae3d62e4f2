"""JPEG by choice: images come back nearly as they were, and everything else is refused by name."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames import FrameStore, JpegCodec, StackLayout, codec_names, get_codec
from rl_ext_core.testing import ConformanceError, PlainStore, check_codec
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
    for transition in drifting(layout, n_steps):
        plain.append(*transition)
        store.append(*transition)
    return store, plain


def psnr(store: Any, plain: PlainStore) -> float:
    made, true = everything(store, plain)
    return float(10 * np.log10(255**2 / np.mean((made - true) ** 2)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_images_come_back_nearly_as_they_were(name: str) -> None:
    store, plain = filled(LAYOUTS[name])
    assert psnr(store, plain) > 35
    made, true = everything(store, plain)
    assert (made != true).any()
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(everything(again, plain)[0], made)


def test_a_frame_comes_out_as_simplejpeg_makes_it() -> None:
    import simplejpeg

    store, plain = filled(LAYOUTS["rgb, channels first"], quality=80)
    newest = plain.next_observations[-1, 0, -3:]
    image = np.ascontiguousarray(np.moveaxis(newest, 0, -1))
    expected = simplejpeg.decode_jpeg(simplejpeg.encode_jpeg(image, 80, "RGB", "444"), "RGB")
    made = np.empty((2, 1, *store.layout.shape), np.uint8)
    store.get(np.array([59]), np.array([0]), made[0], made[1])
    np.testing.assert_array_equal(np.moveaxis(made[1, 0, -3:], 0, -1), expected)


def test_what_is_read_does_not_change_when_more_is_added() -> None:
    layout = LAYOUTS["rgb, channels first"]
    store, seen = FrameStore(60, 1, layout, codec="jpeg"), []
    for row, transition in enumerate(drifting(layout, 40, n_envs=1)):
        store.append(*transition)
        seen.append(read(store, row))
    for row, first in enumerate(seen):
        np.testing.assert_array_equal(read(store, row), first)


def read(store: FrameStore, row: int) -> npt.NDArray[np.uint8]:
    out = np.empty((2, 1, *store.layout.shape), np.uint8)
    store.get(np.array([row]), np.array([0]), out[0], out[1])
    return out


def test_a_higher_quality_is_nearer_and_larger() -> None:
    found = [filled(LAYOUTS["rgb, channels first"], quality=quality) for quality in (30, 95)]
    assert psnr(*found[0]) + 3 < psnr(*found[1])
    assert found[0][0].nbytes < found[1][0].nbytes


def test_zero_padding_stays_zero() -> None:
    layout = LAYOUTS["rgb, channels first"]
    store = FrameStore(10, 1, layout, codec="jpeg")
    rng = np.random.default_rng(0)
    stack = np.zeros((1, *layout.shape), np.uint8)
    stack[:, -3:] = rng.integers(256, size=(1, 3, 40, 48))
    store.append(stack, stack)
    assert not read(store, 0)[:, :, :-3].any()


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


def test_a_block_length_or_a_bound_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="block_length=16 is not for codec='jpeg'"):
        FrameStore(10, 1, LAYOUTS["one rgb frame"], codec="jpeg", block_length=16)
    with pytest.raises(InvalidArgumentError, match="block_length=4 is not for codec='jpeg'"):
        FrameStore.adaptive(10, 1, (40, 48, 3), np.uint8, codec="jpeg", block_length=4)
    with pytest.raises(InvalidArgumentError, match="max_error=4 has no effect on codec='jpeg'"):
        FrameStore(10, 1, LAYOUTS["one rgb frame"], codec="jpeg", max_error=4)


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
    for transition in drifting(layout, 200):
        store.append(*transition)
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


def test_observations_that_do_not_stack_are_taken_apart() -> None:
    """Nine channels that have nothing to do with those before are stored as three images."""
    rng = np.random.default_rng(0)
    store = FrameStore.adaptive(100, 1, (9, 40, 40), np.uint8, codec="jpeg")
    picture = np.kron(rng.integers(256, size=(120, 1, 9, 5, 5)), np.ones((8, 8))).astype(np.uint8)
    for before, after in itertools.pairwise(picture[:101]):
        store.append(before, after)
    assert (store.codec, store.layout.n_stack) == ("jpeg", 3)
    out = np.empty((1, 9, 40, 40), np.uint8)
    store.get(np.array([50]), np.array([0]), out)
    assert np.abs(out[0].astype(int) - picture[50, 0]).mean() < 10


def test_repr_and_checks_say_that_it_is_lossy() -> None:
    assert repr(JpegCodec(80)) == "JpegCodec(quality=80, lossy)"
    assert "lossy" in repr(FrameStore(10, 1, LAYOUTS["one rgb frame"], codec="jpeg"))
    with pytest.raises(ConformanceError, match="'jpeg' is lossy"):
        check_codec("jpeg")


def test_a_changed_quality_is_noticed() -> None:
    store, _ = filled(LAYOUTS["one grey frame"], 10)
    state = store.__getstate__()
    assert state["frames"]["quality"] == 95
    state["frames"]["quality"] = 94
    with pytest.raises(CorruptFileError, match="checksum"):
        FrameStore.__new__(FrameStore).__setstate__(state)
