from __future__ import annotations

import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.frame_data import Videos, collect_into, count_elements, make_film
from torchrl_ext import FrameStorage

KEYS = ["pixels", ("next", "pixels"), "action", ("next", "reward"), ("next", "done"), ("inner", "vector")]
FILM_KEYS = ["observation", ("next", "observation"), ("next", "done")]
BATCHES = [7, 40, 3, 25, 60]


def _collect_serially(seeds: list[int], batches: list[int]) -> list[Any]:
    """Collect the batches of all workers in this process, one worker after the other."""
    collected = []
    for seed in seeds:
        videos = Videos(2, seed=seed)
        collected += [videos.collect(steps).reshape(-1) for steps in batches]
    return collected


def _start_workers(target: Any, buffer: Any, seeds: list[int], batches: list[int]) -> list[Any]:
    """Start one process per seed that runs ``target`` on the buffer."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=target, args=(buffer, seed, batches)) for seed in seeds]
    for worker in workers:
        worker.start()
    return workers


def _join_workers(workers: list[Any]) -> None:
    """Wait for processes, and assert that they ended without an error."""
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("first", [1, 100])
def test_shared_storage_contains_all_elements_of_two_processes(first: int) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(2000), shared=True, batch_size=64)
    start = Videos(1, seed=9).collect(first).reshape(-1)
    buffer.extend(start.clone())
    workers = _start_workers(collect_into, buffer, [1, 2], BATCHES)
    expected = sum((count_elements(rows, KEYS) for rows in [start, *_collect_serially([1, 2], BATCHES)]), Counter())
    while any(worker.is_alive() for worker in workers):
        seen = count_elements(buffer.sample(), KEYS)
        assert not set(seen) - set(expected), "the learner sees whole transitions only"
    _join_workers(workers)
    assert len(buffer) == first + 2 * 2 * sum(BATCHES)
    assert count_elements(buffer[:], KEYS) == expected
    with pytest.raises(InvalidArgumentError, match="load it first"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())


def _collect_without_buffer(frames: int) -> Any:
    """Collect with two processes and without a buffer."""
    collector = MultiSyncCollector([make_film] * 2, None, frames_per_batch=100, total_frames=frames)
    collector.set_seed(3)
    rows = torch.cat([batch.reshape(-1).clone() for batch in collector])
    collector.shutdown()
    return rows


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("kind", [MultiSyncCollector, pytest.param(MultiAsyncCollector, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_multiprocess_collectors_fill_a_shared_storage(kind: Any) -> None:
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
    stored = count_elements(buffer[:], FILM_KEYS)
    if kind is MultiSyncCollector:
        assert stored == count_elements(_collect_without_buffer(400), FILM_KEYS)
    else:  # one process may be faster than the other
        assert sum(stored.values()) >= 400
        assert not set(stored) - set(count_elements(_collect_without_buffer(1600), FILM_KEYS))
    assert buffer.storage._columns[0].table.part.layout.n_stack == 4
