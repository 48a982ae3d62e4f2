"""What observations are stacked of is found from the data."""

from __future__ import annotations

import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import FrameStore, StackLayout
from rl_ext_core.frames.layout import find_layout, stacking_axes
from rl_ext_core.testing import LAYOUTS, transitions


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
