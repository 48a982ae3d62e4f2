from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter, TensorDictReplayBuffer

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


def _replace_entry(key: Any, value: Any) -> Any:
    """Return a function that replaces an entry of a TensorDict."""
    return lambda data: data.set(key, value)


def _change_entry(key: Any, change: Any) -> Any:
    """Return a function that replaces an entry by the result of ``change`` for it."""
    return lambda data: data.set(key, change(data[key]))


MISFITS: list[tuple[Any, type[Exception], str]] = [
    (
        _replace_entry("pixels", torch.zeros(5, 4, 28, 20, dtype=torch.uint8)),
        InvalidArgumentError,
        "'pixels' has shape",
    ),
    (_replace_entry("pixels", torch.zeros(5, 4, 28, 24)), InvalidTypeError, "'pixels' has dtype torch.float32"),
    (_replace_entry(("next", "pixels"), torch.zeros(5, 4, 28, 24)), InvalidTypeError, "has dtype torch.float32"),
    (_replace_entry(("next", "reward"), torch.zeros(5, 2)), InvalidArgumentError, "'reward'.* has shape"),
    (_change_entry(("next", "reward"), torch.Tensor.double), InvalidTypeError, "nothing was stored"),
    (_change_entry(("next", "reward"), lambda value: value[:, :, None]), InvalidArgumentError, "nothing was stored"),
    (_change_entry("action", lambda value: TensorDict({"a": value}, [5])), InvalidTypeError, "nothing was stored"),
    (_replace_entry("inner", torch.zeros(5)), InvalidTypeError, "nothing was stored"),
    (lambda data: data["pixels"], InvalidTypeError, "FrameStorage stores TensorDicts, got Tensor"),
    (lambda data: {"pixels": data["pixels"]}, InvalidTypeError, "FrameStorage stores TensorDicts, got dict"),
]


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


@pytest.mark.parametrize(("wrong", "error", "text"), MISFITS)
@pytest.mark.parametrize("in_folder", [False, True])
def test_invalid_data_is_refused_and_changes_nothing(
    wrong: Any, error: type[Exception], text: str, in_folder: bool, tmp_path: Any
) -> None:
    storage = FrameStorage(40, storage_dir=tmp_path / "storage" if in_folder else None)
    buffer, data = ReplayBuffer(storage=storage), _make_data(30)
    with pytest.raises((InvalidArgumentError, InvalidTypeError)):  # more elements than places, and invalid data
        storage.set(torch.arange(3), wrong(data[:5].clone()))
    assert not storage.initialized
    buffer.extend(data[:20].clone())
    with pytest.raises(error, match=text):
        buffer.extend(wrong(data[:5].clone()))
    assert len(buffer) == 20
    assert storage._columns[0].table.n_stored == 20
    buffer.extend(data[20:].clone())
    assert_same(storage[torch.arange(30)], data.to("cpu"))
    storage.close()


@pytest.mark.parametrize("key", ["pixels", ("next", "reward"), "next"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_new_elements_without_a_key_are_refused(key: Any, in_folder: bool, tmp_path: Path) -> None:
    # Its places would keep the values of the elements that are overwritten (pytorch/rl#2437).
    storage = FrameStorage(20, storage_dir=tmp_path / "storage" if in_folder else None)
    buffer, data = TensorDictReplayBuffer(storage=storage), _make_data(25).to("cpu")
    buffer.extend(data[:20].clone())
    for add, rows in ((buffer.extend, data[:3].clone()), (buffer.add, data[0].clone())):
        with pytest.raises(InvalidArgumentError, match=r"'(pixels|next)'.* is missing, .*nothing was stored"):
            add(rows.exclude(key))
    assert_same(storage[torch.arange(20)].exclude("index"), data[:20])
    buffer[2:4] = TensorDict({"next": {"reward": data[20:22]["next", "reward"]}}, [2])  # changes one key
    assert storage[2:4]["next", "reward"].equal(data[20:22]["next", "reward"])
    ReplayBuffer(storage=storage).extend(data[20:].clone())  # without "index"
    assert_same(storage[torch.arange(5)].exclude("index"), data[20:])
    storage.close()


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


def _make_both_storages(size: int = 32, *, ndim: int = 1) -> tuple[FrameStorage, LazyTensorStorage]:
    """Fill a FrameStorage and a LazyTensorStorage with the same elements."""
    storages = FrameStorage(size, ndim=ndim), LazyTensorStorage(size, ndim=ndim)
    for storage in storages:
        n = size if ndim == 1 else size // 4
        data = Videos(4, seed=1).collect(n).transpose(0, 1) if ndim == 2 else Videos(1, seed=1).collect(n).reshape(-1)
        storage.set(range(n), data.contiguous())
    return storages


INDICES = [[3, 3, 3], [-29, 3, -29], [3, -1, 31, 0], [5, 4, 5, 4, 5, 6]]


def _check_equal_after_refilling(ours: FrameStorage, theirs: LazyTensorStorage) -> None:
    """Overwrite elements until freed space is reused; assert that storages are equal."""
    for seed in range(4):
        data = Videos(1, seed=50 + seed, end=0.5).collect(8).reshape(-1)
        places = torch.arange(16, 24)
        for storage in (ours, theirs):
            storage.set(places, data.clone(), set_cursor=False)
    assert_same(ours[torch.arange(32)], theirs[torch.arange(32)])
    assert ours._columns[0].table.n_stored == 32


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("kind", [torch.tensor, list, lambda index: (torch.tensor(index),)])
def test_setting_repeated_indices_stores_the_last_element(index: list[int], kind: Any) -> None:
    ours, theirs = _make_both_storages()
    for seed in range(3):
        data = Videos(1, seed=seed + 10).collect(len(index)).reshape(-1)
        for storage in (ours, theirs):
            storage.set(kind(index), data.clone(), set_cursor=False)
    _check_equal_after_refilling(ours, theirs)


def test_setting_repeated_indices_in_two_dimensions_stores_the_last_element() -> None:
    ours, theirs = _make_both_storages(ndim=2)
    index = torch.tensor([0, 0, -8, 5]), torch.tensor([3, 3, -1, 2])
    rows = Videos(4, seed=8).collect(3).transpose(0, 1).contiguous()
    for storage in (ours, theirs):
        storage.set(index, Videos(1, seed=7).collect(4).reshape(-1), set_cursor=False)
        storage.set(torch.tensor([1, 1, -7]), rows.clone(), set_cursor=False)
    assert_same(ours[torch.arange(8)], theirs[torch.arange(8)])
    assert ours._columns[0].table.n_stored == 32


@pytest.mark.parametrize("index", [torch.tensor([32]), [-33], 32, (torch.tensor([0]), torch.tensor([0]))])
def test_writes_to_places_that_do_not_exist_are_refused(index: Any) -> None:
    storage, theirs = _make_both_storages()
    with pytest.raises(InvalidArgumentError, match="names no places of a storage of shape"):
        storage.set(index, _make_data(1)[0] if index == 32 else _make_data(1), set_cursor=False)
    assert_same(storage[torch.arange(32)], theirs[torch.arange(32)])


def test_elements_of_different_shapes_are_refused() -> None:
    storage, theirs = _make_both_storages()
    short = _make_data(2)[0].set("action", torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        storage.set(torch.tensor([0, 1]), [_make_data(1)[0], short], set_cursor=False)
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        storage.set(torch.tensor([0, 1]), LazyStackedTensorDict(_make_data(1)[0], short), set_cursor=False)
    assert_same(storage[torch.arange(32)], theirs[torch.arange(32)])
    first = FrameStorage(10)
    agents = [TensorDict({"pixels": torch.zeros(size, 40, 3, dtype=torch.uint8)}) for size in (36, 37)]
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        first.set(range(4), TensorDict({"agents": LazyStackedTensorDict(*agents).expand(4, 2)}, [4]))
    first.set(range(4), _make_data(4))
    assert len(first) == 4


@pytest.mark.parametrize("index", [None, True, (None, 3)])
def test_index_that_adds_a_dimension_is_refused(index: Any) -> None:
    storage, theirs = _make_both_storages()
    with pytest.raises(InvalidArgumentError, match=r"adds a dimension and names no elements.* Use storage\[:\] = data"):
        storage[index] = _make_data(32)
    assert_same(storage[torch.arange(32)], theirs[torch.arange(32)])


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
