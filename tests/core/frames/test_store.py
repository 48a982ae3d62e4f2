"""What was appended comes back bit for bit, whatever happens in between."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.frames import AdaptiveStore, FrameStore, StackLayout, arena, codec_names
from rl_ext_core.frames import _parallel as parallel
from rl_ext_core.testing import LAYOUTS, PlainStore, check_contents, transitions

GREY, GREY_LAST, RGB = LAYOUTS[:3]
CODECS = ["raw", "lz4", "patch", "patch+lz4"]


def fill(stores: list[Any], layout: StackLayout, n_steps: int, **options: Any) -> None:
    for observations, nexts in transitions(layout, n_steps=n_steps, **options):
        for store in stores:
            store.append(observations, nexts)


def test_all_codecs_are_tested() -> None:
    assert sorted([*CODECS, "jpeg"]) == codec_names()  # which is lossy: see test_jpeg


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("contents", ["noise", "sparse"])
def test_memory_does_not_grow_around_the_ring(monkeypatch: pytest.MonkeyPatch, codec: str, contents: str) -> None:
    monkeypatch.setattr(arena, "_SLAB_BYTES", 1 << 12)  # small, so that each is used again many times
    capacity, held = 60, []
    store = FrameStore(capacity, 2, GREY, codec=codec)
    for step, transition in enumerate(transitions(GREY, n_steps=20 * capacity, contents=contents)):
        store.append(*transition)
        if step % capacity == capacity - 1:
            held.append(store.nbytes)
    assert max(held[4:]) <= max(held[:4]) + (2 << 12)
    assert max(held[12:]) <= max(held[4:12]) + (1 << 12)
    blocks = store._writer.blocks
    assert (blocks._next - blocks._first).max() <= 2 * capacity // 16


@pytest.mark.parametrize("layout", [GREY, GREY_LAST, RGB], ids=str)
def test_frames_are_shared_where_stacks_continue(layout: StackLayout) -> None:
    plain, store = PlainStore(50, 2, layout), FrameStore(50, 2, layout, codec="raw")
    fill([plain, store], layout, 50, contents="noise", episode=0)
    check_contents(store, plain)
    # Each environment's first stack and one new frame a transition.
    assert store._writer.streams.total.tolist() == [51, 51]
    assert store._writer.stored_whole == 2


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
    assert (store._writer.stored_whole > 2) == (case != "other memory")


@pytest.mark.parametrize("capacity", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("block_length", [1, 2, 16, 64])
def test_any_capacity_and_block_length(capacity: int, block_length: int) -> None:
    plain = PlainStore(capacity, 3, GREY)
    store = FrameStore(capacity, 3, GREY, codec="patch", block_length=block_length)
    adaptive = AdaptiveStore(capacity, 3, GREY.shape, np.uint8, block_length=block_length)
    for seed in range(4):
        fill([plain, store, adaptive], GREY, 23, n_envs=3, odd=0.1, seed=seed)
        check_contents(store, plain)
        check_contents(adaptive, plain)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_length", [1, 4, 16])
def test_frame_numbers_go_around_at_32_bits(codec: str, block_length: int) -> None:
    plain = PlainStore(40, 2, GREY)
    store = FrameStore(40, 2, GREY, codec=codec, block_length=block_length)
    start = 2**32 - 64
    store._writer.streams.total[:] = start
    store._writer.blocks._first[:] = store._writer.blocks._next[:] = start // block_length
    for seed in range(12):
        fill([plain, store], GREY, 17, contents="mixed", odd=0.05, seed=seed)
        check_contents(store, plain, f"after {store._writer.streams.total} frames")
    assert store._writer.streams.total.min() > 2**32 + 100


@pytest.mark.parametrize("n_stack", [1, 100, 255])
def test_stacks_may_be_deep(n_stack: int) -> None:
    layout = StackLayout((n_stack, 2, 3), np.dtype(np.uint8), n_stack, 0)
    plain = PlainStore(30, 1, layout)
    stores = [FrameStore(30, 1, layout, codec=codec, block_length=8) for codec in CODECS]
    fill([plain, *stores], layout, 100, n_envs=1, contents="noise", odd=0.05, episode=40)
    for store in stores:
        check_contents(store, plain)


def test_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_PART", 2)
    plain, store = PlainStore(60, 2, RGB), FrameStore(60, 2, RGB, codec="patch+lz4", block_length=4)
    fill([plain, store], RGB, 100, contents="mixed")
    rng = np.random.default_rng(0)
    for num_threads in (1, 2, 3, 7):
        rows, envs = rng.integers(60, size=97), rng.integers(2, size=97)
        out, next_out = np.zeros((2, 97, *RGB.shape), dtype=np.uint8)
        store.get(rows, envs, out, next_out, num_threads=num_threads)
        np.testing.assert_array_equal(out, plain.observations[rows, envs])
        np.testing.assert_array_equal(next_out, plain.next_observations[rows, envs])


def test_an_error_in_a_thread_is_raised() -> None:
    def fails(start: int, stop: int) -> None:
        if start >= 64:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parallel.run_parts(fails, 400, num_threads=3)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_goes_its_own_way(clone: Any) -> None:
    plain, store = PlainStore(30, 2, GREY), FrameStore(30, 2, GREY, block_length=4)
    fill([plain, store], GREY, 40)
    other_plain, other = copy.deepcopy(plain), clone(store)
    fill([plain, store], GREY, 50, contents="noise", seed=1)
    fill([other_plain, other], GREY, 70, contents="noise", seed=2)
    check_contents(store, plain)
    check_contents(other, other_plain)


def test_a_store_loaded_from_read_only_buffers_can_be_appended_to() -> None:
    plain, store = PlainStore(30, 2, GREY), FrameStore(30, 2, GREY, block_length=4)
    fill([plain, store], GREY, 20)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(store, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    fill([plain, loaded], GREY, 50, contents="noise")
    check_contents(loaded, plain)


@pytest.mark.parametrize("make", [FrameStore, AdaptiveStore])
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


def test_out_of_memory_is_also_the_builtin() -> None:
    assert issubclass(OutOfMemoryError, MemoryError)


def test_threads_may_read_while_another_one_stores() -> None:
    layout = LAYOUTS[0]
    store = FrameStore(40, 2, layout, codec="patch", block_length=4)
    pairs = list(transitions(layout, n_envs=2, n_steps=400, seed=0))
    known = {pair[env].tobytes() for before, after in pairs for pair in (before, after) for env in range(2)}
    store.append(*pairs[0])
    wrong: list[int] = []

    def read() -> None:
        rows, envs = np.zeros(16, np.int64), np.arange(16, dtype=np.int64) % 2
        stacks, nexts = (np.empty((16, *layout.shape), layout.dtype) for _ in range(2))
        for _ in range(200):
            store.get(rows, envs, stacks, nexts)
            wrong.extend(stack.tobytes() not in known for stack in (*stacks, *nexts))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for pair in pairs[1:]:
        store.append(*pair)
    for reader in readers:
        reader.join()
    assert not any(wrong)
