"""Tests that competitors of the track ``buffers`` get the transitions of the played game."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _field_environments as worlds
from benchmarks import field_buffers


def play(lengths: tuple[int, ...]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield transitions of episodes with random frames, whose first stack repeats one frame."""
    rng = np.random.default_rng(0)
    height, width, n_stack = field_buffers.SHAPE
    for length in lengths:
        observation = np.repeat(rng.integers(0, 256, (height, width, 1), np.uint8), n_stack, axis=-1)
        for step in range(length):
            newest = rng.integers(0, 256, (height, width, 1), np.uint8)
            following = np.concatenate([observation[..., 1:], newest], axis=-1)
            yield observation, following, step == length - 1
            observation = following


def test_loaded_transitions_equal_the_played_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (5, 1, 2, 7)
    monkeypatch.setattr(worlds, "play_pong", lambda count: play(lengths))
    field_buffers.save_play(tmp_path, sum(lengths))
    loaded = field_buffers.load_play(tmp_path)
    for expected in [*play(lengths), *play(lengths)]:  # the play repeats
        observation, following, done = next(loaded)
        np.testing.assert_array_equal(observation, expected[0], strict=True)
        np.testing.assert_array_equal(following, expected[1], strict=True)
        assert done == expected[2]
