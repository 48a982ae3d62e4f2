"""Crashes planted at random steps: share that is reproduced, shortened, and shown by a script.

    python -m benchmarks.crashes [--crashes 20]

Each crash happens in a worker of SharedMemoryVecEnv. ``rl-ext replay --minimize --script`` gets its record. An action
above 0.5 counts as a hit, and the k-th hit fails. So the shortest episode has k steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import io
import os
import random
import subprocess
import sys
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
from rl_ext_core.recording.capsule import read_capsule
from sb3_ext import SharedMemoryVecEnv

# Exit status of a script that shows the failure.
KINDS = {"exception": 1, "segfault": -11, "abort": -6, "exit": 9, "hang": 1, "observation": 1}
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


def examine(name: str, kind: str, hits: int) -> tuple[bool, bool, bool]:
    """Crash once; return whether it is reproduced, is of the shortest length, and is shown by a script."""
    with working_directory() as folder:
        crash(name, kind, hits)
        (path,) = folder.glob("crash-*.rlx")
        with contextlib.redirect_stdout(io.StringIO()):
            status = rl_ext(["replay", str(path), "--yes", "--minimize", "--script", "repro.py"])
        shorter = next(folder.glob("*-minimized.rlx"), path)
        # The script loads this file, which imports its neighbors.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "repro.py"], env=environ, capture_output=True, text=True, check=False)
        shows_failure = done.returncode == KINDS[kind] and "NotFoundError" not in done.stderr
        return status == 0, read_capsule(shorter).step == hits, shows_failure


def main() -> None:
    """Plant crashes, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crashes", description=main.__doc__)
    parser.add_argument("--crashes", type=int, default=20)
    count = parser.parse_args().crashes
    print(machine())
    generator, kinds = random.Random(1), list(KINDS)
    found = np.zeros((count, 3), bool)
    for number in tqdm(range(count), leave=False):
        name, kind = NAMES[number % len(NAMES)], kinds[number % len(kinds)]
        found[number] = examine(name, kind, generator.randint(2, MAX_HITS))
        print(f"{name:22} {kind:12} reproduced, shortest, script: {found[number].tolist()}")
    reproduced, shortest, scripts = found.sum(0).tolist()
    print(
        f"of {count}: {reproduced} reproduced at the same step, {shortest} shortened to the minimum, {scripts} scripts"
    )
    record("crashes", "all", crashes=count, reproduced=reproduced, shortest=shortest, scripts=scripts)


if __name__ == "__main__":
    main()
