from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer, TensorStorageCheckpointer

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage
from torchrl_ext.frame_storage.checkpoint import FrameStorageCheckpointer


def _buffer(size: int = 100, *, ndim: int = 1, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(size, ndim=ndim, **options), batch_size=16)


def _through_state_dict(buffer: Any, size: int, tmp_path: Path) -> Any:
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    loaded = _buffer(size, ndim=buffer.storage.ndim)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    return loaded


def _through_dumps(buffer: Any, size: int, tmp_path: Path) -> Any:
    buffer.dumps(tmp_path / "checkpoint")
    loaded = _buffer(size, ndim=buffer.storage.ndim)
    loaded.loads(tmp_path / "checkpoint")
    return loaded


def _through_pickle(buffer: Any, size: int, tmp_path: Path) -> Any:
    storage = pickle.loads(pickle.dumps(buffer.storage))
    return TensorDictReplayBuffer(storage=storage, writer=copy.deepcopy(buffer.writer), batch_size=16)


WAYS = [_through_state_dict, _through_dumps, _through_pickle]


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_larger_storage_takes_what_a_smaller_one_held(way: Any, tmp_path: Path) -> None:
    buffer = _buffer(50)
    videos = Videos(1)
    buffer.extend(videos.collect(50).reshape(-1))
    loaded = way(buffer, 80, tmp_path)
    assert_same(loaded[:], buffer[:])
    loaded.extend(videos.collect(40).reshape(-1))
    assert len(loaded) == 80


@pytest.mark.parametrize("way", WAYS[:2])
def test_what_does_not_fit_is_refused_and_changes_nothing(way: Any, tmp_path: Path) -> None:
    buffer = _buffer(50)
    buffer.extend(Videos(1).collect(50).reshape(-1))
    with pytest.raises(InvalidArgumentError, match=r"50 elements .* do not fit into FrameStorage\(20"):
        way(buffer, 20, tmp_path)


def test_an_empty_storage_is_saved_as_empty_and_cannot_be_dumped(tmp_path: Path) -> None:
    buffer = _buffer()
    buffer.extend(Videos(1).collect(10).reshape(-1))
    buffer.storage.load_state_dict(FrameStorage(100).state_dict())
    assert len(buffer.storage) == 0
    with pytest.raises(InvalidArgumentError, match="nothing to save"):
        FrameStorage(100).dumps(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_takes_the_place_of_the_one_before_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = _buffer()
    data = Videos(1).collect(100).reshape(-1)
    buffer.extend(data[:30].clone())
    storage = buffer.storage
    storage.dumps(tmp_path / "checkpoint")
    before = storage[:].clone()
    buffer.extend(data[30:].clone())
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            storage.dumps(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    loaded = FrameStorage(100)
    loaded.loads(tmp_path / "checkpoint")
    assert_same(loaded[:], before)
    storage.dumps(tmp_path / "checkpoint")
    loaded.loads(tmp_path / "checkpoint")
    assert_same(loaded[:], storage[:])


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    storage = FrameStorage(100)
    storage.set(range(30), Videos(1).collect(30).reshape(-1))
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InvalidArgumentError, match="holds other files"):
        storage.dumps(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    storage = FrameStorage(100)
    storage.set(range(60), Videos(1).collect(60).reshape(-1))
    storage.dumps(tmp_path / "checkpoint")
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 15
    target = FrameStorage(100)
    target.set(range(10), Videos(1, seed=5).collect(10).reshape(-1))
    before = target[:].clone()
    for file in files:
        contents = file.read_bytes()
        for damaged in (contents[:-1], contents[:-1] + bytes([contents[-1] ^ 1])):
            if file.name == "meta.json" and damaged.strip() == contents.strip():
                continue
            file.write_bytes(damaged)
            with pytest.raises(CorruptFileError):
                target.loads(tmp_path / "checkpoint")
        file.write_bytes(contents)
    assert_same(target[:], before)
    target.loads(tmp_path / "checkpoint")
    assert_same(target[:], storage[:])


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    storage = FrameStorage(100)
    storage.set(range(30), Videos(1).collect(30).reshape(-1))
    storage.dumps(tmp_path)
    metadata = json.loads((tmp_path / "frames.json").read_text())
    (tmp_path / "frames.json").write_text(json.dumps({**metadata, "format": 99}))
    with pytest.raises(CorruptFileError, match="has format 99"):
        FrameStorage(100).loads(tmp_path)


def test_a_checkpointer_that_would_save_no_images_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="cannot save compressed images"):
        TensorDictReplayBuffer(storage=FrameStorage(10), checkpointer=TensorStorageCheckpointer())
    buffer = TensorDictReplayBuffer(storage=FrameStorage(10), checkpointer=FrameStorageCheckpointer())
    for register in (buffer.register_save_hook, buffer.register_load_hook):
        with pytest.raises(InvalidArgumentError, match="hooks"):
            register(lambda data, **_: data)


def test_a_state_is_read_with_weights_only(tmp_path: Path) -> None:
    buffer = _buffer()
    buffer.extend(Videos(1).collect(30).reshape(-1))
    torch.save(buffer.storage.state_dict(), tmp_path / "state.pt")
    storage = FrameStorage(100)
    storage.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(storage[:], buffer[:])


def test_other_storages_and_this_one_do_not_take_each_others_states(tmp_path: Path) -> None:
    data = Videos(1).collect(30).reshape(-1)
    ours, theirs = _buffer(), TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=16)
    for buffer in (ours, theirs):
        buffer.extend(data.clone())
    for target in (theirs, TensorDictReplayBuffer(storage=LazyTensorStorage(100)), _lazy_memmap()):
        with pytest.raises(
            InvalidArgumentError, match=r"state of a FrameStorage.* buffer.extend\(frame_storage\[:\]\)"
        ):
            target.load_state_dict(ours.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"another kind of storage.* buffer.extend\(other\[:\]\)"):
        ours.load_state_dict(theirs.state_dict())
    theirs.dumps(tmp_path / "theirs")
    with pytest.raises(InvalidArgumentError, match=r"another kind of storage.* buffer.extend\(other\[:\]\)"):
        ours.loads(tmp_path / "theirs")
    assert_same(ours[:], theirs[:])


def _lazy_memmap() -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyMemmapStorage(100))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_killed_while_it_saves_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    old, new = FrameStorage(100), FrameStorage(100)
    old.set(range(30), Videos(1).collect(30).reshape(-1))
    new_data = Videos(1, seed=2).collect(40).reshape(-1)
    new.set(range(40), new_data.clone())
    seen = set()
    for call in ("rename", "replace", "unlink", "rmdir", "mkdir", "open"):
        for after in (False, True):
            for number in (0, 1, 4):
                old.dumps(tmp_path / "checkpoint")
                child = os.fork()
                if child == 0:
                    try:
                        ours = FrameStorage(100)  # that of the parent is not for its forks
                        ours.set(range(40), new_data.clone())
                        _die_at(call, number, after=after)
                        ours.dumps(tmp_path / "checkpoint")
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
                found = FrameStorage(100)
                found.loads(tmp_path / "checkpoint")
                seen.add(len(found))
                assert_same(found[:], (old if len(found) == 30 else new)[:])
    assert seen == {30, 40}


def _die_at(call: str, number: int, *, after: bool) -> None:
    before, left = getattr(os, call), [number]

    def die(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and not after:
            os._exit(1)
        result = before(*args, **kwargs)
        if left[0] < 0:
            os._exit(1)
        return result

    setattr(os, call, die)


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_of_one_element_is_saved_and_loaded(way: Any, tmp_path: Path) -> None:
    buffer = _buffer(1)
    buffer.extend(Videos(1).collect(1).reshape(-1))
    assert_same(way(buffer, 1, tmp_path)[:], buffer[:])


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_full_storage_of_two_dimensions_takes_its_own_checkpoint(way: Any, tmp_path: Path) -> None:
    buffer = _buffer(100, ndim=2)  # holds 105 of 7 environments
    for _ in range(4):
        buffer.extend(Videos(5).collect(7).transpose(0, 1).contiguous())
    loaded = way(buffer, 100, tmp_path)
    assert len(loaded) == len(buffer) > 100
    assert_same(loaded[:], buffer[:])
