"""Untrusted folders of frame storages: reading them executes no code, and does not crash."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rl_ext_core.errors import InvalidTypeError, RlExtError
from rl_ext_core.frames.checkpoint import checksum
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _make_data(n: int = 20) -> TensorDict:
    """Collect ``n`` transitions of one environment."""
    return Videos(1).collect(n).reshape(-1)


def _make_folder(folder: Path) -> Path:
    """Store 20 elements in a folder, close the storage, and return the folder."""
    storage = FrameStorage(50, storage_dir=folder, resume=True)
    storage.set(range(20), _make_data())
    storage.close()
    return folder


def _make_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of 20 elements, and return its folder."""
    storage = FrameStorage(50)
    storage.set(range(20), _make_data())
    storage.dumps(folder)
    return folder


READERS = {
    "open": (_make_folder, lambda folder: FrameStorage(50, storage_dir=folder, resume=True)[:].clone()),
    "salvage": (_make_folder, FrameStorage.salvage),
    "loads": (_make_checkpoint, lambda folder: FrameStorage(50).loads(folder)),
}


@pytest.mark.parametrize("reader", READERS)
def test_pickles_in_place_of_files_are_not_executed(reader: str, tmp_path: Path) -> None:
    make, read = READERS[reader]
    ran = tmp_path / "ran"
    bomb = np.array([Bomb(ran)], dtype=object)
    original = make(tmp_path / "original")
    files = [file.relative_to(original) for file in original.rglob("*") if file.is_file() and file.name != "lock"]
    for number, name in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        with (folder / name).open("wb") as file:
            if name.suffix == ".npy":
                np.save(file, bomb, allow_pickle=True)
            else:
                pickle.dump(bomb[0], file)
        with contextlib.suppress(RlExtError) if reader == "salvage" else pytest.raises(RlExtError):
            read(folder)
        assert not ran.exists(), name
    pickle.loads(pickle.dumps(bomb[0]))
    assert ran.exists(), "or nothing was tested"


def test_folder_refuses_values_that_are_not_tensors(tmp_path: Path) -> None:
    data = _make_data()
    data["task"] = NonTensorData("walk", batch_size=[20])
    storage = FrameStorage(50, storage_dir=tmp_path / "storage", resume=True)
    with pytest.raises(InvalidTypeError, match=r"'task' holds NonTensor.* Leave it out: data.exclude\('task'\)"):
        storage.set(range(20), data)
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["lock"]
    storage.set(range(20), _make_data())
    assert_same(storage[:].clone(), _make_data().to("cpu"))


def test_dumps_writes_texts_and_numbers_and_refuses_other_values(tmp_path: Path) -> None:
    storage = FrameStorage(50)
    storage.set(
        0, _make_data(1)[0].set("task", NonTensorData("walk")).set("more", NonTensorData({"a": [1, None, 0.1]}))
    )
    storage.set(1, _make_data(1)[0].set("task", NonTensorData("run")).set("more", NonTensorData({"a": []})))
    storage.dumps(tmp_path / "checkpoint")
    loaded = FrameStorage(50)
    loaded.loads(tmp_path / "checkpoint")
    assert [loaded[i]["task"] for i in range(2)] == ["walk", "run"]
    assert loaded[0]["more"] == {"a": [1, None, 0.1]}
    storage.set(1, _make_data(1)[0].set("task", NonTensorData(Bomb(tmp_path))).set("more", NonTensorData({"a": []})))
    with pytest.raises(InvalidTypeError, match=r"'task' holds .*Bomb.*, which files cannot hold"):
        storage.dumps(tmp_path / "checkpoint")
    loaded.loads(tmp_path / "checkpoint")
    with pytest.raises(InvalidTypeError, match="'task' holds"):
        storage.dumps(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def _alter_stored(folder: Path, random: np.random.Generator) -> None:
    """Change random numbers in the files of a storage."""
    files = [*folder.glob("array-*"), *folder.glob("log-*/*/*.log")]
    for _ in range(random.integers(1, 4)):
        data = np.memmap(files[random.integers(len(files))], mode="r+", dtype=np.uint32)
        used = np.flatnonzero(data)
        data[used[random.integers(len(used))]] = random.choice([0, 1, 2, 255, 2**31, 2**32 - 1])


def _use_altered_files(read: Any, folder: Path) -> None:
    """Read, write and copy a storage with altered files; only expected errors may occur."""
    try:
        storage = read(folder)
        for i in range(len(storage)):
            storage[torch.tensor([i])]
        storage.set(range(10, 60), _make_data(50), set_cursor=False)
        storage[:].clone()
    except (RlExtError, RuntimeError):
        pass


@pytest.mark.sample(quick=0)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_altered_numbers_do_not_crash_the_process(tmp_path: Path) -> None:
    original = tmp_path / "original"
    storage = FrameStorage(60, storage_dir=original)
    storage.set(range(50), _make_data(50))
    storage.close()

    def read(folder: Path) -> FrameStorage:
        """Open a folder."""
        return FrameStorage(60, storage_dir=folder, resume=True)

    _use_altered_files(read, shutil.copytree(original, tmp_path / "warm"))
    for seed in range(30):
        folder = tmp_path / f"altered{seed}"
        shutil.copytree(original, folder)
        _alter_stored(folder, np.random.default_rng(seed))
        child = os.fork()
        if child == 0:
            try:
                _use_altered_files(read, folder)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, (seed, signal.Signals(status & 127) if status & 127 else "see above")
        shutil.rmtree(folder)


def test_altered_manifests_are_refused(tmp_path: Path) -> None:
    original = _make_folder(tmp_path / "original")
    folder = shutil.copytree(original, tmp_path / "storage")
    manifest = json.loads((folder / "store.json").read_text())
    del manifest["checksum"]
    for change in (
        ("settings", "columns", 0, "dtype", "load"),
        ("settings", "columns", 0, "shape", [-4, 28, 24]),
        ("settings", "elements", "leaves", [{}]),
        ("settings", "elements", "leaves", 0, "shape", [50, 10**6]),
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
        for read in (lambda: FrameStorage(50, storage_dir=folder, resume=True), lambda: FrameStorage.salvage(folder)):
            with pytest.raises(RlExtError):
                read()
    assert {path.name for path in tmp_path.iterdir()} == {"original", "storage"}, "a file was made outside"
