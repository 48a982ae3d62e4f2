"""Refusals of ``decode_on_gpu``. The state machine of the SB3 buffers tests that it changes nothing on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import sb3_ext
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames.gpu_decode import check_decode_on_gpu
from torchrl_ext import FrameStorage

IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), IMAGE))


def make_buffer(kind: Any = sb3_ext.CompressedReplayBuffer, space: Any = IMAGE, **options: Any) -> Any:
    return kind(20, space, spaces.Discrete(2), device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"decode_on_gpu": "cuda"}, InvalidTypeError, "decode_on_gpu='cuda', expected True or False"),
        ({"decode_on_gpu": 1}, InvalidTypeError, "decode_on_gpu=1"),
        ({"decode_on_gpu": True, "max_error": 4}, InvalidArgumentError, "exact frames, but max_error=4"),
        ({"decode_on_gpu": True, "codec": "jpeg"}, InvalidArgumentError, "exact frames, but codec='jpeg'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_buffer(**options)
    with pytest.raises(error, match=text):
        FrameStorage(20, **options)


def test_buffers_that_change_samples_refuse_it() -> None:
    with pytest.raises(InvalidArgumentError, match="n-step returns need several"):
        make_buffer(sb3_ext.CompressedNStepReplayBuffer, decode_on_gpu=True)
    with pytest.raises(InvalidArgumentError, match="hindsight"):
        make_buffer(sb3_ext.CompressedHerReplayBuffer, GOALS, env=None, decode_on_gpu=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_missing_triton_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="pip install triton"):
        check_decode_on_gpu(True, "cuda", codec="patch", max_error=0)
