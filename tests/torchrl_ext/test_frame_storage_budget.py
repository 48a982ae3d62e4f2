from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.data import (
    ImmutableDatasetWriter,
    PrioritizedSampler,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from rl_ext_core.errors import InvalidArgumentError, OutOfMemoryError
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage

LIMIT = 120_000


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("batch", [10, 1, 50])
def test_the_newest_that_fit_are_held_in_order(batch: int) -> None:
    storage = FrameStorage(100_000, max_bytes=LIMIT)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    data = Videos(1, end=0.01).collect(1200).reshape(-1)
    for rows in data.split(batch):
        buffer.extend(rows.clone())
        assert storage.used_nbytes <= LIMIT
    assert storage._columns[0].pool.nbytes < 1.1 * LIMIT
    assert 400 < len(buffer) == storage.max_size < 1200
    first = int(buffer.writer._cursor) % len(buffer)
    held = torch.cat([buffer[first:].clone(), buffer[:first].clone()])
    assert held["index"].tolist() == [*range(first, len(buffer)), *range(first)]
    assert_same(held.exclude("index"), data[-len(buffer) :].to("cpu").exclude("index"))


def test_slices_hold_consecutive_steps_when_elements_were_dropped() -> None:
    buffer = TensorDictReplayBuffer(
        storage=FrameStorage(100_000, max_bytes=LIMIT),
        sampler=SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
        batch_size=50,
    )
    for rows in Videos(1, end=0.01).collect(1000).reshape(-1).split(30):
        buffer.extend(rows.clone())
        if len(buffer) > 60:
            steps = buffer.sample()["step_count"].reshape(10, 5)
            assert (steps.diff(dim=1) == 1).all()


def test_a_limit_that_nothing_fits_into_is_refused() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(1000, max_bytes=1000))
    with pytest.raises(OutOfMemoryError, match="max_bytes=1000 is too little"):
        buffer.extend(Videos(1).collect(50).reshape(-1))


@pytest.mark.parametrize(
    ("storage", "writer", "text"),
    [
        ({"max_bytes": 0}, None, "max_bytes=0 must be at least 1"),
        ({"max_bytes": 9, "ndim": 2}, None, "is for storages of one dimension"),
        ({"max_bytes": 9}, TensorDictMaxValueWriter, "overwrite the oldest, got TensorDictMaxValueWriter"),
        ({"max_bytes": 9}, ImmutableDatasetWriter, "overwrite the oldest, got ImmutableDatasetWriter"),
    ],
)
def test_what_a_limit_does_not_go_with_is_refused(storage: Any, writer: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        TensorDictReplayBuffer(storage=FrameStorage(100, **storage), writer=writer)


def test_priorities_do_not_go_with_a_limit_that_moves_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tree:
        """In place of TorchRL's compiled trees."""

        def __init__(self, *_: Any) -> None: ...

    for name in ("SumSegmentTreeFp32", "MinSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp64"):
        monkeypatch.setattr(f"torchrl.data.replay_buffers.samplers.prioritized.{name}", Tree)
    with pytest.raises(InvalidArgumentError, match=r"would find the priorities of others; leave max_bytes out"):
        TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=FrameStorage(100, max_bytes=LIMIT))
    sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
    buffer = TensorDictReplayBuffer(storage=FrameStorage(100, max_bytes=LIMIT))
    buffer._sampler = sampler
    with pytest.raises(InvalidArgumentError, match="PrioritizedSampler would find"):
        buffer.extend(Videos(1).collect(5).reshape(-1))
    TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=FrameStorage(100))
