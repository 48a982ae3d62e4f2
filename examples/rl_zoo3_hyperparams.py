"""Hyperparameters for rl-zoo3 with a compressed replay buffer.

    python -m rl_zoo3.train --algo dqn --env PongNoFrameskip-v4 --conf-file examples/rl_zoo3_hyperparams.py

A Python file is needed, since rl-zoo3's YAML files accept only built-in classes. These are its own hyperparameters for
DQN on Atari games, except the last lines.
"""

from sb3_ext import CompressedReplayBuffer

hyperparams = {
    "atari": {
        "env_wrapper": ["stable_baselines3.common.atari_wrappers.AtariWrapper"],
        "frame_stack": 4,
        "policy": "CnnPolicy",
        "n_timesteps": 1e7,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "learning_starts": 100_000,
        "target_update_interval": 1000,
        "train_freq": 4,
        "gradient_steps": 1,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.01,
        "replay_buffer_class": CompressedReplayBuffer,
        "buffer_size": 1_000_000,  # rl-zoo3 uses 100,000 and optimize_memory_usage
    }
}
