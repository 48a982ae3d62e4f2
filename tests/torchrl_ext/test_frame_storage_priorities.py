from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler, PrioritizedSliceSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized

from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import Twins, Videos, through_files, through_pickle, through_state
from torchrl_ext import FrameStorage

pytestmark = [
    pytest.mark.skipif(
        prioritized.SumSegmentTreeFp32 is None and not os.environ.get("CI"),
        reason="TorchRL's C++ extension does not load with this torch; scripts/build_torchrl_extension.sh builds it",
    ),
    # Later versions of SliceSampler warn if strict_length=False returns fewer transitions than requested.
    pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch"),
]

SIZE = 120
SLICES = {"slice_len": 4, "traj_key": ("collector", "traj_ids"), "strict_length": False}
SAMPLERS = {
    "plain": partial(PrioritizedSampler, SIZE, alpha=0.7, beta=0.9),
    "max within buffer": partial(PrioritizedSampler, SIZE, alpha=0.6, beta=0.4, max_priority_within_buffer=True),
    "slices": partial(PrioritizedSliceSampler, SIZE, alpha=0.7, beta=0.9, **SLICES),
}


def make_td_errors(indices: Any) -> torch.Tensor:
    n = len(indices)
    return torch.rand(n, generator=torch.Generator().manual_seed(n + int(torch.as_tensor(indices).sum()))) * 9


def read_priorities(buffer: Any) -> Any:
    sampler = buffer.sampler
    leaves = [[tree[place] for place in range(SIZE)] for tree in (sampler._sum_tree, sampler._min_tree)]
    return leaves, sampler._max_priority


def sample_and_reprioritize(buffer: Any) -> TensorDict:
    """Sample a batch and give it new priorities, as a training loop does."""
    batch = buffer.sample()
    index = batch["index"]
    if isinstance(buffer, TensorDictReplayBuffer):
        batch["td_error"] = make_td_errors(index)
        buffer.update_tensordict_priority(batch)
    else:
        buffer.update_priority(index, make_td_errors(index))
    return batch


def check_samples_and_priorities(twins: Twins, steps: int = 3) -> None:
    for _ in range(steps):
        ours, theirs = twins.call_both(sample_and_reprioritize)
        assert theirs.get("priority_weight", None) is not None
        assert_same(ours, theirs)
    assert read_priorities(twins.ours) == read_priorities(twins.theirs)
    assert_same(twins.ours[:], twins.theirs[:])


def make_twins(sampler: Any = SAMPLERS["plain"], **options: Any) -> Twins:
    return Twins(SIZE, sampler=sampler, batch_size=lambda: 16, priority_key=lambda: "td_error", **options)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_prioritized_samplers_return_the_batches_of_lazy_tensor_storage(sampler: str) -> None:
    twins, videos = make_twins(SAMPLERS[sampler]), Videos(2)
    for n_steps in (1, 20, 7, 40, 33):  # wraps around the end of the storage
        twins.extend(videos.collect(n_steps).reshape(-1))
        check_samples_and_priorities(twins)
    for _ in range(5):
        row = videos.collect(1).reshape(-1)[0]
        twins.call_both(lambda buffer, row=row: buffer.add(row.clone()))
    check_samples_and_priorities(twins)
    twins.call_both(lambda buffer: buffer.empty())
    twins.extend(videos.collect(30).reshape(-1))
    check_samples_and_priorities(twins)


@pytest.mark.parametrize("through", [through_files, through_state, through_pickle])
@pytest.mark.parametrize(("sampler", "n_steps"), [("plain", 25), ("max within buffer", 90), ("slices", 90)])
def test_saved_buffers_restore_their_priorities(sampler: str, through: Any, n_steps: int, tmp_path: Path) -> None:
    twins, fresh, videos = make_twins(SAMPLERS[sampler]), make_twins(SAMPLERS[sampler]), Videos(2)
    twins.extend(videos.collect(n_steps).reshape(-1))
    check_samples_and_priorities(twins)
    before = read_priorities(twins.ours)
    twins.ours = through(twins.ours, fresh.ours, tmp_path / "ours")
    assert read_priorities(twins.ours)[0] == before[0]
    twins.theirs = through(twins.theirs, fresh.theirs, tmp_path / "theirs")
    check_samples_and_priorities(twins)
    twins.extend(videos.collect(20).reshape(-1))
    check_samples_and_priorities(twins)


def test_reopened_folder_has_equal_priorities_until_the_sampler_is_loaded(tmp_path: Path) -> None:
    def open_buffer() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=FrameStorage(SIZE, storage_dir=tmp_path / "frames", resume=True),
            sampler=SAMPLERS["plain"](),
            batch_size=64,
            priority_key="td_error",
        )

    buffer = open_buffer()
    buffer.extend(Videos(2).collect(40).reshape(-1))
    sample_and_reprioritize(buffer)
    buffer.sampler.dumps(tmp_path / "sampler")
    before = read_priorities(buffer)[0]
    buffer.storage.close()
    buffer = open_buffer()
    batch = buffer.sample()
    assert (batch["priority_weight"] == 1).all()
    buffer.sampler.loads(tmp_path / "sampler")
    assert read_priorities(buffer)[0] == before
    np.random.seed(0)
    assert (buffer.sample()["priority_weight"] != 1).any()
