from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError
from rl_ext_core.frames import arrays as state
from rl_ext_core.frames import codecs
from rl_ext_core.frames import pool as pool_module
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.pool import FramePool
from rl_ext_core.frames.region import RegionFile

SHAPES = {
    "grey, channel first": ((4, 12, 9), 4, 0),
    "grey, channel last": ((12, 9, 4), 4, 2),
    "RGB, channel first": ((9, 8, 7), 3, 0),
    "RGB, channel last": ((8, 7, 9), 3, 2),
    "one frame": ((3, 10, 10), 1, 0),
}


class Videos:
    """Stacks of several environments, which end now and then; frames differ in a few pixels."""

    def __init__(self, shape: tuple[int, ...], n_stack: int, axis: int, *, seed: int, n_envs: int = 3) -> None:
        self.layout = StackLayout(shape, np.dtype(np.uint8), n_stack, axis)
        self.rng = np.random.default_rng(seed)
        frame = list(shape)
        frame[axis] //= n_stack
        self.base = self.rng.integers(0, 256, frame, dtype=np.uint8)
        self.stacks = [self.reset() for _ in range(n_envs)]

    def frame(self) -> np.ndarray[Any, Any]:
        frame = self.base.copy()
        frame.flat[self.rng.integers(0, frame.size, 9)] = self.rng.integers(0, 256, 9)
        return frame

    def reset(self) -> list[np.ndarray[Any, Any]]:
        return [np.zeros_like(self.base)] * (self.layout.n_stack - 1) + [self.frame()]

    def batch(self, n: int) -> tuple[np.ndarray[Any, Any], ...]:
        before, after, ended = [], [], []
        for _ in range(n):
            env = int(self.rng.integers(len(self.stacks)))
            following = [*self.stacks[env][1:], self.frame()]
            before.append(np.concatenate(self.stacks[env], self.layout.axis))
            after.append(np.concatenate(following, self.layout.axis))
            ended.append(self.rng.random() < 0.1)
            self.stacks[env] = self.reset() if ended[-1] else following
        return np.stack(before), np.stack(after), np.array(ended)


def new_pool(videos: Videos, *, codec: str = "patch", block_length: int = 4, n_handles: int = 400) -> FramePool:
    return FramePool(n_handles, videos.layout, codec=codec, block_length=block_length)


def read(pool: FramePool, handles: Any, **options: Any) -> np.ndarray[Any, Any]:
    out = np.full((len(handles), *pool.layout.shape), 77, dtype=np.uint8)
    pool.get(np.array(handles, dtype=np.int64), out, **options)
    return out


def live_blocks(pool: FramePool) -> int:
    return int((pool._pool.blocks[1 : pool._pool.head[state.BLOCKS], state.KIND] != state.FREE).sum())


@pytest.mark.parametrize("codec", ["patch", "raw", "patch+lz4"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("block_length", [1, 4, 16])
def test_stacks_that_are_replaced_at_random_come_out_as_they_went_in(codec: str, kind: str, block_length: int) -> None:
    videos = Videos(*SHAPES[kind], seed=block_length)
    pool = new_pool(videos, codec=codec, block_length=block_length)
    held: dict[int, tuple[int, int, Any, Any]] = {}
    for turn in range(60):
        before, after, ended = videos.batch(int(videos.rng.integers(1, 9)))
        handles = pool.put(before, after, ended=ended)
        for i, row in enumerate(videos.rng.integers(0, 40, len(before)).tolist()):
            if row in held:
                pool.release(np.array(held[row][:2]))
            held[row] = int(handles[0][i]), int(handles[1][i]), before[i], after[i]
        order = videos.rng.permutation(len(held)) if turn % 2 else np.arange(len(held))
        rows = list(held.values())
        nexts = [rows[i] for i in order]
        out = np.empty_like(before, shape=(len(rows), *before.shape[1:]))
        next_out = np.empty_like(out)
        pool.get(np.array([row[0] for row in rows]), out, np.array([row[1] for row in nexts]), next_out)
        np.testing.assert_array_equal(out, [row[2] for row in rows])
        np.testing.assert_array_equal(next_out, [row[3] for row in nexts])
    assert pool.held == 2 * len(held)
    for row in held.values():
        pool.release(np.array(row[:2]))
    spanned = (videos.layout.n_stack - 1) // block_length + 2
    assert pool.held == 0
    assert live_blocks(pool) <= spanned * pool._pool.head[state.STREAMS], "only the newest stack of each stream is left"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=60), st.sampled_from(["patch", "raw"])
)
def test_any_sequence_of_few_frames_comes_out_as_it_went_in(frames: list[tuple[int, bool]], codec: str) -> None:
    layout = StackLayout((2, 4, 4), np.dtype(np.uint8), 2, 0)
    pool = FramePool(200, layout, codec=codec, block_length=2)
    stacks = np.zeros((len(frames), 2, 4, 4), dtype=np.uint8)
    for stack, (number, moved) in zip(stacks, frames, strict=True):
        stack[0, 0, 0], stack[1, 0, 0] = number, number + moved
    handles, _ = pool.put(stacks)
    np.testing.assert_array_equal(read(pool, handles), stacks)
    pool.release(handles[::2])
    np.testing.assert_array_equal(read(pool, handles[1::2]), stacks[1::2])


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_ring_that_is_overwritten_many_times_does_not_grow(batch: int) -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos)
    held: list[Any] = []
    sizes = []
    for _ in range(2000 // batch):
        before, after, ended = videos.batch(batch)
        held.append(np.concatenate(pool.put(before, after, ended=ended)))
        if len(held) > 128 // batch:
            pool.release(held.pop(0))
        sizes.append(pool.nbytes)
    assert max(sizes[len(sizes) // 2 :]) <= 1.25 * max(sizes[: len(sizes) // 2])


def test_frames_of_interleaved_environments_are_stored_once() -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0, n_envs=16)
    pool = new_pool(videos, n_handles=4000)
    before, after, ended = videos.batch(1500)
    pool.put(before, after, ended=ended)
    episodes = 16 + int(ended.sum())
    assert pool._pool.head[state.FRAMES] <= 1500 + 4 * episodes
    assert pool._pool.head[state.STREAMS] <= 20, "streams of ended episodes are used again"


def test_more_trajectories_than_are_followed_come_out_as_they_went_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_STREAMS", 4)
    videos = Videos(*SHAPES["grey, channel first"], seed=0, n_envs=12)
    pool = new_pool(videos, n_handles=2000)
    before, after, ended = videos.batch(300)
    handles, next_handles = pool.put(before, after, ended=ended)
    np.testing.assert_array_equal(read(pool, handles), before)
    np.testing.assert_array_equal(read(pool, next_handles), after)
    assert pool._pool.head[state.STREAMS] == 4


def test_single_frames_without_successors_join_the_trajectory_that_they_resemble() -> None:
    layout = StackLayout((1, 40, 40), np.dtype(np.uint8), 1, 0)
    pool = FramePool(1000, layout)
    rng = np.random.default_rng(0)
    scenes = rng.integers(0, 256, (2, 1, 40, 40), dtype=np.uint8)
    frames = scenes[np.arange(400) % 2]
    frames[np.arange(400), 0, 0, 0] = rng.integers(0, 256, 400)
    handles, _ = pool.put(frames)
    np.testing.assert_array_equal(read(pool, handles), frames)
    assert pool.changed_fraction < 0.05


def test_a_batch_read_in_threads_is_the_same() -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos, n_handles=2000)
    before, after, ended = videos.batch(500)
    handles, _ = pool.put(before, after, ended=ended)
    np.testing.assert_array_equal(read(pool, handles, num_threads=3), before)


def test_a_pool_that_becomes_another_one_has_forgotten_everything() -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos)
    pool.put(*videos.batch(50)[:2])
    pool.become(StackLayout((4, 12, 9), np.dtype(np.uint8), 1, 0), codec="raw", block_length=2)
    before, after, _ = videos.batch(50)
    handles, next_handles = pool.put(before, after)
    assert pool.held == 100
    np.testing.assert_array_equal(read(pool, handles), before)
    np.testing.assert_array_equal(read(pool, next_handles), after)


def test_handle_zero_is_an_image_of_zeros() -> None:
    pool = new_pool(Videos(*SHAPES["grey, channel last"], seed=0))
    assert not read(pool, [0, 0]).any()
    pool.release(np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("handle", [-1, 1, 5 | 1 << 48, 1 << 40])
def test_a_handle_that_was_never_given_out_is_refused(handle: int) -> None:
    pool = new_pool(Videos(*SHAPES["grey, channel last"], seed=0))
    for use in (pool.release, lambda handles: read(pool, handles)):
        with pytest.raises(InvalidArgumentError, match="name no stacks of this pool"):
            use(np.array([handle]))


def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    pool = new_pool(Videos(*SHAPES["grey, channel first"], seed=0))
    for wrong in (
        np.zeros((2, 4, 12, 8), np.uint8),
        np.zeros((2, 4, 12, 9), np.int8),
        np.zeros((2, 4, 12, 18), np.uint8)[..., ::2],
    ):
        with pytest.raises(InvalidArgumentError, match="expected a C-contiguous one"):
            pool.put(wrong)


@pytest.mark.parametrize("block_length", [0, 3, 512])
def test_a_block_length_that_cannot_be_used_is_refused(block_length: int) -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos)
    with pytest.raises(InvalidArgumentError, match="block_length"):
        pool.become(videos.layout, codec="patch", block_length=block_length)


def test_a_file_has_room_for_whatever_it_was_asked_for(tmp_path: Path) -> None:
    pool = FramePool(2_000_000, StackLayout((4, 12, 9), np.dtype(np.uint8), 4, 0), file=RegionFile(tmp_path / "frames"))
    room, head = pool._room, pool._pool.head
    for pages in (1, 2, 3, 5, 8, 13, 21):
        for grains in range(8 * 4096 * pages - 20, 8 * 4096 * pages + 20):
            head[state.GRAINS] = grains - 2 * room.step[1]
            room.grow(2)  # who still has too little asks again, for ever
            assert (room.most >= head[list(state._KINDS)] + 2 * room.step).all(), grains


@pytest.mark.parametrize("codec", ["patch", "patch+lz4"])
def test_a_pool_that_was_written_and_read_goes_on_as_if_nothing_had_happened(codec: str) -> None:
    videos = Videos(*SHAPES["RGB, channel last"], seed=0)
    pool = new_pool(videos, codec=codec, n_handles=2000)
    before, after, ended = videos.batch(150)
    handles = np.concatenate(pool.put(before, after, ended=ended))
    pool.release(handles[:40])
    copy = FramePool.restored(pickle.loads(pickle.dumps(pool.described())), 3000)
    stacks = np.concatenate([before, after])[40:]
    more = videos.batch(100)
    for each in (pool, copy):
        np.testing.assert_array_equal(read(each, handles[40:]), stacks)
        assert each.held == len(stacks)
        np.testing.assert_array_equal(read(each, each.put(*more[:2])[1]), more[1])
    assert copy.nbytes == pool.nbytes


def test_a_damaged_file_is_refused() -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos)
    pool.put(*videos.batch(50)[:2])
    whole = pickle.loads(pickle.dumps(pool.described()))
    whole["arrays"]["contents"][100] ^= 1
    with pytest.raises(CorruptFileError, match="checksum"):
        FramePool.restored(whole, 400)
    with pytest.raises(CorruptFileError, match="format 99"):
        FramePool.restored({**whole, "format": 99}, 400)


class Lz4(codecs.PatchLz4Codec):
    """Frames as they are, full blocks compressed by LZ4: nothing is taken for a patch that is damaged."""

    name = "test-lz4"
    patches = False


def test_a_damaged_sealed_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs._REGISTRY, Lz4.name, Lz4)
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos, codec=Lz4.name)
    handles, _ = pool.put(*videos.batch(60)[:2])
    for block in pool._pool.blocks[1 : pool._pool.head[state.BLOCKS]].tolist():
        if block[state.KIND] == state.SEALED:
            pool._arrays["contents"][32 * block[state.SEALED_GRAIN] :][8 : block[state.SEALED_BYTES]] = 255
    with pytest.raises(CorruptFileError, match="cannot be read"):
        read(pool, handles)


def _put_elsewhere(pool: FramePool, stacks: Any, done: Any) -> None:
    done.put(pool.put(stacks)[0])


def test_a_child_process_stores_what_its_parent_reads() -> None:
    videos = Videos(*SHAPES["grey, channel first"], seed=0)
    pool = new_pool(videos)
    own = videos.batch(30)[0]
    own_handles, _ = pool.put(own)
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    stacks = videos.batch(40)[0]
    child = context.Process(target=_put_elsewhere, args=(pool, stacks, done))
    child.start()
    handles = done.get(timeout=100)
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(read(pool, handles), stacks)
    np.testing.assert_array_equal(read(pool, own_handles), own)
    assert pool.held == 70
