"""Arrays of batches are reused only after their last reference is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sb3_ext import CompressedReplayBuffer
from tests.sb3_ext.buffer_envs import add_all, collect_transitions, image_env

Pick = Callable[[Any], Any]


@pytest.fixture(scope="module")
def buffer() -> CompressedReplayBuffer:
    """Return a replay buffer that contains images of noise."""
    venv = image_env(still=False)
    made = CompressedReplayBuffer(200, venv.observation_space, venv.action_space, "cpu", n_envs=2)
    add_all((made,), collect_transitions(venv, 60))
    return made


@pytest.mark.sample
@pytest.mark.parametrize(
    "pick",
    [
        lambda batch: batch,
        lambda batch: batch.next_observations[3:5, 1],
        lambda batch: batch.observations.numpy()[::2, 0],
        lambda batch: memoryview(batch.observations.numpy()),
        lambda batch: batch.observations.detach().untyped_storage(),
        lambda batch: torch.utils.dlpack.to_dlpack(batch.observations),
    ],
    ids=["batch", "slice", "array slice", "memory", "storage", "dlpack"],
)
def test_batches_in_use_are_never_overwritten(buffer: CompressedReplayBuffer, pick: Pick) -> None:
    held = []
    for _ in range(7):
        batch = buffer.sample(16)
        expected = tuple(part.clone() for part in batch if part is not None)
        held.append((pick(batch), pick(type(batch)(*expected))))
        del batch, expected
    for _ in range(10):
        buffer.sample(16)
    for kept, expected in held:
        if type(kept).__name__ == "PyCapsule":
            kept, expected = torch.utils.dlpack.from_dlpack(kept), torch.utils.dlpack.from_dlpack(expected)
        for left, right in zip(kept, expected, strict=True) if isinstance(kept, tuple) else [(kept, expected)]:
            assert left is right is None or np.array_equal(np.asarray(left), np.asarray(right))


def test_to_torch_copies_arrays_of_caller(buffer: CompressedReplayBuffer) -> None:
    images = buffer.observations[np.arange(16), np.zeros(16, dtype=np.int64)]
    tensor, shared = buffer.to_torch(images), buffer.to_torch(images, copy=False)
    before = images.copy()
    images += 50
    np.testing.assert_array_equal(tensor, before)
    np.testing.assert_array_equal(shared, images)


def test_arrays_of_unused_batches_are_reused(buffer: CompressedReplayBuffer) -> None:
    places = set()
    for _ in range(20):
        batch = buffer.sample(16)
        places |= {batch.observations.data_ptr(), batch.next_observations.data_ptr()}
    assert len(places) <= 4


def test_recycled_arrays_stay_bounded_for_many_batch_sizes(buffer: CompressedReplayBuffer) -> None:
    for size in range(1, 40):
        buffer.sample(size)
    assert buffer.nbytes - buffer.stored_nbytes <= 4 * 40 * 4 * 36 * 36
