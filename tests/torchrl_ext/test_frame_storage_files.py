from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, NotCopyableError, StorageError
from rl_ext_core.frames.log_folder import LogFolder
from tests.torchrl_ext.frame_data import Videos, assert_same, make_buffer, make_transitions
from torchrl_ext import FrameStorage
from torchrl_ext.frame_storage.checkpoint import FrameStorageCheckpointer


def _make_filled_buffer(n: int) -> TensorDictReplayBuffer:
    """Make a buffer of size ``n`` with ``n`` transitions."""
    buffer = make_buffer(n)
    buffer.extend(make_transitions(n))
    return buffer


def _through_state_dict(buffer: Any, size: int, tmp_path: Path) -> Any:
    """Save a buffer's state with ``torch.save``, and load it into a new buffer."""
    torch.save(buffer.storage.state_dict(), tmp_path / "state.pt")
    loaded = make_buffer(size, ndim=buffer.storage.ndim)
    state = {**buffer.state_dict(), "_storage": torch.load(tmp_path / "state.pt", weights_only=True)}
    loaded.load_state_dict(state)
    return loaded


def _through_dumps(buffer: Any, size: int, tmp_path: Path) -> Any:
    """Save a buffer with ``dumps``, and load it into a new buffer."""
    buffer.dumps(tmp_path / "checkpoint")
    loaded = make_buffer(size, ndim=buffer.storage.ndim)
    loaded.loads(tmp_path / "checkpoint")
    return loaded


@pytest.mark.parametrize("way", [_through_state_dict, _through_dumps])
@pytest.mark.parametrize("n_batches", [2, 3])
@pytest.mark.parametrize("ndim", [1, 2])
def test_full_buffer_cannot_continue_in_a_larger_one(way: Any, n_batches: int, ndim: int, tmp_path: Path) -> None:
    buffer = make_buffer(80, ndim=ndim)
    for _ in range(n_batches):
        data = Videos(2).collect(20)
        buffer.extend(data.clone() if ndim == 2 else data.reshape(-1))
    more = data[:, :3].clone() if ndim == 2 else data.reshape(-1)[:3]
    loaded = way(buffer, 100, tmp_path)
    assert_same(loaded[:], buffer[:])
    with pytest.raises(
        InvalidArgumentError, match=r"elements were loaded into FrameStorage\(100\).* FrameStorage\(80\)"
    ):
        loaded.extend(more)
    assert_same(loaded[:], buffer[:])
    loaded = way(buffer, 80, tmp_path)
    for each in (buffer, loaded):
        each.extend(more)
    assert_same(loaded[:], buffer[:])


@pytest.mark.parametrize("size", [60, 80])
def test_loaded_storage_continues_after_its_elements(size: int, tmp_path: Path) -> None:
    data = make_transitions(90)
    buffer = make_buffer(size)
    buffer.extend(data[:60])
    buffer.dumps(tmp_path)
    storage = FrameStorage(100)
    storage.loads(tmp_path / "storage")
    later = make_buffer(100)
    later.storage.loads(tmp_path / "storage")
    for loaded in (TensorDictReplayBuffer(storage=storage, batch_size=16), later):
        loaded.extend(data[60:])
        assert_same(loaded[:].exclude("index"), data.to("cpu"))


@pytest.mark.parametrize("through_files", [True, False])
def test_loaded_elements_of_a_storage_with_max_bytes_stay(through_files: bool, tmp_path: Path) -> None:
    noise = torch.randint(0, 255, (900, 1, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = TensorDict({"pixels": noise, "number": torch.arange(900)}, [900])
    buffer, loaded = (make_buffer(1000, max_bytes=1_000_000) for _ in range(2))
    for batch in data.split(20):
        buffer.extend(batch)
    assert len(buffer) < 800
    if through_files:
        buffer.dumps(tmp_path / "checkpoint")
        loaded.loads(tmp_path / "checkpoint")
    else:
        loaded.load_state_dict(buffer.state_dict())
    assert len(loaded) == len(buffer)
    for each in (buffer, loaded):
        each.extend(data[:20])
    numbers = loaded[:]["number"].tolist()
    assert len(loaded) >= 0.9 * len(buffer)
    assert set(numbers) <= set(range(20)) | set(range(100, 900))
    assert loaded.storage.max_size == 1000


@pytest.mark.parametrize("way", [_through_state_dict, _through_dumps])
def test_saved_contents_load_into_any_storage_they_fit_into(way: Any, tmp_path: Path) -> None:
    videos = Videos(1)
    for size, other in ((50, 80), (1, 1)):
        buffer = make_buffer(min(2 * size, other))
        buffer.extend(videos.collect(size).reshape(-1))
        loaded = way(buffer, other, tmp_path)
        assert_same(loaded[:], buffer[:])
        loaded.extend(videos.collect(40).reshape(-1))
        assert len(loaded) == other
    with pytest.raises(InvalidArgumentError, match=r"80 elements .* do not fit into FrameStorage\(20"):
        way(_make_filled_buffer(80), 20, tmp_path)
    buffer = make_buffer(100, ndim=2)  # 105 places, because of 7 environments
    for _ in range(4):
        buffer.extend(Videos(5).collect(7).transpose(0, 1).contiguous())
    loaded = way(buffer, 100, tmp_path)
    assert len(loaded) == len(buffer) > 100
    assert_same(loaded[:], buffer[:])


def test_checkpoint_replaces_the_previous_one_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make_buffer(100)
    data = make_transitions(100)
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


def test_invalid_dumps_and_loads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing to save"):
        FrameStorage(100).dumps(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())
    storage = _make_filled_buffer(100).storage
    storage.dumps(tmp_path / "a")
    file = tmp_path / "a" / "frames.bin"
    file.write_bytes(file.read_bytes().replace(b'"format": 5', b'"format":99', 1))
    with pytest.raises(CorruptFileError, match="has format 99"):
        FrameStorage(100).loads(tmp_path / "a")
    storage.load_state_dict(FrameStorage(100).state_dict())
    assert len(storage) == 0


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    storage = _make_filled_buffer(60).storage
    storage.dumps(tmp_path / "checkpoint")
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file() and path.stat().st_size]
    assert [file.name for file in files] == ["frames.bin"]
    target = FrameStorage(100)
    target.set(range(10), make_transitions(10, seed=5))
    before = target[:].clone()
    (file,), contents = files, files[0].read_bytes()
    used = [i for i, byte in enumerate(contents) if byte]  # there may be zeros between arrays
    places = [*range(20), *used[20 :: len(used) // 100]]
    changed = [contents[:i] + bytes([contents[i] ^ 1]) + contents[i + 1 :] for i in places]
    for damaged in [*changed, *(contents[:n] for n in (0, 10, 500, len(contents) // 2, len(contents) - 1))]:
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            target.loads(tmp_path / "checkpoint")
    file.write_bytes(contents)
    assert_same(target[:], before)
    target.loads(tmp_path / "checkpoint")
    assert_same(target[:], storage[:])


def test_other_checkpointers_and_hooks_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match="cannot save compressed images"):
        TensorDictReplayBuffer(storage=FrameStorage(10), checkpointer=TensorStorageCheckpointer())
    buffer = TensorDictReplayBuffer(storage=FrameStorage(10), checkpointer=FrameStorageCheckpointer())
    for register in (buffer.register_save_hook, buffer.register_load_hook):
        with pytest.raises(InvalidArgumentError, match="hooks"):
            register(lambda data, **_: data)


def test_states_of_other_kinds_of_storages_are_refused(tmp_path: Path) -> None:
    data = make_transitions(30)
    ours, theirs = make_buffer(100), TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=16)
    for buffer in (ours, theirs):
        buffer.extend(data.clone())
    others = (TensorDictReplayBuffer(storage=storage) for storage in (LazyTensorStorage(100), LazyMemmapStorage(100)))
    for target in (theirs, *others):
        with pytest.raises(InvalidArgumentError, match=r"state of a FrameStorage.* buffer.extend\(frame_storage"):
            target.load_state_dict(ours.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"another kind of storage.* buffer.extend\(other\[:\]\)"):
        ours.load_state_dict(theirs.state_dict())
    theirs.dumps(tmp_path / "theirs")
    with pytest.raises(InvalidArgumentError, match=r"another kind of storage.* buffer.extend\(other\[:\]\)"):
        ours.loads(tmp_path / "theirs")
    assert_same(ours[:], theirs[:])


def _fill_folder(folder: Path) -> None:
    """Store 20 transitions in a folder, and close the storage."""
    buffer = make_buffer(150, storage_dir=folder, resume=True)
    buffer.extend(make_transitions(20))
    buffer.storage.close()


def test_folder_with_incomplete_files_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make_buffer(150, storage_dir=tmp_path, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        patch.setattr(LogFolder, "reset", lambda folder: folder.close())  # as if the process were killed
        with pytest.raises(ZeroDivisionError):
            buffer.extend(make_transitions(20))
    assert (tmp_path / "log-0000").exists()
    buffer = make_buffer(150, storage_dir=tmp_path, resume=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"lock", "store.json.new"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            buffer.extend(make_transitions(20))
    assert {path.name for path in tmp_path.iterdir()} <= {"lock", "store.json.new"}
    buffer.extend(make_transitions(20))
    assert len(buffer) == 20


def test_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make_buffer(150, storage_dir=tmp_path, resume=True)
    videos = Videos(1)
    buffer.extend(videos.collect(20).reshape(-1))
    before = buffer[:].clone()

    def raise_disk_full(*_: Any) -> None:
        """Raise the error of a full disk."""
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raise_disk_full)
        with pytest.raises(StorageError, match="No space left on device"):
            buffer.storage.set(range(20, 120), Videos(100, seed=3).collect(1).reshape(-1))  # share no frames
    assert len(buffer) == 20
    assert_same(buffer[:].clone(), before)


@pytest.mark.parametrize("options", [{"size": 200}, {"codec": "raw"}, {"ndim": 2}, {"pixels": ["pixels"]}])
def test_folder_refuses_other_arguments(options: Any, tmp_path: Path) -> None:
    _fill_folder(tmp_path)
    with pytest.raises(InvalidArgumentError, match="was created with"):
        make_buffer(**{"size": 150, "storage_dir": tmp_path, "resume": True, **options})


def test_folder_refuses_unsupported_operations(tmp_path: Path) -> None:
    _fill_folder(tmp_path)
    buffer = TensorDictReplayBuffer(
        storage=FrameStorage(150, storage_dir=tmp_path, resume=True), writer=TensorDictMaxValueWriter(), batch_size=16
    )
    with pytest.raises(InvalidArgumentError, match=r"for place 20, got 0, since .* leave out writer="):
        buffer.extend(make_transitions(20))
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        make_buffer(150, storage_dir=tmp_path, resume=True, max_bytes=10)
    buffer = make_buffer(150, storage_dir=tmp_path / "one", resume=True)
    with pytest.raises(InvalidArgumentError, match="LazyMemmapStorage"):
        buffer.extend(make_transitions(5).exclude("pixels", ("next", "pixels")))
    buffer = make_buffer(150, storage_dir=tmp_path / "two", resume=True)
    buffer.extend(make_transitions(5))
    with pytest.raises(NotCopyableError, match="cannot be pickled"):
        buffer.storage.__reduce_ex__(2)
    with pytest.raises(InvalidArgumentError, match="leave out storage_dir"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())


def test_dumps_and_loads_of_the_own_folder_copy_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    buffer = make_buffer(150, storage_dir=folder, resume=True)
    data = make_transitions(20)
    buffer.extend(data.clone())
    buffer[:]["next", "reward"][3] = 7
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    buffer.dumps(tmp_path)  # writes the storage to its own folder
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
    buffer.loads(tmp_path)
    assert buffer[3]["next", "reward"] == 7
    with pytest.raises(InvalidArgumentError, match=r"open it: FrameStorage\(..., storage_dir="):
        FrameStorage(150).loads(folder)


def _fill_disk(folder: Path, n_complete: Any) -> None:
    """Add random images until a file exceeds its limit; count complete batches."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    buffer = make_buffer(3000, storage_dir=folder, resume=True, codec="patch")
    random = torch.Generator().manual_seed(0)
    try:
        while True:
            noise = torch.randint(0, 256, (8, 3, 60, 50), dtype=torch.uint8, generator=random)
            buffer.extend(TensorDict({"pixels": noise, "number": torch.full((8,), n_complete.value)}, [8]))
            n_complete.value += 1
    except StorageError:
        assert len(buffer) == 8 * n_complete.value
        assert buffer[:]["number"].tolist() == [i for i in range(n_complete.value) for _ in range(8)]
        os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_file_size_limit_raises_an_error_and_does_not_kill_the_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    n_complete = context.Value("q", 0)
    writer = context.Process(target=_fill_disk, args=(tmp_path / "storage", n_complete))
    writer.start()
    writer.join(600)  # longer only if it hangs
    assert writer.exitcode == 7
    assert n_complete.value > 0
    buffer = make_buffer(3000, storage_dir=tmp_path / "storage", resume=True, codec="patch")
    assert len(buffer) == 8 * n_complete.value
    buffer[:].clone()
    buffer.extend(
        TensorDict({"pixels": torch.zeros(8, 3, 60, 50, dtype=torch.uint8), "number": torch.zeros(8).long()}, [8])
    )


def test_replaced_folder_is_not_written_to(tmp_path: Path) -> None:
    data = Videos(1).collect(40).reshape(-1)
    former = FrameStorage(150, storage_dir=tmp_path / "run", resume=True)
    (tmp_path / "run").rename(tmp_path / "old")
    latter = FrameStorage(150, storage_dir=tmp_path / "run", resume=True)
    latter.set(range(30), data[:30].clone())
    with pytest.raises(StorageError, match=r"was moved, deleted or replaced since .* pass another storage_dir"):
        former.set(range(10), data[:10].clone())
    latter.close()
    latter = FrameStorage(150, storage_dir=tmp_path / "run", resume=True)
    assert_same(latter[:], data[:30].to("cpu"))
    latter.close()


@pytest.mark.parametrize("way", [_through_state_dict, _through_dumps, lambda buffer, *_: copy.deepcopy(buffer)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_emptied_storage_is_saved_and_copied(way: Any, ndim: int, tmp_path: Path) -> None:
    buffer = make_buffer(60, ndim=ndim)
    data = Videos(2).collect(20)
    for _ in range(2):
        buffer.extend(data.clone() if ndim == 2 else data.reshape(-1))
        buffer.empty()
    loaded = way(buffer, 60, tmp_path)
    assert len(loaded) == 0
    for each in (buffer, loaded):
        each.extend(data.clone() if ndim == 2 else data.reshape(-1))
    assert_same(loaded[:], buffer[:])


def test_folder_refuses_new_keys(tmp_path: Path) -> None:
    buffer = make_buffer(50, storage_dir=tmp_path, resume=True)
    data = Videos(1).collect(20).reshape(-1)
    buffer.extend(data[:10])
    with pytest.raises(InvalidArgumentError, match=r"'late' was not among the first elements"):
        buffer.extend(data[10:].clone().set("late", torch.ones(10)))
    assert len(buffer) == 10
    buffer.extend(data[10:])
    assert len(buffer) == 20
