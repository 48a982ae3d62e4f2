from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData
from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer, TensorStorageCheckpointer

from rl_ext_core.errors import (
    CorruptFileError,
    InvalidArgumentError,
    InvalidTypeError,
    NotCopyableError,
    RlExtError,
    StorageError,
)
from rl_ext_core.frames.checkpoint import FORMAT, checksum
from rl_ext_core.frames.log_folder import LogFolder
from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import Twins, Videos, make_buffer, make_transitions, through_files, through_state
from torchrl_ext import FrameStorage
from torchrl_ext.frame_storage.checkpoint import FrameStorageCheckpointer

WAYS = [through_state, through_files]
# Numbers of steps of two environments, the size of the storage that loads them, and what is refused.
LOADED: list[tuple[list[int], int, str]] = [
    ([], 80, ""),
    ([25], 80, ""),
    ([20, 20], 80, ""),
    ([20, 20, 20], 80, ""),
    ([25], 100, ""),
    ([20, 20], 100, "to continue"),
    ([20, 20, 20], 100, "to continue"),
    ([25], 20, "to load"),
]


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize(
    ("way", "steps", "other", "refused"),
    [
        *((way, *case) for way in WAYS for case in LOADED),
        *((lambda buffer, *_: copy.deepcopy(buffer), *case) for case in LOADED if case[1] == 80),
    ],
)
def test_contents_are_loaded_if_they_fit_and_continue_unless_the_ring_was_full(
    way: Any, ndim: int, steps: list[int], other: int, refused: str, tmp_path: Path
) -> None:
    buffer, videos = make_buffer(80, ndim=ndim), Videos(2)

    def collect(n: int) -> Any:
        data = videos.collect(n)
        return data if ndim == 2 else data.reshape(-1)

    if not steps:
        buffer.extend(collect(20))
        buffer.empty()
    for n in steps:
        buffer.extend(collect(n))
    if refused == "to load":
        with pytest.raises(InvalidArgumentError, match=r"50 elements .* do not fit into FrameStorage\(20"):
            way(buffer, make_buffer(other, ndim=ndim), tmp_path / "saved")
        return
    loaded, more = way(buffer, make_buffer(other, ndim=ndim), tmp_path / "saved"), collect(3)
    assert len(loaded) == len(buffer)
    if steps:
        assert_same(loaded[:], buffer[:])
    if refused == "to continue":
        text = r"elements were loaded into FrameStorage\(100\).* FrameStorage\(80\)"
        with pytest.raises(InvalidArgumentError, match=text):
            loaded.extend(more)
        assert_same(loaded[:], buffer[:])
        return
    for each in (buffer, loaded):
        each.extend(more.clone())
    assert_same(loaded[:], buffer[:])


def test_loaded_storage_continues_after_its_elements(tmp_path: Path) -> None:
    data, buffer, later = make_transitions(90), make_buffer(60), make_buffer(100)
    buffer.extend(data[:60])
    buffer.dumps(tmp_path)
    storage = FrameStorage(100)
    for loaded in (storage, later.storage):
        loaded.loads(tmp_path / "storage")
    for each in (TensorDictReplayBuffer(storage=storage, batch_size=16), later):
        each.extend(data[60:])
        assert_same(each[:].exclude("index"), data.to("cpu"))


@pytest.mark.parametrize("way", WAYS)
def test_places_beyond_the_size_are_loaded(way: Any, tmp_path: Path) -> None:
    buffer = make_buffer(100, ndim=2)  # 105 places, because of 7 environments
    for _ in range(4):
        buffer.extend(Videos(5).collect(7).transpose(0, 1).contiguous())
    loaded = way(buffer, make_buffer(100, ndim=2), tmp_path / "saved")
    assert len(loaded) == len(buffer) > 100
    assert_same(loaded[:], buffer[:])


def test_checkpoint_replaces_the_previous_one_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, loaded, data = FrameStorage(100), FrameStorage(100), make_transitions(100)
    storage.set(range(30), data[:30])
    storage.dumps(tmp_path / "checkpoint")
    storage.set(range(30, 100), data[30:])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            storage.dumps(tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["frames.npz"]
    for n in (30, 100):
        loaded.loads(tmp_path / "checkpoint")
        assert_same(loaded[:], data[:n].to("cpu"))
        storage.dumps(tmp_path / "checkpoint")


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    storage, target = FrameStorage(100), FrameStorage(100)
    storage.set(range(100), make_transitions(100))
    storage.dumps(tmp_path / "checkpoint")
    target.set(range(10), make_transitions(10, seed=5))
    before, file = target[:].clone(), tmp_path / "checkpoint" / "frames.npz"
    contents = file.read_bytes()
    places = [*range(20), *range(20, len(contents), len(contents) // 100)]
    changed = [contents[:i] + bytes([contents[i] ^ 1]) + contents[i + 1 :] for i in places]
    n_refused = 0
    for damaged in [*changed, *(contents[:n] for n in (0, 10, 500, len(contents) - 1))]:
        file.write_bytes(damaged)
        try:
            other = FrameStorage(100)
            other.loads(tmp_path / "checkpoint")
        except CorruptFileError:
            n_refused += 1
            with pytest.raises(CorruptFileError):
                target.loads(tmp_path / "checkpoint")
        else:  # a number that readers of archives do not use was changed, such as a date
            assert_same(other[:], storage[:])
    assert n_refused > 100
    with np.load(io.BytesIO(contents)) as arrays:
        parts = dict(arrays)
    header = parts["arr_0"].tobytes().replace(b'"format": %d' % FORMAT, b'"format": 99', 1)
    np.savez(file, **{**parts, "arr_0": np.frombuffer(header, np.uint8)})
    with pytest.raises(CorruptFileError, match="has format 99"):
        target.loads(tmp_path / "checkpoint")
    state = storage.state_dict()
    state["frame_storage"][len(contents) // 2] ^= 1
    with pytest.raises(CorruptFileError):
        target.load_state_dict(state)
    assert_same(target[:], before)
    target.load_state_dict(FrameStorage(100).state_dict())
    assert len(target) == 0


def test_other_checkpointers_hooks_and_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="cannot save compressed images"):
        TensorDictReplayBuffer(storage=FrameStorage(10), checkpointer=TensorStorageCheckpointer())
    ours = TensorDictReplayBuffer(storage=FrameStorage(100), checkpointer=FrameStorageCheckpointer())
    for register in (ours.register_save_hook, ours.register_load_hook):
        with pytest.raises(InvalidArgumentError, match="hooks"):
            register(lambda data, **_: data)
    with pytest.raises(InvalidArgumentError, match="nothing to save"):
        ours.storage.dumps(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=16)
    for buffer in (ours, theirs):
        buffer.extend(make_transitions(30))
    theirs.dumps(tmp_path / "theirs")
    with pytest.raises(InvalidArgumentError, match=r"another kind of storage.* buffer.extend\(other\[:\]\)"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(CorruptFileError, match=r"contains no FrameStorage.* buffer.extend\(other\[:\]\)"):
        ours.loads(tmp_path / "theirs")
    assert_same(ours[:], theirs[:])


def _make_folder(folder: Path) -> Path:
    """Store 20 transitions in a folder, close the storage, and return the folder."""
    buffer = make_buffer(50, storage_dir=folder)
    buffer.extend(make_transitions(20))
    buffer.storage.close()
    return folder


def _make_checkpoint(folder: Path) -> Path:
    storage = FrameStorage(50)
    storage.set(range(20), make_transitions(20))
    storage.dumps(folder)
    return folder


def _open_folder(folder: Path, **options: Any) -> Any:
    return make_buffer(**{"size": 50, "storage_dir": folder, "resume": True, **options})


def test_folder_with_incomplete_files_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for killed in (True, False):
        buffer = _open_folder(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda *_: 1 / 0)
            if killed:
                patch.setattr(LogFolder, "reset", lambda folder: folder.close())
            with pytest.raises(ZeroDivisionError):
                buffer.extend(make_transitions(20))
        assert (tmp_path / "log-0000").exists() == killed
    assert {path.name for path in tmp_path.iterdir()} <= {"lock", "store.json.new"}
    buffer.extend(make_transitions(20))
    assert len(buffer) == 20


@pytest.mark.parametrize("options", [{"size": 200}, {"codec": "raw"}, {"ndim": 2}, {"pixels": ["pixels"]}])
def test_folder_refuses_other_arguments(options: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="was created with"):
        _open_folder(_make_folder(tmp_path), **options)


def test_folder_refuses_unsupported_operations(tmp_path: Path) -> None:
    folder, data = _make_folder(tmp_path / "storage"), make_transitions(20)
    with pytest.raises(InvalidArgumentError, match="contains 20 rows of an earlier buffer"):
        FrameStorage(50, storage_dir=folder)
    buffer = _open_folder(folder)
    with pytest.raises(InvalidArgumentError, match=r"'late' was not among the first elements"):
        buffer.extend(data.clone().set("late", torch.ones(20)))
    with pytest.raises(NotCopyableError, match="cannot be pickled"):
        buffer.storage.__reduce_ex__(2)
    with pytest.raises(InvalidArgumentError, match="leave out storage_dir"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())
    buffer[:]["next", "reward"][3] = 7
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    buffer.dumps(tmp_path)  # writes the storage to its own folder
    buffer.loads(tmp_path)
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
    assert buffer[3]["next", "reward"] == 7
    with pytest.raises(InvalidArgumentError, match=r"open it: FrameStorage\(..., storage_dir="):
        FrameStorage(150).loads(folder)
    buffer = make_buffer(50, storage_dir=tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="LazyMemmapStorage"):
        buffer.extend(data.exclude("pixels", ("next", "pixels")))
    with pytest.raises(InvalidTypeError, match=r"'task' holds NonTensor.* Leave it out: data.exclude\('task'\)"):
        buffer.extend(data.clone().set("task", NonTensorData("walk", batch_size=[20])))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


@pytest.mark.parametrize("in_folder", [True, False])
@pytest.mark.parametrize("n", [20, 50, 70])
def test_max_value_writer_continues_with_the_ranks_of_loaded_elements(in_folder: bool, n: int, tmp_path: Path) -> None:
    data, folder = make_transitions(n + 30), tmp_path if in_folder else None
    twins = Twins(50, writer=TensorDictMaxValueWriter, options={"storage_dir": folder})
    twins.extend(data[:n])
    state = twins.ours.storage.state_dict()
    twins.ours.storage.close()
    storage = FrameStorage(50, storage_dir=folder, resume=in_folder)
    twins.ours = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter())
    if not in_folder:
        storage.load_state_dict(state)
    twins.extend(data[n:])
    assert_same(twins.ours[:], twins.theirs[:])


def test_replaced_folder_is_not_written_to(tmp_path: Path) -> None:
    data = make_transitions(40)
    former = FrameStorage(150, storage_dir=tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "old")
    latter = FrameStorage(150, storage_dir=tmp_path / "run")
    latter.set(range(30), data[:30].clone())
    with pytest.raises(StorageError, match=r"was moved, deleted or replaced since .* pass another storage_dir"):
        former.set(range(10), data[:10].clone())
    latter.close()
    assert_same(FrameStorage(150, storage_dir=tmp_path / "run", resume=True)[:], data[:30].to("cpu"))


@pytest.mark.parametrize("view", [False, True])
def test_garbage_collection_closes_a_folder(view: bool, tmp_path: Path) -> None:
    buffer = make_buffer(50, storage_dir=tmp_path / "a")
    buffer.extend(make_transitions(20))
    if view:
        buffer[:]["action"][3] = 9
    buffer.cycle = buffer
    del buffer
    gc.collect()
    assert int(_open_folder(tmp_path / "a")[3]["action"] == 9) == view


READERS = {
    "open": (_make_folder, lambda folder: _open_folder(folder)[:].clone()),
    "loads": (_make_checkpoint, lambda folder: FrameStorage(50).loads(folder)),
}


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("reader", READERS)
def test_pickles_in_place_of_files_are_not_executed(reader: str, tmp_path: Path) -> None:
    make, read = READERS[reader]
    ran, original = tmp_path / "ran", make(tmp_path / "original")
    files = [file.relative_to(original) for file in original.rglob("*") if file.is_file() and file.name != "lock"]
    for number, name in enumerate(files):
        folder = shutil.copytree(original, tmp_path / str(number))
        (folder / name).write_bytes(pickle.dumps(Bomb(ran)))
        with pytest.raises(RlExtError):
            read(folder)
        assert not ran.exists(), name
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists(), "or nothing was tested"


def test_dumps_writes_texts_and_numbers_and_refuses_other_values(tmp_path: Path) -> None:
    storage, loaded = FrameStorage(50), FrameStorage(50)

    def store(place: int, task: Any, more: Any) -> None:
        element = make_transitions(1)[0]
        storage.set(place, element.set("task", NonTensorData(task)).set("more", NonTensorData(more)))

    store(0, "walk", {"a": [1, None, 0.1]})
    store(1, "run", {"a": []})
    storage.dumps(tmp_path / "checkpoint")
    loaded.loads(tmp_path / "checkpoint")
    assert [loaded[i]["task"] for i in range(2)] == ["walk", "run"]
    assert loaded[0]["more"] == {"a": [1, None, 0.1]}
    store(1, Bomb(tmp_path), {"a": []})
    for name in ("checkpoint", "other"):
        with pytest.raises(InvalidTypeError, match=r"'task' holds .*Bomb.*, which files cannot hold"):
            storage.dumps(tmp_path / name)
    loaded.loads(tmp_path / "checkpoint")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["marks", "locations", "elements"])
def test_altered_arrays_are_refused_or_used_without_a_crash(name: str, tmp_path: Path) -> None:
    original, random = _make_folder(tmp_path / "original"), np.random.default_rng(0)
    for number in range(12):
        folder = shutil.copytree(original, tmp_path / str(number))
        data = np.memmap(folder / f"array-{name}", mode="r+")
        places = random.choice(np.flatnonzero(data), random.integers(1, 4))
        data[places] = random.choice([0, 1, 2, 127, 128, 255])
        del data
        with contextlib.suppress(RlExtError, RuntimeError):
            storage = _open_folder(folder).storage
            for i in range(len(storage)):
                storage[torch.tensor([i])]
            storage.set(range(10, 50), make_transitions(40), set_cursor=False)
            storage[:].clone()


def test_altered_manifests_are_refused(tmp_path: Path) -> None:
    original = _make_folder(tmp_path / "original")
    folder = shutil.copytree(original, tmp_path / "storage")
    manifest = json.loads((folder / "store.json").read_text())
    del manifest["checksum"]
    for change in (
        ("settings", "columns", 0, "dtype", "load"),
        ("settings", "columns", 0, "shape", [-4, 28, 24]),
        ("settings", "elements", "entries", {"action": {}}),
        ("settings", "elements", "entries", "action", "shape", [50, 10**6]),
        ("settings", "n_rows", 0),
        ("generation", "0/../.."),
        ("generation", 1),
    ):
        changed = json.loads(json.dumps(manifest))
        part = changed
        for key in change[:-2]:
            part = part[key]
        part[change[-2]] = change[-1]
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
        (folder / "store.json").write_text(json.dumps({**changed, "checksum": checksum(changed)}))
        with pytest.raises(RlExtError):
            _open_folder(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"original", "storage"}, "a file was made outside"
