"""``FrameStorage(codec="jpeg")``, compared with frames that simplejpeg compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.codecs import JpegCodec
from rl_ext_core.frames.layout import StackLayout
from tests.core.frames.jpeg_oracle import as_jpeg
from tests.torchrl_ext.frame_data import HEIGHT, STACK, WIDTH, Videos, assert_same
from torchrl_ext import FrameStorage

GREY = StackLayout((STACK, HEIGHT, WIDTH), np.dtype(np.uint8), STACK, 0)


def through_jpeg(data: TensorDict, quality: int = 95) -> TensorDict:
    """Copy transitions, and compress and decompress their images with JPEG."""
    made = data.clone()
    for key in ("pixels", ("next", "pixels")):
        made[key] = torch.from_numpy(as_jpeg(data[key].numpy(), GREY, quality))
    return made


def make_pictures(n: int, *, seed: int = 0, n_envs: int = 1) -> TensorDict:
    """Collect transitions whose images have smooth backgrounds."""
    return Videos(n_envs, seed=seed, smooth=True).collect(n).reshape(-1)


def make_buffer(size: int = 100, **options: Any) -> TensorDictReplayBuffer:
    """Make a buffer over a FrameStorage that compresses with JPEG."""
    return TensorDictReplayBuffer(storage=FrameStorage(size, **{"codec": "jpeg", **options}), batch_size=16)


def make_lazy_buffer(size: int = 100, ndim: int = 1) -> TensorDictReplayBuffer:
    """Make a buffer over a LazyTensorStorage."""
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=16)


def compare_buffers(ours: Any, theirs: Any) -> None:
    """Assert that two buffers have equal contents and return equal samples."""
    assert len(ours) == len(theirs)
    assert_same(ours[:].clone(), theirs[:])
    for seed in range(3):
        drawn = []
        for each in (ours, theirs):
            torch.manual_seed(seed)
            np.random.seed(seed)
            drawn.append(each.sample())
        assert_same(*drawn)


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize("quality", [95, 50])
@pytest.mark.parametrize("batch", [1, 7, 60])
def test_samples_equal_jpeg_of_each_frame(batch: int, quality: int) -> None:
    # Without n_stack, the first 64 images are stored exactly, because their layout is not known yet.
    ours, theirs = make_buffer(quality=quality, n_stack=STACK), make_lazy_buffer()
    data = make_pictures(140, n_envs=2)
    for part, made in zip(data.split(batch), through_jpeg(data, quality).split(batch), strict=True):
        ours.extend(part.clone())
        theirs.extend(made.clone())
        if batch > 1:
            compare_buffers(ours, theirs)
    compare_buffers(ours, theirs)
    assert ours.storage._columns[0].table.part.layout == GREY


@pytest.mark.parametrize(
    ("saved", "options", "text"),
    [
        ({"codec": "jpeg", "quality": 80}, {}, "made with codec='jpeg', quality=80"),
        ({"codec": "jpeg", "quality": 80}, {"codec": "jpeg"}, "made with codec='jpeg', quality=80"),
        ({"max_error": 4}, {}, "made with max_error=4"),
        ({"max_error": 4}, {"max_error": 3}, "made with max_error=4"),
    ],
)
def test_loading_a_lossier_state_is_refused(saved: dict[str, Any], options: dict[str, Any], text: str) -> None:
    storage = FrameStorage(100, **saved)
    storage.set(range(70), make_pictures(70))
    state = storage.state_dict()
    with pytest.raises(InvalidArgumentError, match=text):
        FrameStorage(100, **options).load_state_dict(state)
    again = FrameStorage(100, **saved)
    again.load_state_dict(state)
    assert_same(again[:].clone(), storage[:].clone())


def test_failed_encoding_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, data = make_buffer(50, n_stack=STACK), make_pictures(80)
    buffer.extend(data[:40].clone())
    before = buffer[:].clone()

    def raise_memory_error(*_: Any) -> None:
        """Raise MemoryError."""
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(JpegCodec, "encode", raise_memory_error)
        with pytest.raises(MemoryError):
            buffer.storage.set(range(30, 50), data[40:60])
    assert_same(buffer[:].clone(), before)
    buffer.storage.set(range(30, 50), data[40:60])
    assert torch.equal(buffer[30:50]["pixels"].clone(), through_jpeg(data[40:60])["pixels"])
