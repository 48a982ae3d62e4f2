"""Runs that are killed at random moments and resumed, against runs that are not stopped.

    python -m benchmarks.killed_runs [CASE ...] [--kills 2]

Each run trains in a process of its own. SIGKILL ends it at a random time after its first save, and the same command
continues it. At the end, all parameters and optimizer states are compared by a digest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch as th
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from tqdm import tqdm

from benchmarks.measure import machine, record
from sb3_ext import CompressedReplayBuffer, ResumeCallback, SharedMemoryVecEnv, resume

SMALL = {"net_arch": [32]}
OFF_POLICY = {"learning_starts": 100, "buffer_size": 5000, "policy_kwargs": SMALL}
IMAGES = {**OFF_POLICY, "replay_buffer_class": CompressedReplayBuffer, "batch_size": 8, "train_freq": 8}
ON_POLICY = {"n_steps": 64, "batch_size": 32, "n_epochs": 2, "policy_kwargs": SMALL}


def make_pong() -> Any:
    """Return Pong with sticky actions, and SB3's wrappers."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return AtariWrapper(
        Monitor(gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25)), screen_size=42
    )


def make_retro() -> Any:
    """Return stable-retro's own test game with small images."""
    import stable_retro

    env = stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")
    return Monitor(gymnasium.wrappers.ResizeObservation(env, (42, 42)))


def make_minigrid() -> Any:
    """Return a MiniGrid with random obstacles."""
    import minigrid

    env = gymnasium.make("MiniGrid-Dynamic-Obstacles-6x6-v0")
    return Monitor(minigrid.wrappers.FlatObsWrapper(env))


def maker(env_id: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds an environment."""
    return lambda: Monitor(gymnasium.make(env_id, **options))


def make_car() -> Any:
    """Return CarRacing with small images and discrete actions."""
    env = gymnasium.make("CarRacing-v3", continuous=False)
    return Monitor(gymnasium.wrappers.ResizeObservation(env, (42, 42)))


# Class of the model, policy, function that builds an environment, class of the VecEnv, frames, and arguments.
CASES: dict[str, tuple[Any, str, Callable[[], Any], Any, int, dict[str, Any]]] = {
    "pong-dqn": (DQN, "CnnPolicy", make_pong, DummyVecEnv, 4, IMAGES),
    "pong-ppo-workers": (PPO, "CnnPolicy", make_pong, SharedMemoryVecEnv, 4, ON_POLICY),
    "cheetah-sac": (SAC, "MlpPolicy", maker("HalfCheetah-v5"), DummyVecEnv, 0, OFF_POLICY),
    "cheetah-ppo-workers": (PPO, "MlpPolicy", maker("HalfCheetah-v5"), SharedMemoryVecEnv, 0, ON_POLICY),
    "lander-dqn": (DQN, "MlpPolicy", maker("LunarLander-v3"), DummyVecEnv, 0, OFF_POLICY),
    "lander-ppo": (PPO, "MlpPolicy", maker("LunarLander-v3"), DummyVecEnv, 0, ON_POLICY),
    "car-dqn": (DQN, "CnnPolicy", make_car, DummyVecEnv, 0, IMAGES),
    "retro-ppo": (PPO, "CnnPolicy", make_retro, SharedMemoryVecEnv, 0, ON_POLICY),
    "frozen-lake-dqn-workers": (DQN, "MlpPolicy", maker("FrozenLake-v1"), SharedMemoryVecEnv, 0, OFF_POLICY),
    "frozen-lake-ppo": (PPO, "MlpPolicy", maker("FrozenLake-v1"), DummyVecEnv, 0, ON_POLICY),
    "minigrid-dqn": (DQN, "MlpPolicy", make_minigrid, DummyVecEnv, 0, OFF_POLICY),
    "minigrid-ppo-workers": (PPO, "MlpPolicy", make_minigrid, SharedMemoryVecEnv, 0, ON_POLICY),
}
TOTAL, EVERY = 1500, 200


def train(case: str, folder: Path) -> str:
    """Train a run to its end, or from its last save; return the digest of the model."""
    th.set_num_threads(1)
    kind, policy, make_env, vec_env_class, frames, options = CASES[case]
    env = vec_env_class([make_env])
    if frames:
        env = VecFrameStack(env, frames)
    saved = folder.is_dir() and any(folder.glob("save-*"))
    model = resume(folder, env) if saved else kind(policy, env, seed=3, **options)
    model.learn(TOTAL - model.num_timesteps, callback=ResumeCallback(folder, EVERY), reset_num_timesteps=False)
    env.close()
    digest = hashlib.sha256()
    for name, state in sorted(model.get_parameters().items()):
        digest.update(name.encode())
        for tensor in _tensors(state):
            digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(state: Any) -> list[th.Tensor]:
    """Return the tensors in nested dicts and lists."""
    if isinstance(state, th.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def run_with_kills(case: str, folder: Path, kills: int, generator: random.Random) -> str:
    """Train a run that is killed at random moments; return the digest of the model."""
    command = [sys.executable, "-m", "benchmarks.killed_runs", case, "--child", str(folder)]
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        present = set(folder.glob("save-*"))
        while set(folder.glob("save-*")) == present and process.poll() is None:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0, 1.5))
        process.kill()
        process.wait()
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]


def main() -> None:
    """Compare the runs, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.killed_runs", description=main.__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(train(options.cases[0], options.child))
        return
    print(machine())
    if importlib.util.find_spec("minigrid") is None:
        print("MiniGrid is not installed and left out: pip install minigrid")
        options.cases = [case for case in options.cases if not case.startswith("minigrid")]
    generator, equal = random.Random(0), 0
    for case in tqdm(options.cases, leave=False):
        with tempfile.TemporaryDirectory() as folder:
            expected = run_with_kills(case, Path(folder) / "whole", 0, generator)
            found = run_with_kills(case, Path(folder) / "killed", options.kills, generator)
        equal += found == expected
        print(f"{case:26} {options.kills} kills: {'identical' if found == expected else 'DIFFERENT'}")
    record("killed_runs", "all", runs=len(options.cases), kills=options.kills * len(options.cases), identical=equal)
    print(f"{equal} of {len(options.cases)} runs end with identical weights")


if __name__ == "__main__":
    main()
