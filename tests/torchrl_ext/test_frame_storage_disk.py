from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, NotCopyableError, StorageError
from rl_ext_core.frames.folder import StoreFolder
from tests.torchrl_ext.frame_data import Videos, assert_same
from tests.torchrl_ext.frame_workers import contents
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("inner", "vector")]


def _buffer(folder: Path, size: int = 150, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(size, storage_dir=folder, **options), batch_size=16)


def _filled(folder: Path, n: int = 20) -> None:
    buffer = _buffer(folder)
    buffer.extend(Videos(1).collect(n).reshape(-1))
    buffer.storage.close()


@pytest.mark.parametrize("codec", ["auto", "patch+lz4", "raw"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_storage_in_a_folder_is_found_again_and_goes_on(codec: str, ndim: int, tmp_path: Path) -> None:
    videos, twin = Videos(2), TensorDictReplayBuffer(storage=LazyTensorStorage(150, ndim=ndim), batch_size=16)
    for _ in range(9):
        buffer = _buffer(tmp_path, codec=codec, ndim=ndim)
        assert len(buffer) == len(twin)
        for _ in range(2):
            data = videos.collect(11)
            for each in (buffer, twin):
                each.extend((data if ndim == 2 else data.reshape(-1)).clone())
        assert_same(buffer[:].clone(), twin[:])
        drawn = []
        for each in (buffer, twin):
            torch.manual_seed(0)
            drawn.append(each.sample())
        assert_same(*drawn)
        buffer.storage.close()


def test_a_ring_in_a_folder_does_not_grow(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path)
    videos = Videos(2)
    sizes = []
    for _ in range(60):
        buffer.extend(videos.collect(20).reshape(-1))
        sizes.append(sum(file.stat().st_blocks for file in tmp_path.rglob("*") if file.is_file()))
    assert sizes[-1] == sizes[10]


def test_an_emptied_storage_is_found_empty(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path)
    buffer.extend(Videos(1).collect(20).reshape(-1))
    buffer.empty()
    buffer.storage.close()
    buffer = _buffer(tmp_path)
    assert len(buffer) == 0
    buffer.extend(Videos(1).collect(5).reshape(-1))
    assert_same(buffer[:].clone().exclude("index"), Videos(1).collect(5).reshape(-1).to("cpu"))


def _add_until_killed(folder: Path, said: Any, batch: int) -> None:
    torch.set_num_threads(1)
    buffer = _buffer(folder)
    known = Videos(2, seed=3).collect(300).reshape(-1)
    while True:
        start = said.value % (len(known) - batch)
        buffer.extend(known[start : start + batch].clone())
        said.value += batch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("batch", [1, 30])
def test_whatever_a_killed_process_leaves_is_whole(batch: int, tmp_path: Path) -> None:
    known = contents(Videos(2, seed=3).collect(300).reshape(-1), KEYS)
    context = multiprocessing.get_context("fork")  # importing TorchRL anew takes longer than the test
    random = np.random.default_rng(batch)
    folder = tmp_path / "storage"
    said = context.Value("q", 0)
    held_before = 0
    for turn in range(6):  # ``test_frame_storage_kills`` has many more
        writer = context.Process(target=_add_until_killed, args=(folder, said, batch))
        before = said.value
        writer.start()
        while said.value < before + 3 * batch:  # it is at work
            time.sleep(0.001)
            assert writer.is_alive()
        time.sleep(float(random.uniform(0, 0.02)))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        buffer = _buffer(folder)
        added = said.value - before
        assert len(buffer) >= min(held_before + added, 150)
        rows = contents(buffer[:].clone(), KEYS)
        assert not set(rows) - set(known), f"turn {turn}: a row is no transition"
        assert_same(buffer[torch.arange(len(buffer))], buffer[:].clone())
        pool = buffer.storage._columns[0].pool
        assert pool.held == 2 * len(buffer)
        held_before = len(buffer)
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


def test_a_storage_that_was_opened_again_and_emptied_begins_anew(tmp_path: Path) -> None:
    _filled(tmp_path)
    buffer = _buffer(tmp_path)
    buffer.empty()
    data = Videos(1, seed=3).collect(5).reshape(-1)
    buffer.extend(data.clone())
    assert len(buffer) == 5
    assert torch.equal(buffer.storage.get(torch.arange(5))["pixels"], data["pixels"])


@pytest.mark.parametrize("options", [{"size": 200}, {"codec": "raw"}, {"ndim": 2}, {"pixels": ["pixels"]}])
def test_other_arguments_are_refused(options: Any, tmp_path: Path) -> None:
    _filled(tmp_path)
    with pytest.raises(InvalidArgumentError, match="was made with"):
        _buffer(tmp_path, **options)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    buffer = _buffer(tmp_path)
    buffer.extend(Videos(1).collect(20).reshape(-1))
    with pytest.raises(StorageError, match=f"is in use by this process, {os.getpid()}"):
        _buffer(tmp_path)
    buffer.extend(Videos(1).collect(20).reshape(-1))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"holds 'thesis.tex'"):
        _buffer(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    _filled(tmp_path, 120)
    manifest = (tmp_path / "store.json").read_text()
    for damaged, text in ((manifest[:-5], "is damaged"), (manifest.replace('"format": 6', '"format": 9'), "format 9")):
        (tmp_path / "store.json").write_text(damaged)
        with pytest.raises(CorruptFileError, match=text):
            _buffer(tmp_path)
    (tmp_path / "store.json").write_text(manifest)
    frames = tmp_path / "frames-0"
    size = frames.stat().st_size
    os.truncate(frames, size - 1)
    with pytest.raises(CorruptFileError, match="it was cut short"):
        _buffer(tmp_path)
    with frames.open("rb") as file:
        head = file.read(4096)
    os.truncate(frames, 0)
    with pytest.raises(CorruptFileError, match=r"frames-0 is damaged: it is gone, or empty"):
        _buffer(tmp_path)
    frames.write_bytes(head)
    os.truncate(frames, size)
    with pytest.raises(CorruptFileError, match=r"240 of 240 images .* lead nowhere"):
        _buffer(tmp_path)


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


def test_a_closed_storage_is_not_used() -> None:
    storage = FrameStorage(30)
    storage.set(range(5), Videos(1).collect(5).reshape(-1))
    storage.close()
    for use in (lambda: storage[0], lambda: storage.set(0, Videos(1).collect(1)[0, 0]), storage.close):
        with pytest.raises(InvalidArgumentError, match="is closed"):
            use()


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


def test_a_storage_that_is_dropped_lets_go_of_its_files(tmp_path: Path) -> None:
    _filled(tmp_path)
    for _ in range(3):
        assert len(FrameStorage(150, storage_dir=tmp_path)) == 20


def test_a_disk_without_locks_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = fcntl.flock

    def no_locks(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:  # files; not the memory that processes share
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError, match=r"cannot lock .*: No locks available"):
        _buffer(tmp_path)


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
