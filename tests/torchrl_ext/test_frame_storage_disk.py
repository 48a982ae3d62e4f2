from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictMaxValueWriter, TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError, StorageError
from rl_ext_core.frames.folder import StoreFolder
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage


def _buffer(folder: Path, size: int = 150, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(size, storage_dir=folder, **options), batch_size=16)


def _filled(folder: Path, n: int = 20) -> None:
    buffer = _buffer(folder)
    buffer.extend(Videos(1).collect(n).reshape(-1))
    buffer.storage.close()


def test_a_folder_with_half_made_files_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = _buffer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        patch.setattr(StoreFolder, "begin_anew", lambda folder: folder.close())  # as where the process is killed
        with pytest.raises(ZeroDivisionError):
            buffer.extend(Videos(1).collect(20).reshape(-1))
    assert (tmp_path / "rows").exists()
    buffer = _buffer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            buffer.extend(Videos(1).collect(20).reshape(-1))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    buffer.extend(Videos(1).collect(20).reshape(-1))
    assert len(buffer) == 20


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_killed_while_it_gives_a_folder_up_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    data = Videos(1).collect(5).reshape(-1)
    for step in itertools.count():
        folder = tmp_path / str(step)
        if (child := os.fork()) == 0:
            storage, left = FrameStorage(150, storage_dir=folder), step

            def die(event: str, args: tuple[object, ...], folder: Path = folder) -> None:
                nonlocal left
                left -= event == "os.remove" and str(folder) in str(args)
                if left < 0:
                    os._exit(1)

            sys.addaudithook(die)
            with contextlib.suppress(InvalidArgumentError):
                storage.set(torch.arange(3), data)  # there are more of them
            os._exit(0)
        ended = os.waitpid(child, 0)[1] == 0
        storage = FrameStorage(150, storage_dir=folder)
        storage.set(range(5), data.clone())
        storage.close()
        if ended:
            break
    assert step > 5


def test_elements_that_would_overwrite_what_was_found_are_refused(tmp_path: Path) -> None:
    _filled(tmp_path)
    buffer = TensorDictReplayBuffer(
        storage=FrameStorage(150, storage_dir=tmp_path), writer=TensorDictMaxValueWriter(), batch_size=16
    )
    with pytest.raises(InvalidArgumentError, match=r"goes on at 20, got elements for 0, since a writer .* leave out"):
        buffer.extend(Videos(1).collect(20).reshape(-1))


@pytest.mark.parametrize("options", [{"size": 200}, {"codec": "raw"}, {"ndim": 2}, {"pixels": ["pixels"]}])
def test_other_arguments_are_refused(options: Any, tmp_path: Path) -> None:
    _filled(tmp_path)
    with pytest.raises(InvalidArgumentError, match="was made with"):
        _buffer(tmp_path, **options)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = _buffer(tmp_path)
    videos = Videos(1)
    buffer.extend(videos.collect(20).reshape(-1))
    before = buffer[:].clone()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left on device"):
            buffer.storage.set(range(20, 120), videos.collect(100).reshape(-1))
    assert len(buffer) == 20
    assert_same(buffer[:].clone(), before)


def test_what_does_not_go_with_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        _buffer(tmp_path, max_bytes=10)
    buffer = _buffer(tmp_path / "one")
    with pytest.raises(InvalidArgumentError, match="LazyMemmapStorage"):
        buffer.extend(Videos(1).collect(5).reshape(-1).exclude("pixels", ("next", "pixels")))
    buffer = _buffer(tmp_path / "two")
    buffer.extend(Videos(1).collect(5).reshape(-1))
    with pytest.raises(NotCopyableError, match="cannot be pickled"):
        buffer.storage.__reduce_ex__(2)
    with pytest.raises(InvalidArgumentError, match="leave out storage_dir"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_files_grow_with_what_they_hold(tmp_path: Path) -> None:
    videos = Videos(2, smooth=True)
    before = 0
    for size, n in ((10**6, 1), (1000, 10), (10**7, 200)):
        folder = tmp_path / str(size)
        buffer = _buffer(folder, size)
        buffer.extend(videos.collect(n).reshape(-1))
        for name, n_bytes in _sizes(folder).items():
            assert (folder / name).stat().st_blocks * 512 >= n_bytes, "a hole that a full disk would not fill"
        raw = 2 * n * 2 * 4 * 28 * 24
        assert sum(_sizes(folder).values()) < 1_200_000 + raw
        before = before or sum(_sizes(folder).values())
        buffer.storage.close()
        shutil.copytree(folder, tmp_path / "copy")
        copy = _buffer(tmp_path / "copy", size)
        assert len(copy) == 2 * n
        assert sum(_sizes(tmp_path / "copy").values()) <= sum(_sizes(folder).values())
        copy.storage.close()
        shutil.rmtree(tmp_path / "copy")


def test_no_part_of_a_file_is_written_to_that_the_disk_has_not(tmp_path: Path) -> None:
    """Writing to a hole of a mapped file on a full disk ends the process."""
    for codec in ("patch", "patch+lz4", "raw"):
        folder = tmp_path / codec
        buffer = _buffer(folder, 400, codec=codec, block_length=16)
        random = torch.Generator().manual_seed(0)
        for n in (1, 1, 2, 3, 30, 1, 100, 400):
            noise = torch.randint(0, 256, (n + 1, 3, 60, 50), dtype=torch.uint8, generator=random)
            done = torch.zeros(n, 1, dtype=torch.bool)
            following = TensorDict({"pixels": noise[1:], "done": done}, [n])
            buffer.extend(TensorDict({"pixels": noise[:-1], "next": following}, [n]))
            for file in folder.iterdir():
                assert file.stat().st_blocks * 512 >= file.stat().st_size
        buffer.storage.close()


def _fill(folder: Path, said: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
    buffer = _buffer(folder, 3000, codec="patch")
    random = torch.Generator().manual_seed(0)
    try:
        while True:
            noise = torch.randint(0, 256, (8, 3, 60, 50), dtype=torch.uint8, generator=random)
            buffer.extend(TensorDict({"pixels": noise, "number": torch.full((8,), said.value)}, [8]))
            said.value += 1
    except StorageError:
        assert len(buffer) == 8 * said.value
        assert buffer[:]["number"].tolist() == [i for i in range(said.value) for _ in range(8)]
        os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_disk_that_becomes_full_is_an_error_and_no_end_of_the_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    said = context.Value("q", 0)
    writer = context.Process(target=_fill, args=(tmp_path / "storage", said))
    writer.start()
    writer.join(120)
    assert writer.exitcode == 7
    assert said.value > 0
    buffer = _buffer(tmp_path / "storage", 3000, codec="patch")
    assert len(buffer) == 8 * said.value
    buffer[:].clone()
    buffer.extend(
        TensorDict({"pixels": torch.zeros(8, 3, 60, 50, dtype=torch.uint8), "number": torch.zeros(8).long()}, [8])
    )


def test_saving_to_its_own_folder_and_loading_from_it_copies_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    buffer = TensorDictReplayBuffer(storage=FrameStorage(150, storage_dir=folder), batch_size=16)
    data = Videos(1).collect(20).reshape(-1)
    buffer.extend(data.clone())
    buffer[:]["next", "reward"][3] = 7
    before = _sizes(folder)
    buffer.dumps(tmp_path)  # which puts the storage where it is
    assert _sizes(folder) == before
    buffer.loads(tmp_path)
    assert buffer[3]["next", "reward"] == 7
    with pytest.raises(InvalidArgumentError, match=r"open it: FrameStorage\(..., storage_dir="):
        FrameStorage(150).loads(folder)
