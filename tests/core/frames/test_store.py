"""Observations of a store equal the added ones bit for bit, and invalid calls are rejected."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import FrameStore, Observation, StackLayout, log, threads
from rl_ext_core.frames.codecs import JpegCodec
from rl_ext_core.frames.layout import find_layout
from tests.core.frames.disk_helpers import adaptive_store, append_all, make_store
from tests.core.frames.transitions import CONTENTS, LAYOUTS, ReferenceStore, check_contents, make_transitions
from tests.interrupts import interrupt_everywhere

GRAY, RGB = LAYOUTS[0], LAYOUTS[2]
CODECS = ["raw", "patch"]


# Few dtypes, to save compilation time.
DTYPES = [np.uint8, np.uint16, np.float32, np.float64]
BUDGET = 100_000


@st.composite
def layouts(draw: st.DrawFn) -> StackLayout:
    """Draw a shape, dtype and stacking of observations."""
    n_stack, channels = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    others = draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
    first = draw(st.booleans())
    shape = [n_stack * channels, *others] if first else [*others, n_stack * channels]
    return StackLayout(tuple(shape), np.dtype(draw(st.sampled_from(DTYPES))), n_stack, 0 if first else len(others))


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments with which ``make_transitions`` generates episodes."""
    return {
        "n_steps": draw(st.integers(1, 60)),
        "contents": draw(st.sampled_from(CONTENTS)),
        "episode": draw(st.sampled_from([0, 1, 2, 5, 20])),
        "odd": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "transposed": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=120 if "CI" in os.environ else 25)
@given(data=st.data(), layout=layouts(), capacity=st.integers(1, 40), n_envs=st.integers(1, 4))
def test_store_returns_added_transitions(data: st.DataObject, layout: StackLayout, capacity: int, n_envs: int) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    plain = ReferenceStore(capacity, n_envs, layout)
    stores: list[Any] = [
        make_store(capacity, n_envs, layout, codec=codec),
        adaptive_store(capacity, n_envs, layout.shape, layout.dtype),
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        options = data.draw(episodes())
        append_all((plain, *stores), make_transitions(layout, n_envs=n_envs, **options))
        action = data.draw(st.sampled_from(["read", "pickle", "clear"]))
        if action == "pickle":
            stores = [pickle.loads(pickle.dumps(store)) for store in stores]
        if action == "clear":
            for store in (plain, *stores):
                store.clear()
        for store in stores:
            check_contents(store, plain, f"{store!r} after {options} and {action}")


def test_memory_does_not_grow_while_a_ring_is_filled_again() -> None:
    layout, sizes = StackLayout((2, 80, 80), np.dtype(np.uint8), 2, 0), []
    store = make_store(400, 1, layout)
    for transition in make_transitions(layout, n_envs=1, n_steps=3200, contents="noise", seed=3):
        store.append(*transition)
        sizes.append(store.nbytes)
    assert 400 * layout.frame_bytes <= max(sizes[:800])
    assert sizes[-1] <= 1.5 * max(sizes[:800])


@pytest.mark.parametrize("n_stack", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("channels", "dtype"), [(1, "u1"), (3, "u1"), (1, "u2"), (1, "f4"), (3, "f4"), (3, "c16")])
def test_channel_last_stacks_are_decoded_within_the_output(n_stack: int, channels: int, dtype: str) -> None:
    layout = StackLayout((7, 9, n_stack * channels), np.dtype(dtype), n_stack, 2)
    plain, store = (make(40, 2, layout) for make in (ReferenceStore, make_store))
    append_all((plain, store), make_transitions(layout, n_steps=40, episode=5, odd=0.1))
    check_contents(store, plain)
    around = [np.full((42, *layout.shape), 77, layout.dtype) for _ in range(2)]
    store.get(np.arange(40), np.zeros(40, np.int64), around[0][1:-1], around[1][1:-1])
    for stacks in around:
        assert (stacks[[0, -1]] == 77).all()


@settings(max_examples=60 if "CI" in os.environ else 20)
@given(layout=layouts(), steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_recurring_frames_are_not_confused(layout: StackLayout, steps: list[tuple[int, bool]]) -> None:
    """The images repeat, so that stacks often continue each other by chance."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(6, *layout.shape)).astype(layout.dtype)
    images[0], images[1] = 0, images[2]
    images[3] = np.roll(images[2], -layout.frame_channels, axis=layout.axis)
    plain, store = ReferenceStore(16, 1, layout), make_store(16, 1, layout, codec="patch")
    before = images[:1]
    for image, together in steps:
        after = images[image][None]
        append_all((plain, store), [(before, after)])
        before = after if together else images[(image + 1) % 6][None]
    check_contents(store, plain)


def check_kept_rows(store: Any, plain: ReferenceStore) -> None:
    """Check that stored rows equal the plain arrays, and that dropped rows read as zeros."""
    before, after = plain.observations.copy(), plain.next_observations.copy()
    gone = np.ones(plain.capacity, dtype=bool)
    gone[(store.first + np.arange(store.size)) % store.capacity] = False
    before[gone] = after[gone] = 0
    rows, envs = np.repeat(np.arange(plain.capacity), plain.n_envs), np.tile(np.arange(plain.n_envs), plain.capacity)
    outs = [np.empty((len(rows), *plain.layout.shape), plain.layout.dtype) for _ in range(2)]
    store.get(rows, envs, *outs)
    for out, expected in zip(outs, (before, after), strict=True):
        np.testing.assert_array_equal(out.reshape(expected.shape), expected)


@settings(max_examples=40 if "CI" in os.environ else 10)
@given(data=st.data(), capacity=st.sampled_from([3, 50, 300]))
def test_store_with_max_bytes_returns_newest_transitions(data: st.DataObject, capacity: int) -> None:
    budget = data.draw(st.integers(30_000 if make_store is FrameStore else 60_000, 200_000))
    store: Any = make_store(capacity, 2, GRAY, codec="patch", max_bytes=budget)
    plain = ReferenceStore(capacity, 2, GRAY)
    for _ in range(data.draw(st.integers(1, 3))):
        contents = data.draw(st.sampled_from(["noise", "sparse", "mixed"]))
        for transition in make_transitions(GRAY, n_steps=data.draw(st.integers(1, 200)), contents=contents):
            append_all((store, plain), [transition])
            assert store.nbytes <= budget
        action = data.draw(st.sampled_from(["nothing", "drop", "clear", "pickle"]))
        if action == "drop":
            store.drop_newest(store.size // 2)
            plain.position = store.position
        if action == "clear":
            store.clear()
            plain.clear()
        if action == "pickle":
            store = pickle.loads(pickle.dumps(store))
        check_kept_rows(store, plain)


NOISE = np.random.default_rng(0).integers(0, 256, (500, 1, 1, 40, 40), np.uint8)


@settings(max_examples=100 if "CI" in os.environ else 12, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["append", "append", "drop", "open"]), st.floats(0, 1), st.booleans()), max_size=12
    ),
    capacity=st.sampled_from([150, 1000]),
)
@example(calls=[("append", 0.1, False), ("drop", 1.0, True), ("open", 0.0, False)] * 3, capacity=1000)
@example(
    calls=[("append", 0.9, False), ("drop", 0.8, False), *[("open", 0.0, False), ("append", 0.0, False)] * 2],
    capacity=1000,
)
def test_folder_after_drops_contains_the_other_transitions(calls: list[tuple[str, float, bool]], capacity: int) -> None:
    layout = StackLayout((1, 40, 40), np.dtype(np.uint8), 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        store, next_number = make_store(capacity, 1, layout, storage_dir=folder, resume=True), 0
        expected: list[int] = []
        for name, share, all_of_them in [*calls, ("open", 0.0, False)]:
            if name == "append":
                for _ in range(1 + int(share * 120)):
                    store.append(NOISE[next_number % 499], NOISE[next_number % 499 + 1])
                    expected, next_number = [*expected, next_number % 499][-capacity:], next_number + 1
            elif name == "drop":
                count = store.size if all_of_them else int(share * store.size)
                store.clear() if all_of_them else store.drop_newest(count)
                del expected[len(expected) - count :]
            else:
                store.close()
                store = make_store(capacity, 1, layout, storage_dir=folder, resume=True)
        rows = np.arange(store.position - store.size, store.position) % capacity
        found = np.empty((2, store.size, 1, 40, 40), np.uint8)
        store.get(rows, np.zeros(store.size, np.int64), *found)
        store.close()
    assert store.size == len(expected)
    numbers = np.array(expected, np.int64)
    np.testing.assert_array_equal(found, [NOISE[numbers, 0], NOISE[numbers + 1, 0]])


def test_interrupted_first_append_of_channel_last_stacks_can_be_repeated() -> None:
    stacks = np.random.default_rng(0).integers(0, 256, (4, 1, 5, 6, 3), np.uint8)
    store = FrameStore(1, 1, Observation((5, 6, 3), np.uint8))

    def prepare() -> Callable[[], Any]:
        nonlocal store
        store = FrameStore(8, 1, Observation((5, 6, 3), np.uint8, n_stack=3))
        return lambda: store.append(stacks[0], stacks[1])

    for place in interrupt_everywhere(prepare, code_paths=("/rl_ext_core/frames/",)):
        for step in range(1, 4):
            store.append(stacks[step - 1], stacks[step])
        rows, found = np.arange(store.size - 3, store.size), np.empty((2, 3, 5, 6, 3), np.uint8)
        store.get(rows, np.zeros(3, np.int64), *found)
        np.testing.assert_array_equal(found, [stacks[:3, 0], stacks[1:, 0]], place)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_adaptive_store_respects_max_bytes(where: str, tmp_path: Path) -> None:
    def open_store() -> Any:
        """Open the store in memory or in the folder."""
        folder = tmp_path / "a" if where == "disk" else None
        return adaptive_store(
            3000, 2, GRAY.shape, np.uint8, max_bytes=BUDGET, storage_dir=folder, resume=folder is not None
        )

    store, plain = open_store(), ReferenceStore(3000, 2, GRAY)
    for transition in make_transitions(GRAY, n_steps=1200, contents="sparse", odd=0.02):
        append_all((store, plain), [transition])
        assert store.nbytes <= BUDGET
    assert store.layout.n_stack == 4
    assert store.size < store.position
    check_kept_rows(store, plain)
    store.close()
    if where == "disk":
        store = open_store()
        check_kept_rows(store, plain)
        store.close()


def test_adaptive_store_keeps_detected_layout_after_clear() -> None:
    store = adaptive_store(40, 2, GRAY.shape, GRAY.dtype)
    for _ in range(3):
        plain = ReferenceStore(40, 2, GRAY)
        append_all((store, plain), make_transitions(GRAY, n_steps=40, contents="sparse"))
        check_contents(store, plain)
        assert store.layout == GRAY
        store.clear()


def test_threads_return_equal_batches_and_do_not_exceed_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PART", 2)
    plain, store = ReferenceStore(60, 2, RGB), make_store(60, 2, RGB)
    append_all((plain, store), make_transitions(RGB, n_steps=100, contents="mixed"))
    rng = np.random.default_rng(0)
    for num_threads in (1, 2, 3, 7):
        rows, envs = rng.integers(60, size=97), rng.integers(2, size=97)
        out, next_out, alone = np.zeros((3, 97, *RGB.shape), dtype=np.uint8)
        store.get(rows, envs, out, next_out, num_threads=num_threads)
        np.testing.assert_array_equal(out, plain.observations[rows, envs])
        np.testing.assert_array_equal(next_out, plain.next_observations[rows, envs])
        store.get(rows, envs, None, alone, num_threads=num_threads)
        np.testing.assert_array_equal(alone, next_out)
        store.get(rows, envs, None)
    assert sum(thread.name.startswith("rl-ext-frames") for thread in threading.enumerate()) <= 8


@pytest.mark.parametrize("make", [make_store, adaptive_store])
def test_invalid_observations_are_rejected_without_changes(make: Any) -> None:
    layout = [GRAY] if make is make_store else [GRAY.shape, GRAY.dtype]
    plain, store = ReferenceStore(20, 2, GRAY), make(20, 2, *layout)
    append_all((plain, store), make_transitions(GRAY, n_steps=10))
    good = np.zeros((2, *GRAY.shape), dtype=np.uint8)
    for bad, error, text in (
        (good[:1], InvalidArgumentError, r"obs has shape \(1, 4, 12, 11\), expected \(2, 4, 12, 11\)"),
        (good[0], InvalidArgumentError, "expected"),
        (good.astype(np.float64), InvalidTypeError, "obs has dtype float64, which cannot be converted to uint8"),
    ):
        with pytest.raises(error, match=text):
            store.append(bad, good)
        with pytest.raises(error, match=f"next_{text}" if text.startswith("obs") else text):
            store.append(good, bad)
    check_contents(store, plain)
    append_all((plain, store), make_transitions(GRAY, n_steps=30, seed=1))
    check_contents(store, plain)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"n_envs": 0}, "n_envs=0"),
        *(
            ({"max_bytes": budget}, f"max_bytes={budget:,} is too little for 100 x 2 transitions.* Pass a smaller")
            for budget in (0, 1000)
        ),
    ],
)
def test_invalid_sizes_are_rejected(options: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make_store(**{"capacity": 100, "n_envs": 2, "layout": GRAY, **options})


def test_invalid_rows_envs_and_counts_are_rejected() -> None:
    store = make_store(20, 2, GRAY)
    append_all((store,), make_transitions(GRAY, n_steps=15))
    for row in (-1, 20, 2**40):
        bad, good = np.array([0, row, 0]), np.zeros(3, dtype=np.int64)
        for places in ((bad, good), (good, bad)):
            with pytest.raises(InvalidArgumentError, match=str(row)):
                store.get(*places, np.zeros((3, *GRAY.shape), dtype=np.uint8))
    for count in (-1, 16):
        with pytest.raises(InvalidArgumentError, match=f"count={count}: expected 0 to 15, the number of stored"):
            store.drop_newest(count)
    assert store.size == 15


def test_outputs_of_wrong_form_or_read_only_are_rejected() -> None:
    store = make_store(20, 2, GRAY)
    store.append(*(np.full((2, *GRAY.shape), value, GRAY.dtype) for value in (7, 9)))
    index = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    good = np.zeros((3, *GRAY.shape), dtype=np.uint8)
    memory = bytes(good.nbytes)
    frozen = np.frombuffer(memory, GRAY.dtype).reshape(good.shape)
    read_only = r"a read-only array .* one to write to, .*np\.empty\(\(3, "
    for bad, text in (
        *(
            (bad, "C-contiguous")
            for bad in (good[:2], good.astype(np.int8), np.asfortranarray(good), good.swapaxes(-1, -2))
        ),
        (frozen, read_only),
    ):
        for outs in ((bad, None), (None, bad), (good, bad)):
            with pytest.raises(InvalidArgumentError, match=text):
                store.get(*index, *outs)
    assert not any(memory)


@pytest.mark.parametrize("make", [make_store, adaptive_store])
def test_numpy_integers_are_accepted(make: Any) -> None:
    args = (GRAY,) if make is make_store else (GRAY.shape, GRAY.dtype)
    store, plain = make(np.int64(8), np.int64(2), *args), ReferenceStore(8, 2, GRAY)
    append_all((plain, store), make_transitions(GRAY, n_steps=5))
    check_contents(pickle.loads(pickle.dumps(store)), plain)
    store.drop_newest(np.int32(1))
    again = pickle.loads(pickle.dumps(store))
    assert (again.size, again.first) == (4, 0)


def test_strided_indices_compile_no_more_kernels() -> None:
    store = make_store(8, 2, GRAY)
    append_all((store,), make_transitions(GRAY, n_steps=8))
    out = np.empty((6, *GRAY.shape), GRAY.dtype)
    rows, envs = np.arange(6), np.zeros(6, dtype=np.int64)
    store.get(rows, envs, out)
    expected, compiled = out.copy(), len(log.decode_transitions.signatures)
    frozen = rows.copy()
    frozen.setflags(write=False)
    for places in ((np.repeat(rows, 2)[::2], np.zeros(12, np.int64)[::2]), (frozen, envs), (np.arange(7)[:-1], envs)):
        out[:] = 0
        store.get(*places, out)
        np.testing.assert_array_equal(out, expected)
    assert len(log.decode_transitions.signatures) == compiled
    with pytest.raises(InvalidArgumentError, match="expected two int64 arrays of the same length"):
        store.get(rows[None], envs[None], out[:1])


def test_store_loaded_from_read_only_buffers_accepts_transitions() -> None:
    plain, store = ReferenceStore(30, 2, GRAY), make_store(30, 2, GRAY)
    append_all((plain, store), make_transitions(GRAY, n_steps=20))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(store, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    append_all((plain, loaded), make_transitions(GRAY, n_steps=50, contents="noise"))
    check_contents(loaded, plain)


# Detection of frame stacks.


def test_n_stack_must_divide_the_channels_and_selects_the_axis() -> None:
    for n_stack in (0, -1, 7, 256):
        text = rf"n_stack={n_stack}.*12 channels.*\[1, 2, 3, 4, 6, 12\].*n_stack=None"
        with pytest.raises(InvalidArgumentError, match=f"(?s){text}"):
            adaptive_store(10, 1, (12, 8, 20), np.uint8, n_stack=n_stack)
    for n_stack, axis in ((4, 0), (5, 2)):
        assert adaptive_store(10, 1, (12, 8, 20), np.uint8, n_stack=n_stack).layout.axis == axis


def test_find_layout_detects_stacks() -> None:
    layouts = [layout for layout in LAYOUTS if layout.n_stack > 1]
    for layout, contents, episode in itertools.product(layouts, ["noise", "mixed"], (0, 3)):
        pairs = list(make_transitions(layout, n_envs=1, n_steps=16, contents=contents, episode=episode))
        before, after = (np.concatenate(part) for part in zip(*pairs, strict=True))
        assert find_layout(layout.shape, layout.dtype, before, after) == layout


# Memory errors and failing codecs during ``append``.


class FailingFunction:
    """Function that fails at its n-th call after ``left`` was set to n."""

    def __init__(self, function: Callable[..., Any], error: BaseException) -> None:
        self._function, self._error = function, error
        self.left = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            if not self.left:
                raise self._error
        return self._function(*args, **options)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failing_codec_leaves_the_store_unchanged(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    pytest.importorskip("simplejpeg")
    layout = StackLayout((2, 16, 16), np.dtype(np.uint8), 2, 0)
    failure = FailingFunction(lambda _, frame: bytes(frame), error())  # images as long as frames are not used
    monkeypatch.setattr(JpegCodec, "encode", lambda *arguments: failure(*arguments))
    store, plain = make_store(25, 3, layout, codec="jpeg"), ReferenceStore(25, 3, layout)
    failures = 0
    for step in make_transitions(layout, n_envs=3, n_steps=70, contents="mixed", odd=0.1):
        for failure.left in range(1, 100):
            try:
                store.append(*step)
                break
            except error:
                failures += 1
                failure.left = 0
                check_contents(store, plain)
        failure.left = 0
        plain.append(*step)
    assert failures > 50
