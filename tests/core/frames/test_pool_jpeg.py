"""A pool of JPEG images: each frame reads as simplejpeg makes it, from the moment it is there."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames import JpegCodec
from rl_ext_core.frames import arrays as state
from rl_ext_core.frames.layout import StackLayout
from rl_ext_core.frames.pool import FramePool
from rl_ext_core.frames.recovery import recover
from rl_ext_core.frames.region import RegionFile
from tests.core.frames.jpeg_oracle import as_jpeg
from tests.core.frames.test_jpeg import LAYOUTS
from tests.core.frames.test_pool import Videos

Array = np.ndarray[Any, Any]
RGB = LAYOUTS["rgb, channels first"]


class Pictures(Videos):
    """Smooth pictures that move."""

    def __init__(self, layout: StackLayout, *, seed: int = 0, n_envs: int = 3) -> None:
        super().__init__(layout.shape, layout.n_stack, layout.axis, seed=seed, n_envs=n_envs)

    def frame(self) -> Array:
        shape = self.base.shape
        if self.rng.random() < 0.05:  # of which JPEG would make more bytes than there are
            return self.rng.integers(0, 256, shape, dtype=np.uint8)
        lines = sum(
            int(self.rng.integers(1, 7)) * np.arange(size).reshape(-1, *[1] * (len(shape) - axis - 1))
            for axis, size in enumerate(shape)
        )
        return ((np.asarray(lines) + int(self.rng.integers(256))) % 256).astype(np.uint8)


def new_pool(layout: StackLayout, *, n_handles: int = 400, quality: int = 95, path: Path | None = None) -> FramePool:
    file = None if path is None else RegionFile(path)
    return FramePool(n_handles, layout, codec="jpeg", block_length=1, quality=quality, file=file)


def read(pool: Any, handles: Any, **options: Any) -> Array:
    out = np.full((len(handles), *pool.layout.shape), 77, dtype=np.uint8)
    pool.get(np.array(handles, dtype=np.int64), out, **options)
    return out


def live_blocks(pool: FramePool) -> int:
    return int((pool._pool.blocks[1 : pool._pool.head[state.BLOCKS], state.KIND] != state.FREE).sum())


@pytest.mark.parametrize("quality", [95, 40])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_stacks_that_are_replaced_at_random_come_out_as_jpeg_makes_them(kind: str, quality: int) -> None:
    layout = LAYOUTS[kind]
    pictures, pool = Pictures(layout), new_pool(layout, quality=quality)
    held: dict[int, tuple[int, int, Array, Array]] = {}
    changed = 0
    for turn in range(25):
        before, after, ended = pictures.batch(int(pictures.rng.integers(1, 9)))
        handles = pool.put(before, after, ended=ended)
        made = as_jpeg(before, layout, quality), as_jpeg(after, layout, quality)
        changed += int((made[0] != before).any())
        for i, row in enumerate(pictures.rng.integers(0, 30, len(before)).tolist()):
            if row in held:
                pool.release(np.array(held[row][:2]))
            held[row] = int(handles[0][i]), int(handles[1][i]), made[0][i], made[1][i]
        rows = list(held.values())
        out = np.empty((2, len(rows), *layout.shape), np.uint8)
        pool.get(
            np.array([row[0] for row in rows]),
            out[0],
            np.array([row[1] for row in rows]),
            out[1],
            num_threads=1 + turn % 2,
        )
        np.testing.assert_array_equal(out[0], [row[2] for row in rows])
        np.testing.assert_array_equal(out[1], [row[3] for row in rows])
    assert changed > 20
    for row in held.values():
        pool.release(np.array(row[:2]))
    assert pool.held == 0
    assert live_blocks(pool) <= layout.n_stack * pool._pool.head[state.STREAMS]


def test_nothing_is_ever_there_that_is_not_sealed() -> None:
    pictures, pool = Pictures(RGB), new_pool(RGB, n_handles=1000)
    for n in (1, 150, 7):
        pool.put(*pictures.batch(n)[:2])
        kinds = pool._pool.blocks[1 : pool._pool.head[state.BLOCKS], state.KIND]
        assert (kinds[kinds != state.FREE] & state.SEALED).all()
        assert not pool._pool.streams[:, state.OPEN_BYTES].any()


def test_a_batch_opens_each_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, pool = Pictures(RGB, n_envs=1), new_pool(RGB)
    handles, next_handles = pool.put(*pictures.batch(100)[:2])
    n_frames = int(pool._pool.head[state.FRAMES])
    unseal, opened = JpegCodec.unseal, []

    def counted(self: JpegCodec, sealed: memoryview, n_bytes: int) -> bytes:
        opened.append(1)
        return unseal(self, sealed, n_bytes)

    monkeypatch.setattr(JpegCodec, "unseal", counted)
    out = np.empty((2, 300, *RGB.shape), np.uint8)
    pool.get(np.tile(handles, 3), out[0], np.tile(next_handles, 3), out[1])
    assert 50 < len(opened) <= n_frames < 150


def test_as_many_stacks_fit_as_were_asked_for_however_little_they_share() -> None:
    layout = StackLayout((8, 20, 20), np.dtype(np.uint8), 8, 0)
    rng = np.random.default_rng(0)
    stacks = rng.integers(0, 256, (2000, *layout.shape), dtype=np.uint8)
    pool = new_pool(layout, n_handles=2000)
    handles = np.concatenate([pool.put(part)[0] for part in np.split(stacks, 10)])
    np.testing.assert_array_equal(read(pool, handles), as_jpeg(stacks, layout))


def test_a_batch_takes_no_more_memory_than_what_is_sealed_at_a_time() -> None:
    pictures, pool = Pictures(LAYOUTS["one rgb frame"], n_envs=1), new_pool(LAYOUTS["one rgb frame"], n_handles=4000)
    stacks = np.stack([pictures.frame() for _ in range(1200)])
    pool.put(stacks)
    assert 32 * int(pool._pool.head[state.GRAINS]) < 0.5 * stacks.nbytes


def test_where_sealing_fails_nothing_is_stored_and_later_frames_are_sealed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures, pool = Pictures(RGB), new_pool(RGB)
    first = pictures.batch(20)
    handles, first_nexts = pool.put(*first[:2])
    held, seal, left = pool.held, JpegCodec.seal, [75]

    def short_of_memory(self: JpegCodec, block: memoryview) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return seal(self, block)

    second = pictures.batch(100)
    waiting = []
    with monkeypatch.context() as patch:
        patch.setattr(JpegCodec, "seal", short_of_memory)
        for _ in range(3):
            with pytest.raises(MemoryError):
                pool.put(*second[:2])
            waiting.append(int(pool._pool.head[state.UNSEALED]))
    assert waiting == waiting[:1] * 3
    assert pool.held == held
    np.testing.assert_array_equal(read(pool, handles), as_jpeg(first[0], RGB))
    again, again_nexts = pool.put(*second[:2])
    np.testing.assert_array_equal(read(pool, again), as_jpeg(second[0], RGB))
    pool.release(again)
    np.testing.assert_array_equal(read(pool, handles), as_jpeg(first[0], RGB))
    for part in (handles, first_nexts, again_nexts):
        pool.release(part)
    assert live_blocks(pool) <= RGB.n_stack * pool._pool.head[state.STREAMS]


def test_what_was_saved_goes_on_with_its_quality() -> None:
    pictures, pool = Pictures(RGB), new_pool(RGB, quality=30)
    before, after, _ = pictures.batch(30)
    handles, _ = pool.put(before, after)
    description = pool.described()
    assert description["quality"] == 30
    loaded = FramePool.restored(description, 400)
    np.testing.assert_array_equal(read(loaded, handles), as_jpeg(before, RGB, 30))
    more = pictures.batch(5)[0]
    np.testing.assert_array_equal(read(loaded, loaded.put(more)[0]), as_jpeg(more, RGB, 30))
    with pytest.raises(CorruptFileError, match="checksum"):
        FramePool.restored({**description, "quality": 31}, 400)


def test_a_pool_in_a_file_is_found_again_and_made_whole(tmp_path: Path) -> None:
    pictures, pool = Pictures(RGB), new_pool(RGB, quality=30, path=tmp_path / "frames")
    before, after, _ = pictures.batch(60)
    handles, _ = pool.put(before, after)
    found = new_pool(RGB, path=tmp_path / "frames")
    assert found.quality == 30
    assert recover(found, handles[20:40]).all()
    expected = as_jpeg(before, RGB, 30)
    np.testing.assert_array_equal(read(found, handles[20:40]), expected[20:40])
    more = pictures.batch(40)[0]
    np.testing.assert_array_equal(read(found, found.put(more)[0]), as_jpeg(more, RGB, 30))
    np.testing.assert_array_equal(read(found, handles[20:40]), expected[20:40])


def _put_there(pool: FramePool, said: Any) -> None:
    said.put(pool.put(Pictures(RGB, seed=5).batch(20)[0])[0])


def test_processes_share_it() -> None:
    pool = new_pool(RGB, quality=30)
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    child = context.Process(target=_put_there, args=(pool, said))
    child.start()
    handles = said.get(timeout=100)
    child.join(60)
    np.testing.assert_array_equal(read(pool, handles), as_jpeg(Pictures(RGB, seed=5).batch(20)[0], RGB, 30))


def test_damaged_images_are_noticed() -> None:
    pictures, pool = Pictures(RGB, n_envs=1), new_pool(RGB)
    handles, _ = pool.put(pictures.batch(30)[0])
    contents = pool._arrays["contents"]
    saved = contents[: 32 * int(pool._pool.head[state.GRAINS])].copy()
    for damage in (slice(8, 200), slice(0, 8)):
        contents[: len(saved)] = saved
        for grain in pool._pool.blocks[1:20, state.SEALED_GRAIN].tolist():
            contents[32 * grain :][damage] = 1
        with pytest.raises(CorruptFileError, match="cannot be read: their blocks are damaged"):
            read(pool, handles)


def test_a_pool_that_becomes_jpeg_or_something_else_forgets_what_it_was() -> None:
    pictures = Pictures(RGB)
    pool = FramePool(400, RGB, codec="patch+lz4")
    before = pictures.batch(40)[0]
    pool.put(before)
    pool.become(RGB, codec="jpeg", block_length=1, quality=60)
    np.testing.assert_array_equal(read(pool, pool.put(before)[0]), as_jpeg(before, RGB, 60))
    pool.clear()
    assert (pool.codec.name, pool.quality) == ("jpeg", 60)
    pool.become(RGB, codec="patch+lz4", block_length=4)
    np.testing.assert_array_equal(read(pool, pool.put(before)[0]), before)


def test_stacks_that_no_frames_of_jpeg_could_make_are_refused() -> None:
    for layout, error, text in (
        (StackLayout((2, 40, 40), np.dtype(np.uint8), 1, 0), InvalidArgumentError, "1 or 3 channels"),
        (StackLayout((3, 40, 40), np.dtype(np.float32), 1, 0), InvalidTypeError, "dtype uint8, got float32"),
    ):
        with pytest.raises(error, match=text):
            new_pool(layout)
    with pytest.raises(InvalidArgumentError, match="block_length=4 is not for codec='jpeg'"):
        FramePool(400, RGB, codec="jpeg", block_length=4)
