"""Train SBX's algorithms with SB3's classes and with this package's; print which get the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import sbx
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sb3_ext import CompressedReplayBuffer, CompressedRolloutBuffer, GymVecEnv, SharedMemoryVecEnv
from tests.sb3_ext.buffer_envs import image_env


def parameters_of(model: Any) -> list[np.ndarray]:
    """Return the parameters of all networks in a model's policy."""
    states = [state for name, state in vars(model.policy).items() if name.endswith("_state")]
    return [np.asarray(leaf) for state in states for leaf in jax.tree_util.tree_leaves(state.params)]


def train_weights(algorithm: Any, policy: str, env: VecEnv, steps: int, **options: Any) -> list[np.ndarray]:
    env.seed(1)
    model = algorithm(policy, env, seed=1, batch_size=16, **options)
    model.learn(steps)
    env.close()
    return parameters_of(model)


def all_weights_equal(found: list[list[np.ndarray]]) -> bool:
    """Return whether all models have the same parameters, at least one."""
    first, *others = found
    return bool(first) and all(len(first) == len(b) and all(map(np.array_equal, first, b)) for b in others)


def main() -> dict[str, bool]:
    """Train each algorithm with both packages' classes; return which get equal weights."""
    images = {"buffer_size": 300, "learning_starts": 50}
    dqn = [
        train_weights(sbx.DQN, "CnnPolicy", image_env(n_envs=1), 120, replay_buffer_class=cls, **images)
        for cls in (ReplayBuffer, CompressedReplayBuffer)
    ]
    pendulums = [lambda: gym.make("Pendulum-v1")] * 2
    ppo = [
        train_weights(sbx.PPO, "MlpPolicy", make(pendulums), 128, n_steps=32, n_epochs=2, rollout_buffer_class=cls)
        for make, cls in ((DummyVecEnv, RolloutBuffer), (SharedMemoryVecEnv, CompressedRolloutBuffer))
    ]
    vectorized = gym.make_vec("Pendulum-v1", 2, vectorization_mode="sync")
    sac = [
        train_weights(sbx.SAC, "MlpPolicy", env, 40, buffer_size=500, learning_starts=20)
        for env in (DummyVecEnv(pendulums), GymVecEnv(vectorized))
    ]
    return {"DQN": all_weights_equal(dqn), "PPO": all_weights_equal(ppo), "SAC": all_weights_equal(sac)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
