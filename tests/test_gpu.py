"""Training, sampling and steps on a GPU. Without one, these tests are skipped.

Run them with: CUDA_VISIBLE_DEVICES=0 python -m pytest tests/test_gpu.py
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from benchmarks.isaac_like import ACTION_SIZE, IsaacLike
from rl_ext_core.frames import StackLayout
from sb3_ext import (
    CompressedDictReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    GymVecEnv,
    tensor,
)
from tests.core.frames.transitions import make_transitions
from tests.sb3_ext.tensor_envs import Points
from torchrl_ext import FrameStorage, GymWrapper

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic products of matrices

IMAGE = spaces.Box(0, 255, (4, 40, 40), np.uint8)


@pytest.fixture
def no_waits() -> Iterator[Any]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def fill(buffers: list[Any], *, as_dict: bool = False) -> None:
    layout = StackLayout(IMAGE.shape, np.dtype(np.uint8), 4, 0)
    rng = np.random.default_rng(0)
    for before, after in make_transitions(layout, n_steps=150):
        action, reward = rng.integers(3, size=(2, 1)), rng.random(2)
        pair = [
            {"image": part, "speed": rng.random((2, 3), np.float32)} if as_dict else part for part in (before, after)
        ]
        for buffer in buffers:
            buffer.add(*pair, action, reward, np.zeros(2), [{}, {}])


def flat(samples: Any) -> list[torch.Tensor]:
    parts = [part for part in samples if part is not None]
    return [leaf for part in parts for leaf in (part.values() if isinstance(part, dict) else [part])]


@pytest.mark.parametrize(
    "kind", [CompressedReplayBuffer, CompressedDictReplayBuffer, CompressedPrioritizedReplayBuffer]
)
def test_samples_decoded_on_gpu_are_equal(kind: Any) -> None:
    as_dict = kind is CompressedDictReplayBuffer
    space = spaces.Dict({"image": IMAGE, "speed": spaces.Box(0, 1, (3,))}) if as_dict else IMAGE
    buffers = [
        kind(100, space, spaces.Discrete(3), device="cuda", n_envs=2, codec="patch", decode_on_gpu=on_gpu)
        for on_gpu in (False, True)
    ]
    fill(buffers, as_dict=as_dict)
    buffers += [pickle.loads(pickle.dumps(buffers[1])), copy.deepcopy(buffers[1])]
    for size in (1, 7, 64, 300):
        found = []
        for buffer in buffers:
            np.random.seed(size)
            found.append(flat(buffer.sample(size)))
        for other in found[1:]:
            for left, right in zip(found[0], other, strict=True):
                assert left.device == right.device
                assert left.dtype == right.dtype
                torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert buffers[1]._observations._gpu_decoder is not None


def test_frame_storage_decodes_on_gpu() -> None:
    layout = StackLayout(IMAGE.shape, np.dtype(np.uint8), 4, 0)
    storages = [FrameStorage(200, device="cuda", decode_on_gpu=on_gpu) for on_gpu in (False, True)]
    buffers = [TensorDictReplayBuffer(storage=storage, batch_size=64) for storage in storages]
    for before, after in make_transitions(layout, n_steps=150):
        data = TensorDict(
            {
                "pixels": torch.from_numpy(before.copy()),
                "action": torch.rand(2, 3),
                ("next", "pixels"): torch.from_numpy(after.copy()),
            },
            [2],
        )
        for buffer in buffers:
            buffer.extend(data)
    for _ in range(5):
        index = torch.randint(200, (64,))
        left, right = (storage.get(index) for storage in storages)
        assert left.device == right.device
        assert (left == right).all()
    assert storages[1]._gpu_decoder is not None


def test_steps_on_tensors_do_not_wait_for_gpu(no_waits: Any) -> None:
    """A step of GymVecEnv, TensorVecNormalize and TorchRL's GymWrapper leaves the CPU free to go on."""
    actions = torch.rand(64, ACTION_SIZE, device="cuda")
    vec_env = tensor.TensorVecNormalize(
        GymVecEnv(IsaacLike(64, final_obs=True, device="cuda"), clip_actions=1.0, tensors=True)
    )
    vec_env.reset()
    env: Any = GymWrapper(IsaacLike(64, final_obs=True, device="cuda"))
    data = env.reset().set("action", actions)
    for _ in range(3):
        vec_env.step(actions)
        _, data = env.step_and_maybe_reset(data.set("action", actions))
    torch.cuda.synchronize()
    no_waits("error")
    for _ in range(3):
        vec_env.step(actions)
        _, data = env.step_and_maybe_reset(data.set("action", actions))


@pytest.mark.parametrize("name", ["PPO", "A2C", "SAC", "TD3"])
def test_weights_on_gpu_are_those_of_stable_baselines3(name: str) -> None:
    found = []
    for module in (tensor, sb3):
        env: Any = GymVecEnv(Points(8, device="cuda"), tensors=module is tensor)
        env = (tensor.TensorVecNormalize if module is tensor else VecNormalize)(env)
        more = {"train_freq": 8, "learning_starts": 100} if name in ("SAC", "TD3") else {}
        model = getattr(module, name)("MlpPolicy", env, seed=0, device="cuda", **more)
        model.set_logger(Logger(None, []))
        found.append(list(model.learn(600).policy.state_dict().values()))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
