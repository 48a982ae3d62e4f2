from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.codecs import JpegCodec
from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import PIXELS, STACK, make_transitions
from torchrl_ext import FrameStorage

N = 120


def make_frames(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return images of a fixed background with a moving dot, shape ``(n, 40, 40)``."""
    background = torch.rand(40, 40, generator=torch.Generator().manual_seed(0))
    frames = background.repeat(n, 1, 1)
    frames[torch.arange(n), torch.arange(n) % 40, torch.arange(n) * 7 % 40] = 2.0
    return frames.to(dtype)


def make_steps(form: str, dtype: torch.dtype = torch.float32) -> TensorDict:
    """Return steps whose images are stacked and nested as ``form`` says."""
    frames = make_frames(N + 4, dtype)
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1)  # (N + 1, 4, 40, 40)
    images = {"frame": frames[: N + 1, None], "HWC": stacks.movedim(1, -1)}.get(form, stacks)
    key: Any = ("observation", "camera") if form == "nested" else "pixels"
    steps = TensorDict({"action": torch.zeros(N, 3)}, [N])
    steps[key] = images[:-1].contiguous()
    if form != "no next":
        steps.set(("next", *key) if isinstance(key, tuple) else ("next", key), images[1:].contiguous())
    return steps


@pytest.mark.parametrize(
    ("form", "dtype", "batch", "pixels"),
    [
        *itertools.product(["stack", "nested"], [torch.float32], [1, 30], [None]),
        ("HWC", torch.float16, 30, None),
        ("frame", torch.float64, 1, None),
        ("no next", torch.float32, N, None),
        *(("stack", torch.float64, N, pixels) for pixels in (["pixels"], PIXELS)),
    ],
)
def test_float_images_are_compressed_by_default(form: str, batch: int, dtype: torch.dtype, pixels: Any) -> None:
    """A named key includes the one under ``"next"``."""
    steps = make_steps(form, dtype)
    buffer = TensorDictReplayBuffer(storage=FrameStorage(N, pixels=pixels), batch_size=16)
    for rows in steps.split(batch):
        buffer.extend(rows)
    for key in steps.keys(True, True):
        assert torch.equal(buffer[:][key].clone(), steps[key])
    assert buffer.storage.nbytes < steps.bytes() / 5


@pytest.mark.parametrize(
    "values",
    [torch.randn(N, 2000), torch.randn(N, 2, 3, 400), torch.randn(N, 40, 40)],
    ids=["vector", "few rows", "matrix"],
)
def test_other_floats_are_not_images(values: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    storage = FrameStorage(N)
    with caplog.at_level(logging.WARNING):
        storage.set(range(N), TensorDict({"values": values}, [N]))
    assert 'pixels=["pixels", ("next", "pixels")]' in caplog.text
    assert not storage._columns


def _make_bytes() -> TensorDict:
    steps = make_steps("stack")
    for key in PIXELS:
        steps[key] = (steps[key].clamp(0, 1) * 255).round().to(torch.uint8)
    return steps


def _divide(steps: TensorDict, divisor: int = 255) -> TensorDict:
    steps = steps.clone()
    for key in PIXELS:
        steps[key] = steps[key] / divisor
    return steps


def test_floats_of_bytes_take_as_much_as_bytes(tmp_path: Path) -> None:
    steps = _make_bytes()
    storages = {name: FrameStorage(N) for name in ("bytes", "floats", "other floats")}
    for storage, rows in zip(storages.values(), (steps, _divide(steps), _divide(steps, 254)), strict=True):
        for part in (rows[:70], rows[70:]):
            storage.set(range(len(storage), len(storage) + len(part)), part)
        assert torch.equal(storage[:]["pixels"].clone(), rows["pixels"])
    sizes = {name: storage.nbytes for name, storage in storages.items()}
    assert sizes["floats"] < 1.05 * sizes["bytes"] < sizes["other floats"] / 2
    storages["floats"].dumps(tmp_path)
    loaded = FrameStorage(N)
    loaded.loads(tmp_path)
    assert loaded.nbytes < 1.05 * sizes["floats"]
    assert torch.equal(loaded[torch.arange(N)]["next", "pixels"], _divide(steps)["next", "pixels"])


@pytest.mark.parametrize("value", [0.5, -0.0, float("nan"), 256 / 255, -1 / 255, float("inf")])
def test_other_floats_after_bytes_are_returned_bit_for_bit(value: float) -> None:
    steps = _divide(_make_bytes())
    storage = FrameStorage(N)
    storage.set(range(80), steps[:80])
    steps["next", "pixels"][100, 2, 3, 4] = value
    storage.set(range(80, N), steps[80:])
    for key in PIXELS:
        assert torch.equal(storage[:][key].clone().view(torch.int32), steps[key].view(torch.int32))


def test_only_batches_of_usual_size_are_recycled() -> None:
    storage = FrameStorage(N)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    buffer.extend(make_steps("stack"))
    before = storage.nbytes
    for _ in range(3):
        buffer[:]["pixels"].float().mean()
        buffer[:]["next", "pixels"].clone()
    buffer[list(range(N))]
    assert (storage.nbytes, storage.recycled_nbytes) == (before, 0)
    for _ in range(3):
        buffer.sample()
    assert storage.nbytes == before
    assert storage.recycled_nbytes <= 4 * 16 * 4 * 40 * 40 * 4


@pytest.mark.parametrize(("batch", "quality"), [(1, 95), (7, 50)])
def test_jpeg_images_are_close_and_survive_failures(batch: int, quality: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, data = FrameStorage(100, codec="jpeg", quality=quality, n_stack=STACK), make_transitions(80, smooth=True)
    for start in range(0, 80, batch):
        storage.set(range(start, min(start + batch, 80)), data[start : start + batch])
    stored = storage[torch.arange(80)]
    with monkeypatch.context() as patch:
        patch.setattr(JpegCodec, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            storage.set(range(30, 50), data[40:60])
    assert_same(storage[torch.arange(80)], stored)
    for key in PIXELS:
        assert 0 < (stored[key].float() - data[key].float()).abs().mean() < 4


@pytest.mark.parametrize(
    ("saved", "options", "text"),
    [
        ({"codec": "jpeg", "quality": 80}, {"codec": "jpeg"}, "made with codec='jpeg', quality=80"),
        ({"max_error": 4}, {"max_error": 3}, "made with max_error=4"),
    ],
)
def test_loading_a_lossier_state_is_refused(saved: dict[str, Any], options: dict[str, Any], text: str) -> None:
    storage = FrameStorage(100, **saved)
    storage.set(range(70), make_transitions(70, smooth=True))
    state = storage.state_dict()
    for other in ({}, options):
        with pytest.raises(InvalidArgumentError, match=text):
            FrameStorage(100, **other).load_state_dict(state)
    again = FrameStorage(100, **saved)
    again.load_state_dict(state)
    assert_same(again[:].clone(), storage[:].clone())
