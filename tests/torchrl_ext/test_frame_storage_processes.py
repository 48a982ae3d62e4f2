from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, sharedctypes
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.collectors import MultiSyncCollector
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.frames.log_state import SEQUENCE
from tests.torchrl_ext.frame_data import Videos, collect_into, count_elements, make_film
from tests.torchrl_ext.frame_kills import KEYS, add_and_be_killed, add_until_killed, all_hashes, batch_slice, make_batch
from torchrl_ext import FrameStorage
from torchrl_ext.frame_storage.buffers import NoLock


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Return a multiprocessing context whose processes have imported everything already."""
    forkserver._forkserver._stop()
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.torchrl_ext.frame_kills"])
    yield found
    forkserver._forkserver._stop()
    found.set_forkserver_preload(["__main__"])


def _count_valid_elements(buffer: Any) -> Any:
    """Assert that all elements are complete; count how often each of them is stored."""
    rows = buffer[:]
    held = count_elements(rows, KEYS)
    assert not set(held) - set(all_hashes())
    assert count_elements(buffer[np.arange(len(rows))], KEYS) == held
    with buffer.storage.lock:
        table = buffer.storage._columns[0].table
        assert table.n_stored == len(rows)
        numbers = [segment.number for segment in table.log._segments.values()]
        assert max(numbers) <= table.log.state[SEQUENCE], "a later segment would get the same number"
    return held


def _make_shared_buffer(size: int, batch: int, **options: Any) -> Any:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(size, **options), shared=True, batch_size=16)
    buffer.extend(make_batch(0, batch))
    return buffer


def _count_batches(numbers: Any, batch: int) -> Any:
    return Counter(held for number in numbers for held in all_hashes()[batch_slice(number, batch)])


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize(("batch", "size"), [(1, 100_000), (30, 200)])
def test_killed_processes_neither_block_others_nor_leave_partial_elements(context: Any, batch: int, size: int) -> None:
    """Let two processes add elements; kill one of them repeatedly, and start another one."""
    buffer = _make_shared_buffer(size, batch)
    random = np.random.default_rng(batch + size)
    n_complete: list[Any] = []
    workers: list[Any] = []

    def start_worker() -> Any:
        n_complete.append(sharedctypes.RawValue("q", 0))
        workers.append(context.Process(target=add_until_killed, args=(buffer, n_complete[-1], batch)))
        workers[-1].start()
        return workers[-1], n_complete[-1]

    at_work = [start_worker(), start_worker()]
    try:
        for _ in range(6):
            victim, its_number = at_work.pop(int(random.integers(2)))
            while its_number.value < 3:
                time.sleep(0.001)
                assert victim.is_alive()
            time.sleep(float(random.uniform(0, 0.02)))
            victim.kill()
            victim.join()
            at_work.append(start_worker())
            with buffer.storage.lock:
                complete = [number.value for number in n_complete]
                held, length = _count_valid_elements(buffer), len(buffer)
            if size >= 100_000:
                every = [0, *(i for n in complete for i in range(n))]
                assert held >= _count_batches(every, batch), "nothing complete is lost"
                assert length % batch == 0
                assert length <= (1 + sum(complete) + len(n_complete)) * batch
            assert not set(count_elements(buffer.sample(), KEYS)) - set(all_hashes())
        number = sum(worker.is_alive() for worker in workers)
        assert number == 2
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    if size < 100_000:
        assert len(buffer) == size


ALL_KEYS = [*KEYS, ("next", "done")]
FILM_KEYS = ["observation", ("next", "observation"), ("next", "done")]
BATCHES = [7, 40, 3, 25, 60]
STEPS = 1440  # at most as many steps as adding a batch takes


def check_kill(context: Any, at: int, caplog: pytest.LogCaptureFixture, *, full: bool) -> bool:
    """Kill a process at a step, and check the storage; return whether a log names it."""
    buffer = _make_shared_buffer(90 if full else 300, 30)
    buffer.extend(make_batch(1, 30))
    buffer.extend(make_batch(2, 30))
    worker = context.Process(target=add_and_be_killed, args=(buffer, 3, 30, at))
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    caplog.clear()
    held = _count_valid_elements(buffer)
    made_whole = f"process {worker.pid} " in caplog.text
    lost = "ended while it wrote 30 of the elements" in caplog.text
    kept = [1, 2] if full else [0, 1, 2]
    complete = held >= _count_batches([*kept, 3], 30)
    assert held >= _count_batches(kept, 30)
    assert len(buffer) == (90 if full else 90 + 30 * complete)
    assert not (complete and lost)
    buffer.extend(make_batch(4, 30))
    assert _count_valid_elements(buffer) >= _count_batches([2, 3, 4] if complete else [*kept, 4], 30)
    assert len(buffer) == (90 if full else 120 + 30 * complete)
    buffer.storage.close()
    return made_whole


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("full", [True, False])
def test_kill_at_any_line_leaves_valid_elements(context: Any, full: bool, caplog: pytest.LogCaptureFixture) -> None:
    made_whole = [check_kill(context, at, caplog, full=full) for at in range(5, STEPS, STEPS // 12)]
    assert sum(made_whole) > 6


@pytest.mark.parametrize("late", [False, True])
def test_shared_buffers_have_no_semaphores(late: bool) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(100), shared=not late, batch_size=16)
    if late:
        assert buffer.share() is buffer  # as TorchRL's collectors do
    assert buffer._write_lock is buffer.storage.lock
    owners = (buffer, buffer.storage, buffer.writer)
    shared = [value for owner in owners for value in vars(owner).values() if hasattr(value, "get_lock")]
    assert len(shared) == 5
    assert all(isinstance(value.get_lock(), NoLock) for value in shared)
    assert not any(isinstance(value, SemLock) for owner in owners for value in vars(owner).values())


def test_folder_cannot_be_shared(context: Any, tmp_path: Path) -> None:
    buffer = _make_shared_buffer(300, 30, storage_dir=tmp_path)
    worker = context.Process(target=add_until_killed, args=(buffer, sharedctypes.RawValue("q", 0), 30))
    with pytest.raises(NotCopyableError, match="Leave storage_dir out"):
        worker.start()
    buffer.storage.close()


def _extend_with_new_key(buffer: Any) -> None:
    """Assert that an element with a new key is refused in a process that shares the buffer."""
    with pytest.raises(InvalidArgumentError, match=r"'late' was not among the first elements.*before processes share"):
        buffer.extend(make_batch(1, 4).set("late", torch.ones(4)))
    buffer.extend(make_batch(1, 4))


@pytest.mark.slow
def test_keys_that_other_processes_would_not_see_are_refused(context: Any) -> None:
    buffer = _make_shared_buffer(100, 4)
    worker = context.Process(target=_extend_with_new_key, args=(buffer,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    assert len(buffer) == 8
    texts = TensorDictReplayBuffer(storage=FrameStorage(100), shared=True)
    texts.extend(make_batch(0, 4).set("text", ["a"] * 4))
    with pytest.raises(NotCopyableError, match=r"contain 'text', which is not a tensor.*data.exclude\('text'\)"):
        context.Process(target=len, args=(texts,)).start()


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("first", [1, 100])
def test_shared_storage_contains_all_elements_of_two_processes(context: Any, first: int) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(2000), shared=True, batch_size=64)
    start = Videos(1, seed=9).collect(first).reshape(-1)
    buffer.extend(start.clone())
    workers = [context.Process(target=collect_into, args=(buffer, seed, BATCHES)) for seed in (1, 2)]
    rows = list(start)
    for seed, worker in enumerate(workers, 1):
        worker.start()
        collect_into(rows, seed, BATCHES)
    expected = count_elements(torch.stack(rows), ALL_KEYS)
    while any(worker.is_alive() for worker in workers):
        seen = count_elements(buffer.sample(), ALL_KEYS)
        assert not set(seen) - set(expected), "the learner sees whole transitions only"
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert len(buffer) == first + 2 * 2 * sum(BATCHES)
    assert count_elements(buffer[:], ALL_KEYS) == expected
    with pytest.raises(InvalidArgumentError, match="load it first"):
        buffer.storage.load_state_dict(buffer.storage.state_dict())


@pytest.mark.sample(quick=0)
@pytest.mark.filterwarnings("ignore")
def test_multiprocess_collectors_fill_a_shared_storage() -> None:
    buffer = ReplayBuffer(storage=FrameStorage(1000), shared=True, batch_size=32)
    rows: list[Any] = []
    for options in ({"replay_buffer": buffer}, {}):
        collector = MultiSyncCollector([make_film] * 2, None, frames_per_batch=100, total_frames=400, **options)
        collector.set_seed(3)
        try:
            for batch in collector:
                if not options:
                    rows.append(batch.reshape(-1).clone())
                elif len(buffer) > 32:
                    buffer.sample()
        finally:
            collector.shutdown()
    assert count_elements(buffer[:], FILM_KEYS) == count_elements(torch.cat(rows), FILM_KEYS)
    assert buffer.storage._columns[0].table.part.layout.n_stack == 4
