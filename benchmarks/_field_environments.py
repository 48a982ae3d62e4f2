"""Environments of ``benchmarks.field``, in a module that workers import quickly, and its start in a fresh process."""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium
import numpy as np

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
    """Return pixels for TorchRL.

    :param slow: Whether episodes are short, and a reset of the first environment takes 200 ms.
    :param index: Number of the environment.
    """
    from torchrl.envs import GymWrapper

    return GymWrapper(Pixels(16 if slow else 200, 0.2 if slow and index == 0 else 0.0))


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


def make_slow(delay: float) -> Any:
    """Return an environment for TorchRL that takes time to build."""
    from torchrl.envs import GymWrapper

    time.sleep(delay)
    return GymWrapper(gymnasium.make("CartPole-v1"))


def main() -> None:
    """Print the seconds from the constructor of ParallelEnv to its first observation."""
    from functools import partial

    library, workers, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if library == "ours":
        from torchrl_ext import ParallelEnv
    else:
        from torchrl.envs import ParallelEnv
    begin = time.perf_counter()
    options = {} if library == "ours" else {"mp_start_method": "spawn"}
    env = ParallelEnv(workers, partial(make_slow, delay), **options)
    env.reset()
    print(time.perf_counter() - begin)
    env.close()


if __name__ == "__main__":
    main()
