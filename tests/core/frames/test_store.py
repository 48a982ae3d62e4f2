"""What was appended comes back bit for bit, whatever happens in between."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import FrameStore, StackLayout, codec_names, decode
from rl_ext_core.frames.arrays import FRAMES
from rl_ext_core.testing import LAYOUTS, PlainStore, check_contents, transitions
from tests.core.frames.disk_toys import append_all

GREY, GREY_LAST, RGB = LAYOUTS[:3]
CODECS = ["raw", "patch", "patch+lz4"]


def fill(stores: list[Any], layout: StackLayout, n_steps: int, **options: Any) -> None:
    for observations, nexts in transitions(layout, n_steps=n_steps, **options):
        for store in stores:
            store.append(observations, nexts)


def frames_stored(store: FrameStore) -> int:
    return int(store._pool._arrays["head"][FRAMES])


def test_all_codecs_are_tested() -> None:
    assert sorted([*CODECS, "jpeg"]) == codec_names()  # which is lossy: see test_jpeg


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("contents", ["noise", "sparse"])
def test_memory_does_not_grow_around_the_ring(codec: str, contents: str) -> None:
    capacity, held = 60, []
    store = FrameStore(capacity, 2, GREY, codec=codec)
    for step, transition in enumerate(transitions(GREY, n_steps=20 * capacity, contents=contents)):
        store.append(*transition)
        if step % capacity == capacity - 1:
            held.append(store.nbytes)
    assert max(held[4:]) <= 1.1 * max(held[:4])
    assert max(held[12:]) <= 1.01 * max(held[4:12])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", ["shuffled", "flipped", "other memory", "second learn", "one byte"])
def test_stacks_that_do_not_continue_are_stored_whole(codec: str, case: str) -> None:
    plain, store = PlainStore(40, 2, GREY), FrameStore(40, 2, GREY, codec=codec, block_length=4)
    rng = np.random.default_rng(0)
    steps = list(transitions(GREY, n_steps=90, contents="noise", episode=0))
    if case == "second learn":
        steps[30:60] = transitions(GREY, n_steps=30, contents="noise", seed=5)
    for step, (observations, nexts) in enumerate(steps):
        if case == "shuffled" and step % 3 == 0:
            nexts = rng.permuted(nexts, axis=1)
        if case == "flipped" and step % 5 < 2:
            observations, nexts = observations[:, ::-1], nexts[:, ::-1]
        if case == "other memory" and step % 4 == 1:
            observations = np.asfortranarray(observations)
        if case == "one byte" and step % 7 == 6:
            nexts = nexts.copy()
            nexts[1, step % 4, -1, -1] ^= 1
        for each in (plain, store):
            each.append(observations, nexts)
    check_contents(store, plain)
    # A copy of another memory order is the same stack.
    assert (frames_stored(store) > 2 * 91) == (case != "other memory")


@pytest.mark.parametrize("n_stack", [1, 100, 255])
def test_stacks_may_be_deep(n_stack: int) -> None:
    layout = StackLayout((n_stack, 2, 3), np.dtype(np.uint8), n_stack, 0)
    plain = PlainStore(30, 1, layout)
    stores = [FrameStore(30, 1, layout, codec=codec, block_length=8) for codec in CODECS]
    fill([plain, *stores], layout, 100, n_envs=1, contents="noise", odd=0.05, episode=40)
    for store in stores:
        check_contents(store, plain)


def test_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_PART", 2)
    plain, store = PlainStore(60, 2, RGB), FrameStore(60, 2, RGB, codec="patch+lz4", block_length=4)
    fill([plain, store], RGB, 100, contents="mixed")
    rng = np.random.default_rng(0)
    for num_threads in (1, 2, 3, 7):
        rows, envs = rng.integers(60, size=97), rng.integers(2, size=97)
        out, next_out = np.zeros((2, 97, *RGB.shape), dtype=np.uint8)
        store.get(rows, envs, out, next_out, num_threads=num_threads)
        np.testing.assert_array_equal(out, plain.observations[rows, envs])
        np.testing.assert_array_equal(next_out, plain.next_observations[rows, envs])


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_goes_its_own_way(clone: Any) -> None:
    plain, store = PlainStore(30, 2, GREY), FrameStore(30, 2, GREY, block_length=4)
    fill([plain, store], GREY, 40)
    other_plain, other = copy.deepcopy(plain), clone(store)
    fill([plain, store], GREY, 50, contents="noise", seed=1)
    fill([other_plain, other], GREY, 70, contents="noise", seed=2)
    check_contents(store, plain)
    check_contents(other, other_plain)


@pytest.mark.parametrize("make", [FrameStore, FrameStore.adaptive])
def test_bad_observations_are_refused_and_change_nothing(make: Any) -> None:
    layout = [GREY] if make is FrameStore else [GREY.shape, GREY.dtype]
    plain, store = PlainStore(20, 2, GREY), make(20, 2, *layout)
    fill([plain, store], GREY, 10)
    good = np.zeros((2, *GREY.shape), dtype=np.uint8)
    for bad, error, text in (
        (good[:1], InvalidArgumentError, r"obs has shape \(1, 4, 12, 11\), expected \(2, 4, 12, 11\)"),
        (good[0], InvalidArgumentError, "expected"),
        (good.astype(np.float64), InvalidTypeError, "obs has dtype float64, which does not fit into uint8"),
    ):
        with pytest.raises(error, match=text):
            store.append(bad, good)
        with pytest.raises(error, match=f"next_{text}" if text.startswith("obs") else text):
            store.append(good, bad)
    check_contents(store, plain)
    fill([plain, store], GREY, 30, seed=1)
    check_contents(store, plain)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"n_envs": 0}, "n_envs=0"),
        ({"block_length": 12}, "block_length=12 is not a power of two"),
        ({"block_length": 0}, "block_length=0"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        FrameStore(**{"capacity": 4, "n_envs": 2, "layout": GREY, **options})


@pytest.mark.parametrize("row", [-1, 20, 2**40])
@pytest.mark.parametrize("which", ["rows", "envs"])
def test_places_that_do_not_exist_are_refused(row: int, which: str) -> None:
    store = FrameStore(20, 2, GREY)
    index = {"rows": np.zeros(3, dtype=np.int64), "envs": np.zeros(3, dtype=np.int64)}
    index[which][1] = row
    out = np.zeros((3, *GREY.shape), dtype=np.uint8)
    with pytest.raises(InvalidArgumentError, match=str(row)):
        store.get(index["rows"], index["envs"], out)


def test_outputs_that_do_not_fit_are_refused() -> None:
    store = FrameStore(20, 2, GREY)
    index = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    good = np.zeros((3, *GREY.shape), dtype=np.uint8)
    for bad in (good[:2], good.astype(np.int8), np.asfortranarray(good), np.zeros((3, 4, 11, 12), dtype=np.uint8)):
        with pytest.raises(InvalidArgumentError, match="C-contiguous"):
            store.get(*index, bad)
        with pytest.raises(InvalidArgumentError, match="C-contiguous"):
            store.get(*index, good, bad)


@pytest.mark.parametrize("cls", [FrameStore, FrameStore.adaptive])
def test_numbers_may_be_of_numpys_types(cls: Any) -> None:
    args = (GREY,) if cls is FrameStore else (GREY.shape, GREY.dtype)
    store, plain = cls(8, 2, *args), PlainStore(8, 2, GREY)
    for row, (observations, nexts) in zip(np.arange(5), transitions(GREY, n_steps=5), strict=True):
        store.append(observations, nexts, row=row)
        plain.append(observations, nexts)
    file = io.BytesIO()
    store.save(file)
    file.seek(0)
    check_contents(FrameStore.load(file), plain)
    store.drop_oldest(np.int64(1))
    store.forget_newest(np.int32(1))
    file = io.BytesIO()
    store.save(file)
    file.seek(0)
    assert (FrameStore.load(file).size, FrameStore.load(io.BytesIO(file.getvalue())).first) == (3, 1)


def test_a_copy_of_an_adaptive_store_is_one_of_its_own() -> None:
    store = FrameStore.adaptive(8, 2, GREY.shape, GREY.dtype)
    steps = list(transitions(GREY, n_steps=6))
    append_all((store,), steps[:5])
    other = copy.copy(store)
    other.append(*steps[5])
    assert (store.size, other.size) == (5, 6)
    store.append(*steps[0])
    out = np.empty((1, *GREY.shape), GREY.dtype)
    other.get(np.array([5]), np.zeros(1, np.int64), out)
    np.testing.assert_array_equal(out[0], steps[5][0][0])


@pytest.mark.parametrize("row", [-1, 8, np.int64(9)])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    store = FrameStore(8, 2, GREY)
    pair = next(iter(transitions(GREY, n_steps=1)))
    with pytest.raises(InvalidArgumentError, match=f"row={row}.*there are rows 0 to 7. Nothing was stored"):
        store.append(*pair, row=row)
    assert store.size == 0


def test_an_output_that_may_not_be_written_to_is_refused() -> None:
    store = FrameStore(8, 1, GREY)
    store.append(*(np.full((1, *GREY.shape), value, GREY.dtype) for value in (7, 9)))
    place, frozen = np.zeros(1, dtype=np.int64), bytes(GREY.stack_bytes)
    out = np.frombuffer(frozen, GREY.dtype).reshape(1, *GREY.shape)
    for outs in ((out, None), (None, out)):
        with pytest.raises(InvalidArgumentError, match=r"a read-only array .* one to write to, .*np\.empty\(\(1, "):
            store.get(place, place, *outs)
    assert not any(frozen)


def test_kernels_are_compiled_once_however_places_lie_in_memory() -> None:

    store = FrameStore(8, 2, GREY)
    fill([store], GREY, 8)
    out = np.empty((6, *GREY.shape), GREY.dtype)
    rows, envs = np.arange(6), np.zeros(6, dtype=np.int64)
    store.get(rows, envs, out)
    expected, compiled = out.copy(), len(decode.gather.signatures)
    frozen = rows.copy()
    frozen.setflags(write=False)
    for places in ((np.repeat(rows, 2)[::2], np.zeros(12, np.int64)[::2]), (frozen, envs), (np.arange(7)[:-1], envs)):
        out[:] = 0
        store.get(*places, out)
        np.testing.assert_array_equal(out, expected)
    assert len(decode.gather.signatures) == compiled
    with pytest.raises(InvalidArgumentError, match="must be as many numbers of dtype int64"):
        store.get(rows[None], envs[None], out[:1])


def test_threads_are_not_more_than_were_asked_for() -> None:
    def ours() -> int:
        return sum(thread.name.startswith("rl-ext-frames") for thread in threading.enumerate())

    store = FrameStore(64, 1, GREY)
    for observations, nexts in transitions(GREY, n_steps=64):
        store.append(observations[:1], nexts[:1])
    for batch in range(64, 1200, 64):
        rows = np.arange(batch) % 64
        store.get(rows, np.zeros_like(rows), np.empty((batch, *GREY.shape), GREY.dtype), num_threads=8)
    assert ours() <= 8


def test_a_store_loaded_from_read_only_buffers_can_be_appended_to() -> None:
    plain, store = PlainStore(30, 2, GREY), FrameStore(30, 2, GREY, block_length=4)
    fill([plain, store], GREY, 20)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(store, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    fill([plain, loaded], GREY, 50, contents="noise")
    check_contents(loaded, plain)
