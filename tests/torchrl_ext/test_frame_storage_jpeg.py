"""``FrameStorage(codec="jpeg")`` next to a ``LazyTensorStorage`` that is given what simplejpeg makes of each frame."""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import os
import pickle
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.frames.jpeg import JpegCodec
from rl_ext_core.frames.layout import StackLayout
from tests.core.frames.jpeg_oracle import as_jpeg
from tests.torchrl_ext.frame_data import HEIGHT, STACK, WIDTH, Videos, assert_same
from tests.torchrl_ext.frame_workers import collect_pictures_into, contents
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("next", "done"), ("inner", "vector")]
GREY = StackLayout((STACK, HEIGHT, WIDTH), np.dtype(np.uint8), STACK, 0)


def oracle(data: TensorDict, quality: int = 95) -> TensorDict:
    """The same transitions with images that went through JPEG."""
    made = data.clone()
    for key in ("pixels", ("next", "pixels")):
        made[key] = torch.from_numpy(as_jpeg(data[key].numpy(), GREY, quality))
    return made


def pictures(n: int, *, seed: int = 0, n_envs: int = 1) -> TensorDict:
    return Videos(n_envs, seed=seed, smooth=True).collect(n).reshape(-1)


def buffer_of(size: int = 100, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(size, **{"codec": "jpeg", **options}), batch_size=16)


def twin_of(size: int = 100, ndim: int = 1) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=16)


def check(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    assert_same(ours[:].clone(), theirs[:])
    for seed in range(3):
        drawn = []
        for each in (ours, theirs):
            torch.manual_seed(seed)
            np.random.seed(seed)
            drawn.append(each.sample())
        assert_same(*drawn)


def test_the_pictures_of_these_tests_become_jpeg() -> None:
    data = pictures(50)
    assert (oracle(data)["pixels"] != data["pixels"]).any(-1).any(-1)[:, -1].float().mean() > 0.9
    images = buffer_of()
    images.extend(data)
    assert images.storage._columns[0].pool.codec.name == "jpeg"


@pytest.mark.sample
@pytest.mark.parametrize("quality", [95, 50])
@pytest.mark.parametrize("batch", [1, 7, 60])
def test_what_is_sampled_is_what_jpeg_makes_of_each_frame(batch: int, quality: int) -> None:
    ours, theirs = buffer_of(quality=quality), twin_of()
    data = pictures(140, n_envs=2)
    for part, made in zip(data.split(batch), oracle(data, quality).split(batch), strict=True):
        ours.extend(part.clone())
        theirs.extend(made.clone())
        if batch > 1:
            check(ours, theirs)
    check(ours, theirs)
    assert ours.storage._columns[0].pool.layout == GREY


def test_a_frame_reads_the_same_from_its_first_moment_on() -> None:
    buffer, data = buffer_of(300), pictures(150)
    seen = []
    for row, made in zip(data, oracle(data), strict=True):
        buffer.add(row.clone())
        seen.append(buffer[len(buffer) - 1].clone())
        assert torch.equal(seen[-1]["next", "pixels"], made["next", "pixels"])
    for i, first in enumerate(seen):
        assert_same(buffer[i], first)


def test_slices_and_two_dimensions_give_the_same_bits() -> None:
    arguments: Any = {"slice_len": 4, "traj_key": ("collector", "traj_ids"), "strict_length": False}
    ours = TensorDictReplayBuffer(
        storage=FrameStorage(160, ndim=2, codec="jpeg"), sampler=SliceSampler(**arguments), batch_size=32
    )
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(160, ndim=2), sampler=SliceSampler(**arguments), batch_size=32
    )
    videos = Videos(4, smooth=True)
    for _ in range(5):
        data = videos.collect(13)
        ours.extend(data.clone())
        theirs.extend(oracle(data.reshape(-1)).reshape(4, 13))
        check(ours, theirs)


def test_elements_are_written_through_a_slice_and_emptied() -> None:
    ours, theirs = buffer_of(50), twin_of(50)
    data = pictures(90)
    made = oracle(data)
    for buffer, rows in ((ours, data), (theirs, made)):
        buffer.extend(rows[:40].clone())
        buffer[:]["pixels"][4] = rows["pixels"][60]
        buffer[:]["next", "pixels"][5:7] = rows["pixels"][61:63]
    check(ours, theirs)
    for buffer, rows in ((ours, data), (theirs, made)):
        buffer.empty()
        buffer.extend(rows[40:].clone())
    check(ours, theirs)


def _through_state_dict(buffer: Any, tmp_path: Path) -> Any:
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    loaded = buffer_of(quality=60)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    return loaded


def _through_dumps(buffer: Any, tmp_path: Path) -> Any:
    buffer.dumps(tmp_path / "checkpoint")
    loaded = buffer_of(quality=60)
    loaded.loads(tmp_path / "checkpoint")
    return loaded


def _through_pickle(buffer: Any, tmp_path: Path) -> Any:
    storage = pickle.loads(pickle.dumps(buffer.storage))
    return TensorDictReplayBuffer(storage=storage, writer=copy.deepcopy(buffer.writer), batch_size=16)


@pytest.mark.parametrize("way", [_through_state_dict, _through_dumps, _through_pickle])
@pytest.mark.parametrize("n", [30, 250])
def test_a_buffer_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(
    way: Any, n: int, tmp_path: Path
) -> None:
    buffer, twin = buffer_of(quality=60), twin_of()
    data = pictures(n + 30)
    made = oracle(data, 60)
    buffer.extend(data[:n].clone())
    twin.extend(made[:n].clone())
    loaded = way(buffer, tmp_path)
    check(loaded, twin)
    if way is not _through_pickle:
        loaded.extend(data[n:].clone())
        twin.extend(made[n:].clone())
        check(loaded, twin)


def test_a_storage_that_is_not_lossy_does_not_become_so_by_loading(tmp_path: Path) -> None:
    buffer = buffer_of(quality=60)
    buffer.extend(pictures(30))
    buffer.dumps(tmp_path / "checkpoint")
    for options in ({"codec": "auto"}, {"quality": 61}):
        loaded = buffer_of(**options)
        loaded.extend(pictures(10))
        before = loaded[:].clone()
        with pytest.raises(InvalidArgumentError, match="codec='jpeg', quality=60; pass the same"):
            loaded.loads(tmp_path / "checkpoint")
        assert_same(loaded[:].clone(), before)


def test_a_storage_in_a_folder_is_found_again_and_goes_on(tmp_path: Path) -> None:
    videos, twin = Videos(2, smooth=True), twin_of(150)
    for _ in range(6):
        buffer = buffer_of(150, storage_dir=tmp_path, quality=60)
        check_length = len(buffer)
        assert check_length == len(twin)
        for _ in range(2):
            data = videos.collect(17).reshape(-1)
            buffer.extend(data.clone())
            twin.extend(oracle(data, 60))
        check(buffer, twin)
        buffer.storage.close()
    with pytest.raises(InvalidArgumentError, match="was made with quality=60, not with quality=95"):
        buffer_of(150, storage_dir=tmp_path)


def _add_until_killed(folder: Path, said: Any) -> None:
    torch.set_num_threads(1)
    buffer = buffer_of(150, storage_dir=folder)
    known = pictures(150, seed=3, n_envs=2)
    while True:
        start = said.value % (len(known) - 30)
        buffer.extend(known[start : start + 30].clone())
        said.value += 30


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_whatever_a_killed_process_leaves_is_whole(tmp_path: Path) -> None:
    data = pictures(150, seed=3, n_envs=2)
    known = contents(oracle(data), KEYS)
    context = multiprocessing.get_context("fork")  # importing TorchRL anew takes longer than the test
    random = np.random.default_rng(0)
    said = context.Value("q", 0)
    for _ in range(10):
        writer = context.Process(target=_add_until_killed, args=(tmp_path / "storage", said))
        before = said.value
        writer.start()
        while said.value < before + 60:
            time.sleep(0.001)
            assert writer.is_alive()
        time.sleep(float(random.uniform(0, 0.05)))
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        buffer = buffer_of(150, storage_dir=tmp_path / "storage")
        assert len(buffer) >= min(said.value - before, 150)
        assert not set(contents(buffer[:].clone(), KEYS)) - set(known)
        assert buffer.storage._columns[0].pool.held == 2 * len(buffer)
        buffer.storage.close()


@pytest.mark.slow
def test_two_processes_fill_it_with_what_jpeg_makes_of_their_frames() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(1000, codec="jpeg"), shared=True, batch_size=64)
    first = pictures(2, seed=9)
    buffer.extend(first.clone())
    context = multiprocessing.get_context("spawn")
    batches = [7, 40, 3, 60]
    workers = [context.Process(target=collect_pictures_into, args=(buffer, seed, batches)) for seed in (1, 2)]
    for worker in workers:
        worker.start()
    collected = [oracle(first)]
    for seed in (1, 2):
        videos = Videos(2, seed=seed, smooth=True)
        collected += [oracle(videos.collect(steps).reshape(-1)) for steps in batches]
    expected: Counter[str] = sum((contents(rows, KEYS) for rows in collected), Counter())
    while any(worker.is_alive() for worker in workers):
        assert not set(contents(buffer.sample(), KEYS)) - set(expected)
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert contents(buffer[:], KEYS) == expected


def test_the_oldest_go_where_a_number_of_bytes_is_reached() -> None:
    limit = 150_000
    buffer, data = buffer_of(2000, max_bytes=limit), pictures(400)
    made = contents(oracle(data), KEYS)
    for part in data.split(20):
        buffer.extend(part.clone())
        assert buffer.storage.used_nbytes <= limit
    assert 20 < len(buffer) < 400
    assert not set(contents(buffer[:].clone(), KEYS)) - set(made)
    assert contents(buffer[:].clone(), KEYS)[next(iter(contents(oracle(data[-1:]), KEYS)))] >= 1


def test_where_an_image_cannot_be_made_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, data = buffer_of(50), pictures(80)
    buffer.extend(data[:40].clone())
    before, held = buffer[:].clone(), buffer.storage._columns[0].pool.held

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(JpegCodec, "seal", fail)
        with pytest.raises(MemoryError):
            buffer.storage.set(range(30, 50), data[40:60])
    assert buffer.storage._columns[0].pool.held == held
    assert_same(buffer[:].clone(), before)
    buffer.storage.set(range(30, 50), data[40:60])
    assert torch.equal(buffer[30:50]["pixels"].clone(), oracle(data[40:60])["pixels"])


def test_damaged_images_are_reported() -> None:
    buffer = buffer_of()
    buffer.extend(pictures(60))
    buffer.storage._columns[0].pool._arrays["contents"][: 60 * 256] = 7
    with pytest.raises(CorruptFileError, match="cannot be read"):
        buffer.sample()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"codec": "auto", "quality": 80}, InvalidArgumentError, "quality=80 is for codec='jpeg' only"),
        ({"quality": 0}, InvalidArgumentError, "quality=0 must be at least 1"),
        ({"quality": 9.5}, InvalidTypeError, "quality=9.5 is not a whole number"),
        ({"max_error": 4}, InvalidArgumentError, "max_error=4 has no effect on codec='jpeg'"),
        ({"block_length": 4}, InvalidArgumentError, "block_length=4 is not for codec='jpeg'"),
        ({"n_stack": 1}, InvalidArgumentError, "codec='jpeg' stores images of 1 or 3 channels"),
        ({"pixels": [("next", "reward")]}, InvalidTypeError, "stores images of dtype uint8, got float32"),
    ],
)
def test_arguments_that_do_not_go_with_it_are_refused_as_the_other_buffers_do(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        FrameStorage(10, **{"codec": "jpeg", **options}).set(0, pictures(1)[0])


def test_it_is_refused_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "simplejpeg" else find(name))
    with pytest.raises(MissingDependencyError, match=r"codec 'jpeg' needs(.|\n)*rl-ext\[frames-jpeg\]"):
        FrameStorage(5, codec="jpeg").set(0, pictures(1)[0])
    storage = FrameStorage(200)
    storage.set(range(150), pictures(150))
    assert storage._columns[0].pool.codec.name != "jpeg"


@pytest.mark.parametrize(
    ("saved", "options", "text"),
    [
        ({"codec": "jpeg", "quality": 80}, {}, "made with codec='jpeg', quality=80"),
        ({"codec": "jpeg", "quality": 80}, {"codec": "jpeg"}, "made with codec='jpeg', quality=80"),
        ({"max_error": 4}, {}, "made with max_error=4"),
        ({"max_error": 4}, {"max_error": 3}, "made with max_error=4"),
    ],
)
def test_one_that_may_lose_less_does_not_take_over_what_was_saved(
    saved: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    storage = FrameStorage(100, **saved)
    storage.set(range(70), pictures(70))
    state = storage.state_dict()
    with pytest.raises(InvalidArgumentError, match=text):
        FrameStorage(100, **options).load_state_dict(state)
    again = FrameStorage(100, **saved)
    again.load_state_dict(state)
    assert_same(again[:].clone(), storage[:].clone())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "codec='auto', lossless)"),
        ({"codec": "jpeg"}, "codec='jpeg', lossy: quality=95)"),
        ({"codec": "jpeg", "quality": 60}, "codec='jpeg', lossy: quality=60)"),
        ({"max_error": 4}, "codec='auto', lossy: max_error=4)"),
    ],
)
def test_repr_says_what_may_be_lost(options: dict[str, Any], words: str) -> None:
    storage = FrameStorage(10, **options)
    assert repr(storage).endswith(words)
    storage.set(range(5), pictures(5))
    assert repr(storage).endswith(words)
    assert "max_size=10" in repr(storage)
