"""Crashes planted at random steps: share that is reproduced.

    python -m benchmarks.crashes [--crashes 20]

Each crash happens in a worker of SharedMemoryVecEnv. ``rl-ext replay`` gets its record. An action above 0.5 counts as a
hit, and the k-th hit fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import io
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tqdm import tqdm

from benchmarks.measure import machine, record
from rl_ext_core.cli import main as rl_ext
from rl_ext_core.errors import WorkerError
from sb3_ext import SharedMemoryVecEnv

KINDS = ("exception", "segfault", "abort", "exit", "hang", "observation")
NAMES = ("own", "LunarLander-v3", "HalfCheetah-v5", "ALE/Pong-v5", "Airstriker-Genesis-v0")
MAX_HITS, MAX_STEPS = 15, 3000


class Draws(gymnasium.Env):
    """Environment of a script, whose observations are random numbers."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        return self.np_random.random(2, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Draw an observation."""
        return self.np_random.random(2, dtype=np.float32), 0.0, False, False, {}


class Planted(gymnasium.Wrapper):
    """Wrapper that fails when a number of actions above 0.5 is reached."""

    def __init__(self, env: gymnasium.Env, kind: str | None, hits: int) -> None:
        super().__init__(env)
        self.kind, self.hits, self.count = kind, hits, 0

    def reset(self, **arguments: Any) -> Any:
        """Start an episode."""
        self.count = 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Step the environment, or fail."""
        self.count += float(np.asarray(action).reshape(-1)[0]) > 0.5
        if self.kind is None or self.count < self.hits:
            return self.env.step(action)
        if self.kind == "exception":
            raise ArithmeticError("the simulation diverged")
        if self.kind == "segfault":
            ctypes.string_at(0)
        if self.kind == "abort":
            os.abort()
        if self.kind == "exit":
            os._exit(9)
        while self.kind == "hang":
            time.sleep(0.05)
        return np.zeros((2, 3), np.float32), 0.0, False, False, {}


def make_env(name: str, kind: str | None, hits: int) -> Any:
    """Return an environment with a planted failure."""
    if name == "own":
        return Planted(Draws(), kind, hits)
    if name == "Airstriker-Genesis-v0":
        import stable_retro

        return Planted(stable_retro.make(name, render_mode="rgb_array"), kind, hits)
    if name.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
        return Planted(gymnasium.make(name, repeat_action_probability=0.25), kind, hits)
    return Planted(gymnasium.make(name), kind, hits)


@contextlib.contextmanager
def working_directory() -> Iterator[Path]:
    """Change to a temporary working directory."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def crash(name: str, kind: str, hits: int) -> None:
    """Step two environments until the second one fails."""
    makers = [functools.partial(make_env, name, None, 1), functools.partial(make_env, name, kind, hits)]
    envs = SharedMemoryVecEnv(makers, step_timeout=1 if kind == "hang" else None)
    with contextlib.suppress(WorkerError):
        envs.seed(3)
        envs.reset()
        for _ in range(MAX_STEPS):
            envs.step(np.array([envs.action_space.sample() for _ in range(2)]))
    with contextlib.suppress(WorkerError):
        envs.close()


def examine(name: str, kind: str, hits: int) -> bool:
    """Crash once, and return whether it is reproduced."""
    with working_directory() as folder:
        crash(name, kind, hits)
        (path,) = folder.glob("crash-*.rlx")
        with contextlib.redirect_stdout(io.StringIO()):
            return rl_ext(["replay", str(path), "--yes"]) == 0


def main() -> None:
    """Plant crashes, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crashes", description=main.__doc__)
    parser.add_argument("--crashes", type=int, default=20)
    count = parser.parse_args().crashes
    print(machine())
    generator, kinds = random.Random(1), list(KINDS)
    reproduced = 0
    for number in tqdm(range(count), leave=False):
        name, kind = NAMES[number % len(NAMES)], kinds[number % len(kinds)]
        found = examine(name, kind, generator.randint(2, MAX_HITS))
        print(f"{name:22} {kind:12} reproduced: {found}")
        reproduced += found
    print(f"of {count}: {reproduced} reproduced at the same step")
    record("crashes", "all", crashes=count, reproduced=reproduced)


if __name__ == "__main__":
    main()
