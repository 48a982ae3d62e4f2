"""Lossy buffers stay within their error bound, and buffers warn if they will not fit into memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import planning
from rl_ext_core.frames.planning import MemoryWatch
from sb3_ext import CompressedReplayBuffer
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


IMAGES = spaces.Box(0, 255, (9, 100, 100), np.uint8), spaces.Discrete(3)


def test_too_large_buffer_warns_with_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 3_000_000_000)
    with pytest.warns(UserWarning, match="3 GB are free") as caught:
        CompressedReplayBuffer(1_000_000, *IMAGES, device="cpu", n_envs=4)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "uncompressed they would take 180 GB" in text
    assert "rl-ext plan --shape 9,100,100 --size 1000000 --envs 4 --env ID" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("options", [{"max_bytes": 10**9}, {"storage_dir": "there"}], ids=str)
def test_limited_buffer_does_not_warn_about_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    monkeypatch.chdir(tmp_path)
    CompressedReplayBuffer(10_000, *IMAGES, device="cpu", **options).close()


def test_memory_warning_uses_measured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryWatch, "MEASURED_AFTER", 150)
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (3, 30, 30), np.uint8)
    monkeypatch.setattr(planning, "available_memory", lambda: 10**12)
    buffer = CompressedReplayBuffer(100_000, space, IMAGES[1], device="cpu")
    monkeypatch.setattr(planning, "available_memory", lambda: 10**7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            image = rng.integers(256, size=(1, *space.shape)).astype(np.uint8)
            buffer.add(image, image, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    assert len(caught) == 1
    assert "measured so far" in str(caught[0].message)
