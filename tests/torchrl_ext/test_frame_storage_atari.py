from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import CatFrames, Compose, SerialEnv, ToTensorImage, TransformedEnv

from tests.torchrl_ext.frame_data import assert_same
from torchrl_ext import FrameStorage, GymWrapper

pytest.importorskip("ale_py")


def _stacked() -> Any:
    """An Atari game as DQN sees it: four grey frames of 84×84."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    game = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    return GymWrapper(FrameStackObservation(AtariPreprocessing(game), 4))


def _as_floats() -> Any:
    """The same, scaled and stacked by TorchRL: floats between 0 and 1."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    game = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    env = GymWrapper(AtariPreprocessing(game, grayscale_newaxis=True))
    scaled = ToTensorImage(in_keys=["observation"], out_keys=["pixels"])
    return TransformedEnv(env, Compose(scaled, CatFrames(N=4, dim=-3, in_keys=["pixels"])))


@pytest.mark.sample
@pytest.mark.parametrize(
    ("make", "pixels", "ndim"),
    [
        (_stacked, None, 1),
        (_stacked, None, 2),
        (_as_floats, ["observation", "pixels", ("next", "observation"), ("next", "pixels")], 1),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_frames_of_a_collector_are_the_same_and_shared(make: Any, pixels: Any, ndim: int) -> None:
    n_frames = 600
    storages = FrameStorage(n_frames, pixels=pixels, ndim=ndim), LazyTensorStorage(n_frames, ndim=ndim)
    buffers = [
        TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False),
            batch_size=32,
        )
        for storage in storages
    ]
    collector = Collector(SerialEnv(2, make), None, frames_per_batch=100, total_frames=800)
    collector.set_seed(0)
    raw = 0
    for batch in collector:
        for buffer in buffers:
            buffer.extend((batch if ndim == 2 else batch.reshape(-1)).clone())
        drawn = []
        for buffer in buffers:
            torch.manual_seed(1)
            drawn.append(buffer.sample())
        assert_same(*drawn)
    collector.shutdown()
    assert_same(buffers[0][:], buffers[1][:])
    for column in storages[0]._columns:
        raw = sum(storages[1]._storage.get(key).nbytes for key in column.keys)
        assert column.pool.layout.n_stack == (1 if "observation" in column.keys and make is _as_floats else 4)
        assert column.pool.nbytes < raw / 20
