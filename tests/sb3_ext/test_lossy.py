"""Lossy buffers stay within their error bound, and buffers warn if they will not fit into memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import planning
from sb3_ext import CompressedReplayBuffer, replay_buffers
from tests.sb3_ext.buffer_envs import add_all, collect_transitions, image_env, make_buffers_for


def fill_buffers(**options: Any) -> tuple[Any, Any]:
    """Return a compressed buffer and SB3's, both full, with some rows overwritten."""
    venv = image_env(3, n_stack=3, still=False)
    buffers = make_buffers_for("plain", 200, venv, **options)
    add_all(buffers, collect_transitions(venv, 230))
    return buffers


def test_lossy_samples_are_within_max_error() -> None:
    ours, theirs = fill_buffers(max_error=4)
    assert theirs.dones.sum() > 10
    assert theirs.timeouts.sum() > 3
    max_abs_error = 0
    for name in ("observations", "next_observations"):
        off = np.abs(np.asarray(getattr(ours, name)).astype(int) - getattr(theirs, name))
        max_abs_error = max(max_abs_error, int(off.max()))
    assert max_abs_error <= 4
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    draws = []
    for buffer in (ours, theirs):
        np.random.seed(3)
        draws.append(buffer.sample(64))
    sample, expected = draws
    assert (sample.observations.int() - expected.observations.int()).abs().max() <= 4
    assert (sample.rewards == expected.rewards).all()


def test_jpeg_options_require_codec_jpeg() -> None:
    ours, _ = fill_buffers(codec="jpeg", quality=80)
    assert (ours.codec, ours.n_stack) == ("jpeg", 3)
    for options, text in (
        ({"quality": 80}, "quality=80 is for codec='jpeg' only"),
        ({"codec": "jpeg", "max_error": 4}, "max_error=4 has no effect on codec='jpeg'"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            fill_buffers(**options)


@pytest.mark.parametrize("options", [{}, {"max_bytes": 10**7}, {"storage_dir": "there"}], ids=str)
def test_too_large_buffer_warns_once_unless_it_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay_buffers, "MEASURED_AFTER", 150)
    monkeypatch.setattr(planning, "available_memory", lambda: 10**7)
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (3, 30, 30), np.uint8)
    buffer = CompressedReplayBuffer(100_000, space, spaces.Discrete(3), device="cpu", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            image = rng.integers(256, size=(1, *space.shape)).astype(np.uint8)
            buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    buffer.close()
    assert len(caught) == (not options)
    assert all("uncompressed they would take 540 MB" in str(warning.message) for warning in caught)
