from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from rl_ext_core.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    NotCopyableError,
    OutOfMemoryError,
)
from rl_ext_core.frames.pool import FramePool
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage

WRONG = [
    ({"max_size": 0}, InvalidArgumentError, "max_size=0 must be at least 1"),
    ({"max_size": 2.5}, InvalidTypeError, "max_size=2.5 is not a whole number"),
    ({"ndim": 0}, InvalidArgumentError, "ndim=0 must be at least 1"),
    ({"codec": "gzip"}, InvalidArgumentError, "unknown codec 'gzip'"),
    ({"max_error": -1}, InvalidArgumentError, "max_error=-1"),
    ({"max_error": 4, "codec": "raw"}, InvalidArgumentError, "max_error=4 has no effect on codec='raw'"),
    ({"block_length": 3}, InvalidArgumentError, "block_length=3 is not a power of two"),
    ({"n_stack": 5}, InvalidArgumentError, "n_stack=5 does not divide"),
    ({"pixels": ["image"]}, InvalidArgumentError, "'image' is no tensor of the data"),
    ({"pixels": ["action"]}, InvalidArgumentError, "'action' is no tensor of the data"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_arguments_that_cannot_be_used_are_refused_with_a_way_out(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        FrameStorage(**{"max_size": 10, **options}).set(0, Videos(1).collect(1)[0, 0])


def _data(n: int = 5) -> TensorDict:
    return Videos(1).collect(n).reshape(-1)


def _changed(key: Any, value: Any) -> TensorDict:
    data = _data()
    data[key] = value
    return data


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (_changed("pixels", torch.zeros(5, 4, 28, 20, dtype=torch.uint8)), InvalidArgumentError, "'pixels' has shape"),
        (_changed("pixels", torch.zeros(5, 4, 28, 24)), InvalidTypeError, "'pixels' has dtype torch.float32"),
        (_changed(("next", "pixels"), torch.zeros(5, 4, 28, 24)), InvalidTypeError, "has dtype torch.float32"),
        (_changed(("next", "reward"), torch.zeros(5, 2)), InvalidArgumentError, "'reward'.* has shape"),
        (torch.zeros(5, 4, 28, 24), InvalidTypeError, "FrameStorage stores TensorDicts, got Tensor"),
        ({"pixels": torch.zeros(5, 4, 28, 24)}, InvalidTypeError, "FrameStorage stores TensorDicts, got dict"),
    ],
)
def test_data_that_does_not_fit_is_refused_and_changes_nothing(data: Any, error: type[Exception], text: str) -> None:
    storage = FrameStorage(8)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(_data(12)[:8])
    before, held = storage[:].clone(), storage._columns[0].pool._pool.held
    with pytest.raises(error, match=text):
        buffer.extend(data)
    assert len(storage) == 8
    assert storage._columns[0].pool._pool.held == held
    assert_same(storage[:], before)


def test_a_failure_in_the_middle_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FrameStorage(50)
    storage.set(range(20), _data(20))
    before, held = storage[:].clone(), storage._columns[0].pool._pool.held

    def fail(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError("no more")

    for place, name in ((FramePool, "put"), (type(storage._storage), "__setitem__")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(OutOfMemoryError):
                storage.set(range(15, 25), _data(10))
        assert len(storage) == 20
        assert storage._columns[0].pool._pool.held == held
        assert_same(storage[:], before)


def test_a_pool_with_no_numbers_left_refuses_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FrameStorage(50)
    storage.set(range(20), _data(20))
    before = storage[:].clone()
    room = storage._columns[0].pool._pool._room
    monkeypatch.setattr(room, "_sizes", room._sizes._replace(pages=30))
    with pytest.raises(OutOfMemoryError, match="pass a smaller max_size"):
        storage.set(range(15, 45), _data(30))
    assert_same(storage[:], before)


def test_reading_an_empty_storage_says_so() -> None:
    with pytest.raises(RuntimeError, match="non-initialized"):
        FrameStorage(5)[0]


def test_without_numba_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "numba" else find(name))
    with pytest.raises(MissingDependencyError, match=r'pip install "rl-ext\[frames\]"'):
        FrameStorage(5).set(0, _data()[0])


def test_an_empty_storage_cannot_go_to_another_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(FrameStorage(5),))
    with pytest.raises(NotCopyableError, match="add something first"):
        process.start()


def test_an_empty_storage_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(FrameStorage(5, codec="raw")))
    copy.set(0, _data()[0])
    assert len(copy) == 1


def _use(storage: FrameStorage, said: Any) -> None:
    try:
        storage.set(0, _data()[0])
    except NotCopyableError as error:
        said.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_storage_that_came_along_with_a_fork_is_not_used() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(8))
    buffer.extend(_data())
    before = buffer[:].clone()
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    child = context.Process(target=_use, args=(buffer.storage, said))
    child.start()
    assert "came along with a fork" in said.get(timeout=100)
    child.join(60)
    assert_same(buffer[:], before)
