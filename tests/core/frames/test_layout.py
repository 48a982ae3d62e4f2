"""What observations are stacked of is found from the data."""

from __future__ import annotations

import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames.layout import candidate_layouts, continues, find_layout, stacking_axes
from rl_ext_core.testing import LAYOUTS, transitions


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), (0,)),
        ((7,), (0,)),
        ((4, 84, 84), (0,)),
        ((84, 84, 4), (2,)),
        ((12, 12, 12), (0,)),  # SB3 takes the first where both are as long
        ((4, 7), (0, 1)),
        ((2, 3, 4, 5), (0, 3)),
    ],
)
def test_the_likelier_stacking_axis_comes_first(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    assert stacking_axes(shape) == axes


def test_candidates_go_from_the_finest_frames_to_the_unstacked_observation() -> None:
    sizes = [(layout.n_stack, layout.axis) for layout in candidate_layouts((84, 84, 12), np.uint8)]
    assert sizes == [(12, 2), (6, 2), (4, 2), (3, 2), (2, 2), (1, 0)]


def test_sizes_follow_from_the_layout() -> None:
    layout = StackLayout((10, 7, 6), np.dtype(np.float32), 2, 2)
    assert (layout.stack_bytes, layout.frame_bytes, layout.frame_channels, layout.pixels) == (1680, 840, 3, 70)
    assert not layout.planar


@pytest.mark.parametrize("n_stack", [0, -1, 7, 256])
def test_a_stack_size_that_does_not_divide_the_channels_is_refused(n_stack: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        FrameStore.adaptive(10, 1, (12, 8, 20), np.uint8, n_stack=n_stack)
    assert f"n_stack={n_stack}" in str(caught.value)
    assert "12 channels" in str(caught.value)
    assert "[1, 2, 3, 4, 6, 12]" in str(caught.value)
    assert "n_stack=None" in str(caught.value)


def test_a_stack_size_that_divides_one_axis_only_says_which_axis_it_is() -> None:
    assert FrameStore.adaptive(10, 1, (12, 8, 20), np.uint8, n_stack=4).layout.axis == 0
    assert FrameStore.adaptive(10, 1, (12, 8, 20), np.uint8, n_stack=5).layout.axis == 2


def seen(layout: StackLayout, contents: str, n_steps: int = 16, **options: float) -> tuple[np.ndarray, np.ndarray]:
    pairs = list(transitions(layout, n_envs=1, n_steps=n_steps, contents=contents, **options))  # type: ignore[arg-type]
    return np.concatenate([before for before, _ in pairs]), np.concatenate([after for _, after in pairs])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.n_stack > 1], ids=str)
@pytest.mark.parametrize("contents", ["noise", "mixed"])
@pytest.mark.parametrize("episode", [0, 3])
def test_a_stack_is_found(layout: StackLayout, contents: str, episode: int) -> None:
    before, after = seen(layout, contents, episode=episode)
    assert find_layout(layout.shape, layout.dtype, before, after) == layout


def test_an_odd_transition_does_not_hide_the_stack() -> None:
    layout = LAYOUTS[0]
    before, after = seen(layout, "noise")
    after[5] = after[5, ::-1].copy()
    assert continues(layout, before, after).sum() == 15
    assert find_layout(layout.shape, layout.dtype, before, after) == layout


def test_the_first_transition_after_a_reset_shows_the_stack() -> None:
    before, after = seen(LAYOUTS[0], "noise", n_steps=1)
    assert not before[0, :3].any()
    assert find_layout((4, 12, 11), np.uint8, before, after) == LAYOUTS[0]


def test_images_that_stand_still_say_nothing() -> None:
    image = np.random.default_rng(0).integers(256, size=(5, 4, 6, 6), dtype=np.uint8)
    assert find_layout((4, 6, 6), np.uint8, image, image) is None


def test_noise_is_not_stacked() -> None:
    before, after = np.random.default_rng(0).integers(256, size=(2, 9, 4, 6, 6), dtype=np.uint8)
    found = find_layout((4, 6, 6), np.uint8, before, after)
    assert found is not None
    assert found.n_stack == 1


def test_contents_are_compared_as_bytes() -> None:
    layout = StackLayout((2, 3), np.dtype(np.float32), 2, 0)
    before = np.array([[[1, 1, 1], [np.nan, 0, 1]]] * 2, dtype=np.float32)
    after = before[:, ::-1].copy()
    assert continues(layout, before, after).all()
    after[1, 0, 1] = -0.0
    assert continues(layout, before, after).tolist() == [True, False]
