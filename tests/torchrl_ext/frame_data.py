"""Transitions with images, as TorchRL's collectors return them, and buffers for them."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.environments import SamplingEnv
from torchrl_ext import FrameStorage, GymWrapper

STACK, HEIGHT, WIDTH = 4, 28, 24
PIXELS: list[Any] = ["pixels", ("next", "pixels")]


class Videos:
    """Environments whose observations are stacks of frames with a moving block.

    :param n_envs: number of environments
    :param seed: seed of all random numbers
    :param end: probability that a step terminates the episode
    :param smooth: whether the background is smooth instead of noise
    """

    def __init__(self, n_envs: int = 2, *, seed: int = 0, end: float = 0.08, smooth: bool = False) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.end = end
        self.scenes = self._draw_integers(256, n_envs, HEIGHT, WIDTH).to(torch.uint8)
        if smooth:
            slopes = self._draw_integers(9, n_envs, 2) + 1
            lines = slopes[:, :1, None] * torch.arange(HEIGHT)[:, None] + slopes[:, 1:, None] * torch.arange(WIDTH)
            self.scenes = (lines % 256).to(torch.uint8)
        self.stacks = torch.stack([self._first_stack(env) for env in range(n_envs)])
        self.steps = torch.zeros(n_envs, dtype=torch.int64)
        self.trajectories = torch.arange(n_envs)

    def _draw_integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.random)

    def _draw_frame(self, env: int) -> torch.Tensor:
        """Draw an environment's next frame: its background with a block at a random place."""
        frame = self.scenes[env].clone()
        y, x = self._draw_integers(HEIGHT - 3, 2).tolist()
        frame[y : y + 3, x : x + 3] = int(self._draw_integers(256, 1))
        return frame

    def _first_stack(self, env: int) -> torch.Tensor:
        return torch.cat([torch.zeros(STACK - 1, HEIGHT, WIDTH, dtype=torch.uint8), self._draw_frame(env)[None]])

    def collect(self, steps: int) -> TensorDict:
        return torch.stack([self._step() for _ in range(steps)], 1)

    def _step(self) -> TensorDict:
        n = len(self.stacks)
        before = self.stacks.clone()
        after = torch.cat([before[:, 1:], torch.stack([self._draw_frame(env)[None] for env in range(n)])], 1)
        terminated = torch.rand(n, 1, generator=self.random) < self.end
        truncated = torch.rand(n, 1, generator=self.random) < self.end / 2
        done = terminated | truncated
        false = torch.zeros_like(done)
        step = TensorDict(
            {
                "pixels": before,
                "inner": {"vector": torch.rand(n, 3, generator=self.random)},
                "action": self._draw_integers(5, n),
                "collector": {"traj_ids": self.trajectories.clone()},
                "step_count": self.steps[:, None].clone(),
                "done": false,
                "terminated": false.clone(),
                "truncated": false.clone(),
                "next": {
                    "pixels": after,
                    "inner": {"vector": torch.rand(n, 3, generator=self.random)},
                    "reward": torch.rand(n, 1, generator=self.random),
                    "done": done,
                    "terminated": terminated,
                    "truncated": truncated,
                },
            },
            batch_size=[n],
        )
        self.stacks, self.steps = after, self.steps + 1
        for env in done[:, 0].nonzero()[:, 0].tolist():
            self.stacks[env], self.steps[env] = self._first_stack(env), 0
            self.trajectories[env] = int(self.trajectories.max()) + 1
        return step


class Twins:
    """Buffers over FrameStorage and LazyTensorStorage that get the same calls and seeds.

    :param arguments: arguments of both buffers, as functions, because each buffer needs its own sampler
    """

    def __init__(
        self, size: int, *, ndim: int = 1, cls: Any = TensorDictReplayBuffer, options: Any = None, **arguments: Any
    ) -> None:
        self.ours, self.theirs = (
            cls(storage=storage, **{name: value() for name, value in arguments.items()})
            for storage in (FrameStorage(size, ndim=ndim, **(options or {})), LazyTensorStorage(size, ndim=ndim))
        )
        self.draws = 0

    def call_both(self, use: Any) -> tuple[Any, Any]:
        """Call a function with each buffer after equal seeds, and return both results."""
        results = []
        self.draws += 1
        for buffer in (self.ours, self.theirs):
            torch.manual_seed(self.draws)
            np.random.seed(self.draws)
            results.append(use(buffer))
        return results[0], results[1]

    def extend(self, data: TensorDict) -> None:
        ours, theirs = self.call_both(lambda buffer: buffer.extend(data.clone()))
        if theirs is not None:
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))

    def check(self, batch_size: int = 32) -> None:
        assert len(self.ours) == len(self.theirs)
        assert_same(self.ours[:], self.theirs[:])
        for _ in range(3):
            assert_same(*self.call_both(lambda buffer: buffer.sample(batch_size)))


def make_transitions(n: int, **options: Any) -> TensorDict:
    return Videos(1, **options).collect(n).reshape(-1)


def make_buffer(size: int, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=FrameStorage(size, **options), batch_size=16)


# Ways to save a buffer, and to load it into a fresh one.


def through_files(buffer: Any, fresh: Any, path: Path) -> Any:
    buffer.dumps(path)
    fresh.loads(path)
    return fresh


def through_state(buffer: Any, fresh: Any, path: Path) -> Any:
    torch.save(buffer.storage.state_dict(), path)
    fresh.load_state_dict({**buffer.state_dict(), "_storage": torch.load(path, weights_only=True)})
    if isinstance(fresh.storage, LazyTensorStorage):  # loading drops its device
        fresh.storage._storage = fresh.storage._storage.to("cpu")
    return fresh


def through_pickle(buffer: Any, fresh: Any, path: Path) -> Any:
    return pickle.loads(pickle.dumps(buffer))


def collect_into(buffer: Any, seed: int, batches: list[int]) -> None:
    torch.set_num_threads(1)
    videos = Videos(2, seed=seed)
    for steps in batches:
        buffer.extend(videos.collect(steps).reshape(-1))


def make_film() -> Any:
    """Make an environment of stacked frames that depend only on the seed of the first reset."""
    noise = SamplingEnv(spaces.Box(0, 255, (28, 24), np.uint8), spaces.Discrete(2), length=9)
    return GymWrapper(FrameStackObservation(noise, 4))


def count_elements(rows: Any, keys: list[Any]) -> Counter[str]:
    """Return a Counter of element hashes, computed from the values under some keys."""
    arrays = [rows[key].numpy().reshape(len(rows), -1) for key in keys]
    return Counter(
        hashlib.sha256(b"".join(array[i].tobytes() for array in arrays)).hexdigest() for i in range(len(rows))
    )
