"""Tests of public classes without workers, for any operating system and without pytest.

``test_stand_ins.py`` runs this script on imitations of other systems, ``scripts/windows_under_wine.sh`` on Windows.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper as UpstreamWrapper

from rl_ext_core.cli import main as rl_ext
from rl_ext_core.errors import StorageError
from sb3_ext import CompressedReplayBuffer, GymVecEnv, resolve_device
from tests.platforms.buffers import expect_error, main, temporary_folder
from torchrl_ext import FrameStorage, GymWrapper


class Moving(gymnasium.Env[Any, Any]):
    """Environment whose observation is a dot that moves over a 36×36 image."""

    observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.count = int(self.np_random.integers(36)), 0
        return self._image(), {}

    def step(self, action: Any) -> Any:
        self.at, self.count = (self.at + 2 * int(action) - 1) % 36, self.count + 1
        return self._image(), float(self.at == 7), self.count == 9, False, {}

    def _image(self) -> Any:
        """Return an image with a dot at the current position."""
        image = np.zeros((1, 36, 36), np.uint8)
        image[0, self.count, self.at] = 255
        return image


def run_command(*arguments: str) -> str:
    """Run ``rl-ext`` in this process, and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = rl_ext(list(arguments))
    assert code in (0, 1), (arguments, code)  # 1 for a problem with this machine
    return out.getvalue()


def test_commands_print_results() -> None:
    assert json.loads(run_command("doctor", "--json"))
    assert "180 GB" in run_command("plan", "--shape", "100,100,9", "--size", "1000000")
    assert resolve_device("cpu") == torch.device("cpu")


def test_dqn_weights_match_sb3() -> None:
    options = {"buffer_size": 40, "learning_starts": 20, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}}
    found = []
    for kind in (CompressedReplayBuffer, ReplayBuffer):
        torch.manual_seed(0)
        env = DummyVecEnv([Moving] * 2)
        model = DQN("CnnPolicy", env, seed=0, device="cpu", replay_buffer_class=kind, **options)
        model.set_logger(Logger(None, []))  # SB3's default logger creates a folder in the temporary folder
        model.learn(64)
        found.append([parameter.detach().clone() for parameter in model.policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_replay_buffer_in_a_folder_can_be_reopened() -> None:
    space, env = (Moving.observation_space, Moving.action_space), Moving()
    with temporary_folder() as path:
        buffer = CompressedReplayBuffer(40, *space, device="cpu", storage_dir=path / "kept", resume=True)
        observation = env.reset(seed=0)[0]
        for _ in range(9):
            following, reward, done, _, info = env.step(1)
            action, rewards, dones = np.ones((1, 1), int), np.array([reward]), np.array([done])
            buffer.add(observation[None], following[None], action, rewards, dones, [info])
            observation = following
        expect_error(
            StorageError, "in use", lambda: CompressedReplayBuffer(40, *space, storage_dir=path / "kept", resume=True)
        )
        buffer.close()
        del buffer  # its mappings keep the files in use on Windows
        again = CompressedReplayBuffer(40, *space, device="cpu", storage_dir=path / "kept", resume=True)
        assert again.pos == 9
        assert again.dones[:9].sum() == 1
        assert again.sample(20).observations.shape == (20, 1, 36, 36)
        again.close()
        del again


def _make_data(n: int) -> TensorDict:
    """Make a TensorDict of ``n`` stacked images and rewards."""
    pixels = torch.zeros(n, 4, 40, 40, dtype=torch.uint8)
    for i in range(n):
        for j in range(4):
            pixels[i, j, (i + j) % 40, 3] = 200
    return TensorDict({"pixels": pixels, "reward": torch.arange(n)}, [n])


def _fill_buffer(storage: Any) -> TensorDictReplayBuffer:
    """Make a replay buffer with this storage, and add 60 entries."""
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
    buffer.extend(_make_data(30))
    buffer.extend(_make_data(30))
    return buffer


def test_frame_storage_in_a_folder_can_be_reopened() -> None:
    every = torch.arange(50)
    expected = _fill_buffer(LazyTensorStorage(50)).storage.get(every)
    with temporary_folder() as path:
        buffer = _fill_buffer(FrameStorage(50, storage_dir=path / "kept", resume=True))
        expect_error(StorageError, "in use", lambda: FrameStorage(50, storage_dir=path / "kept", resume=True))
        buffer.storage.close()
        del buffer
        opened = FrameStorage(50, storage_dir=path / "kept", resume=True)
        assert (opened.get(every) == expected).all()
        opened.close()
        del opened
        gc.collect()  # TorchRL's buffers are in reference cycles


def test_gym_wrapper_and_gym_vec_env_match_upstream() -> None:
    rollouts = []
    for kind in (GymWrapper, UpstreamWrapper):
        env = kind(gymnasium.make("CartPole-v1"))
        env.set_seed(0)
        torch.manual_seed(0)
        rollouts.append(env.rollout(20))
        env.close()
    ours, theirs = rollouts
    assert (ours["observation"] == theirs["observation"]).all()
    singles = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    for venv in (GymVecEnv(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")), singles):
        venv.seed(0)
        rollouts.append([venv.reset(), *(venv.step(np.array([0, 1]))[0] for _ in range(15))])
        venv.close()
    np.testing.assert_allclose(*rollouts[2:], rtol=1e-6)


if __name__ == "__main__":
    sys.exit(main(globals()))
