from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames import StackLayout
from rl_ext_core.frames.checkpoint import checksum
from rl_ext_core.frames.kernel_primitives import FACTOR, SUM_START
from rl_ext_core.frames.log_segment import Segment
from rl_ext_core.frames.log_state import SEGMENT_HEADER, SIZE_BITS
from rl_ext_core.frames.store import FrameStore
from tests.core.frames.numbered import (
    CAPACITY,
    N_ENVS,
    N_ROWS,
    OBSERVATIONS,
    ROW,
    SAMPLES,
    add,
    check,
    compute_observations,
    open_store,
)
from tests.core.frames.transitions import (
    LAYOUTS,
    ReferenceStore,
    append_all,
    check_contents,
    make_store,
    make_transitions,
)
from tests.forks import result_in_fork

GRAY = LAYOUTS[0]


def test_dict_observations_are_pickled_and_others_refused() -> None:
    store = open_store(None, 50)
    add(store, *range(130))
    store = pickle.loads(pickle.dumps(store))
    obs = compute_observations(130)
    with pytest.raises(InvalidArgumentError, match="expected a dict with the keys"):
        store.append({"exact": obs["exact"]}, obs)
    with pytest.raises(InvalidArgumentError, match="key 'numbers': obs has shape"):
        store.append({**obs, "numbers": obs["numbers"][:1]}, obs)
    assert check(store) == 129


@pytest.mark.parametrize("axis", [0, 2])
def test_jpeg_frames_are_decoded_as_simplejpeg_decodes_them(axis: int) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    layout = StackLayout((40, 30, 6) if axis else (6, 40, 30), np.dtype(np.uint8), 2, axis)
    (y, x), times = np.mgrid[:40, :30], range(58)
    images = [np.stack([x * 3 + t, y * 4 + 2 * t, x + y + t], -1).astype(np.uint8) for t in times]
    coded = [simplejpeg.decode_jpeg(simplejpeg.encode_jpeg(image, 95, "RGB", "444"), "RGB") for image in images]
    store, plain = make_store(40, 1, layout, codec="jpeg"), ReferenceStore(40, 1, layout)
    for each, frames in ((store, images), (plain, coded)):
        pairs = itertools.pairwise(np.moveaxis(frame, -1, axis) for frame in frames)
        append_all((each,), itertools.pairwise(np.concatenate(pair, axis)[None] for pair in pairs))
    store = pickle.loads(pickle.dumps(store))
    check_contents(store, plain)
    assert store.nbytes < 0.6 * 41 * 3600 + 60_000


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)  # four gray frames, planar and interleaved
def test_handles_of_equal_observations_are_equal(layout: StackLayout) -> None:
    store, plain = make_store(60, 2, layout), ReferenceStore(60, 2, layout)
    append_all((store, plain), make_transitions(layout, n_steps=100))
    rows, envs = np.repeat(np.arange(60), 2), np.tile(np.arange(2), 60)
    handles, next_handles = store.handles(rows, envs)[None]
    for found, expected in ((handles, plain.observations), (next_handles, plain.next_observations)):
        out = np.empty((120, *layout.shape), layout.dtype)
        store.get_stacks(found, out)
        np.testing.assert_array_equal(out.reshape(expected.shape), expected)
    later = (rows + 1) % 60
    same = (plain.next_observations[rows, envs] == plain.observations[later, envs]).all((1, 2, 3))
    same &= later != store.position
    following = store.handles(later, envs)[None][0]
    assert (next_handles[same] == following[same]).mean() > 0.9  # a segment between them has both


def test_large_frames_store_changes_of_any_size_and_distance() -> None:
    layout, rng = StackLayout((480, 640, 3), np.dtype(np.uint8), 1, 0), np.random.default_rng(0)
    store, plain = make_store(20, 1, layout), ReferenceStore(20, 1, layout)
    frames = np.repeat(rng.integers(256, size=(1, 1, *layout.shape), dtype=np.uint8), 21, 0)
    for t, frame in enumerate(frames):
        frame[0, 50:200, t : t + 170] = rng.integers(256, size=(150, 170, 3), dtype=np.uint8)
        frame[0, -1, -1] = t
    append_all((store, plain), itertools.pairwise(frames))
    check_contents(store, plain)
    nexts = np.empty((20, *layout.shape), np.uint8)
    store.get(np.arange(20), np.zeros(20, np.int64), None, nexts)
    np.testing.assert_array_equal(nexts, frames[1:, 0])
    assert store.nbytes < 20 * 120_000 + 9_000_000


# Folders


def test_open_and_closed_folders_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    add(store, 0)
    with pytest.raises(StorageError, match="is in use by this process"):
        open_store(tmp_path / "a")
    store.close()
    with pytest.raises(StorageError, match="was closed"):
        add(store, 0)
    with pytest.raises(InvalidArgumentError, match="rows of an earlier buffer, expected an empty"):
        FrameStore(CAPACITY, N_ENVS, OBSERVATIONS, row_dtype=ROW, storage_dir=tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="was created with capacity=12, not with capacity=99"):
        open_store(tmp_path / "a", 99)
    with pytest.raises(InvalidArgumentError, match=r"was created with observations=.*Pass the same options"):
        open_store(tmp_path / "a", observations={"exact": OBSERVATIONS["exact"]})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_does_not_write_to_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a")
    add(store, 0)
    text = result_in_fork(lambda: add(store, 1))
    assert text.startswith("StorageError: ")
    assert "is a fork of it" in text
    add(store, 1)
    assert check(store) == 1
    store.close()


def _add_forever(folder: Path, first: int, done: Any) -> None:
    store = open_store(folder, 150)
    for number in range(first, 1_000_000):
        add(store, number)
        done.value = number


@pytest.mark.parametrize("n", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_lose_at_most_the_running_push(n: int, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    context, rng, newest = multiprocessing.get_context("fork"), random.Random(0), -1
    done = context.Value("q", -1, lock=False)
    for k in range(n):
        if k % 5 == 0:
            shutil.rmtree(folder, ignore_errors=True)
            newest = done.value = -1
        process = context.Process(target=_add_forever, args=(folder, newest + 1, done))
        process.start()
        while done.value < newest + rng.randrange(1, 400):
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.003)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        store = open_store(folder, 150)
        newest = check(store)
        assert done.value <= newest <= done.value + 1
        assert store.size == min(newest + 1, 150)
        store.close()


def test_folder_whose_oldest_segment_has_no_record_is_opened(tmp_path: Path) -> None:
    """A process was killed after it had opened a segment, and later ones have overwritten all older rows."""
    folder = tmp_path / "a"
    for first in range(0, 400, 50):
        store = open_store(folder, 150)
        add(store, *range(first, first + 50))
        store.close()
    oldest = min(int(path.stem) for path in (folder / "log-0000").glob("*.log"))
    assert oldest > 0
    Segment.create(64, folder / "log-0000", oldest - 1)
    for newest in (399, 400):
        store = open_store(folder, 150)
        assert (check(store), store.size) == (newest, 150)
        add(store, newest + 1)
        store.close()


@pytest.mark.parametrize("n_words", range(5))
def test_segment_whose_header_was_not_finished_is_empty(n_words: int, tmp_path: Path) -> None:
    """A process was killed while it created a segment: the magic number is written last."""
    store = open_store(tmp_path / "a", 150)
    add(store, *range(50))
    store.close()
    newest = max((tmp_path / "a" / "log-0000").glob("*.log"))
    path = Segment.create(64, newest.parent, int(newest.stem) + 1).path
    assert path is not None
    with path.open("r+b") as file:
        file.write(bytes(4))
        file.seek(4 * n_words + 4)
        file.write(bytes(20 - 4 * n_words - 4))
    store = open_store(tmp_path / "a", 150)
    assert check(store) == 49
    add(store, 50)
    assert check(store) == 50
    store.close()
    with newest.open("r+b") as file:
        file.write(bytes(4))
    with pytest.raises(CorruptFileError, match=rf"{newest.name} is damaged: its header"):
        open_store(tmp_path / "a", 150)


def test_position_of_an_empty_folder_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", 150)
    add(store, *range(155))
    store.drop_newest(150)
    for _ in range(3):
        store.close()
        store = open_store(tmp_path / "a", 150)
        assert (store.size, store.position) == (0, 5)


@settings(max_examples=120 if "CI" in os.environ else 40, deadline=None)
@given(data=st.data())
def test_damaged_folders_are_refused_or_intact(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damage") / "a"
    store = open_store(folder, 100)
    n = data.draw(st.sampled_from([30, 250]))
    add(store, *range(n))
    if data.draw(st.booleans()):
        store.close()
    else:  # as after a kill
        shutil.copytree(folder, folder.with_name("b"))
        store.close()
        folder = folder.with_name("b")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    path = data.draw(st.sampled_from(files))
    size = path.stat().st_size
    kind = data.draw(st.sampled_from(["truncate", "flip", "overwrite", "delete"]))
    at = data.draw(st.integers(0, 199)) if data.draw(st.booleans()) else int(data.draw(st.floats(0, 1)) * size)
    at = min(at, size - 1)  # the sizes of files differ a little between runs
    if kind == "truncate":
        os.truncate(path, at)
    elif kind == "delete":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1 if kind == "flip" else 40)
            file.seek(at)
            file.write(bytes([old[0] ^ 1 << data.draw(st.integers(0, 7))]) if kind == "flip" else os.urandom(len(old)))
    refusal = ""
    try:
        store = open_store(folder, 100)
    except (CorruptFileError, InvalidArgumentError) as error:
        refusal = str(error)
    if refusal:
        assert str(folder) in refusal
        return
    assert check(store) < n
    add(store, *range(n, n + 40))  # it can be continued, from whatever it contains
    store.close()


def test_full_disk_leaves_the_store_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_ext_core import _system

    store, number, failures = open_store(tmp_path / "a", 400), 0, 0
    allocate: Callable[..., None] = _system.allocate_file_space

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for number in range(900):
        monkeypatch.setattr(_system, "allocate_file_space", fail)
        try:
            add(store, number)
        except StorageError:
            failures += 1
            assert check(store) == number - 1
            with pytest.raises(StorageError, match="No space left"):
                add(store, number)
            monkeypatch.setattr(_system, "allocate_file_space", allocate)
            add(store, number)
    assert failures > 2
    assert check(store) == number
    store.close()


@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_samples_of_all_formats_are_read(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "a")
    store: Any = open_store(tmp_path / "a")
    assert (store.size, store.position, store.full) == (CAPACITY, N_ROWS % CAPACITY, True)
    assert check(store) == N_ROWS - 1
    store.close()


# Folders and pickles that were altered together with their checksums


def seal(words: np.ndarray, start: int) -> None:
    """Compute the checksum of the record at ``start`` of a segment again."""
    mask, size = 2**64 - 1, int(words[start])
    contents = words[start + 2 : start + (size & SIZE_BITS)].tobytes()
    total = SUM_START ^ (int(words[2]) | int(words[3]) << 32)
    chunks = [int.from_bytes(contents[i : i + 8], "little") for i in range(0, len(contents) // 8 * 8, 8)]
    if rest := contents[8 * len(chunks) :]:
        chunks.append(len(rest) << 8 * len(rest) | int.from_bytes(rest, "big"))
    for word in (size, *chunks):
        total = (total ^ word) * FACTOR & mask
        total ^= total >> 29
    words[start + 1] = (total ^ total >> 32) & 0xFFFFFFFF


def find_records(words: np.ndarray) -> list[int]:
    """Return where the records of a segment begin."""
    starts, at = [], SEGMENT_HEADER
    while words[at]:
        starts.append(at)
        at += int(words[at]) & SIZE_BITS
    return starts


def use_store(store: FrameStore) -> None:
    """Read all rows of a store of the sample, before and after more are added. Nothing behind outputs may change."""
    rows, envs = np.repeat(np.arange(CAPACITY), N_ENVS), np.tile(np.arange(N_ENVS), CAPACITY)
    for number in range(15):
        memory = [np.full(len(rows) * 8 * 400 + 128, 77, np.uint8) for _ in range(2 * len(OBSERVATIONS))]
        outs: Any = [{}, {}]
        for i, (key, part) in enumerate(OBSERVATIONS.items() if number in (0, 14) else ()):
            size = len(rows) * int(np.prod(part.shape)) * np.dtype(part.dtype).itemsize
            for out, around in zip(outs, memory[2 * i : 2 * i + 2], strict=True):
                out[key] = around[64 : 64 + size].view(part.dtype).reshape(len(rows), *part.shape)
        store.get(rows, envs, *outs)
        for array in (array for out in outs for array in out.values()):
            array.view(np.uint8)[:] = 77
        assert all((around == 77).all() for around in memory)
        add(store, number)
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", ["folder", "pickle"])
def test_altered_stores_with_right_checksums_do_not_crash(where: str, tmp_path: Path) -> None:
    (sample,) = SAMPLES.iterdir()
    sizes = st.sampled_from([0, 1, 2, 5, 16, 255, 2**14 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
    changes = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "add", "flip"]), sizes)

    def alter(words: np.ndarray, changed: list[tuple[float, str, int]], first: int, stop: int) -> None:
        for place, how, value in changed:
            at = int(first + place * (stop - first))
            old = int(words[at])
            new = {"set": value, "add": old + value % 7 - 3, "flip": old ^ 1 << value % 32}[how]
            words[at] = new & 0xFFFFFFFF

    def use_folder(changed: list[Any]) -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(sample, tmp_path / "a")
        path = sorted(tmp_path.glob("a/log-*/*.log"))[-1]
        words = np.memmap(path, np.uint32, "r+")
        records = find_records(words)
        alter(words, changed, SEGMENT_HEADER, records[-1] + int(words[records[-1]] & SIZE_BITS))
        for start in records:
            if start + (int(words[start]) & SIZE_BITS) <= len(words):
                seal(words, start)
        words.flush()
        with contextlib.suppress(CorruptFileError, InvalidArgumentError):
            use_store(open_store(tmp_path / "a"))

    def use_pickle(changed: list[Any]) -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(sample, tmp_path / "a")
        state = pickle.loads(pickle.dumps(open_store(tmp_path / "a"))).__getstate__()
        log = state["log"]
        log["pairs"], log["segments"] = log["pairs"].copy(), {k: v.copy() for k, v in log["segments"].items()}
        parts = [log["pairs"].reshape(-1).view(np.uint32), *log["segments"].values()]
        for change in changed:
            part = parts[change[2] % len(parts)]
            alter(part, [change], 0, len(part))
        store = FrameStore.__new__(FrameStore)
        with contextlib.suppress(CorruptFileError):
            store.__setstate__({**state, "checksum": checksum(state)})
            use_store(store)

    use = use_folder if where == "folder" else use_pickle
    use([])  # compiles the kernels

    @settings(max_examples=250 if "CI" in os.environ else 20, deadline=None)
    @given(changed=st.lists(changes, min_size=1, max_size=3))
    def check(changed: list[Any]) -> None:
        assert result_in_fork(lambda: use(changed)) == "None"

    check()
