"""Small environments, and SB3's own buffer beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from sb3_ext import CompressedReplayBuffer


class Sprite(gym.Env[np.ndarray, int]):
    """A square on a background, moved by the action. Ends by itself or is cut short, after a few steps each.

    :param channels: 1 for grey, 3 for RGB.
    :param size: height and width.
    :param still: whether frames hardly change, or are noise.
    """

    def __init__(self, channels: int = 1, size: int = 36, *, still: bool = True) -> None:
        self.observation_space = spaces.Box(0, 255, (size, size, channels), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._still = still
        self._background = np.random.default_rng(1).integers(100, size=(size, size, channels), dtype=np.uint8)

    def _seen(self) -> np.ndarray:
        if not self._still:
            return self.np_random.integers(256, size=self._background.shape, dtype=np.uint8)
        frame = self._background.copy()
        at = 3 + self._place % (len(frame) - 8)
        frame[at : at + 5, 10:15] = 200 + self._steps % 50
        return frame

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(20)), 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._place += int(action) - 1
        self._steps += 1
        terminated = bool(self.np_random.random() < 0.08)
        truncated = not terminated and self._steps >= 11
        return self._seen(), float(action) - 0.5, terminated, truncated, {}


def image_env(
    channels: int = 1, n_envs: int = 2, n_stack: int = 4, *, first: bool = True, still: bool = True, size: int = 36
) -> VecEnv:
    """What SB3 makes of an image environment: stacked, and transposed to channel-first unless told otherwise."""
    venv: VecEnv = DummyVecEnv([lambda: Sprite(channels, size, still=still) for _ in range(n_envs)])
    venv.seed(0)
    if n_stack > 1:
        venv = VecFrameStack(venv, n_stack)
    return VecTransposeImage(venv) if first else venv


Transition = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]


def collected(venv: VecEnv, n_steps: int, *, seed: int = 0) -> list[Transition]:
    """Transitions as ``OffPolicyAlgorithm._store_transition`` hands them to a buffer."""
    rng = np.random.default_rng(seed)
    found, before = [], venv.reset()
    for _ in range(n_steps):
        if isinstance(venv.action_space, spaces.Discrete):
            action = rng.integers(venv.action_space.n, size=venv.num_envs)
        else:
            action = rng.uniform(-1, 1, size=(venv.num_envs, *venv.action_space.shape)).astype(np.float32)
        after, reward, done, infos = venv.step(action)
        seen = after.copy(order="K")
        for env, info in enumerate(infos):
            if done[env]:
                seen[env] = info["terminal_observation"]
        found.append((before, seen, action, reward, done, infos))
        before = after
    return found


def random_transitions(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, n_steps: int
) -> list[Transition]:
    """Samples of the spaces, with ends of all kinds."""
    observation_space.seed(0)
    action_space.seed(0)
    rng = np.random.default_rng(0)
    found: list[Transition] = []
    for _ in range(n_steps):
        before, after = (np.stack([np.asarray(observation_space.sample()) for _ in range(n_envs)]) for _ in range(2))
        action = np.stack([np.asarray(action_space.sample()) for _ in range(n_envs)])
        done = rng.random(n_envs) < 0.3
        infos = [{"TimeLimit.truncated": bool(end and rng.random() < 0.5)} for end in done]
        found.append((before, after, action, rng.standard_normal(n_envs), done, infos))
    return found


def both(
    size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, **options: Any
) -> tuple[CompressedReplayBuffer, ReplayBuffer]:
    """Our buffer and SB3's. Options that SB3's does not know go to ours alone."""
    theirs = {name: options[name] for name in ("handle_timeout_termination",) if name in options}
    ours = CompressedReplayBuffer(size, observation_space, action_space, "cpu", n_envs, **options)
    return ours, ReplayBuffer(size, observation_space, action_space, "cpu", n_envs, **theirs)


def silenced(model: Any) -> Any:
    """The model without SB3's own logger, which makes a folder in the machine's temporary one."""
    model.set_logger(Logger(None, []))
    return model


def with_state(call: Callable[[], Any], seed: int) -> tuple[Any, Any]:
    """What a call gives, and the state of NumPy's generator behind it."""
    np.random.seed(seed)
    result = call()
    return result, np.random.get_state()


def assert_same(ours: CompressedReplayBuffer, theirs: ReplayBuffer, batch_size: int = 40, env: Any = None) -> None:
    """Equal sizes, and equal bits of samples and of the generator."""
    for name in ("pos", "full", "buffer_size", "n_envs", "obs_shape", "action_dim", "device"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.size() == theirs.size()
    for name in ("actions", "rewards", "dones", "timeouts"):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        np.testing.assert_array_equal(left[: ours.size()], right[: ours.size()], name)
    if not ours.size():
        return
    for seed in range(3):
        left, left_state = with_state(lambda: ours.sample(batch_size, env=env), seed)
        right, right_state = with_state(lambda: theirs.sample(batch_size, env=env), seed)
        assert type(left) is type(right)
        for name, mine, other in zip(left._fields, left, right, strict=True):
            if mine is None and other is None:
                continue
            assert (mine.dtype, mine.shape, mine.device) == (other.dtype, other.shape, other.device), name
            assert mine.numpy().tobytes() == other.numpy().tobytes(), name
        assert str(left_state) == str(right_state)
        assert (left_state[1] == right_state[1]).all()
