from __future__ import annotations

import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames import arrays as state
from tests.torchrl_ext.frame_data import Videos
from tests.torchrl_ext.frame_workers import collect_into, contents, empty_and_collect_into, make_film
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("next", "done"), ("inner", "vector")]
FILM_KEYS = ["observation", ("next", "observation"), ("next", "done")]
BATCHES = [7, 40, 3, 25, 60]


def _serial(seeds: list[int], batches: list[int]) -> list[Any]:
    """What the workers collect, one after the other."""
    collected = []
    for seed in seeds:
        videos = Videos(2, seed=seed)
        collected += [videos.collect(steps).reshape(-1) for steps in batches]
    return collected


def _run(target: Any, buffer: Any, seeds: list[int], batches: list[int]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=target, args=(buffer, seed, batches)) for seed in seeds]
    for worker in workers:
        worker.start()
    return workers


def _join(workers: list[Any]) -> None:
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(("first", "codec"), [pytest.param(1, "auto", marks=pytest.mark.slow), (100, "patch+lz4")])
def test_what_two_processes_collect_is_what_they_collect_one_after_the_other(first: int, codec: str) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(2000, codec=codec), shared=True, batch_size=64)
    start = Videos(1, seed=9).collect(first).reshape(-1)
    buffer.extend(start.clone())
    workers = _run(collect_into, buffer, [1, 2], BATCHES)
    expected = sum((contents(rows, KEYS) for rows in [start, *_serial([1, 2], BATCHES)]), Counter())
    while any(worker.is_alive() for worker in workers):
        seen = contents(buffer.sample(), KEYS)
        assert not set(seen) - set(expected), "the learner sees whole transitions only"
    _join(workers)
    assert len(buffer) == first + 2 * 2 * sum(BATCHES)
    assert contents(buffer[:], KEYS) == expected
    with pytest.raises(InvalidArgumentError, match="load it first"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())


@pytest.mark.slow
def test_a_ring_that_processes_overwrite_holds_whole_transitions_and_does_not_grow() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(150), shared=True, batch_size=64)
    buffer.extend(Videos(1, seed=9).collect(150).reshape(-1))
    before = buffer.storage._columns[0].pool.nbytes
    workers = _run(collect_into, buffer, [1, 2], [40] * 12)
    expected = {9: Videos(1, seed=9).collect(150).reshape(-1)}
    known = set().union(*(contents(rows, KEYS) for rows in [expected[9], *_serial([1, 2], [40] * 12)]))
    while any(worker.is_alive() for worker in workers):
        assert not set(contents(buffer.sample(), KEYS)) - known
    _join(workers)
    assert not set(contents(buffer[:], KEYS)) - known
    assert buffer.storage._columns[0].pool.held == 300
    assert buffer.storage._columns[0].pool.nbytes < 4 * before  # of three scenes, not of one


@pytest.mark.slow
def test_an_emptied_buffer_learns_how_stacks_are_made_from_the_first_process_that_fills_it() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(500), shared=True, batch_size=64)
    fake = Videos(1).collect(1).reshape(-1)
    buffer.extend(fake.zero_())  # as TorchRL's collectors do
    pool = buffer.storage._columns[0].pool
    assert pool.layout.n_stack == 1
    _join(_run(empty_and_collect_into, buffer, [1], [100]))
    assert contents(buffer[:], KEYS) == contents(_serial([1], [100])[0], KEYS)
    assert pool.layout.n_stack == 4
    assert pool._pool.head[state.FRAMES] < 300


def _collected(frames: int) -> Any:
    """What two processes collect without a buffer, one batch after the other."""
    collector = MultiSyncCollector([make_film] * 2, None, frames_per_batch=100, total_frames=frames)
    collector.set_seed(3)
    rows = torch.cat([batch.reshape(-1).clone() for batch in collector])
    collector.shutdown()
    return rows


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("kind", [MultiSyncCollector, pytest.param(MultiAsyncCollector, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_collectors_of_torchrl_fill_a_shared_storage(kind: Any) -> None:
    buffer = ReplayBuffer(storage=FrameStorage(1000), shared=True, batch_size=32)
    collector = kind(
        [make_film] * 2,
        None,
        replay_buffer=buffer,
        frames_per_batch=100 if kind is MultiSyncCollector else 50,
        total_frames=400,
    )
    collector.set_seed(3)
    try:
        for _ in collector:
            if len(buffer) > 32:
                buffer.sample()
    finally:
        collector.shutdown()
    stored = contents(buffer[:], FILM_KEYS)
    if kind is MultiSyncCollector:
        assert stored == contents(_collected(400), FILM_KEYS)
    else:  # one process may get further than the other
        assert sum(stored.values()) >= 400
        assert not set(stored) - set(contents(_collected(1600), FILM_KEYS))
    assert buffer.storage._columns[0].pool.layout.n_stack == 4
