from __future__ import annotations

import itertools
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import FrameStore, Observation, StackLayout, log
from rl_ext_core.frames.codecs import JpegCodec
from rl_ext_core.frames.layout import find_layout
from tests.core.frames.transitions import (
    CONTENTS,
    LAYOUTS,
    ReferenceStore,
    append_all,
    check_contents,
    check_rows,
    make_store,
    make_transitions,
)
from tests.interrupts import interrupt_everywhere

GRAY = LAYOUTS[0]
# Few dtypes, to save compilation time.
DTYPES = [np.uint8, np.uint16, np.float32, np.complex128]


@st.composite
def layouts(draw: st.DrawFn) -> StackLayout:
    n_stack, channels = draw(st.sampled_from([1, 2, 3, 4, 5, 8])), draw(st.sampled_from([1, 1, 2, 3]))
    others = draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
    first = draw(st.booleans())
    shape = [n_stack * channels, *others] if first else [*others, n_stack * channels]
    return StackLayout(tuple(shape), np.dtype(draw(st.sampled_from(DTYPES))), n_stack, 0 if first else len(others))


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "n_steps": draw(st.integers(1, 60)),
        "contents": draw(st.sampled_from(CONTENTS)),
        "episode": draw(st.sampled_from([0, 1, 2, 5, 20])),
        "odd": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "transposed": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "seed": draw(st.integers(0, 1000)),
    }


NOISE = StackLayout((1, 40, 40), np.dtype(np.uint8), 1, 0)
ROW = np.dtype([("number", "<i8"), ("reward", "<f4", (2,))])


class SameAsArrays(RuleBasedStateMachine):
    """Machine that makes the same calls of a store, in memory or in a folder, and of uncompressed arrays."""

    store: Any = None

    @initialize(
        data=st.data(),
        kind=st.sampled_from(["any layout", "any layout", "budget", "noise"]),
        capacity=st.integers(1, 40),
        codec=st.sampled_from(["raw", "patch"]),
        max_error=st.sampled_from([0, 0, 0, 1, 3, 7, 40, 127]),
        is_adaptive=st.booleans(),
        in_folder=st.booleans(),
    )
    def begin(
        self,
        data: st.DataObject,
        kind: str,
        capacity: int,
        codec: str,
        max_error: int,
        is_adaptive: bool,
        in_folder: bool,
    ) -> None:
        self.temporary = Path(tempfile.mkdtemp())
        self.folder = self.temporary / "a" if in_folder else None
        self.layout = {"budget": GRAY, "noise": NOISE}.get(kind) or data.draw(layouts())
        self.n_envs = data.draw(st.integers(1, 4)) if kind == "any layout" else 2
        self.budget = data.draw(st.integers(60_000, 120_000)) if kind == "budget" else None
        self.max_error = max_error if codec == "patch" and self.layout.dtype == np.uint8 else 0
        self.options = {"codec": codec, "max_error": self.max_error, "max_bytes": self.budget, "row_dtype": ROW}
        self.is_adaptive, self.number = is_adaptive, 0
        if kind != "any layout":
            capacity = data.draw(st.sampled_from([150, 500]))
        self.plain = ReferenceStore(capacity, self.n_envs, self.layout)
        self.rows = np.zeros(capacity, ROW)
        self.store = self._open(self.folder)

    def _open(self, folder: Path | None) -> Any:
        sizes = np.int64(self.plain.capacity), np.int64(self.n_envs)
        options = {**self.options, "storage_dir": folder, "resume": folder is not None}
        return make_store(*sizes, self.layout, is_adaptive=self.is_adaptive, **options)

    @rule(options=episodes())
    def append_more(self, options: dict[str, Any]) -> None:
        """Append twice as often as other calls."""
        self.append(options)

    @rule(options=episodes())
    def append(self, options: dict[str, Any]) -> None:
        if self.plain.capacity > 40:  # a few rows of noise fill a segment
            options = {**options, "n_steps": 4 * options["n_steps"], "contents": "noise"}
        for step in make_transitions(self.layout, n_envs=self.n_envs, **options):
            self.number += 1
            row = np.array([(self.number, (self.number, -self.number))], ROW)
            self.rows[self.plain.position] = row[0]
            self.plain.append(*step)
            self.store.append(*step, row)
            assert self.store.size
            assert self.budget is None or self.store.nbytes <= self.budget

    @rule(share=st.floats(0, 1))
    def drop_newest(self, share: float) -> None:
        count = np.int32(share * self.store.size)
        self.store.drop_newest(count)
        self.plain.position = int(self.plain.position - count) % self.plain.capacity
        self.plain.size -= int(count)

    @rule()
    def replace_newest_data(self) -> None:
        if self.store.size:
            newest = (self.store.position - 1) % self.store.capacity
            self.store.rows[newest] = self.rows[newest] = (-1, (7, 8))
            self.store.write_newest_data()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.plain.clear()

    @rule()
    def open_again(self) -> None:
        """Close the store and open its folder again; or replace it by a copy, unpickled from read-only buffers."""
        if self.folder is None:
            buffers: list[pickle.PickleBuffer] = []
            data = pickle.dumps(self.store, protocol=5, buffer_callback=buffers.append)
            self.store = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
            return
        size = self.store.size
        self.store.close()
        self.store = self._open(self.folder)
        assert self.store.recovered == (size, 0)

    @rule()
    def open_copy_of_unclosed_folder(self) -> None:
        if self.folder is not None:
            left = self._open(shutil.copytree(self.folder, self.temporary / "left"))
            assert left.recovered == (self.store.size, 0)
            self._compare(left)
            left.close()
            shutil.rmtree(self.temporary / "left")

    def _compare(self, store: Any) -> None:
        """Check that a store contains the newest transitions within the error, and zeros in all other rows."""
        assert store.position == self.plain.position
        assert store.size == self.plain.size or (self.budget is not None and store.size < self.plain.size)
        rows = (store.first + np.arange(store.size)) % store.capacity
        np.testing.assert_array_equal(store.rows[rows], self.rows[rows])
        before, after = self.plain.observations.copy(), self.plain.next_observations.copy()
        is_gone = np.ones(store.capacity, dtype=bool)
        is_gone[rows] = False
        before[is_gone] = after[is_gone] = 0
        check_rows(store, before, after, max_error=self.max_error)

    @invariant()
    def both_are_equal(self) -> None:
        if self.store is not None:
            self._compare(self.store)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
            shutil.rmtree(self.temporary)


TestSameAsArrays = SameAsArrays.TestCase
TestSameAsArrays.settings = settings(
    max_examples=150 if "CI" in os.environ else 40, stateful_step_count=20, phases=(Phase.generate,)
)


def test_memory_does_not_grow_while_a_ring_is_filled_again() -> None:
    layout, sizes = StackLayout((2, 80, 80), np.dtype(np.uint8), 2, 0), []
    store = make_store(400, 1, layout)
    for transition in make_transitions(layout, n_envs=1, n_steps=3200, contents="noise", seed=3):
        store.append(*transition)
        sizes.append(store.nbytes)
    assert 400 * layout.frame_bytes <= max(sizes[:800])
    assert sizes[-1] <= 1.5 * max(sizes[:800])


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


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_invalid_observations_are_rejected_without_changes(is_adaptive: bool) -> None:
    plain, store = ReferenceStore(20, 2, GRAY), make_store(20, 2, GRAY, is_adaptive=is_adaptive)
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


@pytest.mark.parametrize(("n_stack", "axis"), [(4, 0), (5, 2)])
def test_axis_is_the_one_that_n_stack_divides(n_stack: int, axis: int) -> None:
    assert FrameStore(10, 1, Observation((12, 8, 20), np.uint8, n_stack=n_stack)).layout.axis == axis


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


def test_find_layout_detects_stacks() -> None:
    layouts = [layout for layout in LAYOUTS if layout.n_stack > 1]
    for layout, contents, episode in itertools.product(layouts, ["noise", "mixed"], (0, 3)):
        pairs = list(make_transitions(layout, n_envs=1, n_steps=16, contents=contents, episode=episode))
        before, after = (np.concatenate(part) for part in zip(*pairs, strict=True))
        assert find_layout(layout.shape, layout.dtype, before, after) == layout


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failing_codec_leaves_the_store_unchanged(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    pytest.importorskip("simplejpeg")
    layout, left, failures = StackLayout((2, 16, 16), np.dtype(np.uint8), 2, 0), 0, 0

    def encode(codec: JpegCodec, frame: Any) -> bytes:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return bytes(frame)  # images as long as frames are not used

    monkeypatch.setattr(JpegCodec, "encode", encode)
    store, plain = make_store(25, 3, layout, codec="jpeg"), ReferenceStore(25, 3, layout)
    for step in make_transitions(layout, n_envs=3, n_steps=70, contents="mixed", odd=0.1):
        for number in range(1, 100):
            left = number
            try:
                store.append(*step)
                break
            except error:
                failures += 1
                check_contents(store, plain)
        plain.append(*step)
    assert failures > 50
