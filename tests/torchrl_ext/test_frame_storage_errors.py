from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torchrl.data import TensorDictMaxValueWriter, TensorDictReplayBuffer

from rl_ext_core.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    NotCopyableError,
    OutOfMemoryError,
)
from rl_ext_core.frames.log import FrameLog
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage

WRONG = [
    ({"max_size": 0}, InvalidArgumentError, "max_size=0 must be at least 1"),
    ({"max_size": 2.5}, InvalidTypeError, "max_size=2.5 is not a whole number"),
    ({"ndim": 0}, InvalidArgumentError, "ndim=0 must be at least 1"),
    ({"codec": "gzip"}, InvalidArgumentError, "codec='gzip' is unknown"),
    ({"max_error": -1}, InvalidArgumentError, "max_error=-1"),
    ({"max_error": 4, "codec": "raw"}, InvalidArgumentError, "max_error=4 has no effect on codec='raw'"),
    ({"n_stack": 5}, InvalidArgumentError, "n_stack=5 does not divide"),
    ({"pixels": ["image"]}, InvalidArgumentError, "'image' is not a tensor of the data"),
    ({"pixels": ["action"]}, InvalidArgumentError, "'action' is not a tensor of the data"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_invalid_arguments_are_refused_with_a_fix(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FrameStorage(**{"max_size": 10, **options}).set(0, Videos(1).collect(1)[0, 0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda"), 0])
def test_missing_gpu_is_refused_before_data_is_collected(device: Any) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"device=.* is not available.*device="):
        FrameStorage(10, device=device)


def _make_data(n: int = 5) -> TensorDict:
    """Collect ``n`` transitions of one environment."""
    return Videos(1).collect(n).reshape(-1)


def test_max_value_writer_does_not_count_refused_elements() -> None:
    def extend(n: int, rank: float, side: int = 32) -> None:
        """Add ``n`` elements of one rank, with images of one size."""
        pixels = torch.full((n, side, side), int(rank), dtype=torch.uint8)
        buffer.extend(TensorDict({"rank": torch.full((n,), rank), "pixels": pixels}, [n]))

    writer = TensorDictMaxValueWriter(rank_key="rank")
    buffer = TensorDictReplayBuffer(storage=FrameStorage(6), batch_size=2, writer=writer)
    extend(4, 1.0)
    with pytest.raises(InvalidArgumentError, match="nothing was stored"):
        extend(4, 5.0, side=16)
    for rank in (2.0, 3.0, 4.0, 6.0):
        extend(2, rank)
    assert buffer[:]["rank"].tolist() == buffer[:]["pixels"][:, 0, 0].tolist() == [3, 3, 4, 4, 6, 6]


def test_exhausted_memory_refuses_elements_and_keeps_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FrameStorage(50)
    storage.set(range(20), _make_data(20))
    before = storage[:].clone()
    left = 0

    def new_segment(log: FrameLog, *arguments: Any) -> Any:
        """Count a segment, and raise if there is none left."""
        nonlocal left
        left -= 1
        if left < 0:
            raise OutOfMemoryError("no memory")
        return opened(log, *arguments)

    opened = FrameLog._new_segment
    noise = Videos(30, seed=9).collect(1).reshape(-1)  # other environments share no frames
    with monkeypatch.context() as patch:
        patch.setattr(FrameLog, "_new_segment", new_segment)
        with pytest.raises(OutOfMemoryError, match="no memory"):
            storage.set(range(15, 45), noise)
    assert_same(storage[:], before)
    storage.set(range(15, 45), noise)
    assert torch.equal(storage[15:45]["pixels"].clone(), noise["pixels"])


def _report_refusal(storage: FrameStorage, messages: Any) -> None:
    """Write to a storage in a forked process, and send the error's text to the parent."""
    try:
        storage.set(0, _make_data()[0])
    except NotCopyableError as error:
        messages.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_cannot_use_the_storage() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(8))
    buffer.extend(_make_data())
    before = buffer[:].clone()
    context = multiprocessing.get_context("fork")
    messages = context.Queue()
    child = context.Process(target=_report_refusal, args=(buffer.storage, messages))
    child.start()
    assert "this process was forked" in messages.get(timeout=100)
    child.join(60)
    assert_same(buffer[:], before)


@tensorclass
class _Captioned:
    """Tensorclass with an image and a text."""

    pixels: torch.Tensor
    text: str


def test_tensorclasses_with_text_can_be_stored_more_than_once() -> None:
    storage = FrameStorage(10)
    for number in range(2):
        images = torch.full((3, 40, 40), number, dtype=torch.uint8)
        storage.set(range(3 * number, 3 * number + 3), _Captioned(images, text="some text", batch_size=[3]))
    assert len(storage) == 6
    assert storage.get([1, 4]).pixels[:, 0, 0].tolist() == [0, 1]
    assert set(storage.get([1, 4]).text) == {"some text"}


@pytest.mark.parametrize("make", [lambda data: data["pixels"], lambda data: {"pixels": data["pixels"]}])
def test_other_elements_than_tensordicts_are_refused(make: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"FrameStorage stores TensorDicts, got .* Use TensorDict\(\{'pixels'"):
        FrameStorage(40).set(range(5), make(_make_data()))


def test_elements_of_different_shapes_are_refused() -> None:
    first, short = _make_data(1)[0], _make_data(1)[0].set("action", torch.zeros(3))
    agents = [TensorDict({"pixels": torch.zeros(size, 40, 3, dtype=torch.uint8)}) for size in (36, 37)]
    nested = TensorDict({"agents": LazyStackedTensorDict(*agents).expand(4, 2)}, [4])
    for filled in (False, True):
        for rows in ([first, short], LazyStackedTensorDict(first, short), nested):
            storage = FrameStorage(10)
            if filled:
                storage.set(range(4), _make_data(4))
            with pytest.raises(InvalidArgumentError, match="differ in shape"):
                storage.set(range(len(rows)), rows)
            assert (len(storage), storage.initialized) == (4 * filled, filled)
