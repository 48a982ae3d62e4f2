"""Environments of ``benchmarks.field``, in a module that workers import quickly, and its start in a fresh process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

# Names of the competitors of the start.
STARTS = (TORCHRL, OURS, VECTORIZED) = ("TorchRL ParallelEnv", "ours, ParallelEnv", "ours, SharedMemoryVectorEnv")
PIXELS = (3, 84, 84)
STEP_S = 0.001


class Pixels(gymnasium.Env[Any, Any]):
    """Environment with pixels that takes a millisecond per step.

    :param length: Steps until the time limit.
    :param reset_s: Seconds of a reset.
    """

    observation_space = gymnasium.spaces.Dict({"pixels": gymnasium.spaces.Box(0, 255, PIXELS, np.uint8)})
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, length: int, reset_s: float) -> None:
        self._length, self._reset_s = length, reset_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return zeros."""
        super().reset(seed=seed)
        time.sleep(self._reset_s)
        self._steps = 0
        self._frame = np.zeros(PIXELS, np.uint8)
        return {"pixels": self._frame}, {}

    def step(self, action: Any) -> Any:
        """Wait, and return the next frame."""
        time.sleep(STEP_S)
        self._frame = self._frame + np.uint8(1)
        self._steps += 1
        return {"pixels": self._frame}, 0.0, False, self._steps >= self._length, {}


def make_pixels(*, slow: bool = False, index: int = 0) -> Any:
    """Return pixels for TorchRL; see :func:`make_plain_pixels`."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make_plain_pixels(slow=slow, index=index))


def make_plain_pixels(*, slow: bool = False, index: int = 0) -> Pixels:
    """Return pixels for gymnasium.

    :param slow: Whether episodes are short, and a reset of the first environment takes 200 ms.
    :param index: Number of the environment.
    """
    return Pixels(16 if slow else 200, 0.2 if slow and index == 0 else 0.0)


def make_pong() -> Any:
    """Return Pong with stacks of four frames, (84, 84, 4)."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    env = gymnasium.wrappers.FrameStackObservation(env, 4)
    # Contiguous, as from vectorized environments. Otherwise most of the time of all buffers goes to reordering bytes.
    return gymnasium.wrappers.TransformObservation(
        env,
        lambda frames: np.ascontiguousarray(np.moveaxis(frames, 0, -1)),
        gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8),
    )


def play_pong(count: int) -> Iterator[tuple[Any, Any, bool]]:
    """Yield stacks of random play in Pong, the next ones, and whether the episode ends."""
    env = make_pong()
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(count):
        following, _, terminated, truncated, _ = env.step(env.action_space.sample())
        yield observation, following, terminated or truncated
        observation = env.reset()[0] if terminated or truncated else following


def make_slow(delay: float) -> Any:
    """Return an environment for TorchRL that takes time to build."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make_plain_slow(delay))


def make_plain_slow(delay: float) -> Any:
    """Return an environment for gymnasium that takes time to build."""
    time.sleep(delay)
    return gymnasium.make("CartPole-v1")


def main() -> None:
    """Print the seconds from the constructor of parallel environments to their first observation."""
    from functools import partial

    from torchrl.envs import ParallelEnv

    import torchrl_ext
    from rl_ext_core.vector import SharedMemoryVectorEnv

    name, workers, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    begin = time.perf_counter()
    env: Any
    if name == TORCHRL:
        env = ParallelEnv(workers, partial(make_slow, delay), mp_start_method="spawn")
    elif name == OURS:
        env = torchrl_ext.ParallelEnv(workers, partial(make_slow, delay))
    else:
        env = torchrl_ext.GymWrapper(SharedMemoryVectorEnv([partial(make_plain_slow, delay)] * workers))
    env.reset()
    print(time.perf_counter() - begin)
    env.close()


if __name__ == "__main__":
    main()
